//! Writes a checkpoint.

use super::{
    FORMAT, LOCAL_WEIGHTS, OPTIMIZER, PREFIX, RUN, Saved, State, WEIGHTS, checkpoints, crc, names, of_learner,
};
use crate::config::Config;
use crate::files::{Draft, PARTIAL};
use crate::history::Sums;
use adacomp::Parameter;
use adacomp_exchange::{Exchange, StrategyChoice, Transport};
use anyhow::{Context, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Saves a run into its folder. `average` is of all learners' statistics. Learner 0 writes, and receives what the others have, block by block.
pub(crate) fn save<T: Transport>(
    folder: &Path,
    config: &Config,
    [parameters, untrained]: [&[Parameter]; 2],
    state: &State,
    average: &[Vec<f32>],
    exchange: &mut Exchange<T>,
) -> Result<()> {
    let hosted = exchange.transport().hosted();
    let mut writer = if hosted.start == 0 { Some(Writer::new(folder, state.step)?) } else { None };
    let states = exchange.save()?;
    let sums = Sums::gather(&state.epoch, exchange.transport())?;
    for block in blocks(config.learners, &state.shared.weights) {
        let own = || {
            (hosted.start.max(block.start)..hosted.end.min(block.end)).map(|learner| learner - hosted.start)
        };
        let residuals = own().map(|position| states[position].residuals.clone()).collect();
        let owners = own().map(|position| states[position].owner.clone().unwrap_or_default()).collect();
        let statistics = own().map(|position| match untrained.is_empty() {
            true => Ok(Vec::new()),
            false => write_tensors(named("", untrained, &state.statistics[position])),
        });
        let statistics = statistics.collect::<Result<Vec<_>>>()?;
        let local = own().map(|position| match state.local.get(position) {
            None => Ok(Vec::new()),
            Some(weights) => {
                let weights = named(LOCAL_WEIGHTS, parameters, weights);
                write_tensors(weights.chain(moments(parameters, &state.optimizers[position].moments)))
            }
        });
        let local = local.collect::<Result<Vec<_>>>()?;
        let files =
            [("residuals", residuals), ("owner", owners), ("statistics", statistics), ("local", local)];
        for (what, files) in files {
            let received = to_first(exchange.transport(), &block, files)?;
            if let Some(writer) = &mut writer {
                for (learner, bytes) in block.clone().zip(received).filter(|(_, bytes)| !bytes.is_empty()) {
                    writer.write(&of_learner(what, learner), &bytes)?;
                }
            }
        }
    }
    let Some(mut writer) = writer else { return Ok(()) };
    // Before the first exchange there is no momentum yet.
    let zeros = || state.shared.weights.iter().map(|layer| vec![0.0; layer.len()]).collect();
    let velocity = if state.shared.velocity.is_empty() { zeros() } else { state.shared.velocity.clone() };
    let weights = named("", parameters, &state.shared.weights).chain(named("", untrained, average));
    writer.write(WEIGHTS, &write_tensors(weights)?)?;
    let of_shared = match config.is_local() {
        false => moments(parameters, &state.optimizers[0].moments),
        true if config.outer_momentum == 0.0 => moments(parameters, &[]),
        true => moments(parameters, std::slice::from_ref(&velocity)),
    };
    writer.write(OPTIMIZER, &write_tensors(of_shared)?)?;
    writer.finish(
        folder,
        Saved {
            format: FORMAT,
            config: config.clone(),
            strategy: StrategyChoice::Given(exchange.options().strategy),
            step: state.step,
            dropped_in_a_row: state.dropped_in_a_row,
            unexchanged: state.unexchanged,
            optimizer_steps: state.optimizers[0].steps,
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
    let each = 12 * weights.iter().map(Vec::len).sum::<usize>();
    let block = (BYTES / each.max(1)).clamp(1, learners);
    (0..learners).step_by(block).map(move |first| first..(first + block).min(learners))
}

/// Sends a file of each learner of a block to learner 0; empty if it has none. Returns them there, and nothing elsewhere.
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

/// Returns parameters with a file's names for them, and their values.
fn named<'a>(
    prefix: &str,
    parameters: &'a [Parameter],
    values: &'a [Vec<f32>],
) -> impl Iterator<Item = (String, &'a Parameter, &'a [f32])> + use<'a> {
    let prefix = prefix.to_owned();
    let parameters = parameters.iter().zip(values);
    parameters.map(move |(parameter, values)| (format!("{prefix}{}", parameter.name), parameter, &values[..]))
}

/// Returns moments with a file's names for them, which begin with their number.
fn moments<'a>(
    parameters: &'a [Parameter],
    moments: &'a [Vec<Vec<f32>>],
) -> impl Iterator<Item = (String, &'a Parameter, &'a [f32])> {
    let moments = moments.iter().enumerate();
    moments.flat_map(|(number, moments)| named(&format!("{number}."), parameters, moments))
}

/// Writes a safetensors file of one tensor for each parameter.
fn write_tensors<'a>(tensors: impl Iterator<Item = (String, &'a Parameter, &'a [f32])>) -> Result<Vec<u8>> {
    let tensors = tensors.map(|(name, parameter, values)| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name, &parameter.shape, bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.to_vec(), bytes)?)));
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

    /// Writes the list of files last, then gives the folder its name, then removes older checkpoints.
    fn finish(self, folder: &Path, saved: Saved) -> Result<()> {
        let saved = Saved { files: self.files, ..saved };
        self.draft.write(RUN, &saved.write()?)?;
        self.draft.keep()?;
        let older = checkpoints(folder).into_iter().take_while(|old| !old.ends_with(&self.name));
        for old in older {
            fs::remove_dir_all(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
        Ok(())
    }
}
