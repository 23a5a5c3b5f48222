//! The frames of all learners into the gradient that they share.

use crate::error::AverageError;
use crate::kernel::write_blocks;
use crate::layout::Layout;
use crate::wire::{Expected, Frame};
use std::sync::Arc;

/// Averages the frames of a step. It keeps its memory from step to step.
#[derive(Debug, Clone)]
pub struct Averager {
    layout: Arc<Layout>,
    frames: Vec<Frame>,
    /// Whether the frames are a step's that can be averaged.
    ready: bool,
    /// While a layer is written, for each frame how many of its elements have been.
    written: Vec<usize>,
}

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a step must be committed or dropped accordingly"]
pub enum Outcome {
    /// The output is the averaged gradient: commit the step.
    Averaged,
    /// This learner's gradient is not finite, the output is untouched: drop the step.
    NonFinite {
        /// The first such learner.
        learner: u32,
    },
}

impl Averager {
    /// An averager for frames of this layout.
    pub fn new(layout: impl Into<Arc<Layout>>) -> Self {
        Self { layout: layout.into(), frames: Vec::new(), ready: false, written: Vec::new() }
    }

    /// Averages the frames of learners 0, 1, ... of one step into `output`, which has a slice for each layer.
    ///
    /// Sums are made in learner order from 0, so every learner gets the same bits. All frames are checked before
    /// anything is written.
    pub fn average(
        &mut self,
        step: u64,
        frames: &[impl AsRef<[u8]>],
        output: &mut [&mut [f32]],
    ) -> Result<Outcome, AverageError> {
        let outcome = self.check(step, frames, Expected::Whole)?;
        if outcome == Outcome::Averaged {
            self.write(output)?;
        }
        Ok(outcome)
    }

    /// The first half of [`Averager::average`]: checks frames of some layers, and keeps what they say if it can be averaged.
    pub fn check(
        &mut self,
        step: u64,
        frames: &[impl AsRef<[u8]>],
        expected: Expected<'_>,
    ) -> Result<Outcome, AverageError> {
        let outcome = self.check_all(step, frames, expected);
        self.ready = outcome == Ok(Outcome::Averaged);
        outcome
    }

    fn check_all(
        &mut self,
        step: u64,
        frames: &[impl AsRef<[u8]>],
        expected: Expected<'_>,
    ) -> Result<Outcome, AverageError> {
        self.frames.resize_with(frames.len(), Frame::default);
        let mut non_finite = None;
        for (learner, (frame, bytes)) in self.frames.iter_mut().zip(frames).enumerate() {
            let header = frame
                .decode(bytes.as_ref(), &self.layout, expected)
                .map_err(|cause| AverageError::Frame { learner, cause })?;
            if header.learner as usize != learner {
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
        Ok(non_finite.map_or(Outcome::Averaged, |learner| Outcome::NonFinite { learner }))
    }

    /// The frames that were checked last, if they could be averaged.
    pub fn frames(&self) -> &[Frame] {
        if self.ready { &self.frames } else { &[] }
    }

    /// The second half: writes the average of the frames that were checked last. `output` has a slice for each layer that
    /// they have, in their order.
    pub fn write(&mut self, output: &mut [&mut [f32]]) -> Result<(), AverageError> {
        let first = self.frames.first().filter(|_| self.ready).ok_or(AverageError::Empty)?;
        let mut layers = first.packets().map(|(layer, _)| self.layout[layer].elements());
        for position in 0..output.len().max(layers.len()) {
            let (expected, slice) = (layers.next(), output.get(position));
            if expected != slice.map(|slice| slice.len()) {
                let (expected, actual) = (expected.unwrap_or(0), slice.map_or(0, |slice| slice.len()));
                return Err(AverageError::Output { position, expected, actual });
            }
        }
        drop(layers);
        let Self { frames, written, .. } = self;
        let share = 1.0 / frames.len() as f32;
        for (position, slice) in output.iter_mut().enumerate() {
            written.clear();
            written.resize(frames.len(), 0);
            write_blocks(slice, share, |start, sum| {
                for (frame, written) in frames.iter().zip(&mut *written) {
                    frame.packet_at(position).add_block(start, sum, written);
                }
            });
        }
        Ok(())
    }
}
