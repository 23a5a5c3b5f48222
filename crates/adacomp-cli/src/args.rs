//! The command line: parsed here, checked in `config`.

use crate::config::{Config, Length, OptimizerKind, Schedule, Scheme};
use crate::session::TransportKind;
use adacomp::{Codec, Scale};
use adacomp_exchange::Strategy;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

/// Trains models with many learners, dense and with AdaComp gradient compression.
///
/// Without a command it runs `compare digits`: a small model on data that comes with the program, dense and AdaComp side by
/// side, in seconds.
#[derive(Debug, Parser)]
#[command(name = "adacomp", version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

const EXAMPLES: &str = "Examples:
  adacomp                                          compare dense and AdaComp on 1,797 digits
  adacomp compare mnist-cnn --learners 8           the same on MNIST, with a report to look at
  adacomp train cifar10-cnn --strategy sharded     one run, with checkpoints
  adacomp train --resume runs/cifar10-cnn-1        go on with it
  mpirun -n 4 adacomp train mnist-cnn --transport mpi    four processes, also on four machines
  adacomp plan resnet18 --learners 8 --bandwidth 1gbit --compute 0.3s    whether it would pay

Words:
  learner             one participant of the training, with its own part of each minibatch
  compression ratio   bytes that a dense ring all-reduce would send, over bytes that a learner sent
  frame ratio         the paper's measure: a dense frame over a compressed one";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a recipe once
    #[command(after_help = "Example:\n  adacomp train mnist-cnn --learners 8 --epochs 3 --strategy reduce")]
    Train(TrainArguments),
    /// Train a recipe dense and with AdaComp from the same seed, and show both in a table and a report
    #[command(
        after_help = "Example:\n  adacomp compare mnist-cnn --learners 8 --schemes dense,adacomp,top-k"
    )]
    Compare(CompareArguments),
    /// List the recipes, what they train and what to expect
    #[command(after_help = "Example:\n  adacomp recipes")]
    Recipes,
    /// Fetch data, or see where it is
    #[command(subcommand, after_help = "Example:\n  adacomp data get mnist")]
    Data(DataCommand),
    /// Predict the time of a step on a link, dense and compressed, before anything is run
    #[command(
        after_help = "Examples:\n  adacomp plan resnet18 --learners 8 --bandwidth 1gbit --latency 0.2ms --compute 0.3s\n  \
                      adacomp plan 4096x2048,4096,1000x4096,1000 --learners 64 --bandwidth 10gbit --compute 50ms\n  \
                      adacomp plan --calibrate"
    )]
    Plan(PlanArguments),
    /// Show what is in a frame or a checkpoint
    #[command(after_help = "Example:\n  adacomp inspect runs/digits-1")]
    Inspect {
        /// A frame, a safetensors file, a checkpoint, or a run's folder
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// List the data sets, and whether they are here
    #[command(after_help = "Example:\n  adacomp data list")]
    List,
    /// Fetch a data set
    #[command(after_help = "Example:\n  adacomp data get mnist")]
    Get {
        /// Its name; `adacomp data list` shows them
        name: String,
    },
    /// Print the folder that data is kept in
    #[command(after_help = "Example:\n  du -sh $(adacomp data where)")]
    Where,
}

/// What `--json` writes a line for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum JsonLines {
    /// Each epoch
    Epochs,
    /// Each step, too
    Steps,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    /// What to train; `adacomp recipes` lists the recipes. Not needed with --resume
    #[arg(required_unless_present = "resume")]
    pub(crate) recipe: Option<String>,
    /// What learners send of their gradients [default: adacomp]
    #[arg(long)]
    pub(crate) scheme: Option<Scheme>,
    #[command(flatten)]
    pub(crate) training: TrainingArguments,
    /// Save after every this many steps, besides after every epoch
    #[arg(long, value_name = "STEPS")]
    pub(crate) save_every: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArguments {
    /// What to train; `adacomp recipes` lists the recipes. Not needed with --resume
    #[arg(required_unless_present = "resume")]
    pub(crate) recipe: Option<String>,
    /// The schemes to compare: what learners send of their gradients
    #[arg(long, value_delimiter = ',', default_value = "dense,adacomp", conflicts_with = "resume")]
    pub(crate) schemes: Vec<Scheme>,
    #[command(flatten)]
    pub(crate) training: TrainingArguments,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    /// A recipe, a safetensors file, or the shapes of all layers: 4096x2048,4096,1000x4096,1000
    #[arg(required_unless_present_any = ["calibrate", "check"])]
    pub(crate) model: Option<String>,
    /// The number of learners, 1 to 10,000
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) learners: usize,
    /// The bandwidth of a learner's link, each way: 100mbit, 1gbit, 2.5gbit
    #[arg(long, value_name = "SPEED", default_value = "1gbit")]
    pub(crate) bandwidth: String,
    /// The time that a short message takes: 50us, 0.2ms
    #[arg(long, value_name = "TIME", default_value = "0.1ms")]
    pub(crate) latency: String,
    /// The time of a step without communication: 300ms, 1.5s
    #[arg(long, value_name = "TIME", default_value = "0.3s")]
    pub(crate) compute: String,
    /// The frame ratio of convolution kernels: dense bytes over compressed bytes
    #[arg(long, alias = "conv-rate", value_name = "RATIO", default_value_t = 50.0)]
    pub(crate) conv_ratio: f64,
    /// The frame ratio of matrices
    #[arg(long, alias = "matrix-rate", value_name = "RATIO", default_value_t = 300.0)]
    pub(crate) matrix_ratio: f64,
    /// Measure this machine's computing first, and keep the result for later plans
    #[arg(long)]
    pub(crate) calibrate: bool,
    /// Compare predictions with the network benchmark's results in this file
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub(crate) check: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
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

/// Settings of a training. Those not given are the recipe's, or with --resume the checkpoint's.
#[derive(Debug, Default, Args)]
pub(crate) struct TrainingArguments {
    /// Learners that share each minibatch; 1 to 1,024 on threads
    #[arg(long, value_name = "N")]
    pub(crate) learners: Option<usize>,
    /// How learners average what they send: gather sends every frame to all, as the paper does; reduce sends sums of signs;
    /// sharded compresses averages again, so that traffic does not grow with learners [default: gather]
    #[arg(long, value_parser = choice(Strategy::ALL.into_iter().filter(|strategy| *strategy != Strategy::Dense)))]
    pub(crate) strategy: Option<Strategy>,
    /// The code of selected elements: rice is close to the entropy, paper is the paper's 8 and 16 bits [default: rice]
    #[arg(long, value_parser = choice([Codec::Rice, Codec::Paper]))]
    pub(crate) codec: Option<Codec>,
    /// Elements in a bin of a convolution kernel [default: 50]
    #[arg(long, value_name = "T")]
    pub(crate) conv_bin: Option<u32>,
    /// Elements in a bin of any other matrix [default: 500]
    #[arg(long, value_name = "T")]
    pub(crate) matrix_bin: Option<u32>,
    /// The factor of AdaComp's soft threshold [default: 2]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) soft_threshold: Option<f64>,
    /// The value that AdaComp sends selected elements as: the mean of the bins' maxima, as the paper does, or that mean with
    /// each maximum clamped to ten medians [default: mean]
    #[arg(long, value_parser = choice([Scale::Mean, Scale::Clamped]))]
    pub(crate) scale: Option<Scale>,
    /// The share of elements that top-k sends, in percent [default: 0.1]
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) top_percent: Option<f64>,
    /// Samples in a step, over all learners
    #[arg(long, value_name = "N")]
    pub(crate) minibatch: Option<usize>,
    /// The length of the training in epochs
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    pub(crate) epochs: Option<usize>,
    /// The length of the training in steps, instead of epochs
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// The optimiser
    #[arg(long)]
    pub(crate) optimizer: Option<OptimizerKind>,
    /// The learning rate at the start
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) learning_rate: Option<f64>,
    /// How the learning rate changes during the run
    #[arg(long)]
    pub(crate) schedule: Option<Schedule>,
    /// The momentum of sgd [default: 0.9]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) momentum: Option<f64>,
    /// The weight decay, which is added to the gradient
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) weight_decay: Option<f64>,
    /// The largest norm of the averaged gradient
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip: Option<f64>,
    /// The number of first steps that send all gradients [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(crate) warm_up: Option<u64>,
    /// The seed of all random numbers [default: 1]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// A folder with the data; without it, the data is fetched
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Train on 224x224 pictures from --data, a folder of class folders (alexnet, resnet18, resnet50)
    #[arg(long, requires = "data")]
    pub(crate) image_folder: bool,
    /// Test on the first N samples only
    #[arg(long, value_name = "N")]
    pub(crate) test_samples: Option<usize>,
    /// What carries messages between learners
    #[arg(long, alias = "engine", default_value = "threads")]
    pub(crate) transport: TransportKind,
    /// Threads that the learners are spread over [default: one for each core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Seconds to wait for other learners before the run fails [default: 600]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// The folder for checkpoints and reports [default: runs/RECIPE-1, -2, ..., or runs/compare-RECIPE-1, ...]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Go on with the run in this folder
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    pub(crate) resume: Option<PathBuf>,
    /// Print JSON lines instead of tables
    #[arg(long, value_name = "LINES", num_args = 0..=1, require_equals = true, default_missing_value = "epochs")]
    pub(crate) json: Option<JsonLines>,
}

impl TrainingArguments {
    /// Returns the configuration with the given settings in place of its own.
    pub(crate) fn apply(&self, mut config: Config) -> Config {
        fn set<T: Clone>(field: &mut T, given: &Option<T>) {
            if let Some(given) = given {
                *field = given.clone();
            }
        }
        set(&mut config.learners, &self.learners);
        set(&mut config.strategy, &self.strategy);
        set(&mut config.codec, &self.codec);
        set(&mut config.conv_bin, &self.conv_bin);
        set(&mut config.matrix_bin, &self.matrix_bin);
        set(&mut config.soft_threshold, &self.soft_threshold);
        set(&mut config.scale, &self.scale);
        set(&mut config.top_percent, &self.top_percent);
        set(&mut config.minibatch, &self.minibatch);
        set(&mut config.length, &self.epochs.map(Length::Epochs).or(self.steps.map(Length::Steps)));
        set(&mut config.optimizer, &self.optimizer);
        set(&mut config.learning_rate, &self.learning_rate);
        set(&mut config.schedule, &self.schedule);
        set(&mut config.momentum, &self.momentum);
        set(&mut config.weight_decay, &self.weight_decay);
        set(&mut config.clip, &self.clip.map(Some));
        set(&mut config.warm_up, &self.warm_up);
        set(&mut config.seed, &self.seed);
        set(&mut config.data, &self.data.clone().map(Some));
        set(&mut config.test_samples, &self.test_samples.map(Some));
        config.image_folder |= self.image_folder;
        config
    }
}
