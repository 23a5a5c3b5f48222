//! One scale a layer for all learners, and exact sums of signs at the owners.

use crate::member::Member;
use crate::setting::Setting;
use crate::strategy::{Addressing, Fault, Rounds, send_layers, take_layers};
use crate::sums::{add_signs, decode_sums, encode_sums};
use crate::values::{read_scale, slot, write_values};
use crate::whole::Whole;
use adacomp::codec::{decode_range, encode_range};
use adacomp::{DecodeError, Packet, Selected, write_blocks};

#[derive(Default)]
pub(crate) struct Reduce {
    whole: Whole,
    /// By position of the layer in the group.
    scales: Vec<f32>,
    /// By position of the hosted learner, then of the layer: the owner's sums that are not 0, and where in its share they are.
    sums: Vec<Vec<Vec<(u32, i32)>>>,
    /// By position of the layer: elements with a sum, and the sum.
    results: Vec<Vec<(u32, i32)>>,
    /// By sender, for the layer at hand.
    selected: Vec<Vec<Selected>>,
}

const SCALES: usize = 0;
const SIGNS: usize = 1;

impl Rounds for Reduce {
    fn addressing(&self) -> &'static [Addressing] {
        &[Addressing::ToAll, Addressing::ToEach, Addressing::ToAll]
    }

    fn send(&mut self, setting: &Setting<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let copies = self.addressing()[setting.round].copies(member.learner, receiver, setting.learners);
        send_layers(setting, member, copies, message, |member, index, layer, message| {
            let share = setting.share(layer, receiver);
            match (member.compressor.packet(layer), setting.round) {
                (Some(Packet::Sparse(sparse)), SCALES) => write_values(&sparse.values[..1], message),
                (Some(Packet::Sparse(sparse)), SIGNS) => {
                    encode_range(sparse.within(share.clone()).selected, share, message);
                }
                (Some(Packet::Sparse(_)), _) => {
                    let own = setting.share(layer, member.learner);
                    encode_sums(own.len(), &self.sums[member.position][index], message);
                }
                (_, SCALES) => {}
                (_, SIGNS) => self.whole.send_share(member, layer, share, message),
                (_, _) => self.whole.send_average((member.position, index), message),
            }
        });
    }

    fn take_each(
        &mut self,
        setting: &Setting<'_>,
        member: &mut Member,
        contents: &[&[u8]],
    ) -> Result<(), Fault> {
        let (learner, position) = (member.learner, member.position);
        let mut longest = 0;
        take_layers(setting, std::slice::from_mut(member), contents, |_, index, layer, contents| {
            let share = setting.share(layer, learner);
            if setting.is_whole(layer) {
                return self.whole.take_shares((position, index), share, contents);
            }
            for (sender, bytes) in contents.iter_mut().enumerate() {
                let selected = slot(&mut self.selected, sender);
                selected.clear();
                decode_range(bytes, share.clone(), layer, selected).map_err(Fault::of(sender))?;
                longest = selected.len().max(longest);
            }
            let sums = slot(slot(&mut self.sums, position), index);
            add_signs(&self.selected, share, sums);
            give_back(sums, sums.len());
            Ok(())
        })?;
        self.selected.iter_mut().for_each(|selected| give_back(selected, longest));
        Ok(())
    }

    fn take_all(
        &mut self,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        take_layers(setting, members, contents, |members, index, layer, contents| {
            match (setting.is_whole(layer), setting.round) {
                (true, SCALES) => Ok(()),
                (true, _) => self.whole.take_averages(setting, index, contents),
                (false, SCALES) => {
                    let scale = mean_scale(layer, contents)?;
                    *slot(&mut self.scales, index) = scale;
                    agree_on(scale, layer, members)
                }
                (false, _) => {
                    let results = slot(&mut self.results, index);
                    take_sums(setting, layer, contents, results)?;
                    give_back(results, results.len());
                    Ok(())
                }
            }
        })?;
        Ok(None)
    }

    fn write(&mut self, setting: &Setting<'_>, output: &mut [&mut [f32]]) {
        for (index, &layer) in setting.layers.iter().enumerate() {
            if setting.is_whole(layer) {
                self.whole.write(index, output[index]);
                continue;
            }
            let mut rest = self.results[index].as_slice();
            write_blocks(output[index], 1.0, |start, average| {
                while let [(element, sum), after @ ..] = rest
                    && let Some(value) = average.get_mut(*element as usize - start)
                {
                    *value = *sum as f32 * self.scales[index] / setting.learners as f32;
                    rest = after;
                }
            });
        }
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
fn take_sums(
    setting: &Setting<'_>,
    layer: usize,
    contents: &mut [&[u8]],
    result: &mut Vec<(u32, i32)>,
) -> Result<(), Fault> {
    result.clear();
    for (owner, bytes) in contents.iter_mut().enumerate() {
        let share = setting.share(layer, owner);
        let take = |offset, sum| result.push(((share.start + offset) as u32, sum));
        decode_sums(bytes, layer, share.len(), setting.learners as u32, take).map_err(Fault::of(owner))?;
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
