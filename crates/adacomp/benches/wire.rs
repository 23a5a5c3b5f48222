//! Bytes of a frame against the entropy of its selected elements, `n h(k/n) + k` bits.
//!
//! `cargo bench -p adacomp --bench wire [-- --quick]` prints JSON lines. Positions are uniformly random, or the compressor's
//! own.

mod common;

use adacomp::{Codec, Compressor, Header, Packet, Sending, Sparse, entropy_bytes, section_bytes};
use common::{Gradients, Random, flag, layout};

const LENGTH: usize = 1_000_000;
const DENSITIES: [f64; 13] =
    [0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.035, 0.06, 0.1, 0.14, 0.2];

fn main() {
    let densities = if flag("--quick") { &DENSITIES[..2] } else { &DENSITIES };
    for (codec, bin) in [(Codec::Rice, 500), (Codec::Paper, 500), (Codec::Paper, 50)] {
        for &density in densities {
            let selected = Random::new(11).selection(LENGTH, density);
            let packet = Packet::Sparse(Sparse { values: [1.0, -1.0], selected: &selected });
            report(
                codec,
                "uniform",
                bin,
                selected.len(),
                section_bytes(&layout(LENGTH, bin), 0, packet, codec),
            );
        }
    }
    for codec in [Codec::Rice, Codec::Paper] {
        for bin in [500, 50] {
            compressor(codec, bin);
        }
    }
}

fn compressor(codec: Codec, bin: u32) {
    let mut compressor = Compressor::new(layout(LENGTH, bin));
    let mut gradients = Gradients::new(LENGTH);
    let mut gradient = vec![0.0; LENGTH];
    let (mut selected, mut bytes) = (0, 0);
    let (warm_up, steps) = (20, 20);
    for step in 0..warm_up + steps {
        gradients.fill(&mut gradient);
        let gradient = gradient.as_slice().into();
        compressor.compress_layer(0, gradient, Sending::Compressed).expect("a valid gradient");
        compressor.encode(codec, 0, step as u64, &mut Vec::new()).expect("all layers");
        if step >= warm_up {
            selected += compressor.layer_statistics(0).selected;
            bytes += compressor.layer_statistics(0).bytes;
        }
        compressor.commit().expect("a finite gradient");
    }
    report(codec, "compressor", bin, selected / steps, bytes / steps);
}

fn report(codec: Codec, positions: &str, bin: u32, selected: usize, section: usize) {
    // The checksum takes four bytes.
    let bytes = Header::LENGTH + section + 4;
    let density = selected as f64 / LENGTH as f64;
    let floor = entropy_bytes(LENGTH, selected);
    let (ratio, frame_ratio) = (bytes as f64 / floor, (4 * LENGTH) as f64 / bytes as f64);
    println!(
        r#"{{"codec": "{codec}", "positions": "{positions}", "bin": {bin}, "density": {density:.5}, "bytes": {bytes}, "floor_bytes": {floor:.0}, "ratio_to_floor": {ratio:.4}, "frame_ratio": {frame_ratio:.1}}}"#
    );
}
