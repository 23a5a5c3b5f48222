//! Layers that are sent whole: owners sum their shares in f32, in learner order, and send the averages to all.

use crate::layers::Place;
use crate::member::Member;
use crate::strategy::Fault;
use crate::values::{read_values, slot, write_values};
use adacomp::Packet;
use std::ops::Range;

/// The layers of a group that are sent whole. By position of the hosted learner, then of the layer in the group.
#[derive(Default)]
pub(crate) struct Whole {
    averages: Vec<Vec<Vec<f32>>>,
    results: Vec<Vec<f32>>,
}

impl Whole {
    /// Appends a receiver's share of a learner's gradient.
    pub(crate) fn send_share(
        &self,
        member: &Member,
        layer: usize,
        share: Range<usize>,
        message: &mut Vec<u8>,
    ) {
        if let Some(Packet::Dense(values)) = member.compressor.packet(layer) {
            write_values(&values[share], message);
        }
    }

    /// Averages an owner's share over the front of all learners' contents, which move past it.
    pub(crate) fn take_shares(
        &mut self,
        position: (usize, usize),
        share: Range<usize>,
        contents: &mut [&[u8]],
    ) -> Result<&mut [f32], Fault> {
        let average = slot(slot(&mut self.averages, position.0), position.1);
        average.clear();
        average.resize(share.len(), 0.0);
        let learners = contents.len();
        for (sender, bytes) in contents.iter_mut().enumerate() {
            let values = read_values(bytes, share.len()).map_err(Fault::of(sender))?;
            average.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        let factor = 1.0 / learners as f32;
        average.iter_mut().for_each(|sum| *sum *= factor);
        Ok(average)
    }

    /// Appends what an owner has averaged.
    pub(crate) fn send_average(&self, position: (usize, usize), message: &mut Vec<u8>) {
        write_values(&self.averages[position.0][position.1], message);
    }

    /// Puts a layer together from the front of all owners' contents, which move past it.
    pub(crate) fn take_averages(&mut self, place: Place<'_>, contents: &mut [&[u8]]) -> Result<(), Fault> {
        let result = slot(&mut self.results, place.index);
        result.clear();
        for (owner, bytes) in contents.iter_mut().enumerate() {
            result.extend(read_values(bytes, place.share(owner).len()).map_err(Fault::of(owner))?);
        }
        Ok(())
    }

    pub(crate) fn write(&self, index: usize, output: &mut [f32]) {
        output.copy_from_slice(&self.results[index]);
    }
}
