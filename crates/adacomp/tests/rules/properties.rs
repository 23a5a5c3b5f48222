//! Properties, on cases that proptest makes up.

use crate::support::{Random, has_packets, one_layer, residuals, sent};
use adacomp::internal::{decode_range, encode_range};
use adacomp::{
    AverageError, Averager, Codec, Compressor, DecodeError, Frame, FrameWriter, Header, Kernel, Outcome,
    Packet, Parameter, Policy, Selected, Sparse, Treatment,
};
use proptest::prelude::*;

fn bin() -> impl Strategy<Value = u32> {
    prop_oneof![1..70u32, 490..510u32, Just(16_384u32)]
}

fn treatment() -> impl Strategy<Value = Treatment> {
    prop_oneof![bin().prop_map(Treatment::Bins), (0.01f32..100.0).prop_map(Treatment::TopK)]
}

/// About this part of the elements.
fn draw_selected(elements: usize, density: f64, seed: u64) -> Vec<Selected> {
    let mut random = Random(seed);
    let limit = (density * 1e9) as usize;
    (0..elements as u32)
        .map(|index| (random.below(1_000_000_000) < limit, Selected::new(index, random.below(2) == 1)))
        .filter_map(|(hit, element)| hit.then_some(element))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Nothing is lost: `R_new + sent = R_old + dW` within the rounding of those two operations, step by step.
    #[test]
    fn conservation(
        elements in 0..1500usize,
        treatment in treatment(),
        factor in 1.0f32..3.0,
        seed in 1..u64::MAX,
        commits in prop::collection::vec(prop::bool::weighted(0.8), 1..8),
    ) {
        let policy = Policy::adacomp().for_name("*", treatment).soft_threshold(factor);
        let layout = policy.layout([Parameter::new("weight", &[elements])]).unwrap();
        let mut compressor = Compressor::new(layout);
        let mut random = Random(seed);
        for commit in commits {
            let old = compressor.residual(0).unwrap().to_vec();
            let gradient = random.gradient(elements);
            compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
            let mut sent = sent(&compressor, 0);
            if commit {
                compressor.commit().unwrap();
            } else {
                compressor.rollback();
                sent.fill(0.0);
            }
            for (i, &new) in compressor.residual(0).unwrap().iter().enumerate() {
                let before = f64::from(old[i]) + f64::from(gradient[i]);
                let after = f64::from(new) + f64::from(sent[i]);
                let rounding = (f64::from(new.abs()) + before.abs()) * f64::from(f32::EPSILON) / 2.0;
                prop_assert!((before - after).abs() <= rounding, "{} {} {} {}", old[i], gradient[i], sent[i], new);
            }
        }
    }

    /// Every kernel, and any number of threads, gives the same bits.
    #[test]
    fn kernels_and_threads_agree(
        elements in prop_oneof![0..3000usize, 262_144..270_000usize],
        bin in bin(),
        factor in prop_oneof![Just(2.0f32), Just(1.0), 1.0f32..3.0],
        threads in 1..5usize,
        seed in 1..u64::MAX,
    ) {
        let policy = Policy::adacomp().for_name("*", Treatment::Bins(bin)).soft_threshold(factor);
        let layout = std::sync::Arc::new(policy.layout([Parameter::new("weight", &[elements])]).unwrap());
        let mut one = Compressor::new(layout.clone()).with_kernel(Kernel::all()[0]);
        let variants = Kernel::all().into_iter().flat_map(|kernel| [(kernel, 1), (kernel, threads)]);
        let mut others: Vec<_> = variants
            .map(|(kernel, threads)| Compressor::new(layout.clone()).with_kernel(kernel).with_threads(threads))
            .collect();
        let mut random = Random(seed);
        for _ in 0..3 {
            let gradient = random.gradient(elements);
            one.compress(&[("weight", gradient.as_slice().into())]).unwrap();
            for other in &mut others {
                other.compress(&[("weight", gradient.as_slice().into())]).unwrap();
                prop_assert_eq!(one.packet(0), other.packet(0));
                other.commit().unwrap();
            }
            one.commit().unwrap();
        }
        for other in &mut others {
            prop_assert_eq!(residuals(&mut one), residuals(other));
        }
    }

    /// A packet survives its frame, whatever is selected.
    #[test]
    fn round_trip(
        elements in 1..100_000usize,
        bin in bin(),
        scale in prop_oneof![Just(0.0f32), Just(f32::MIN_POSITIVE), Just(f32::MAX), 0.0f32..1.0],
        density in prop_oneof![Just(0.0), Just(1.0), 0.0..0.001, 0.0..1.0],
        seed in 1..u64::MAX,
    ) {
        let layout = one_layer(elements, bin);
        let selected = draw_selected(elements, density, seed);
        let packet = Packet::Sparse(Sparse { values: [scale, -scale], selected: &selected });
        for codec in [Codec::Paper, Codec::Rice] {
            let header =
                Header { codec, non_finite: false, fingerprint: layout.fingerprint(), step: seed, learner: 5 };
            let mut bytes = Vec::new();
            let mut writer = FrameWriter::new(&header, &layout, &mut bytes);
            writer.section(0, packet);
            writer.finish();
            let mut frame = Frame::default();
            prop_assert_eq!(frame.decode(&bytes, &layout), Ok(header));
            prop_assert!(has_packets(&frame, [(0, packet)]));
        }
    }

    /// Ranges of a selection survive, one behind the other.
    #[test]
    fn ranges_round_trip(
        elements in 1..20_000usize,
        density in prop_oneof![Just(0.0), Just(1.0), 0.0..0.01, 0.0..1.0],
        pieces in 1..20usize,
        seed in 1..u64::MAX,
    ) {
        let selected = draw_selected(elements, density, seed);
        let sparse = Sparse { values: [1.0, -1.0], selected: &selected };
        let ranges = || (0..pieces).map(|piece| elements * piece / pieces..elements * (piece + 1) / pieces);
        let mut bytes = Vec::new();
        ranges().for_each(|range| encode_range(sparse.within(range.clone()).selected, range, &mut bytes));
        let (mut rest, mut decoded) = (bytes.as_slice(), Vec::new());
        for range in ranges() {
            prop_assert_eq!(decode_range(&mut rest, range, 0, &mut decoded), Ok(()));
        }
        prop_assert!(rest.is_empty());
        prop_assert_eq!(decoded, selected);
        for length in 0..bytes.len().min(100) {
            let mut rest = &bytes[..length];
            let _ = ranges().try_for_each(|range| decode_range(&mut rest, range, 0, &mut Vec::new()));
        }
    }

    /// A frame that was changed, with a checksum that fits the change, is refused or decodes to elements of the layer.
    #[test]
    fn mutated_frames_never_panic(
        elements in 1..5_000usize,
        bin in bin(),
        paper in any::<bool>(),
        seed in 1..u64::MAX,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let layout = one_layer(elements, bin);
        let codec = if paper { Codec::Paper } else { Codec::Rice };
        let mut compressor = Compressor::new(layout.clone());
        compressor.compress(&[("weight", Random(seed).gradient(elements).as_slice().into())]).unwrap();
        let mut bytes = Vec::new();
        compressor.encode(codec, 0, 0, &mut bytes).unwrap();
        bytes.truncate(bytes.len() - 4);
        for (position, byte) in &changes {
            // Mostly behind the header, where it is interesting.
            let position = position.index(bytes.len() + 32).saturating_sub(32).max(position.index(8));
            let position = position.min(bytes.len() - 1);
            bytes[position] = *byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()) + 1);
        }
        let checksum = crate::wire::crc32(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        let mut output = vec![0.0; elements];
        let mut frame = Frame::default();
        let decoded = frame.decode(&bytes, &layout);
        if decoded.is_ok() {
            for position in 0..frame.sections().len() {
                frame.packet(position, &mut Vec::new(), &mut Vec::new()).add_to(&mut output);
            }
            prop_assert!(output.iter().all(|value| value.is_finite()));
        }
        // The average is read from the bytes themselves, and finds the same in them.
        let mut average = vec![0.0; elements];
        match Averager::new(layout).average(0, &[&bytes], &mut [&mut average]) {
            Ok(Outcome::Averaged) => prop_assert!(decoded.is_ok() && average == output),
            Err(AverageError::Frame { source, .. }) => prop_assert_eq!(decoded, Err(source)),
            _ => prop_assert!(decoded.is_ok()),
        }
    }

    /// Any bytes at all, behind a header and before a checksum that fit, are refused or decoded to elements of the layer.
    #[test]
    fn any_bytes_never_panic(
        paper in any::<bool>(),
        // Sections of a few bytes, so that many are whole, and any other bytes.
        body in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            prop::collection::vec(any::<u8>(), 5..40).prop_map(|contents| {
                let scale_and_length = [&[0, 2, contents.len() as u8 + 4][..], &1.0f32.to_le_bytes()].concat();
                [scale_and_length, contents].concat()
            }),
        ],
    ) {
        let layout = one_layer(1000, 50);
        let codec = if paper { Codec::Paper } else { Codec::Rice };
        let header = Header { codec, non_finite: false, fingerprint: layout.fingerprint(), step: 0, learner: 0 };
        let mut bytes = Vec::new();
        FrameWriter::new(&header, &layout, &mut bytes).finish();
        bytes.truncate(Header::LENGTH);
        bytes[Header::LENGTH - 4] = 1;
        bytes.extend(body);
        bytes.extend(crate::wire::crc32(&bytes).to_le_bytes());
        let mut frame = Frame::default();
        let decoded = frame.decode(&bytes, &layout);
        let reached = !matches!(decoded, Err(DecodeError::Checksum { .. } | DecodeError::Sections { .. }));
        prop_assert!(reached);
        if decoded.is_ok() {
            frame.packet(0, &mut Vec::new(), &mut Vec::new()).add_to(&mut [0.0; 1000]);
        }
    }

    /// What all learners get is what all learners sent: over many steps, sent plus kept is all gradients.
    #[test]
    fn many_steps_of_many_learners_conserve(learners in 1..5usize, bin in bin(), seed in 1..u64::MAX) {
        let layout = one_layer(700, bin);
        let mut compressors: Vec<_> = (0..learners).map(|_| Compressor::new(layout.clone())).collect();
        let mut averager = Averager::new(layout);
        let mut random = Random(seed);
        let (mut given, mut received) = (vec![0.0f64; 700], vec![0.0f64; 700]);
        let mut frames = vec![Vec::new(); learners];
        let mut output = vec![0.0; 700];
        for step in 0..10 {
            for (learner, compressor) in compressors.iter_mut().enumerate() {
                let gradient = random.gradient(700);
                given.iter_mut().zip(&gradient).for_each(|(sum, &value)| *sum += f64::from(value));
                compressor.compress(&[("weight", gradient.as_slice().into())]).unwrap();
                compressor.encode(Codec::Rice, learner, step, &mut frames[learner]).unwrap();
            }
            let outcome = averager.average(step, &frames, &mut [&mut output]).unwrap();
            prop_assert_eq!(outcome, Outcome::Averaged);
            compressors.iter_mut().for_each(|compressor| compressor.commit().unwrap());
            received.iter_mut().zip(&output).for_each(|(sum, &value)| *sum += f64::from(value) * learners as f64);
        }
        for compressor in &mut compressors {
            let residual = compressor.residual(0).unwrap();
            received.iter_mut().zip(residual).for_each(|(sum, &value)| *sum += f64::from(value));
        }
        for (given, received) in given.iter().zip(&received) {
            prop_assert!((given - received).abs() < 1e-4, "{given} {received}");
        }
    }
}
