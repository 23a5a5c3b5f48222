//! Any gradients, NaN and infinities among them: all kernels agree, frames carry what was selected, nothing is lost.
//!
//! The first bytes pick the bin and the soft threshold, the rest are two steps of gradients, bit by bit.
#![no_main]

use adacomp::{Codec, Compressor, Frame, Kernel, Parameter, Policy, Treatment};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

fuzz_target!(|data: &[u8]| {
    let Some((&[bin_low, bin_high, factor], rest)) = data.split_first_chunk() else { return };
    let bin = u32::from(u16::from_le_bytes([bin_low, bin_high])) % 600 + 1;
    let values: Vec<f32> = rest.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let (first, second) = values.split_at(values.len() / 2);
    let second = &second[..first.len()];

    let policy = Policy::adacomp()
        .for_name("*", Treatment::Bins(bin))
        .soft_threshold(1.0 + f32::from(factor % 5) / 2.0);
    let layout = Arc::new(policy.layout([Parameter::new("weight", &[first.len()])]).unwrap());
    let mut compressors: Vec<_> =
        Kernel::all().into_iter().map(|kernel| Compressor::new(layout.clone()).with_kernel(kernel)).collect();
    let (mut bytes, mut frame) = (Vec::new(), Frame::default());
    for (step, gradient) in [first, second].into_iter().enumerate() {
        let before = compressors[0].residual(0).unwrap().to_vec();
        for compressor in &mut compressors {
            compressor.compress(&[("weight", gradient.into())]).unwrap();
        }
        let (definition, others) = compressors.split_first_mut().unwrap();
        assert!(others.iter().all(|other| other.packet(0) == definition.packet(0)));
        let finite = definition.is_finite();
        for codec in [Codec::Paper, Codec::Rice] {
            definition.encode(codec, 0, step as u64, &mut bytes).unwrap();
            let header = frame.decode(&bytes, &layout).unwrap();
            assert_eq!(header.non_finite, !finite);
            assert_eq!(frame.sections().len(), usize::from(finite));
            if finite {
                let (mut values, mut selected) = (Vec::new(), Vec::new());
                assert_eq!(Some(frame.packet(0, &mut values, &mut selected)), definition.packet(0));
            }
        }
        let mut sent = vec![0.0; gradient.len()];
        if finite {
            definition.packet(0).unwrap().add_to(&mut sent);
        }
        for compressor in &mut compressors {
            if finite { compressor.commit().unwrap() } else { compressor.rollback() }
        }
        let after: Vec<Vec<u32>> = compressors
            .iter_mut()
            .map(|compressor| compressor.residual(0).unwrap().iter().map(|value| value.to_bits()).collect())
            .collect();
        assert!(after.windows(2).all(|pair| pair[0] == pair[1]));
        for (i, &new) in after[0].iter().enumerate() {
            let new = f32::from_bits(new);
            let g = before[i] + gradient[i];
            // A bin with a bad gradient keeps its residual; everything else is conserved.
            assert!(new.is_finite());
            assert!(new == g - sent[i] || new == before[i] && !finite);
        }
    }
});
