//! Compression against the physical limit: how much longer than `R += dW`, which moves the same bytes.
//!
//! `cargo bench -p adacomp --bench limit [-- --quick]` prints JSON lines. Every ratio is of medians, the two sides timed in
//! turn in the same run; gradients are fresh in each step.

mod common;

use adacomp::{Averager, Codec, Compressor, FrameWriter, Header, Kernel, Outcome, Packet, Sending, Sparse};
use common::{Gradients, Random, flag, layout, median, time};
use std::hint::black_box;
use std::sync::Arc;

/// Steps that bring the residual into its steady state.
const WARM_UP: usize = 12;

fn main() {
    let lengths: &[usize] = if flag("--quick") { &[100_000] } else { &[1_000_000, 25_000_000] };
    for &length in lengths {
        let rounds = if length > 10_000_000 { 31 } else { 301 };
        let mut gradients = Gradients::new(length);
        for kernel in Kernel::all() {
            for bin in [500, 50] {
                compress(kernel, bin, length, rounds, &mut gradients);
            }
        }
        for bin in [500, 50] {
            wire(bin, length, rounds);
        }
        many_frames(length, rounds.min(31));
    }
}

#[inline(never)]
fn limit(residual: &mut [f32], gradient: &[f32]) {
    residual.iter_mut().zip(gradient).for_each(|(r, dw)| *r += dw);
}

fn compress(kernel: Kernel, bin: u32, length: usize, rounds: usize, gradients: &mut Gradients) {
    let mut compressor = Compressor::new(layout(length, bin)).with_kernel(kernel);
    let (mut residual, mut gradient) = (vec![0.0; length], vec![0.0; length]);
    let mut samples = Vec::new();
    for round in 0..WARM_UP + rounds {
        gradients.fill(&mut gradient);
        let mut limit = || time(|| limit(black_box(&mut residual), black_box(&gradient)));
        let mut compress = || {
            time(|| {
                let gradient = gradient.as_slice().into();
                compressor.compress_layer(0, gradient, Sending::Compressed).expect("a valid gradient");
                compressor.commit().expect("a finite gradient");
            })
        };
        // Whoever comes second finds the gradient in a nearer cache, so they take turns.
        let (limit, time) = if round % 2 == 0 {
            let limit = limit();
            (limit, compress())
        } else {
            let time = compress();
            (limit(), time)
        };
        samples.push([limit, time, compressor.layer_statistics(0).selected as f64]);
    }
    report("compress", &kernel.to_string(), bin, length, &samples[WARM_UP..]);
}

/// Encoding, and averaging as learners do, at 1% density.
fn wire(bin: u32, length: usize, rounds: usize) {
    let layout = layout(length, bin);
    let mut random = Random::new(3);
    let (mut residual, gradient) = (vec![0.0; length], vec![1.0; length]);
    let mut output = vec![0.0; length];
    let (mut bytes, mut averager) = (Vec::new(), Averager::new(layout.clone()));
    let (mut encodes, mut averages) = (Vec::new(), Vec::new());
    for step in 0..(WARM_UP + rounds) as u64 {
        let selected = random.selection(length, 0.01);
        let packet = Packet::Sparse(Sparse { values: [0.5, -0.5], selected: &selected });
        let fingerprint = layout.fingerprint();
        let header = Header { codec: Codec::Rice, non_finite: false, fingerprint, step, learner: 0 };
        let limit = time(|| limit(black_box(&mut residual), black_box(&gradient)));
        let encode = time(|| {
            let mut writer = FrameWriter::new(&header, &layout, &mut bytes);
            writer.section(0, black_box(packet));
            writer.finish();
        });
        let average = time(|| {
            let outcome = averager.average(step, &[black_box(&bytes)], &mut [&mut output]);
            assert_eq!(outcome, Ok(Outcome::Averaged));
        });
        encodes.push([limit, encode, selected.len() as f64]);
        averages.push([limit, average, selected.len() as f64]);
    }
    report("encode", "scalar", bin, length, &encodes[WARM_UP..]);
    report("average", "scalar", bin, length, &averages[WARM_UP..]);
}

/// Averaging the frames of 128 learners at 1% density, on one thread and on two.
fn many_frames(length: usize, rounds: usize) {
    const LEARNERS: usize = 128;
    let layout = Arc::new(layout(length, 500));
    let mut random = Random::new(5);
    let frames = (0..LEARNERS).map(|learner| {
        let selected = random.selection(length, 0.01);
        let header = Header {
            codec: Codec::Rice,
            non_finite: false,
            fingerprint: layout.fingerprint(),
            step: 0,
            learner,
        };
        let mut bytes = Vec::new();
        let mut writer = FrameWriter::new(&header, &layout, &mut bytes);
        writer.section(0, Packet::Sparse(Sparse { values: [0.5, -0.5], selected: &selected }));
        writer.finish();
        bytes
    });
    let frames: Vec<_> = frames.collect();
    let (mut residual, gradient, mut output) = (vec![0.0; length], vec![1.0; length], vec![0.0; length]);
    let mut averagers = [1, 2].map(|threads| Averager::new(layout.clone()).with_threads(threads));
    let mut samples = [const { Vec::new() }; 3];
    for _ in 0..2 + rounds {
        samples[0].push(time(|| limit(black_box(&mut residual), black_box(&gradient))));
        for (averager, samples) in averagers.iter_mut().zip(&mut samples[1..]) {
            samples.push(time(|| {
                let outcome = averager.average(0, black_box(&frames), &mut [&mut output]);
                assert_eq!(outcome, Ok(Outcome::Averaged));
            }));
        }
    }
    let [limit, one, two] = samples.map(|samples| median(samples[2..].iter().copied()));
    println!(
        r#"{{"op": "average 128 frames", "len": {length}, "ratio_to_limit": {:.2}, "two_threads_over_one": {:.3}, "limit_ms": {:.4}, "time_ms": {:.4}}}"#,
        one / limit,
        two / one,
        1e3 * limit,
        1e3 * one
    );
}

/// Prints the medians of samples: seconds of the limit and of the work, and selected elements.
fn report(op: &str, kernel: &str, bin: u32, length: usize, samples: &[[f64; 3]]) {
    let [limit, time, selected] = [0, 1, 2].map(|column| median(samples.iter().map(|sample| sample[column])));
    let (ratio, limit_ms, time_ms) = (time / limit, 1e3 * limit, 1e3 * time);
    let per_bin = selected * f64::from(bin) / length as f64;
    println!(
        r#"{{"op": "{op}", "kernel": "{kernel}", "bin": {bin}, "len": {length}, "ratio_to_limit": {ratio:.3}, "limit_ms": {limit_ms:.4}, "time_ms": {time_ms:.4}, "selected_per_bin": {per_bin:.2}}}"#
    );
}
