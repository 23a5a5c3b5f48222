//! Learners agree on one scale for each layer, and owners add up signs as integers.

use super::by_layer::{LayerRound, LayerRounds};
use super::{Fault, slot};
use crate::message::{read_scales, write_values};
use crate::protocol::Learner;
use crate::sums::{add_signs, decode_sums, encode_sums};
use adacomp::internal::{Output, decode_range, encode_range, write_blocks};
use adacomp::{DecodeError, Packet};

const SCALES: usize = 0;
const SIGNS: usize = 1;

#[derive(Default)]
pub(crate) struct Reduce {
    scale: f32,
    /// By position of the hosted learner: the owner's sums that are not 0, and where in its shard they are.
    sums: Vec<Vec<(u32, i32)>>,
    /// Elements with a sum, and the sum.
    results: Vec<(u32, i32)>,
}

impl LayerRounds for Reduce {
    fn send(&mut self, at: LayerRound<'_>, learner: &Learner, receiver: usize, message: &mut Vec<u8>) {
        let Some(Packet::Sparse(sparse)) = learner.compressor.packet(at.layer) else { return };
        let shard = at.shard(receiver);
        match at.context.round {
            SCALES => write_values(&sparse.values[..1], message),
            SIGNS => encode_range(sparse.within(shard.clone()).selected, shard, message),
            _ => encode_sums(shard.len(), &self.sums[learner.position], message),
        }
    }

    fn receive(
        &mut self,
        at: LayerRound<'_>,
        learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        match at.context.round {
            SCALES => self.receive_scales(at, learners, contents),
            SIGNS => self.receive_signs(at, &learners[0], contents),
            _ => self.receive_sums(at, contents),
        }
    }

    fn write(&mut self, at: LayerRound<'_>, output: &mut Output<'_>) {
        let (scale, learners) = (self.scale, at.context.learners as f32);
        let mut rest = self.results.as_slice();
        write_blocks(output, 1.0, |start, average| {
            while let [(element, sum), after @ ..] = rest
                && let Some(value) = average.get_mut(*element as usize - start)
            {
                *value = *sum as f32 * scale / learners;
                // The average is at most the scale, and fits even if the sum does not.
                if value.is_infinite() {
                    *value = (f64::from(*sum) * f64::from(scale) / f64::from(learners)) as f32;
                }
                rest = after;
            }
        });
    }
}

impl Reduce {
    /// Makes learners send and keep the layer with the mean of all scales, as far as they count, summed in f64 in learner order.
    fn receive_scales(
        &mut self,
        LayerRound { context, layer }: LayerRound<'_>,
        learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let (scales, most) = read_scales(contents, layer, context.options.clip)?;
        let sum: f64 = scales.into_iter().map(|scale| f64::from(scale.min(most))).sum();
        self.scale = (sum / contents.len() as f64) as f32;
        for learner in learners {
            // Every compressed layer has a selection here, and the mean of good scales is one.
            let set = learner.compressor.set_scale(layer, self.scale);
            set.map_err(|_| Fault::of(learner.number)(DecodeError::Value { layer }))?;
        }
        Ok(())
    }

    fn receive_signs(
        &mut self,
        at: LayerRound<'_>,
        learner: &Learner,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let shard = at.shard(learner.number);
        let mut senders = vec![Vec::new(); contents.len()];
        for (sender, (bytes, selected)) in contents.iter_mut().zip(&mut senders).enumerate() {
            decode_range(bytes, shard.clone(), at.layer, selected).map_err(Fault::of(sender))?;
        }
        let sums = slot(&mut self.sums, learner.position);
        add_signs(&senders, shard, sums);
        shrink(sums);
        Ok(())
    }

    fn receive_sums(&mut self, at: LayerRound<'_>, contents: &mut [&[u8]]) -> Result<(), Fault> {
        self.results.clear();
        for (owner, bytes) in contents.iter_mut().enumerate() {
            let shard = at.shard(owner);
            let take = |offset, sum| self.results.push(((shard.start + offset) as u32, sum));
            decode_sums(bytes, at.layer, shard.len(), at.context.learners as u32, take)
                .map_err(Fault::of(owner))?;
        }
        shrink(&mut self.results);
        Ok(())
    }
}

/// Frees memory that only the first steps needed, whose selections are several times longer.
fn shrink<T>(entries: &mut Vec<T>) {
    if entries.capacity() > 2 * entries.len() + 2048 {
        entries.shrink_to(entries.len() + entries.len() / 4);
    }
}
