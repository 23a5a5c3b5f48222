//! Messages that are damaged, cut, swapped, repeated or of another step: refused, named, and of no effect.

use crate::hand::{Place, carry, give, protocols};
use crate::support::{STRATEGIES, gradient, model, output};
use adacomp::{Outcome, Policy};
use adacomp_exchange::{ExchangeError, Protocol, Strategy};
use std::collections::HashMap;

const LEARNERS: usize = 3;

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}

/// Runs one first step with a change to one message; the messages of a second step come from `other`.
fn try_fault(strategy: Strategy, fault: Fault, seed: u64, kept: &Kept) -> String {
    let mut random = Random(seed | 1);
    let mut protocols = protocols(LEARNERS, strategy);
    give(&mut protocols, 0);
    let rounds = protocols[0].rounds();
    // A message to oneself is not carried anywhere.
    let target = loop {
        let target = (random.below(rounds), random.below(LEARNERS), random.below(LEARNERS));
        if target.1 != target.2 {
            break target;
        }
    };
    let (amount, at) = (random.below(255) + 1, random.below(1 << 20));
    let other = (target.1 + 1 + random.below(LEARNERS - 1)) % LEARNERS;
    let mut changed = false;
    let results = carry(&mut protocols, |place, message| {
        if place != target {
            return;
        }
        let before = message.clone();
        match fault {
            Fault::Damaged => {
                let at = at % message.len();
                message[at] ^= amount as u8;
            }
            Fault::Truncated => message.truncate(at % message.len()),
            Fault::Extended => message.push(amount as u8),
            Fault::Swapped => {
                *message = kept.messages[&(strategy.name(), 0, (place.0, other, place.2))].clone()
            }
            Fault::OtherStep => *message = kept.messages[&(strategy.name(), 1, place)].clone(),
            Fault::OtherRound => {
                let round = (place.0 + 1) % rounds;
                *message = kept.messages[&(strategy.name(), 0, (round, place.1, place.2))].clone();
            }
        }
        changed = *message != before;
    });
    assert!(changed, "{strategy:?} {fault:?} {target:?}");
    let mut reasons = results.into_iter().map(|result| match result {
        Err(ExchangeError::Message { step: 0, sender, receiver, reason }) => {
            assert_eq!((sender, receiver), (target.1, target.2), "{strategy:?} {fault:?}: {reason}");
            reason
        }
        other => panic!("{strategy:?} {fault:?} {target:?}: {other:?}"),
    });
    let reason = reasons.next().unwrap();
    assert!(reasons.all(|other| other == reason), "every learner gets the same error");
    // Nothing was lost and nothing applied: what was selected is back in the residuals.
    for (learner, protocol) in protocols.iter_mut().enumerate() {
        let expected = gradient(learner, 0, 2, 2400);
        assert_eq!(protocol.compressor(learner).unwrap().residual(2).unwrap(), expected);
    }
    reason
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Damaged,
    Truncated,
    Extended,
    Swapped,
    OtherStep,
    OtherRound,
}

/// Good messages, by strategy, step and place.
struct Kept {
    messages: HashMap<(&'static str, u64, Place), Vec<u8>>,
}

fn keep() -> Kept {
    let mut messages = HashMap::new();
    for strategy in STRATEGIES {
        let mut protocols = protocols(LEARNERS, strategy);
        for step in 0..2 {
            give(&mut protocols, step);
            let results = carry(&mut protocols, |place, message| {
                messages.insert((strategy.name(), step, place), message.clone());
            });
            assert!(results.iter().all(|result| matches!(result, Ok((Outcome::Averaged, _)))));
        }
    }
    Kept { messages }
}

#[test]
fn ten_thousand_bad_messages_are_refused_and_named() {
    let kept = keep();
    let mut reasons: HashMap<(&str, String), usize> = HashMap::new();
    let mut count = 0;
    for seed in 0..440 {
        for strategy in STRATEGIES {
            for fault in [
                Fault::Damaged,
                Fault::Truncated,
                Fault::Extended,
                Fault::Swapped,
                Fault::OtherStep,
                Fault::OtherRound,
            ] {
                if fault == Fault::OtherRound && strategy == Strategy::Gather {
                    continue;
                }
                let reason = try_fault(strategy, fault, seed * 7919 + 13, &kept);
                let expected = match fault {
                    Fault::Swapped => Some("sent by learner"),
                    Fault::OtherStep => Some("it is of step 1, expected step 0"),
                    _ => None,
                };
                let misrouted = expected.is_none_or(|expected| reason.contains(expected));
                assert!(misrouted, "{strategy:?} {fault:?}: {reason}");
                *reasons.entry((strategy.name(), format!("{fault:?}"))).or_default() += 1;
                count += 1;
            }
        }
    }
    assert!(count >= 9_600, "{count}");
    // And every bit of every message of the smallest strategy's rounds.
    for strategy in [Strategy::Gather, Strategy::Reduce] {
        let length = kept.messages[&(strategy.name(), 0, (0, 1, 0))].len();
        for bit in (0..8 * length).step_by(if strategy == Strategy::Gather { 37 } else { 1 }) {
            let mut protocols = protocols(LEARNERS, strategy);
            give(&mut protocols, 0);
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
        protocols[1] = Protocol::new(other, strategy, adacomp::Codec::Rice, 2, 1..2, usize::MAX).unwrap();
        give(&mut protocols, 0);
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
        give(&mut protocols, 0);
        let results = carry(&mut protocols, |place, message| {
            if place == (0, 1, 2) {
                message.pop();
            }
        });
        assert!(results.iter().all(Result::is_err));
        for step in 1..4 {
            give(&mut protocols, step);
            let results = carry(&mut protocols, |_, _| {});
            let averages: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
            assert!(averages.iter().all(|average| *average == averages[0]), "{strategy:?}");
        }
    }
}

#[test]
fn a_nan_on_one_learner_drops_the_step_on_all() {
    for strategy in STRATEGIES {
        for bad_layer in [2, 3] {
            let mut protocols = protocols(LEARNERS, strategy);
            give(&mut protocols, 0);
            let _ = carry(&mut protocols, |_, _| {});
            let before: Vec<_> = (0..LEARNERS)
                .map(|learner| protocols[learner].compressor(learner).unwrap().residual(0).unwrap().to_vec())
                .collect();
            let layout = model();
            for (learner, protocol) in protocols.iter_mut().enumerate() {
                for (layer, parameter) in layout.layers().iter().enumerate() {
                    let mut gradient = gradient(learner, 1, layer, parameter.elements());
                    if (learner, layer) == (1, bad_layer) {
                        gradient[5] = f32::NAN;
                    }
                    protocol.give(learner, layer, gradient.as_slice().into()).unwrap();
                }
            }
            for result in carry(&mut protocols, |_, _| {}) {
                let (outcome, written) = result.unwrap();
                assert_eq!(outcome, Outcome::NonFinite { learner: 1 }, "{strategy:?}");
                assert_eq!(written, output(&layout));
            }
            for (learner, before) in before.iter().enumerate() {
                let after = protocols[learner].compressor(learner).unwrap().residual(0).unwrap();
                let gradient = gradient(learner, 1, 0, 1152);
                let expected: Vec<f32> = before.iter().zip(&gradient).map(|(r, dw)| r + dw).collect();
                assert_eq!(after, expected, "{strategy:?}");
            }
            give(&mut protocols, 2);
            assert!(
                carry(&mut protocols, |_, _| {})
                    .iter()
                    .all(|result| matches!(result, Ok((Outcome::Averaged, _))))
            );
        }
    }
}
