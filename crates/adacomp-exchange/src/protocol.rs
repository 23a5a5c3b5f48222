//! The messages of a step, without I/O: which bytes go to whom, and what becomes of those that come.
//!
//! Threads, MPI, PyTorch's process groups and tests all drive the same code: for every group of layers, round by round,
//! they carry what [`Protocol::outgoing`] returns to where it belongs and hand what came to [`Protocol::incoming`]; at the end
//! they carry each learner's [`Protocol::verdict`] to all, and [`Protocol::conclude`] ends the step in the same way on every
//! learner.
//!
//! Whatever happens, every learner takes part in the same rounds: one that has refused a message, or whose gradient is not
//! finite, sends envelopes that say so.

use crate::error::{Cause, ExchangeError, TransportError};
use crate::exchange::Options;
use crate::message::{Context, Flag};
use crate::state::owner_layout;
use crate::strategy::{Collective, Fault, Rounds, Strategy};
use crate::transport::Messages;
use adacomp::internal::check_ascending;
use adacomp::{
    AverageError, CompressError, Compressor, Gradient, Layer, Layout, Outcome, Selected, Sending, Treatment,
};
use std::ops::Range;
use std::sync::Arc;

/// The bytes of one layer, without the envelopes that layers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerTraffic {
    /// Handed to the transport for other learners.
    pub sent: u64,
    /// Handed over by the transport from other learners.
    pub received: u64,
}

/// The bytes of one learner in one step.
///
/// A message to all counts once for each other learner. What a learner sends to itself does not count.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Handed to the transport for other learners, envelopes included.
    pub sent: u64,
    /// Handed over by the transport from other learners, envelopes included.
    pub received: u64,
    /// The same for each layer, without envelopes.
    pub layers: Vec<LayerTraffic>,
}

/// A learner that is hosted here.
pub(crate) struct Learner {
    pub(crate) number: usize,
    /// Its place among those that are hosted here.
    pub(crate) position: usize,
    pub(crate) compressor: Compressor,
    /// What it keeps as an owner with `sharded`: the residuals of its shares of averaged gradients.
    pub(crate) owner: Option<Compressor>,
    /// Values of the owner's residual that the step changes, as they were before: for each layer, element and value. A step
    /// that is dropped returns what came to an owner to its senders, so it must not stay here.
    pub(crate) owner_before: Vec<(usize, Vec<(u32, f32)>)>,
    pub(crate) traffic: Traffic,
    /// What it has refused in this step.
    fault: Option<Fault>,
}

impl Learner {
    fn refuse(&mut self, fault: &Fault) {
        // The first fault is the cause of those that follow.
        self.fault.get_or_insert_with(|| fault.clone());
    }

    fn count_received(&mut self, messages: &[&[u8]]) {
        let others = messages.iter().enumerate().filter(|(sender, _)| *sender != self.number);
        self.traffic.received += others.map(|(_, message)| message.len() as u64).sum::<u64>();
    }

    /// Makes what was sent in the step leave the residuals.
    pub(crate) fn commit(&mut self) -> Result<(), CompressError> {
        self.owner_before.clear();
        for compressor in [Some(&mut self.compressor), self.owner.as_mut()].into_iter().flatten() {
            if compressor.is_open() {
                compressor.commit()?;
            }
        }
        Ok(())
    }

    /// Returns what was selected to the residuals, and an owner to what it was before the step.
    pub(crate) fn rollback(&mut self) {
        self.compressor.rollback();
        let Some(owner) = &mut self.owner else { return };
        owner.rollback();
        for (layer, changed) in self.owner_before.drain(..) {
            let residual = owner.residual_mut(layer);
            changed.into_iter().for_each(|(index, value)| residual[index as usize] = value);
        }
    }
}

/// Layers that are exchanged together.
struct Group {
    layers: Vec<usize>,
    rounds: Box<dyn Rounds>,
    /// Gradients that are still to be submitted, of all learners that are hosted here.
    missing: usize,
}

/// The learners that are hosted here, in a step.
pub struct Protocol {
    pub(crate) layout: Arc<Layout>,
    pub(crate) options: Options,
    pub(crate) learners: usize,
    pub(crate) hosted: Vec<Learner>,
    groups: Vec<Group>,
    /// The number of groups in this step. The others are of the step before, and kept for their memory.
    in_use: usize,
    /// Whether groups are begun by the driver, rather than one group of all layers.
    as_given: bool,
    step: u64,
    sending: Sending,
    /// The first learner whose gradient is not finite.
    non_finite: Option<usize>,
}

impl Protocol {
    /// Creates the learners of `hosted`.
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
            return Err(ExchangeError::Treatment { parameter: layer.name().to_owned(), strategy });
        }
        let hosted = hosted.enumerate().map(|(position, number)| Learner {
            number,
            position,
            compressor: Compressor::new(layout.clone()).with_threads(options.threads),
            owner: (strategy == Strategy::Sharded)
                .then(|| Compressor::new(owner_layout(&layout, options, number, learners))),
            owner_before: Vec::new(),
            traffic: Traffic::default(),
            fault: None,
        });
        let mut protocol = Self {
            hosted: hosted.collect(),
            groups: Vec::new(),
            in_use: 0,
            as_given: false,
            layout,
            options,
            learners,
            step: 0,
            sending: Sending::Compressed,
            non_finite: None,
        };
        protocol.begin_step(0, Sending::Compressed);
        Ok(protocol)
    }

    /// Returns the learners that are hosted here.
    pub fn hosted(&self) -> Range<usize> {
        let first = self.hosted[0].number;
        first..first + self.hosted.len()
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns the number of the step that is going on.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the number of rounds of each group.
    pub fn rounds(&self) -> usize {
        self.options.strategy.rounds().len()
    }

    /// Returns the layers of each group of this step.
    pub(crate) fn groups(&self) -> impl ExactSizeIterator<Item = &[usize]> {
        self.groups[..self.in_use].iter().map(|group| group.layers.as_slice())
    }

    /// Begins a group of these layers: see [`crate::Exchange::begin_group`].
    pub(crate) fn begin_group(&mut self, layers: &[usize]) -> Result<usize, CompressError> {
        if !self.as_given {
            assert!(!self.is_open(), "a gradient has been given already");
            (self.as_given, self.in_use) = (true, 0);
        }
        check_ascending(&self.layout, layers)?;
        let taken = |layer| self.groups().any(|layers| layers.contains(layer));
        if let Some(&layer) = layers.iter().find(|layer| taken(layer)) {
            return Err(CompressError::Twice { parameter: self.layout[layer].name().to_owned() });
        }
        Ok(self.push_group(layers))
    }

    fn push_group(&mut self, layers: &[usize]) -> usize {
        let number = self.in_use;
        // Groups are mostly those of the step before, whose memory is used again.
        if self.groups.get(number).is_none_or(|group| group.layers != layers) {
            self.groups.truncate(number);
            let rounds = self.options.strategy.group();
            self.groups.push(Group { layers: layers.to_vec(), rounds, missing: 0 });
        }
        self.groups[number].missing = layers.len() * self.hosted.len();
        self.in_use += 1;
        number
    }

    /// Returns the compressor of a learner that is hosted here.
    pub fn compressor(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.learner(learner).map(|learner| &mut learner.compressor)
    }

    /// Returns what a learner that is hosted here keeps as an owner; its layers are its shares.
    pub fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.learner(learner)?.owner.as_mut()
    }

    fn learner(&mut self, number: usize) -> Option<&mut Learner> {
        self.hosted.iter_mut().find(|learner| learner.number == number)
    }

    /// Returns the bytes of a learner that is hosted here, in the step that is going on or has just ended.
    pub fn traffic(&self, learner: usize) -> Option<&Traffic> {
        self.hosted.iter().find(|hosted| hosted.number == learner).map(|hosted| &hosted.traffic)
    }

    /// Sets what the step that is going on sends. All learners must do the same.
    ///
    /// # Panics
    /// If a gradient has been submitted already.
    pub fn set_sending(&mut self, sending: Sending) {
        assert!(!self.is_open(), "a gradient has been given already");
        self.sending = sending;
    }

    /// Goes on with this step.
    pub(crate) fn set_step(&mut self, step: u64) {
        self.begin_step(step, self.sending);
    }

    fn begin_step(&mut self, step: u64, sending: Sending) {
        (self.step, self.sending, self.non_finite) = (step, sending, None);
        self.hosted.iter_mut().for_each(|learner| learner.fault = None);
        self.in_use = 0;
        if !self.as_given && !self.layout.is_empty() {
            self.push_group(&Vec::from_iter(0..self.layout.len()));
        }
    }

    fn is_flush(&self) -> bool {
        self.sending == Sending::Flush || self.options.strategy == Strategy::Dense
    }

    /// Returns whether a gradient of this step has been submitted.
    pub(crate) fn is_open(&self) -> bool {
        self.hosted.iter().any(|learner| learner.compressor.is_open())
    }

    /// Takes one layer's gradient of a learner that is hosted here.
    pub fn submit(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), CompressError> {
        let sending = if self.is_flush() { Sending::Flush } else { Sending::Compressed };
        self.submit_by(learner, layer, |compressor| compressor.compress_layer(layer, gradient, sending))
    }

    /// Takes what was selected from one layer's gradient elsewhere.
    pub(crate) fn submit_selection(
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
        let learner = self.learner(learner).ok_or_else(unknown)?;
        if !learner.compressor.is_open() {
            learner.traffic = Traffic { layers: vec![LayerTraffic::default(); layers], ..Traffic::default() };
        }
        compress(&mut learner.compressor)?;
        let mut groups = self.groups[..self.in_use].iter_mut();
        if let Some(group) = groups.find(|group| group.layers.contains(&layer)) {
            group.missing -= 1;
        }
        Ok(())
    }

    /// Returns whether all gradients of a group have been submitted.
    pub(crate) fn is_submitted(&self, group: usize) -> bool {
        self.groups[group].missing == 0
    }

    /// Returns the names of parameters of which some gradient has not been submitted.
    pub(crate) fn not_submitted(&self) -> Vec<String> {
        let submitted =
            |layer: usize| self.hosted.iter().all(|learner| learner.compressor.packet(layer).is_some());
        let missing = (0..self.layout.len()).filter(|&layer| !submitted(layer));
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

    /// Returns what a round of a group works with.
    fn parts(&mut self, group: usize, round: usize) -> (Context<'_>, &mut dyn Rounds, &mut [Learner]) {
        let flush = self.is_flush();
        let Self { layout, options, learners, hosted, groups, step, .. } = self;
        let Group { layers, rounds, .. } = &mut groups[group];
        let context = Context {
            layout,
            options: *options,
            learners: *learners,
            step: *step,
            flush,
            group: group as u32,
            layers,
            round,
        };
        (context, rounds.as_mut(), hosted)
    }

    /// Returns what the learners that are hosted here send in a round.
    ///
    /// # Panics
    /// If some gradient of the group has not been submitted.
    pub fn outgoing(&mut self, group: usize, round: usize) -> Messages {
        assert!(self.is_submitted(group), "all gradients of a group must be given before its first round");
        let known_non_finite = self.non_finite.is_some();
        let (context, rounds, hosted) = self.parts(group, round);
        let flag = |learner: &Learner| {
            let is_bad = |layer: &usize| learner.compressor.layer_statistics(*layer).bad_bins > 0;
            if learner.fault.is_some() {
                Flag::Failed
            } else if known_non_finite || context.layers.iter().any(is_bad) {
                Flag::NonFinite
            } else {
                Flag::Good
            }
        };
        let mut message = |learner: &mut Learner, flag: Flag, receiver: Option<usize>| {
            // What goes to all goes to oneself, too.
            let (sender, to) = (learner.number, receiver.unwrap_or(learner.number));
            let message = context.seal(flag, sender, receiver, |message| {
                if flag == Flag::Good || !context.has_envelope() {
                    rounds.send(&context, learner, to, message);
                }
            });
            let copies = context.collective().copies(sender, to, context.learners);
            learner.traffic.sent += (copies * message.len()) as u64;
            message
        };
        match context.collective() {
            Collective::AllGather => {
                let all_gather = |learner: &mut Learner| Arc::new(message(learner, flag(learner), None));
                Messages::AllGather(hosted.iter_mut().map(all_gather).collect())
            }
            Collective::AllToAll => {
                let all_to_all = |learner: &mut Learner| {
                    let flag = flag(learner);
                    (0..context.learners).map(|receiver| message(learner, flag, Some(receiver))).collect()
                };
                Messages::AllToAll(hosted.iter_mut().map(all_to_all).collect())
            }
        }
    }

    /// Takes what came of a round. What is wrong with its messages comes out in the verdict; an error is that there are not
    /// as many as there should be, after which learners cannot go on.
    pub fn incoming(
        &mut self,
        group: usize,
        round: usize,
        messages: &Messages,
    ) -> Result<(), TransportError> {
        let mut non_finite = self.non_finite;
        let (context, rounds, hosted) = self.parts(group, round);
        match (context.collective(), messages) {
            (Collective::AllGather, Messages::AllGather(_)) => messages.check(context.learners, 0)?,
            (Collective::AllToAll, Messages::AllToAll(_)) => {
                messages.check(hosted.len(), context.learners)?
            }
            _ => return Err(TransportError::OutOfStep),
        }
        match messages {
            Messages::AllGather(messages) => {
                let messages: Vec<&[u8]> = messages.iter().map(|message| message.as_slice()).collect();
                hosted.iter_mut().for_each(|learner| learner.count_received(&messages));
                let mut receive = || {
                    let (contents, bad) = context.open_all(&messages, None)?;
                    non_finite = non_finite.or(bad);
                    if non_finite.is_none() {
                        non_finite = rounds.receive_all(&context, hosted, &contents)?;
                    }
                    Ok(())
                };
                if let Err(fault) = receive() {
                    hosted.iter_mut().for_each(|learner| learner.refuse(&fault));
                }
            }
            Messages::AllToAll(messages) => {
                let known_before = non_finite.is_some();
                for (learner, messages) in hosted.iter_mut().zip(messages) {
                    let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
                    learner.count_received(&messages);
                    let mut receive = || {
                        let (contents, bad) = context.open_all(&messages, Some(learner.number))?;
                        non_finite = non_finite.or(bad);
                        if bad.is_none() && !known_before {
                            rounds.receive(&context, learner, &contents)?;
                        }
                        Ok(())
                    };
                    if let Err(fault) = receive() {
                        learner.refuse(&fault);
                    }
                }
            }
        }
        self.non_finite = non_finite;
        Ok(())
    }

    /// Writes the averaged gradient of a group whose rounds are over, a slice for each of its layers in their order. Call it
    /// only while [`Protocol::is_good`].
    ///
    /// # Panics
    /// If there are not as many slices as layers.
    pub fn write(&mut self, group: usize, output: &mut [&mut [f32]]) {
        assert_eq!(output.len(), self.groups[group].layers.len(), "a slice for each layer of the group");
        let last = self.rounds() - 1;
        let (context, rounds, _) = self.parts(group, last);
        rounds.write(&context, output);
    }

    /// Returns whether, as far as is known here, the step will be averaged.
    pub(crate) fn is_good(&self) -> bool {
        self.non_finite.is_none() && self.hosted.iter().all(|learner| learner.fault.is_none())
    }

    /// Drops the step on all learners, because the averaged gradient cannot be used. Call it before the verdict, which says so.
    pub(crate) fn reject_average(&mut self) {
        // All learners find the same, so the first is named.
        self.non_finite.get_or_insert(0);
    }

    fn verdict_context(&self) -> Context<'_> {
        Context::verdict(&self.layout, self.options, self.learners, self.step)
    }

    /// Returns what each learner that is hosted here says of the step: a message to all, empty but for its envelope if it has
    /// refused nothing.
    pub fn verdict(&mut self) -> Vec<Vec<u8>> {
        let context = self.verdict_context();
        let flag = if self.non_finite.is_some() { Flag::NonFinite } else { Flag::Good };
        let verdict = |learner: &Learner| {
            context.seal(flag, learner.number, None, |message| {
                if let Some(fault) = &learner.fault {
                    message.push(if fault.cause == Cause::Failed { SECONDARY } else { PRIMARY });
                    message.extend_from_slice(&(fault.sender as u32).to_le_bytes());
                    message.extend_from_slice(fault.cause.to_string().as_bytes());
                }
            })
        };
        let verdicts: Vec<_> = self.hosted.iter().map(verdict).collect();
        let copies = self.learners as u64 - 1;
        for (learner, verdict) in self.hosted.iter_mut().zip(&verdicts) {
            learner.traffic.sent += copies * verdict.len() as u64;
        }
        verdicts
    }

    /// Ends the step as all learners' verdicts say. The output, a slice for each layer, is written only if the gradient was
    /// averaged. After [`ExchangeError::Verdict`] and [`ExchangeError::Transport`] learners cannot go on; after other errors
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

    /// The same where `write` writes the output, or it has been written already.
    pub(crate) fn conclude_with(
        &mut self,
        verdicts: &[Arc<Vec<u8>>],
        write: impl FnOnce(&mut Self),
    ) -> Result<Outcome, ExchangeError> {
        let messages: Vec<&[u8]> = verdicts.iter().map(|verdict| verdict.as_slice()).collect();
        self.hosted.iter_mut().for_each(|learner| learner.count_received(&messages));
        match self.judge(&messages) {
            Err(error) => {
                self.rollback();
                return Err(error);
            }
            Ok(Some(learner)) => {
                self.rollback();
                return Ok(Outcome::NonFinite { learner });
            }
            Ok(None) => write(self),
        }
        self.hosted.iter_mut().try_for_each(Learner::commit)?;
        self.begin_step(self.step + 1, Sending::Compressed);
        Ok(Outcome::Averaged)
    }

    /// Ends the step without using it. Where learners cannot agree on that, none of them can go on.
    pub fn rollback(&mut self) {
        self.hosted.iter_mut().for_each(Learner::rollback);
        self.begin_step(self.step + 1, Sending::Compressed);
    }

    /// Returns the first learner that knows of a gradient that is not finite, if any does. If messages were refused that is an
    /// error: the first that is not just a consequence of another.
    fn judge(&self, verdicts: &[&[u8]]) -> Result<Option<usize>, ExchangeError> {
        let step = self.step;
        if verdicts.len() != self.learners {
            let source = TransportError::Messages { expected: self.learners, actual: verdicts.len() };
            return Err(ExchangeError::Transport { step, source });
        }
        let (mut refused, mut non_finite) = (Vec::new(), self.non_finite);
        for (learner, verdict) in verdicts.iter().enumerate() {
            let opened = self.verdict_context().open(verdict, learner, None);
            let (flag, contents) =
                opened.map_err(|source| ExchangeError::Verdict { step, learner, source })?;
            if flag == Flag::NonFinite {
                non_finite.get_or_insert(learner);
            }
            if !contents.is_empty() {
                refused.push((learner, contents));
            }
        }
        let primary = refused.iter().find(|(_, contents)| contents[0] == PRIMARY);
        let Some(&(receiver, contents)) = primary.or(refused.first()) else { return Ok(non_finite) };
        let (sender, reason) = contents[1..].split_first_chunk().unwrap_or((&[u8::MAX; 4], &[]));
        let (sender, reason) =
            (u32::from_le_bytes(*sender) as usize, String::from_utf8_lossy(reason).into_owned());
        Err(ExchangeError::Message { step, sender, receiver, reason })
    }
}

/// Marks a verdict whose learner has refused a message.
const PRIMARY: u8 = 1;
/// Marks a verdict whose learner has refused a message because the sender had failed before.
const SECONDARY: u8 = 2;

/// Drivers may share a protocol between threads, as bindings to other languages do.
const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Protocol>();
};
