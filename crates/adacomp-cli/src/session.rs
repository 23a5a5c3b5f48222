//! What the commands that train have in common: checks what was asked for, loads the data, and runs learners on threads or over
//! MPI.

use crate::args::{JsonLines, TrainingArguments, TransportKind};
use crate::checkpoint::{Checkpoint, run_folder};
use crate::config::{Config, DeviceKind, MAX_LEARNERS, Scheme, value_name};
use crate::data::{self, Data, DataSet};
use crate::files::{self, Claim};
use crate::models::Network;
use crate::recipes::Recipe;
use crate::show::{Progress, flat};
use crate::trainer::{Ended, Run, Trainer};
use adacomp_burn::unshared;
use adacomp_exchange::{ExchangeError, Threads, Transport, TransportError};
use anyhow::{Context, Result, anyhow, bail};
use burn::module::Module;
use burn::tensor::Device;
use serde_json::json;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Learners in processes that mpirun started, one each.
#[cfg(feature = "mpi")]
type Processes = adacomp_exchange::Mpi;

#[cfg(feature = "mpi")]
fn start_mpi(timeout: Duration) -> Result<Processes> {
    Ok(adacomp_exchange::Mpi::start(timeout)?)
}

/// A program without MPI has no such learners.
#[cfg(not(feature = "mpi"))]
type Processes = adacomp_exchange::Local;

#[cfg(not(feature = "mpi"))]
fn start_mpi(_timeout: Duration) -> Result<Processes> {
    bail!("this program was built without MPI: build it with `cargo build --release --features mpi`")
}

/// Opens a device.
fn open(kind: DeviceKind) -> Result<Device> {
    let device = match kind {
        DeviceKind::Flex => Device::flex(),
        #[cfg(feature = "wgpu")]
        DeviceKind::Wgpu => {
            Device::wgpu_options().init().context("--device wgpu found no GPU, and no driver for one")?
        }
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => Device::cuda(0),
        #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
        _ => {
            let name = value_name(kind);
            bail!(
                "this program was built without {name}: build it with `cargo build --release --features {name}`"
            )
        }
    };
    Ok(device.autodiff())
}

/// A command that trains, ready to do so.
pub(crate) struct Session<'a> {
    arguments: &'a TrainingArguments,
    pub(crate) recipe: Recipe,
    pub(crate) config: Config,
    pub(crate) schemes: Vec<Scheme>,
    data: Data,
    device: Device,
    /// Keeps other processes out of the folder.
    claim: Option<Claim>,
    /// Dropping them waits for all of them, which after an error on one would be in vain.
    processes: Option<ManuallyDrop<Processes>>,
    is_reporter: bool,
    stop: Arc<AtomicBool>,
    timeout: Duration,
    threads: usize,
}

impl<'a> Session<'a> {
    /// Checks what was asked for, before anything is written, and loads the data.
    pub(crate) fn new(
        mut config: Config,
        schemes: Vec<Scheme>,
        arguments: &'a TrainingArguments,
    ) -> Result<Self> {
        let timeout = Duration::from_secs(arguments.timeout);
        let mut processes = match arguments.transport {
            TransportKind::Threads => {
                // Open MPI's and MPICH's names for how many they have started.
                let started = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().find_map(std::env::var_os);
                let started = started.and_then(|size| size.to_str()?.parse().ok());
                if let Some(started @ 2..) = started {
                    bail!(
                        "mpirun started {started} processes, and each would train alone: add --transport mpi"
                    );
                }
                None
            }
            TransportKind::Mpi if arguments.threads.is_some() => {
                bail!("over MPI each process has one thread: leave --threads out, or start more processes")
            }
            TransportKind::Mpi => Some(ManuallyDrop::new(start_mpi(timeout)?)),
        };
        let learners = processes.as_ref().map_or(config.learners, |processes| processes.learners());
        config.learners = learners;
        if Recipe::named(&config.recipe)?.data == DataSet::Digits {
            // Version 0.1.0 kept a folder that it had no use for.
            config.data = None;
        }
        arguments.apply(&mut config)?;
        if processes.is_some() && config.learners != learners {
            bail!("mpirun started {learners} processes: leave --learners out, or start as many");
        }
        let most = if processes.is_some() { usize::MAX } else { MAX_LEARNERS };
        let minibatch = config.minibatch;
        if arguments.resume.is_some() && !minibatch.is_multiple_of(config.learners) {
            let fit = (1..=minibatch.min(most)).filter(|learners| minibatch.is_multiple_of(*learners));
            let fit = fit.map(|learners| learners.to_string()).collect::<Vec<_>>().join(", ");
            bail!(
                "a run keeps its minibatch, and {minibatch} samples cannot be split evenly over {} learners: choose one of {fit}",
                config.learners
            );
        }
        for &scheme in &schemes {
            Config { scheme, ..config.clone() }.check(most)?;
        }
        let recipe = config.recipe()?;
        let device = open(config.device)?;
        // One process fetches what is missing, the others find it there.
        let is_reporter = processes.as_ref().is_none_or(|processes| processes.hosted().start == 0);
        if let (Some(processes), false) = (&mut processes, is_reporter) {
            processes.barrier()?;
        }
        let data = data::load(&recipe, config.data.as_deref())?;
        config.steps(data.train.len())?;
        if let (Some(processes), true) = (&mut processes, is_reporter) {
            processes.barrier()?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = arguments.threads.map_or(cores, usize::from).min(config.learners);
        Ok(Self {
            arguments,
            recipe,
            config,
            schemes,
            claim: None,
            data,
            device,
            processes,
            is_reporter,
            stop: stop_on_interrupt()?,
            timeout,
            threads,
        })
    }

    /// Returns whether this process prints and writes: of several, the first.
    pub(crate) fn is_reporter(&self) -> bool {
        self.is_reporter
    }

    pub(crate) fn json(&self) -> Option<JsonLines> {
        self.arguments.json
    }

    /// Returns the folder for results: the one to resume, the one asked for, or a fresh one.
    pub(crate) fn folder(&mut self, name: &str) -> Result<PathBuf> {
        let folder = match (&self.arguments.resume, &self.arguments.out) {
            (None, None) if !self.is_reporter() => return Ok(PathBuf::new()),
            (None, None) => files::fresh_folder(name)?,
            (Some(folder), _) => run_folder(folder),
            (None, Some(folder)) => {
                if self.is_reporter() {
                    files::check_empty(folder)?;
                }
                folder.clone()
            }
        };
        if self.is_reporter() {
            self.claim = Some(Claim::new(&folder)?);
        }
        Ok(folder)
    }

    /// Checks that a run can go on with this configuration.
    pub(crate) fn check(&self, from: &Checkpoint, config: &Config) -> Result<()> {
        let (steps, _) = config.steps(self.data.train.len())?;
        from.check(config, steps)
    }

    /// Says what the learners run on.
    pub(crate) fn workers(&self) -> String {
        match &self.processes {
            None => format!("{} threads", self.threads),
            Some(processes) => format!("{} processes of one thread", processes.learners()),
        }
    }

    /// Prints the configuration, so that the run can be repeated.
    pub(crate) fn introduce(&self) -> Result<()> {
        if !self.is_reporter() {
            return Ok(());
        }
        let mut configuration = serde_json::to_value(&self.config)?;
        configuration["scheme"] =
            json!(self.schemes.iter().copied().map(value_name).collect::<Vec<_>>().join(", "));
        if self.json().is_some() {
            say!("{}", json!({ "configuration": configuration }));
            return Ok(());
        }
        say!("{}: {}", self.recipe.name, self.recipe.about);
        let (train, test) = (self.data.train.len(), self.data.test.len());
        let more = [
            ("samples".to_owned(), format!("{train} to train, {test} to test")),
            ("computed by".to_owned(), self.workers()),
        ];
        for (name, value) in flat(&configuration).into_iter().chain(more) {
            say!("  {name:<15} {value}");
        }
        say!("");
        Ok(())
    }

    /// Trains, going on from the checkpoint if there is one.
    pub(crate) fn train(
        &mut self,
        config: Config,
        folder: &Path,
        save_every: Option<u64>,
        from: Option<&Checkpoint>,
    ) -> Result<Ended> {
        let (steps, _) = config.steps(self.data.train.len())?;
        let is_reporter = self.is_reporter();
        let run = Run {
            folder: folder.to_owned(),
            save_every,
            device: self.device.clone(),
            stop: self.stop.clone(),
            config,
        };
        let mut progress = Progress::new(&run.config, self.recipe.metric, self.json(), steps);
        // Drawn on the processor, so that all devices start with the same weights.
        let drawn = Device::flex().autodiff();
        let model = Network::new(&self.recipe.architecture, self.data.classes, run.config.seed, &drawn)?;
        let model = model.fork(&run.device);
        match self.processes.as_deref_mut() {
            None => self.train_on_threads(&run, &model, from, progress),
            Some(processes) => Trainer::new(&run, &self.data, model, processes, from)?
                .train(is_reporter.then_some(&mut progress)),
        }
    }

    fn train_on_threads(
        &self,
        run: &Run,
        model: &Network,
        from: Option<&Checkpoint>,
        progress: Progress,
    ) -> Result<Ended> {
        let mut progress = Some(progress);
        std::thread::scope(|scope| {
            let transports =
                Threads { learners: run.config.learners, threads: self.threads, timeout: self.timeout };
            let threads: Vec<_> = transports
                .connect()
                .into_iter()
                .map(|transport| {
                    let mut progress = if transport.hosted().start == 0 { progress.take() } else { None };
                    let (model, data) = (unshared(model.clone()), &self.data);
                    scope.spawn(move || {
                        Trainer::new(run, data, model, transport, from)?.train(progress.as_mut())
                    })
                })
                .collect();
            let results = threads.into_iter().map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(anyhow!("a learner's thread panicked; please report it")))
            });
            first_cause(results.collect())
        })
    }

    /// Parts from other processes in good order, once all is done.
    pub(crate) fn end(self) {
        drop(self.processes.map(ManuallyDrop::into_inner));
    }
}

/// Returns what the threads agree on, or the error of the one that failed first, rather than of those that miss it.
fn first_cause(results: Vec<Result<Ended>>) -> Result<Ended> {
    let misses_another = |error: &anyhow::Error| {
        error.is::<TransportError>() || matches!(error.downcast_ref(), Some(ExchangeError::Transport { .. }))
    };
    let order = |result: &Result<Ended>| match result {
        Err(error) if !misses_another(error) => 0,
        Err(_) => 1,
        Ok(_) => 2,
    };
    results.into_iter().min_by_key(order).context("nobody trained")?
}

/// Ends a run on Ctrl-C after the step that is going on, and the program at once on a second one.
fn stop_on_interrupt() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(crate::INTERRUPTED));
        }
        note!("\nstopping after this step or, with local steps, at the next exchange, and saving; once more to stop at once");
    })
    .context("cannot listen to Ctrl-C")?;
    Ok(stop)
}
