//! The strategy that sends every layer whole.

use crate::member::Member;
use crate::setting::Setting;
use crate::strategy::{Addressing, Fault, Rounds, send_layers, take_layers};
use crate::whole::Whole;

#[derive(Default)]
pub(crate) struct Dense {
    whole: Whole,
}

impl Rounds for Dense {
    fn addressing(&self) -> &'static [Addressing] {
        &[Addressing::ToEach, Addressing::ToAll]
    }

    fn send(&mut self, setting: &Setting<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let copies = self.addressing()[setting.round].copies(member.learner, receiver, setting.learners);
        send_layers(setting, member, copies, message, |member, index, layer, message| match setting.round {
            0 => self.whole.send_share(member, layer, setting.share(layer, receiver), message),
            _ => self.whole.send_average((member.position, index), message),
        });
    }

    fn take_each(
        &mut self,
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
