//! Fully-connected layers.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Fully-connected layers with rectifiers between them.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    pub(crate) fn new(inputs: usize, hidden: &[usize], outputs: usize, device: &Device) -> Self {
        let widths: Vec<usize> = [&[inputs], hidden, &[outputs]].concat();
        let layers = widths.windows(2).map(|pair| LinearConfig::new(pair[0], pair[1]).init(device)).collect();
        Self { layers }
    }

    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let last = self.layers.len() - 1;
        self.layers.iter().enumerate().fold(input, |values, (number, layer)| {
            let values = layer.forward(values);
            if number == last { values } else { relu(values) }
        })
    }
}
