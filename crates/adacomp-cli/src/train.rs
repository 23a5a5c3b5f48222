//! Running a recipe's training on an engine.

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::data::{self, Data};
use crate::endpoint::{Ended, Endpoint};
use crate::engine::Processes;
use crate::history::Epoch;
use crate::meter::Sums;
use crate::models::Network;
use adacomp::Layout;
use adacomp_burn::unshared;
use adacomp_exchange::{ExchangeError, Threads, Transport, TransportError};
use anyhow::{Result, anyhow};
use burn::tensor::Device;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A configuration, and all that the result does not depend on.
pub(crate) struct Run {
    pub(crate) config: Config,
    pub(crate) threads: usize,
    /// How long to wait for other learners.
    pub(crate) limit: Duration,
    /// Where checkpoints go.
    pub(crate) folder: PathBuf,
    /// Steps after which to save, besides every epoch.
    pub(crate) save_every: Option<u64>,
    pub(crate) device: Device,
    /// Set by Ctrl-C.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Run {
    pub(crate) fn is_save_due(&self, step: u64, epoch_ends: bool) -> bool {
        epoch_ends || self.save_every.is_some_and(|every| step.is_multiple_of(every))
    }
}

/// Hears how a run goes.
pub(crate) trait Reporter {
    /// A step has ended, with this loss over all learners and these sums of learner 0.
    fn step(&mut self, step: u64, loss: f64, sums: &Sums, layout: &Layout);
    /// An epoch has ended.
    fn epoch(&mut self, epoch: &Epoch);
}

/// Trains from the start, or from a checkpoint.
pub(crate) fn train(
    run: &Run,
    data: &Data,
    from: Option<&Checkpoint>,
    reporter: &mut (dyn Reporter + Send),
    processes: Option<&mut Processes>,
) -> Result<Ended> {
    let recipe = run.config.recipe()?;
    let model = Network::new(recipe.architecture, data.classes, run.config.seed, &run.device)?;
    match processes {
        None => train_locally(run, data, &model, from, reporter),
        Some(processes) => {
            let reporter = if processes.hosted().start == 0 { Some(reporter) } else { None };
            Endpoint::new(run, data, model, processes, from)?.train(reporter)
        }
    }
}

fn train_locally(
    run: &Run,
    data: &Data,
    model: &Network,
    from: Option<&Checkpoint>,
    reporter: &mut (dyn Reporter + Send),
) -> Result<Ended> {
    let mut reporter = Some(reporter);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            Threads { learners: run.config.learners, threads: run.threads, timeout: run.limit }
                .connect()
                .into_iter()
                .map(|transport| {
                    let reporter = if transport.hosted().start == 0 { reporter.take() } else { None };
                    let model = unshared(model.clone());
                    scope.spawn(move || Endpoint::new(run, data, model, transport, from)?.train(reporter))
                })
                .collect();
        let results = threads.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a learner's thread panicked; please report it")))
        });
        first_cause(results.collect())
    })
}

/// The results agree, but for an error: that of the thread that failed first, rather than of those that miss it.
fn first_cause(results: Vec<Result<Ended>>) -> Result<Ended> {
    let misses_another = |error: &anyhow::Error| {
        let transport = error.downcast_ref::<TransportError>();
        let exchange = error.downcast_ref::<ExchangeError>();
        transport.is_some() || matches!(exchange, Some(ExchangeError::Transport { .. }))
    };
    let (mut consequence, mut ended) = (None, None);
    for result in results {
        match result {
            Ok(result) => {
                ended.get_or_insert(result);
            }
            Err(error) if misses_another(&error) => consequence = Some(error),
            Err(error) => return Err(error),
        }
    }
    match (consequence, ended) {
        (Some(error), _) => Err(error),
        (None, Some(ended)) => Ok(ended),
        (None, None) => Err(anyhow!("nobody trained")),
    }
}

/// The data that a configuration wants.
pub(crate) fn load_data(config: &Config) -> Result<Data> {
    let data = data::load(&config.recipe()?.wanted(), config.data.as_deref())?;
    config.steps(data.train.len())?;
    Ok(data)
}
