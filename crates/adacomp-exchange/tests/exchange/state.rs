//! Saving and loading what learners and owners keep.

use crate::draw::gradient;
use crate::hand::{carry, protocols, protocols_of, submit};
use crate::support::{STRATEGIES, model, model_with_matrices_of};
use adacomp::{CompressError, Compressor, StateError};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{Exchange, ExchangeError, LearnerState, Local, Strategy};

/// Learners after three steps, and what they saved.
fn trained(learners: usize, strategy: Strategy) -> (Vec<ByHand>, Vec<LearnerState>) {
    trained_for(learners, strategy, 3)
}

fn trained_for(learners: usize, strategy: Strategy, steps: u64) -> (Vec<ByHand>, Vec<LearnerState>) {
    let mut protocols = protocols(learners, strategy);
    for step in 0..steps {
        submit(&mut protocols, step);
        assert!(carry(&mut protocols, |_, _| {}).iter().all(Result::is_ok));
    }
    let states = protocols.iter_mut().flat_map(|protocol| protocol.save().unwrap()).collect();
    (protocols, states)
}

/// What is kept of a layer in all: the learners' share of it and what owners have.
fn kept(protocols: &mut [ByHand], layer: usize) -> Vec<f64> {
    let learners = protocols.len();
    let mut kept = vec![0.0f64; model()[layer].elements()];
    let mut start = 0;
    for (learner, protocol) in protocols.iter_mut().enumerate() {
        let residual = protocol.compressor(learner).unwrap().residual(layer).unwrap();
        kept.iter_mut().zip(residual).for_each(|(sum, &r)| *sum += f64::from(r) / learners as f64);
        // Shares follow each other in learner order.
        if let Some(owned) = protocol.owner(learner).and_then(|owner| owner.residual(layer)) {
            kept[start..].iter_mut().zip(owned).for_each(|(sum, &r)| *sum += f64::from(r));
            start += owned.len();
        }
    }
    kept
}

#[test]
fn the_same_learners_go_on_bit_identically() {
    for strategy in STRATEGIES {
        let (mut old, states) = trained(3, strategy);
        for all in [true, false] {
            let mut new = protocols(3, strategy);
            for (learner, protocol) in new.iter_mut().enumerate() {
                let given = if all { &states[..] } else { &states[learner..=learner] };
                protocol.load(given).unwrap();
                assert_eq!(protocol.step(), 3);
            }
            submit(&mut new, 3);
            let new = carry(&mut new, |_, _| {});
            if all {
                submit(&mut old, 3);
                let old = carry(&mut old, |_, _| {});
                assert_eq!(old[0].as_ref().unwrap(), new[0].as_ref().unwrap(), "{strategy:?}");
            }
            assert!(new.iter().all(|result| result.as_ref().unwrap() == new[0].as_ref().unwrap()));
        }
    }
}

#[test]
fn another_number_of_learners_conserves_what_is_kept() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        for (before, after) in [(3, 2), (2, 3), (3, 4), (4, 5), (2, 5), (1, 4), (4, 1)] {
            let (mut old, states) = trained(before, strategy);
            let mut new = protocols(after, strategy);
            for protocol in &mut new {
                protocol.load(&states).unwrap();
            }
            for layer in [0, 2] {
                for (old, new) in kept(&mut old, layer).into_iter().zip(kept(&mut new, layer)) {
                    assert!((old - new).abs() < 1e-6, "{strategy:?} {before} to {after}: {old} {new}");
                }
            }
            submit(&mut new, 3);
            assert!(carry(&mut new, |_, _| {}).iter().all(Result::is_ok));
        }
    }
}

/// As if it was saved, and loaded by learners that have other bins.
#[test]
fn other_bins_go_on_with_what_is_kept() {
    let longer = || model_with_matrices_of(300);
    for strategy in STRATEGIES {
        let (mut old, states) = trained(3, strategy);
        if strategy == Strategy::Sharded {
            let refused = old[0].set_layout(longer()).unwrap_err().to_string();
            assert!(refused.contains("sharded cannot go on with other bins"), "{refused}");
            continue;
        }
        let mut new = protocols_of(longer(), 3, strategy);
        for (old, new) in old.iter_mut().zip(&mut new) {
            old.set_layout(longer()).unwrap();
            new.load(&states).unwrap();
        }
        for step in 3..6 {
            let [old, new] = [&mut old, &mut new].map(|protocols| {
                submit(protocols, step);
                carry(protocols, |_, _| {}).into_iter().map(Result::unwrap).collect::<Vec<_>>()
            });
            assert_eq!(old, new, "{strategy:?}");
        }
        for layer in [0, 2] {
            assert_eq!(kept(&mut old, layer), kept(&mut new, layer), "{strategy:?}");
        }
    }
}

/// Of several learners that are hosted here, too, none has other bins than the exchange says.
#[test]
fn bins_cannot_change_within_a_step() {
    let mut exchange = Exchange::new(Local::alone(2), model(), Strategy::Gather).unwrap();
    exchange.submit(1, 0, gradient(1, 0, 0, exchange.layout()[0].elements()).as_slice().into()).unwrap();
    let refused = exchange.set_layout(model_with_matrices_of(300));
    assert!(matches!(refused, Err(ExchangeError::Compress(CompressError::Open))), "{refused:?}");
    let before = exchange.layout().fingerprint();
    assert!((0..2).all(|learner| exchange.compressor(learner).unwrap().layout().fingerprint() == before));
}

/// One learner alone changes its bins: all are told.
#[test]
fn other_bins_on_one_learner_are_refused() {
    for strategy in [Strategy::Gather, Strategy::Reduce] {
        let (mut protocols, _) = trained(3, strategy);
        protocols[1].set_layout(model_with_matrices_of(300)).unwrap();
        submit(&mut protocols, 3);
        for result in carry(&mut protocols, |_, _| {}) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("another model or policy"), "{strategy:?}: {error}");
        }
    }
}

#[test]
fn what_learners_and_owners_keep_decays_alike() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        let (mut protocols, _) = trained(3, strategy);
        let before = [0, 2].map(|layer| kept(&mut protocols, layer));
        protocols.iter_mut().for_each(|protocol| protocol.decay(0.5).unwrap());
        // Half of an f32 is exact.
        let half = before.map(|kept| kept.into_iter().map(|value| value / 2.0).collect::<Vec<_>>());
        assert_eq!([0, 2].map(|layer| kept(&mut protocols, layer)), half, "{strategy:?}");
        assert!(half.iter().flatten().any(|value| *value != 0.0));
        submit(&mut protocols, 3);
        assert!(matches!(protocols[0].decay(0.5), Err(ExchangeError::Compress(CompressError::Open))));
        assert!(carry(&mut protocols, |_, _| {}).iter().all(Result::is_ok));
        assert!(matches!(
            protocols[0].decay(1.5),
            Err(ExchangeError::Compress(CompressError::Decay { factor: 1.5 }))
        ));
    }
}

/// What owners kept goes to the learners when there are no owners any more.
#[test]
fn another_strategy_conserves_what_is_kept() {
    let (mut old, states) = trained(3, Strategy::Sharded);
    let mut new = protocols(3, Strategy::Reduce);
    new.iter_mut().for_each(|protocol| protocol.load(&states).unwrap());
    for layer in [0, 2] {
        for (old, new) in kept(&mut old, layer).into_iter().zip(kept(&mut new, layer)) {
            assert!((old - new).abs() < 1e-6, "{old} {new}");
        }
    }
    // One learner's own state does not have what the other owners kept.
    assert!(new[0].load(&states[..1]).is_err());
}

#[test]
fn settings_survive_and_an_open_step_is_refused() {
    let (_, states) = trained(2, Strategy::Gather);
    let mut protocol = protocols(2, Strategy::Gather).remove(0);
    protocol.compressor(0).unwrap().set_inverse_loss_scale(0.5).unwrap();
    protocol.load(&states).unwrap();
    protocol.submit(0, 2, vec![2.0; 2400].as_slice().into()).unwrap();
    assert!(matches!(protocol.load(&states), Err(ExchangeError::State(StateError::Open))));
    protocol.rollback();
    let residual = protocol.compressor(0).unwrap().residual(2).unwrap().to_vec();
    let mut before = protocols(2, Strategy::Gather).remove(0);
    before.load(&states).unwrap();
    let before = before.compressor(0).unwrap().residual(2).unwrap();
    assert!(residual.iter().zip(before).all(|(after, before)| *after == before + 1.0));
}

#[test]
fn a_bad_state_changes_nothing() {
    let (_, states) = trained(2, Strategy::Sharded);
    let mut cut = states.clone();
    cut[1].residuals.pop();
    let mut cut_owner = states.clone();
    cut_owner[1].owner.as_mut().unwrap().pop();
    let mut without_owner = states.clone();
    without_owner[1].owner = None;
    let mut mixed = states.clone();
    mixed[1] = trained_for(2, Strategy::Sharded, 2).1.remove(1);
    let mut protocol = ByHand::unconnected((), model(), Strategy::Sharded, 3, 1..2).unwrap();
    let told = |bad: &[LearnerState], protocol: &mut ByHand| protocol.load(bad).unwrap_err().to_string();
    assert!(told(&cut, &mut protocol).starts_with("state 1: "));
    assert!(told(&cut_owner, &mut protocol).starts_with("what owners keep: state 1: "));
    for bad in [&cut[..], &cut_owner, &without_owner, &mixed, &states[..1], &[]] {
        assert!(protocol.load(bad).is_err());
        assert_eq!(protocol.step(), 0);
        assert!(protocol.compressor(1).unwrap().residual(0).unwrap().iter().all(|&r| r == 0.0));
    }
}

/// What owners kept is added to residuals, and each can be finite without the sum.
#[test]
fn a_residual_that_would_overflow_is_not_loaded() {
    let (mut old, _) = trained(2, Strategy::Sharded);
    let huge = |compressor: &mut Compressor| {
        let elements = compressor.layout()[2].elements();
        compressor.set_residual(2, &vec![3e38; elements]).unwrap();
    };
    for (learner, protocol) in old.iter_mut().enumerate() {
        huge(protocol.compressor(learner).unwrap());
        huge(protocol.owner(learner).unwrap());
    }
    let states: Vec<_> = old.iter_mut().flat_map(|protocol| protocol.save().unwrap()).collect();
    let mut new = protocols(2, Strategy::Reduce).remove(0);
    let refused = new.load(&states).unwrap_err();
    assert!(matches!(refused, ExchangeError::State(StateError::NonFinite { learner: 0, .. })), "{refused}");
    assert_eq!(new.step(), 0);
    assert!(new.compressor(0).unwrap().residual(2).unwrap().iter().all(|&r| r == 0.0));
}
