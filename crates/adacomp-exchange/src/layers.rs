//! Strategies that exchange layer by layer.
//!
//! Layers that are sent whole go the same way in all of them: in the last two rounds, a share to each owner and the averages to
//! all. A strategy says what becomes of the others.

use crate::member::Member;
use crate::setting::Setting;
use crate::strategy::{Addressing, Fault, Rounds};
use crate::whole::Whole;
use adacomp::DecodeError;
use std::ops::Range;

/// A layer in a round.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) setting: &'a Setting<'a>,
    /// Its position in the group.
    pub(crate) index: usize,
    pub(crate) layer: usize,
}

impl Place<'_> {
    /// The elements that a learner owns.
    pub(crate) fn share(&self, owner: usize) -> Range<usize> {
        self.setting.share(self.layer, owner)
    }
}

/// What a strategy does with each layer: all but the last two methods are for layers that are compressed. Contents move past what
/// is taken of them.
pub(crate) trait LayerRounds: Default + Send + Sync {
    /// To whom each round goes: to all, but for the one before the last, which goes to each owner.
    const ADDRESSING: &'static [Addressing];

    /// Appends what a learner sends to a receiver. In a round to all the receiver is the learner itself.
    fn send(&mut self, place: Place<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>);

    /// Takes what all learners sent to one that is hosted here.
    fn take_each(
        &mut self,
        place: Place<'_>,
        member: &mut Member,
        contents: &mut [&[u8]],
    ) -> Result<(), Fault>;

    /// Takes what all learners sent to all.
    fn take_all(
        &mut self,
        place: Place<'_>,
        members: &mut [Member],
        contents: &mut [&[u8]],
    ) -> Result<(), Fault>;

    /// Writes the averaged gradient.
    fn write(&mut self, place: Place<'_>, output: &mut [f32]);

    /// An owner has averaged its share of a layer that is sent whole.
    fn take_whole(&mut self, _: Place<'_>, _: &mut Member, _average: &mut [f32]) -> Result<(), Fault> {
        Ok(())
    }

    /// An owner has taken all layers.
    fn end_taking(&mut self) {}
}

/// A strategy's rounds for all layers of a group.
#[derive(Default)]
pub(crate) struct ByLayer<S> {
    whole: Whole,
    strategy: S,
}

impl<S: LayerRounds> ByLayer<S> {
    const LAST: usize = S::ADDRESSING.len() - 1;
}

impl<S: LayerRounds> Rounds for ByLayer<S> {
    fn addressing(&self) -> &'static [Addressing] {
        S::ADDRESSING
    }

    fn send(&mut self, setting: &Setting<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let copies = S::ADDRESSING[setting.round].copies(member.learner, receiver, setting.learners);
        for place in places(setting) {
            let start = message.len();
            if !setting.is_whole(place.layer) {
                self.strategy.send(place, member, receiver, message);
            } else if setting.round == Self::LAST {
                self.whole.send_average((member.position, place.index), message);
            } else if S::ADDRESSING[setting.round] == Addressing::AllToAll {
                self.whole.send_share(member, place.layer, place.share(receiver), message);
            }
            member.traffic.layers[place.layer].sent += (copies * (message.len() - start)) as u64;
        }
    }

    fn take_each(
        &mut self,
        setting: &Setting<'_>,
        member: &mut Member,
        contents: &[&[u8]],
    ) -> Result<(), Fault> {
        let take = |place: Place<'_>, members: &mut [Member], contents: &mut [&[u8]]| {
            let member = &mut members[0];
            if !setting.is_whole(place.layer) {
                return self.strategy.take_each(place, member, contents);
            }
            let position = (member.position, place.index);
            let average = self.whole.take_shares(position, place.share(member.learner), contents)?;
            self.strategy.take_whole(place, member, average)
        };
        let taken = take_layers(setting, std::slice::from_mut(member), contents, take);
        self.strategy.end_taking();
        taken
    }

    fn take_all(
        &mut self,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        take_layers(setting, members, contents, |place, members, contents| {
            match setting.is_whole(place.layer) {
                false => self.strategy.take_all(place, members, contents),
                true if setting.round == Self::LAST => self.whole.take_averages(place, contents),
                true => Ok(()),
            }
        })?;
        Ok(None)
    }

    fn write(&mut self, setting: &Setting<'_>, output: &mut [&mut [f32]]) {
        for (place, output) in places(setting).zip(output) {
            match setting.is_whole(place.layer) {
                true => self.whole.write(place.index, output),
                false => self.strategy.write(place, output),
            }
        }
    }
}

fn places<'a>(setting: &'a Setting<'a>) -> impl Iterator<Item = Place<'a>> {
    setting.layers.iter().enumerate().map(move |(index, &layer)| Place { setting, index, layer })
}

/// Takes all learners' contents layer by layer, and counts them for the learners that they came to. Nothing must be left.
fn take_layers(
    setting: &Setting<'_>,
    members: &mut [Member],
    contents: &[&[u8]],
    mut take: impl FnMut(Place<'_>, &mut [Member], &mut [&[u8]]) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut contents = contents.to_vec();
    for place in places(setting) {
        let before = contents.clone();
        take(place, members, &mut contents)?;
        members.iter_mut().for_each(|member| member.count_received_layer(place.layer, &before, &contents));
    }
    match contents.iter().enumerate().find(|(_, rest)| !rest.is_empty()) {
        Some((sender, rest)) => {
            Err(Fault::of(sender)(DecodeError::Trailing { part: "the last layer", count: rest.len() }))
        }
        None => Ok(()),
    }
}
