//! What commands that train have in common: what was asked for, made ready to run.

use crate::args::{JsonLines, TrainingArguments};
use crate::checkpoint::{Checkpoint, run_folder};
use crate::config::{Config, MAX_LEARNERS, Scheme, value_name};
use crate::data::Data;
use crate::endpoint::Ended;
use crate::engine::Processes;
use crate::files::{self, Claim};
use crate::recipes::Recipe;
use crate::reporter::Terminal;
use crate::train::{self, Run};
use adacomp_exchange::Transport;
use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use serde_json::{Value, json};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Seconds to wait for other learners, unless told otherwise: some steps and tests take minutes.
const TIMEOUT: u64 = 600;

/// A command that trains, ready to do so.
pub(crate) struct Session<'a> {
    arguments: &'a TrainingArguments,
    pub(crate) recipe: Recipe,
    pub(crate) config: Config,
    pub(crate) schemes: Vec<Scheme>,
    data: Data,
    /// That no other process works in the same folder.
    claim: Option<Claim>,
    /// Dropping them waits for all of them, which after an error on one would be in vain.
    processes: Option<ManuallyDrop<Processes>>,
    stop: Arc<AtomicBool>,
    limit: Duration,
    pub(crate) threads: usize,
}

impl<'a> Session<'a> {
    /// Checks what was asked for, before anything is written, and loads the data.
    pub(crate) fn new(
        config: Config,
        schemes: Vec<Scheme>,
        arguments: &'a TrainingArguments,
    ) -> Result<Self> {
        let limit = Duration::from_secs(arguments.timeout.unwrap_or(TIMEOUT));
        let mut processes = arguments.engine.start(limit)?.map(ManuallyDrop::new);
        let mut config = arguments.apply(config);
        if let Some(processes) = &processes {
            let learners = processes.learners();
            if arguments.learners.is_some_and(|given| given != learners) {
                bail!("mpirun started {learners} processes: leave --learners out, or start as many");
            }
            config.learners = learners;
        }
        let most = if processes.is_some() { usize::MAX } else { MAX_LEARNERS };
        for &scheme in &schemes {
            Config { scheme, ..config.clone() }.check(most)?;
        }
        let recipe = config.recipe()?;
        // One process fetches what is missing, the others find it there.
        let data = match &mut processes {
            Some(processes) if processes.hosted().start > 0 => {
                processes.barrier()?;
                train::load_data(&config)?
            }
            Some(processes) => {
                let data = train::load_data(&config)?;
                processes.barrier()?;
                data
            }
            None => train::load_data(&config)?,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = arguments.threads.unwrap_or(cores).clamp(1, config.learners);
        Ok(Self {
            arguments,
            recipe,
            config,
            schemes,
            claim: None,
            data,
            processes,
            stop: stop_on_interrupt()?,
            limit,
            threads,
        })
    }

    /// Whether this process tells people how it goes: of several, the first.
    pub(crate) fn is_reporter(&self) -> bool {
        self.processes.as_ref().is_none_or(|processes| processes.hosted().start == 0)
    }

    pub(crate) fn json(&self) -> Option<JsonLines> {
        self.arguments.json
    }

    /// The folder for results: the one to resume, the one asked for, or a fresh one.
    pub(crate) fn folder(&mut self, name: &str) -> Result<PathBuf> {
        let folder = match (&self.arguments.resume, &self.arguments.out) {
            // Only the process that is_reporter writes.
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

    /// Prints the whole configuration, so that the run can be repeated.
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
            ("threads".to_owned(), self.threads.to_string()),
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
        let run = Run {
            threads: self.threads,
            limit: self.limit,
            folder: folder.to_owned(),
            save_every,
            device: Device::flex().autodiff(),
            stop: self.stop.clone(),
            config,
        };
        let mut terminal = Terminal::new(&run.config, self.recipe.metric, self.json(), steps);
        let processes = self.processes.as_deref_mut();
        train::train(&run, &self.data, from, &mut terminal, processes)
    }

    /// Parts from other processes in good order, once all is done.
    pub(crate) fn end(self) {
        drop(self.processes.map(ManuallyDrop::into_inner));
    }
}

/// A flat list of a configuration's values, named as on the command line.
pub(crate) fn flat(configuration: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Object(object) => {
            object.iter().map(|(name, value)| format!("{value} {name}")).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    };
    let entries = configuration.as_object().into_iter().flatten();
    entries.map(|(name, value)| (name.replace('_', "-"), text(value))).collect()
}

/// Ctrl-C ends a run after the step that is going on; a second one ends the program at once.
fn stop_on_interrupt() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(crate::INTERRUPTED));
        }
        note!("\nstopping after this step, and saving; once more to stop at once");
    })
    .context("cannot listen to Ctrl-C")?;
    Ok(stop)
}
