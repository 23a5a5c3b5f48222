//! A run's configuration, which is checked once before anything is done.

use crate::recipes::{RECIPES, Recipe};
use adacomp::{Codec, Kind, Policy, Scale, Treatment};
use adacomp_exchange::{Options, Strategy};
use anyhow::{Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Learners that one process may host.
pub(crate) const MAX_LEARNERS: usize = 1024;

/// What learners send of their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Scheme {
    /// All gradients in f32
    Dense,
    /// Gradients that AdaComp selects in each bin; the rest waits in the residual
    Adacomp,
    /// The largest gradient of each bin; the rest waits in the residual
    LocalSelection,
    /// The largest gradients of each tensor; the rest waits in the residual
    TopK,
    /// All gradients, rounded to f16
    F16,
}

/// The optimiser.
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
    /// Stays the same
    Constant,
    /// Falls to 0 along half a cosine
    Cosine,
    /// Falls to a tenth after half of the run, and again after three quarters
    Steps,
}

impl Schedule {
    /// Returns the factor of the learning rate in a step.
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

/// The length of a run.
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
    #[serde(with = "text")]
    pub(crate) strategy: Strategy,
    #[serde(with = "text")]
    pub(crate) codec: Codec,
    pub(crate) conv_bin: u32,
    pub(crate) matrix_bin: u32,
    pub(crate) soft_threshold: f64,
    /// Older checkpoints have none.
    #[serde(default, with = "text")]
    pub(crate) scale: Scale,
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
    /// First steps that send all gradients.
    pub(crate) warm_up: u64,
    pub(crate) seed: u64,
    /// Test on this number of samples only.
    pub(crate) test_samples: Option<usize>,
}

impl Config {
    /// Returns a recipe's defaults.
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
            strategy: Strategy::Gather,
            codec: Codec::Rice,
            conv_bin: 50,
            matrix_bin: 500,
            soft_threshold: 2.0,
            scale: Scale::Mean,
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

    /// Checks that all of it makes sense together.
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
        if self.scheme == Scheme::TopK && self.strategy != Strategy::Gather {
            bail!("top-k can only be exchanged with the strategy gather");
        }
        // What is wrong with bins, the soft threshold or a share comes out as soon as a policy meets a model.
        self.policy().layout([
            adacomp::Parameter::new("convolutions", &[1 << 14, 1, 1, 1]),
            adacomp::Parameter::new("matrices", &[1 << 14, 1]),
        ])?;
        Ok(())
    }

    /// Returns the recipe, in the form that is asked for.
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
            Scheme::Adacomp => Policy::adacomp().soft_threshold(self.soft_threshold as f32).scale(self.scale),
        };
        policy
            .for_kind(Kind::Conv, Treatment::Bins(self.conv_bin))
            .for_kind(Kind::Matrix, Treatment::Bins(self.matrix_bin))
    }

    pub(crate) fn options(&self) -> Options {
        let strategy = match self.scheme {
            Scheme::Dense => Strategy::Dense,
            // Two bytes for each element are sent only in frames.
            Scheme::F16 => Strategy::Gather,
            Scheme::Adacomp | Scheme::LocalSelection | Scheme::TopK => self.strategy,
        };
        Options { strategy, codec: self.codec, ..strategy.into() }
    }

    /// Returns the steps of a run and of an epoch, for this number of training samples.
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

/// Returns the name of a choice on the command line.
pub(crate) fn value_name(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Writes a choice of the libraries to JSON as they display it, and reads it as they parse it.
pub(crate) mod text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub(crate) fn serialize<T: Display, S: Serializer>(choice: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(choice)
    }

    pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
