//! One scale a layer for all learners, and exact sums of signs at the owners.

use crate::layers::{LayerRounds, Place};
use crate::member::Member;
use crate::strategy::{Addressing, Fault};
use crate::sums::{add_signs, decode_sums, encode_sums};
use crate::values::{read_scale, slot, write_values};
use adacomp::internal::{decode_range, encode_range, write_blocks};
use adacomp::{DecodeError, Packet, Selected};

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
    /// The longest of these in a round.
    longest: usize,
}

const SCALES: usize = 0;
const SIGNS: usize = 1;

impl LayerRounds for Reduce {
    const ADDRESSING: &'static [Addressing] =
        &[Addressing::AllGather, Addressing::AllToAll, Addressing::AllGather];

    fn send(&mut self, place: Place<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let Some(Packet::Sparse(sparse)) = member.compressor.packet(place.layer) else { return };
        match place.setting.round {
            SCALES => write_values(&sparse.values[..1], message),
            SIGNS => {
                let share = place.share(receiver);
                encode_range(sparse.within(share.clone()).selected, share, message);
            }
            _ => {
                let own = place.share(member.learner);
                encode_sums(own.len(), &self.sums[member.position][place.index], message);
            }
        }
    }

    fn take_each(
        &mut self,
        place: Place<'_>,
        member: &mut Member,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let share = place.share(member.learner);
        for (sender, bytes) in contents.iter_mut().enumerate() {
            let selected = slot(&mut self.selected, sender);
            selected.clear();
            decode_range(bytes, share.clone(), place.layer, selected).map_err(Fault::of(sender))?;
            self.longest = selected.len().max(self.longest);
        }
        let sums = slot(slot(&mut self.sums, member.position), place.index);
        add_signs(&self.selected, share, sums);
        give_back(sums, sums.len());
        Ok(())
    }

    fn end_taking(&mut self) {
        let longest = std::mem::take(&mut self.longest);
        self.selected.iter_mut().for_each(|selected| give_back(selected, longest));
    }

    fn take_all(
        &mut self,
        place: Place<'_>,
        members: &mut [Member],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        if place.setting.round == SCALES {
            let scale = mean_scale(place.layer, contents)?;
            *slot(&mut self.scales, place.index) = scale;
            return agree_on(scale, place.layer, members);
        }
        let results = slot(&mut self.results, place.index);
        take_sums(place, contents, results)?;
        give_back(results, results.len());
        Ok(())
    }

    fn write(&mut self, place: Place<'_>, output: &mut [f32]) {
        let (scale, learners) = (self.scales[place.index], place.setting.learners as f32);
        let mut rest = self.results[place.index].as_slice();
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

/// Gives memory back that only the first steps needed, whose selections are several times longer.
fn give_back<T>(entries: &mut Vec<T>, longest: usize) {
    if entries.capacity() > 2 * longest + 2048 {
        entries.shrink_to(longest + longest / 4);
    }
}

/// Has learners send and keep a layer with this scale.
fn agree_on(scale: f32, layer: usize, members: &mut [Member]) -> Result<(), Fault> {
    for member in members {
        // Every layer of bins has a selection here, and the mean of good scales is one.
        let refused = |_| DecodeError::Value { layer };
        let set = member.compressor.set_scale(layer, scale).map_err(refused);
        set.map_err(Fault::of(member.learner))?;
    }
    Ok(())
}

/// A layer's sums from the front of all owners' contents, which move past them.
fn take_sums(place: Place<'_>, contents: &mut [&[u8]], result: &mut Vec<(u32, i32)>) -> Result<(), Fault> {
    result.clear();
    for (owner, bytes) in contents.iter_mut().enumerate() {
        let share = place.share(owner);
        let take = |offset, sum| result.push(((share.start + offset) as u32, sum));
        decode_sums(bytes, place.layer, share.len(), place.setting.learners as u32, take)
            .map_err(Fault::of(owner))?;
    }
    Ok(())
}

/// The mean of all learners' scales, summed in f64 in their order, from the front of their contents, which move past it.
fn mean_scale(layer: usize, contents: &mut [&[u8]]) -> Result<f32, Fault> {
    let mut sum = 0.0;
    for (sender, bytes) in contents.iter_mut().enumerate() {
        sum += f64::from(read_scale(bytes, layer).map_err(Fault::of(sender))?);
    }
    Ok((sum / contents.len() as f64) as f32)
}
