//! A run's configuration, which is checked once before anything is done.

use crate::recipes::Recipe;
use adacomp::{Codec, Kind, Layout, Policy, Scale, Treatment, growing_bin};
use adacomp_exchange::{LocalSteps, Options, Strategy, StrategyChoice};
use anyhow::{Context, Result, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

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

/// What can be chosen for those that compress; dense is a scheme here.
const STRATEGIES: [StrategyChoice; 4] = [
    StrategyChoice::Auto,
    StrategyChoice::Given(Strategy::Gather),
    StrategyChoice::Given(Strategy::Reduce),
    StrategyChoice::Given(Strategy::Sharded),
];

/// The optimiser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OptimizerKind {
    /// Stochastic gradient descent with momentum
    Sgd,
    /// Adam
    Adam,
}

/// Where forward and backward passes run, by the name that Burn and the program's features have for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeviceKind {
    /// The processor
    Flex,
    /// A GPU, over Vulkan, Metal or DirectX
    Wgpu,
    /// A GPU of NVIDIA
    Cuda,
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

/// All that a run's results depend on, as options of the command line and in checkpoints.
///
/// What is not given on the command line is the recipe's, or with --resume the checkpoint's.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Config {
    #[arg(skip)]
    pub(crate) recipe: String,
    /// A folder with the data; without it, the data is fetched
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Whether pictures of 224x224 come from a folder of class folders.
    #[arg(skip)]
    pub(crate) image_folder: bool,
    #[arg(skip = Scheme::Adacomp)]
    pub(crate) scheme: Scheme,
    /// How learners average what they send: gather sends every frame to all, as the paper does; reduce sends sums of signs;
    /// sharded compresses averages again, so that traffic does not grow with learners; auto is gather or reduce, whichever
    /// should send fewer bytes [default: auto]
    #[arg(long, value_parser = choice(STRATEGIES))]
    #[serde(with = "text")]
    pub(crate) strategy: StrategyChoice,
    /// With the strategy gather, the code of selected elements: rice is close to the entropy, paper is the paper's 8 and 16
    /// bits [default: rice]
    #[arg(long, value_parser = choice([Codec::Rice, Codec::Paper]))]
    #[serde(with = "text")]
    pub(crate) codec: Codec,
    /// Elements in a bin of a convolution kernel [default: 50]
    #[arg(long, value_name = "T")]
    pub(crate) conv_bin: u32,
    /// Elements in a bin of any other matrix [default: 500]
    #[arg(long, value_name = "T")]
    pub(crate) matrix_bin: u32,
    /// The factor of AdaComp's soft threshold [default: 2]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) soft_threshold: f64,
    /// The value sent for each selected element: the mean of the bins' maxima, as the paper does, or that mean with
    /// each maximum clamped to ten medians [default: mean]
    #[arg(long, value_parser = choice([Scale::Mean, Scale::Clamped]))]
    #[serde(with = "text")]
    pub(crate) scale: Scale,
    /// The share of elements that top-k sends, in percent [default: 0.1]
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) top_percent: f64,
    /// Learners that share each minibatch; 1 to 1,024 on threads
    #[arg(long, value_name = "N")]
    pub(crate) learners: usize,
    /// Samples in a step, over all learners
    #[arg(long, value_name = "N")]
    pub(crate) minibatch: usize,
    #[arg(skip = Length::Epochs(10))]
    pub(crate) length: Length,
    /// The optimiser
    #[arg(long)]
    pub(crate) optimizer: OptimizerKind,
    /// The momentum of sgd, or the decay of adam's first moment [default: 0.9]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) momentum: f64,
    /// The learning rate at the start
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) learning_rate: f64,
    /// How the learning rate changes during the run
    #[arg(long)]
    pub(crate) schedule: Schedule,
    /// The weight decay, which is added to the gradient
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) weight_decay: f64,
    /// The largest norm of the averaged gradient of all weights; with local steps, of each learner's own gradient
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip: Option<f64>,
    /// Limits what one learner can do to the average: in each layer, its values are cut to this many times the largest value
    /// of the median learner
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) learner_clip: Option<f64>,
    /// In this many first steps learners send everything, and nothing waits; with local steps, in the exchanges among these
    /// steps [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(crate) warm_up: u64,
    /// With adacomp and local-selection: in this many steps after --warm-up, bins of matrices grow from 50 elements to --matrix-bin:
    /// for adam and language models [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(crate) bin_warm_up: u64,
    /// Local steps: each learner trains alone, with an optimiser of its own, and once in this many steps learners exchange how
    /// far their weights have moved. With 1, updates travel instead of gradients: for adam. With 0, gradients travel in every
    /// step, and all share one optimiser [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(crate) local_steps: u64,
    /// With local steps: the shared weights move by this rate times what learners have moved on average [default: 1]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) outer_rate: f64,
    /// With local steps: the Nesterov momentum of the shared weights; DiLoCo has 0.9, with an outer rate of 0.7 [default: 0]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) outer_momentum: f64,
    /// What residuals are multiplied by before each exchange: below 1, what waits is slowly forgotten [default: 1]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) residual_decay: f64,
    /// The seed of all random numbers [default: 1]
    #[arg(long)]
    pub(crate) seed: u64,
    /// Where forward and backward passes run; all but flex need a program built with the feature of that name
    /// [default: flex]
    #[arg(long)]
    pub(crate) device: DeviceKind,
    /// Test on the first N samples only
    #[arg(long, value_name = "N")]
    pub(crate) test_samples: Option<usize>,
}

/// The defaults of all recipes.
impl Default for Config {
    fn default() -> Self {
        Self {
            recipe: String::new(),
            data: None,
            image_folder: false,
            scheme: Scheme::Adacomp,
            strategy: StrategyChoice::Auto,
            codec: Codec::Rice,
            conv_bin: 50,
            matrix_bin: 500,
            soft_threshold: 2.0,
            scale: Scale::Mean,
            top_percent: 0.1,
            learners: 4,
            minibatch: 128,
            length: Length::Epochs(10),
            optimizer: OptimizerKind::Sgd,
            momentum: 0.9,
            learning_rate: 0.01,
            schedule: Schedule::Cosine,
            weight_decay: 0.0,
            clip: None,
            learner_clip: None,
            warm_up: 0,
            bin_warm_up: 0,
            local_steps: 0,
            outer_rate: 1.0,
            outer_momentum: 0.0,
            residual_decay: 1.0,
            seed: 1,
            device: DeviceKind::Flex,
            test_samples: None,
        }
    }
}

/// Returns a parser for these choices of a library, by the names that the library gives them.
fn choice<T>(choices: impl IntoIterator<Item = T>) -> impl TypedValueParser<Value = T>
where
    T: Display + FromStr<Err: Into<Box<dyn std::error::Error + Send + Sync>>> + Clone + Send + Sync + 'static,
    <T as FromStr>::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(choices.into_iter().map(|choice| choice.to_string()))
        .try_map(|name| name.parse::<T>())
}

impl Config {
    /// Checks that all of it makes sense together.
    pub(crate) fn check(&self, most_learners: usize) -> Result<()> {
        let Self { learners, minibatch, weight_decay, momentum, length, .. } = self;
        self.recipe()?;
        ensure!((1..=most_learners).contains(learners), "{learners} learners: choose 1 to {most_learners}");
        if *minibatch == 0 || !minibatch.is_multiple_of(*learners) {
            let below = (minibatch / learners).max(1) * learners;
            bail!(
                "a minibatch of {minibatch} cannot be split evenly over {learners} learners: choose {below}, or another multiple"
            );
        }
        for (what, value) in
            [("learning rate", self.learning_rate), ("gradient norm", self.clip.unwrap_or(1.0))]
        {
            // What is computed with is an f32.
            let fits = value as f32 > 0.0 && value <= 1e38;
            ensure!(fits, "a {what} of {value:?}: choose a number above 0, and at most 1e38");
        }
        let clip = self.learner_clip.unwrap_or(1.0) as f32;
        ensure!(clip.is_finite() && clip >= 1.0, "a learner clip of {clip}: choose a number from 1 on");
        let decays = (0.0..=1e38).contains(weight_decay);
        ensure!(decays, "a weight decay of {weight_decay:?}: choose 0 or more, and at most 1e38");
        ensure!((0.0..1.0).contains(momentum), "a momentum of {momentum}: choose 0 or more, and below 1");
        self.exchanges().check()?;
        if self.local_steps == 0 && (self.outer_rate, self.outer_momentum) != (1.0, 0.0) {
            bail!(
                "--outer-rate and --outer-momentum are for local steps: choose how many with --local-steps"
            );
        }
        let lasts = !matches!(length, Length::Epochs(0) | Length::Steps(0));
        ensure!(lasts, "nothing to do: train for at least one epoch or step");
        if self.test_samples == Some(0) {
            bail!("nothing to test on: choose at least one test sample, or leave --test-samples out");
        }
        let gathers = matches!(self.strategy, StrategyChoice::Auto | StrategyChoice::Given(Strategy::Gather));
        if self.scheme == Scheme::TopK && !gathers {
            bail!("top-k can only be exchanged with the strategy gather");
        }
        if self.bin_warm_up > 0 && self.strategy() == StrategyChoice::Given(Strategy::Sharded) {
            bail!(
                "--bin-warm-up makes bins grow, but not those of sharded: choose another strategy, or --bin-warm-up 0"
            );
        }
        // What is wrong with bins, the soft threshold or a share comes out as soon as a policy meets a model.
        self.policy().layout([
            adacomp::Parameter::new("convolutions", &[1 << 14, 1, 1, 1]),
            adacomp::Parameter::new("matrices", &[1 << 14, 1]),
        ])?;
        Ok(())
    }

    /// Returns whether it is the other one but for length, learners and where the data is.
    pub(crate) fn has_settings_of(&self, other: &Self) -> bool {
        let Self { length, learners, data, .. } = self.clone();
        *self == Self { length, learners, data, ..other.clone() }
    }

    /// Returns whether learners take local steps.
    pub(crate) fn is_local(&self) -> bool {
        self.local_steps > 0
    }

    /// Returns how often learners exchange what, and how the shared weights follow; without local steps in every step.
    pub(crate) fn exchanges(&self) -> LocalSteps {
        LocalSteps {
            every: self.local_steps.max(1),
            rate: self.outer_rate as f32,
            momentum: self.outer_momentum as f32,
            residual_decay: self.residual_decay as f32,
        }
    }

    /// Returns the recipe, in the form that is asked for.
    pub(crate) fn recipe(&self) -> Result<Recipe> {
        let recipe = Recipe::named(&self.recipe)?;
        match self.image_folder {
            false => Ok(recipe.clone()),
            true => recipe
                .for_image_folder()
                .with_context(|| format!("{} has no form for a folder of pictures", self.recipe)),
        }
    }

    /// Returns the policy of a step.
    pub(crate) fn policy_at(&self, step: u64) -> Policy {
        let matrix_bin = growing_bin(self.matrix_bin, step.saturating_sub(self.warm_up), self.bin_warm_up);
        let policy = match self.scheme {
            Scheme::Dense => return Policy::dense(),
            Scheme::F16 => return Policy::half(),
            Scheme::TopK => return Policy::top_k(self.top_percent as f32),
            Scheme::LocalSelection => Policy::local_selection().scale(self.scale),
            Scheme::Adacomp => Policy::adacomp().soft_threshold(self.soft_threshold as f32).scale(self.scale),
        };
        policy
            .for_kind(Kind::Conv, Treatment::Bins(self.conv_bin))
            .for_kind(Kind::Matrix, Treatment::Bins(matrix_bin))
    }

    /// Returns the first step from which on bins are what they stay.
    pub(crate) fn bins_stay_from(&self) -> u64 {
        self.warm_up.saturating_add(self.bin_warm_up)
    }

    /// Returns the policy of all steps from then on.
    pub(crate) fn policy(&self) -> Policy {
        self.policy_at(self.bins_stay_from())
    }

    /// Returns the strategy that the scheme needs, or the one that was asked for.
    pub(crate) fn strategy(&self) -> StrategyChoice {
        match self.scheme {
            Scheme::Dense => StrategyChoice::Given(Strategy::Dense),
            // Two bytes for each element are sent only in frames.
            Scheme::F16 => StrategyChoice::Given(Strategy::Gather),
            Scheme::Adacomp | Scheme::LocalSelection | Scheme::TopK => self.strategy,
        }
    }

    /// Returns the options of an exchange. `chosen` is what `auto` has stood for so far, if it has.
    pub(crate) fn options(&self, layout: &Layout, chosen: StrategyChoice) -> Options {
        let choice = match self.strategy() {
            StrategyChoice::Auto => chosen,
            given => given,
        };
        let strategy = choice.resolve(layout, self.learners, self.codec);
        let clip = self.learner_clip.map(|clip| clip as f32);
        Options { strategy, codec: self.codec, clip, ..strategy.into() }
    }

    /// Returns the steps of a run and of an epoch, for this number of training samples.
    pub(crate) fn steps(&self, samples: usize) -> Result<(u64, u64)> {
        let in_epoch = (samples / self.minibatch) as u64;
        ensure!(
            in_epoch > 0,
            "a minibatch of {} is more than the {samples} training samples",
            self.minibatch
        );
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
