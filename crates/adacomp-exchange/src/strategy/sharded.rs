//! Compresses twice: learners compress their gradients, and owners compress their share of the average.

use super::by_layer::CompressedLayers;
use super::{Fault, slot};
use crate::message::{Context, read_scale, write_values};
use crate::protocol::Learner;
use adacomp::internal::{decode_range, encode_range, write_blocks};
use adacomp::{DecodeError, Packet, Selected, Sending, Sparse};
use std::ops::Range;

#[derive(Default)]
pub(crate) struct Sharded {
    /// By position of the layer in the group: scale and selection of each owner.
    results: Vec<Vec<(f32, Vec<Selected>)>>,
    average: Vec<f32>,
    selected: Vec<Selected>,
}

impl CompressedLayers for Sharded {
    fn send(
        &mut self,
        context: &Context<'_>,
        index: usize,
        learner: &mut Learner,
        receiver: usize,
        message: &mut Vec<u8>,
    ) {
        let layer = context.layers[index];
        let share = context.share(layer, receiver);
        let (packet, share) = match context.is_last_round() {
            false => (learner.compressor.packet(layer), share),
            // The owner's layer is the share alone, so its indices start at 0.
            true => (learner.owner.as_ref().and_then(|owner| owner.packet(layer)), 0..share.len()),
        };
        if let Some(Packet::Sparse(sparse)) = packet {
            write_values(&sparse.values[..1], message);
            encode_range(sparse.within(share.clone()).selected, share, message);
        }
    }

    fn receive(
        &mut self,
        context: &Context<'_>,
        index: usize,
        learner: &mut Learner,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let layer = context.layers[index];
        let share = context.share(layer, learner.number);
        let residual = learner.owner.as_mut().and_then(|owner| owner.residual(layer)).unwrap_or_default();
        let mut before = Vec::new();
        self.average.clear();
        self.average.resize(share.len(), 0.0);
        for (sender, bytes) in contents.iter_mut().enumerate() {
            let scale = read_selection(bytes, layer, share.clone(), &mut self.selected);
            let scale = scale.map_err(Fault::of(sender))?;
            before.reserve(self.selected.len());
            for (index, value) in sparse(scale, &self.selected).elements() {
                let index = index - share.start;
                before.push((index as u32, residual[index]));
                self.average[index] += value;
            }
        }
        learner.owner_before.push((layer, before));
        let factor = 1.0 / contents.len() as f32;
        self.average.iter_mut().for_each(|value| *value *= factor);
        compress_average(layer, learner, &self.average, Sending::Compressed)
    }

    /// Adds what the owner has kept of a layer that is compressed in other steps.
    fn change_dense(
        &mut self,
        context: &Context<'_>,
        index: usize,
        learner: &mut Learner,
        average: &mut [f32],
    ) -> Result<(), Fault> {
        let layer = context.layers[index];
        if !context.layout[layer].treatment.selects() {
            return Ok(());
        }
        let residual = learner.owner.as_mut().and_then(|owner| owner.residual(layer)).unwrap_or_default();
        learner.owner_before.push((layer, (0..).zip(residual.iter().copied()).collect()));
        compress_average(layer, learner, average, Sending::Flush)?;
        let packet = learner.owner.as_ref().and_then(|owner| owner.packet(layer));
        if let Some(Packet::Dense(values)) = packet {
            average.copy_from_slice(values);
        }
        Ok(())
    }

    fn receive_all(
        &mut self,
        context: &Context<'_>,
        index: usize,
        _learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let layer = context.layers[index];
        let results = slot(&mut self.results, index);
        for (owner, bytes) in contents.iter_mut().enumerate() {
            let (scale, selected) = slot(results, owner);
            let share = 0..context.share(layer, owner).len();
            *scale = read_selection(bytes, layer, share, selected).map_err(Fault::of(owner))?;
        }
        Ok(())
    }

    fn write(&mut self, context: &Context<'_>, index: usize, output: &mut [f32]) {
        // Owner after owner, each element after element.
        let elements = self.results[index].iter().enumerate().flat_map(|(owner, (scale, selected))| {
            let first = context.share(context.layers[index], owner).start;
            sparse(*scale, selected).elements().map(move |(index, value)| (first + index, value))
        });
        let mut elements = elements.peekable();
        write_blocks(output, 1.0, |start, block| {
            while let Some((at, value)) = elements.next_if(|(at, _)| *at < start + block.len()) {
                block[at - start] = value;
            }
        });
    }
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
    // Only a sum of scales that overflows is refused here.
    if compressed.is_ok() && owner.layer_statistics(layer).bad_bins == 0 {
        Ok(())
    } else {
        Err(Fault::of(learner.number)(DecodeError::Value { layer }))
    }
}

fn sparse(scale: f32, selected: &[Selected]) -> Sparse<'_> {
    Sparse { values: [scale, -scale], selected }
}

/// Reads a scale and selected elements from the front of `bytes`. Returns the scale.
fn read_selection(
    bytes: &mut &[u8],
    layer: usize,
    share: Range<usize>,
    selected: &mut Vec<Selected>,
) -> Result<f32, DecodeError> {
    let scale = read_scale(bytes, layer)?;
    selected.clear();
    decode_range(bytes, share, layer, selected)?;
    Ok(scale)
}
