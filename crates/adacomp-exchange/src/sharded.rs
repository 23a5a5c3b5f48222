//! Compression twice: by the learners, and by the owners of shares of the average.

use crate::layers::{LayerRounds, Place};
use crate::member::Member;
use crate::strategy::{Addressing, Fault};
use crate::values::{read_scale, slot, write_values};
use adacomp::internal::{decode_range, encode_range, write_blocks};
use adacomp::{DecodeError, Packet, Selected, Sending, Sparse};
use std::ops::Range;

#[derive(Default)]
pub(crate) struct Sharded {
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

/// The round in which learners send what they have selected; in the next, owners do.
const GRADIENTS: usize = 0;

impl LayerRounds for Sharded {
    const ADDRESSING: &'static [Addressing] = &[Addressing::AllToAll, Addressing::AllGather];

    fn send(&mut self, place: Place<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let share = place.share(receiver);
        if place.setting.round == GRADIENTS {
            return send_selection(member.compressor.packet(place.layer), share, message);
        }
        // The owner's layer is the share alone, so its indices start at 0.
        let packet = member.owner.as_ref().and_then(|owner| owner.packet(place.layer));
        send_selection(packet, 0..share.len(), message);
    }

    fn take_each(
        &mut self,
        place: Place<'_>,
        member: &mut Member,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        self.take_average(place.layer, place.share(member.learner), contents)?;
        compress_average(place.layer, member, &self.average, Sending::Compressed)
    }

    /// Everything is sent, so what the owner has kept goes, too.
    fn take_whole(
        &mut self,
        place: Place<'_>,
        member: &mut Member,
        average: &mut [f32],
    ) -> Result<(), Fault> {
        if !place.setting.layout[place.layer].treatment.selects() {
            return Ok(());
        }
        compress_average(place.layer, member, average, Sending::Flush)?;
        let packet = member.owner.as_ref().and_then(|owner| owner.packet(place.layer));
        if let Some(Packet::Dense(values)) = packet {
            average.copy_from_slice(values);
        }
        Ok(())
    }

    fn take_all(
        &mut self,
        place: Place<'_>,
        _members: &mut [Member],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault> {
        let results = slot(&mut self.results, place.index);
        for (owner, bytes) in contents.iter_mut().enumerate() {
            let result = slot(results, owner);
            result.selected.clear();
            let share = 0..place.share(owner).len();
            result.scale =
                take_selection(bytes, place.layer, share, &mut result.selected).map_err(Fault::of(owner))?;
        }
        Ok(())
    }

    fn write(&mut self, place: Place<'_>, output: &mut [f32]) {
        // Owner after owner, each element after element.
        let elements = self.results[place.index].iter().enumerate().flat_map(|(owner, result)| {
            let first = place.share(owner).start;
            sparse(result.scale, &result.selected)
                .elements()
                .map(move |(index, value)| (first + index, value))
        });
        let mut elements = elements.peekable();
        write_blocks(output, 1.0, |start, block| {
            while let Some((at, value)) = elements.next_if(|(at, _)| *at < start + block.len()) {
                block[at - start] = value;
            }
        });
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
            for (index, value) in sparse(scale, &self.selected).elements() {
                self.average[index - share.start] += value;
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

fn sparse(scale: f32, selected: &[Selected]) -> Sparse<'_> {
    Sparse { values: [scale, -scale], selected }
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
