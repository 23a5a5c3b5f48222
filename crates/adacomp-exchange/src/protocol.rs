//! The messages of a step, without I/O: which bytes go to whom, and what becomes of those that come.
//!
//! Threads, MPI, PyTorch's process groups and tests all drive the same code: for every group of layers, round by round,
//! they carry what [`Protocol::outgoing`] gives to where it belongs and hand what came to [`Protocol::incoming`]; at the end
//! they carry everybody's [`Protocol::verdict`] to all, and [`Protocol::conclude`] ends the step in the same way on every
//! learner.
//!
//! Whatever happens, every learner takes part in the same rounds: one that has refused a message, or whose gradient is not
//! finite, sends envelopes that say so.

use crate::agreement;
use crate::collective::{Incoming, Outgoing};
use crate::error::{CollectiveError, ExchangeError};
use crate::member::Member;
use crate::message::Flag;
use crate::options::Options;
use crate::setting::{Envelopes, Setting};
use crate::strategy::{Addressing, Rounds, Strategy};
use crate::traffic::Traffic;
use adacomp::{
    AverageError, CompressError, Compressor, Gradient, Layer, Layout, Outcome, Selected, Sending, Treatment,
};
use std::ops::Range;
use std::sync::Arc;

/// Layers that are exchanged together.
struct Group {
    layers: Vec<usize>,
    rounds: Box<dyn Rounds>,
    /// Gradients that are still to be given, of all learners that are hosted here.
    missing: usize,
}

/// The learners that are hosted here, in a step.
pub struct Protocol {
    layout: Arc<Layout>,
    pub(crate) options: Options,
    learners: usize,
    pub(crate) members: Vec<Member>,
    groups: Vec<Group>,
    /// How many of the groups are in use in this step: all, unless they come as they are given.
    in_use: usize,
    as_given: bool,
    step: u64,
    sending: Sending,
    /// The first learner whose gradient is not finite.
    pub(crate) non_finite: Option<usize>,
}

impl Protocol {
    /// The learners of `hosted`, of so many in all. Layers are exchanged in groups, the last layers first, because the backward
    /// pass produces these first.
    ///
    /// # Panics
    /// If no learner is hosted, or one that is not among all.
    pub fn new(
        layout: impl Into<Arc<Layout>>,
        options: impl Into<Options>,
        learners: usize,
        hosted: Range<usize>,
    ) -> Result<Self, ExchangeError> {
        assert!(!hosted.is_empty() && hosted.end <= learners, "learners {hosted:?} of {learners}");
        let (layout, options) = (layout.into(), options.into());
        let strategy = options.strategy;
        let is_top_k = |layer: &&Layer| matches!(layer.treatment, Treatment::TopK(_));
        if let (Strategy::Reduce | Strategy::Sharded, Some(layer)) =
            (strategy, layout.layers().iter().find(is_top_k))
        {
            let parameter = layer.name().to_owned();
            return Err(ExchangeError::Treatment { parameter, strategy: strategy.name() });
        }
        let members = hosted.clone().zip(0..);
        let members =
            members.map(|(learner, position)| Member::new(&layout, learner, learners, position, options));
        let groups = cut_groups(&layout, options.group).into_iter().map(|layers| Group {
            layers,
            rounds: strategy.rounds(),
            missing: 0,
        });
        let groups: Vec<_> = groups.collect();
        let mut protocol = Self {
            members: members.collect(),
            in_use: groups.len(),
            as_given: false,
            groups,
            layout,
            options,
            learners,
            step: 0,
            sending: Sending::Selected,
            non_finite: None,
        };
        protocol.begin_at(0, Sending::Selected);
        Ok(protocol)
    }

    /// The layers.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// How gradients are exchanged.
    pub fn strategy(&self) -> Strategy {
        self.options.strategy
    }

    /// What this was started with. All learners' must be the same: carry them to all, and let
    /// [`crate::check_agreement`] tell, before the first step.
    pub fn description(&self) -> Vec<u8> {
        agreement::describe(&self.layout, self.options, self.learners)
    }

    /// How many learners there are.
    pub fn learners(&self) -> usize {
        self.learners
    }

    /// The learners that are hosted here.
    pub fn hosted(&self) -> Range<usize> {
        let first = self.members.first().map_or(0, |member| member.learner);
        first..first + self.members.len()
    }

    /// The step that is going on.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The number of groups of layers in this step.
    pub fn groups(&self) -> usize {
        self.in_use
    }

    /// Begins a group of these layers, in ascending order: the next of this step, of this number. The first call puts an end
    /// to the groups that were made at the start; from then on every step has those that are begun in it, in the same order on
    /// all learners. For drivers that are given layers by groups, which may change from step to step, and not always all.
    ///
    /// # Panics
    /// If a gradient was given before the first group.
    pub fn begin_group(&mut self, layers: &[usize]) -> Result<usize, CompressError> {
        if !self.as_given {
            assert!(!self.is_open(), "a gradient has been given already");
            (self.as_given, self.in_use) = (true, 0);
        }
        let count = self.layout.len();
        if !layers.is_sorted_by(|a, b| a < b) || layers.last().is_some_and(|&last| last >= count) {
            return Err(CompressError::Layers { layers: layers.to_vec(), count });
        }
        let taken = |layer| self.groups[..self.in_use].iter().any(|group| group.layers.contains(layer));
        if let Some(&layer) = layers.iter().find(|layer| taken(layer)) {
            return Err(CompressError::Twice { parameter: self.layout[layer].name().to_owned() });
        }
        let number = self.in_use;
        // Groups are mostly those of the step before, whose memory is used again.
        if self.groups.get(number).is_none_or(|group| group.layers != layers) {
            self.groups.truncate(number);
            self.groups.push(Group {
                layers: layers.to_vec(),
                rounds: self.options.strategy.rounds(),
                missing: 0,
            });
        }
        self.groups[number].missing = layers.len() * self.members.len();
        self.in_use += 1;
        Ok(number)
    }

    /// The number of rounds of each group.
    pub fn rounds(&self) -> usize {
        self.options.strategy.rounds().addressing().len()
    }

    /// The compressor of a learner that is hosted here.
    pub fn compressor(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.members.iter_mut().find(|member| member.learner == learner).map(|member| &mut member.compressor)
    }

    /// What a learner that is hosted here keeps as an owner; its layers are its shares.
    pub fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.members.iter_mut().find(|member| member.learner == learner)?.owner.as_mut()
    }

    /// The bytes of a learner that is hosted here, in the step that is going on or has just ended.
    pub fn traffic(&self, learner: usize) -> Option<&Traffic> {
        self.members.iter().find(|member| member.learner == learner).map(|member| &member.traffic)
    }

    /// Has layers whose gradient is zero everywhere send nothing from now on: see [`Compressor::set_skip_unused`].
    pub fn set_skip_unused(&mut self, skip: bool) {
        for member in &mut self.members {
            member.compressor.set_skip_unused(skip);
            member.owner.iter_mut().for_each(|owner| owner.set_skip_unused(skip));
        }
    }

    /// Has the step that is going on send everything, or what is selected. All learners must do the same.
    ///
    /// # Panics
    /// If a gradient has been given already.
    pub fn set_sending(&mut self, sending: Sending) {
        assert!(!self.is_open(), "a gradient has been given already");
        self.sending = sending;
    }

    /// Goes on with this step.
    pub(crate) fn set_step(&mut self, step: u64) {
        self.begin_at(step, self.sending);
    }

    fn sends_everything(&self) -> bool {
        self.sending == Sending::Everything || self.options.strategy == Strategy::Dense
    }

    /// Whether a gradient of this step has been given.
    pub(crate) fn is_open(&self) -> bool {
        self.members.iter().any(|member| member.compressor.is_open())
    }

    fn begin_at(&mut self, step: u64, sending: Sending) {
        (self.step, self.sending, self.non_finite) = (step, sending, None);
        self.members.iter_mut().for_each(|member| member.fault = None);
        if self.as_given {
            self.in_use = 0;
        }
        for group in &mut self.groups {
            group.missing = group.layers.len() * self.members.len();
        }
    }

    /// One layer's gradient of a learner that is hosted here. Every group must be given before its first round.
    pub fn give(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), CompressError> {
        let sending = if self.sends_everything() { Sending::Everything } else { Sending::Selected };
        self.give_by(learner, layer, |compressor| compressor.compress_layer(layer, gradient, sending))
    }

    /// What was selected from one layer's gradient elsewhere: see [`Compressor::take_selection`].
    pub fn give_selection(
        &mut self,
        learner: usize,
        layer: usize,
        maxima: &[f32],
        selected: &[Selected],
    ) -> Result<(), CompressError> {
        self.give_by(learner, layer, |compressor| compressor.take_selection(layer, maxima, selected))
    }

    fn give_by(
        &mut self,
        learner: usize,
        layer: usize,
        compress: impl FnOnce(&mut Compressor) -> Result<(), CompressError>,
    ) -> Result<(), CompressError> {
        let layers = self.layout.len();
        let member = self.members.iter_mut().find(|member| member.learner == learner);
        let member =
            member.ok_or_else(|| CompressError::Unknown { parameter: format!("of learner {learner}") })?;
        if !member.compressor.is_open() {
            member.traffic.clear(layers);
        }
        compress(&mut member.compressor)?;
        let mut groups = self.groups[..self.in_use].iter_mut();
        if let Some(group) = groups.find(|group| group.layers.contains(&layer)) {
            group.missing -= 1;
        }
        Ok(())
    }

    /// Whether all gradients of a group have been given.
    pub fn is_given(&self, group: usize) -> bool {
        self.groups[group].missing == 0
    }

    /// The names of parameters of which some gradient has not been given.
    pub(crate) fn not_given(&self) -> Vec<String> {
        let given =
            |layer: usize| self.members.iter().all(|member| member.compressor.packet(layer).is_some());
        let missing = (0..self.layout.len()).filter(|&layer| !given(layer));
        missing.map(|layer| self.layout[layer].name().to_owned()).collect()
    }

    /// What the learners that are hosted here send in a round.
    ///
    /// # Panics
    /// If some gradient of the group has not been given.
    pub fn outgoing(&mut self, group: usize, round: usize) -> Outgoing {
        assert!(self.is_given(group), "all gradients of a group must be given before its first round");
        let (envelopes, rounds, members) = parts(self, group);
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
            let context = envelopes.context(group, round, member.learner, receiver);
            // What goes to all goes to oneself, too.
            let to = receiver.unwrap_or(member.learner);
            let mut message = if rounds.in_envelopes() { context.begin(flag) } else { Vec::new() };
            if flag == Flag::Good || !rounds.in_envelopes() {
                rounds.send(round, &envelopes.setting, member, to, &mut message);
            }
            if rounds.in_envelopes() {
                context.seal(&mut message);
            }
            let copies = addressing.copies(member.learner, to, envelopes.setting.learners);
            member.traffic.sent += (copies * message.len()) as u64;
            message
        };
        match addressing {
            Addressing::ToAll => {
                let to_all = |member: &mut Member| message(member, flag(member), None);
                Outgoing::ToAll(members.iter_mut().map(to_all).collect())
            }
            Addressing::ToEach => {
                let to_each = |member: &mut Member| {
                    let flag = flag(member);
                    (0..envelopes.setting.learners).map(|to| message(member, flag, Some(to))).collect()
                };
                Outgoing::ToEach(members.iter_mut().map(to_each).collect())
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
    ) -> Result<(), CollectiveError> {
        let to_all = self.groups[group].rounds.addressing()[round] == Addressing::ToAll;
        incoming.check(to_all, self.members.len(), self.learners)?;
        let (envelopes, rounds, members) = parts(self, group);
        let mut non_finite = None;
        match incoming {
            Incoming::ToAll(messages) => {
                let messages: Vec<&[u8]> = messages.iter().map(|message| message.as_slice()).collect();
                for member in members.iter_mut() {
                    member.count_received(&messages);
                }
                let opened = envelopes.open_all(rounds.in_envelopes(), group, round, None, &messages);
                let result = opened.and_then(|opened| {
                    non_finite = opened.non_finite;
                    if non_finite.is_some() || envelopes.known_non_finite {
                        return Ok(());
                    }
                    let taken = rounds.take_all(round, &envelopes.setting, members, &opened.contents)?;
                    non_finite = taken;
                    Ok(())
                });
                if let Err(fault) = result {
                    members.iter_mut().for_each(|member| member.refuse(&fault));
                }
            }
            Incoming::ToEach(messages) => {
                for (member, messages) in members.iter_mut().zip(messages) {
                    let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
                    member.count_received(&messages);
                    let receiver = Some(member.learner);
                    let opened = envelopes.open_all(rounds.in_envelopes(), group, round, receiver, &messages);
                    let result = opened.and_then(|opened| {
                        non_finite = non_finite.or(opened.non_finite);
                        if opened.non_finite.is_some() || envelopes.known_non_finite {
                            return Ok(());
                        }
                        rounds.take_each(round, &envelopes.setting, member, &opened.contents)
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

    /// Ends the step as all learners' verdicts say. The output, a slice for each layer, is written only if the gradient was
    /// averaged. After [`ExchangeError::Verdict`] and [`ExchangeError::Collective`] learners cannot go on; after other errors
    /// they can.
    pub fn conclude(
        &mut self,
        verdicts: &[Arc<Vec<u8>>],
        output: &mut [&mut [f32]],
    ) -> Result<Outcome, ExchangeError> {
        self.check_output(output)?;
        self.conclude_with(verdicts, |protocol| {
            for group in 0..protocol.in_use {
                let layers = protocol.groups[group].layers.clone();
                let slices = output.iter_mut().enumerate().filter(|(layer, _)| layers.contains(layer));
                let mut slices: Vec<&mut [f32]> = slices.map(|(_, slice)| &mut **slice).collect();
                protocol.write(group, &mut slices);
            }
        })
    }

    /// The same for drivers that have written every group already, with [`Protocol::write`]. What they have written counts
    /// only if the gradient was averaged.
    pub fn conclude_written(&mut self, verdicts: &[Arc<Vec<u8>>]) -> Result<Outcome, ExchangeError> {
        self.conclude_with(verdicts, |_| ())
    }

    /// Writes the averaged gradient of a group whose rounds are over, a slice for each of its layers in their order; not
    /// before [`Protocol::is_good`] has been asked.
    pub fn write(&mut self, group: usize, output: &mut [&mut [f32]]) {
        let (envelopes, rounds, _) = parts(self, group);
        rounds.write(&envelopes.setting, output);
    }

    /// Whether, as far as is known here, the step will be averaged.
    pub fn is_good(&self) -> bool {
        self.non_finite.is_none() && self.members.iter().all(|member| member.fault.is_none())
    }

    /// Has all learners drop the step, because the averaged gradient cannot be used: it does not fit the format that it is
    /// wanted in. Before the verdict, which says so.
    pub fn reject_average(&mut self) {
        // All learners find the same, so the first is named.
        self.non_finite.get_or_insert(0);
    }

    fn conclude_with(
        &mut self,
        verdicts: &[Arc<Vec<u8>>],
        write: impl FnOnce(&mut Self),
    ) -> Result<Outcome, ExchangeError> {
        let step = self.step;
        let messages: Vec<&[u8]> = verdicts.iter().map(|verdict| verdict.as_slice()).collect();
        self.members.iter_mut().for_each(|member| member.count_received(&messages));
        match self.judge(&messages) {
            Err(error) => {
                self.drop_step();
                return Err(error);
            }
            Ok(Some(learner)) => {
                self.drop_step();
                return Ok(Outcome::NonFinite { learner: learner as u32 });
            }
            Ok(None) => write(self),
        }
        for member in &mut self.members {
            member.owner_before = None;
            for compressor in [Some(&mut member.compressor), member.owner.as_mut()].into_iter().flatten() {
                if compressor.is_open() {
                    compressor.commit()?;
                }
            }
        }
        self.begin_at(step + 1, Sending::Selected);
        Ok(Outcome::Averaged)
    }

    /// Ends the step without using it. Where learners cannot agree on that, none of them can go on.
    pub fn drop_step(&mut self) {
        for member in &mut self.members {
            member.compressor.drop_step();
            // What came to the owner is back with its senders, so it must not stay here.
            if let Some(before) = member.owner_before.take() {
                member.owner = Some(before);
            }
        }
        self.begin_at(self.step + 1, Sending::Selected);
    }

    pub(crate) fn check_output(&self, output: &[&mut [f32]]) -> Result<(), AverageError> {
        for position in 0..self.layout.len().max(output.len()) {
            let expected = self.layout.layers().get(position).map(Layer::elements);
            let actual = output.get(position).map(|slice| slice.len());
            if expected != actual {
                let (expected, actual) = (expected.unwrap_or(0), actual.unwrap_or(0));
                return Err(AverageError::Output { position, expected, actual });
            }
        }
        Ok(())
    }
}

/// The parts of a protocol that a group's round works with.
fn parts(protocol: &mut Protocol, group: usize) -> (Envelopes<'_>, &mut dyn Rounds, &mut [Member]) {
    let everything = protocol.sends_everything();
    let Protocol { layout, options, learners, members, groups, step, non_finite, .. } = protocol;
    let Group { layers, rounds, .. } = &mut groups[group];
    let setting =
        Setting { layout, layers, learners: *learners, step: *step, codec: options.codec, everything };
    (Envelopes { setting, known_non_finite: non_finite.is_some() }, rounds.as_mut(), members)
}

/// Consecutive layers, from the last to the first, of at least so many elements together.
fn cut_groups(layout: &Layout, elements: usize) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut size = usize::MAX;
    for layer in (0..layout.len()).rev() {
        if size >= elements {
            groups.push(Vec::new());
            size = 0;
        }
        if let Some(group) = groups.last_mut() {
            group.insert(0, layer);
        }
        size += layout[layer].elements();
    }
    groups
}

/// Drivers may share a protocol between threads, as bindings to other languages do.
const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Protocol>();
};
