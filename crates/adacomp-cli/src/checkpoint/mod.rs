//! Saves a run, and reads it again to go on with it.
//!
//! A checkpoint is a folder `checkpoint-STEP` that appears with all its files or not at all:
//!
//! | file | what |
//! |---|---|
//! | `run.json` | its own checksum, configuration, step, history, and the checksums of the other files |
//! | `weights.safetensors` | the weights, and the average of what is not trained |
//! | `optimizer.safetensors` | the optimiser's moments; with local steps the momentum of shared weights |
//! | `residuals-L.safetensors` | learner L's residuals |
//! | `owner-L.safetensors` | what learner L keeps as an owner, with the strategy `sharded` |
//! | `statistics-L.safetensors` | learner L's running statistics, if the model has any |
//! | `local-L.safetensors` | learner L's weights and its optimiser's moments, with local steps |
//!
//! Data order and random draws follow from the seed and the step.

mod save;

use crate::config::{Config, text};
use crate::files;
use crate::history::{History, Seconds, Sums};
use crate::optimizer::Optimizer;
use adacomp::Parameter;
use adacomp_exchange::{Exchange, LearnerState, Shared, Strategy, StrategyChoice, Transport};
use anyhow::{Context, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) use save::save;

const FORMAT: u32 = 2;
/// Its `run.json` has no checksum.
const OLD_FORMAT: u32 = 1;
const PREFIX: &str = "checkpoint-";
pub(crate) const RUN: &str = "run.json";
/// In the folder of a comparison, whose runs have folders in it.
pub(crate) const COMPARISON: &str = "compare.json";
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
/// What the names of a learner's own weights begin with; moments begin with their number.
const LOCAL_WEIGHTS: &str = "weights.";

/// What a checkpoint keeps, besides residuals.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) step: u64,
    /// The last steps that were dropped, since one was averaged.
    pub(crate) dropped_in_a_row: u64,
    /// Steps since learners exchanged what they have moved, with local steps.
    pub(crate) unexchanged: u64,
    /// The weights.
    pub(crate) shared: Shared,
    /// The average of running statistics at the last exchange, with local steps.
    pub(crate) shared_statistics: Vec<Vec<f32>>,
    /// The weights of each learner that is hosted here, with local steps.
    pub(crate) local: Vec<Vec<Vec<f32>>>,
    /// The optimiser of the shared weights or, with local steps, of each learner that is hosted here.
    pub(crate) optimizers: Vec<Optimizer>,
    /// The running statistics of each learner that is hosted here.
    pub(crate) statistics: Vec<Vec<Vec<f32>>>,
    /// What this epoch has cost each learner that is hosted here.
    pub(crate) epoch: Vec<Sums>,
    /// What all epochs before this one have cost a learner.
    pub(crate) before: Sums,
    pub(crate) seconds: Seconds,
    pub(crate) history: History,
}

/// The contents of `run.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Saved {
    format: u32,
    pub(crate) config: Config,
    /// What `auto` stood for. Older checkpoints do not say.
    #[serde(default, with = "text")]
    pub(crate) strategy: StrategyChoice,
    pub(crate) step: u64,
    /// Steps that the optimiser has taken: fewer than steps if some were dropped.
    optimizer_steps: u64,
    /// Steps since learners exchanged what they have moved. Older checkpoints have no local steps.
    #[serde(default)]
    unexchanged: u64,
    /// The last steps that were dropped, since one was averaged. Older checkpoints do not say.
    #[serde(default)]
    pub(crate) dropped_in_a_row: u64,
    /// For each learner what the epoch that is going on has cost it so far.
    epoch: Vec<Sums>,
    before: Sums,
    seconds: Seconds,
    pub(crate) history: History,
    /// Names and CRC-32 of all other files.
    pub(crate) files: BTreeMap<String, String>,
}

/// More steps than any run can take, and few enough to count on.
const MOST_STEPS: u64 = 1 << 53;

impl Saved {
    /// Returns the file's bytes: JSON whose first value is the checksum of all that follows it.
    fn write(&self) -> Result<Vec<u8>> {
        let text = serde_json::to_string_pretty(self)?;
        let rest = text.strip_prefix('{').context("it is an object")?;
        Ok(format!("{CHECKSUM}{}\",{rest}", crc(rest.as_bytes())).into_bytes())
    }

    /// Reads the file's bytes, and checks all that can be checked without the other files.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self> {
        let other = "it is damaged, or of another version of this program";
        let mut saved: Self = serde_json::from_slice(bytes).context(other)?;
        match saved.format {
            FORMAT => ensure!(has_checksum(bytes), "it is damaged, or was edited: its checksum is another"),
            OLD_FORMAT => {}
            format => bail!("format {format}, but this program reads format {FORMAT}"),
        }
        saved.check().context("it is damaged")?;
        for sums in saved.epoch.iter_mut().chain([&mut saved.before]) {
            sums.complete(saved.config.learners);
        }
        Ok(saved)
    }

    /// Checks that it agrees with itself, as it need not after somebody has edited it.
    fn check(&self) -> Result<()> {
        let learners = self.config.learners;
        ensure!(
            learners > 0 && self.epoch.len() == learners,
            "{learners} learners, but the sums of {}",
            self.epoch.len()
        );
        let layers = self.history.layers.len();
        let fit = self.epoch.iter().chain([&self.before]).all(|sums| sums.layers() == layers);
        ensure!(fit, "{layers} layers, but the sums of another number of layers");
        let tested = self.history.epochs.last().map_or(0, |epoch| epoch.step);
        let earlier = [tested, self.optimizer_steps, self.dropped_in_a_row, self.unexchanged];
        ensure!(
            self.step < MOST_STEPS && earlier.iter().all(|step| *step <= self.step),
            "a step of {} cannot be",
            self.step
        );
        let is_sharded = self.config.strategy() == StrategyChoice::Given(Strategy::Sharded);
        let owners = if is_sharded { learners } else { 0 };
        let needed = [WEIGHTS, OPTIMIZER].map(str::to_owned).into_iter();
        let needed = needed.chain((0..learners).map(|learner| of_learner("residuals", learner)));
        let local = if self.config.is_local() { learners } else { 0 };
        let needed = needed.chain((0..local).map(|learner| of_learner("local", learner)));
        for name in needed.chain((0..owners).map(|learner| of_learner("owner", learner))) {
            ensure!(self.files.contains_key(&name), "{name} is not in the list of files");
        }
        for name in self.files.keys() {
            ensure!(Path::new(name).file_name() == Some(name.as_ref()), "`{name}` is no name of a file");
        }
        Ok(())
    }
}

/// A saved run.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) folder: PathBuf,
    pub(crate) saved: Saved,
}

impl Checkpoint {
    /// Opens the newest checkpoint of a run's folder, or a checkpoint by its own folder, and checks that no file is damaged.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let folder = match folder.join(RUN).is_file() {
            true => folder.to_owned(),
            false if folder.join(COMPARISON).is_file() => {
                let folder = folder.display();
                bail!(
                    "{folder} is a comparison: name the folder of one of its runs, or `adacomp compare --resume {folder}`"
                )
            }
            false => newest(folder)
                .with_context(|| format!("{}: there is no checkpoint in this folder", folder.display()))?,
        };
        let path = folder.join(RUN);
        let saved = Saved::read(&files::read(&path)?).with_context(|| path.display().to_string())?;
        let checkpoint = Self { folder, saved };
        for (name, expected) in &checkpoint.saved.files {
            let actual = crc(&checkpoint.read(name)?);
            ensure!(actual == *expected, "{} is damaged", checkpoint.folder.join(name).display());
        }
        Ok(checkpoint)
    }

    /// Opens the newest checkpoint of a run's folder, if there is one.
    pub(crate) fn find(folder: &Path) -> Result<Option<Self>> {
        newest(folder).map(|newest| Self::open(&newest)).transpose()
    }

    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>> {
        let is_listed = self.saved.files.contains_key(name);
        ensure!(is_listed, "{}: {name} is not in the list of files", self.folder.join(RUN).display());
        files::read(&self.folder.join(name))
    }

    fn tensors(&self, name: &str, prefix: &str, parameters: &[Parameter]) -> Result<Vec<Vec<f32>>> {
        read_tensors(&self.read(name)?, prefix, parameters)
            .with_context(|| self.folder.join(name).display().to_string())
    }

    /// Checks that a run can go on with this configuration, to this number of steps.
    pub(crate) fn check(&self, config: &Config, steps: u64) -> Result<()> {
        let Saved { config: before, step, .. } = &self.saved;
        ensure!(before.scheme == config.scheme, "a run keeps its scheme: leave --scheme out");
        if before.optimizer != config.optimizer || before.minibatch != config.minibatch {
            bail!("a run keeps its optimiser and its minibatch: leave --optimizer and --minibatch out");
        }
        if before.is_local() != config.is_local() {
            bail!("a run keeps its way: whether it takes local steps cannot change");
        }
        let bins = |config: &Config| (config.conv_bin, config.matrix_bin);
        if self.saved.files.contains_key(&of_learner("owner", 0)) && bins(before) != bins(config) {
            bail!("a run with the strategy sharded keeps its bins: leave --conv-bin and --matrix-bin out");
        }
        // At its end a run can still be made one of another number of learners.
        if *step > steps || *step == steps && !config.has_settings_of(before) {
            bail!("nothing to do: the run is at step {step} of {steps}; give more with --steps or --epochs");
        }
        Ok(())
    }

    /// Returns what `auto` has stood for so far, if nothing has changed that it depends on.
    pub(crate) fn chosen(&self, config: &Config) -> StrategyChoice {
        let before = &self.saved.config;
        let depends_on =
            |config: &Config| (config.learners, config.codec, config.conv_bin, config.matrix_bin);
        match before.strategy() == StrategyChoice::Auto && depends_on(before) == depends_on(config) {
            true => self.saved.strategy,
            false => StrategyChoice::Auto,
        }
    }

    /// Loads the state of the learners that are hosted here. The number of learners may be another one than when it was saved.
    pub(crate) fn load<T: Transport>(
        &self,
        config: &Config,
        parameters: &[Parameter],
        untrained: &[Parameter],
        exchange: &mut Exchange<T>,
    ) -> Result<State> {
        let hosted = exchange.transport().hosted();
        let saved = &self.saved;
        let weights = self.tensors(WEIGHTS, "", parameters)?;
        ensure!(
            saved.history.layers.len() == weights.len(),
            "{} is damaged: {} layers, but the model has {}",
            self.folder.join(RUN).display(),
            saved.history.layers.len(),
            weights.len()
        );
        let same_learners = saved.config.learners == config.learners;
        // Their own is enough where there are as many learners as before; otherwise all of them are averaged.
        let all = 0..saved.config.learners;
        let needed = if same_learners { hosted.clone() } else { all.clone() };
        // What owners have kept goes to all learners where there are no owners any more.
        let had_owners = saved.files.contains_key(&of_learner("owner", 0));
        let owners_end = had_owners && exchange.options().strategy != Strategy::Sharded;
        let states = if owners_end { all } else { needed.clone() };
        let states = states.map(|learner| self.learner_state(learner));
        exchange.load(&states.collect::<Result<Vec<_>>>()?)?;
        let statistics = needed.clone().map(|learner| match untrained.is_empty() {
            true => Ok(Vec::new()),
            false => self.tensors(&of_learner("statistics", learner), "", untrained),
        });
        let statistics = statistics.collect::<Result<Vec<_>>>()?;
        let (mut local, mut optimizers, mut velocity) = (Vec::new(), Vec::new(), Vec::new());
        if config.is_local() {
            let states = needed.clone().map(|learner| self.local_state(learner, config, parameters));
            (local, optimizers) = states.collect::<Result<Vec<_>>>()?.into_iter().unzip();
            if !same_learners {
                // Nothing is lost on average, also in mid-round.
                local = vec![mean(&local); hosted.len()];
                optimizers = vec![Optimizer::mean(&optimizers); hosted.len()];
            }
            if saved.config.outer_momentum != 0.0 {
                velocity = self.tensors(OPTIMIZER, "0.", parameters)?;
            }
        } else {
            optimizers.push(self.optimizer(OPTIMIZER, config, parameters, &weights)?);
        }
        let shared_statistics = match untrained.is_empty() {
            true => Vec::new(),
            false => self.tensors(WEIGHTS, "", untrained)?,
        };
        let sums: Vec<Sums> = needed.map(|learner| saved.epoch[learner].clone()).collect();
        let (statistics, epoch) = match same_learners {
            true => (statistics, sums),
            false => (vec![mean(&statistics); hosted.len()], vec![Sums::mean(&sums); hosted.len()]),
        };
        Ok(State {
            step: saved.step,
            unexchanged: saved.unexchanged,
            dropped_in_a_row: saved.dropped_in_a_row,
            shared: Shared { weights, velocity },
            shared_statistics,
            local,
            optimizers,
            statistics,
            epoch,
            before: saved.before.clone(),
            seconds: saved.seconds,
            history: saved.history.clone(),
        })
    }

    /// Returns an optimiser, with the moments that a file has of it.
    fn optimizer(
        &self,
        file: &str,
        config: &Config,
        parameters: &[Parameter],
        weights: &[Vec<f32>],
    ) -> Result<Optimizer> {
        let mut optimizer = Optimizer::new(config, weights);
        optimizer.steps = self.saved.optimizer_steps;
        for (number, moments) in optimizer.moments.iter_mut().enumerate() {
            *moments = self.tensors(file, &format!("{number}."), parameters)?;
        }
        Ok(optimizer)
    }

    /// Returns a learner's own weights and optimiser, with local steps.
    fn local_state(
        &self,
        learner: usize,
        config: &Config,
        parameters: &[Parameter],
    ) -> Result<(Vec<Vec<f32>>, Optimizer)> {
        let file = of_learner("local", learner);
        let weights = self.tensors(&file, LOCAL_WEIGHTS, parameters)?;
        let optimizer = self.optimizer(&file, config, parameters, &weights)?;
        Ok((weights, optimizer))
    }

    fn learner_state(&self, learner: usize) -> Result<LearnerState> {
        let owner = of_learner("owner", learner);
        let owner = self.saved.files.contains_key(&owner).then(|| self.read(&owner)).transpose()?;
        Ok(LearnerState { residuals: self.read(&of_learner("residuals", learner))?, owner })
    }
}

fn of_learner(what: &str, learner: usize) -> String {
    format!("{what}-{learner:04}.safetensors")
}

/// Reads the tensors of these parameters, in their order.
fn read_tensors(bytes: &[u8], prefix: &str, parameters: &[Parameter]) -> Result<Vec<Vec<f32>>> {
    let tensors = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
    let read = |parameter: &Parameter| {
        let name = format!("{prefix}{}", parameter.name);
        let tensor = tensors.tensor(&name).with_context(|| format!("it has no tensor `{name}`"))?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != parameter.shape {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            bail!("`{name}` is {dtype:?} {shape:?} where F32 {:?} should be", parameter.shape);
        }
        let values = tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let values: Vec<f32> = values.collect();
        ensure!(values.iter().all(|value| value.is_finite()), "`{name}` is not finite");
        Ok(values)
    };
    parameters.iter().map(read).collect()
}

/// Returns the checkpoints of a run, oldest first.
fn checkpoints(folder: &Path) -> Vec<PathBuf> {
    let number = |name: &str| -> Option<(u64, u64)> {
        let (step, again) =
            name.strip_prefix(PREFIX).map(|rest| rest.split_once('-').unwrap_or((rest, "1")))?;
        Some((step.parse().ok()?, again.parse().ok()?))
    };
    let mut found: Vec<_> = names(folder).filter_map(|(name, path)| Some((number(&name)?, path))).collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

/// Returns the names and paths of all that is in a folder.
fn names(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

/// Returns the folder of the run that a checkpoint belongs to, or the folder itself if it is a run's.
pub(crate) fn run_folder(path: &Path) -> PathBuf {
    let full = if path.join(RUN).is_file() { path.canonicalize().ok() } else { None };
    full.as_deref().and_then(Path::parent).unwrap_or(path).to_owned()
}

/// Returns whether a run's folder has a checkpoint.
pub(crate) fn is_in(folder: &Path) -> bool {
    newest(folder).is_some()
}

fn newest(folder: &Path) -> Option<PathBuf> {
    checkpoints(folder).pop()
}

/// What `run.json` starts with; eight digits follow.
const CHECKSUM: &str = "{\n  \"checksum\": \"";

/// Returns whether a `run.json` starts with the checksum of what follows it.
fn has_checksum(bytes: &[u8]) -> bool {
    let rest = bytes.strip_prefix(CHECKSUM.as_bytes()).unwrap_or_default();
    let (written, rest) = rest.split_at(rest.len().min(8));
    rest.strip_prefix(b"\",").is_some_and(|rest| crc(rest).as_bytes() == written)
}

fn crc(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

/// Returns the mean of all learners' tensors.
pub(crate) fn mean(statistics: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let first = statistics.first().cloned().unwrap_or_default();
    let value = |layer: usize, element: usize| {
        let sum: f64 = statistics.iter().map(|statistics| f64::from(statistics[layer][element])).sum();
        (sum / statistics.len() as f64) as f32
    };
    let layer =
        |(number, values): (usize, &Vec<f32>)| (0..values.len()).map(|at| value(number, at)).collect();
    first.iter().enumerate().map(layer).collect()
}

/// Returns a text that differs if any bit of the weights, or of what is not trained, differs.
pub(crate) fn checksum(weights: &[Vec<f32>], statistics: &[Vec<f32>]) -> String {
    let mut hash = Sha256::new();
    for value in weights.iter().chain(statistics).flatten() {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
