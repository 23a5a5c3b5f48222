//! Finite gradients whose sum is not finite, and messages with values that are not.

use crate::draw::gradient;
use crate::hand::{Concluded, carry, protocols, submit};
use crate::support::{Residuals, STRATEGIES, model, output, residuals};
use adacomp::Outcome;
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{ExchangeError, Strategy};

const LEARNERS: usize = 3;
const HUGE: f32 = 3e38;
const CONVOLUTION: usize = 0;
const BIAS: usize = 3;

fn all_residuals(protocols: &mut [ByHand]) -> Vec<Residuals> {
    protocols.iter_mut().enumerate().map(|(learner, protocol)| residuals(protocol, learner)).collect()
}

/// Runs a step in which a layer of some learners is huge everywhere. Returns what each learner concludes.
fn run(protocols: &mut [ByHand], step: u64, huge: impl Fn(usize, usize) -> bool) -> Vec<Concluded> {
    for (learner, protocol) in protocols.iter_mut().enumerate() {
        for (layer, parameter) in model().layers().iter().enumerate() {
            let mut gradient = gradient(learner, step, layer, parameter.elements());
            if huge(learner, layer) {
                gradient.fill(HUGE);
            }
            protocol.submit(learner, layer, gradient.as_slice().into()).unwrap();
        }
    }
    carry(protocols, |_, _| {})
}

#[test]
fn a_sum_that_overflows_drops_the_step_on_all() {
    for (strategy, huge) in
        STRATEGIES.into_iter().flat_map(|strategy| [(strategy, CONVOLUTION), (strategy, BIAS)])
    {
        // It adds up signs, and its average always fits.
        if (strategy, huge) == (Strategy::Reduce, CONVOLUTION) {
            continue;
        }
        let mut protocols = protocols(LEARNERS, strategy);
        assert!(run(&mut protocols, 0, |_, _| false).iter().all(Result::is_ok));
        let before = all_residuals(&mut protocols);
        let concluded = run(&mut protocols, 1, |_, layer| layer == huge);
        let outcomes: Vec<_> = concluded.into_iter().map(|result| result.unwrap()).collect();
        assert!(matches!(outcomes[0].0, Outcome::NonFinite { .. }), "{strategy}: {:?}", outcomes[0].0);
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{strategy}");
        assert_eq!(outcomes[0].1, output(&model()));
        for (learner, (after, before)) in all_residuals(&mut protocols).iter().zip(&before).enumerate() {
            for (layer, ((own, owned), (own_before, owned_before))) in after.iter().zip(before).enumerate() {
                assert_eq!(owned, owned_before, "{strategy}: owners undo what came to them");
                let mut gradient = gradient(learner, 1, layer, model()[layer].elements());
                if layer == huge {
                    gradient.fill(HUGE);
                }
                let sums =
                    own_before.iter().zip(&gradient).map(|(r, dw)| (f32::from_bits(*r) + dw).to_bits());
                assert_eq!(*own, sums.take(own.len()).collect::<Vec<_>>(), "{strategy}: nothing is lost");
            }
        }
        if huge == BIAS {
            let next = run(&mut protocols, 2, |_, _| false);
            assert!(next.iter().all(|result| matches!(result, Ok((Outcome::Averaged, _)))), "{strategy}");
        }
    }
}

#[test]
fn signs_are_averaged_without_overflow() {
    let mut protocols = protocols(LEARNERS, Strategy::Reduce);
    for result in run(&mut protocols, 0, |_, layer| layer == CONVOLUTION) {
        let (outcome, average) = result.unwrap();
        assert_eq!(outcome, Outcome::Averaged);
        assert!(average[CONVOLUTION].iter().all(|value| *value == HUGE));
    }
}

/// Huge values are no reason to drop a step where their sum fits.
#[test]
fn a_large_sum_that_fits_is_averaged() {
    for strategy in STRATEGIES {
        let mut protocols = protocols(LEARNERS, strategy);
        for result in run(&mut protocols, 0, |learner, layer| learner == layer) {
            let (outcome, average) = result.unwrap();
            assert_eq!(outcome, Outcome::Averaged, "{strategy}");
            assert!(average.iter().flatten().all(|value| value.is_finite()), "{strategy}");
            assert!(average[CONVOLUTION].iter().any(|value| *value > HUGE / 10.0), "{strategy}");
        }
    }
}

/// Replaces the last four bytes of a message's contents, and makes its checksum right again. A CRC-32 is linear, so that takes no
/// knowledge of what sender and receiver add to the bytes, but how much that is.
fn replace_last_value(message: &mut [u8], value: f32) {
    const CHECKSUM: usize = 4;
    const KNOWN_TO_BOTH: usize = 37;
    let end = message.len() - CHECKSUM;
    let mut difference = vec![0; end + KNOWN_TO_BOTH];
    for (at, byte) in (end - 4..end).zip(value.to_le_bytes()) {
        difference[at] = message[at] ^ byte;
        message[at] = byte;
    }
    let change = crc32fast::hash(&difference) ^ crc32fast::hash(&vec![0; difference.len()]);
    for (byte, change) in message[end..].iter_mut().zip(change.to_le_bytes()) {
        *byte ^= change;
    }
}

#[test]
fn values_that_are_not_finite_are_refused_and_their_sender_named() {
    for strategy in [Strategy::Dense, Strategy::Reduce, Strategy::Sharded] {
        // The last two rounds end with the bias: a shard to its owner, then the average to all.
        let rounds = protocols(LEARNERS, strategy)[0].rounds();
        for (round, value) in
            (rounds - 2..rounds).flat_map(|round| [(round, f32::NAN), (round, f32::NEG_INFINITY)])
        {
            let mut protocols = protocols(LEARNERS, strategy);
            let before = all_residuals(&mut protocols);
            submit(&mut protocols, 0);
            let concluded = carry(&mut protocols, |place, message| {
                if place == (round, 1, 2) {
                    replace_last_value(message, value);
                }
            });
            for result in concluded {
                match result {
                    Err(ExchangeError::Message { sender: 1, receiver: 2, reason, .. }) => {
                        assert_eq!(
                            reason, "layer 3: a value is not finite or has the wrong sign",
                            "{strategy}"
                        );
                    }
                    other => panic!("{strategy}, round {round}: {other:?}"),
                }
            }
            for (after, before) in all_residuals(&mut protocols).iter().zip(&before) {
                assert!(after.iter().zip(before).all(|(after, before)| after.1 == before.1), "{strategy}");
            }
        }
    }
}

#[test]
fn a_value_replaced_by_another_finite_one_keeps_its_checksum() {
    let mut protocols = protocols(LEARNERS, Strategy::Dense);
    submit(&mut protocols, 0);
    let concluded = carry(&mut protocols, |place, message| {
        if place.0 == 1 && place.1 == 2 {
            replace_last_value(message, 5.0);
        }
    });
    for result in concluded {
        let (outcome, average) = result.unwrap();
        assert_eq!((outcome, average[BIAS].last()), (Outcome::Averaged, Some(&5.0)));
    }
}
