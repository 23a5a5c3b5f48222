//! Learners agree on one scale for each layer, and owners add up signs as integers.

use super::by_layer::CompressedLayers;
use super::{Fault, slot};
use crate::message::{Context, read_scale, write_values};
use crate::protocol::Learner;
use crate::sums::{add_signs, decode_sums, encode_sums};
use adacomp::internal::{decode_range, encode_range, write_blocks};
use adacomp::{DecodeError, Packet, Selected};

const SCALES: usize = 0;
const SIGNS: usize = 1;

#[derive(Default)]
pub(crate) struct Reduce {
    /// By position of the layer in the group.
    scales: Vec<f32>,
    /// By position of the hosted learner, then of the layer: the owner's sums that are not 0, and where in its share they are.
    sums: Vec<Vec<Vec<(u32, i32)>>>,
    /// By position of the layer: elements with a sum, and the sum.
    results: Vec<Vec<(u32, i32)>>,
    /// By sender, for the layer at hand.
    selected: Vec<Vec<Selected>>,
    /// The length of the longest of these in a step.
    longest: usize,
}

impl CompressedLayers for Reduce {
    fn send(
        &mut self,
        context: &Context<'_>,
        index: usize,
        learner: &mut Learner,
        receiver: usize,
        message: &mut Vec<u8>,
    ) {
        let layer = context.layers[index];
        let Some(Packet::Sparse(sparse)) = learner.compressor.packet(layer) else { return };
        let share = context.share(layer, receiver);
        match context.round {
            SCALES => write_values(&sparse.values[..1], message),
            SIGNS => encode_range(sparse.within(share.clone()).selected, share, message),
            _ => encode_sums(share.len(), &self.sums[learner.position][index], message),
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
        for (sender, bytes) in contents.iter_mut().enumerate() {
            let selected = slot(&mut self.selected, sender);
            selected.clear();
            decode_range(bytes, share.clone(), layer, selected).map_err(Fault::of(sender))?;
            self.longest = selected.len().max(self.longest);
        }
        let sums = slot(slot(&mut self.sums, learner.position), index);
        add_signs(&self.selected, share, sums);
        shrink(sums, sums.len());
        Ok(())
    }

    fn receive_all(
        &mut self,
        context: &Context<'_>,
        index: usize,
        learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let layer = context.layers[index];
        if context.round == SCALES {
            let scale = mean_scale(layer, contents)?;
            *slot(&mut self.scales, index) = scale;
            return set_scale(layer, scale, learners);
        }
        if self.longest > 0 {
            let longest = std::mem::take(&mut self.longest);
            self.selected.iter_mut().for_each(|selected| shrink(selected, longest));
        }
        let results = slot(&mut self.results, index);
        results.clear();
        for (owner, bytes) in contents.iter_mut().enumerate() {
            let share = context.share(layer, owner);
            let take = |offset, sum| results.push(((share.start + offset) as u32, sum));
            decode_sums(bytes, layer, share.len(), context.learners as u32, take)
                .map_err(Fault::of(owner))?;
        }
        shrink(results, results.len());
        Ok(())
    }

    fn write(&mut self, context: &Context<'_>, index: usize, output: &mut [f32]) {
        let (scale, learners) = (self.scales[index], context.learners as f32);
        let mut rest = self.results[index].as_slice();
        write_blocks(output, 1.0, |start, average| {
            while let [(element, sum), after @ ..] = rest
                && let Some(value) = average.get_mut(*element as usize - start)
            {
                *value = *sum as f32 * scale / learners;
                rest = after;
            }
        });
    }
}

/// Frees memory that only the first steps needed, whose selections are several times longer.
fn shrink<T>(entries: &mut Vec<T>, longest: usize) {
    if entries.capacity() > 2 * longest + 2048 {
        entries.shrink_to(longest + longest / 4);
    }
}

/// Makes learners send and keep a layer with the scale that all agreed on.
fn set_scale(layer: usize, scale: f32, learners: &mut [Learner]) -> Result<(), Fault> {
    for learner in learners {
        // Every compressed layer has a selection here, and the mean of good scales is one.
        let set = learner.compressor.set_scale(layer, scale).map_err(|_| DecodeError::Value { layer });
        set.map_err(Fault::of(learner.number))?;
    }
    Ok(())
}

/// Reads all learners' scales from the front of their contents. Returns the mean, summed in f64 in learner order.
fn mean_scale(layer: usize, contents: &mut [&[u8]]) -> Result<f32, Fault> {
    let mut sum = 0.0;
    for (sender, bytes) in contents.iter_mut().enumerate() {
        sum += f64::from(read_scale(bytes, layer).map_err(Fault::of(sender))?);
    }
    Ok((sum / contents.len() as f64) as f32)
}
