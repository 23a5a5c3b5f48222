//! Selects from one layer: by bins, on one thread or several, with a scale that follows from the bin maxima; or, as a
//! baseline, by magnitude in the tensor.

use crate::error::UnknownName;
use crate::gradient::Gradient;
use crate::kernel::{Kernel, Run};
use crate::packet::{HighWaterMark, Selected, Sparse};
use crate::policy::MAX_BIN;
use std::fmt;
use std::str::FromStr;

/// Elements from which the last selection is subtracted, and then the next is made, while they are in the nearest cache.
pub(crate) const BLOCK: usize = 1024;

/// Capacity that a selection keeps for the next block: of a bin of the largest size every element may be selected.
const ROOM: usize = 2 * MAX_BIN as usize;

/// The fewest elements for a thread: with fewer, starting it would take longer than it saves.
const WORTH_A_THREAD: usize = 1 << 17;

/// How to select from a gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) bin: usize,
    pub(crate) soft_threshold: f32,
    pub(crate) scale: Scale,
    /// What the gradient is multiplied by first: the inverse loss scale.
    pub(crate) factor: f32,
    pub(crate) kernel: Kernel,
    pub(crate) threads: usize,
}

/// Buffers that layers share.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scratch {
    /// Gradients in f32.
    pub(crate) converted: Vec<f32>,
    pub(crate) maxima: Vec<f32>,
    pub(crate) sorted: Vec<f32>,
    pub(crate) magnitudes: Vec<u32>,
    workers: Vec<Worker>,
}

/// What one thread needs for itself.
#[derive(Debug, Clone, Default)]
struct Worker {
    converted: Vec<f32>,
    selected: Vec<Selected>,
    /// The longest selection of the open step.
    longest: usize,
    high_water: HighWaterMark,
}

impl Scratch {
    /// Subtracts from a residual what is unsubtracted, adds a gradient and selects by bins. The selection and the bin maxima
    /// stay here until the next call.
    pub(crate) fn select(
        &mut self,
        residual: &mut [f32],
        gradient: Gradient<'_>,
        unsubtracted: Sparse<'_>,
        rule: Rule,
    ) {
        let (elements, bins) = (residual.len(), residual.len().div_ceil(rule.bin));
        let threads = rule.threads.min(elements / WORTH_A_THREAD).clamp(1, bins.max(1));
        self.workers.resize_with(threads.max(self.workers.len()), Worker::default);
        // `selected` reads all of them, also those that this layer does not need.
        self.workers.iter_mut().for_each(|worker| worker.selected.clear());
        self.maxima.resize(bins, 0.0);
        let bins_each = bins.div_ceil(threads).max(1);
        let parts = residual.chunks_mut(bins_each * rule.bin).zip(self.maxima.chunks_mut(bins_each));
        let parts = parts.enumerate().map(|(number, (residual, maxima))| {
            let first = number * bins_each * rule.bin;
            let unsubtracted = unsubtracted.within(first..usize::MAX);
            Part { first, residual, maxima, gradient, unsubtracted }
        });
        let work = parts.zip(&mut self.workers);
        if threads == 1 {
            return work.for_each(|(part, worker)| part.select(rule, worker));
        }
        std::thread::scope(|scope| {
            for (part, worker) in work {
                scope.spawn(move || part.select(rule, worker));
            }
        });
    }

    /// Returns what was selected, in order, one slice for each thread.
    pub(crate) fn selected(&self) -> impl Iterator<Item = &[Selected]> + Clone {
        self.workers.iter().map(|worker| worker.selected.as_slice())
    }

    /// Ends the step, and frees memory that only longer steps needed.
    pub(crate) fn end_step(&mut self) {
        for worker in &mut self.workers {
            let longest = std::mem::take(&mut worker.longest);
            worker.high_water.count(longest, ROOM, &mut worker.selected);
        }
    }
}

/// Consecutive bins of a tensor; the last may be short.
struct Part<'a> {
    /// The index in the tensor of the part's first element.
    first: usize,
    residual: &'a mut [f32],
    maxima: &'a mut [f32],
    /// Of the tensor.
    gradient: Gradient<'a>,
    /// Of the tensor, from `first` on.
    unsubtracted: Sparse<'a>,
}

impl Part<'_> {
    /// Subtracts and selects, block by block. Subtraction goes a block ahead: its stores then do not hold up the kernel's
    /// loads, and it brings memory that the kernel needs next into the cache.
    fn select(mut self, rule: Rule, worker: &mut Worker) {
        let Worker { converted, selected, longest, .. } = worker;
        let block = (BLOCK / rule.bin).max(1) * rule.bin;
        let elements = self.residual.len();
        self.subtract_below(block.min(elements));
        for start in (0..elements).step_by(block) {
            let end = elements.min(start + block);
            self.subtract_below(elements.min(end + block));
            let gradient = self.gradient.read(self.first + start..self.first + end, rule.factor, converted);
            let full = (end - start) / rule.bin * rule.bin;
            let first_bin = start / rule.bin;
            let last_bin = first_bin + full / rule.bin;
            let mut run = |from: usize, to: usize, bin: usize, maxima: &mut [f32]| {
                rule.kernel.run(Run {
                    residual: &mut self.residual[start + from..start + to],
                    gradient: &gradient[from..to],
                    bin,
                    extra: rule.soft_threshold - 1.0,
                    first: (self.first + start + from) as u32,
                    maxima,
                    selected,
                });
            };
            if full > 0 {
                run(0, full, rule.bin, &mut self.maxima[first_bin..last_bin]);
            }
            if start + full < end {
                run(full, end - start, end - start - full, &mut self.maxima[last_bin..=last_bin]);
            }
        }
        *longest = selected.len().max(*longest);
    }

    /// Subtracts what is still unsubtracted in the part's first `end` elements.
    fn subtract_below(&mut self, end: usize) {
        let mut unsubtracted = self.unsubtracted.selected;
        while let [element, rest @ ..] = unsubtracted
            && element.index() < self.first + end
        {
            self.residual[element.index() - self.first] -= self.unsubtracted.values[element.sign()];
            unsubtracted = rest;
        }
        self.unsubtracted.selected = unsubtracted;
    }
}

/// How the scale follows from the maxima of a layer's bins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// Their mean: AdaComp.
    #[default]
    Mean,
    /// The mean, but none of them counts for more than ten times their median. So one gradient that is far too
    /// large does not inflate the scale of its layer. Where none is that large it equals the mean to the bit.
    Clamped,
}

impl Scale {
    /// The most that a maximum counts for, in medians of those that are not 0.
    const MOST: f32 = 10.0;

    /// Returns the scale, and the number of bins that are not finite.
    pub(crate) fn of(self, maxima: &[f32], scratch: &mut Vec<f32>) -> (f32, usize) {
        let most = match self {
            Self::Mean => f32::INFINITY,
            Self::Clamped => Self::MOST * median(maxima, scratch),
        };
        let finite = maxima.iter().filter(|maximum| !maximum.is_nan());
        let (sum, count) =
            finite.fold((0.0, 0), |(sum, count), &maximum| (sum + f64::from(maximum.min(most)), count + 1));
        let scale = if maxima.is_empty() { 0.0 } else { (sum / maxima.len() as f64) as f32 };
        (scale, maxima.len() - count)
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Mean => "mean",
            Self::Clamped => "clamped",
        })
    }
}

impl FromStr for Scale {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        UnknownName::find(name, "scale", "mean or clamped", [Self::Mean, Self::Clamped])
    }
}

/// Returns the median of those that are above 0; 0 if there are none.
fn median(maxima: &[f32], scratch: &mut Vec<f32>) -> f32 {
    scratch.clear();
    scratch.extend(maxima.iter().filter(|maximum| **maximum > 0.0));
    let middle = scratch.len() / 2;
    if scratch.is_empty() { 0.0 } else { *scratch.select_nth_unstable_by(middle, f32::total_cmp).1 }
}

/// Selects the largest `percent` by magnitude, at least one element; of equal ones the first (Dryden et al. 2016). Returns
/// the mean of the positive and the mean of the negative ones.
pub(crate) fn select_top(
    g: &[f32],
    percent: f32,
    magnitudes: &mut Vec<u32>,
    selected: &mut Vec<Selected>,
) -> [f32; 2] {
    if g.is_empty() {
        return [0.0; 2];
    }
    let count = ((g.len() as f64 * f64::from(percent) / 100.0).ceil() as usize).clamp(1, g.len());
    magnitudes.clear();
    // The bits of positive floats order like the floats, and integers order faster.
    magnitudes.extend(g.iter().map(|g| g.abs().to_bits()));
    let (_, &mut threshold, above) = magnitudes.select_nth_unstable(g.len() - count);
    let mut equals = count - above.iter().filter(|&&magnitude| magnitude > threshold).count();

    let mut sums = [0.0f64; 2];
    let mut counts = [0u32; 2];
    for (index, &value) in g.iter().enumerate() {
        let magnitude = value.abs().to_bits();
        if magnitude < threshold || magnitude == 0 {
            continue;
        }
        if magnitude == threshold {
            if equals == 0 {
                continue;
            }
            equals -= 1;
        }
        let element = Selected::new(index as u32, value < 0.0);
        sums[element.sign()] += f64::from(value);
        counts[element.sign()] += 1;
        selected.push(element);
    }
    [0, 1].map(|sign| if counts[sign] == 0 { 0.0 } else { (sums[sign] / f64::from(counts[sign])) as f32 })
}

#[cfg(test)]
mod tests {
    use super::Scale;

    fn scale(scale: Scale, maxima: &[f32]) -> (f32, usize) {
        scale.of(maxima, &mut Vec::new())
    }

    #[test]
    fn a_far_too_large_maximum_counts_for_ten_medians() {
        let maxima = [1.0, 2.0, 3.0, 0.0, 20_000.0];
        assert_eq!(scale(Scale::Mean, &maxima), (20_006.0 / 5.0, 0));
        // The median of those above 0 is the third of four.
        assert_eq!(scale(Scale::Clamped, &maxima), (36.0 / 5.0, 0));
    }

    #[test]
    fn without_one_both_are_the_same() {
        for maxima in [&[][..], &[0.0, 0.0], &[0.5, 1.5, 4.0, 9.0], &[f32::NAN, 1.0]] {
            assert_eq!(scale(Scale::Mean, maxima), scale(Scale::Clamped, maxima), "{maxima:?}");
        }
    }
}
