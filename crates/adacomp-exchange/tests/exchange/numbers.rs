//! Finite gradients whose sum is not finite.

use crate::draw::gradient;
use crate::hand::{Concluded, carry, protocols};
use crate::support::{Residuals, STRATEGIES, model, output, residuals};
use adacomp::Outcome;
use adacomp_exchange::Strategy;
use adacomp_exchange::internal::ByHand;

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
