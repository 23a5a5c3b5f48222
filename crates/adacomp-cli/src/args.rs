//! The command line: parsed raw here, checked in `config`.

use crate::config::{CodecName, Config, Length, OptimizerKind, ScaleName, Schedule, Scheme, StrategyName};
use crate::engine::Engine;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

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
  mpirun -n 4 adacomp train mnist-cnn --engine mpi four processes, also on four machines
  adacomp plan resnet18 --learners 8 --bandwidth 1gbit --compute 0.3s    whether it would pay";

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
        /// Its name; `adacomp data list` has them
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
    /// What to train; `adacomp recipes` lists them. Not needed with --resume
    #[arg(required_unless_present = "resume")]
    pub(crate) recipe: Option<String>,
    /// How gradients travel [default: adacomp]
    #[arg(long)]
    pub(crate) scheme: Option<Scheme>,
    #[command(flatten)]
    pub(crate) training: TrainingArguments,
    /// Save after so many steps, besides every epoch
    #[arg(long, value_name = "STEPS")]
    pub(crate) save_every: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArguments {
    /// What to train; `adacomp recipes` lists them. Not needed with --resume
    #[arg(required_unless_present = "resume")]
    pub(crate) recipe: Option<String>,
    /// The schemes to compare
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
    /// Learners, 1 to 10,000
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) learners: usize,
    /// What a learner's link carries each way: 100mbit, 1gbit, 2.5gbit
    #[arg(long, value_name = "SPEED", default_value = "1gbit")]
    pub(crate) bandwidth: String,
    /// How long a short message takes: 50us, 0.2ms
    #[arg(long, value_name = "TIME", default_value = "0.1ms")]
    pub(crate) latency: String,
    /// What a step takes without communication: 300ms, 1.5s
    #[arg(long, value_name = "TIME", default_value = "0.3s")]
    pub(crate) compute: String,
    /// How many times smaller kernels of convolutions get
    #[arg(long, value_name = "TIMES", default_value_t = 50.0)]
    pub(crate) conv_rate: f64,
    /// How many times smaller matrices get
    #[arg(long, value_name = "TIMES", default_value_t = 300.0)]
    pub(crate) matrix_rate: f64,
    /// Measure first what computing takes on this machine, and keep that for later
    #[arg(long)]
    pub(crate) calibrate: bool,
    /// Compare predictions with results of `cargo xtask bench network`
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub(crate) check: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// How to train. What is not given is the recipe's, or with --resume the checkpoint's.
#[derive(Debug, Default, Args)]
pub(crate) struct TrainingArguments {
    /// Learners that share each minibatch; 1 to 1,024 on the engine local
    #[arg(long, value_name = "N")]
    pub(crate) learners: Option<usize>,
    /// Who sends what to whom [default: gather]
    #[arg(long)]
    pub(crate) strategy: Option<StrategyName>,
    /// How a frame's bits are written [default: rice]
    #[arg(long)]
    pub(crate) codec: Option<CodecName>,
    /// Elements in a bin of a convolution kernel [default: 50]
    #[arg(long, value_name = "T")]
    pub(crate) conv_bin: Option<u32>,
    /// Elements in a bin of any other matrix [default: 500]
    #[arg(long, value_name = "T")]
    pub(crate) matrix_bin: Option<u32>,
    /// The factor of AdaComp's soft threshold [default: 2]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) soft_threshold: Option<f64>,
    /// What AdaComp sends selected elements as [default: mean]
    #[arg(long)]
    pub(crate) scale: Option<ScaleName>,
    /// What top-k sends, in percent [default: 0.1]
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) top_percent: Option<f64>,
    /// Samples in a step, over all learners
    #[arg(long, value_name = "N")]
    pub(crate) minibatch: Option<usize>,
    /// How long to train, in epochs
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    pub(crate) epochs: Option<usize>,
    /// How long to train, in steps, rather than in epochs
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// What changes the weights
    #[arg(long)]
    pub(crate) optimizer: Option<OptimizerKind>,
    /// The learning rate at the start
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) learning_rate: Option<f64>,
    /// How the learning rate changes
    #[arg(long)]
    pub(crate) schedule: Option<Schedule>,
    /// The momentum of sgd [default: 0.9]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) momentum: Option<f64>,
    /// Draws weights to 0 by so much
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) weight_decay: Option<f64>,
    /// The largest norm of the averaged gradient
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip: Option<f64>,
    /// First steps that send everything [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(crate) warm_up: Option<u64>,
    /// Where all randomness comes from [default: 1]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// A folder with the data; otherwise it is fetched
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Take 224x224 pictures from --data, a folder of class folders (alexnet, resnet18, resnet50)
    #[arg(long, requires = "data")]
    pub(crate) image_folder: bool,
    /// Test on the first so many samples only
    #[arg(long, value_name = "N")]
    pub(crate) test_samples: Option<usize>,
    /// Where learners live
    #[arg(long, default_value = "local")]
    pub(crate) engine: Engine,
    /// Threads for the engine local [default: one a core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// How long to wait for other learners [default: 600]
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
    /// A configuration with what was given in place of what it had.
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
