//! A few convolutions and fully-connected layers.

use super::mlp::Mlp;
use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::activation::relu;
use burn::tensor::module::max_pool2d;
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Device, Tensor};

const KERNEL: usize = 5;

/// Convolutions of 5x5, each with a rectifier and pooling by two, then fully-connected layers.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    convolutions: Vec<Conv2d>,
    top: Mlp,
    channels: usize,
    side: usize,
}

impl Cnn {
    /// For pictures of so many channels and such a side. Padded convolutions keep the side.
    pub(crate) fn new(
        [channels, side]: [usize; 2],
        widths: &[usize],
        padded: bool,
        hidden: &[usize],
        outputs: usize,
        device: &Device,
    ) -> Self {
        let (padding, lost) = match padded {
            true => (PaddingConfig2d::Explicit(KERNEL / 2, KERNEL / 2, KERNEL / 2, KERNEL / 2), 0),
            false => (PaddingConfig2d::Valid, KERNEL - 1),
        };
        let mut convolutions = Vec::new();
        let (mut inputs, mut left) = (channels, side);
        for &width in widths {
            let convolution =
                Conv2dConfig::new([inputs, width], [KERNEL, KERNEL]).with_padding(padding.clone());
            convolutions.push(convolution.init(device));
            (inputs, left) = (width, (left - lost) / 2);
        }
        Self { convolutions, top: Mlp::new(inputs * left * left, hidden, outputs, device), channels, side }
    }

    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let [rows, _] = input.dims();
        let mut values = input.reshape([rows, self.channels, self.side, self.side]);
        for convolution in &self.convolutions {
            values = halved(relu(convolution.forward(values)));
        }
        self.top.forward(values.flatten(1, 3))
    }
}

/// The largest of each two by two.
pub(super) fn halved(values: Tensor<4>) -> Tensor<4> {
    max_pool2d(values, MaxPoolOptions::new([2, 2]))
}
