//! AlexNet (Krizhevsky, Sutskever, Hinton 2012), without its split over two devices.

use super::layers::{Dropout, Training};
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::module::max_pool2d;
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Device, Tensor};

const WIDTHS: [usize; 6] = [3, 64, 192, 384, 256, 256];
/// Convolutions that are followed by pooling.
const POOLED: [bool; 5] = [true, true, false, false, true];
const HIDDEN: usize = 4096;
const DROPPED: f32 = 0.5;

/// For pictures of 224x224, or with smaller kernels and pools for 32x32.
#[derive(Module, Debug)]
pub(crate) struct AlexNet {
    convolutions: Vec<Conv2d>,
    hidden: Vec<Linear>,
    top: Linear,
    side: usize,
    pool: usize,
}

impl AlexNet {
    pub(crate) fn new(side: usize, outputs: usize, device: &Device) -> Self {
        // Kernel, stride and padding of each convolution; the side of a pool; and of what is left.
        let (shapes, pool, left) = match side {
            32 => ([(3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 1, 1)], 2, 2),
            224 => ([(11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)], 3, 6),
            side => panic!("AlexNet is for pictures of 32x32 and 224x224, not {side}x{side}"),
        };
        let convolution = |(widths, (kernel, stride, padding)): (&[usize], (usize, usize, usize))| {
            Conv2dConfig::new([widths[0], widths[1]], [kernel, kernel])
                .with_stride([stride, stride])
                .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
                .init(device)
        };
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self {
            convolutions: WIDTHS.windows(2).zip(shapes).map(convolution).collect(),
            hidden: vec![linear(WIDTHS[5] * left * left, HIDDEN), linear(HIDDEN, HIDDEN)],
            top: linear(HIDDEN, outputs),
            side,
            pool,
        }
    }

    pub(crate) fn forward(&self, input: Tensor<2>, training: Option<Training<'_>>) -> Tensor<2> {
        let [rows, _] = input.dims();
        let mut values = input.reshape([rows, WIDTHS[0], self.side, self.side]);
        let pool = || MaxPoolOptions::new([self.pool; 2]).with_stride([2, 2]);
        for (convolution, pooled) in self.convolutions.iter().zip(POOLED) {
            values = relu(convolution.forward(values));
            if pooled {
                values = max_pool2d(values, pool());
            }
        }
        let mut values: Tensor<2> = values.flatten(1, 3);
        for (layer, hidden) in self.hidden.iter().enumerate() {
            values = Dropout { share: DROPPED, layer }.forward(values, training);
            values = relu(hidden.forward(values));
        }
        self.top.forward(values)
    }
}
