//! Saving a run, and going on with it.
//!
//! A checkpoint is a folder `checkpoint-STEP` that appears with all its files or not at all:
//!
//! | file | what |
//! |---|---|
//! | `run.json` | configuration, step, history, and the checksums of the other files |
//! | `weights.safetensors` | the weights, and the average of what is not trained |
//! | `optimizer.safetensors` | the optimiser's moments |
//! | `residuals-L.safetensors` | learner L's residuals |
//! | `owner-L.safetensors` | what learner L keeps as an owner, with the strategy `sharded` |
//! | `statistics-L.safetensors` | learner L's running statistics, if the model has any |
//!
//! Data order and random draws follow from the seed and the step.

use crate::config::Config;
use crate::endpoint::State;
use crate::files::{Draft, PARTIAL};
use crate::history::{History, Seconds};
use crate::meter::Sums;
use crate::optimizer::Optimizer;
use crate::tensors;
use adacomp::Parameter;
use adacomp_burn::average_statistics;
use adacomp_exchange::{Collective, Exchange, LearnerState};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

const FORMAT: u32 = 1;
const PREFIX: &str = "checkpoint-";
const RUN: &str = "run.json";
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";

/// What `run.json` says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Saved {
    format: u32,
    pub(crate) config: Config,
    pub(crate) step: u64,
    /// Steps that the optimiser has taken: fewer than steps if some were dropped.
    optimizer_steps: u64,
    /// For each learner what the epoch that is going on has cost it so far.
    epoch: Vec<Sums>,
    before: Sums,
    seconds: Seconds,
    pub(crate) history: History,
    /// Names and CRC-32 of all other files.
    pub(crate) files: BTreeMap<String, String>,
}

/// A saved run.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) folder: PathBuf,
    pub(crate) saved: Saved,
}

impl Checkpoint {
    /// The newest checkpoint of a run's folder, or a checkpoint's own folder; checked to be whole.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let folder = match folder.join(RUN).is_file() {
            true => folder.to_owned(),
            false => newest(folder)
                .with_context(|| format!("{}: there is no checkpoint to resume from", folder.display()))?,
        };
        let path = folder.join(RUN);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let saved: Saved = serde_json::from_str(&text).with_context(|| {
            format!("{} is damaged, or of another version of this program", path.display())
        })?;
        if saved.format != FORMAT {
            bail!("{}: format {}, but this program reads format {FORMAT}", path.display(), saved.format);
        }
        let checkpoint = Self { folder, saved };
        for (name, expected) in &checkpoint.saved.files {
            let actual = crc(&checkpoint.read(name)?);
            ensure!(actual == *expected, "{} is damaged", checkpoint.folder.join(name).display());
        }
        Ok(checkpoint)
    }

    /// The same where there may be none yet.
    pub(crate) fn find(folder: &Path) -> Result<Option<Self>> {
        newest(folder).map(|newest| Self::open(&newest)).transpose()
    }

    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.folder.join(name);
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn tensors(&self, name: &str, prefix: &str, parameters: &[Parameter]) -> Result<Vec<Vec<f32>>> {
        tensors::read(&self.read(name)?, prefix, parameters)
            .with_context(|| self.folder.join(name).display().to_string())
    }

    /// The weights.
    pub(crate) fn weights(&self, parameters: &[Parameter]) -> Result<Vec<Vec<f32>>> {
        self.tensors(WEIGHTS, "", parameters)
    }

    /// Takes over what was saved, for the learners that are hosted here, of now perhaps another number.
    pub(crate) fn load<C: Collective>(
        &self,
        config: &Config,
        parameters: &[Parameter],
        untrained: &[Parameter],
        exchange: &mut Exchange<C>,
    ) -> Result<State> {
        let hosted = exchange.collective().hosted();
        let saved = &self.saved;
        if saved.config.optimizer != config.optimizer || saved.config.minibatch != config.minibatch {
            bail!("a run keeps its optimiser and its minibatch: leave --optimizer and --minibatch out");
        }
        let weights = self.weights(parameters)?;
        let mut optimizer = Optimizer::new(config, &weights);
        optimizer.steps = saved.optimizer_steps;
        for (number, moments) in optimizer.moments.iter_mut().enumerate() {
            *moments = self.tensors(OPTIMIZER, &format!("{number}."), parameters)?;
        }
        let same_learners = saved.config.learners == config.learners;
        // Their own is enough where there are as many learners as before; otherwise all of them are averaged.
        let needed = if same_learners { hosted.clone() } else { 0..saved.config.learners };
        let states = needed.clone().map(|learner| self.learner_state(learner));
        exchange.protocol().load(&states.collect::<Result<Vec<_>>>()?)?;
        let statistics = needed.clone().map(|learner| match untrained.is_empty() {
            true => Ok(Vec::new()),
            false => self.tensors(&of_learner("statistics", learner), "", untrained),
        });
        let statistics = statistics.collect::<Result<Vec<_>>>()?;
        let sums: Vec<Sums> = needed.map(|learner| saved.epoch[learner].clone()).collect();
        let (statistics, epoch) = match same_learners {
            true => (statistics, sums),
            false => (vec![mean(&statistics); hosted.len()], vec![Sums::mean(&sums); hosted.len()]),
        };
        Ok(State {
            step: saved.step,
            weights,
            optimizer,
            statistics,
            epoch,
            before: saved.before.clone(),
            seconds: saved.seconds,
            history: saved.history.clone(),
        })
    }

    fn learner_state(&self, learner: usize) -> Result<LearnerState> {
        let owner = of_learner("owner", learner);
        let owner = self.saved.files.contains_key(&owner).then(|| self.read(&owner)).transpose()?;
        Ok(LearnerState { residuals: self.read(&of_learner("residuals", learner))?, owner })
    }
}

/// Saves a run into its folder. The learner 0 writes, and takes in what the others have, one after the other.
pub(crate) fn save<C: Collective>(
    folder: &Path,
    config: &Config,
    [parameters, untrained]: [&[Parameter]; 2],
    state: &State,
    exchange: &mut Exchange<C>,
) -> Result<()> {
    let hosted = exchange.collective().hosted();
    let average = average_statistics(exchange.collective(), &state.statistics)?;
    let mut writer = if hosted.start == 0 { Some(Writer::new(folder, state.step)?) } else { None };
    let states = exchange.protocol().save()?;
    let mut sums = Vec::new();
    for block in blocks(config.learners, &state.weights) {
        let own = hosted.start.max(block.start)..hosted.end.min(block.end);
        let own = own.map(|learner| {
            let slot = learner - hosted.start;
            learner_parts(&states[slot], untrained, &state.statistics[slot], &state.epoch[slot])
        });
        let received = to_first(exchange.collective(), &block, own.collect::<Result<Vec<_>>>()?)?;
        if let Some(writer) = &mut writer {
            for (learner, parts) in block.zip(received) {
                sums.push(writer.write_learner(learner, &parts)?);
            }
        }
    }
    let Some(mut writer) = writer else { return Ok(()) };
    writer
        .write(WEIGHTS, &tensors::write(&[("", parameters, &state.weights), ("", untrained, &average)])?)?;
    let prefixes: Vec<String> =
        (0..state.optimizer.moments.len()).map(|number| format!("{number}.")).collect();
    let moments = prefixes.iter().zip(&state.optimizer.moments);
    let moments: Vec<_> =
        moments.map(|(prefix, moments)| (prefix.as_str(), parameters, &moments[..])).collect();
    writer.write(OPTIMIZER, &tensors::write(&moments)?)?;
    writer.finish(
        folder,
        Saved {
            format: FORMAT,
            config: config.clone(),
            step: state.step,
            optimizer_steps: state.optimizer.steps,
            epoch: sums,
            before: state.before.clone(),
            seconds: state.seconds,
            history: state.history.clone(),
            files: BTreeMap::new(),
        },
    )
}

/// Learners whose states travel in one round: few enough that memory and the length of messages stay bounded.
fn blocks(learners: usize, weights: &[Vec<f32>]) -> impl Iterator<Item = Range<usize>> {
    const BYTES: usize = 1 << 29;
    let each = 8 * weights.iter().map(Vec::len).sum::<usize>();
    let block = (BYTES / each.max(1)).clamp(1, learners);
    (0..learners).step_by(block).map(move |first| first..(first + block).min(learners))
}

/// What one learner has of its own, as it travels: sums, residuals, an owner's residuals and statistics, empty if it has none.
fn learner_parts(
    state: &LearnerState,
    untrained: &[Parameter],
    statistics: &[Vec<f32>],
    sums: &Sums,
) -> Result<Vec<u8>> {
    let statistics = match untrained.is_empty() {
        true => Vec::new(),
        false => tensors::write(&[("", untrained, statistics)])?,
    };
    let mut bytes = Vec::new();
    for part in [
        &serde_json::to_vec(sums)?,
        &state.residuals,
        state.owner.as_ref().unwrap_or(&Vec::new()),
        &statistics,
    ] {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    Ok(bytes)
}

/// Brings what these learners have of their own to learner 0, which gets all of it; the others get nothing.
fn to_first<C: Collective>(
    collective: &mut C,
    block: &Range<usize>,
    own: Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    let (hosted, learners) = (collective.hosted(), collective.learners());
    let mut own = own.into_iter();
    let messages = hosted.clone().map(|learner| {
        let mut messages = vec![Vec::new(); learners];
        if block.contains(&learner) {
            messages[0] = own.next().unwrap_or_default();
        }
        messages
    });
    let mut incoming = collective.to_each(messages.collect())?;
    match hosted.start {
        0 => Ok(incoming.swap_remove(0).drain(block.clone()).collect()),
        _ => Ok(Vec::new()),
    }
}

struct Writer {
    draft: Draft,
    files: BTreeMap<String, String>,
    name: String,
}

impl Writer {
    fn new(folder: &Path, step: u64) -> Result<Self> {
        // Left behind by a process that was killed. Nobody else works in this folder.
        for stale in names(folder).filter(|(name, _)| name.starts_with(PREFIX) && name.ends_with(PARTIAL)) {
            fs::remove_dir_all(&stale.1).with_context(|| format!("cannot remove {}", stale.1.display()))?;
        }
        // A checkpoint is never replaced: one of the same step, but for other learners, gets a name of its own.
        let plain = format!("{PREFIX}{step:08}");
        let again = (2..).map(|number| format!("{plain}-{number}"));
        let name = std::iter::once(plain.clone()).chain(again).find(|name| !folder.join(name).exists());
        let name = name.unwrap_or(plain);
        Ok(Self { draft: Draft::new(&folder.join(&name))?, files: BTreeMap::new(), name })
    }

    fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.draft.write(name, bytes)?;
        self.files.insert(name.to_owned(), crc(bytes));
        Ok(())
    }

    fn write_learner(&mut self, learner: usize, bytes: &[u8]) -> Result<Sums> {
        let mut rest = bytes;
        let mut next = || {
            let (length, after) = rest.split_first_chunk()?;
            let (part, after) = after.split_at_checked(u64::from_le_bytes(*length) as usize)?;
            rest = after;
            Some(part)
        };
        let parts = [next(), next(), next(), next()];
        let [Some(sums), Some(residuals), Some(owner), Some(statistics)] = parts else {
            bail!("learner {learner}'s state is missing");
        };
        self.write(&of_learner("residuals", learner), residuals)?;
        for (name, bytes) in [("owner", owner), ("statistics", statistics)] {
            if !bytes.is_empty() {
                self.write(&of_learner(name, learner), bytes)?;
            }
        }
        Ok(serde_json::from_slice(sums)?)
    }

    /// The list of files last, then the name; then older checkpoints can go.
    fn finish(self, folder: &Path, saved: Saved) -> Result<()> {
        let saved = Saved { files: self.files, ..saved };
        self.draft.write(RUN, &serde_json::to_vec_pretty(&saved)?)?;
        self.draft.keep()?;
        let older = checkpoints(folder).into_iter().take_while(|old| !old.ends_with(&self.name));
        for old in older {
            fs::remove_dir_all(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
        Ok(())
    }
}

fn of_learner(what: &str, learner: usize) -> String {
    format!("{what}-{learner:04}.safetensors")
}

/// The checkpoints of a run, oldest first.
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

/// The names of all that is in a folder.
fn names(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

/// The folder of the run that a checkpoint is of, or that is named itself.
pub(crate) fn run_folder(path: &Path) -> PathBuf {
    let whole = if path.join(RUN).is_file() { path.canonicalize().ok() } else { None };
    whole.as_deref().and_then(Path::parent).unwrap_or(path).to_owned()
}

fn newest(folder: &Path) -> Option<PathBuf> {
    checkpoints(folder).pop()
}

fn crc(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

fn mean(statistics: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let first = statistics.first().cloned().unwrap_or_default();
    let value = |layer: usize, element: usize| {
        let sum: f64 = statistics.iter().map(|statistics| f64::from(statistics[layer][element])).sum();
        (sum / statistics.len() as f64) as f32
    };
    let layer =
        |(number, values): (usize, &Vec<f32>)| (0..values.len()).map(|at| value(number, at)).collect();
    first.iter().enumerate().map(layer).collect()
}

/// A number that differs when any bit of the weights, or of what is not trained, differs.
pub(crate) fn checksum(weights: &[Vec<f32>], statistics: &[Vec<f32>]) -> String {
    let mut hash = Sha256::new();
    for value in weights.iter().chain(statistics).flatten() {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
