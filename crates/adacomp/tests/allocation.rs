//! No allocation in steady state: compress, encode, decode and average reuse their memory.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

use adacomp::{Averager, Codec, Compressor, Kind, Outcome, Parameter, Policy, Sending, Treatment};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn no_allocation_in_steady_state() {
    for policy in [
        Policy::adacomp(),
        Policy::local_selection(),
        Policy::top_k(1.0),
        Policy::half(),
        Policy::dense(),
        Policy::adacomp().kind(Kind::Matrix, Treatment::Bins(16_384)),
    ] {
        let parameters = [
            Parameter::new("conv", &[64, 32, 3, 3]),
            Parameter::new("fc", &[300, 400]),
            Parameter::new("bias", &[300]),
        ];
        let layout = Arc::new(policy.layout(parameters).unwrap());
        let mut compressor = Compressor::new(layout.clone());
        let mut averager = Averager::new(layout.clone());
        let mut frame = Vec::new();
        let mut output: Vec<_> = layout.layers().iter().map(|layer| vec![0.0; layer.elements()]).collect();
        let mut gradients = output.clone();
        let mut seed = 1u32;
        let mut allocations = 0;
        for step in 0..60 {
            for value in gradients.iter_mut().flatten() {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *value = (f64::from(seed) / f64::from(u32::MAX) - 0.5).powi(3) as f32;
            }
            let [conv, fc, bias] = &mut output[..] else { unreachable!("three layers") };
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            let (a, b, c) = (gradients[0].as_slice(), gradients[1].as_slice(), gradients[2].as_slice());
            let sending = if step % 3 == 1 { Sending::Selected } else { Sending::Everything };
            if step % 3 == 0 {
                compressor.compress(&[("conv", a.into()), ("fc", b.into()), ("bias", c.into())]).unwrap();
            } else {
                compressor.set_inverse_loss_scale(0.5).unwrap();
                for (layer, gradient) in gradients.iter().enumerate() {
                    compressor.compress_layer(layer, gradient.as_slice().into(), sending).unwrap();
                }
            }
            let codec = if step % 2 == 0 { Codec::Rice } else { Codec::Paper };
            compressor.encode(codec, 0, step, &mut frame).unwrap();
            let outcome =
                averager.average(step, std::slice::from_ref(&frame), &mut [conv, fc, bias]).unwrap();
            assert_eq!(outcome, Outcome::Averaged);
            compressor.commit().unwrap();
            if step >= 40 {
                allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
            }
        }
        assert_eq!(allocations, 0, "{policy:?}");
    }
    // The counter counts.
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(vec![1u8; 100]));
    assert!(ALLOCATIONS.load(Ordering::Relaxed) > before);
}
