//! The frames of all learners into one gradient.

use crate::support::{Random, gradients, named, one_layer, sent, small_model};
use adacomp::{
    AverageError, Averager, Codec, Compressor, DecodeError, Kind, Outcome, Parameter, Policy, Treatment,
};
use std::sync::Arc;

fn frames(learners: usize, step: u64, codec: Codec) -> (Vec<Compressor>, Vec<Vec<u8>>) {
    let layout = small_model(Policy::adacomp());
    let mut random = Random(21 + step);
    let mut compressors: Vec<_> = (0..learners).map(|_| Compressor::new(layout.clone())).collect();
    let mut frames = vec![Vec::new(); learners];
    for (learner, compressor) in compressors.iter_mut().enumerate() {
        compressor.compress(&named(&layout, &gradients(&layout, &mut random))).unwrap();
        compressor.encode(codec, learner, step, &mut frames[learner]).unwrap();
    }
    (compressors, frames)
}

fn output() -> [Vec<f32>; 3] {
    [vec![9.0; 1152], vec![9.0; 2400], vec![9.0; 40]]
}

fn average(step: u64, frames: &[Vec<u8>], output: &mut [Vec<f32>; 3]) -> Result<Outcome, AverageError> {
    let mut slices = output.each_mut().map(|layer| layer.as_mut_slice());
    Averager::new(small_model(Policy::adacomp())).average(step, frames, &mut slices)
}

#[test]
fn sums_in_learner_order_then_divides() {
    for codec in [Codec::Paper, Codec::Rice] {
        let (compressors, frames) = frames(3, 4, codec);
        let mut output = output();
        assert_eq!(average(4, &frames, &mut output).unwrap(), Outcome::Averaged);
        for (layer, output) in output.iter().enumerate() {
            let sent: Vec<_> = compressors.iter().map(|compressor| sent(compressor, layer)).collect();
            for (i, value) in output.iter().enumerate() {
                let sum = sent.iter().fold(0.0f32, |sum, sent| sum + sent[i]);
                assert_eq!(value.to_bits(), (sum * (1.0f32 / 3.0)).to_bits());
            }
        }
    }
}

/// Frames are read a few elements at a time while the average is made block by block: wherever these end, and over several steps
/// with the same memory.
#[test]
fn averages_of_long_layers_are_what_was_sent() {
    for (elements, bin) in [(30_000, 50), (30_000, 500), (4096 * 3, 4096), (5000, 1)] {
        for codec in [Codec::Paper, Codec::Rice] {
            let layout = one_layer(elements, bin);
            let mut random = Random(elements as u64 + u64::from(bin));
            let mut compressors: Vec<_> = (0..3).map(|_| Compressor::new(layout.clone())).collect();
            let mut averager = Averager::new(layout);
            let (mut frames, mut average) = (vec![Vec::new(); 3], vec![9.0; elements]);
            for step in 0..4 {
                for (learner, compressor) in compressors.iter_mut().enumerate() {
                    let gradient = random.gradient(elements);
                    compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
                    compressor.encode(codec, learner, step, &mut frames[learner]).unwrap();
                }
                let outcome = averager.average(step, &frames, &mut [&mut average]).unwrap();
                assert_eq!(outcome, Outcome::Averaged);
                let sent: Vec<_> = compressors.iter().map(|compressor| sent(compressor, 0)).collect();
                for (i, value) in average.iter().enumerate() {
                    let sum = sent.iter().fold(0.0f32, |sum, sent| sum + sent[i]);
                    assert_eq!(value.to_bits(), (sum * (1.0f32 / 3.0)).to_bits());
                }
                compressors.iter_mut().for_each(|compressor| compressor.commit().unwrap());
            }
        }
    }
}

/// With layers of all kinds, long and short ones, and with errors, which are those of the first bad frame.
#[test]
fn threads_give_the_same_bits() {
    let small_bins = Policy::adacomp().for_kind(Kind::Matrix, Treatment::Bins(2));
    for policy in [small_bins, Policy::top_k(30.0), Policy::half(), Policy::dense()] {
        let parameters = [("long", 900_001), ("short", 1500), ("odd", 140_003), ("vector", 40)];
        let parameters = parameters.map(|(name, elements)| Parameter::new(name, &[1, elements]));
        let layout = Arc::new(policy.layout(parameters).unwrap());
        let mut random = Random(3);
        let mut frames = vec![Vec::new(); 5];
        for (learner, frame) in frames.iter_mut().enumerate() {
            let mut compressor = Compressor::new(layout.clone());
            compressor.compress(&named(&layout, &gradients(&layout, &mut random))).unwrap();
            compressor.encode(Codec::Rice, learner, 0, frame).unwrap();
        }
        // Enough for several threads.
        assert!(frames.concat().len() > 2 << 17, "{}", frames.concat().len());
        let average = |threads: usize, frames: &[Vec<u8>]| {
            let layers = layout.layers().iter();
            let mut output: Vec<_> = layers.map(|layer| vec![9.0; layer.elements()]).collect();
            let mut slices: Vec<_> = output.iter_mut().map(Vec::as_mut_slice).collect();
            let outcome = Averager::new(layout.clone()).with_threads(threads).average(0, frames, &mut slices);
            (outcome, output.concat().iter().map(|value| value.to_bits()).collect::<Vec<_>>())
        };
        let mut bad = frames.clone();
        bad[1][60] ^= 1;
        bad[4].clear();
        for threads in [2, 3, 8] {
            assert!(average(threads, &frames) == average(1, &frames), "{policy:?} {threads}");
            assert!(average(threads, &bad) == average(1, &bad), "{policy:?} {threads}");
        }
        assert!(matches!(average(2, &bad).0, Err(AverageError::Frame { learner: 1, .. })));
    }
}

#[test]
fn a_bad_frame_is_named_and_nothing_is_written() {
    let (_, good) = frames(3, 4, Codec::Rice);
    let (_, other_step) = frames(3, 5, Codec::Rice);
    let mut damaged = good.clone();
    damaged[1][50] ^= 1;
    let mut swapped = good.clone();
    swapped.swap(0, 1);
    let stale = vec![good[0].clone(), good[1].clone(), other_step[2].clone()];
    let repeated = vec![good[0].clone(), good[0].clone(), good[2].clone()];
    let foreign = {
        let mut compressor = Compressor::new(one_layer(300, 50));
        compressor.compress(&[("weight", Random(1).gradient(300).as_slice().into())]).unwrap();
        let mut frame = Vec::new();
        compressor.encode(Codec::Rice, 2, 4, &mut frame).unwrap();
        vec![good[0].clone(), good[1].clone(), frame]
    };
    let is_frame_1 = |error: &AverageError| {
        matches!(error, AverageError::Frame { learner: 1, source: DecodeError::Checksum { .. } })
    };
    let is_foreign = |error: &AverageError| {
        matches!(error, AverageError::Frame { learner: 2, source: DecodeError::Fingerprint { .. } })
    };
    type Check<'a> = &'a dyn Fn(&AverageError) -> bool;
    let cases: [(&[Vec<u8>], Check<'_>); 6] = [
        (&damaged, &is_frame_1),
        (&swapped, &|error| *error == AverageError::Learner { expected: 0, actual: 1 }),
        (&repeated, &|error| *error == AverageError::Learner { expected: 1, actual: 0 }),
        (&stale, &|error| *error == AverageError::Step { learner: 2, expected: 4, actual: 5 }),
        (&foreign, &is_foreign),
        (&[], &|error| *error == AverageError::Empty),
    ];
    for (frames, is_expected) in cases {
        let mut output = output();
        let error = average(4, frames, &mut output).unwrap_err();
        assert!(is_expected(&error), "{error}");
        assert!(output.iter().flatten().all(|&value| value == 9.0));
    }
}

#[test]
fn one_learners_nan_drops_the_step_on_all() {
    let layout = small_model(Policy::adacomp());
    let (_, mut frames) = frames(3, 4, Codec::Rice);
    let mut gradients = gradients(&layout, &mut Random(2));
    gradients[2][7] = f32::NAN;
    let mut compressor = Compressor::new(layout.clone());
    compressor.compress(&named(&layout, &gradients)).unwrap();
    compressor.encode(Codec::Rice, 1, 4, &mut frames[1]).unwrap();
    assert_eq!(frames[1].len(), 36);
    let mut output = output();
    assert_eq!(average(4, &frames, &mut output).unwrap(), Outcome::NonFinite { learner: 1 });
    assert!(output.iter().flatten().all(|&value| value == 9.0));
}

#[test]
fn frames_of_some_layers_are_averaged_apart() {
    let layout = small_model(Policy::adacomp());
    let (mut compressors, whole) = frames(2, 4, Codec::Rice);
    let mut expected = output();
    let _ = average(4, &whole, &mut expected).unwrap();
    let mut averager = Averager::new(layout);
    let mut parts = vec![Vec::new(); 2];
    for (learner, compressor) in compressors.iter_mut().enumerate() {
        compressor.encode_layers(Codec::Rice, learner, 4, &[0, 2], &mut parts[learner]).unwrap();
    }
    let [mut conv, _, mut bias] = output();
    assert_eq!(averager.check_layers(4, &parts, &[0, 2]), Ok(Outcome::Averaged));
    averager.write(&mut [&mut conv, &mut bias]).unwrap();
    assert_eq!([&conv, &bias], [&expected[0], &expected[2]]);
    // After frames that cannot be averaged there is nothing to write.
    parts[1][40] ^= 1;
    assert!(averager.check_layers(4, &parts, &[0, 2]).is_err());
    assert_eq!(averager.write(&mut [&mut conv, &mut bias]), Err(AverageError::Empty));
}

#[test]
fn outputs_must_fit_the_layout() {
    let (_, frames) = frames(1, 0, Codec::Rice);
    let mut averager = Averager::new(small_model(Policy::adacomp()));
    let (mut a, mut b, mut c, mut d) = (vec![0.0; 1152], vec![0.0; 2400], vec![0.0; 41], vec![0.0; 3]);
    let error = averager.average(0, &frames, &mut [&mut a, &mut b, &mut c]).unwrap_err();
    assert_eq!(error, AverageError::Output { position: 2, expected: 40, actual: 41 });
    let error = averager.average(0, &frames, &mut [&mut a, &mut b]).unwrap_err();
    assert_eq!(error, AverageError::Output { position: 2, expected: 40, actual: 0 });
    let error = averager.average(0, &frames, &mut [&mut a, &mut b, &mut c[..40], &mut d]).unwrap_err();
    assert_eq!(error, AverageError::Output { position: 3, expected: 0, actual: 3 });
}

/// Each learner's gradient is finite, but not their sum.
#[test]
fn a_sum_that_overflows_is_not_written() {
    let layout = small_model(Policy::adacomp());
    for (huge, codec) in [(0, Codec::Rice), (1, Codec::Paper), (2, Codec::Rice)] {
        // With a third learner that takes away what the first gave, the sum of all would fit, but not that of the first two.
        for (values, fits) in [([3e38, 3e38, -3e38], false), ([3e38, -3e38, 3e38], true), ([1e38; 3], true)] {
            let mut frames = vec![Vec::new(); 3];
            for (learner, value) in values.into_iter().enumerate() {
                let mut compressor = Compressor::new(layout.clone());
                let mut gradients = gradients(&layout, &mut Random(5));
                gradients[huge].fill(value);
                compressor.compress(&named(&layout, &gradients)).unwrap();
                compressor.encode(codec, learner, 0, &mut frames[learner]).unwrap();
            }
            let mut written = output();
            let outcome = average(0, &frames, &mut written).unwrap();
            if fits {
                assert_eq!(outcome, Outcome::Averaged);
                assert!(written.iter().flatten().all(|value| value.is_finite()));
            } else {
                assert_eq!((outcome, written), (Outcome::NonFinite { learner: 0 }, output()));
            }
        }
    }
}

#[test]
#[should_panic(expected = "a clip of Some(inf)")]
fn a_clip_is_a_number() {
    let _ = Averager::new(small_model(Policy::adacomp())).with_clip(Some(f32::INFINITY));
}
