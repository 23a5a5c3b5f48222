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
use crate::error::ExchangeError;
use crate::member::Member;
use crate::options::Options;
use crate::strategy::{Rounds, Strategy};
use crate::traffic::Traffic;
use adacomp::internal::check_ascending;
use adacomp::{
    AverageError, CompressError, Compressor, Gradient, Layer, Layout, Selected, Sending, Treatment,
};
use std::ops::Range;
use std::sync::Arc;

/// Layers that are exchanged together.
pub(crate) struct Group {
    pub(crate) layers: Vec<usize>,
    pub(crate) rounds: Box<dyn Rounds>,
    /// Gradients that are still to be given, of all learners that are hosted here.
    missing: usize,
}

/// The learners that are hosted here, in a step.
pub struct Protocol {
    pub(crate) layout: Arc<Layout>,
    pub(crate) options: Options,
    pub(crate) learners: usize,
    pub(crate) members: Vec<Member>,
    pub(crate) groups: Vec<Group>,
    /// How many of the groups are in use in this step: all, unless they come as they are given.
    pub(crate) in_use: usize,
    as_given: bool,
    pub(crate) step: u64,
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
            return Err(ExchangeError::Treatment { parameter, strategy });
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
            sending: Sending::Compressed,
            non_finite: None,
        };
        protocol.begin_at(0, Sending::Compressed);
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

    /// The layers of a group, ascending.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn layers(&self, group: usize) -> &[usize] {
        &self.groups[group].layers
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
        check_ascending(&self.layout, layers)?;
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
        self.member(learner).map(|member| &mut member.compressor)
    }

    /// What a learner that is hosted here keeps as an owner; its layers are its shares.
    pub fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.member(learner)?.owner.as_mut()
    }

    fn member(&mut self, learner: usize) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.learner == learner)
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

    /// Has the step that is going on send flush, or what is selected. All learners must do the same.
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

    pub(crate) fn is_flush(&self) -> bool {
        self.sending == Sending::Flush || self.options.strategy == Strategy::Dense
    }

    /// Whether a gradient of this step has been given.
    pub(crate) fn is_open(&self) -> bool {
        self.members.iter().any(|member| member.compressor.is_open())
    }

    pub(crate) fn begin_at(&mut self, step: u64, sending: Sending) {
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
    pub fn submit(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), CompressError> {
        let sending = if self.is_flush() { Sending::Flush } else { Sending::Compressed };
        self.submit_by(learner, layer, |compressor| compressor.compress_layer(layer, gradient, sending))
    }

    /// What was selected from one layer's gradient elsewhere: see [`Compressor::take_selection`].
    pub fn submit_selection(
        &mut self,
        learner: usize,
        layer: usize,
        maxima: &[f32],
        selected: &[Selected],
    ) -> Result<(), CompressError> {
        self.submit_by(learner, layer, |compressor| compressor.take_selection(layer, maxima, selected))
    }

    fn submit_by(
        &mut self,
        learner: usize,
        layer: usize,
        compress: impl FnOnce(&mut Compressor) -> Result<(), CompressError>,
    ) -> Result<(), CompressError> {
        let layers = self.layout.len();
        let unknown = || CompressError::Unknown { parameter: format!("of learner {learner}") };
        let member = self.member(learner).ok_or_else(unknown)?;
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
    pub fn is_submitted(&self, group: usize) -> bool {
        self.groups[group].missing == 0
    }

    /// The names of parameters of which some gradient has not been given.
    pub(crate) fn not_submitted(&self) -> Vec<String> {
        let given =
            |layer: usize| self.members.iter().all(|member| member.compressor.packet(layer).is_some());
        let missing = (0..self.layout.len()).filter(|&layer| !given(layer));
        missing.map(|layer| self.layout[layer].name().to_owned()).collect()
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
