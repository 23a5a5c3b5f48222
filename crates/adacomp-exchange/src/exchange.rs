//! A step over a transport: gradients in, the averaged gradient out.

use crate::error::{ExchangeError, TransportError};
use crate::message::{check_agreement, describe};
use crate::protocol::{Protocol, Traffic};
use crate::state::LearnerState;
use crate::strategy::Strategy;
use crate::transport::{Messages, Transport};
use adacomp::{Codec, CompressError, Compressor, Gradient, Layout, Outcome, Selected, Sending};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

/// How to exchange. Any [`Strategy`] converts into the options with defaults for the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The strategy.
    pub strategy: Strategy,
    /// The codec of frames; only `gather` sends frames.
    pub codec: Codec,
    /// The number of threads on which each learner compresses its large tensors. The result is the same to the bit.
    pub threads: usize,
    /// With `sharded`: by what the length of bins is divided for owners. They then send about that many times more, and
    /// keep less waiting.
    pub owner_divisor: NonZeroU32,
}

impl From<Strategy> for Options {
    fn from(strategy: Strategy) -> Self {
        Self { strategy, codec: Codec::default(), threads: 1, owner_divisor: NonZeroU32::MIN }
    }
}

/// When a learner sends its verdict in [`Exchange::finish_with`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendVerdict {
    /// Before the last group is written, so that verdicts travel meanwhile. The average must then be used.
    BeforeWriting,
    /// After all groups are written, so that the average can still be refused: it may not fit the format that it is wanted in.
    AfterWriting,
}

/// The averaged gradient of a group whose rounds are over.
pub struct GroupAverage<'a> {
    protocol: &'a mut Protocol,
    group: usize,
}

impl GroupAverage<'_> {
    /// Returns the number of the group in its step.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Writes it into a slice for each layer of the group, by ascending layer.
    ///
    /// # Panics
    /// If there are not as many slices as layers.
    pub fn write(self, output: &mut [&mut [f32]]) {
        self.protocol.write(self.group, output);
    }
}

/// Where the time of a step went, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Seconds {
    /// Compressing gradients.
    pub compress: f64,
    /// Writing messages.
    pub encode: f64,
    /// Waiting for the transport.
    pub wait: f64,
    /// Reading messages and writing the averaged gradient.
    pub decode: f64,
}

/// Learners that are hosted here, over a transport.
///
/// A step is begun by the first gradient that is submitted, and over when [`Exchange::finish`] returns. Layers can be submitted
/// as the backward pass produces them; the result is the same to the bit.
pub struct Exchange<T> {
    transport: T,
    protocol: Protocol,
    /// Rounds under way: group and round, oldest first.
    under_way: VecDeque<(usize, usize)>,
    /// Groups whose first round has been started.
    started: usize,
    /// Of the step that is going on.
    spent: Seconds,
    seconds: Seconds,
    /// Why learners cannot go on, and since which step.
    broken: Option<(u64, TransportError)>,
}

impl<T: Transport> Exchange<T> {
    /// Connects the learners. All must have been started with the same layout and options (but for threads): if not, all get an
    /// error that says which learner differs and in what.
    pub fn new(
        mut transport: T,
        layout: impl Into<Arc<Layout>>,
        options: impl Into<Options>,
    ) -> Result<Self, ExchangeError> {
        let (layout, options) = (layout.into(), options.into());
        let (learners, hosted) = (transport.learners(), transport.hosted());
        let description = describe(&layout, options, learners);
        let protocol = Protocol::new(layout, options, learners, hosted.clone())?;
        let failed = |source| ExchangeError::Transport { step: 0, source };
        let texts = transport.all_gather(vec![description; hosted.len()]).map_err(failed)?;
        check_agreement(&texts)?;
        Ok(Self {
            transport,
            protocol,
            under_way: VecDeque::new(),
            started: 0,
            spent: Seconds::default(),
            seconds: Seconds::default(),
            broken: None,
        })
    }

    /// Returns the transport: for bytes that are not gradients, between steps.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Returns the transport for another use. The residuals are dropped.
    pub fn into_transport(self) -> T {
        self.transport
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.protocol.layout
    }

    /// Returns the options.
    pub fn options(&self) -> Options {
        self.protocol.options
    }

    /// Returns the number of the step that is next or going on.
    pub fn step(&self) -> u64 {
        self.protocol.step()
    }

    /// Returns the bytes of a learner that is hosted here in the last step.
    pub fn traffic(&self, learner: usize) -> Option<&Traffic> {
        self.protocol.traffic(learner)
    }

    /// Returns where the time of the last step went.
    pub fn seconds(&self) -> Seconds {
        self.seconds
    }

    /// Returns the compressor of a learner that is hosted here: its residuals and statistics.
    pub fn compressor(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.protocol.compressor(learner)
    }

    /// Returns what a learner that is hosted here keeps as an owner with `sharded`. Its layers are the learner's shares.
    pub fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.protocol.owner(learner)
    }

    /// Sets what the next step sends: what is selected, or all of it in f32. All learners must do the same.
    ///
    /// # Panics
    /// If a gradient has been submitted already.
    pub fn set_sending(&mut self, sending: Sending) {
        self.protocol.set_sending(sending);
    }

    /// Makes layers whose gradient is zero everywhere send nothing from now on: see [`Compressor::set_skip_unused`].
    pub fn set_skip_unused(&mut self, skip: bool) {
        self.protocol.set_skip_unused(skip);
    }

    /// Begins a group of these layers, in ascending order, as the next group of this step, and returns its number. Its first
    /// round starts as soon as all its gradients have been submitted.
    ///
    /// Without this, all layers are one group. After the first call every step has the groups that are begun in it, in the same
    /// order on all learners; these may change from step to step, and need not have all layers.
    ///
    /// # Panics
    /// If a gradient was submitted before the first group.
    pub fn begin_group(&mut self, layers: &[usize]) -> Result<usize, ExchangeError> {
        self.check_alive()?;
        Ok(self.protocol.begin_group(layers)?)
    }

    /// Returns the layers of each group of this step.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &[usize]> {
        self.protocol.groups()
    }

    /// Compresses one layer's gradient of a learner that is hosted here. Once all learners that are hosted here have submitted
    /// all layers of a group, its first round starts.
    pub fn submit(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), ExchangeError> {
        self.submit_by(|protocol| protocol.submit(learner, layer, gradient))
    }

    /// Submits what was selected from one layer's gradient on another device: see [`Compressor::take_selection`].
    pub fn submit_selection(
        &mut self,
        learner: usize,
        layer: usize,
        maxima: &[f32],
        selected: &[Selected],
    ) -> Result<(), ExchangeError> {
        self.submit_by(|protocol| protocol.submit_selection(learner, layer, maxima, selected))
    }

    fn submit_by(
        &mut self,
        submit: impl FnOnce(&mut Protocol) -> Result<(), CompressError>,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        let start = Instant::now();
        submit(&mut self.protocol)?;
        self.spent.compress += start.elapsed().as_secs_f64();
        while self.started < self.groups().len() && self.protocol.is_submitted(self.started) {
            self.start_round(self.started, 0)?;
            self.started += 1;
        }
        Ok(())
    }

    /// Runs a step: takes the gradients of all layers of each learner that is hosted here, and writes the averaged gradient into
    /// a slice for each layer.
    pub fn exchange(
        &mut self,
        gradients: &[Vec<Gradient<'_>>],
        output: &mut [&mut [f32]],
    ) -> Result<Outcome, ExchangeError> {
        self.check_gradients(gradients)?;
        self.protocol.check_output(output)?;
        for (learner, gradients) in self.transport.hosted().zip(gradients) {
            for (layer, gradient) in gradients.iter().enumerate().rev() {
                self.submit(learner, layer, *gradient)?;
            }
        }
        self.finish(output)
    }

    /// Checks before anything is compressed, because a step that is half submitted cannot be dropped without the other learners.
    fn check_gradients(&self, gradients: &[Vec<Gradient<'_>>]) -> Result<(), ExchangeError> {
        let wrong = |what: String, expected, actual| Err(ExchangeError::Gradients { what, expected, actual });
        let (hosted, layout) = (self.transport.hosted(), self.layout());
        if gradients.len() != hosted.len() {
            return wrong("of learners that are hosted here".to_owned(), hosted.len(), gradients.len());
        }
        for (learner, gradients) in hosted.zip(gradients) {
            if gradients.len() != layout.len() {
                return wrong(format!("of layers of learner {learner}"), layout.len(), gradients.len());
            }
            for (layer, gradient) in layout.layers().iter().zip(gradients) {
                if gradient.len() != layer.elements() {
                    let what = format!("of `{}` of learner {learner}", layer.name());
                    return wrong(what, layer.elements(), gradient.len());
                }
            }
        }
        Ok(())
    }

    /// Ends the step: waits for all learners, and writes the averaged gradient into `output`, a slice for each layer.
    pub fn finish(&mut self, output: &mut [&mut [f32]]) -> Result<Outcome, ExchangeError> {
        self.protocol.check_output(output)?;
        self.finish_rounds(|_, _| Ok(()))?;
        self.start_verdict()?;
        self.end(|protocol, verdicts| protocol.conclude(verdicts, output))
    }

    /// Ends the step for drivers that write the averaged gradient themselves: `write` is called for each group as soon as its
    /// rounds are over, while others are still on their way, and returns whether the average can be used; if not, all learners
    /// drop the step. It is not called if the step is known to be dropped, and what it has written counts only if the outcome
    /// is [`Outcome::Averaged`].
    ///
    /// # Panics
    /// If the average is refused although the verdict was to be sent before writing: others have been told that it is used.
    pub fn finish_with(
        &mut self,
        verdict: SendVerdict,
        mut write: impl FnMut(GroupAverage<'_>) -> bool,
    ) -> Result<Outcome, ExchangeError> {
        let last = self.groups().len().checked_sub(1);
        let early = verdict == SendVerdict::BeforeWriting;
        self.finish_rounds(|exchange, group| {
            if early && Some(group) == last {
                exchange.start_verdict()?;
            }
            if exchange.protocol.is_good() {
                let start = Instant::now();
                if !write(GroupAverage { protocol: &mut exchange.protocol, group }) {
                    assert!(!early, "an average that was sure to be used is refused");
                    exchange.protocol.reject_average();
                }
                exchange.spent.decode += start.elapsed().as_secs_f64();
            }
            Ok(())
        })?;
        if !early || last.is_none() {
            self.start_verdict()?;
        }
        self.end(|protocol, verdicts| protocol.conclude_with(verdicts, |_| ()))
    }

    /// Finishes all rounds of all groups, and calls `ended` with each group whose last round is over, in their order.
    fn finish_rounds(
        &mut self,
        mut ended: impl FnMut(&mut Self, usize) -> Result<(), ExchangeError>,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        if self.started < self.groups().len() {
            return Err(CompressError::Missing { parameters: self.protocol.not_submitted() }.into());
        }
        while let Some((group, round)) = self.under_way.pop_front() {
            let incoming = self.wait()?;
            let start = Instant::now();
            let taken = self.protocol.incoming(group, round, &incoming);
            self.spent.decode += start.elapsed().as_secs_f64();
            taken.map_err(|source| self.break_off(source))?;
            if round + 1 < self.protocol.rounds() {
                self.start_round(group, round + 1)?;
            } else {
                ended(self, group)?;
            }
        }
        self.started = 0;
        Ok(())
    }

    fn start_verdict(&mut self) -> Result<(), ExchangeError> {
        let verdicts = self.protocol.verdict();
        self.start(Messages::AllGather(verdicts.into_iter().map(Arc::new).collect()))
    }

    /// Takes all learners' verdicts.
    fn end(
        &mut self,
        conclude: impl FnOnce(&mut Protocol, &[Arc<Vec<u8>>]) -> Result<Outcome, ExchangeError>,
    ) -> Result<Outcome, ExchangeError> {
        let Messages::AllGather(verdicts) = self.wait()? else {
            return Err(self.break_off(TransportError::OutOfStep));
        };
        let start = Instant::now();
        let outcome = conclude(&mut self.protocol, &verdicts);
        self.spent.decode += start.elapsed().as_secs_f64();
        self.seconds = std::mem::take(&mut self.spent);
        if let Err(error @ (ExchangeError::Verdict { .. } | ExchangeError::Transport { .. })) = &outcome {
            let source = TransportError::Transport { transport: "exchange", reason: error.to_string() };
            self.broken = Some((self.step(), source));
        }
        outcome
    }

    fn start_round(&mut self, group: usize, round: usize) -> Result<(), ExchangeError> {
        let start = Instant::now();
        let outgoing = self.protocol.outgoing(group, round);
        self.spent.encode += start.elapsed().as_secs_f64();
        self.under_way.push_back((group, round));
        self.start(outgoing)
    }

    fn start(&mut self, outgoing: Messages) -> Result<(), ExchangeError> {
        self.transport.start(outgoing).map_err(|error| self.break_off(error))
    }

    fn wait(&mut self) -> Result<Messages, ExchangeError> {
        let start = Instant::now();
        let incoming = self.transport.finish();
        self.spent.wait += start.elapsed().as_secs_f64();
        incoming.map_err(|error| self.break_off(error))
    }

    /// Ends the exchange for good: what was selected goes back into the residuals, and nothing more can be done here.
    fn break_off(&mut self, source: TransportError) -> ExchangeError {
        let step = self.step();
        self.protocol.rollback();
        self.under_way.clear();
        self.broken = Some((step, source.clone()));
        ExchangeError::Transport { step, source }
    }

    fn check_alive(&self) -> Result<(), ExchangeError> {
        match &self.broken {
            Some((step, source)) => Err(ExchangeError::Transport { step: *step, source: source.clone() }),
            None => Ok(()),
        }
    }

    /// Returns what the learners that are hosted here keep, in their order.
    pub fn save(&mut self) -> Result<Vec<LearnerState>, ExchangeError> {
        self.protocol.save()
    }

    /// Takes over what was saved, and goes on with the step before which it was.
    ///
    /// `states` are those of all learners in their order, or of those that are hosted here if there are as many learners as
    /// before. With another number of learners, or another strategy, what owners kept is added to all learners' residuals: it is
    /// of the average, so that conserves it. All states are checked before anything is changed.
    pub fn load(&mut self, states: &[LearnerState]) -> Result<(), ExchangeError> {
        self.protocol.load(states)
    }

    /// Writes all that a learner has of a compressed layer, for a dense step by other means, such as an all-reduce that a
    /// framework has already: its gradient, its residual and, because the sum over learners will be divided by their number, that
    /// many times what it keeps as an owner. So nothing is lost when training goes from compressed to dense steps.
    ///
    /// Returns whether it is finite; if not, nothing is written. The step is open from then on, and [`Exchange::end_flush`]
    /// ends it. A layer that is always sent dense is an error.
    pub fn flush_layer(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
        output: &mut [f32],
    ) -> Result<bool, ExchangeError> {
        self.protocol.flush_layer(learner, layer, gradient, output)
    }

    /// Ends a step of [`Exchange::flush_layer`]: what has arrived everywhere leaves the residuals, otherwise it stays. All
    /// learners must do the same.
    pub fn end_flush(&mut self, arrived: bool) -> Result<(), ExchangeError> {
        self.protocol.end_flush(arrived)
    }

    /// Returns what a learner keeps of a layer between steps, such that the mean over learners is what is still missing of the
    /// average: its residual and, times the number of learners, what it keeps as an owner. None for a layer that is always
    /// sent dense.
    pub fn kept(&mut self, learner: usize, layer: usize) -> Option<Vec<f32>> {
        self.protocol.kept(learner, layer)
    }

    /// Returns whether a learner keeps anything of a layer, as a learner or as an owner.
    pub fn keeps(&mut self, learner: usize, layer: usize) -> bool {
        self.protocol.keeps(learner, layer)
    }
}
