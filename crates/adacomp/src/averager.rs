//! The frames of all learners into the gradient that they share.

use crate::error::AverageError;
use crate::layout::Layout;
use crate::wire::{Expected, Frame};
use std::sync::Arc;

/// Averages the frames of a step. It keeps its memory from step to step.
#[derive(Debug, Clone)]
pub struct Averager {
    layout: Arc<Layout>,
    frames: Vec<Frame>,
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
        Self { layout: layout.into(), frames: Vec::new() }
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
        self.check_output(output)?;
        let outcome = self.check(step, frames, Expected::Whole)?;
        if outcome == Outcome::Averaged {
            self.write(output)?;
        }
        Ok(outcome)
    }

    /// The first half of [`Averager::average`]: checks the frames and keeps what they say.
    pub fn check(
        &mut self,
        step: u64,
        frames: &[impl AsRef<[u8]>],
        expected: Expected<'_>,
    ) -> Result<Outcome, AverageError> {
        if frames.is_empty() {
            return Err(AverageError::Empty);
        }
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
        Ok(non_finite.map_or(Outcome::Averaged, |learner| Outcome::NonFinite { learner }))
    }

    /// The second half: writes the average of the frames that were checked last, over what is in their layers' slices.
    pub fn write(&self, output: &mut [&mut [f32]]) -> Result<(), AverageError> {
        self.check_output(output)?;
        let layers = || self.frames.first().into_iter().flat_map(Frame::packets).map(|(layer, _)| layer);
        layers().for_each(|layer| output[layer].fill(0.0));
        for frame in &self.frames {
            frame.packets().for_each(|(layer, packet)| packet.add_to(output[layer]));
        }
        let share = 1.0 / self.frames.len() as f32;
        if share != 1.0 {
            layers().for_each(|layer| output[layer].iter_mut().for_each(|value| *value *= share));
        }
        Ok(())
    }

    fn check_output(&self, output: &[&mut [f32]]) -> Result<(), AverageError> {
        for (layer, expected) in self.layout.layers().iter().map(|layer| layer.elements()).enumerate() {
            let actual = output.get(layer).map_or(0, |slice| slice.len());
            if actual != expected {
                return Err(AverageError::Output { layer, expected, actual });
            }
        }
        match output.get(self.layout.len()) {
            Some(extra) => {
                Err(AverageError::Output { layer: self.layout.len(), expected: 0, actual: extra.len() })
            }
            None => Ok(()),
        }
    }
}
