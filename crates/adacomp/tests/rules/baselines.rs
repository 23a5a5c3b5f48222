//! The schemes that AdaComp is compared with.

use crate::support::{Random, gradients, named, selected, sent, small_model};
use adacomp::half::f16;
use adacomp::{Compressor, Parameter, Policy};

#[test]
fn top_k_sends_the_largest_as_two_means_and_keeps_the_rest() {
    let layout = Policy::top_k(40.0).min_elements(0).layout([Parameter::new("weight", &[2, 5])]).unwrap();
    let mut compressor = Compressor::new(layout);
    let gradient = [5.0, -1.0, 0.0, 3.0, 2.0, -4.0, 0.0, -3.0, 1.0, 0.5];
    compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
    // The largest four are 5, -4 and the two of magnitude 3.
    assert_eq!(selected(&compressor, 0), [0, 3, 5, 7]);
    assert_eq!(sent(&compressor, 0), [4.0, 0.0, 0.0, 4.0, 0.0, -3.5, 0.0, -3.5, 0.0, 0.0]);
    compressor.commit().unwrap();
    assert_eq!(compressor.residual(0).unwrap(), [1.0, -1.0, 0.0, -1.0, 2.0, -0.5, 0.0, 0.5, 1.0, 0.5]);
}

#[test]
fn top_k_of_equals_takes_the_first_and_never_zeros() {
    let layout = Policy::top_k(50.0).min_elements(0).layout([Parameter::new("weight", &[1, 6])]).unwrap();
    let mut compressor = Compressor::new(layout);
    for (gradient, expected) in [
        ([1.0, 1.0, -1.0, 1.0, 1.0, 1.0], &[0, 1, 2][..]),
        ([0.0, 0.0, 0.0, 7.0, 0.0, 0.0], &[3]),
        ([0.0; 6], &[]),
    ] {
        compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
        assert_eq!(selected(&compressor, 0), expected);
        compressor.rollback();
        let negated = gradient.map(|value: f32| -value);
        compressor.compress(&[("weight", negated.as_slice().into())]).unwrap();
        compressor.rollback();
        assert_eq!(compressor.residual(0).unwrap(), [0.0; 6]);
    }
}

#[test]
fn dense_and_half_send_every_element() {
    for (policy, half) in [(Policy::dense(), false), (Policy::half(), true)] {
        let layout = small_model(policy);
        let mut compressor = Compressor::new(layout.clone());
        let gradients = gradients(&layout, &mut Random(15));
        compressor.compress(&named(&layout, &gradients)).unwrap();
        for (layer, gradient) in gradients.iter().enumerate() {
            let round = |&value: &f32| if half { f16::from_f32(value).to_f32() } else { value };
            assert_eq!(sent(&compressor, layer), gradient.iter().map(round).collect::<Vec<_>>());
        }
        compressor.commit().unwrap();
        assert!((0..layout.len()).all(|layer| compressor.residual(layer).is_none()));
    }
}
