//! A step is begun, then committed or dropped; what is refused changes nothing.

use crate::support::{Random, bits, gradients, named, one_layer, residuals, selected, sent, small_model};
use adacomp::half::{bf16, f16};
use adacomp::{
    Codec, CompressError, Compressor, Gradient, Kernel, Parameter, Policy, Scale, Sending, StateError,
    Treatment,
};
use std::sync::Arc;

fn step(compressor: &mut Compressor, gradient: &[f32]) -> Vec<f32> {
    compressor.compress(&[("weight", gradient.into())]).unwrap();
    let sent = sent(compressor, 0);
    compressor.commit().unwrap();
    sent
}

/// Bins of 4, by hand: the scale is the mean of the maxima, and the soft threshold is `R + 2 dW`.
#[test]
fn two_steps_by_hand() {
    let mut compressor = Compressor::new(one_layer(8, 4));
    // Maxima 4 and 2, scale 3. H = 2 dW: 8 and 6 reach 4; 4 and -3 reach 2.
    let first = step(&mut compressor, &[4.0, 3.0, 1.0, 0.0, 2.0, -1.5, 0.5, 0.0]);
    assert_eq!(first, [3.0, 3.0, 0.0, 0.0, 3.0, -3.0, 0.0, 0.0]);
    assert_eq!(compressor.residual(0).unwrap(), [1.0, 0.0, 1.0, 0.0, -1.0, 1.5, 0.5, 0.0]);
    // G = [0, 0, 2, 0 | -1, 1.5, 1, 0], maxima 2 and 1.5, scale 1.75. H = [-1, 0, 3, 0 | -1, 1.5, 1.5, 0].
    let second = step(&mut compressor, &[-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0]);
    assert_eq!(second, [0.0, 0.0, 1.75, 0.0, 0.0, 1.75, 1.75, 0.0]);
    assert_eq!(compressor.residual(0).unwrap(), [0.0, 0.0, 0.25, 0.0, -1.0, -0.25, -0.75, 0.0]);
}

/// The first step of [`two_steps_by_hand`], whose residual then decays.
#[test]
fn a_residual_decays_after_what_was_sent_has_left_it() {
    let mut compressor = Compressor::new(one_layer(8, 4));
    let gradient = [4.0, 3.0, 1.0, 0.0, 2.0, -1.5, 0.5, 0.0];
    step(&mut compressor, &gradient);
    compressor.decay(1.0).unwrap();
    assert!(compressor.last_packet(0).is_some(), "nothing to do, so nothing is done");
    compressor.decay(0.5).unwrap();
    assert_eq!(compressor.residual(0).unwrap(), [0.5, 0.0, 0.5, 0.0, -0.5, 0.75, 0.25, 0.0]);
    for factor in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
        assert!(matches!(compressor.decay(factor), Err(CompressError::Decay { .. })), "{factor}");
    }
    compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
    assert_eq!(compressor.decay(0.5), Err(CompressError::Open));
    compressor.rollback();
    compressor.decay(0.0).unwrap();
    assert_eq!(compressor.residual(0).unwrap(), [0.0; 8]);
}

/// The second step of [`two_steps_by_hand`] in one bin of 8: the maximum and scale are 2, and H is below but for one element.
#[test]
fn other_bins_go_on_with_what_waits() {
    let mut compressor = Compressor::new(one_layer(8, 4));
    step(&mut compressor, &[4.0, 3.0, 1.0, 0.0, 2.0, -1.5, 0.5, 0.0]);
    compressor.set_layout(one_layer(8, 8)).unwrap();
    let second = step(&mut compressor, &[-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0]);
    assert_eq!(second, [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(compressor.residual(0).unwrap(), [0.0, 0.0, 0.0, 0.0, -1.0, 1.5, 1.0, 0.0]);

    let bins = Policy::adacomp().for_name("*", Treatment::Bins(8));
    let weight = || Parameter::new("weight", &[8]);
    for (policy, parameters, what) in [
        (Policy::dense(), vec![weight()], "parameter `weight`"),
        (Policy::adacomp().for_name("*", Treatment::TopK(50.0)), vec![weight()], "parameter `weight`"),
        (bins.clone(), vec![Parameter::new("other", &[8])], "parameter `weight`"),
        (bins.clone(), vec![Parameter::new("weight", &[4, 2])], "parameter `weight`"),
        (bins.clone(), vec![], "the number of layers"),
        (bins.clone().soft_threshold(3.0), vec![weight()], "the soft threshold"),
        (bins.scale(Scale::Clamped), vec![weight()], "the soft threshold and the way of scales"),
    ] {
        let refused = compressor.set_layout(policy.layout(parameters).unwrap()).unwrap_err().to_string();
        assert!(refused.starts_with(what) && refused.ends_with("only the lengths of bins can"), "{refused}");
    }
    compressor.compress(&[("weight", [0.0; 8].as_slice().into())]).unwrap();
    assert_eq!(compressor.set_layout(one_layer(8, 4)), Err(CompressError::Open));
}

/// The maxima are 1, 2, 3 and 10,000: the last counts for ten medians, which is the third.
#[test]
fn a_clamped_scale_is_not_inflated() {
    let layout = |scale| {
        let policy = Policy::adacomp().for_name("*", adacomp::Treatment::Bins(2)).scale(scale);
        Arc::new(policy.layout([adacomp::Parameter::new("weight", &[8])]).unwrap())
    };
    let (mean, clamped) = (layout(Scale::Mean), layout(Scale::Clamped));
    assert_ne!(mean.fingerprint(), clamped.fingerprint());
    let gradient = [1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 10_000.0, 0.0];
    for (layout, scale) in [(mean, 10_006.0 / 4.0), (clamped, 36.0 / 4.0)] {
        let mut compressor = Compressor::new(layout);
        let sent = step(&mut compressor, &gradient);
        assert_eq!(sent, [scale, 0.0, scale, 0.0, scale, 0.0, scale, 0.0]);
        // Nothing is lost.
        assert_eq!(compressor.residual(0).unwrap()[6], 10_000.0 - scale);
    }
}

#[test]
fn local_selection_sends_only_bin_maxima() {
    let layout = Policy::local_selection().min_elements(0).for_name("*", adacomp::Treatment::Bins(4));
    let layout = layout.layout([adacomp::Parameter::new("weight", &[2, 4])]).unwrap();
    let mut compressor = Compressor::new(layout);
    compressor.compress(&[("weight", [4.0, 3.0, 1.0, 0.0, 2.0, -2.0, 0.5, 0.0].as_slice().into())]).unwrap();
    assert_eq!(selected(&compressor, 0), [0, 4, 5]);
}

#[test]
fn zeros_send_nothing_and_count_in_the_mean() {
    let mut compressor = Compressor::new(one_layer(9, 3));
    let sent = step(&mut compressor, &[0.0, -0.0, 0.0, 3.0, 0.0, 0.0, -0.0, 0.0, 0.0]);
    assert_eq!(sent, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn an_element_that_cancels_is_not_sent() {
    let mut compressor = Compressor::new(one_layer(2, 2));
    step(&mut compressor, &[4.0, 1.0]);
    assert_eq!(compressor.residual(0).unwrap(), [0.0, 1.0]);
    // G = [0, 0.5] with H = [-1, 0] after the residual is brought to [1, 1]: the first reaches the maximum but is 0.
    compressor.compress(&[("weight", [1.0, 0.0].as_slice().into())]).unwrap();
    compressor.rollback();
    assert_eq!(compressor.residual(0).unwrap(), [1.0, 1.0]);
    compressor.compress(&[("weight", [-1.0, -0.5].as_slice().into())]).unwrap();
    assert!(selected(&compressor, 0).is_empty());
}

/// Where asked for, a layer that took no part in a step sends nothing of its residual, unless everything is sent.
#[test]
fn an_unused_layer_can_keep_its_residual() {
    let mut compressor = Compressor::new(one_layer(4, 2));
    step(&mut compressor, &[4.0, 1.0, 2.0, 0.5]);
    let kept = compressor.residual(0).unwrap().to_vec();
    compressor.set_skip_unused(true);
    assert_eq!(step(&mut compressor, &[0.0, -0.0, 0.0, 0.0]), [0.0; 4]);
    assert_eq!(compressor.residual(0).unwrap(), kept);
    let zeros = [0.0; 4];
    compressor.compress_layer(0, zeros.as_slice().into(), Sending::Flush).unwrap();
    assert_eq!(sent(&compressor, 0), kept);
    compressor.rollback();
    compressor.set_skip_unused(false);
    assert_ne!(step(&mut compressor, &zeros), zeros);
}

#[test]
fn a_selection_from_elsewhere_must_fit() {
    let mut compressor = Compressor::new(one_layer(10, 4));
    let element = |index| adacomp::Selected::new(index, false);
    let mut take = |maxima: &[f32], selected: &[u32]| {
        let selected: Vec<_> = selected.iter().map(|&index| element(index)).collect();
        compressor.take_selection(0, maxima, &selected)
    };
    assert!(matches!(
        take(&[1.0; 2], &[]),
        Err(CompressError::Length { what: "bin maxima", expected: 3, actual: 2, .. })
    ));
    assert!(matches!(take(&[1.0; 3], &[4, 3]), Err(CompressError::Selection { .. })));
    assert!(matches!(take(&[1.0; 3], &[3, 10]), Err(CompressError::Selection { .. })));
    for bad in [f32::INFINITY, f32::NEG_INFINITY, -1.0] {
        let refused = take(&[1.0, bad, 2.0], &[3, 9]);
        assert_eq!(refused, Err(CompressError::Maximum { parameter: "weight".to_owned(), maximum: bad }));
    }
    take(&[1.0, f32::NAN, 2.0], &[3, 9]).unwrap();
    assert!(matches!(take(&[1.0; 3], &[]), Err(CompressError::Twice { .. })));
    assert_eq!((compressor.layer_statistics(0).bad_bins, compressor.layer_statistics(0).scale), (1, 1.0));
    assert!(compressor.commit().is_err());
    compressor.rollback();
    let mut dense = Compressor::new(small_model(Policy::dense()));
    assert!(matches!(dense.take_selection(0, &[], &[]), Err(CompressError::Treatment { .. })));
    assert!(matches!(dense.take_selection(9, &[], &[]), Err(CompressError::Layer { layer: 9, count: 3 })));
}

/// A gradient that is changed while it is compressed can leave such a residual, which costs one step and not the rest of the run.
#[test]
fn a_residual_that_is_not_finite_heals() {
    let top_k = Arc::new(Policy::top_k(50.0).layout([Parameter::new("weight", &[40, 50])]).unwrap());
    for (layout, bad) in
        [(one_layer(2000, 50), f32::NAN), (one_layer(2000, 500), f32::INFINITY), (top_k, f32::NAN)]
    {
        for kernel in Kernel::all() {
            let mut compressor = Compressor::new(layout.clone()).with_kernel(kernel);
            let mut random = Random(17);
            step(&mut compressor, &random.gradient(2000));
            let before = compressor.residual(0).unwrap().to_vec();
            compressor.residual_mut(0)[7] = bad;
            compressor.compress(&[("weight", random.gradient(2000).as_slice().into())]).unwrap();
            assert!(!compressor.is_finite());
            compressor.rollback();
            let after = compressor.residual(0).unwrap();
            assert_eq!((&after[..7], after[7], &after[8..50]), (&before[..7], 0.0, &before[8..50]));
            compressor.compress(&[("weight", random.gradient(2000).as_slice().into())]).unwrap();
            assert!(compressor.is_finite(), "{kernel}");
            compressor.commit().unwrap();
            assert!(compressor.residual(0).unwrap().iter().all(|value| value.is_finite()));
        }
    }
}

#[test]
fn a_residual_from_elsewhere_must_be_finite() {
    let mut compressor = Compressor::new(one_layer(4, 2));
    compressor.set_residual(0, &[1.0, -2.0, 0.0, f32::MAX]).unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        let refused = compressor.set_residual(0, &[0.0, 0.0, bad, 0.0]);
        assert_eq!(refused, Err(CompressError::Residual { parameter: "weight".to_owned() }));
    }
    assert!(matches!(
        compressor.set_residual(0, &[0.0; 3]),
        Err(CompressError::Length { what: "a residual", actual: 3, .. })
    ));
    assert_eq!(compressor.residual(0).unwrap(), [1.0, -2.0, 0.0, f32::MAX]);
}

#[test]
fn a_dropped_step_is_delayed_and_not_lost() {
    let mut random = Random(5);
    let mut compressor = Compressor::new(one_layer(300, 50));
    step(&mut compressor, &random.gradient(300));
    let before = compressor.residual(0).unwrap().to_vec();
    let gradient = random.gradient(300);
    compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
    compressor.rollback();
    let expected: Vec<f32> = before.iter().zip(&gradient).map(|(r, dw)| r + dw).collect();
    assert_eq!(bits(compressor.residual(0).unwrap()), bits(&expected));
}

#[test]
fn a_bad_gradient_does_no_harm() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut random = Random(6);
        let mut compressor = Compressor::new(one_layer(300, 50));
        step(&mut compressor, &random.gradient(300));
        let before = compressor.residual(0).unwrap().to_vec();
        let mut gradient = random.gradient(300);
        gradient[120] = bad;
        compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
        assert!(!compressor.is_finite());
        let refused = compressor.commit().unwrap_err();
        assert_eq!(refused, CompressError::NonFinite { parameters: vec!["weight".to_owned()] });
        compressor.rollback();
        let expected: Vec<f32> =
            (0..300).map(|i| if i / 50 == 120 / 50 { before[i] } else { before[i] + gradient[i] }).collect();
        assert_eq!(bits(compressor.residual(0).unwrap()), bits(&expected));
        // The next step goes on as if nothing had been.
        step(&mut compressor, &random.gradient(300));
        assert!(compressor.residual(0).unwrap().iter().all(|r| r.is_finite()));
    }
}

#[test]
fn a_bad_dense_gradient_is_found_too() {
    for policy in [Policy::dense(), Policy::half(), Policy::top_k(1.0)] {
        let layout = small_model(policy);
        let mut random = Random(7);
        let mut compressor = Compressor::new(layout.clone());
        let mut gradients = gradients(&layout, &mut random);
        gradients[1][3] = f32::NAN;
        compressor.compress(&named(&layout, &gradients)).unwrap();
        assert!(!compressor.is_finite());
        compressor.rollback();
        let fc = compressor.residual(1).map(<[f32]>::to_vec);
        assert!(fc.is_none_or(|residual| residual.iter().all(|&r| r == 0.0)));
    }
    // A value that f16 cannot hold would arrive as an infinity.
    let layout = small_model(Policy::half());
    let mut compressor = Compressor::new(layout.clone());
    let mut gradients = gradients(&layout, &mut Random(7));
    gradients[0][0] = 70_000.0;
    compressor.compress(&named(&layout, &gradients)).unwrap();
    assert!(!compressor.is_finite());
}

#[test]
fn what_is_refused_leaves_residuals_untouched() {
    let layout = small_model(Policy::adacomp());
    let mut random = Random(8);
    let mut compressor = Compressor::new(layout.clone());
    let good = gradients(&layout, &mut random);
    compressor.compress(&named(&layout, &good)).unwrap();
    compressor.commit().unwrap();
    let before = residuals(&mut compressor);

    let all = named(&layout, &good);
    let short = [&all[..1], &[("fc.weight", good[2].as_slice().into())], &all[2..]].concat();
    let unknown = [&all[..], &[("fc.wight", good[2].as_slice().into())]].concat();
    let twice = [&all[..], &all[..1]].concat();
    let name = |name: &str| name.to_owned();
    for (gradients, expected) in [
        (&all[1..], CompressError::Missing { parameters: vec![name("conv.weight")] }),
        (
            &short,
            CompressError::Length {
                parameter: name("fc.weight"),
                what: "a gradient",
                expected: 2400,
                actual: 40,
            },
        ),
        (&unknown, CompressError::Unknown { parameter: name("fc.wight") }),
        (&twice, CompressError::Twice { parameter: name("conv.weight") }),
    ] {
        assert_eq!(compressor.compress(gradients).unwrap_err(), expected);
        assert!(!compressor.is_open());
        assert_eq!(residuals(&mut compressor), before);
    }
    compressor.compress(&all).unwrap();
    assert_eq!(compressor.compress(&all).unwrap_err(), CompressError::Open);
    compressor.rollback();
}

#[test]
fn a_step_must_be_open_and_complete() {
    let layout = small_model(Policy::adacomp());
    let gradients = gradients(&layout, &mut Random(9));
    let mut compressor = Compressor::new(layout.clone());
    let mut frame = Vec::new();
    assert_eq!(compressor.commit(), Err(CompressError::NotOpen));
    assert_eq!(compressor.encode(Codec::Rice, 0, 0, &mut frame), Err(CompressError::NotOpen));
    compressor.compress_layer(1, gradients[1].as_slice().into(), Sending::Compressed).unwrap();
    let missing = CompressError::Missing { parameters: vec!["conv.weight".to_owned(), "fc.bias".to_owned()] };
    assert_eq!(compressor.encode(Codec::Rice, 0, 0, &mut frame), Err(missing));
    assert!(matches!(compressor.save(0, 1, 0), Err(StateError::Open)));
    let again = compressor.compress_layer(1, gradients[1].as_slice().into(), Sending::Compressed);
    assert_eq!(again, Err(CompressError::Twice { parameter: "fc.weight".to_owned() }));
    assert!(compressor.compress_layer(3, gradients[1].as_slice().into(), Sending::Compressed).is_err());
    for layers in [&[1, 0][..], &[1, 1], &[3]] {
        let refused = compressor.encode_layers(Codec::Rice, 0, 0, layers, &mut frame);
        assert!(matches!(refused, Err(CompressError::Layers { count: 3, .. })));
    }
    compressor.encode_layers(Codec::Rice, 0, 0, &[1], &mut frame).unwrap();
    compressor.commit().unwrap();
}

#[test]
fn layers_in_any_order_give_the_same_as_all_at_once() {
    let layout = small_model(Policy::adacomp());
    let mut random = Random(10);
    let (mut whole, mut parts) = (Compressor::new(layout.clone()), Compressor::new(layout.clone()));
    let (mut frame_a, mut frame_b) = (Vec::new(), Vec::new());
    for number in 0..5 {
        let gradients = gradients(&layout, &mut random);
        whole.compress(&named(&layout, &gradients)).unwrap();
        for layer in [2, 0, 1] {
            parts.compress_layer(layer, gradients[layer].as_slice().into(), Sending::Compressed).unwrap();
        }
        whole.encode(Codec::Rice, 0, number, &mut frame_a).unwrap();
        parts.encode(Codec::Rice, 0, number, &mut frame_b).unwrap();
        assert_eq!(frame_a, frame_b);
        whole.commit().unwrap();
        parts.commit().unwrap();
    }
    assert_eq!(residuals(&mut whole), residuals(&mut parts));
}

#[test]
fn half_precision_gradients_accumulate_in_f32() {
    let mut random = Random(11);
    let layout = one_layer(2000, 500);
    let mut compressors = [(); 4].map(|()| Compressor::new(layout.clone()));
    for _ in 0..4 {
        let single = random.gradient(2000);
        let f16s: Vec<f16> = single.iter().map(|&value| f16::from_f32(value)).collect();
        let bf16s: Vec<bf16> = single.iter().map(|&value| bf16::from_f32(value)).collect();
        let from_f16: Vec<f32> = f16s.iter().map(|value| value.to_f32()).collect();
        let from_bf16: Vec<f32> = bf16s.iter().map(|value| value.to_f32()).collect();
        let forms: [Gradient<'_>; 4] = [
            f16s.as_slice().into(),
            from_f16.as_slice().into(),
            bf16s.as_slice().into(),
            from_bf16.as_slice().into(),
        ];
        for (compressor, form) in compressors.iter_mut().zip(forms) {
            compressor.compress(&[("weight", form)]).unwrap();
            compressor.commit().unwrap();
        }
    }
    let [f16s, from_f16, bf16s, from_bf16] = compressors.each_mut().map(residuals);
    assert_eq!(f16s, from_f16);
    assert_eq!(bf16s, from_bf16);
    assert_ne!(f16s, bf16s);
}

#[test]
fn the_loss_scale_does_not_reach_the_residual() {
    let mut random = Random(12);
    let layout = small_model(Policy::adacomp());
    let (mut plain, mut scaled) = (Compressor::new(layout.clone()), Compressor::new(layout.clone()));
    for scale in [65_536.0f32, 32_768.0, 1.0, 2.0] {
        let unscaled = gradients(&layout, &mut random);
        let large: Vec<Vec<f32>> =
            unscaled.iter().map(|layer| layer.iter().map(|value| value * scale).collect()).collect();
        scaled.set_inverse_loss_scale(1.0 / scale).unwrap();
        plain.compress(&named(&layout, &unscaled)).unwrap();
        scaled.compress(&named(&layout, &large)).unwrap();
        for layer in 0..layout.len() {
            assert_eq!(plain.packet(layer), scaled.packet(layer));
        }
        plain.commit().unwrap();
        scaled.commit().unwrap();
    }
    assert_eq!(residuals(&mut plain), residuals(&mut scaled));
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(plain.set_inverse_loss_scale(scale), Err(CompressError::LossScale { .. })));
    }
}

#[test]
fn sending_everything_empties_the_residual() {
    let mut random = Random(13);
    let mut compressor = Compressor::new(one_layer(300, 50));
    step(&mut compressor, &random.gradient(300));
    let before = compressor.residual(0).unwrap().to_vec();
    let gradient = random.gradient(300);
    let expected: Vec<f32> = before.iter().zip(&gradient).map(|(r, dw)| r + dw).collect();
    for commit in [false, true] {
        let mut compressor = compressor.clone();
        compressor.compress_layer(0, gradient.as_slice().into(), Sending::Flush).unwrap();
        assert_eq!(sent(&compressor, 0), expected);
        if commit {
            compressor.commit().unwrap();
            assert_eq!(compressor.residual(0).unwrap(), [0.0; 300]);
        } else {
            compressor.rollback();
            assert_eq!(compressor.residual(0).unwrap(), expected);
        }
    }
}

#[test]
fn sending_everything_spares_the_finite_bins_of_a_bad_gradient() {
    let mut compressor = Compressor::new(one_layer(8, 4));
    let gradient = [f32::NAN, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    compressor.compress_layer(0, gradient.as_slice().into(), Sending::Flush).unwrap();
    assert!(!compressor.is_finite());
    compressor.rollback();
    assert_eq!(compressor.residual(0).unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
}

#[test]
fn an_agreed_scale_replaces_the_own_one() {
    let layout = small_model(Policy::adacomp());
    let gradients = gradients(&layout, &mut Random(16));
    let mut compressor = Compressor::new(layout.clone());
    assert!(matches!(compressor.set_scale(1, 1.0), Err(CompressError::NoSelection { .. })));
    compressor.compress(&named(&layout, &gradients)).unwrap();
    for scale in [-0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(compressor.set_scale(1, scale), Err(CompressError::Scale { .. })));
    }
    assert!(matches!(compressor.set_scale(2, 1.0), Err(CompressError::NoSelection { .. })));
    compressor.set_scale(1, 0.25).unwrap();
    let sent = sent(&compressor, 1);
    assert!(sent.iter().all(|value| [0.0, 0.25, -0.25].contains(value)) && sent.contains(&0.25));
    compressor.commit().unwrap();
    let expected: Vec<f32> = gradients[1].iter().zip(&sent).map(|(g, sent)| g - sent).collect();
    assert_eq!(compressor.residual(1).unwrap(), expected);
}

#[test]
fn statistics_count_what_was_sent() {
    let layout = small_model(Policy::adacomp());
    let mut compressor = Compressor::new(layout.clone());
    compressor.compress(&named(&layout, &gradients(&layout, &mut Random(14)))).unwrap();
    let mut frame = Vec::new();
    compressor.encode(Codec::Rice, 0, 0, &mut frame).unwrap();
    let all = [0, 1, 2].map(|layer| compressor.layer_statistics(layer));
    // Header and checksum come on top of the sections.
    assert_eq!(all.iter().map(|layer| layer.bytes).sum::<usize>() + 36, frame.len());
    assert_eq!(all[1].elements, 2400);
    assert_eq!(all[1].selected, selected(&compressor, 1).len());
    assert!(all[1].scale > 0.0);
    assert_eq!((all[2].selected, all[2].scale), (40, 0.0));
    assert_eq!(all[2].bytes, 40 * 4 + 4);
    compressor.commit().unwrap();
    let residual = compressor.residual(1).unwrap().to_vec();
    let statistics = compressor.residual_statistics(1).unwrap();
    let norm = residual.iter().map(|&r| f64::from(r).powi(2)).sum::<f64>().sqrt();
    assert!((statistics.norm - norm).abs() < 1e-9 * norm);
    assert_eq!(compressor.residual_statistics(2), None);
}

#[test]
fn an_empty_tensor_is_no_special_case() {
    let layout = one_layer(0, 50);
    let mut compressor = Compressor::new(layout);
    let mut frame = Vec::new();
    for number in 0..3 {
        compressor.compress(&[("weight", [0.0f32; 0].as_slice().into())]).unwrap();
        compressor.encode(Codec::Rice, 0, number, &mut frame).unwrap();
        compressor.commit().unwrap();
    }
}
