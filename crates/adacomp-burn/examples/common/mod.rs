//! A small model, and data that it can learn.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use std::ops::Range;

/// Two fully-connected layers.
#[derive(Module, Debug)]
pub(crate) struct Model {
    hidden: Linear,
    output: Linear,
}

impl Model {
    pub(crate) fn new(device: &Device) -> Self {
        device.seed(1);
        Self {
            hidden: LinearConfig::new(16, 128).init(device),
            output: LinearConfig::new(128, 16).init(device),
        }
    }

    /// The mean square of what is wrong.
    pub(crate) fn loss(&self, [inputs, targets]: [Tensor<2>; 2]) -> Tensor<1> {
        let outputs = self.output.forward(relu(self.hidden.forward(inputs)));
        (outputs - targets).powf_scalar(2.0).mean()
    }
}

/// Samples of a step's minibatch: numbers, and the same sorted.
pub(crate) fn samples(step: usize, numbers: Range<usize>, device: &Device) -> [Tensor<2>; 2] {
    let rows = numbers.len();
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for number in numbers {
        let mut state = (step * 1_000 + number) as u64;
        let mut row: Vec<f32> = (0..16).map(|_| draw(&mut state)).collect();
        inputs.extend_from_slice(&row);
        row.sort_by(f32::total_cmp);
        targets.extend_from_slice(&row);
    }
    [inputs, targets].map(|values| Tensor::from_data(TensorData::new(values, [rows, 16]), device))
}

/// A number in -1..1.
fn draw(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}
