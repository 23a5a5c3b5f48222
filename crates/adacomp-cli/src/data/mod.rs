//! Data sets: what they are, and their samples as the models take them.

mod fetch;
pub(crate) mod folder;
pub(crate) mod images;
pub(crate) mod speech;
mod text;

use crate::draw::Draw;
use crate::recipes::{Architecture, Recipe};
use anyhow::{Result, bail};
use serde::Deserialize;
use std::path::Path;

pub(crate) use fetch::{SOURCES, cache_folder};

/// A data set that a recipe can be trained on, in the order of `sources.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
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

/// Characters in a sample of text, unless the model decides.
const SEQUENCE: usize = 50;

/// Loads a recipe's data from this folder, or from the cache, where it is fetched to if it is not there yet.
pub(crate) fn load(recipe: &Recipe, given: Option<&Path>) -> Result<Data> {
    let folder = || given.map_or_else(|| recipe.data.source().get(), |folder| Ok(folder.to_owned()));
    match (recipe.data, &recipe.architecture) {
        (DataSet::Digits, _) => match given {
            None => Ok(images::load_digits()),
            Some(_) => bail!("digits are inside the program: leave --data out"),
        },
        (DataSet::Mnist | DataSet::FashionMnist, _) => images::load_mnist(&folder()?),
        (DataSet::Cifar10, _) => images::load_cifar(&folder()?, recipe.augment),
        (DataSet::Shakespeare, Architecture::Transformer { context, .. }) => text::load(&folder()?, *context),
        (DataSet::Shakespeare, _) => text::load(&folder()?, SEQUENCE),
        (DataSet::Speech, _) => speech::load(&folder()?),
        (DataSet::ImageFolder, _) => folder::load(&folder()?, recipe.augment),
    }
}
