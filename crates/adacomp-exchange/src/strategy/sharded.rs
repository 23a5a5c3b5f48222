//! Compresses twice: learners compress their gradients, and owners compress their shard of the average.

use super::by_layer::{LayerRound, LayerRounds};
use super::{Fault, slot};
use crate::message::{read_scale, read_scales, write_values};
use crate::protocol::Learner;
use adacomp::internal::{Output, decode_range, encode_range, write_blocks};
use adacomp::{DecodeError, Packet, Selected, Sending, Sparse};
use std::ops::Range;

#[derive(Default)]
pub(crate) struct Sharded {
    /// Scale and selection of each owner.
    results: Vec<(f32, Vec<Selected>)>,
}

impl LayerRounds for Sharded {
    fn send(&mut self, at: LayerRound<'_>, learner: &Learner, receiver: usize, message: &mut Vec<u8>) {
        let shard = at.shard(receiver);
        let (packet, shard) = match at.context.is_last_round() {
            false => (learner.compressor.packet(at.layer), shard),
            // The owner's layer is the shard alone, so its indices start at 0.
            true => (learner.owner.as_ref().and_then(|owner| owner.packet(at.layer)), 0..shard.len()),
        };
        if let Some(Packet::Sparse(sparse)) = packet {
            write_values(&sparse.values[..1], message);
            encode_range(sparse.within(shard.clone()).selected, shard, message);
        }
    }

    fn receive(
        &mut self,
        at: LayerRound<'_>,
        learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        if !at.context.is_last_round() {
            return receive_shards(at, &mut learners[0], contents);
        }
        for (owner, bytes) in contents.iter_mut().enumerate() {
            let (scale, selected) = slot(&mut self.results, owner);
            let shard = 0..at.shard(owner).len();
            *scale = read_selection(bytes, at.layer, shard, selected).map_err(Fault::of(owner))?;
        }
        Ok(())
    }

    fn write(&mut self, at: LayerRound<'_>, output: &mut Output<'_>) {
        // Owner after owner, each element after element.
        let elements = self.results.iter().enumerate().flat_map(|(owner, (scale, selected))| {
            let first = at.shard(owner).start;
            sparse(*scale, selected).elements().map(move |(index, value)| (first + index, value))
        });
        let mut elements = elements.peekable();
        write_blocks(output, 1.0, |start, block| {
            while let Some((at, value)) = elements.next_if(|(at, _)| *at < start + block.len()) {
                block[at - start] = value;
            }
        });
    }

    /// Adds what the owner has kept of a layer that is compressed in other steps.
    fn change_dense(
        &mut self,
        at: LayerRound<'_>,
        learner: &mut Learner,
        average: &mut [f32],
    ) -> Result<(), Fault> {
        if !at.context.layout[at.layer].treatment.selects() {
            return Ok(());
        }
        let residual = owner_residual(learner, at.layer);
        let before = (0..).zip(residual.iter().copied()).collect();
        learner.owner_before.push((at.layer, before));
        compress_average(at.layer, learner, average, Sending::Flush)?;
        let packet = learner.owner.as_ref().and_then(|owner| owner.packet(at.layer));
        if let Some(Packet::Dense(values)) = packet {
            average.copy_from_slice(values);
        }
        Ok(())
    }
}

/// Averages what all learners sent of an owner's shard, and compresses it.
fn receive_shards(at: LayerRound<'_>, learner: &mut Learner, contents: &mut [&[u8]]) -> Result<(), Fault> {
    let shard = at.shard(learner.number);
    let residual = owner_residual(learner, at.layer);
    let (mut before, mut selected) = (Vec::new(), Vec::new());
    let mut average = vec![0.0; shard.len()];
    let (scales, most) = read_scales(contents, at.layer, at.context.options.clip)?;
    for (sender, (bytes, scale)) in contents.iter_mut().zip(scales).enumerate() {
        selected.clear();
        decode_range(bytes, shard.clone(), at.layer, &mut selected).map_err(Fault::of(sender))?;
        before.reserve(selected.len());
        for (index, value) in sparse(scale.min(most), &selected).elements() {
            let index = index - shard.start;
            before.push((index as u32, residual[index]));
            average[index] += value;
        }
    }
    learner.owner_before.push((at.layer, before));
    // Each owner gets all scales, so each learner knows what counts of its own.
    learner.compressor.clamp_sent(at.layer, most);
    let factor = 1.0 / contents.len() as f32;
    average.iter_mut().for_each(|value| *value *= factor);
    compress_average(at.layer, learner, &average, Sending::Compressed)
}

fn owner_residual(learner: &mut Learner, layer: usize) -> &[f32] {
    learner.owner.as_mut().and_then(|owner| owner.residual(layer)).unwrap_or_default()
}

/// Compresses an average as its owner.
fn compress_average(
    layer: usize,
    learner: &mut Learner,
    average: &[f32],
    sending: Sending,
) -> Result<(), Fault> {
    let Some(owner) = &mut learner.owner else { return Ok(()) };
    let compressed = owner.compress_layer(layer, average.into(), sending);
    // What each learner sends is finite, so a bad bin is a sum that overflows.
    learner.overflow |= owner.layer_statistics(layer).bad_bins > 0;
    compressed.map_err(|_| Fault::of(learner.number)(DecodeError::Value { layer }))
}

fn sparse(scale: f32, selected: &[Selected]) -> Sparse<'_> {
    Sparse { values: [scale, -scale], selected }
}

/// Reads a scale and selected elements from the front of `bytes`. Returns the scale.
fn read_selection(
    bytes: &mut &[u8],
    layer: usize,
    shard: Range<usize>,
    selected: &mut Vec<Selected>,
) -> Result<f32, DecodeError> {
    let scale = read_scale(bytes, layer)?;
    selected.clear();
    decode_range(bytes, shard, layer, selected)?;
    Ok(scale)
}
