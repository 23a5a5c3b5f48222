//! Data sets: what they are, and their samples as the models take them.

mod fetch;
mod folder;
mod images;
mod speech;
mod text;

use crate::draw::Draw;
use anyhow::Result;
use std::path::Path;

pub(crate) use fetch::{cache_folder, get, is_complete};

/// A data set that a recipe can be trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataSet {
    Digits,
    Mnist,
    FashionMnist,
    Cifar10,
    Shakespeare,
    Speech,
    ImageFolder,
}

/// Training and test samples.
pub(crate) struct Data {
    pub(crate) train: Box<dyn Samples>,
    pub(crate) test: Box<dyn Samples>,
    /// The number of values that a target can have.
    pub(crate) classes: usize,
}

/// Samples that can be read in any order.
pub(crate) trait Samples: Send + Sync {
    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Adds a sample to a batch. With random draws, as in training, the sample may be changed at random.
    fn add(&self, sample: usize, draw: Option<Draw>, batch: &mut Batch) -> Result<()>;
}

/// Some samples, as a model takes them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Batch {
    /// Inputs that are numbers, sample after sample.
    pub(crate) values: Vec<f32>,
    /// Inputs that are characters, sample after sample.
    pub(crate) tokens: Vec<i32>,
    /// What the model should find out: one for each sample, or one for each character.
    pub(crate) targets: Vec<i32>,
    /// The numbers of the samples.
    pub(crate) samples: Vec<usize>,
}

impl Batch {
    /// Returns the samples of these numbers.
    pub(crate) fn of(
        samples: &dyn Samples,
        numbers: impl IntoIterator<Item = usize>,
        draw: Option<Draw>,
    ) -> Result<Self> {
        let mut batch = Self::default();
        for number in numbers {
            samples.add(number, draw, &mut batch)?;
            batch.samples.push(number);
        }
        Ok(batch)
    }
}

/// A data set in the form that a recipe needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) data: DataSet,
    /// Whether training pictures are cut and mirrored at random.
    pub(crate) augment: bool,
    /// Characters in a sample of text.
    pub(crate) sequence: usize,
    /// Width and height of pictures from a folder.
    pub(crate) side: usize,
}

/// Loads a data set from this folder, or from the cache, where it is fetched to if it is not there yet.
pub(crate) fn load(wanted: &Wanted, folder: Option<&Path>) -> Result<Data> {
    let folder = || folder.map_or_else(|| get(wanted.data), |folder| Ok(folder.to_owned()));
    match wanted.data {
        DataSet::Digits => Ok(images::load_digits()),
        DataSet::Mnist | DataSet::FashionMnist => images::load_mnist(&folder()?),
        DataSet::Cifar10 => images::load_cifar(&folder()?, wanted.augment),
        DataSet::Shakespeare => text::load(&folder()?, wanted.sequence),
        DataSet::Speech => speech::load(&folder()?),
        DataSet::ImageFolder => folder::load(&folder()?, wanted.side, wanted.augment),
    }
}
