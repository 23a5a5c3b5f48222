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

    /// Returns the mean square error.
    pub(crate) fn loss(&self, [inputs, targets]: [Tensor<2>; 2]) -> Tensor<1> {
        let outputs = self.output.forward(relu(self.hidden.forward(inputs)));
        (outputs - targets).powf_scalar(2.0).mean()
    }
}

/// Returns samples of a step's minibatch: random numbers, and the same numbers sorted.
pub(crate) fn samples(step: usize, numbers: Range<usize>, device: &Device) -> [Tensor<2>; 2] {
    let rows = numbers.len();
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for number in numbers {
        let mut random = fastrand::Rng::with_seed((step * 1_000 + number) as u64);
        let mut row: Vec<f32> = (0..16).map(|_| 2.0 * random.f32() - 1.0).collect();
        inputs.extend_from_slice(&row);
        row.sort_by(f32::total_cmp);
        targets.extend_from_slice(&row);
    }
    [inputs, targets].map(|values| Tensor::from_data(TensorData::new(values, [rows, 16]), device))
}
