//! Writes a checkpoint.

use super::{FORMAT, OPTIMIZER, PREFIX, RUN, Saved, WEIGHTS, checkpoints, crc, names, of_learner};
use crate::config::Config;
use crate::files::{Draft, PARTIAL};
use crate::history::Sums;
use crate::trainer::State;
use adacomp::Parameter;
use adacomp_burn::average_statistics;
use adacomp_exchange::{Exchange, LearnerState, Transport};
use anyhow::{Context, Result, bail};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Saves a run into its folder. Learner 0 writes, and receives what the others have, block by block.
pub(crate) fn save<T: Transport>(
    folder: &Path,
    config: &Config,
    [parameters, untrained]: [&[Parameter]; 2],
    state: &State,
    exchange: &mut Exchange<T>,
) -> Result<()> {
    let hosted = exchange.transport().hosted();
    let average = average_statistics(exchange.transport(), &state.statistics)?;
    let mut writer = if hosted.start == 0 { Some(Writer::new(folder, state.step)?) } else { None };
    let states = exchange.save()?;
    let mut sums = Vec::new();
    for block in blocks(config.learners, &state.weights) {
        let own = hosted.start.max(block.start)..hosted.end.min(block.end);
        let own = own.map(|learner| {
            let position = learner - hosted.start;
            learner_parts(&states[position], untrained, &state.statistics[position], &state.epoch[position])
        });
        let received = to_first(exchange.transport(), &block, own.collect::<Result<Vec<_>>>()?)?;
        if let Some(writer) = &mut writer {
            for (learner, parts) in block.zip(received) {
                sums.push(writer.write_learner(learner, &parts)?);
            }
        }
    }
    let Some(mut writer) = writer else { return Ok(()) };
    writer.write(WEIGHTS, &write_tensors(&[("", parameters, &state.weights), ("", untrained, &average)])?)?;
    let prefixes: Vec<String> =
        (0..state.optimizer.moments.len()).map(|number| format!("{number}.")).collect();
    let moments = prefixes.iter().zip(&state.optimizer.moments);
    let moments: Vec<_> =
        moments.map(|(prefix, moments)| (prefix.as_str(), parameters, &moments[..])).collect();
    writer.write(OPTIMIZER, &write_tensors(&moments)?)?;
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

/// Returns blocks of learners whose states are sent in one round: few enough that memory and messages stay bounded.
fn blocks(learners: usize, weights: &[Vec<f32>]) -> impl Iterator<Item = Range<usize>> {
    const BYTES: usize = 1 << 29;
    let each = 8 * weights.iter().map(Vec::len).sum::<usize>();
    let block = (BYTES / each.max(1)).clamp(1, learners);
    (0..learners).step_by(block).map(move |first| first..(first + block).min(learners))
}

/// Writes one message of what a learner has of its own: sums, residuals, an owner's residuals and statistics, empty if it has
/// none.
fn learner_parts(
    state: &LearnerState,
    untrained: &[Parameter],
    statistics: &[Vec<f32>],
    sums: &Sums,
) -> Result<Vec<u8>> {
    let statistics = match untrained.is_empty() {
        true => Vec::new(),
        false => write_tensors(&[("", untrained, statistics)])?,
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

/// Sends the messages of a block of learners to learner 0. Returns them there, and nothing elsewhere.
fn to_first<T: Transport>(
    transport: &mut T,
    block: &Range<usize>,
    own: Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    let (hosted, learners) = (transport.hosted(), transport.learners());
    let mut own = own.into_iter();
    let messages = hosted.clone().map(|learner| {
        let mut messages = vec![Vec::new(); learners];
        if block.contains(&learner) {
            messages[0] = own.next().unwrap_or_default();
        }
        messages
    });
    let mut incoming = transport.all_to_all(messages.collect())?;
    match hosted.start {
        0 => Ok(incoming.swap_remove(0).drain(block.clone()).collect()),
        _ => Ok(Vec::new()),
    }
}

/// What comes before the names of parameters in a file, the parameters, and their values.
type Named<'a> = (&'a str, &'a [Parameter], &'a [Vec<f32>]);

/// Writes a safetensors file of one tensor for each parameter.
fn write_tensors(tensors: &[Named<'_>]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (prefix, parameters, values) in tensors {
        for (parameter, values) in parameters.iter().zip(*values) {
            let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            bytes.push((format!("{prefix}{}", parameter.name), &parameter.shape, data));
        }
    }
    let views = bytes
        .iter()
        .map(|(name, shape, data)| Ok((name, TensorView::new(Dtype::F32, shape.to_vec(), data)?)));
    Ok(safetensors::serialize(views.collect::<Result<Vec<_>>>()?, None)?)
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

    /// Writes the list of files last, then gives the folder its name, then removes older checkpoints.
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
