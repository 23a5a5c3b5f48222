//! Bytes of a whole frame against the entropy of its selected elements, `n h(k/n) + k` bits.
//!
//! `cargo bench -p adacomp --bench wire -- --json`. Positions are uniformly random, or the compressor's own.

mod common;

use adacomp::{
    Codec, Compressor, FrameWriter, Header, Layout, Packet, Parameter, Policy, Selected, Sending, Sparse,
    Treatment, entropy_bytes,
};
use common::{Gradients, Random, flag, number, print, text};

const LENGTH: usize = 1_000_000;
const DENSITIES: [f64; 13] =
    [0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.035, 0.06, 0.1, 0.14, 0.2];

fn main() {
    let densities = if flag("--quick") { &DENSITIES[..2] } else { &DENSITIES };
    for (codec, bin) in [(Codec::Rice, 500), (Codec::Paper, 500), (Codec::Paper, 50)] {
        for &density in densities {
            uniform(codec, bin, density);
        }
    }
    for codec in [Codec::Rice, Codec::Paper] {
        for bin in [500, 50] {
            compressor(codec, bin);
        }
    }
}

fn layout(bin: u32) -> Layout {
    let policy = Policy::adacomp().for_name("*", Treatment::Bins(bin));
    policy.layout([Parameter::new("weight", &[LENGTH])]).expect("a valid layout")
}

fn uniform(codec: Codec, bin: u32, density: f64) {
    let mut random = Random::new(11);
    let selected: Vec<_> = (0..LENGTH as u32)
        .map(|index| (random.unit() < density, Selected::new(index, random.next() >> 63 == 1)))
        .filter_map(|(hit, element)| hit.then_some(element))
        .collect();
    let layout = layout(bin);
    let header = Header { codec, non_finite: false, fingerprint: layout.fingerprint(), step: 0, learner: 0 };
    let mut bytes = Vec::new();
    let mut writer = FrameWriter::new(&header, &layout, &mut bytes);
    writer.section(0, Packet::Sparse(Sparse { values: [1.0, -1.0], selected: &selected }));
    writer.finish();
    report(codec, "uniform", bin, selected.len(), bytes.len());
}

fn compressor(codec: Codec, bin: u32) {
    let mut compressor = Compressor::new(layout(bin));
    let mut gradients = Gradients::new(LENGTH);
    let mut gradient = vec![0.0; LENGTH];
    let mut bytes = Vec::new();
    let (mut total, mut selected) = (0, 0);
    let (warm_up, steps) = (20, 20);
    for step in 0..warm_up + steps {
        gradients.fill(&mut gradient);
        compressor
            .compress_layer(0, gradient.as_slice().into(), Sending::Compressed)
            .expect("a valid gradient");
        compressor.encode(codec, 0, step, &mut bytes).expect("a whole step");
        if step >= warm_up {
            total += bytes.len();
            selected += compressor.statistics().map(|layer| layer.selected).sum::<usize>();
        }
        compressor.commit().expect("a finite gradient");
    }
    report(codec, "compressor", bin, selected / steps as usize, total / steps as usize);
}

fn report(codec: Codec, positions: &str, bin: u32, selected: usize, bytes: usize) {
    let density = selected as f64 / LENGTH as f64;
    let floor = entropy_bytes(LENGTH, selected);
    print(&[
        ("codec", text(&codec.to_string())),
        ("positions", text(positions)),
        ("bin", bin.to_string()),
        ("density", number(density, 5)),
        ("bytes", bytes.to_string()),
        ("floor_bytes", number(floor, 0)),
        ("ratio_to_floor", number(bytes as f64 / floor, 4)),
        ("frame_ratio", number((4 * LENGTH) as f64 / bytes as f64, 1)),
    ]);
}
