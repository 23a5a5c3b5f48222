//! A run's configuration: checked once, then true.

use crate::recipes::{RECIPES, Recipe};
use adacomp::{Codec, Kind, Policy, Scale, Treatment};
use adacomp_exchange::{Options, Strategy};
use anyhow::{Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Learners that one process may host.
pub(crate) const MAX_LEARNERS: usize = 1024;

/// How gradients travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Scheme {
    /// All of them, in f32
    Dense,
    /// Selected by bins, the rest kept for later
    Adacomp,
    /// The largest of each bin, the rest kept for later
    LocalSelection,
    /// The largest of each tensor, the rest kept for later
    TopK,
    /// All of them, rounded to f16
    F16,
}

/// Who sends what to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum StrategyName {
    /// Every learner's frame to all: the paper's
    Gather,
    /// One scale for all, sums of signs by owners
    Reduce,
    /// Averages compressed again by owners: traffic that does not grow
    Sharded,
}

/// How a frame's bits are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CodecName {
    /// Gap codes, close to the entropy
    Rice,
    /// The paper's 8 and 16 bits an element
    Paper,
}

/// What AdaComp sends selected elements as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ScaleName {
    /// The mean of the bins' maxima: the paper's
    #[default]
    Mean,
    /// The same, but a maximum counts for ten medians at most
    Clamped,
}

impl From<ScaleName> for Scale {
    fn from(name: ScaleName) -> Self {
        match name {
            ScaleName::Mean => Self::Mean,
            ScaleName::Clamped => Self::Clamped,
        }
    }
}

/// What changes the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OptimizerKind {
    /// Stochastic gradient descent with momentum
    Sgd,
    /// Adam
    Adam,
}

/// How the learning rate changes over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Schedule {
    /// It does not
    Constant,
    /// Half a cosine from the full rate to 0
    Cosine,
    /// A tenth after half of the run, and again after three quarters
    Steps,
}

impl Schedule {
    /// What the learning rate is multiplied by in a step.
    pub(crate) fn factor(self, step: u64, steps: u64) -> f64 {
        let done = step as f64 / steps.max(1) as f64;
        match self {
            Self::Constant => 1.0,
            Self::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Self::Steps if done < 0.5 => 1.0,
            Self::Steps if done < 0.75 => 0.1,
            Self::Steps => 0.01,
        }
    }
}

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Length {
    Epochs(usize),
    Steps(u64),
}

/// All that a run's results depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) recipe: String,
    /// A folder with the data; otherwise it is fetched.
    pub(crate) data: Option<PathBuf>,
    /// Pictures of 224x224 from a folder of class folders.
    pub(crate) image_folder: bool,
    pub(crate) scheme: Scheme,
    pub(crate) strategy: StrategyName,
    pub(crate) codec: CodecName,
    pub(crate) conv_bin: u32,
    pub(crate) matrix_bin: u32,
    pub(crate) soft_threshold: f64,
    #[serde(default)]
    pub(crate) scale: ScaleName,
    /// Percent of the elements that `top-k` sends.
    pub(crate) top_percent: f64,
    pub(crate) learners: usize,
    pub(crate) minibatch: usize,
    pub(crate) length: Length,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) momentum: f64,
    pub(crate) learning_rate: f64,
    pub(crate) schedule: Schedule,
    pub(crate) weight_decay: f64,
    /// The largest norm of the averaged gradient of all weights.
    pub(crate) clip: Option<f64>,
    /// First steps that send everything.
    pub(crate) warm_up: u64,
    pub(crate) seed: u64,
    /// Test on the first so many samples only.
    pub(crate) test_samples: Option<usize>,
}

impl Config {
    /// A recipe as it is trained unless told otherwise.
    pub(crate) fn of(name: &str) -> Result<Self> {
        let Some(recipe) = Recipe::named(name) else {
            let names: Vec<_> = RECIPES.iter().map(|recipe| recipe.name).collect();
            bail!("there is no recipe `{name}`: choose one of {}", names.join(", "));
        };
        Ok(Self {
            recipe: recipe.name.to_owned(),
            data: None,
            image_folder: false,
            scheme: Scheme::Adacomp,
            strategy: StrategyName::Gather,
            codec: CodecName::Rice,
            conv_bin: 50,
            matrix_bin: 500,
            soft_threshold: 2.0,
            scale: ScaleName::Mean,
            top_percent: 0.1,
            learners: recipe.learners,
            minibatch: recipe.minibatch,
            length: Length::Epochs(recipe.epochs),
            optimizer: recipe.optimizer,
            momentum: 0.9,
            learning_rate: recipe.learning_rate,
            schedule: recipe.schedule,
            weight_decay: recipe.weight_decay,
            clip: recipe.clip,
            warm_up: 0,
            seed: 1,
            test_samples: None,
        })
    }

    /// That all of it makes sense together.
    pub(crate) fn check(&self, most_learners: usize) -> Result<()> {
        self.recipe()?;
        if !(1..=most_learners).contains(&self.learners) {
            bail!("{} learners: choose 1 to {most_learners}", self.learners);
        }
        if self.minibatch == 0 || !self.minibatch.is_multiple_of(self.learners) {
            let below = (self.minibatch / self.learners).max(1) * self.learners;
            bail!(
                "a minibatch of {} cannot be split evenly over {} learners: choose {below}, or another multiple",
                self.minibatch,
                self.learners
            );
        }
        let positive = [("learning rate", self.learning_rate), ("gradient norm", self.clip.unwrap_or(1.0))];
        for (what, value) in positive {
            if !(value.is_finite() && value > 0.0) {
                bail!("a {what} of {value}: choose a number above 0");
            }
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            bail!("a weight decay of {}: choose 0 or more", self.weight_decay);
        }
        if !(0.0..1.0).contains(&self.momentum) {
            bail!("a momentum of {}: choose 0 or more, and below 1", self.momentum);
        }
        if matches!(self.length, Length::Epochs(0) | Length::Steps(0)) {
            bail!("nothing to do: train for at least one epoch or step");
        }
        if self.test_samples == Some(0) {
            bail!("nothing to test on: choose at least one test sample, or leave --test-samples out");
        }
        if self.scheme == Scheme::TopK && self.strategy != StrategyName::Gather {
            bail!("top-k can only be exchanged with the strategy gather");
        }
        // What is wrong with bins, the soft threshold or a share comes out as soon as a policy meets a model.
        self.policy().layout([
            adacomp::Parameter::new("convolutions", &[1 << 14, 1, 1, 1]),
            adacomp::Parameter::new("matrices", &[1 << 14, 1]),
        ])?;
        Ok(())
    }

    /// The recipe, in the form that is asked for.
    pub(crate) fn recipe(&self) -> Result<Recipe> {
        let Some(recipe) = Recipe::named(&self.recipe) else { bail!("there is no recipe `{}`", self.recipe) };
        match (self.image_folder, recipe.for_image_folder()) {
            (false, _) => Ok(recipe),
            (true, Some(recipe)) => Ok(recipe),
            (true, None) => bail!("{} has no form for a folder of pictures", self.recipe),
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        let policy = match self.scheme {
            Scheme::Dense => return Policy::dense(),
            Scheme::F16 => return Policy::half(),
            Scheme::TopK => return Policy::top_k(self.top_percent as f32),
            Scheme::LocalSelection => Policy::local_selection(),
            Scheme::Adacomp => {
                Policy::adacomp().soft_threshold(self.soft_threshold as f32).scale(self.scale.into())
            }
        };
        policy
            .for_kind(Kind::Conv, Treatment::Bins(self.conv_bin))
            .for_kind(Kind::Matrix, Treatment::Bins(self.matrix_bin))
    }

    pub(crate) fn options(&self) -> Options {
        let strategy = match (self.scheme, self.strategy) {
            (Scheme::Dense, _) => Strategy::Dense,
            // Two bytes an element travel only in frames.
            (Scheme::F16, _) | (_, StrategyName::Gather) => Strategy::Gather,
            (_, StrategyName::Reduce) => Strategy::Reduce,
            (_, StrategyName::Sharded) => Strategy::Sharded,
        };
        let codec = match self.codec {
            CodecName::Rice => Codec::Rice,
            CodecName::Paper => Codec::Paper,
        };
        Options { strategy, codec, ..strategy.into() }
    }

    /// The steps of a run, and of an epoch, for so many training samples.
    pub(crate) fn steps(&self, samples: usize) -> Result<(u64, u64)> {
        let in_epoch = (samples / self.minibatch) as u64;
        if in_epoch == 0 {
            bail!("a minibatch of {} is more than the {samples} training samples", self.minibatch);
        }
        Ok((
            match self.length {
                Length::Epochs(epochs) => (epochs as u64).saturating_mul(in_epoch),
                Length::Steps(steps) => steps,
            },
            in_epoch,
        ))
    }
}

/// What a choice is called on the command line.
pub(crate) fn value_name(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
