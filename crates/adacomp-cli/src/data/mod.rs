//! Real data: where it comes from, and samples of it as the models take them.

mod cifar;
mod digits;
mod fetch;
mod folder;
mod images;
mod mnist;
mod place;
mod sources;
mod speech;
mod text;

use crate::draw::Draw;
use anyhow::Result;
use std::path::Path;

pub(crate) use fetch::get;
pub(crate) use place::{cache_folder, is_complete};

/// A data set that a recipe can be trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataSet {
    /// 1,797 handwritten digits of 8x8, inside the program.
    Digits,
    /// 70,000 handwritten digits of 28x28.
    Mnist,
    /// 70,000 pictures of clothes of 28x28.
    FashionMnist,
    /// 60,000 photographs of 32x32.
    Cifar10,
    /// Shakespeare's works, in part: 1.1 MB of text.
    Shakespeare,
    /// 1.7 hours of Russian speech with phone times.
    Speech,
    /// A folder of class folders, as ImageNet comes.
    ImageFolder,
}

/// Training and test samples.
pub(crate) struct Data {
    pub(crate) train: Box<dyn Samples>,
    pub(crate) test: Box<dyn Samples>,
    /// Values that a target can have.
    pub(crate) classes: usize,
}

/// Samples that can be had in any order.
pub(crate) trait Samples: Send + Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// Puts a sample into a batch; changed at random, if random draws come with it.
    fn add(&self, sample: usize, draw: Option<Draw>, batch: &mut Batch) -> Result<()>;
}

/// Some samples, as a model takes them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Batch {
    /// Inputs that are numbers, sample after sample.
    pub(crate) values: Vec<f32>,
    /// Inputs that are characters, sample after sample.
    pub(crate) tokens: Vec<i32>,
    /// What is to be found out: one a sample, or one a character.
    pub(crate) targets: Vec<i32>,
    /// Which samples they are.
    pub(crate) samples: Vec<usize>,
}

impl Batch {
    /// The samples of these numbers.
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

/// How a recipe wants its data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) data: DataSet,
    /// Random crops and flips in training.
    pub(crate) augment: bool,
    /// Characters in a sample of text.
    pub(crate) sequence: usize,
    /// Width and height of pictures from a folder.
    pub(crate) side: usize,
}

/// Loads a data set from this folder, or from the cache, fetching it if need be.
pub(crate) fn load(wanted: &Wanted, folder: Option<&Path>) -> Result<Data> {
    if wanted.data == DataSet::Digits {
        return Ok(digits::load());
    }
    let folder = match folder {
        Some(folder) => folder.to_owned(),
        None => get(wanted.data)?,
    };
    match wanted.data {
        DataSet::Digits => unreachable!("inside the program"),
        DataSet::Mnist | DataSet::FashionMnist => mnist::load(&folder),
        DataSet::Cifar10 => cifar::load(&folder, wanted.augment),
        DataSet::Shakespeare => text::load(&folder, wanted.sequence),
        DataSet::Speech => speech_samples(&folder),
        DataSet::ImageFolder => folder::load(&folder, wanted.side, wanted.augment),
    }
}

fn speech_samples(folder: &Path) -> Result<Data> {
    let bar = crate::progress::bar("computing speech features");
    let corpus = speech::load(folder, &|done, all| crate::progress::show(&bar, done, all))?;
    bar.finish_and_clear();
    Ok(Data { classes: corpus.states, train: Box::new(corpus.train), test: Box::new(corpus.test) })
}

impl Samples for speech::Utterances {
    fn len(&self) -> usize {
        self.frames()
    }

    fn add(&self, sample: usize, _draw: Option<Draw>, batch: &mut Batch) -> Result<()> {
        self.window(sample, &mut batch.values);
        batch.targets.push(i32::from(self.state(sample)));
        Ok(())
    }
}
