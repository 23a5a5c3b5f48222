//! A step over a transport: gradients in, the averaged gradient out.

use crate::error::{ExchangeError, TransportError};
use crate::message::{Context, check_agreement, describe};
use crate::protocol::{Group, Learner, Traffic};
use crate::state::owner_layout;
use crate::strategy::{Rounds, Strategy};
use crate::transport::{Messages, Transport};
use adacomp::internal::{Output, check_ascending, check_output, is_clip};
use adacomp::{
    AverageError, Codec, CompressError, Compressor, Gradient, Layer, Layout, Outcome, Packet, Scale,
    Selected, Sending, Treatment,
};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// How to exchange. Any [`Strategy`] converts into the options with defaults for the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// The strategy.
    pub strategy: Strategy,
    /// The codec of frames; only `gather` sends frames.
    pub codec: Codec,
    /// The number of threads on which each learner compresses its large tensors, and with `gather` averages all learners' frames.
    /// The result is the same to the bit.
    pub threads: usize,
    /// With `sharded`: by what the length of bins is divided for owners. They then send about that many times more, and
    /// keep less waiting.
    pub owner_divisor: NonZeroU32,
    /// Bounds what one learner can do to the average: in each layer, no value that a learner sends counts for more than this
    /// many times the median, over learners, of the largest magnitude that each sends. From 1 on.
    pub clip: Option<f32>,
}

impl From<Strategy> for Options {
    fn from(strategy: Strategy) -> Self {
        Self { strategy, codec: Codec::default(), threads: 1, owner_divisor: NonZeroU32::MIN, clip: None }
    }
}

/// When a learner sends its verdict in [`Exchange::finish_with`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendVerdict {
    /// Before the last group is written, so that verdicts travel meanwhile. `write` must then return true.
    BeforeWriting,
    /// After all groups are written, so that the average can still be refused: it may not fit the format that it is wanted in.
    AfterWriting,
}

/// The averaged gradient of a group whose rounds are over.
pub struct GroupAverage<'a> {
    pub(crate) context: Context<'a>,
    pub(crate) rounds: &'a mut dyn Rounds,
}

impl GroupAverage<'_> {
    /// Returns the number of the group in its step.
    pub fn group(&self) -> usize {
        self.context.group
    }

    /// Writes it into a slice for each layer of the group, by ascending layer.
    ///
    /// # Panics
    /// If there are not as many slices as layers.
    pub fn write(self, output: &mut [&mut [f32]]) {
        self.write_to(&mut output.iter_mut().map(|slice| Output::Dense(slice)).collect::<Vec<_>>());
    }

    /// Does the same with any kind of output.
    #[doc(hidden)]
    pub fn write_to(self, output: &mut [Output<'_>]) {
        assert_eq!(output.len(), self.context.layers.len(), "a slice for each layer of the group");
        self.rounds.write(&self.context, output);
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
    pub(crate) layout: Arc<Layout>,
    pub(crate) options: Options,
    pub(crate) learners: usize,
    pub(crate) hosted: Vec<Learner>,
    pub(crate) step: u64,
    pub(crate) sending: Sending,
    /// The first learner whose gradient is not finite.
    pub(crate) non_finite: Option<usize>,
    pub(crate) groups: Vec<Group>,
    /// The number of groups in this step. The others are of the step before, and kept for their memory.
    pub(crate) in_use: usize,
    /// The group of each layer in this step.
    pub(crate) group_of: Vec<Option<usize>>,
    /// Whether groups are begun by the driver, rather than one group of all layers.
    pub(crate) as_given: bool,
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
        transport: T,
        layout: impl Into<Arc<Layout>>,
        options: impl Into<Options>,
    ) -> Result<Self, ExchangeError> {
        let (learners, hosted) = (transport.learners(), transport.hosted());
        let mut exchange = Self::unconnected(transport, layout, options, learners, hosted)?;
        if exchange.layout.scale() == Scale::Clamped && exchange.transport.inside().is_some() {
            return Err(ExchangeError::ClampedParts);
        }
        let description = describe(&exchange.layout, exchange.options, learners);
        let texts = exchange.transport.all_gather(vec![description; exchange.hosted.len()]);
        check_agreement(&texts.map_err(|source| ExchangeError::Transport { step: 0, source })?)?;
        Ok(exchange)
    }

    /// Returns the transport: for bytes that are not gradients, between steps.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Begins a group of these layers, one or more in ascending order, as the next group of this step, and returns its number. Its first
    /// round starts as soon as all its gradients have been submitted.
    ///
    /// Without this, all layers are one group. After the first call every step has the groups that are begun in it, in the same
    /// order on all learners; these may change from step to step, and need not have all layers.
    ///
    /// # Panics
    /// If a gradient was submitted before the first group.
    pub fn begin_group(&mut self, layers: &[usize]) -> Result<usize, ExchangeError> {
        self.check_alive()?;
        if layers.is_empty() {
            return Err(ExchangeError::EmptyGroup);
        }
        check_ascending(&self.layout, layers)?;
        if !self.as_given {
            assert!(!self.is_open(), "a gradient has been given already");
            self.as_given = true;
            self.remove_groups();
        }
        if let Some(&layer) = layers.iter().find(|layer| self.group_of[**layer].is_some()) {
            return Err(CompressError::Twice { parameter: self.layout[layer].name().to_owned() }.into());
        }
        Ok(self.push_group(layers))
    }

    /// Compresses one layer's gradient of a learner that is hosted here. Once all learners that are hosted here have submitted
    /// all layers of a group, its first round starts.
    pub fn submit(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), ExchangeError> {
        let sending = self.sending();
        self.submit_by(learner, layer, |compressor| compressor.compress_layer(layer, gradient, sending))
    }

    /// Submits what was selected from one layer's gradient on another device: see [`Compressor::take_selection`]. A step that
    /// sends all layers dense takes none.
    pub fn submit_selection(
        &mut self,
        learner: usize,
        layer: usize,
        maxima: &[f32],
        selected: &[Selected],
    ) -> Result<(), ExchangeError> {
        if self.sending() == Sending::Flush {
            return Err(ExchangeError::Selection);
        }
        self.submit_by(learner, layer, |compressor| compressor.take_selection(layer, maxima, selected))
    }

    fn submit_by(
        &mut self,
        learner: usize,
        layer: usize,
        compress: impl FnOnce(&mut Compressor) -> Result<(), CompressError>,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        let start = Instant::now();
        self.take(learner, layer, compress)?;
        self.spent.compress += start.elapsed().as_secs_f64();
        while self.started < self.groups().len() && self.groups[self.started].missing == 0 {
            self.start_round(self.started, 0)?;
            self.started += 1;
        }
        Ok(())
    }

    /// Runs a step: takes the gradients of all layers of each learner that is hosted here, and writes the averaged gradient into
    /// a slice for each layer. In a step with groups of its own, these must have all layers.
    pub fn exchange(
        &mut self,
        gradients: &[Vec<Gradient<'_>>],
        output: &mut [&mut [f32]],
    ) -> Result<Outcome, ExchangeError> {
        self.check_all("gradients", gradients, Gradient::len)?;
        self.check_output(output)?;
        for (learner, gradients) in self.transport.hosted().zip(gradients) {
            for (layer, gradient) in gradients.iter().enumerate().rev() {
                self.submit(learner, layer, *gradient)?;
            }
        }
        self.finish(output)
    }

    /// Checks that all layers can be submitted, with something of the right length for each learner that is hosted here: before
    /// anything is compressed, because a step that is half submitted cannot be dropped without the other learners.
    pub(crate) fn check_all<V>(
        &self,
        what: &str,
        given: &[Vec<V>],
        length: impl Fn(&V) -> usize,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        (0..self.layout.len()).try_for_each(|layer| self.group(layer).map(drop))?;
        let (hosted, actual) = (self.transport.hosted(), given.len());
        if actual != hosted.len() {
            let what = format!("learners that are hosted here and give {what}");
            return Err(ExchangeError::Count { what, expected: hosted.len(), actual });
        }
        hosted.zip(given).try_for_each(|(learner, given)| {
            self.check_layers(&format!("{what} of learner {learner}"), given.iter().map(&length))
        })
    }

    /// Checks that there is something of the right length for each layer.
    pub(crate) fn check_layers(
        &self,
        what: &str,
        lengths: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), ExchangeError> {
        let (expected, actual) = (self.layout.len(), lengths.len());
        if expected != actual {
            return Err(ExchangeError::Count { what: format!("layers in the {what}"), expected, actual });
        }
        for (layer, actual) in self.layout.layers().iter().zip(lengths) {
            if layer.elements() != actual {
                let what = format!("elements of `{}` in the {what}", layer.name());
                return Err(ExchangeError::Count { what, expected: layer.elements(), actual });
            }
        }
        Ok(())
    }

    fn check_output(&self, output: &[&mut [f32]]) -> Result<(), AverageError> {
        let expected = self.layout.layers().iter().map(Layer::elements);
        check_output(expected, output.iter().map(|slice| slice.len()))
    }

    /// Ends the step: waits for all learners, and writes the averaged gradient into `output`, a slice for each layer.
    pub fn finish(&mut self, output: &mut [&mut [f32]]) -> Result<Outcome, ExchangeError> {
        self.check_output(output)?;
        self.finish_rounds(|_, _| Ok(()))?;
        self.start_verdict()?;
        self.end(Some(output))
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
            if exchange.is_good() {
                let start = Instant::now();
                if !write(exchange.average(group)) {
                    assert!(!early, "an average that was sure to be used is refused");
                    // All learners find the same, so the first is named.
                    exchange.non_finite.get_or_insert(0);
                }
                exchange.spent.decode += start.elapsed().as_secs_f64();
            }
            Ok(())
        })?;
        if !early || last.is_none() {
            self.start_verdict()?;
        }
        self.end(None)
    }

    /// Finishes all rounds of all groups, and calls `ended` with each group whose last round is over, in their order.
    fn finish_rounds(
        &mut self,
        mut ended: impl FnMut(&mut Self, usize) -> Result<(), ExchangeError>,
    ) -> Result<(), ExchangeError> {
        self.check_alive()?;
        if self.started < self.groups().len() {
            return Err(CompressError::Missing { parameters: self.not_submitted() }.into());
        }
        while let Some((group, round)) = self.under_way.pop_front() {
            let incoming = self.wait()?;
            let start = Instant::now();
            let taken = self.incoming(group, round, &incoming);
            self.spent.decode += start.elapsed().as_secs_f64();
            taken.map_err(|source| self.break_off(source))?;
            if round + 1 < self.rounds() {
                self.start_round(group, round + 1)?;
            } else {
                ended(self, group)?;
            }
        }
        self.started = 0;
        Ok(())
    }

    fn start_verdict(&mut self) -> Result<(), ExchangeError> {
        let good = self.is_good();
        if let Some(inside) = self.transport.inside() {
            let agreed = inside.agree(good).map_err(|error| self.break_off(error))?;
            if good && !agreed {
                self.non_finite = Some(self.hosted[0].number);
            }
        }
        let verdicts = self.verdict();
        self.start(Messages::AllGather(verdicts.into_iter().map(Arc::new).collect()))
    }

    /// Takes all learners' verdicts. The output is written if the gradient was averaged.
    fn end(&mut self, output: Option<&mut [&mut [f32]]>) -> Result<Outcome, ExchangeError> {
        let Messages::AllGather(verdicts) = self.wait()? else {
            return Err(self.break_off(TransportError::OutOfStep));
        };
        let (start, step) = (Instant::now(), self.step);
        let outcome = self.conclude(&verdicts, output);
        self.spent.decode += start.elapsed().as_secs_f64();
        self.seconds = std::mem::take(&mut self.spent);
        if let Err(error @ (ExchangeError::Verdict { .. } | ExchangeError::Transport { .. })) = &outcome {
            let source = TransportError::Transport { transport: "exchange", reason: error.to_string() };
            self.broken = Some((step, source));
        }
        outcome
    }

    /// Where the layers of a group are parts of parameters: gives them the scales of the whole parameters.
    fn share_scales(&mut self, group: usize) -> Result<(), ExchangeError> {
        let Self { transport, hosted, groups, layout, .. } = self;
        let (Some(inside), [learner]) = (transport.inside(), &mut hosted[..]) else { return Ok(()) };
        let compressor = &mut learner.compressor;
        let has_scale = |layer: &usize| {
            matches!(layout[*layer].treatment, Treatment::Bins(_))
                && matches!(compressor.packet(*layer), Some(Packet::Sparse(_)))
        };
        let layers: Vec<usize> = groups[group].layers.iter().copied().filter(has_scale).collect();
        let mut scales: Vec<f32> =
            layers.iter().map(|&layer| compressor.layer_statistics(layer).scale).collect();
        let shared = inside.share_scales(&layers, &mut scales);
        shared.map_err(|error| self.break_off(error))?;
        let compressor = &mut self.hosted[0].compressor;
        layers.into_iter().zip(scales).try_for_each(|(layer, scale)| compressor.set_scale(layer, scale))?;
        Ok(())
    }

    fn start_round(&mut self, group: usize, round: usize) -> Result<(), ExchangeError> {
        if round == 0 {
            self.share_scales(group)?;
        }
        let start = Instant::now();
        let outgoing = self.outgoing(group, round);
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
        let step = self.step;
        self.rollback();
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

impl<T> Exchange<T> {
    /// Creates the learners of `hosted`, whose messages are carried by hand unless the transport does it.
    ///
    /// # Panics
    /// If no learner is hosted here, or one that is not among all.
    #[doc(hidden)]
    pub fn unconnected(
        transport: T,
        layout: impl Into<Arc<Layout>>,
        options: impl Into<Options>,
        learners: usize,
        hosted: Range<usize>,
    ) -> Result<Self, ExchangeError> {
        assert!(!hosted.is_empty() && hosted.end <= learners, "learners {hosted:?} of {learners}");
        let (layout, options) = (layout.into(), options.into());
        options.strategy.check(&layout)?;
        if let Some(clip) = options.clip.filter(|clip| !is_clip(*clip)) {
            return Err(ExchangeError::Clip { clip });
        }
        let owner = |number| Compressor::new(owner_layout(&layout, options, number, learners));
        let learner = |(position, number)| Learner {
            number,
            position,
            compressor: Compressor::new(layout.clone()).with_threads(options.threads),
            owner: options.strategy.has_owner_residuals().then(|| owner(number)),
            owner_before: Vec::new(),
            traffic: Traffic::default(),
            fault: None,
            overflow: false,
        };
        let mut exchange = Self {
            hosted: hosted.enumerate().map(learner).collect(),
            transport,
            layout,
            options,
            learners,
            step: 0,
            sending: Sending::Compressed,
            non_finite: None,
            groups: Vec::new(),
            in_use: 0,
            group_of: Vec::new(),
            as_given: false,
            under_way: VecDeque::new(),
            started: 0,
            spent: Seconds::default(),
            seconds: Seconds::default(),
            broken: None,
        };
        exchange.begin_step(0, Sending::Compressed);
        Ok(exchange)
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Goes on with bins of other lengths, and with all that waits, as [`Compressor::set_layout`] does. All learners must do it between
    /// the same steps. With `sharded` it is refused.
    pub fn set_layout(&mut self, layout: impl Into<Arc<Layout>>) -> Result<(), ExchangeError> {
        let (layout, strategy) = (layout.into(), self.options.strategy);
        if self.is_open() {
            return Err(CompressError::Open.into());
        }
        if strategy.has_owner_residuals() {
            return Err(ExchangeError::Shards { strategy });
        }
        for learner in &mut self.hosted {
            learner.compressor.set_layout(layout.clone())?;
        }
        self.layout = layout;
        // What groups remember is of the bins before.
        self.groups.clear();
        self.begin_step(self.step, self.sending);
        Ok(())
    }

    /// Returns the options.
    pub fn options(&self) -> Options {
        self.options
    }

    /// Returns the number of the step that is next or going on.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the bytes of a learner that is hosted here in the last step.
    pub fn traffic(&self, learner: usize) -> Option<&Traffic> {
        self.hosted.iter().find(|hosted| hosted.number == learner).map(|hosted| &hosted.traffic)
    }

    /// Returns where the time of the last step went.
    pub fn seconds(&self) -> Seconds {
        self.seconds
    }

    pub(crate) fn learner(&mut self, number: usize) -> Option<&mut Learner> {
        self.hosted.iter_mut().find(|learner| learner.number == number)
    }

    /// Returns the compressor of a learner that is hosted here: its residuals and statistics.
    pub fn compressor(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.learner(learner).map(|learner| &mut learner.compressor)
    }

    /// Returns what a learner that is hosted here keeps as an owner with `sharded`. Its layers are the learner's shards.
    pub fn owner(&mut self, learner: usize) -> Option<&mut Compressor> {
        self.learner(learner)?.owner.as_mut()
    }

    /// Sets what the next step sends: what is selected, or all of it in f32. All learners must do the same.
    ///
    /// # Panics
    /// If a gradient has been submitted already.
    pub fn set_sending(&mut self, sending: Sending) {
        assert!(!self.is_open(), "a gradient has been given already");
        self.sending = sending;
    }

    /// Multiplies by a factor from 0 to 1 what learners that are hosted here keep, also as owners, so the mean over learners of what
    /// waits is multiplied, too. All learners must do the same, between steps; it counts even if the next step is dropped.
    pub fn decay(&mut self, factor: f32) -> Result<(), ExchangeError> {
        if self.is_open() {
            return Err(CompressError::Open.into());
        }
        let mut compressors = self.hosted.iter_mut().flat_map(Learner::compressors);
        Ok(compressors.try_for_each(|compressor| compressor.decay(factor))?)
    }

    /// Makes layers whose gradient is zero everywhere send nothing from now on: see [`Compressor::set_skip_unused`].
    pub fn set_skip_unused(&mut self, skip: bool) {
        let compressors = self.hosted.iter_mut().flat_map(Learner::compressors);
        compressors.for_each(|compressor| compressor.set_skip_unused(skip));
    }

    /// Returns the layers of each group of this step.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &[usize]> {
        self.groups[..self.in_use].iter().map(|group| group.layers.as_slice())
    }
}

#[doc(hidden)]
impl Exchange<()> {
    /// Compresses one layer's gradient, and starts nothing.
    pub fn submit(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
    ) -> Result<(), ExchangeError> {
        let sending = self.sending();
        self.take(learner, layer, |compressor| compressor.compress_layer(layer, gradient, sending))
    }
}
