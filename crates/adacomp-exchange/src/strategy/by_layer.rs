//! Exchanges a group layer by layer.
//!
//! Dense layers go the same way in all strategies but `gather`: in the last two rounds, a share to each owner, which averages it
//! in f32 and in learner order, and the averages to all. A strategy says what happens to the compressed layers.

use super::{Collective, Fault, Rounds, slot};
use crate::message::{Context, read_values, write_values};
use crate::protocol::Learner;
use adacomp::{DecodeError, Packet};

/// What a strategy does with the compressed layers of a group. `index` is the position of a layer in the group, and `contents`
/// move past what is read of them.
pub(crate) trait CompressedLayers: Default + Send + Sync {
    /// Appends what a learner sends to a receiver. In an all-gather the receiver is the learner itself.
    fn send(
        &mut self,
        _context: &Context<'_>,
        _index: usize,
        _learner: &mut Learner,
        _receiver: usize,
        _message: &mut Vec<u8>,
    ) {
    }

    /// Takes what all learners sent to one that is hosted here.
    fn receive(
        &mut self,
        _context: &Context<'_>,
        _index: usize,
        _learner: &mut Learner,
        _contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        Ok(())
    }

    /// Takes what all learners sent to all.
    fn receive_all(
        &mut self,
        _context: &Context<'_>,
        _index: usize,
        _learners: &mut [Learner],
        _contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        Ok(())
    }

    /// Writes the averaged gradient.
    fn write(&mut self, _context: &Context<'_>, _index: usize, _output: &mut [f32]) {}

    /// Changes what an owner has averaged of a dense layer before it is sent.
    fn change_dense(
        &mut self,
        _context: &Context<'_>,
        _index: usize,
        _learner: &mut Learner,
        _average: &mut [f32],
    ) -> Result<(), Fault> {
        Ok(())
    }
}

/// The strategy `dense` has no compressed layers.
impl CompressedLayers for () {}

/// All layers of a group.
#[derive(Default)]
pub(crate) struct ByLayer<S> {
    compressed: S,
    /// What owners that are hosted here have averaged of dense layers, by position of the owner, then of the layer.
    averages: Vec<Vec<Vec<f32>>>,
    /// Averaged dense layers, by position of the layer.
    results: Vec<Vec<f32>>,
}

impl<S: CompressedLayers> Rounds for ByLayer<S> {
    fn send(&mut self, context: &Context<'_>, learner: &mut Learner, receiver: usize, message: &mut Vec<u8>) {
        let copies = context.collective().copies(learner.number, receiver, context.learners);
        for (index, &layer) in context.layers.iter().enumerate() {
            let start = message.len();
            if !context.is_dense(layer) {
                self.compressed.send(context, index, learner, receiver, message);
            } else if context.is_last_round() {
                write_values(&self.averages[learner.position][index], message);
            } else if context.collective() == Collective::AllToAll
                && let Some(Packet::Dense(values)) = learner.compressor.packet(layer)
            {
                write_values(&values[context.share(layer, receiver)], message);
            }
            learner.traffic.layers[layer].sent += (copies * (message.len() - start)) as u64;
        }
    }

    fn receive(
        &mut self,
        context: &Context<'_>,
        learner: &mut Learner,
        contents: &[&[u8]],
    ) -> Result<(), Fault> {
        by_layer(context, std::slice::from_mut(learner), contents, |index, learners, contents| {
            let (learner, layer) = (&mut learners[0], context.layers[index]);
            if !context.is_dense(layer) {
                return self.compressed.receive(context, index, learner, contents);
            }
            let average = slot(slot(&mut self.averages, learner.position), index);
            average_dense(context.share(layer, learner.number).len(), contents, average)?;
            self.compressed.change_dense(context, index, learner, average)
        })
    }

    fn receive_all(
        &mut self,
        context: &Context<'_>,
        learners: &mut [Learner],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        by_layer(context, learners, contents, |index, learners, contents| {
            let layer = context.layers[index];
            if !context.is_dense(layer) {
                return self.compressed.receive_all(context, index, learners, contents);
            }
            if context.is_last_round() {
                let result = slot(&mut self.results, index);
                result.clear();
                for (owner, bytes) in contents.iter_mut().enumerate() {
                    let values = read_values(bytes, context.share(layer, owner).len());
                    result.extend(values.map_err(Fault::of(owner))?);
                }
            }
            Ok(())
        })?;
        Ok(None)
    }

    fn write(&mut self, context: &Context<'_>, output: &mut [&mut [f32]]) {
        for (index, (&layer, output)) in context.layers.iter().zip(output).enumerate() {
            match context.is_dense(layer) {
                true => output.copy_from_slice(&self.results[index]),
                false => self.compressed.write(context, index, output),
            }
        }
    }
}

/// Averages an owner's share of a dense layer, in learner order, from the front of all learners' contents.
fn average_dense(elements: usize, contents: &mut [&[u8]], average: &mut Vec<f32>) -> Result<(), Fault> {
    average.clear();
    average.resize(elements, 0.0);
    for (sender, bytes) in contents.iter_mut().enumerate() {
        let values = read_values(bytes, elements).map_err(Fault::of(sender))?;
        average.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    let factor = 1.0 / contents.len() as f32;
    average.iter_mut().for_each(|sum| *sum *= factor);
    Ok(())
}

/// Takes all learners' contents layer by layer, and counts them for the learners that they came to. Nothing must be left.
fn by_layer(
    context: &Context<'_>,
    learners: &mut [Learner],
    contents: &[&[u8]],
    mut take: impl FnMut(usize, &mut [Learner], &mut [&[u8]]) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut contents = contents.to_vec();
    for (index, &layer) in context.layers.iter().enumerate() {
        let before = contents.clone();
        take(index, learners, &mut contents)?;
        for learner in &mut *learners {
            let lengths =
                before.iter().zip(&contents).enumerate().filter(|(sender, _)| *sender != learner.number);
            let bytes: usize = lengths.map(|(_, (before, after))| before.len() - after.len()).sum();
            learner.traffic.layers[layer].received += bytes as u64;
        }
    }
    match contents.iter().enumerate().find(|(_, rest)| !rest.is_empty()) {
        Some((sender, rest)) => {
            Err(Fault::of(sender)(DecodeError::Trailing { part: "the last layer", count: rest.len() }))
        }
        None => Ok(()),
    }
}
