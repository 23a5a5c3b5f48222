//! One scale a layer for all learners, and exact sums of signs at the owners.

use crate::dense::{Whole, check_used_up, read_values, slot, write_values};
use crate::protocol::{Member, Setting};
use crate::strategy::{Addressing, Fault, Rounds};
use crate::sums::{decode_sums, encode_sums};
use adacomp::codec::{decode_range, encode_range};
use adacomp::{DecodeError, Packet, Selected};

#[derive(Default)]
pub(crate) struct Reduce {
    whole: Whole,
    /// By position of the layer in the group.
    scales: Vec<f32>,
    /// By position of the hosted learner, then of the layer: the owner's sums.
    sums: Vec<Vec<Vec<i32>>>,
    /// By position of the layer: elements with a sum, and the sum.
    results: Vec<Vec<(u32, i32)>>,
    selected: Vec<Selected>,
}

const SCALES: usize = 0;
const SIGNS: usize = 1;

impl Rounds for Reduce {
    fn addressing(&self) -> &'static [Addressing] {
        &[Addressing::ToAll, Addressing::ToEach, Addressing::ToAll]
    }

    fn send(
        &mut self,
        round: usize,
        setting: &Setting<'_>,
        member: &mut Member,
        receiver: usize,
        message: &mut Vec<u8>,
    ) {
        for (index, &layer) in setting.layers.iter().enumerate() {
            let start = message.len();
            let share = setting.share(layer, receiver);
            match (member.compressor.packet(layer), round) {
                (Some(Packet::Sparse(sparse)), SCALES) => write_values(&sparse.values[..1], message),
                (Some(Packet::Sparse(sparse)), SIGNS) => {
                    encode_range(sparse.within(share.clone()).selected, share, message);
                }
                (Some(Packet::Sparse(_)), _) => encode_sums(&self.sums[member.position][index], message),
                (_, SCALES) => {}
                (_, SIGNS) => self.whole.send_share(member, layer, share, message),
                (_, _) => self.whole.send_average((member.position, index), message),
            }
            let copies = if round == SIGNS { 1 } else { setting.learners - 1 };
            member.count_sent(layer, receiver, copies, message.len() - start);
        }
    }

    fn take_each(
        &mut self,
        _round: usize,
        setting: &Setting<'_>,
        member: &mut Member,
        contents: &[&[u8]],
    ) -> Result<(), Fault> {
        let mut contents = contents.to_vec();
        for (index, &layer) in setting.layers.iter().enumerate() {
            let before = contents.clone();
            let share = setting.share(layer, member.learner);
            if setting.is_whole(layer) {
                self.whole.take_shares((member.position, index), share, &mut contents)?;
            } else {
                let sums = slot(slot(&mut self.sums, member.position), index);
                sums.clear();
                sums.resize(share.len(), 0);
                for (sender, bytes) in contents.iter_mut().enumerate() {
                    self.selected.clear();
                    decode_range(bytes, share.clone(), layer, &mut self.selected)
                        .map_err(|cause| Fault { sender, cause: cause.into() })?;
                    for element in &self.selected {
                        sums[element.index() - share.start] += if element.is_negative() { -1 } else { 1 };
                    }
                }
            }
            member.count_received_layer(layer, &before, &contents);
        }
        check_used_up(&contents)
    }

    fn take_all(
        &mut self,
        round: usize,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        let mut contents = contents.to_vec();
        for (index, &layer) in setting.layers.iter().enumerate() {
            let before = contents.clone();
            match (setting.is_whole(layer), round) {
                (true, SCALES) => {}
                (true, _) => self.whole.take_averages(setting, index, &mut contents)?,
                (false, SCALES) => {
                    let scale = mean_scale(layer, &mut contents)?;
                    *slot(&mut self.scales, index) = scale;
                    for member in members.iter_mut() {
                        // Every layer of bins has a selection here, and the mean of good scales is one.
                        member.compressor.set_scale(layer, scale).map_err(|_| Fault {
                            sender: member.learner,
                            cause: DecodeError::Value { layer }.into(),
                        })?;
                    }
                }
                (false, _) => {
                    let result = slot(&mut self.results, index);
                    result.clear();
                    for (owner, bytes) in contents.iter_mut().enumerate() {
                        let share = setting.share(layer, owner);
                        let take = |offset, sum| result.push(((share.start + offset) as u32, sum));
                        decode_sums(bytes, layer, share.len(), setting.learners as u32, take)
                            .map_err(|cause| Fault { sender: owner, cause: cause.into() })?;
                    }
                }
            }
            members.iter_mut().for_each(|member| member.count_received_layer(layer, &before, &contents));
        }
        check_used_up(&contents).map(|()| None)
    }

    fn write(&self, setting: &Setting<'_>, output: &mut [&mut [f32]]) {
        for (index, &layer) in setting.layers.iter().enumerate() {
            if setting.is_whole(layer) {
                self.whole.write(index, output[layer]);
                continue;
            }
            output[layer].fill(0.0);
            for &(element, sum) in &self.results[index] {
                output[layer][element as usize] = sum as f32 * self.scales[index] / setting.learners as f32;
            }
        }
    }
}

/// The mean of all learners' scales, summed in f64 in their order, from the front of their contents, which move past it.
fn mean_scale(layer: usize, contents: &mut [&[u8]]) -> Result<f32, Fault> {
    let mut sum = 0.0;
    for (sender, bytes) in contents.iter_mut().enumerate() {
        let fault = |cause: DecodeError| Fault { sender, cause: cause.into() };
        let scale = read_values(bytes, 1).map_err(fault)?.next().unwrap_or(f32::NAN);
        if !(scale.is_finite() && scale.is_sign_positive()) {
            return Err(fault(DecodeError::Value { layer }));
        }
        sum += f64::from(scale);
    }
    Ok((sum / contents.len() as f64) as f32)
}
