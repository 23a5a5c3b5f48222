//! The command line: parsed here, with the options that `config` has; checked there.

use crate::config::{Config, Length, Scheme};
use clap::{ArgMatches, Args, FromArgMatches, Parser, Subcommand, ValueEnum, value_parser};
use std::num::NonZeroUsize;
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
  Compare dense and AdaComp on 1,797 digits:
    adacomp
  The same on MNIST, with a report to look at:
    adacomp compare mnist-cnn --learners 8
  One run, with checkpoints, and going on with it:
    adacomp train cifar10-cnn --strategy sharded
    adacomp train --resume runs/cifar10-cnn-1
  Exchange weights in every tenth step only:
    adacomp train shakespeare-transformer --local-steps 10 --matrix-bin 50
  Four processes, also on four machines:
    mpirun -n 4 adacomp train mnist-cnn --transport mpi
  Whether it would pay:
    adacomp plan resnet18 --learners 8 --bandwidth 1gbit --compute 0.3s

Words:
  learner             one participant of the training, with its own part of each minibatch
  compression ratio   bytes that a dense ring all-reduce would send, over bytes that a learner sent
  frame ratio         the paper's measure: a dense frame over a compressed one";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a recipe once
    #[command(
        after_help = "Settings that are not given are the recipe's or, with --resume, the checkpoint's.\n\n\
                            Example:\n  adacomp train mnist-cnn --learners 8 --epochs 3 --strategy reduce"
    )]
    Train(TrainArguments),
    /// Train a recipe dense and with AdaComp from the same seed, and show both in a table and a report
    #[command(
        after_help = "Settings that are not given are the recipe's or, with --resume, the comparison's.\n\n\
                      Example:\n  adacomp compare mnist-cnn --learners 8 --schemes dense,adacomp,top-k"
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
        after_help = "Examples:\n  adacomp plan resnet18 --learners 8 --bandwidth 1gbit --compute 0.3s\n  \
                      adacomp plan 4096x2048,4096,1000x4096,1000 --learners 64 --compute 50ms\n  \
                      adacomp plan digits --bandwidth 100mbit --latency 50ms --local-steps 30\n  \
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
    /// Also save after every multiple of this number of steps
    #[arg(long, value_name = "STEPS", value_parser = value_parser!(u64).range(1..))]
    pub(crate) save_every: Option<u64>,
}

#[derive(Debug, Parser)]
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
    #[arg(required_unless_present = "calibrate")]
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
    /// Local steps: how far weights have moved is exchanged once in this many steps, with nothing to overlap it; 0 for gradients in
    /// every step
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub(crate) local_steps: u64,
    /// The frame ratio of convolution kernels: dense bytes over compressed bytes
    #[arg(long, value_name = "RATIO", default_value_t = 50.0)]
    pub(crate) conv_ratio: f64,
    /// The frame ratio of matrices
    #[arg(long, value_name = "RATIO", default_value_t = 300.0)]
    pub(crate) matrix_ratio: f64,
    /// Measure this machine's computing first, and keep the result for later plans
    #[arg(long)]
    pub(crate) calibrate: bool,
    /// Learners that share a processor core, if more than one does
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    pub(crate) learners_per_core: f64,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// What carries messages between learners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportKind {
    /// Learners are threads of this process
    Threads,
    /// Learners are processes that mpirun started
    Mpi,
}

/// Options of a training: the configuration's, and what results do not depend on.
#[derive(Debug, Args)]
pub(crate) struct TrainingArguments {
    #[command(flatten)]
    settings: Settings,
    /// The length of the training in epochs
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    epochs: Option<usize>,
    /// The length of the training in steps, instead of epochs
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Train on 224x224 pictures from --data, a folder of class folders (alexnet, resnet18, resnet50)
    #[arg(long, requires = "data")]
    image_folder: bool,
    /// What carries messages between learners
    #[arg(long, default_value = "threads")]
    pub(crate) transport: TransportKind,
    /// Threads that the learners are spread over, without MPI [default: one for each core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Seconds to wait for other learners before the run fails
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = value_parser!(u64).range(1..=1 << 32))]
    pub(crate) timeout: u64,
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
    /// Puts the given settings into a configuration.
    pub(crate) fn apply(&self, config: &mut Config) -> Result<(), clap::Error> {
        config.update_from_arg_matches(&self.settings.0)?;
        let length = self.epochs.map(Length::Epochs).or(self.steps.map(Length::Steps));
        config.length = length.unwrap_or(config.length);
        config.image_folder |= self.image_folder;
        Ok(())
    }
}

/// The given options of a [`Config`], kept until it is known which configuration they change.
#[derive(Debug)]
struct Settings(ArgMatches);

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0 = matches.clone();
        Ok(())
    }
}

impl Args for Settings {
    fn augment_args(command: clap::Command) -> clap::Command {
        Config::augment_args_for_update(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Config::augment_args_for_update(command)
    }
}
