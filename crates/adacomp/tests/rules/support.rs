//! Small models and gradients for the tests.

use adacomp::{Compressor, Frame, Gradient, Layout, Packet, Parameter, Policy, Treatment};
use std::sync::Arc;

/// A generator with a seed: xorshift.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((self.next() >> 32) as usize) % end
    }

    /// Between -1 and 1, more often small than large.
    pub(crate) fn value(&mut self) -> f32 {
        let unit = (self.next() >> 40) as f32 / 8_388_608.0 - 1.0;
        unit * unit * unit
    }

    pub(crate) fn gradient(&mut self, elements: usize) -> Vec<f32> {
        (0..elements).map(|_| self.value()).collect()
    }
}

/// One layer with bins of this length.
pub(crate) fn one_layer(elements: usize, bin: u32) -> Arc<Layout> {
    let policy = Policy::adacomp().for_name("*", Treatment::Bins(bin));
    Arc::new(policy.layout([Parameter::new("weight", &[elements])]).expect("a valid layout"))
}

/// A small model with a convolution, a matrix and a bias.
pub(crate) fn small_model(policy: Policy) -> Arc<Layout> {
    let parameters = [
        Parameter::new("conv.weight", &[16, 8, 3, 3]),
        Parameter::new("fc.weight", &[40, 60]),
        Parameter::new("fc.bias", &[40]),
    ];
    Arc::new(policy.layout(parameters).expect("a valid layout"))
}

pub(crate) fn gradients(layout: &Layout, random: &mut Random) -> Vec<Vec<f32>> {
    layout.layers().iter().map(|layer| random.gradient(layer.elements())).collect()
}

pub(crate) fn named<'a>(layout: &'a Layout, gradients: &'a [Vec<f32>]) -> Vec<(&'a str, Gradient<'a>)> {
    layout
        .layers()
        .iter()
        .zip(gradients)
        .map(|(layer, values)| (layer.name(), values.as_slice().into()))
        .collect()
}

/// What a layer sends, element by element.
pub(crate) fn sent(compressor: &Compressor, layer: usize) -> Vec<f32> {
    let mut sent = vec![0.0; compressor.layout()[layer].elements()];
    compressor.packet(layer).expect("a compressed layer").add_to(&mut sent);
    sent
}

pub(crate) fn selected(compressor: &Compressor, layer: usize) -> Vec<usize> {
    match compressor.packet(layer) {
        Some(Packet::Sparse(sparse)) => sparse.selected.iter().map(|element| element.index()).collect(),
        other => panic!("expected a selection, found {other:?}"),
    }
}

pub(crate) fn residuals(compressor: &mut Compressor) -> Vec<Option<Vec<u32>>> {
    (0..compressor.layout().len()).map(|layer| compressor.residual(layer).map(bits)).collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Whether a frame has these packets, by layer.
pub(crate) fn has_packets<'a>(frame: &Frame, packets: impl IntoIterator<Item = (usize, Packet<'a>)>) -> bool {
    let (mut values, mut selected) = (Vec::new(), Vec::new());
    let mut packets = packets.into_iter();
    let same = frame.sections().enumerate().all(|(position, section)| {
        packets.next() == Some((section.layer, frame.packet(position, &mut values, &mut selected)))
    });
    same && packets.next().is_none()
}
