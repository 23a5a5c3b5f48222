//! Compression twice: by the learners, and by the owners of shares of the average.

use crate::member::Member;
use crate::setting::Setting;
use crate::strategy::{Addressing, Fault, Rounds, send_layers, take_layers};
use crate::values::{read_scale, slot, write_values};
use crate::whole::Whole;
use adacomp::codec::{decode_range, encode_range};
use adacomp::{DecodeError, Packet, Selected, Sending, write_blocks};
use std::ops::Range;

#[derive(Default)]
pub(crate) struct Sharded {
    whole: Whole,
    /// By position of the layer in the group: what each owner sent.
    results: Vec<Vec<OwnerResult>>,
    average: Vec<f32>,
    selected: Vec<Selected>,
}

#[derive(Default)]
struct OwnerResult {
    scale: f32,
    selected: Vec<Selected>,
}

impl Rounds for Sharded {
    fn addressing(&self) -> &'static [Addressing] {
        &[Addressing::ToEach, Addressing::ToAll]
    }

    fn send(&mut self, setting: &Setting<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let copies = self.addressing()[setting.round].copies(member.learner, receiver, setting.learners);
        send_layers(setting, member, copies, message, |member, index, layer, message| {
            let share = setting.share(layer, receiver);
            match (setting.is_whole(layer), setting.round) {
                (true, 0) => self.whole.send_share(member, layer, share, message),
                (true, _) => self.whole.send_average((member.position, index), message),
                (false, 0) => send_selection(member.compressor.packet(layer), share, message),
                // The owner's layer is the share alone, so its indices start at 0.
                (false, _) => {
                    let packet = member.owner.as_ref().and_then(|owner| owner.packet(layer));
                    send_selection(packet, 0..share.len(), message);
                }
            }
        });
    }

    fn take_each(
        &mut self,
        setting: &Setting<'_>,
        member: &mut Member,
        contents: &[&[u8]],
    ) -> Result<(), Fault> {
        take_layers(setting, std::slice::from_mut(member), contents, |members, index, layer, contents| {
            let member = &mut members[0];
            let share = setting.share(layer, member.learner);
            if !setting.is_whole(layer) {
                self.take_average(layer, share, contents)?;
                return compress_average(layer, member, &self.average, Sending::Selected);
            }
            let position = (member.position, index);
            self.whole.take_shares(position, share, contents)?;
            if !setting.layout[layer].treatment.selects() {
                return Ok(());
            }
            // Everything is sent, so what the owner has kept goes, too.
            let average = self.whole.average(position);
            compress_average(layer, member, average, Sending::Everything)?;
            if let Some(Packet::Dense(values)) = member.owner.as_ref().and_then(|owner| owner.packet(layer)) {
                average.copy_from_slice(values);
            }
            Ok(())
        })
    }

    fn take_all(
        &mut self,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        take_layers(setting, members, contents, |_, index, layer, contents| {
            if setting.is_whole(layer) {
                return self.whole.take_averages(setting, index, contents);
            }
            let results = slot(&mut self.results, index);
            for (owner, bytes) in contents.iter_mut().enumerate() {
                let result = slot(results, owner);
                result.selected.clear();
                let share = setting.share(layer, owner);
                result.scale = take_selection(bytes, layer, 0..share.len(), &mut result.selected)
                    .map_err(Fault::of(owner))?;
            }
            Ok(())
        })?;
        Ok(None)
    }

    fn write(&mut self, setting: &Setting<'_>, output: &mut [&mut [f32]]) {
        for (index, &layer) in setting.layers.iter().enumerate() {
            if setting.is_whole(layer) {
                self.whole.write(index, output[index]);
                continue;
            }
            // Owner after owner, each element after element.
            let elements = self.results[index].iter().enumerate().flat_map(|(owner, result)| {
                let first = setting.share(layer, owner).start;
                result.selected.iter().map(move |element| {
                    let value = if element.is_negative() { -result.scale } else { result.scale };
                    (first + element.index(), value)
                })
            });
            let mut elements = elements.peekable();
            write_blocks(output[index], 1.0, |start, block| {
                while let Some((at, value)) = elements.next_if(|(at, _)| *at < start + block.len()) {
                    block[at - start] = value;
                }
            });
        }
    }
}

impl Sharded {
    /// Averages what learners sent for a share, in their order, from the front of their contents, which move past it.
    fn take_average(
        &mut self,
        layer: usize,
        share: Range<usize>,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        self.average.clear();
        self.average.resize(share.len(), 0.0);
        for (sender, bytes) in contents.iter_mut().enumerate() {
            self.selected.clear();
            let scale =
                take_selection(bytes, layer, share.clone(), &mut self.selected).map_err(Fault::of(sender))?;
            for element in &self.selected {
                let value = if element.is_negative() { -scale } else { scale };
                self.average[element.index() - share.start] += value;
            }
        }
        let factor = 1.0 / contents.len() as f32;
        self.average.iter_mut().for_each(|value| *value *= factor);
        Ok(())
    }
}

/// Compresses an average as its owner.
fn compress_average(
    layer: usize,
    member: &mut Member,
    average: &[f32],
    sending: Sending,
) -> Result<(), Fault> {
    let Some(owner) = &mut member.owner else { return Ok(()) };
    if !owner.is_open() {
        member.owner_before = Some(owner.clone());
    }
    let compressed = owner.compress_layer(layer, average.into(), sending);
    // Only a sum of scales that overflows is refused here.
    if compressed.is_ok() && owner.layer_statistics(layer).bad_bins == 0 {
        Ok(())
    } else {
        Err(Fault::of(member.learner)(DecodeError::Value { layer }))
    }
}

fn send_selection(packet: Option<Packet<'_>>, share: Range<usize>, message: &mut Vec<u8>) {
    if let Some(Packet::Sparse(sparse)) = packet {
        write_values(&sparse.values[..1], message);
        encode_range(sparse.within(share.clone()).selected, share, message);
    }
}

/// A scale and selected elements from the front of `bytes`, which move past them.
fn take_selection(
    bytes: &mut &[u8],
    layer: usize,
    share: Range<usize>,
    selected: &mut Vec<Selected>,
) -> Result<f32, DecodeError> {
    let scale = read_scale(bytes, layer)?;
    decode_range(bytes, share, layer, selected)?;
    Ok(scale)
}
