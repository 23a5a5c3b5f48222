//! Averages the frames of all learners.

use crate::clip::{bound, is_clip};
#[cfg(doc)]
use crate::compressor::Compressor;
use crate::error::AverageError;
use crate::kernel::{BLOCK, Output, largest, write_blocks};
use crate::policy::Layout;
use crate::wire::Frame;
use std::sync::Arc;

/// The fewest bytes of frames for a thread. To read and add them up takes about twice as long as starting it.
const WORTH_A_THREAD: usize = 1 << 17;

/// Averages the frames of a step. It keeps its memory from step to step: what is in the frames, and little more.
#[derive(Debug, Clone)]
pub struct Averager {
    layout: Arc<Layout>,
    frames: Vec<Frame>,
    clip: Option<f32>,
    /// For each layer of the frames the largest magnitude that counts.
    bounds: Vec<f32>,
    /// Whether the frames can be averaged.
    ready: bool,
    threads: usize,
    /// Bytes of the frames.
    bytes: usize,
}

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a step must be committed or rolled back accordingly"]
pub enum Outcome {
    /// The output is the averaged gradient: commit the step.
    Averaged,
    /// Some learner's gradient is not finite, or the sum of all learners' gradients is not, or the average does not fit the format
    /// that it is wanted in, and the output is unchanged: roll the step back.
    NonFinite {
        /// The first such learner; where it is the sum or the average, the first that found it.
        learner: usize,
    },
}

impl Averager {
    /// Creates an averager for frames of this layout.
    pub fn new(layout: impl Into<Arc<Layout>>) -> Self {
        let (layout, frames, bounds) = (layout.into(), Vec::new(), Vec::new());
        Self { layout, frames, clip: None, bounds, ready: false, threads: 1, bytes: 0 }
    }

    /// Bounds what one learner can do: in each layer no value counts for more than `clip` times the median, over learners, of
    /// the largest magnitude that each sends. Every learner must then call [`Compressor::clamp_sent`] with
    /// [`Averager::bounds`], so that what does not count stays in its residual.
    ///
    /// # Panics
    /// If the clip is not a number from 1 on.
    pub fn with_clip(mut self, clip: Option<f32>) -> Self {
        assert!(clip.is_none_or(is_clip), "a clip of {clip:?}");
        self.clip = clip;
        self
    }

    /// Reads many frames, and writes long outputs, on up to this number of threads. The result is the same to the bit.
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
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
        if frames.is_empty() {
            return Err(AverageError::Empty);
        }
        self.frames.resize_with(frames.len(), Frame::default);
        self.bytes = frames.iter().map(|frame| frame.as_ref().len()).sum();
        let threads = self.threads_for(0);
        let layout = &self.layout;
        let read = |learner: usize, frame: &mut Frame, bytes: &[u8]| {
            let header = frame
                .decode_layers(bytes, layout, layers)
                .map_err(|source| AverageError::Frame { learner, source })?;
            if header.learner != learner {
                return Err(AverageError::Learner { expected: learner, actual: header.learner });
            }
            if header.step != step {
                return Err(AverageError::Step { learner, expected: step, actual: header.step });
            }
            Ok(())
        };
        let numbered = (0..).zip(&mut self.frames).zip(frames);
        let mut numbered = numbered.map(|((learner, frame), bytes)| (learner, frame, bytes.as_ref()));
        if threads == 1 {
            numbered.try_for_each(|(learner, frame, bytes)| read(learner, frame, bytes))?;
        } else {
            let mut all: Vec<_> = numbered.collect();
            let parts = all.chunks_mut(frames.len().div_ceil(threads)).collect();
            let ends = on_threads(parts, |part| {
                part.iter_mut().try_for_each(|(learner, frame, bytes)| read(*learner, frame, bytes))
            });
            // The first frame that is bad is told.
            ends.into_iter().collect::<Result<(), _>>()?;
        }
        let headers = self.frames.iter().filter_map(Frame::header);
        let mut non_finite = headers.filter(|header| header.non_finite).map(|header| header.learner).next();
        self.bounds.clear();
        let finite = if non_finite.is_none() { 0..layers.len() } else { 0..0 };
        for position in finite {
            let most = bound(self.clip, self.frames.iter().map(|frame| frame.largest(position)));
            self.frames.iter_mut().for_each(|frame| frame.clamp(position, most));
            self.bounds.push(most);
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
        for (block, sums) in sum.chunks_mut(BLOCK).enumerate() {
            self.frames.iter().for_each(|frame| frame.add_block(position, block, sums));
        }
        !largest(sum.into_iter()).is_finite()
    }

    /// Returns how many threads are worth starting, to write this number of elements or to read the frames.
    fn threads_for(&self, elements: usize) -> usize {
        self.threads.min((self.bytes + elements / 8) / WORTH_A_THREAD).max(1)
    }

    /// Returns for each layer of the frames that were checked last the largest magnitude that counts.
    pub fn bounds(&self) -> &[f32] {
        &self.bounds
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
    pub fn write(&self, output: &mut [&mut [f32]]) -> Result<(), AverageError> {
        self.check_output(output.iter().map(|slice| slice.len()))?;
        self.write_all(output.iter_mut().map(|slice| Output::Dense(slice)));
        Ok(())
    }

    /// Does the same with any kind of output.
    #[doc(hidden)]
    pub fn write_to(&self, output: &mut [Output<'_>]) -> Result<(), AverageError> {
        self.check_output(output.iter().map(Output::elements))?;
        self.write_all(output.iter_mut().map(Output::reborrow));
        Ok(())
    }

    fn check_output(&self, actual: impl ExactSizeIterator<Item = usize>) -> Result<(), AverageError> {
        let first = self.frames.first().filter(|_| self.ready).ok_or(AverageError::Empty)?;
        check_output(first.sections().map(|section| self.layout[section.layer].elements()), actual)
    }

    fn write_all<'o>(&self, outputs: impl ExactSizeIterator<Item = Output<'o>>) {
        let (frames, share) = (&self.frames, 1.0 / self.frames.len() as f32);
        // Writes a range of the layer at this position, from a block on.
        let write = |(position, block, mut range): (usize, usize, Output<'_>)| {
            write_blocks(&mut range, share, |start, sums| {
                frames.iter().for_each(|frame| frame.add_block(position, block + start / BLOCK, sums));
            });
        };
        let sections = frames.first().into_iter().flat_map(Frame::sections);
        let threads = self.threads_for(sections.map(|section| self.layout[section.layer].elements()).sum());
        if threads == 1 {
            return outputs.enumerate().for_each(|(position, output)| write((position, 0, output)));
        }
        // A range of each layer for each thread; what is sparse, in turns.
        let mut parts: Vec<Vec<_>> = (0..threads).map(|_| Vec::with_capacity(outputs.len())).collect();
        for (position, output) in outputs.enumerate() {
            match output {
                Output::Dense(slice) => {
                    let blocks = slice.len().div_ceil(BLOCK).div_ceil(threads).max(1);
                    for (number, range) in slice.chunks_mut(blocks * BLOCK).enumerate() {
                        parts[number].push((position, number * blocks, Output::Dense(range)));
                    }
                }
                sparse => parts[position % threads].push((position, 0, sparse)),
            }
        }
        on_threads(parts, |part| part.into_iter().for_each(write));
    }
}

/// Checks that outputs have as many elements as expected.
pub fn check_output(
    mut expected: impl ExactSizeIterator<Item = usize>,
    mut actual: impl ExactSizeIterator<Item = usize>,
) -> Result<(), AverageError> {
    for position in 0..actual.len().max(expected.len()) {
        let (expected, actual) = (expected.next(), actual.next());
        if expected != actual {
            let (expected, actual) = (expected.unwrap_or(0), actual.unwrap_or(0));
            return Err(AverageError::Output { position, expected, actual });
        }
    }
    Ok(())
}

/// Does some work for each part, the first on this thread and the others on threads of their own. Returns the results in order.
fn on_threads<P: Send, R: Send>(parts: Vec<P>, work: impl Fn(P) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let mut parts = parts.into_iter();
        let first = parts.next();
        let others: Vec<_> = parts.map(|part| scope.spawn(move || work(part))).collect();
        let first = first.map(work).into_iter();
        first.chain(others.into_iter().map(|thread| thread.join().expect("a part does not panic"))).collect()
    })
}
