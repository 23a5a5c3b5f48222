//! Averages the frames of all learners.

use crate::error::AverageError;
use crate::kernel::{Output, largest, write_blocks};
use crate::policy::Layout;
use crate::wire::{Adder, Frame};
use std::sync::Arc;

/// Averages the frames of a step. It keeps its memory from step to step: the bytes of the frames, and little more.
#[derive(Debug, Clone)]
pub struct Averager {
    layout: Arc<Layout>,
    frames: Vec<Frame>,
    /// Whether the frames can be averaged.
    ready: bool,
    /// The memory of what adds up the layer that is being written; empty in between.
    adders: Vec<Adder<'static>>,
}

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a step must be committed or rolled back accordingly"]
pub enum Outcome {
    /// The output is the averaged gradient: commit the step.
    Averaged,
    /// This learner's gradient is not finite, or the sum of all learners' gradients is not, or the average does not fit the format
    /// that it is wanted in, and the output is unchanged: roll the step back.
    NonFinite {
        /// The first such learner; where it is the sum or the average, the first that found it.
        learner: usize,
    },
}

impl Averager {
    /// Creates an averager for frames of this layout.
    pub fn new(layout: impl Into<Arc<Layout>>) -> Self {
        Self { layout: layout.into(), frames: Vec::new(), ready: false, adders: Vec::new() }
    }

    /// Averages the frames of learners 0, 1, ... of one step into `output`, which has a slice for each layer.
    ///
    /// Frames are added in learner order, so every learner gets the same bits. All frames are checked before anything is
    /// written.
    pub fn average(
        &mut self,
        step: u64,
        frames: &[impl AsRef<[u8]>],
        output: &mut [&mut [f32]],
    ) -> Result<Outcome, AverageError> {
        let outcome = self.check(step, frames)?;
        if outcome == Outcome::Averaged {
            self.write(output)?;
        }
        Ok(outcome)
    }

    /// Checks frames of all layers and keeps them if they can be averaged: the first half of [`Averager::average`].
    pub fn check(&mut self, step: u64, frames: &[impl AsRef<[u8]>]) -> Result<Outcome, AverageError> {
        let layout = self.layout.clone();
        self.check_layers(step, frames, layout.all())
    }

    /// Checks frames of these layers, by ascending numbers.
    pub fn check_layers(
        &mut self,
        step: u64,
        frames: &[impl AsRef<[u8]>],
        layers: &[usize],
    ) -> Result<Outcome, AverageError> {
        self.ready = false;
        self.frames.resize_with(frames.len(), Frame::default);
        let mut non_finite = None;
        for (learner, (frame, bytes)) in self.frames.iter_mut().zip(frames).enumerate() {
            let header = frame
                .decode_layers(bytes.as_ref(), &self.layout, layers)
                .map_err(|source| AverageError::Frame { learner, source })?;
            if header.learner != learner {
                return Err(AverageError::Learner { expected: learner, actual: header.learner });
            }
            if header.step != step {
                return Err(AverageError::Step { learner, expected: step, actual: header.step });
            }
            non_finite = non_finite.or(header.non_finite.then_some(header.learner));
        }
        if frames.is_empty() {
            return Err(AverageError::Empty);
        }
        if non_finite.is_none() && (0..layers.len()).any(|position| self.overflows(position)) {
            // All learners find the same, so the first is named.
            non_finite = Some(0);
        }
        self.ready = non_finite.is_none();
        Ok(non_finite.map_or(Outcome::Averaged, |learner| Outcome::NonFinite { learner }))
    }

    /// Returns whether the sum of the sections at this position overflows, although each of them is finite.
    fn overflows(&self, position: usize) -> bool {
        // Half of what an f32 can hold leaves room for the rounding of millions of learners.
        let bound: f64 = self.frames.iter().map(|frame| f64::from(frame.largest(position))).sum();
        if bound < f64::from(f32::MAX / 2.0) {
            return false;
        }
        // Learners may have selected different elements, so only the sum itself tells.
        let layer = self.frames[0].sections().nth(position).map_or(0, |section| section.layer);
        let mut sum = vec![0.0; self.layout[layer].elements()];
        self.frames.iter().for_each(|frame| frame.adder(position).add_block(0, &mut sum));
        !largest(sum.into_iter()).is_finite()
    }

    /// Returns learner, layer and bytes of each section of the frames that were checked last, if they can be averaged.
    pub fn sections(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let frames = if self.ready { self.frames.as_slice() } else { &[] };
        frames.iter().enumerate().flat_map(|(learner, frame)| {
            frame.sections().map(move |section| (learner, section.layer, section.bytes))
        })
    }

    /// Writes the average of the frames that were checked last: the second half of [`Averager::average`]. `output` has a
    /// slice for each of their layers, in the same order.
    pub fn write(&mut self, output: &mut [&mut [f32]]) -> Result<(), AverageError> {
        self.check_output(output.iter().map(|slice| slice.len()))?;
        self.write_all(output.iter_mut().map(|slice| Output::Dense(slice)));
        Ok(())
    }

    /// Does the same with any kind of output.
    #[doc(hidden)]
    pub fn write_to(&mut self, output: &mut [Output<'_>]) -> Result<(), AverageError> {
        self.check_output(output.iter().map(Output::elements))?;
        self.write_all(output.iter_mut().map(Output::reborrow));
        Ok(())
    }

    fn check_output(&self, mut actual: impl ExactSizeIterator<Item = usize>) -> Result<(), AverageError> {
        let first = self.frames.first().filter(|_| self.ready).ok_or(AverageError::Empty)?;
        let mut expected = first.sections().map(|section| self.layout[section.layer].elements());
        for position in 0..actual.len().max(expected.len()) {
            let (expected, actual) = (expected.next(), actual.next());
            if expected != actual {
                let (expected, actual) = (expected.unwrap_or(0), actual.unwrap_or(0));
                return Err(AverageError::Output { position, expected, actual });
            }
        }
        Ok(())
    }

    fn write_all<'o>(&mut self, outputs: impl Iterator<Item = Output<'o>>) {
        let share = 1.0 / self.frames.len() as f32;
        let mut adders = Adder::reuse(std::mem::take(&mut self.adders));
        for (position, mut output) in outputs.enumerate() {
            adders.clear();
            adders.extend(self.frames.iter().map(|frame| frame.adder(position)));
            write_blocks(&mut output, share, |start, sum| {
                adders.iter_mut().for_each(|adder| adder.add_block(start, sum));
            });
        }
        self.adders = Adder::reuse(adders);
    }
}
