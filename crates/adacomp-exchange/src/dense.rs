//! Layers that are sent whole: owners sum their shares in f32, in learner order, and send the averages to all.

use crate::member::Member;
use crate::setting::Setting;
use crate::strategy::{Addressing, Fault, Rounds, send_layers, take_layers};
use adacomp::{DecodeError, Packet};
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
    ) -> Result<(), Fault> {
        let average = slot(slot(&mut self.averages, position.0), position.1);
        average.clear();
        average.resize(share.len(), 0.0);
        let learners = contents.len();
        for (sender, bytes) in contents.iter_mut().enumerate() {
            let values =
                read_values(bytes, share.len()).map_err(|cause| Fault { sender, cause: cause.into() })?;
            average.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        let factor = 1.0 / learners as f32;
        average.iter_mut().for_each(|sum| *sum *= factor);
        Ok(())
    }

    /// What an owner has averaged.
    pub(crate) fn average(&mut self, position: (usize, usize)) -> &mut [f32] {
        &mut self.averages[position.0][position.1]
    }

    /// Appends what an owner has averaged.
    pub(crate) fn send_average(&self, position: (usize, usize), message: &mut Vec<u8>) {
        write_values(&self.averages[position.0][position.1], message);
    }

    /// Puts a layer together from the front of all owners' contents, which move past it.
    pub(crate) fn take_averages(
        &mut self,
        setting: &Setting<'_>,
        index: usize,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let result = slot(&mut self.results, index);
        result.clear();
        for (owner, bytes) in contents.iter_mut().enumerate() {
            let share = setting.share(setting.layers[index], owner);
            let values = read_values(bytes, share.len())
                .map_err(|cause| Fault { sender: owner, cause: cause.into() })?;
            result.extend(values);
        }
        Ok(())
    }

    pub(crate) fn write(&self, index: usize, output: &mut [f32]) {
        output.copy_from_slice(&self.results[index]);
    }
}

/// The entry at this index, made if it is not there.
pub(crate) fn slot<T: Default>(entries: &mut Vec<T>, index: usize) -> &mut T {
    if entries.len() <= index {
        entries.resize_with(index + 1, T::default);
    }
    &mut entries[index]
}

pub(crate) fn write_values(values: &[f32], message: &mut Vec<u8>) {
    message.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// So many values from the front of `bytes`, which move past them.
pub(crate) fn read_values<'a>(
    bytes: &mut &'a [u8],
    count: usize,
) -> Result<impl Iterator<Item = f32> + use<'a>, DecodeError> {
    let (front, rest) =
        bytes.split_at_checked(4 * count).ok_or(DecodeError::Truncated { part: "dense values" })?;
    *bytes = rest;
    Ok(front.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)))
}

/// The strategy that sends every layer whole.
#[derive(Default)]
pub(crate) struct Dense {
    whole: Whole,
}

impl Rounds for Dense {
    fn addressing(&self) -> &'static [Addressing] {
        &[Addressing::ToEach, Addressing::ToAll]
    }

    fn send(
        &mut self,
        round: usize,
        setting: &Setting<'_>,
        member: &mut Member,
        receiver: usize,
        message: &mut Vec<u8>,
    ) {
        let copies = self.addressing()[round].copies(member.learner, receiver, setting.learners);
        send_layers(setting, member, copies, message, |member, index, layer, message| match round {
            0 => self.whole.send_share(member, layer, setting.share(layer, receiver), message),
            _ => self.whole.send_average((member.position, index), message),
        });
    }

    fn take_each(
        &mut self,
        _round: usize,
        setting: &Setting<'_>,
        member: &mut Member,
        contents: &[&[u8]],
    ) -> Result<(), Fault> {
        let (learner, position) = (member.learner, member.position);
        take_layers(setting, std::slice::from_mut(member), contents, |_, index, layer, contents| {
            self.whole.take_shares((position, index), setting.share(layer, learner), contents)
        })
    }

    fn take_all(
        &mut self,
        _round: usize,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        take_layers(setting, members, contents, |_, index, _, contents| {
            self.whole.take_averages(setting, index, contents)
        })?;
        Ok(None)
    }

    fn write(&mut self, _setting: &Setting<'_>, output: &mut [&mut [f32]]) {
        for (index, slice) in output.iter_mut().enumerate() {
            self.whole.write(index, slice);
        }
    }
}
