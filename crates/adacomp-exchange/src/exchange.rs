//! A whole step: gradients in, the averaged gradient out.

use crate::agreement;
use crate::error::{ExchangeError, TransportError};
use crate::options::Options;
use crate::protocol::Protocol;
use crate::traffic::Traffic;
use crate::transport::{Incoming, Outgoing, Transport};
use adacomp::{CompressError, Gradient, Layout, Outcome, Selected, Sending};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Whether an averaged gradient that has been written may have to be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writing {
    /// Never, so the learners' verdicts can be on their way meanwhile.
    Sure,
    /// It may not fit the format that it is wanted in: see [`Protocol::reject_average`].
    MayBeRefused,
}

/// Where the time of a step went.
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
/// A step is begun by the first gradient that is given, and over when [`Exchange::finish`] returns. Layers can be given as
/// the backward pass produces them; the result is the same to the bit.
pub struct Exchange<C> {
    transport: C,
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

impl<C: Transport> Exchange<C> {
    /// Connects the learners. All must have been started with the same layout and options: if not, all get an error that
    /// says which learner differs and in what.
    pub fn new(
        mut transport: C,
        layout: impl Into<Arc<Layout>>,
        options: impl Into<Options>,
    ) -> Result<Self, ExchangeError> {
        let (learners, hosted) = (transport.learners(), transport.hosted());
        let protocol = Protocol::new(layout, options, learners, hosted.clone())?;
        let failed = |source| ExchangeError::Transport { step: 0, source };
        let texts = transport.all_gather(vec![protocol.description(); hosted.len()]).map_err(failed)?;
        agreement::check(&texts)?;
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

    /// The learners and their residuals.
    pub fn protocol(&mut self) -> &mut Protocol {
        &mut self.protocol
    }

    /// The transport, for another use. The residuals go.
    pub fn into_transport(self) -> C {
        self.transport
    }

    /// The transport: for bytes that are not gradients, between steps.
    pub fn transport(&mut self) -> &mut C {
        &mut self.transport
    }

    /// The bytes of a learner that is hosted here in the last step.
    pub fn traffic(&self, learner: usize) -> Option<&Traffic> {
        self.protocol.traffic(learner)
    }

    /// Where the time of the last step went.
    pub fn seconds(&self) -> Seconds {
        self.seconds
    }

    /// Has the next step send flush, in f32, or what is selected. All learners must do the same.
    pub fn set_sending(&mut self, sending: Sending) {
        self.protocol.set_sending(sending);
    }

    /// Begins a group of layers: see [`Protocol::begin_group`].
    ///
    /// # Panics
    /// As it does.
    pub fn begin_group(&mut self, layers: &[usize]) -> Result<usize, ExchangeError> {
        self.check_alive()?;
        Ok(self.protocol.begin_group(layers)?)
    }

    /// Gives one layer's gradient of a learner that is hosted here. Once all learners that are hosted here have given a
    /// group of layers, it is on its way.
    pub fn submit(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), ExchangeError> {
        self.submit_by(|protocol| protocol.submit(learner, layer, gradient))
    }

    /// The same for a gradient that is elsewhere: see [`adacomp::Compressor::take_selection`].
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
        give: impl FnOnce(&mut Protocol) -> Result<(), CompressError>,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        let start = Instant::now();
        give(&mut self.protocol)?;
        self.spent.compress += start.elapsed().as_secs_f64();
        while self.started < self.protocol.groups() && self.protocol.is_submitted(self.started) {
            self.start_round(self.started, 0)?;
            self.started += 1;
        }
        Ok(())
    }

    /// A whole step: for each learner that is hosted here the gradients of all layers.
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

    /// Before anything is compressed, because a step that is half given cannot be taken back without the other learners.
    fn check_gradients(&self, gradients: &[Vec<Gradient<'_>>]) -> Result<(), ExchangeError> {
        let wrong = |what: String, expected, actual| Err(ExchangeError::Gradients { what, expected, actual });
        let (hosted, layout) = (self.transport.hosted(), self.protocol.layout());
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

    /// The same for drivers that write the averaged gradient themselves: `write` is called with the number of each group as soon
    /// as its rounds are over, while others are still on their way, and writes it with [`Protocol::write`]. It is not called
    /// if the step is known to be dropped, and what it has written counts only if the gradient was averaged.
    ///
    /// # Panics
    /// If the average is refused although it was sure to be used: others have been told that it is.
    pub fn finish_with(
        &mut self,
        writing: Writing,
        mut write: impl FnMut(&mut Protocol, usize),
    ) -> Result<Outcome, ExchangeError> {
        let last = self.protocol.groups().checked_sub(1);
        let mut told = false;
        self.finish_rounds(|exchange, group| {
            if writing == Writing::Sure && Some(group) == last {
                exchange.start_verdict()?;
                told = true;
            }
            if exchange.protocol.is_good() {
                let start = Instant::now();
                write(&mut exchange.protocol, group);
                exchange.spent.decode += start.elapsed().as_secs_f64();
                let refused = !exchange.protocol.is_good();
                assert!(
                    !(refused && writing == Writing::Sure),
                    "an average that was sure to be used is refused"
                );
            }
            Ok(())
        })?;
        if !told {
            self.start_verdict()?;
        }
        self.end(|protocol, verdicts| protocol.conclude_written(verdicts))
    }

    /// All rounds of all groups; `ended` is called with each group whose last is over, in their order.
    fn finish_rounds(
        &mut self,
        mut ended: impl FnMut(&mut Self, usize) -> Result<(), ExchangeError>,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        if self.started < self.protocol.groups() {
            return Err(CompressError::Missing { parameters: self.protocol.not_submitted() }.into());
        }
        while let Some((group, round)) = self.under_way.pop_front() {
            let incoming = self.wait()?;
            let start = Instant::now();
            let taken = self.protocol.incoming(group, round, &incoming);
            self.spent.decode += start.elapsed().as_secs_f64();
            taken.map_err(|error| self.break_off(error))?;
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
        let verdict = Outgoing::AllGather(self.protocol.verdict());
        self.start(verdict)
    }

    /// Takes all learners' verdicts.
    fn end(
        &mut self,
        conclude: impl FnOnce(&mut Protocol, &[Arc<Vec<u8>>]) -> Result<Outcome, ExchangeError>,
    ) -> Result<Outcome, ExchangeError> {
        let Incoming::AllGather(verdicts) = self.wait()? else {
            return Err(self.break_off(TransportError::OutOfStep));
        };
        let start = Instant::now();
        let outcome = conclude(&mut self.protocol, &verdicts);
        self.spent.decode += start.elapsed().as_secs_f64();
        self.seconds = std::mem::take(&mut self.spent);
        if let Err(error @ (ExchangeError::Verdict { .. } | ExchangeError::Transport { .. })) = &outcome {
            let source = TransportError::Transport { transport: "exchange", reason: error.to_string() };
            self.broken = Some((self.protocol.step(), source));
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

    fn start(&mut self, outgoing: Outgoing) -> Result<(), ExchangeError> {
        self.transport.start(outgoing).map_err(|error| self.break_off(error))
    }

    fn wait(&mut self) -> Result<Incoming, ExchangeError> {
        let start = Instant::now();
        let incoming = self.transport.finish();
        self.spent.wait += start.elapsed().as_secs_f64();
        incoming.map_err(|error| self.break_off(error))
    }

    /// The learners have lost each other: what was selected goes back into the residuals, and nothing more can be done here.
    fn break_off(&mut self, source: TransportError) -> ExchangeError {
        let step = self.protocol.step();
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
}
