//! Residual networks (He, Zhang, Ren, Sun 2016).

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::module::max_pool2d;
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Device, Tensor};

const WIDTHS: [usize; 4] = [64, 128, 256, 512];
/// How many times as wide as its middle a bottleneck's output is.
const EXPANSION: usize = 4;

/// For pictures of 224x224, or with a small first convolution and no pool for 32x32.
#[derive(Module, Debug)]
pub(crate) struct ResNet {
    stem: Normed,
    blocks: Vec<Block>,
    top: Linear,
    side: usize,
}

impl ResNet {
    pub(crate) fn new(
        side: usize,
        blocks: [usize; 4],
        bottleneck: bool,
        outputs: usize,
        device: &Device,
    ) -> Self {
        let stem = match side {
            32 => Normed::new([3, WIDTHS[0]], 3, 1, device),
            224 => Normed::new([3, WIDTHS[0]], 7, 2, device),
            side => panic!("residual networks are for pictures of 32x32 and 224x224, not {side}x{side}"),
        };
        let mut all = Vec::new();
        let mut inputs = WIDTHS[0];
        for (stage, (width, count)) in WIDTHS.into_iter().zip(blocks).enumerate() {
            for number in 0..count {
                let stride = if stage > 0 && number == 0 { 2 } else { 1 };
                all.push(Block::new(inputs, width, stride, bottleneck, device));
                inputs = if bottleneck { EXPANSION * width } else { width };
            }
        }
        Self { stem, blocks: all, top: LinearConfig::new(inputs, outputs).init(device), side }
    }

    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let [rows, _] = input.dims();
        let mut values = relu(self.stem.forward(input.reshape([rows, 3, self.side, self.side])));
        if self.side > 32 {
            values = max_pool2d(values, MaxPoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([1, 1]));
        }
        for block in &self.blocks {
            values = block.forward(values);
        }
        let channels: Tensor<3> = values.flatten(2, 3);
        self.top.forward(channels.mean_dim(2).squeeze_dim(2))
    }
}

/// A convolution and the norm of its output.
#[derive(Module, Debug)]
struct Normed {
    convolution: Conv2d,
    norm: BatchNorm,
}

impl Normed {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let padding = kernel / 2;
        let convolution = Conv2dConfig::new(channels, [kernel, kernel])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
            .with_bias(false);
        Self { convolution: convolution.init(device), norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.convolution.forward(input))
    }
}

/// Two or three convolutions beside a short cut.
#[derive(Module, Debug)]
struct Block {
    path: Vec<Normed>,
    /// Where the output has another shape than the input.
    shortcut: Option<Normed>,
}

impl Block {
    fn new(inputs: usize, width: usize, stride: usize, bottleneck: bool, device: &Device) -> Self {
        let outputs = if bottleneck { EXPANSION * width } else { width };
        let normed = |channels, kernel, stride| Normed::new(channels, kernel, stride, device);
        let path = match bottleneck {
            true => {
                vec![
                    normed([inputs, width], 1, 1),
                    normed([width, width], 3, stride),
                    normed([width, outputs], 1, 1),
                ]
            }
            false => vec![normed([inputs, width], 3, stride), normed([width, width], 3, 1)],
        };
        let reshapes = stride != 1 || inputs != outputs;
        Self { path, shortcut: reshapes.then(|| normed([inputs, outputs], 1, stride)) }
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let last = self.path.len() - 1;
        let path = self.path.iter().enumerate().fold(input.clone(), |values, (number, layer)| {
            let values = layer.forward(values);
            if number == last { values } else { relu(values) }
        });
        let shortcut = match &self.shortcut {
            Some(shortcut) => shortcut.forward(input),
            None => input,
        };
        relu(path + shortcut)
    }
}
