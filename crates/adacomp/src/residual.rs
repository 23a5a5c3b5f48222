//! One layer's residual, and the delayed subtraction of what was sent from it.
//!
//! A step stores `G` and keeps its selection. Once the step is committed, the selection is *unsubtracted*: what was sent is
//! still in the residual. The next step loads every element anyway and subtracts it then, a block ahead of the selection
//! rule, so that a step goes through memory once. A rollback forgets the selection, which leaves `G`.
//!
//! The unsubtracted selection is no longer needed when the next one is complete. So a layer has memory for one selection, and
//! the next is made in a buffer that all layers share.

use crate::gradient::Gradient;
use crate::packet::{HighWaterMark, Packet, Selected, Sparse};
use crate::selection::{Rule, Scratch, select_top};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Pending {
    /// Nothing yet: the selection is the last step's, and unsubtracted.
    #[default]
    Nothing,
    Selection,
    /// A selection from a residual that is kept elsewhere, or from none.
    External,
    Flush,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Residual {
    values: Vec<f32>,
    /// What the open step sends, or what the last one sent and is unsubtracted.
    selection: Selection,
    pending: Pending,
    /// The largest magnitude that counts of what a flush sends, if not all does.
    most: Option<f32>,
    high_water: HighWaterMark,
}

impl Residual {
    pub(crate) fn new(elements: usize) -> Self {
        Self { values: vec![0.0; elements], ..Self::default() }
    }

    /// Adds a gradient and selects by bins. Returns the number of bins that are not finite.
    pub(crate) fn select_bins(&mut self, gradient: Gradient<'_>, rule: Rule, scratch: &mut Scratch) -> usize {
        debug_assert_eq!(self.pending, Pending::Nothing);
        scratch.select(&mut self.values, gradient, self.selection.sparse(), rule);
        self.selection.selected.clear();
        self.keep(scratch.selected());
        self.pending = Pending::Selection;
        let (scale, bad_bins) = rule.scale.of(&scratch.maxima, &mut scratch.sorted);
        self.selection.values = [scale, -scale];
        if bad_bins > 0 {
            self.clear_non_finite();
        }
        bad_bins
    }

    /// Adds a gradient and selects the largest `percent` of the tensor. Returns 1 if the sum is not finite, else 0.
    pub(crate) fn select_top(
        &mut self,
        gradient: Gradient<'_>,
        factor: f32,
        percent: f32,
        scratch: &mut Scratch,
    ) -> usize {
        debug_assert_eq!(self.pending, Pending::Nothing);
        self.subtract();
        self.pending = Pending::Selection;
        let gradient = gradient.read(0..self.values.len(), factor, &mut scratch.converted);
        if !self.values.iter().zip(gradient).all(|(r, dw)| (r + dw).is_finite()) {
            self.clear_non_finite();
            return 1;
        }
        self.values.iter_mut().zip(gradient).for_each(|(r, dw)| *r += dw);
        self.selection.values =
            select_top(&self.values, percent, &mut scratch.magnitudes, &mut self.selection.selected);
        0
    }

    /// Sets elements of the residual that are not finite to 0, in a step that is dropped anyway. Only a gradient that another
    /// thread changed between the two passes over it can have brought them there; the layer would never be finite again.
    fn clear_non_finite(&mut self) {
        self.values.iter_mut().filter(|value| !value.is_finite()).for_each(|value| *value = 0.0);
    }

    /// Fills the empty selection with these parts, in order.
    fn keep<'a>(&mut self, parts: impl Iterator<Item = &'a [Selected]> + Clone) {
        let (length, selected) = (parts.clone().map(<[_]>::len).sum(), &mut self.selection.selected);
        self.high_water.count(length, 0, selected);
        if selected.capacity() < length {
            selected.reserve_exact(length + length / 8);
        }
        parts.for_each(|part| selected.extend_from_slice(part));
    }

    /// Sends what was selected elsewhere, or nothing. The residual here is not changed.
    pub(crate) fn take_selection(&mut self, scale: f32, selected: &[Selected]) {
        debug_assert_eq!(self.pending, Pending::Nothing);
        self.subtract();
        self.selection.values = [scale, -scale];
        self.keep(std::iter::once(selected));
        self.pending = Pending::External;
    }

    /// Sends the residual in the open step, instead of what was selected.
    pub(crate) fn flush(&mut self) {
        self.pending = Pending::Flush;
    }

    /// Returns what the open step sends.
    pub(crate) fn packet(&self) -> Option<Packet<'_>> {
        match self.pending {
            Pending::Nothing => None,
            Pending::Selection | Pending::External => Some(Packet::Sparse(self.selection.sparse())),
            Pending::Flush => Some(Packet::Dense(&self.values)),
        }
    }

    /// Returns what the last step sent, as long as it is unsubtracted.
    pub(crate) fn last_sent(&self) -> Option<Packet<'_>> {
        let is_unsubtracted = self.pending == Pending::Nothing && !self.selection.selected.is_empty();
        is_unsubtracted.then(|| Packet::Sparse(self.selection.sparse()))
    }

    /// Returns whether the open step sends selected elements.
    pub(crate) fn has_selection(&self) -> bool {
        matches!(self.pending, Pending::Selection | Pending::External)
    }

    /// Sends the selected elements of the open step as `scale` and its negative.
    pub(crate) fn set_scale(&mut self, scale: f32) {
        self.selection.values = [scale, -scale];
    }

    /// Lets no more than `most` count of each value that the open step sends. What is beyond stays in the residual.
    pub(crate) fn clamp(&mut self, most: f32) {
        match self.pending {
            Pending::Flush => self.most = Some(most).filter(|most| most.is_finite()),
            _ => self.selection.values = self.selection.values.map(|value| value.clamp(-most, most)),
        }
    }

    /// Ends a step that every learner has: what it sent leaves the residual.
    pub(crate) fn commit(&mut self) {
        match self.pending {
            // Unsubtracted from now on, or still.
            Pending::Nothing | Pending::Selection => {}
            Pending::External => self.selection.selected.clear(),
            Pending::Flush => {
                self.selection.selected.clear();
                match self.most {
                    None => self.values.fill(0.0),
                    Some(most) => self.values.iter_mut().for_each(|r| *r -= r.clamp(-most, most)),
                }
            }
        }
        self.most = None;
        self.pending = Pending::Nothing;
    }

    /// Ends a step that is used nowhere: what it would have sent stays in the residual.
    pub(crate) fn rollback(&mut self) {
        if self.pending != Pending::Nothing {
            self.selection.selected.clear();
        }
        self.pending = Pending::Nothing;
        self.most = None;
    }

    /// Subtracts now what is unsubtracted, instead of in the next step.
    fn subtract(&mut self) {
        if self.pending == Pending::Nothing {
            self.selection.sparse().elements().for_each(|(index, value)| self.values[index] -= value);
            self.selection.selected.clear();
        }
    }

    /// Returns the residual with nothing unsubtracted.
    pub(crate) fn subtracted(&mut self) -> &mut [f32] {
        self.subtract();
        &mut self.values
    }
}

/// The size of a residual.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidualStatistics {
    /// The Euclidean norm.
    pub norm: f64,
}

impl ResidualStatistics {
    pub(crate) fn of(residual: &[f32]) -> Self {
        // Independent sums, so that the loop is not one long chain of additions.
        let mut squares = [0.0f64; 8];
        let (blocks, rest) = residual.as_chunks::<8>();
        let mut add = |values: &[f32]| {
            let squares = squares.iter_mut().zip(values);
            squares.for_each(|(square, value)| *square += f64::from(*value) * f64::from(*value));
        };
        blocks.iter().for_each(|block| add(block));
        add(rest);
        Self { norm: squares.iter().sum::<f64>().sqrt() }
    }
}
