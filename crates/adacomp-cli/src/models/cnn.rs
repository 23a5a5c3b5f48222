//! Networks of fully-connected layers and plain convolutions.

use crate::draw::Draw;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::module::max_pool2d;
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Device, Tensor, TensorData};

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
    /// Makes a network for pictures of this number of channels and this side. Padded convolutions keep the side.
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

/// Returns the largest of each two by two.
fn halved(values: Tensor<4>) -> Tensor<4> {
    max_pool2d(values, MaxPoolOptions::new([2, 2]))
}

const ALEXNET_WIDTHS: [usize; 6] = [3, 64, 192, 384, 256, 256];
/// Convolutions that are followed by pooling.
const POOLED: [bool; 5] = [true, true, false, false, true];
const HIDDEN: usize = 4096;
const DROPPED: f32 = 0.5;

/// AlexNet (Krizhevsky, Sutskever, Hinton 2012), without its split over two devices: for pictures of 224x224, or with smaller kernels and pools for 32x32.
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
            convolutions: ALEXNET_WIDTHS.windows(2).zip(shapes).map(convolution).collect(),
            hidden: vec![linear(ALEXNET_WIDTHS[5] * left * left, HIDDEN), linear(HIDDEN, HIDDEN)],
            top: linear(HIDDEN, outputs),
            side,
            pool,
        }
    }

    pub(crate) fn forward(&self, input: Tensor<2>, training: Option<Training<'_>>) -> Tensor<2> {
        let [rows, _] = input.dims();
        let mut values = input.reshape([rows, ALEXNET_WIDTHS[0], self.side, self.side]);
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

/// Drops activations in training.
///
/// Burn's own draws from one generator that all threads share, so results would depend on the threads.
#[derive(Debug, Clone, Copy)]
struct Dropout {
    /// The share of activations that are dropped.
    share: f32,
    /// Its number among the dropout layers of its model.
    layer: usize,
}

/// Which samples a forward pass is for, if it is for training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training<'a> {
    pub(crate) draw: Draw,
    pub(crate) samples: &'a [usize],
}

impl Dropout {
    fn forward(self, input: Tensor<2>, training: Option<Training<'_>>) -> Tensor<2> {
        let Some(Training { draw, samples }) = training else { return input };
        let [rows, columns] = input.dims();
        assert_eq!(rows, samples.len(), "a row for each sample");
        let kept = 1.0 / (1.0 - self.share);
        let mut mask = Vec::with_capacity(rows * columns);
        for &sample in samples {
            let mut random = draw.dropout(self.layer, sample);
            mask.extend((0..columns).map(|_| if random.f32() < self.share { 0.0 } else { kept }));
        }
        let mask = Tensor::from_data(TensorData::new(mask, [rows, columns]), &input.device());
        input * mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_depends_on_the_sample_and_not_on_its_neighbours() {
        let device = Device::flex();
        let draw = Draw { seed: 1, epoch: 3 };
        let dropped = |samples: &[usize], layer| {
            let ones = Tensor::<2>::ones([samples.len(), 400], &device);
            let layer = Dropout { share: 0.25, layer };
            let data = layer.forward(ones, Some(Training { draw, samples })).into_data();
            data.try_into_vec::<f32>().unwrap()
        };
        let both = dropped(&[5, 9], 0);
        assert_eq!(both[400..], dropped(&[9], 0));
        assert_ne!(both[400..], dropped(&[9], 1));
        assert_ne!(both[..400], both[400..]);
        assert!(both.iter().all(|&value| value == 0.0 || (value - 4.0 / 3.0).abs() < 1e-6));
        let share = both.iter().filter(|&&value| value == 0.0).count() as f64 / 800.0;
        assert!((share - 0.25).abs() < 0.06, "{share}");
        let kept = Dropout { share: 0.25, layer: 0 }.forward(Tensor::ones([1, 4], &device), None);
        assert_eq!(kept.into_data().try_into_vec::<f32>().unwrap(), [1.0; 4]);
    }
}
