//! A round of a group of layers: what the learners that are hosted here send, and what becomes of what came.

use crate::error::TransportError;
use crate::member::Member;
use crate::message::Flag;
use crate::protocol::{Group, Protocol};
use crate::setting::{Envelopes, Setting};
use crate::strategy::{Addressing, Rounds};
use crate::transport::{Incoming, Outgoing};

impl Protocol {
    /// What the learners that are hosted here send in a round.
    ///
    /// # Panics
    /// If some gradient of the group has not been given.
    pub fn outgoing(&mut self, group: usize, round: usize) -> Outgoing {
        assert!(self.is_submitted(group), "all gradients of a group must be given before its first round");
        let (envelopes, rounds, members) = parts(self, group, round);
        let addressing = rounds.addressing()[round];
        let flag = |member: &Member| {
            let is_bad = |layer: &usize| member.compressor.layer_statistics(*layer).bad_bins > 0;
            if member.fault.is_some() {
                Flag::Failed
            } else if envelopes.known_non_finite || envelopes.setting.layers.iter().any(is_bad) {
                Flag::NonFinite
            } else {
                Flag::Good
            }
        };
        let mut message = |member: &mut Member, flag: Flag, receiver: Option<usize>| {
            let context = envelopes.context(member.learner, receiver);
            // What goes to all goes to oneself, too.
            let to = receiver.unwrap_or(member.learner);
            let mut message = if rounds.in_envelopes() { context.begin(flag) } else { Vec::new() };
            if flag == Flag::Good || !rounds.in_envelopes() {
                rounds.send(&envelopes.setting, member, to, &mut message);
            }
            if rounds.in_envelopes() {
                context.seal(&mut message);
            }
            let copies = addressing.copies(member.learner, to, envelopes.setting.learners);
            member.traffic.sent += (copies * message.len()) as u64;
            message
        };
        match addressing {
            Addressing::AllGather => {
                let all_gather = |member: &mut Member| message(member, flag(member), None);
                Outgoing::AllGather(members.iter_mut().map(all_gather).collect())
            }
            Addressing::AllToAll => {
                let all_to_all = |member: &mut Member| {
                    let flag = flag(member);
                    (0..envelopes.setting.learners).map(|to| message(member, flag, Some(to))).collect()
                };
                Outgoing::AllToAll(members.iter_mut().map(all_to_all).collect())
            }
        }
    }

    /// Takes what came of a round. What is wrong with its messages comes out in the verdict; an error is that there are not
    /// as many as there should be, after which learners cannot go on.
    pub fn incoming(
        &mut self,
        group: usize,
        round: usize,
        incoming: &Incoming,
    ) -> Result<(), TransportError> {
        let all_gather = self.groups[group].rounds.addressing()[round] == Addressing::AllGather;
        incoming.check(all_gather, self.members.len(), self.learners)?;
        let (envelopes, rounds, members) = parts(self, group, round);
        let mut non_finite = None;
        match incoming {
            Incoming::AllGather(messages) => {
                let messages: Vec<&[u8]> = messages.iter().map(|message| message.as_slice()).collect();
                for member in members.iter_mut() {
                    member.count_received(&messages);
                }
                let opened = envelopes.open_all(rounds.in_envelopes(), None, &messages);
                let result = opened.and_then(|opened| {
                    non_finite = opened.non_finite;
                    if non_finite.is_some() || envelopes.known_non_finite {
                        return Ok(());
                    }
                    non_finite = rounds.take_all(&envelopes.setting, members, &opened.contents)?;
                    Ok(())
                });
                if let Err(fault) = result {
                    members.iter_mut().for_each(|member| member.refuse(&fault));
                }
            }
            Incoming::AllToAll(messages) => {
                for (member, messages) in members.iter_mut().zip(messages) {
                    let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
                    member.count_received(&messages);
                    let receiver = Some(member.learner);
                    let opened = envelopes.open_all(rounds.in_envelopes(), receiver, &messages);
                    let result = opened.and_then(|opened| {
                        non_finite = non_finite.or(opened.non_finite);
                        if opened.non_finite.is_some() || envelopes.known_non_finite {
                            return Ok(());
                        }
                        rounds.take_each(&envelopes.setting, member, &opened.contents)
                    });
                    if let Err(fault) = result {
                        member.refuse(&fault);
                    }
                }
            }
        }
        self.non_finite = self.non_finite.or(non_finite);
        Ok(())
    }

    /// Writes the averaged gradient of a group whose rounds are over, a slice for each of its layers in their order; not
    /// before [`Protocol::is_good`] has been asked.
    ///
    /// # Panics
    /// If there are not as many slices as layers.
    pub fn write(&mut self, group: usize, output: &mut [&mut [f32]]) {
        assert_eq!(output.len(), self.groups[group].layers.len(), "a slice for each layer of the group");
        // There is no round any more; the last stands for it.
        let last = self.groups[group].rounds.addressing().len() - 1;
        let (envelopes, rounds, _) = parts(self, group, last);
        rounds.write(&envelopes.setting, output);
    }
}

/// The parts of a protocol that a group's round works with.
fn parts(
    protocol: &mut Protocol,
    group: usize,
    round: usize,
) -> (Envelopes<'_>, &mut dyn Rounds, &mut [Member]) {
    let flush = protocol.is_flush();
    let Protocol { layout, options, learners, members, groups, step, non_finite, .. } = protocol;
    let Group { layers, rounds, .. } = &mut groups[group];
    let setting = Setting {
        layout,
        group,
        round,
        layers,
        learners: *learners,
        step: *step,
        codec: options.codec,
        flush,
    };
    (Envelopes { setting, known_non_finite: non_finite.is_some() }, rounds.as_mut(), members)
}
