//! Exchanges a group layer by layer.
//!
//! Dense layers go the same way in all strategies but `gather`: in the last two rounds, a shard to each owner, which averages it
//! in f32 and in learner order, and the averages to all. A strategy says what happens to the compressed layers.

use super::{Collective, Fault, Rounds, slot};
use crate::message::{Context, read_scales, read_values, write_values};
use crate::protocol::Learner;
use adacomp::internal::{Output, largest, write_blocks};
use adacomp::{DecodeError, Packet};
use std::ops::Range;

/// A layer in a round.
#[derive(Clone, Copy)]
pub(crate) struct LayerRound<'a> {
    pub(crate) context: &'a Context<'a>,
    pub(crate) layer: usize,
}

impl LayerRound<'_> {
    /// Returns the elements that a learner owns.
    pub(crate) fn shard(&self, owner: usize) -> Range<usize> {
        super::shard(self.context.layout, self.layer, owner, self.context.learners)
    }

    /// Returns whether the layer is sent dense in this step.
    fn is_dense(&self) -> bool {
        self.context.flush || !self.context.layout[self.layer].treatment.selects()
    }
}

/// A strategy's rounds, for one layer.
pub(crate) trait LayerRounds: Default + Send + Sync {
    /// Appends what a learner sends to a receiver. In an all-gather the receiver is the learner itself.
    fn send(&mut self, at: LayerRound<'_>, learner: &Learner, receiver: usize, message: &mut Vec<u8>);

    /// Takes what all learners sent: in an all-gather for all learners that are hosted here, in an all-to-all for one of them.
    /// `contents` move past what is read of them.
    fn receive(
        &mut self,
        at: LayerRound<'_>,
        learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault>;

    /// Writes the averaged gradient.
    fn write(&mut self, at: LayerRound<'_>, output: &mut Output<'_>);

    /// Changes what an owner has averaged where the layer is sent dense, before it is sent.
    fn change_dense(&mut self, _: LayerRound<'_>, _: &mut Learner, _: &mut [f32]) -> Result<(), Fault> {
        Ok(())
    }
}

/// A layer that is sent dense.
#[derive(Default)]
pub(crate) struct Dense {
    /// What owners that are hosted here have averaged, by their position.
    averages: Vec<Vec<f32>>,
    /// The largest magnitude that learners that are hosted here send of the layer, by their position; with a clip only.
    largest: Vec<f32>,
    result: Vec<f32>,
}

impl LayerRounds for Dense {
    fn send(&mut self, at: LayerRound<'_>, learner: &Learner, receiver: usize, message: &mut Vec<u8>) {
        if at.context.is_last_round() {
            write_values(&self.averages[learner.position], message);
        } else if at.context.collective() == Collective::AllToAll
            && let Some(Packet::Dense(values)) = learner.compressor.packet(at.layer)
        {
            if at.context.options.clip.is_some() {
                let largest_sent = slot(&mut self.largest, learner.position);
                // Once for all receivers.
                if receiver == 0 {
                    *largest_sent = largest(values.iter().copied());
                }
                write_values(&[*largest_sent], message);
            }
            write_values(&values[at.shard(receiver)], message);
        }
    }

    fn receive(
        &mut self,
        at: LayerRound<'_>,
        learners: &mut [Learner],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        if at.context.collective() == Collective::AllToAll {
            let elements = at.shard(learners[0].number).len();
            let average = slot(&mut self.averages, learners[0].position);
            average.clear();
            average.resize(elements, 0.0);
            let most = match at.context.options.clip {
                None => f32::INFINITY,
                clip => read_scales(contents, at.layer, clip)?.1,
            };
            learners[0].compressor.clamp_sent(at.layer, most);
            for (sender, bytes) in contents.iter_mut().enumerate() {
                let add = |start: usize, values: &[f32]| {
                    let sums = average[start..].iter_mut().zip(values);
                    sums.for_each(|(sum, value)| *sum += value.clamp(-most, most));
                };
                read_values(bytes, at.layer, elements, add).map_err(Fault::of(sender))?;
            }
            let factor = 1.0 / contents.len() as f32;
            average.iter_mut().for_each(|sum| *sum *= factor);
            learners[0].overflow |= !largest(average.iter().copied()).is_finite();
        } else if at.context.is_last_round() {
            self.result.clear();
            for (owner, bytes) in contents.iter_mut().enumerate() {
                let keep = |_, values: &[f32]| self.result.extend_from_slice(values);
                read_values(bytes, at.layer, at.shard(owner).len(), keep).map_err(Fault::of(owner))?;
            }
        }
        Ok(())
    }

    fn write(&mut self, _: LayerRound<'_>, output: &mut Output<'_>) {
        write_blocks(output, 1.0, |start, block| {
            block.copy_from_slice(&self.result[start..start + block.len()]);
        });
    }
}

/// All layers of a group, by their position in it, as they are sent dense and compressed.
#[derive(Default)]
pub(crate) struct ByLayer<S>(Vec<(Dense, S)>);

impl<S: LayerRounds> Rounds for ByLayer<S> {
    fn send(&mut self, context: &Context<'_>, learner: &mut Learner, receiver: usize, message: &mut Vec<u8>) {
        let copies = context.collective().copies(learner.number, receiver, context.learners);
        for (index, &layer) in context.layers.iter().enumerate() {
            let (start, at) = (message.len(), LayerRound { context, layer });
            let (dense, compressed) = slot(&mut self.0, index);
            match at.is_dense() {
                true => dense.send(at, learner, receiver, message),
                false => compressed.send(at, learner, receiver, message),
            }
            learner.traffic.layers[layer].sent += (copies * (message.len() - start)) as u64;
        }
    }

    fn receive(
        &mut self,
        context: &Context<'_>,
        learners: &mut [Learner],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        let mut contents = contents.to_vec();
        for (index, &layer) in context.layers.iter().enumerate() {
            let (before, at) = (contents.clone(), LayerRound { context, layer });
            let (dense, compressed) = slot(&mut self.0, index);
            if at.is_dense() {
                dense.receive(at, learners, &mut contents)?;
                if let (Collective::AllToAll, [learner]) = (context.collective(), &mut *learners) {
                    compressed.change_dense(at, learner, &mut dense.averages[learner.position])?;
                }
            } else {
                compressed.receive(at, learners, &mut contents)?;
            }
            for learner in &mut *learners {
                let read = before.iter().zip(&contents).map(|(before, after)| before.len() - after.len());
                let others = read.enumerate().filter(|(sender, _)| *sender != learner.number);
                learner.traffic.layers[layer].received += others.map(|(_, bytes)| bytes as u64).sum::<u64>();
            }
        }
        match contents.iter().enumerate().find(|(_, rest)| !rest.is_empty()) {
            Some((sender, rest)) => {
                Err(Fault::of(sender)(DecodeError::Trailing { part: "the last layer", count: rest.len() }))
            }
            None => Ok(None),
        }
    }

    fn write(&mut self, context: &Context<'_>, output: &mut [Output<'_>]) {
        for ((&layer, output), (dense, compressed)) in context.layers.iter().zip(output).zip(&mut self.0) {
            let at = LayerRound { context, layer };
            match at.is_dense() {
                true => dense.write(at, output),
                false => compressed.write(at, output),
            }
        }
    }
}
