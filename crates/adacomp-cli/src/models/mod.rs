//! The models that recipes train.

mod alexnet;
mod cnn;
mod language;
mod layers;
mod mlp;
mod resnet;

use crate::data::Batch;
use alexnet::AlexNet;
use anyhow::Result;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use cnn::Cnn;
use language::{LstmLanguage, Transformer};
use mlp::Mlp;
use resnet::ResNet;
use std::sync::Mutex;

pub(crate) use layers::Training;

/// A model's shape, all but what the data decides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Architecture {
    /// Fully-connected layers.
    Mlp { inputs: usize, hidden: &'static [usize] },
    /// Convolutions of 5x5, each with pooling, and fully-connected layers.
    Cnn { side: usize, channels: &'static [usize], padded: bool, hidden: &'static [usize] },
    /// AlexNet for pictures of this side.
    AlexNet { side: usize },
    /// A residual network for pictures of this side.
    ResNet { side: usize, blocks: [usize; 4], bottleneck: bool },
    /// Long short-term memory over characters.
    Lstm { hidden: usize, layers: usize },
    /// A decoder-only transformer over characters.
    Transformer { width: usize, heads: usize, layers: usize, context: usize },
}

/// Any of the models.
#[derive(Module, Debug)]
pub(crate) enum Network {
    Mlp(Mlp),
    Cnn(Cnn),
    AlexNet(AlexNet),
    ResNet(ResNet),
    Lstm(LstmLanguage),
    Transformer(Transformer),
}

/// Burn's generator is one for the whole process: nobody may draw from it while a model is made.
static MAKING: Mutex<()> = Mutex::new(());

impl Network {
    /// A model whose weights depend on the seed only.
    pub(crate) fn new(
        architecture: Architecture,
        classes: usize,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let _making = MAKING.lock();
        device.seed(seed);
        let network = match architecture {
            Architecture::Mlp { inputs, hidden } => Self::Mlp(Mlp::new(inputs, hidden, classes, device)),
            Architecture::Cnn { side, channels, padded, hidden } => {
                let inputs = if padded { 3 } else { 1 };
                Self::Cnn(Cnn::new([inputs, side], channels, padded, hidden, classes, device))
            }
            Architecture::AlexNet { side } => Self::AlexNet(AlexNet::new(side, classes, device)),
            Architecture::ResNet { side, blocks, bottleneck } => {
                Self::ResNet(ResNet::new(side, blocks, bottleneck, classes, device))
            }
            Architecture::Lstm { hidden, layers } => {
                Self::Lstm(LstmLanguage::new(classes, hidden, layers, device))
            }
            Architecture::Transformer { width, heads, layers, context } => {
                Self::Transformer(Transformer::new(classes, [width, heads, layers, context], device))
            }
        };
        // Burn makes weights when they are first used: use them here, in the model's order.
        adacomp_burn::weights(&network)?;
        Ok(network)
    }

    /// A row of scores for each target of a batch.
    pub(crate) fn forward(
        &self,
        batch: &Batch,
        device: &Device,
        training: Option<Training<'_>>,
    ) -> Tensor<2> {
        let rows = batch.samples.len();
        let values = || {
            let data = TensorData::new(batch.values.clone(), [rows, batch.values.len() / rows]);
            Tensor::<2>::from_data(data, device)
        };
        let tokens = || {
            let data = TensorData::new(batch.tokens.clone(), [rows, batch.tokens.len() / rows]);
            Tensor::<2, Int>::from_data(data, device)
        };
        match self {
            Self::Mlp(model) => model.forward(values()),
            Self::Cnn(model) => model.forward(values()),
            Self::AlexNet(model) => model.forward(values(), training),
            Self::ResNet(model) => model.forward(values()),
            Self::Lstm(model) => model.forward(tokens()),
            Self::Transformer(model) => model.forward(tokens()),
        }
    }
}
