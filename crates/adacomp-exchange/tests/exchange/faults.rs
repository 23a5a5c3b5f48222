//! Messages that are damaged, cut, swapped, repeated or of another step: refused, named, and of no effect.

use crate::draw::gradient;
use crate::hand::{Place, carry, protocols, submit};
use crate::support::{Residuals, STRATEGIES, TIMEOUT, model, output, residuals, slices};
use adacomp::{Outcome, Parameter, Policy};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{Exchange, ExchangeError, Messages, SendVerdict, Strategy, Threads, Transport};
use fastrand::Rng;
use std::collections::HashMap;
use std::sync::Arc;

const LEARNERS: usize = 3;

/// Runs a good step, then one with a change to one message.
fn try_fault(strategy: Strategy, fault: Fault, seed: u64, kept: &Kept) -> String {
    let mut random = Rng::with_seed(seed);
    let mut protocols = protocols(LEARNERS, strategy);
    submit(&mut protocols, 0);
    assert!(carry(&mut protocols, |_, _| {}).iter().all(Result::is_ok));
    let before: Vec<_> =
        protocols.iter_mut().enumerate().map(|(learner, protocol)| residuals(protocol, learner)).collect();
    submit(&mut protocols, 1);
    let rounds = protocols[0].rounds();
    // A message to oneself is not carried anywhere.
    let target = loop {
        let target = (random.usize(..rounds), random.usize(..LEARNERS), random.usize(..LEARNERS));
        if target.1 != target.2 {
            break target;
        }
    };
    let (amount, at) = (random.usize(..255) + 1, random.usize(..1 << 20));
    let other = (target.1 + 1 + random.usize(..LEARNERS - 1)) % LEARNERS;
    let mut changed = false;
    let good = |step: u64, place: Place| kept.messages[&(strategy, step, place)].clone();
    let results = carry(&mut protocols, |place, message| {
        if place != target {
            return;
        }
        let sent = message.clone();
        match fault {
            Fault::Damaged => {
                let at = at % message.len();
                message[at] ^= amount as u8;
            }
            Fault::Truncated => message.truncate(at % message.len()),
            Fault::Extended => message.push(amount as u8),
            Fault::Swapped => *message = good(1, (place.0, other, place.2)),
            Fault::Repeated => *message = good(0, place),
            Fault::Early => *message = good(2, place),
            Fault::OtherRound => *message = good(1, ((place.0 + 1) % rounds, place.1, place.2)),
        }
        changed = *message != sent;
    });
    assert!(changed, "{strategy:?} {fault:?} {target:?}");
    let mut reasons = results.into_iter().map(|result| match result {
        Err(ExchangeError::Message { step: 1, sender, receiver, reason }) => {
            assert_eq!((sender, receiver), (target.1, target.2), "{strategy:?} {fault:?}: {reason}");
            reason
        }
        other => panic!("{strategy:?} {fault:?} {target:?}: {other:?}"),
    });
    let reason = reasons.next().unwrap();
    assert!(reasons.all(|other| other == reason), "every learner gets the same error");
    check_dropped(&mut protocols, &before, 1, strategy);
    reason
}

/// Nothing was lost and nothing applied: what was selected is back in the residuals, and owners keep what they kept.
fn check_dropped(protocols: &mut [ByHand], before: &[Residuals], step: u64, strategy: Strategy) {
    let layout = model();
    for (learner, protocol) in protocols.iter_mut().enumerate() {
        let after = residuals(protocol, learner);
        for (layer, ((own, owned), (own_before, owned_before))) in
            after.iter().zip(&before[learner]).enumerate()
        {
            assert_eq!(owned, owned_before, "{strategy:?}");
            let gradient = gradient(learner, step, layer, layout[layer].elements());
            let sum = |(r, dw): (&u32, &f32)| (f32::from_bits(*r) + dw).to_bits();
            assert_eq!(*own, own_before.iter().zip(&gradient).map(sum).collect::<Vec<_>>(), "{strategy:?}");
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Damaged,
    Truncated,
    Extended,
    Swapped,
    Repeated,
    Early,
    OtherRound,
}

/// Good messages, by strategy, step and place.
struct Kept {
    messages: HashMap<(Strategy, u64, Place), Vec<u8>>,
}

fn keep() -> Kept {
    let mut messages = HashMap::new();
    for strategy in STRATEGIES {
        let mut protocols = protocols(LEARNERS, strategy);
        for step in 0..3 {
            submit(&mut protocols, step);
            let results = carry(&mut protocols, |place, message| {
                messages.insert((strategy, step, place), message.clone());
            });
            assert!(results.iter().all(|result| matches!(result, Ok((Outcome::Averaged, _)))));
        }
    }
    Kept { messages }
}

#[test]
fn ten_thousand_bad_messages_are_refused_and_named() {
    let kept = keep();
    let mut count = 0;
    let faults = [
        (Fault::Damaged, ""),
        (Fault::Truncated, ""),
        (Fault::Extended, ""),
        (Fault::Swapped, "sent by learner"),
        (Fault::Repeated, "it is of step 0, expected step 1"),
        (Fault::Early, "it is of step 2, expected step 1"),
        (Fault::OtherRound, ""),
    ];
    for seed in 0..380 {
        for strategy in STRATEGIES {
            for (fault, named) in faults {
                if (fault, strategy) != (Fault::OtherRound, Strategy::Gather) {
                    let reason = try_fault(strategy, fault, seed * 7919 + 13, &kept);
                    assert!(reason.contains(named), "{strategy:?} {fault:?}: {reason}");
                    count += 1;
                }
            }
        }
    }
    // And every bit of one message of scales, and some of a frame.
    for strategy in [Strategy::Gather, Strategy::Reduce] {
        let length = kept.messages[&(strategy, 0, (0, 1, 0))].len();
        for bit in (0..8 * length).step_by(if strategy == Strategy::Gather { 37 } else { 1 }) {
            let mut protocols = protocols(LEARNERS, strategy);
            submit(&mut protocols, 0);
            let results = carry(&mut protocols, |place, message| {
                if place == (0, 1, 0) {
                    message[bit / 8] ^= 1 << (bit % 8);
                }
            });
            assert!(results.iter().all(Result::is_err), "{strategy:?} bit {bit}");
            count += 1;
        }
    }
    assert!(count >= 10_000, "{count}");
}

#[test]
fn a_learner_with_another_model_is_refused_in_the_step_too() {
    for strategy in STRATEGIES {
        let mut protocols = protocols(2, strategy);
        let other = crate::support::model_with(Policy::adacomp().soft_threshold(1.5));
        protocols[1] = ByHand::unconnected((), other, strategy, 2, 1..2).unwrap();
        submit(&mut protocols, 0);
        let results = carry(&mut protocols, |_, _| {});
        assert!(results.iter().all(Result::is_err), "{strategy:?}");
        let error = results[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("another model or policy"), "{strategy:?}: {error}");
    }
}

#[test]
fn after_a_refused_step_the_learners_can_go_on() {
    for strategy in STRATEGIES {
        let mut protocols = protocols(LEARNERS, strategy);
        submit(&mut protocols, 0);
        let results = carry(&mut protocols, |place, message| {
            if place == (0, 1, 2) {
                message.pop();
            }
        });
        assert!(results.iter().all(Result::is_err));
        for step in 1..4 {
            submit(&mut protocols, step);
            let results = carry(&mut protocols, |_, _| {});
            let averages: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
            assert!(averages.iter().all(|average| *average == averages[0]), "{strategy:?}");
        }
    }
}

#[test]
fn a_flush_that_is_dropped_leaves_owners_what_they_kept() {
    let mut protocols = protocols(LEARNERS, Strategy::Sharded);
    submit(&mut protocols, 0);
    assert!(carry(&mut protocols, |_, _| {}).iter().all(Result::is_ok));
    let before: Vec<_> =
        protocols.iter_mut().enumerate().map(|(learner, protocol)| residuals(protocol, learner)).collect();
    protocols.iter_mut().for_each(|protocol| protocol.set_sending(adacomp::Sending::Flush));
    submit(&mut protocols, 1);
    // In the last round, when owners have taken the gradients in.
    let results = carry(&mut protocols, |place, message| {
        if place == (1, 0, 2) {
            message[5] ^= 1;
        }
    });
    assert!(results.iter().all(Result::is_err));
    check_dropped(&mut protocols, &before, 1, Strategy::Sharded);
}

#[test]
fn a_verdict_that_cannot_be_read_is_an_error_for_its_receiver() {
    for change in [0, 3, 6] {
        let mut protocols = protocols(2, Strategy::Gather);
        submit(&mut protocols, 0);
        let frames: Vec<_> = protocols.iter_mut().map(|protocol| protocol.outgoing(0, 0)).collect();
        let frames = frames.into_iter().flat_map(|outgoing| match outgoing {
            Messages::AllGather(messages) => messages,
            Messages::AllToAll(_) => unreachable!("gather sends to all"),
        });
        let incoming = Messages::AllGather(frames.collect());
        protocols.iter_mut().for_each(|protocol| protocol.incoming(0, 0, &incoming).unwrap());
        let mut verdicts: Vec<_> = protocols.iter_mut().flat_map(ByHand::verdict).collect();
        verdicts[1][change] ^= 1;
        let verdicts: Vec<_> = verdicts.into_iter().map(Arc::new).collect();
        let mut written = output(&model());
        let error = protocols[0].conclude(&verdicts, Some(&mut slices(&mut written))).unwrap_err();
        assert!(matches!(error, ExchangeError::Verdict { step: 0, learner: 1, .. }), "{error}");
        let error = protocols[1].conclude(&verdicts[..1], Some(&mut slices(&mut written))).unwrap_err();
        assert!(matches!(error, ExchangeError::Transport { .. }), "{error}");
        assert_eq!(written, output(&model()));
    }
}

#[test]
fn missing_messages_are_an_error() {
    for strategy in STRATEGIES {
        let mut protocols = protocols(2, strategy);
        submit(&mut protocols, 0);
        for incoming in
            [Messages::AllGather(vec![Arc::default()]), Messages::AllToAll(vec![vec![Vec::new()]])]
        {
            assert!(protocols[0].incoming(0, 0, &incoming).is_err());
        }
    }
}

/// Layers of one shape would be averaged with each other.
#[test]
fn learners_with_other_groups_are_told() {
    let parameters = ["one", "other"].map(|name| Parameter::new(name, &[40, 60]));
    let layout = Arc::new(Policy::adacomp().layout(parameters).unwrap());
    for strategy in STRATEGIES {
        let threads = Threads { timeout: TIMEOUT, ..Threads::new(2) };
        let errors = threads.run(|transport| {
            let learner = transport.hosted().start;
            let mut exchange = Exchange::new(transport, layout.clone(), strategy).unwrap();
            for layer in [learner, 1 - learner] {
                exchange.begin_group(&[layer]).unwrap();
                exchange.submit(learner, layer, gradient(learner, 0, layer, 2400).as_slice().into()).unwrap();
            }
            exchange.finish_with(SendVerdict::AfterWriting, |_| true).unwrap_err().to_string()
        });
        let told =
            if strategy == Strategy::Gather { "section 0 is of layer" } else { "another group of layers" };
        assert!(errors.iter().all(|error| error.contains(told)), "{strategy:?}: {errors:?}");
    }
}

#[test]
fn learners_in_different_modes_are_told() {
    for strategy in [Strategy::Reduce, Strategy::Sharded] {
        let mut protocols = protocols(2, strategy);
        protocols[1].set_sending(adacomp::Sending::Flush);
        submit(&mut protocols, 0);
        for result in carry(&mut protocols, |_, _| {}) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("its layers are sent whole"), "{error}");
        }
    }
}

#[test]
fn a_nan_on_one_learner_drops_the_step_on_all() {
    for strategy in STRATEGIES {
        for bad_layer in [2, 3] {
            let mut protocols = protocols(LEARNERS, strategy);
            submit(&mut protocols, 0);
            let _ = carry(&mut protocols, |_, _| {});
            let before: Vec<_> = protocols
                .iter_mut()
                .enumerate()
                .map(|(learner, protocol)| residuals(protocol, learner))
                .collect();
            let layout = model();
            for (learner, protocol) in protocols.iter_mut().enumerate() {
                for (layer, parameter) in layout.layers().iter().enumerate() {
                    let mut gradient = gradient(learner, 1, layer, parameter.elements());
                    if (learner, layer) == (1, bad_layer) {
                        gradient[5] = f32::NAN;
                    }
                    protocol.submit(learner, layer, gradient.as_slice().into()).unwrap();
                }
            }
            for result in carry(&mut protocols, |_, _| {}) {
                let (outcome, written) = result.unwrap();
                assert_eq!(outcome, Outcome::NonFinite { learner: 1 }, "{strategy:?}");
                assert_eq!(written, output(&layout));
            }
            for (learner, protocol) in protocols.iter_mut().enumerate() {
                let after = residuals(protocol, learner);
                let gradient = gradient(learner, 1, 0, 1152);
                let sum = |(r, dw): (&u32, &f32)| (f32::from_bits(*r) + dw).to_bits();
                let expected: Vec<_> = before[learner][0].0.iter().zip(&gradient).map(sum).collect();
                assert_eq!(after[0].0, expected, "{strategy:?}");
                assert!(
                    after.iter().zip(&before[learner]).all(|(after, before)| after.1 == before.1),
                    "{strategy:?}"
                );
            }
            submit(&mut protocols, 2);
            assert!(
                carry(&mut protocols, |_, _| {})
                    .iter()
                    .all(|result| matches!(result, Ok((Outcome::Averaged, _))))
            );
        }
    }
}
