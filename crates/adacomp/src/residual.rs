//! One layer's residual, and the delayed subtraction of what was sent from it.
//!
//! A step stores `G` and keeps its selection. Once the step is committed, the selection is *owed*: what was sent is still
//! in the residual. The next step loads every element anyway, and subtracts it then, a block ahead of the selection
//! rule, so that a step goes through memory once. A step that is dropped just forgets its selection, which leaves `G`.
//!
//! What is owed is over when the next selection is complete, so a layer has room for one of the two: the next is made in a
//! buffer that all layers share.

use crate::gradient::Gradient;
use crate::kernel::{Kernel, Run};
use crate::packet::{Lately, Packet, Selected, Sparse};
use crate::policy::MAX_BIN;
use crate::scale::Scale;
use crate::topk;

/// Elements that are settled, then selected from, while they are in the nearest cache.
pub(crate) const BLOCK: usize = 1024;

/// The room that kernels have in a selection for the next block, which may be a whole bin, all of it selected.
const ROOM: usize = 2 * MAX_BIN as usize;

/// A thread gets at least so many elements: starting it for fewer would take longer.
const WORTH_A_THREAD: usize = 1 << 17;

/// Selected elements and what they are sent as.
#[derive(Debug, Clone, Default)]
struct Selection {
    values: [f32; 2],
    selected: Vec<Selected>,
}

impl Selection {
    fn sparse(&self) -> Sparse<'_> {
        Sparse { values: self.values, selected: &self.selected }
    }
}

/// What the open step sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    /// Nothing yet: the selection is the last step's, and owed.
    Nothing,
    Selection,
    /// A selection from a residual that is kept elsewhere, or from none.
    Elsewhere,
    Everything,
}

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
    maxima: Vec<f32>,
    pub(crate) sorted: Vec<f32>,
    magnitudes: Vec<u32>,
    workers: Vec<Worker>,
}

/// What one thread needs for itself.
#[derive(Debug, Clone, Default)]
struct Worker {
    converted: Vec<f32>,
    selected: Vec<Selected>,
    /// The longest selection of the open step.
    longest: usize,
    lately: Lately,
}

impl Scratch {
    fn workers(&mut self, count: usize) -> &mut [Worker] {
        if self.workers.len() < count {
            self.workers.resize_with(count, Worker::default);
        }
        &mut self.workers[..count]
    }

    /// A buffer for converted gradients.
    pub(crate) fn converted(&mut self) -> &mut Vec<f32> {
        &mut self.workers(1)[0].converted
    }

    /// The step is over: gives back what only a longer one needed.
    pub(crate) fn end_step(&mut self) {
        for worker in &mut self.workers {
            let longest = std::mem::take(&mut worker.longest);
            worker.lately.count(longest, ROOM, &mut worker.selected);
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Residual {
    values: Vec<f32>,
    /// What the open step sends, or what the last one sent and is owed.
    selection: Selection,
    pending: Pending,
    lately: Lately,
}

impl Residual {
    pub(crate) fn new(elements: usize) -> Self {
        Self {
            values: vec![0.0; elements],
            selection: Selection::default(),
            pending: Pending::Nothing,
            lately: Lately::default(),
        }
    }

    /// Adds a gradient and selects by bins. The number of bins that are not finite.
    pub(crate) fn select_bins(&mut self, gradient: Gradient<'_>, rule: Rule, scratch: &mut Scratch) -> usize {
        debug_assert_eq!(self.pending, Pending::Nothing);
        let bins = self.values.len().div_ceil(rule.bin);
        let threads = rule.threads.min(self.values.len() / WORTH_A_THREAD).clamp(1, bins.max(1));
        let mut maxima = std::mem::take(&mut scratch.maxima);
        maxima.resize(bins, 0.0);

        let whole = Part {
            first: 0,
            residual: &mut self.values,
            gradient,
            owed: self.selection.sparse(),
            maxima: &mut maxima,
        };
        let workers = scratch.workers(threads);
        whole.select_on_threads(rule, bins.div_ceil(threads), workers);
        self.selection.selected.clear();
        let selected = workers.iter().map(|worker| worker.selected.as_slice());
        self.keep(selected);
        self.pending = Pending::Selection;

        let (scale, bad_bins) = rule.scale.of(&maxima, &mut scratch.sorted);
        self.selection.values = [scale, -scale];
        scratch.maxima = maxima;
        bad_bins
    }

    /// Adds a gradient and selects the largest `percent` of the whole tensor. 1 if the gradient is not finite.
    pub(crate) fn select_top(
        &mut self,
        gradient: Gradient<'_>,
        factor: f32,
        percent: f32,
        scratch: &mut Scratch,
    ) -> usize {
        let bad = self.add_whole(gradient, factor, scratch);
        if bad == 0 {
            self.selection.values =
                topk::select(&self.values, percent, &mut scratch.magnitudes, &mut self.selection.selected);
        }
        self.pending = Pending::Selection;
        bad
    }

    /// Has the empty selection be these, one after the other.
    fn keep<'a>(&mut self, parts: impl Iterator<Item = &'a [Selected]> + Clone) {
        let (length, selected) = (parts.clone().map(<[_]>::len).sum(), &mut self.selection.selected);
        self.lately.count(length, 0, selected);
        if selected.capacity() < length {
            selected.reserve_exact(length + length / 8);
        }
        parts.for_each(|part| selected.extend_from_slice(part));
    }

    /// Sends what was selected elsewhere, or nothing. The residual here stays as it is.
    pub(crate) fn take_selection(&mut self, scale: f32, selected: &[Selected]) {
        debug_assert_eq!(self.pending, Pending::Nothing);
        self.settle();
        self.selection.values = [scale, -scale];
        self.keep(std::iter::once(selected));
        self.pending = Pending::Elsewhere;
    }

    /// Has the open step send everything, rather than what it has selected.
    pub(crate) fn send_everything(&mut self) {
        self.pending = Pending::Everything;
    }

    /// `R = R + dW` over the whole tensor, unless that is not finite. 1 in that case.
    fn add_whole(&mut self, gradient: Gradient<'_>, factor: f32, scratch: &mut Scratch) -> usize {
        debug_assert_eq!(self.pending, Pending::Nothing);
        self.settle();
        let gradient = gradient.read(0..self.values.len(), factor, scratch.converted());
        if !self.values.iter().zip(gradient).all(|(r, dw)| (r + dw).is_finite()) {
            return 1;
        }
        self.values.iter_mut().zip(gradient).for_each(|(r, dw)| *r += dw);
        0
    }

    /// What the open step sends.
    pub(crate) fn packet(&self) -> Option<Packet<'_>> {
        match self.pending {
            Pending::Nothing => None,
            Pending::Selection | Pending::Elsewhere => Some(Packet::Sparse(self.selection.sparse())),
            Pending::Everything => Some(Packet::Dense(&self.values)),
        }
    }

    /// What the last step sent, as long as it is owed.
    pub(crate) fn last_sent(&self) -> Option<Packet<'_>> {
        let is_owed = self.pending == Pending::Nothing && !self.selection.selected.is_empty();
        is_owed.then(|| Packet::Sparse(self.selection.sparse()))
    }

    /// Whether the open step sends selected elements.
    pub(crate) fn has_selection(&self) -> bool {
        matches!(self.pending, Pending::Selection | Pending::Elsewhere)
    }

    /// Sends the selected elements of the open step as this and its negative.
    pub(crate) fn set_scale(&mut self, scale: f32) {
        self.selection.values = [scale, -scale];
    }

    /// What the open step sends has arrived everywhere: it leaves the residual.
    pub(crate) fn commit(&mut self) {
        match self.pending {
            // Owed from now on, or still.
            Pending::Nothing | Pending::Selection => {}
            Pending::Elsewhere => self.selection.selected.clear(),
            Pending::Everything => {
                self.selection.selected.clear();
                self.values.fill(0.0);
            }
        }
        self.pending = Pending::Nothing;
    }

    /// What the open step sends is not used anywhere: it stays in the residual.
    pub(crate) fn take_back(&mut self) {
        if self.pending != Pending::Nothing {
            self.selection.selected.clear();
        }
        self.pending = Pending::Nothing;
    }

    /// Subtracts what is owed now rather than in the next step.
    fn settle(&mut self) {
        if self.pending == Pending::Nothing {
            self.selection.sparse().take_from(&mut self.values);
            self.selection.selected.clear();
        }
    }

    /// The residual as it is between steps.
    pub(crate) fn settled(&mut self) -> &mut [f32] {
        self.settle();
        &mut self.values
    }
}

/// Consecutive bins of a tensor; the last may be short.
struct Part<'a> {
    /// The index in the tensor of the part's first element.
    first: usize,
    residual: &'a mut [f32],
    gradient: Gradient<'a>,
    owed: Sparse<'a>,
    maxima: &'a mut [f32],
}

impl<'a> Part<'a> {
    /// Splits after so many bins.
    fn split(self, bins: usize, bin: usize) -> (Self, Self) {
        let middle = self.residual.len().min(bins * bin);
        let (residual, residual_after) = self.residual.split_at_mut(middle);
        let (gradient, gradient_after) = self.gradient.split_at(middle);
        let (maxima, maxima_after) = self.maxima.split_at_mut(bins.min(self.maxima.len()));
        let end = self.first + middle;
        let (owed, owed_after) = (self.owed.within(0..end), self.owed.within(end..usize::MAX));
        (
            Self { first: self.first, residual, gradient, owed, maxima },
            Self {
                first: self.first + middle,
                residual: residual_after,
                gradient: gradient_after,
                owed: owed_after,
                maxima: maxima_after,
            },
        )
    }

    /// Each worker takes so many bins into a selection of its own; if there is only one, on this thread.
    fn select_on_threads(self, rule: Rule, bins: usize, workers: &mut [Worker]) {
        if let [worker] = workers {
            return self.select(rule, worker);
        }
        let mut rest = self;
        std::thread::scope(|scope| {
            for worker in workers {
                let part;
                (part, rest) = rest.split(bins, rule.bin);
                scope.spawn(move || part.select(rule, worker));
            }
        });
    }

    /// Settles and selects, block by block. Settling goes a block ahead: its stores are then out of the way of the
    /// kernel's loads, and it asks for memory that the kernel will need.
    fn select(mut self, rule: Rule, worker: &mut Worker) {
        let Worker { converted, selected, longest, .. } = worker;
        selected.clear();
        let block = (BLOCK / rule.bin).max(1) * rule.bin;
        let elements = self.residual.len();
        self.settle_below(block.min(elements));
        for start in (0..elements).step_by(block) {
            let end = elements.min(start + block);
            self.settle_below(elements.min(end + block));
            let gradient = self.gradient.read(start..end, rule.factor, converted);
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

    /// Subtracts what is owed in the part's first `end` elements and has not been subtracted yet.
    fn settle_below(&mut self, end: usize) {
        let mut owed = self.owed.selected;
        while let [element, rest @ ..] = owed
            && element.index() < self.first + end
        {
            self.residual[element.index() - self.first] -= self.owed.values[element.sign()];
            owed = rest;
        }
        self.owed.selected = owed;
    }
}
