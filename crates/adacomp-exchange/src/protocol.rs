//! The messages of a step, without I/O: which bytes go to whom, and what becomes of those that come.
//!
//! For every group of layers, round by round, [`Exchange::outgoing`] returns what is to be sent and [`Exchange::incoming`] takes
//! what came; at the end all learners' [`Exchange::verdict`]s go to all, and [`Exchange::conclude`] ends the step in the same way
//! on every learner.
//!
//! Whatever happens, every learner takes part in the same rounds: one that has refused a message, or whose gradient is not
//! finite, sends envelopes that say so.

use crate::error::{Cause, ExchangeError, TransportError};
use crate::exchange::{Exchange, GroupAverage};
use crate::message::{Context, Flag, layers_checksum};
use crate::strategy::{Collective, Fault, Rounds};
use crate::transport::Messages;
use adacomp::{CompressError, Compressor, Outcome, Sending};
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
    /// What it keeps as an owner with `sharded`: the residuals of its shards of averaged gradients.
    pub(crate) owner: Option<Compressor>,
    /// Values of the owner's residual that the step changes, as they were before: for each layer, element and value. A step
    /// that is dropped returns what came to an owner to its senders, so it must not stay here.
    pub(crate) owner_before: Vec<(usize, Vec<(u32, f32)>)>,
    pub(crate) traffic: Traffic,
    /// What it has refused in this step.
    pub(crate) fault: Option<Fault>,
    /// Whether, as an owner, it found that the sum of all learners' gradients is not finite. Others learn it from its next
    /// message, and so does it, so that all name the same learner.
    pub(crate) overflow: bool,
}

impl Learner {
    /// Returns what compresses for the learner, and for it as an owner.
    pub(crate) fn compressors(&mut self) -> impl Iterator<Item = &mut Compressor> {
        [Some(&mut self.compressor), self.owner.as_mut()].into_iter().flatten()
    }

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
        let mut open = self.compressors().filter(|compressor| compressor.is_open());
        open.try_for_each(Compressor::commit)
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
pub(crate) struct Group {
    pub(crate) layers: Vec<usize>,
    layers_checksum: u32,
    rounds: Box<dyn Rounds>,
    /// Gradients that are still to be submitted, of all learners that are hosted here.
    pub(crate) missing: usize,
}

/// How a step goes on. Tests, benchmarks and fuzzing drive it by hand.
#[doc(hidden)]
impl<T> Exchange<T> {
    /// Returns the number of rounds of each group.
    pub fn rounds(&self) -> usize {
        self.options.strategy.rounds().len()
    }

    pub(crate) fn push_group(&mut self, layers: &[usize]) -> usize {
        let number = self.in_use;
        // Groups are mostly those of the step before, whose memory is used again.
        if self.groups.get(number).is_none_or(|group| group.layers != layers) {
            self.groups.truncate(number);
            let rounds = self.options.strategy.group();
            let layers_checksum = layers_checksum(layers);
            self.groups.push(Group { layers: layers.to_vec(), layers_checksum, rounds, missing: 0 });
        }
        self.groups[number].missing = layers.len() * self.hosted.len();
        layers.iter().for_each(|&layer| self.group_of[layer] = Some(number));
        self.in_use += 1;
        number
    }

    /// Starts the groups of a step anew.
    pub(crate) fn remove_groups(&mut self) {
        self.in_use = 0;
        self.group_of.clear();
        self.group_of.resize(self.layout.len(), None);
    }

    pub(crate) fn begin_step(&mut self, step: u64, sending: Sending) {
        (self.step, self.sending, self.non_finite) = (step, sending, None);
        self.hosted.iter_mut().for_each(|learner| (learner.fault, learner.overflow) = (None, false));
        self.remove_groups();
        if !self.as_given && !self.layout.is_empty() {
            self.push_group(&Vec::from_iter(0..self.layout.len()));
        }
    }

    /// Returns what the step that is going on sends.
    pub(crate) fn sending(&self) -> Sending {
        if self.options.strategy.is_dense() { Sending::Flush } else { self.sending }
    }

    /// Returns whether a gradient of this step has been submitted.
    pub(crate) fn is_open(&self) -> bool {
        self.hosted.iter().any(|learner| learner.compressor.is_open())
    }

    /// Returns the group that a layer has in this step.
    pub(crate) fn group(&self, layer: usize) -> Result<usize, ExchangeError> {
        let count = self.layout.len();
        let group = *self.group_of.get(layer).ok_or(CompressError::Layer { layer, count })?;
        group.ok_or_else(|| ExchangeError::NoGroup { parameter: self.layout[layer].name().to_owned() })
    }

    /// Takes one layer of a learner that is hosted here, as `compress` compresses it.
    pub(crate) fn take(
        &mut self,
        learner: usize,
        layer: usize,
        compress: impl FnOnce(&mut Compressor) -> Result<(), CompressError>,
    ) -> Result<(), ExchangeError> {
        let (group, layers) = (self.group(layer)?, self.layout.len());
        let learner = self.learner(learner).ok_or(ExchangeError::Learner { learner })?;
        if !learner.compressor.is_open() {
            learner.traffic = Traffic { layers: vec![LayerTraffic::default(); layers], ..Traffic::default() };
        }
        compress(&mut learner.compressor)?;
        self.groups[group].missing -= 1;
        Ok(())
    }

    /// Returns the names of parameters of which some gradient has not been submitted.
    pub(crate) fn not_submitted(&self) -> Vec<String> {
        let submitted =
            |layer: usize| self.hosted.iter().all(|learner| learner.compressor.packet(layer).is_some());
        let missing = self.groups().flatten().filter(|layer| !submitted(**layer));
        missing.map(|&layer| self.layout[layer].name().to_owned()).collect()
    }

    /// Returns what a round of a group works with.
    fn parts(&mut self, group: usize, round: usize) -> (Context<'_>, &mut dyn Rounds, &mut [Learner]) {
        let flush = self.sending() == Sending::Flush;
        let Self { layout, options, learners, hosted, groups, step, .. } = self;
        let Group { layers, layers_checksum, rounds, .. } = &mut groups[group];
        let context = Context {
            layout,
            options: *options,
            learners: *learners,
            step: *step,
            flush,
            group,
            layers,
            layers_checksum: *layers_checksum,
            round,
        };
        (context, rounds.as_mut(), hosted)
    }

    /// Returns what the learners that are hosted here send in a round.
    ///
    /// # Panics
    /// If some gradient of the group has not been submitted.
    pub fn outgoing(&mut self, group: usize, round: usize) -> Messages {
        assert!(
            self.groups[group].missing == 0,
            "all gradients of a group must be given before its first round"
        );
        let known_non_finite = self.non_finite.is_some();
        let (context, rounds, hosted) = self.parts(group, round);
        let flag = |learner: &Learner| {
            let is_bad = |layer: &usize| learner.compressor.layer_statistics(*layer).bad_bins > 0;
            if learner.fault.is_some() {
                Flag::Failed
            } else if known_non_finite || learner.overflow || context.layers.iter().any(is_bad) {
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
        let known_before = non_finite.is_some();
        let (context, rounds, hosted) = self.parts(group, round);
        let collective = context.collective();
        // What is sent to all is taken once for all learners that are hosted here, the rest by each.
        let (together, rows): (usize, Vec<Vec<&[u8]>>) = match (collective, messages) {
            (Collective::AllGather, Messages::AllGather(all)) => {
                messages.check(context.learners, 0)?;
                (hosted.len(), vec![all.iter().map(|message| message.as_slice()).collect()])
            }
            (Collective::AllToAll, Messages::AllToAll(rows)) => {
                messages.check(hosted.len(), context.learners)?;
                (1, rows.iter().map(|row| row.iter().map(Vec::as_slice).collect()).collect())
            }
            _ => return Err(TransportError::OutOfStep),
        };
        for (learners, messages) in hosted.chunks_mut(together).zip(rows) {
            learners.iter_mut().for_each(|learner| learner.count_received(&messages));
            let mut receive = || {
                let receiver = (collective == Collective::AllToAll).then_some(learners[0].number);
                let (contents, bad) = context.open_all(&messages, receiver)?;
                non_finite = non_finite.or(bad);
                if bad.is_none() && !known_before {
                    non_finite = non_finite.or(rounds.receive(&context, learners, &contents)?);
                }
                Ok(())
            };
            if let Err(fault) = receive() {
                learners.iter_mut().for_each(|learner| learner.refuse(&fault));
            }
        }
        self.non_finite = non_finite;
        Ok(())
    }

    /// Returns the averaged gradient of a group whose rounds are over. Call it only while [`Exchange::is_good`].
    pub fn average(&mut self, group: usize) -> GroupAverage<'_> {
        let (context, rounds, _) = self.parts(group, self.rounds() - 1);
        GroupAverage { context, rounds }
    }

    /// Returns whether, as far as is known here, the step will be averaged.
    pub(crate) fn is_good(&self) -> bool {
        self.non_finite.is_none() && self.hosted.iter().all(|learner| learner.fault.is_none())
    }

    /// Returns what each learner that is hosted here says of the step: a message to all, empty but for its envelope if it has
    /// refused nothing.
    pub fn verdict(&mut self) -> Vec<Vec<u8>> {
        let Self { layout, options, learners, hosted, step, .. } = self;
        let context = Context::verdict(layout, *options, *learners, *step);
        let flag = if self.non_finite.is_some() { Flag::NonFinite } else { Flag::Good };
        let verdict = |learner: &mut Learner| {
            let verdict = context.seal(flag, learner.number, None, |message| {
                if let Some(fault) = &learner.fault {
                    message.push(if fault.cause == Cause::Failed { SECONDARY } else { PRIMARY });
                    message.extend_from_slice(&(fault.sender as u32).to_le_bytes());
                    message.extend_from_slice(fault.cause.to_string().as_bytes());
                }
            });
            learner.traffic.sent += ((context.learners - 1) * verdict.len()) as u64;
            verdict
        };
        hosted.iter_mut().map(verdict).collect()
    }

    /// Ends the step as all learners' verdicts say. The output, a slice for each layer, is written only if the gradient was
    /// averaged; without it, it has been written already. After [`ExchangeError::Verdict`] and [`ExchangeError::Transport`]
    /// learners cannot go on; after other errors they can.
    pub fn conclude(
        &mut self,
        verdicts: &[Arc<Vec<u8>>],
        output: Option<&mut [&mut [f32]]>,
    ) -> Result<Outcome, ExchangeError> {
        let messages: Vec<&[u8]> = verdicts.iter().map(|verdict| verdict.as_slice()).collect();
        self.hosted.iter_mut().for_each(|learner| learner.count_received(&messages));
        let outcome = self.judge(&messages);
        if !matches!(outcome, Ok(Outcome::Averaged)) {
            self.rollback();
            return outcome;
        }
        if let Some(output) = output {
            for group in 0..self.in_use {
                let average = self.average(group);
                let slices = output.iter_mut().enumerate();
                let slices = slices.filter(|(layer, _)| average.context.layers.contains(layer));
                let mut slices: Vec<&mut [f32]> = slices.map(|(_, slice)| &mut **slice).collect();
                average.write(&mut slices);
            }
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

    /// Returns how the step ends. If messages were refused that is an error: the first that is not just a consequence of another.
    fn judge(&self, verdicts: &[&[u8]]) -> Result<Outcome, ExchangeError> {
        let step = self.step;
        if verdicts.len() != self.learners {
            let source = TransportError::Messages { expected: self.learners, actual: verdicts.len() };
            return Err(ExchangeError::Transport { step, source });
        }
        let context = Context::verdict(&self.layout, self.options, self.learners, step);
        let (mut refused, mut non_finite) = (Vec::new(), self.non_finite);
        for (learner, verdict) in verdicts.iter().enumerate() {
            let opened = context.open(verdict, learner, None);
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
        let Some(&(receiver, contents)) = primary.or(refused.first()) else {
            return Ok(non_finite.map_or(Outcome::Averaged, |learner| Outcome::NonFinite { learner }));
        };
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

/// Bindings to other languages share an exchange between threads.
const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Exchange<()>>();
};
