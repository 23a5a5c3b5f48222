//! Memory: none is allocated in steady state, and what is kept beside the residuals is little.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

#[path = "../benches/common/mod.rs"]
mod common;

use adacomp::{Averager, Codec, Compressor, Kind, Outcome, Parameter, Policy, Sending, Treatment};
use common::Gradients;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static LIVE_BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        LIVE_BYTES.set(LIVE_BYTES.get().wrapping_add(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.set(LIVE_BYTES.get().wrapping_sub(layout.size()));
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
        Policy::adacomp().for_kind(Kind::Matrix, Treatment::Bins(16_384)),
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
            let before = ALLOCATIONS.get();
            let (a, b, c) = (gradients[0].as_slice(), gradients[1].as_slice(), gradients[2].as_slice());
            let sending = if step % 3 == 1 { Sending::Compressed } else { Sending::Flush };
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
                allocations += ALLOCATIONS.get() - before;
            }
        }
        assert_eq!(allocations, 0, "{policy:?}");
    }
    // The counter counts.
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![1u8; 100]));
    assert!(ALLOCATIONS.get() > before);
}

/// Two learners' frames, of two groups of layers of very different size, and the average of both.
#[test]
fn working_memory_is_little_beside_the_residuals() {
    for codec in [Codec::Rice, Codec::Paper] {
        let parameters = [Parameter::new("large", &[1000, 900]), Parameter::new("small", &[100, 500])];
        let layout = Arc::new(Policy::adacomp().layout(parameters).unwrap());
        let mut gradients: Vec<_> = layout.layers().iter().map(|layer| vec![0.0; layer.elements()]).collect();
        let mut output = gradients.clone();
        let mut random = Gradients::new(layout.elements());
        let mut other = Compressor::new(layout.clone());
        let mut theirs = Vec::new();
        let residual_bytes = 4 * layout.elements();

        let before = LIVE_BYTES.get();
        let mut own = Compressor::new(layout.clone());
        let mut averager = Averager::new(layout.clone());
        let mut message = Vec::new();
        let mut kept = Vec::new();
        for step in 0..200 {
            let mut most = 0;
            for group in 0..layout.len() {
                for (compressor, message, learner) in
                    [(&mut own, &mut message, 0), (&mut other, &mut theirs, 1)]
                {
                    random.fill(&mut gradients[group]);
                    let gradient = gradients[group].as_slice();
                    let live = LIVE_BYTES.get();
                    compressor.compress_layer(group, gradient.into(), Sending::Compressed).unwrap();
                    compressor.encode_layers(codec, learner, step, &[group], message).unwrap();
                    // What belongs to the other learner does not count.
                    if learner == 1 {
                        LIVE_BYTES.set(live);
                    }
                }
                let outcome = averager.check_layers(step, &[&message, &theirs], &[group]).unwrap();
                assert_eq!(outcome, Outcome::Averaged);
                averager.write(&mut [&mut output[group]]).unwrap();
                most = most.max(LIVE_BYTES.get() - before - residual_bytes);
            }
            own.commit().unwrap();
            let live = LIVE_BYTES.get();
            other.commit().unwrap();
            LIVE_BYTES.set(live);
            kept.push(most);
        }
        let (first, later) = (kept[..5].iter().max().unwrap(), kept.last().unwrap());
        let share = |bytes: &usize| *bytes as f64 / residual_bytes as f64;
        println!(
            "{codec:?}: {:.1}% in the first steps, {:.1}% later",
            100.0 * share(first),
            100.0 * share(later)
        );
        // A copy of a selection takes as much of a copy of the residuals as is selected, here 0.9%. There are two: what was sent,
        // and what is being selected from the largest layer. Two frames and a message take half of one. The rest is room to grow.
        assert!(share(later) <= 0.05, "{codec:?}: {later} bytes beside {residual_bytes} of residuals");
    }
}
