//! Compression against the physical limit: how much longer than `R += dW`, which moves the same bytes.
//!
//! `cargo bench -p adacomp --bench limit -- --json [--quick]`. Every ratio is of medians, the two sides timed in turn in
//! the same run; gradients are fresh in each step.

mod common;

use adacomp::{
    Averager, Codec, Compressor, FrameWriter, Header, Kernel, Layout, Outcome, Packet, Parameter, Policy,
    Selected, Sending, Sparse, Treatment,
};
use common::{Gradients, Random, flag, median, number, print, text, time};
use std::hint::black_box;

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
    }
}

fn layout(length: usize, bin: u32) -> Layout {
    let policy = Policy::adacomp().for_name("*", Treatment::Bins(bin));
    policy.layout([Parameter::new("weight", &[length])]).expect("a valid layout")
}

#[inline(never)]
fn limit(residual: &mut [f32], gradient: &[f32]) {
    residual.iter_mut().zip(gradient).for_each(|(r, dw)| *r += dw);
}

fn compress(kernel: Kernel, bin: u32, length: usize, rounds: usize, gradients: &mut Gradients) {
    let mut compressor = Compressor::new(layout(length, bin)).with_kernel(kernel);
    let mut residual = vec![0.0; length];
    let mut gradient = vec![0.0; length];
    let (mut limits, mut times, mut selected) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        gradients.fill(&mut gradient);
        let mut measure_limit = || time(|| limit(black_box(&mut residual), black_box(&gradient)));
        let mut measure = || {
            time(|| {
                compressor
                    .compress_layer(0, gradient.as_slice().into(), Sending::Compressed)
                    .expect("a valid gradient");
                compressor.commit().expect("a finite gradient");
            })
        };
        // Whoever comes second finds the gradient in a nearer cache, so they take turns.
        let (limit, time) = if round % 2 == 0 {
            let limit = measure_limit();
            (limit, measure())
        } else {
            let time = measure();
            (measure_limit(), time)
        };
        if round >= WARM_UP {
            limits.push(limit);
            times.push(time);
            selected.push(compressor.statistics().map(|layer| layer.selected).sum::<usize>() as f64);
        }
    }
    report("compress", &kernel.to_string(), bin, length, &mut limits, &mut times, &mut selected);
}

/// Encoding, and averaging as learners do, at 1% density.
fn wire(bin: u32, length: usize, rounds: usize) {
    let layout = layout(length, bin);
    let mut random = Random::new(3);
    let mut residual = vec![0.0; length];
    let gradient = vec![1.0; length];
    let mut output = vec![0.0; length];
    let (mut bytes, mut averager) = (Vec::new(), Averager::new(layout.clone()));
    let (mut limits, mut encodes, mut averages, mut counts) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        let selected: Vec<_> = (0..length as u32)
            .filter_map(|index| {
                let word = random.next();
                (word >> 40 < (1 << 24) / 100).then(|| Selected::new(index, word & 1 == 1))
            })
            .collect();
        let packet = Packet::Sparse(Sparse { values: [0.5, -0.5], selected: &selected });
        let header = Header {
            codec: Codec::Rice,
            non_finite: false,
            fingerprint: layout.fingerprint(),
            step: round as u64,
            learner: 0,
        };
        let limit = time(|| limit(black_box(&mut residual), black_box(&gradient)));
        let encode = time(|| {
            let mut writer = FrameWriter::new(&header, &layout, &mut bytes);
            writer.section(0, black_box(packet));
            writer.finish();
        });
        let average = time(|| {
            let frames = [black_box(&bytes)];
            let outcome = averager.average(round as u64, &frames, &mut [&mut output]);
            assert_eq!(outcome, Ok(Outcome::Averaged));
        });
        if round >= WARM_UP {
            limits.push(limit);
            encodes.push(encode);
            averages.push(average);
            counts.push(selected.len() as f64);
        }
    }
    report("encode", "scalar", bin, length, &mut limits, &mut encodes, &mut counts);
    report("average", "scalar", bin, length, &mut limits, &mut averages, &mut counts);
}

fn report(
    op: &str,
    kernel: &str,
    bin: u32,
    length: usize,
    limits: &mut [f64],
    times: &mut [f64],
    selected: &mut [f64],
) {
    let (limit, time, selected) = (median(limits), median(times), median(selected));
    print(&[
        ("op", text(op)),
        ("kernel", text(kernel)),
        ("bin", bin.to_string()),
        ("len", length.to_string()),
        ("ratio_to_limit", number(time / limit, 3)),
        ("limit_ms", number(limit * 1e3, 4)),
        ("time_ms", number(time * 1e3, 4)),
        ("selected_per_bin", number(selected * f64::from(bin) / length as f64, 2)),
    ]);
}
