//! Saving and loading residuals.

use crate::support::{Random, gradients, named, residuals, small_model};
use adacomp::{Compressor, Parameter, Policy, StateError, Treatment};

/// Learners after a few steps, the last of which has left something unsubtracted.
fn trained(learners: usize) -> Vec<Compressor> {
    let layout = small_model(Policy::adacomp());
    let mut random = Random(31);
    let mut compressors: Vec<_> = (0..learners).map(|_| Compressor::new(layout.clone())).collect();
    for compressor in &mut compressors {
        for _ in 0..3 {
            compressor.compress(&named(&layout, &gradients(&layout, &mut random))).unwrap();
            compressor.commit().unwrap();
        }
    }
    compressors
}

fn save(compressors: &mut [Compressor]) -> Vec<Vec<u8>> {
    let learners = compressors.len();
    compressors
        .iter_mut()
        .enumerate()
        .map(|(learner, compressor)| compressor.save(learner, learners, 3).unwrap())
        .collect()
}

#[test]
fn the_same_learners_go_on_bit_identically() {
    let mut before = trained(3);
    let states = save(&mut before);
    let layout = small_model(Policy::adacomp());
    let mut random = Random(32);
    for (learner, old) in before.iter_mut().enumerate() {
        for given in [&states[..], &states[learner..=learner]] {
            let mut new = Compressor::new(layout.clone());
            assert_eq!(new.load(given, learner, 3).unwrap(), 3);
            assert_eq!(residuals(&mut new), residuals(old));
            let (mut old, next) = (old.clone(), gradients(&layout, &mut random));
            for compressor in [&mut old, &mut new] {
                compressor.compress(&named(&layout, &next)).unwrap();
                compressor.commit().unwrap();
            }
            assert_eq!(residuals(&mut new), residuals(&mut old));
        }
    }
}

#[test]
fn another_number_of_learners_conserves_the_total() {
    for (before, after) in [(1, 4), (3, 1), (3, 2), (2, 5), (4, 4)] {
        let mut old = trained(before);
        let states = save(&mut old);
        let layout = small_model(Policy::adacomp());
        let mut new: Vec<_> = (0..after).map(|_| Compressor::new(layout.clone())).collect();
        for (learner, compressor) in new.iter_mut().enumerate() {
            compressor.load(&states, learner, after).unwrap();
        }
        for layer in [0, 1] {
            let total = |compressors: &mut [Compressor], i: usize| {
                let learners = compressors.len() as f64;
                compressors.iter_mut().map(|c| f64::from(c.residual(layer).unwrap()[i])).sum::<f64>()
                    / learners
            };
            for i in 0..layout[layer].elements() {
                let (old, new) = (total(&mut old, i), total(&mut new, i));
                assert!((old - new).abs() <= 1e-7 * old.abs(), "{before} to {after}: {old} {new}");
            }
        }
    }
}

#[test]
fn a_state_of_another_model_is_refused_with_a_list() {
    let states = save(&mut trained(1));
    let other = Policy::adacomp()
        .layout([Parameter::new("conv.weight", &[16, 8, 9]), Parameter::new("head.weight", &[40, 60])]);
    let mut compressor = Compressor::new(other.unwrap());
    let error = compressor.load(&states, 0, 1).unwrap_err();
    let StateError::Parameters { missing, extra, reshaped } = &error else { panic!("{error}") };
    assert_eq!(missing, &["head.weight"]);
    assert_eq!(extra, &["fc.weight"]);
    assert_eq!(reshaped, &["conv.weight: F32 [16, 8, 3, 3] -> F32 [16, 8, 9]"]);
    assert!(error.to_string().contains("`head.weight`"));
    assert!(compressor.residual(0).unwrap().iter().all(|&r| r == 0.0));
}

#[test]
fn states_that_are_not_all_of_one_run_are_refused() {
    let states = save(&mut trained(3));
    assert_eq!(states, save(&mut trained(3)), "the same state is the same bytes");
    let mut compressor = Compressor::new(small_model(Policy::adacomp()));
    let swapped = [states[1].clone(), states[0].clone(), states[2].clone()];
    let later = trained(3)[1].save(1, 3, 4).unwrap();
    let mixed = [states[0].clone(), later, states[2].clone()];
    let cases: [&[Vec<u8>]; 4] = [&states[..2], &swapped, &states[1..2], &mixed];
    for given in cases {
        assert!(matches!(compressor.load(given, 0, 2), Err(StateError::Metadata { .. })));
    }
    assert!(matches!(compressor.load(&[] as &[Vec<u8>], 0, 1), Err(StateError::Empty)));
    assert!(matches!(compressor.load(&states, 3, 3), Err(StateError::Learner { .. })));
    assert!(matches!(compressor.save(1, 1, 0), Err(StateError::Learner { .. })));
    let cut = &states[0][..states[0].len() - 1];
    assert!(matches!(compressor.load(&[cut], 0, 3), Err(StateError::File { position: 0, .. })));
    assert!(matches!(compressor.load(&[b"not a file"], 0, 3), Err(StateError::File { .. })));
}

#[test]
fn a_saved_nan_is_refused() {
    let layout =
        || Policy::adacomp().for_name("*", Treatment::Bins(5)).layout([Parameter::new("w", &[3])]).unwrap();
    let mut state = Compressor::new(layout()).save(0, 1, 0).unwrap();
    let end = state.len();
    state[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    let error = Compressor::new(layout()).load(&[state], 0, 1).unwrap_err();
    assert!(matches!(error, StateError::NonFinite { learner: 0, .. }));
}
