//! What one layer sends in one step, in memory.

use crate::kernel::BLOCK;
use std::ops::Range;

/// One selected element: its index in the tensor, and the sign of what is sent.
///
/// Both share 32 bits, so that a selection sorts by index and takes little memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Selected(u32);

impl Selected {
    /// Creates an element from its index and the sign of its value.
    pub fn new(index: u32, negative: bool) -> Self {
        debug_assert!(index < 1 << 31);
        Self(index << 1 | u32::from(negative))
    }

    /// Returns the index in the flattened tensor.
    pub fn index(self) -> usize {
        (self.0 >> 1) as usize
    }

    /// Returns whether the value is negative.
    pub fn is_negative(self) -> bool {
        self.sign() == 1
    }

    /// Returns the place in its block, with the sign in the lowest bit.
    pub(crate) fn place(self) -> u16 {
        (self.0 & (2 * BLOCK as u32 - 1)) as u16
    }

    /// Does the reverse.
    pub(crate) fn at(block: usize, place: u16) -> Self {
        Self((block * 2 * BLOCK) as u32 | u32::from(place))
    }

    /// Returns 0 for positive, 1 for negative.
    pub(crate) fn sign(self) -> usize {
        (self.0 & 1) as usize
    }
}

/// Returns whether elements are in ascending order and in this range. It takes a pass over them, a vector at a time.
pub(crate) fn ascend_within(selected: &[Selected], range: Range<usize>) -> bool {
    let (Some(first), Some(last)) = (selected.first(), selected.last()) else { return true };
    let pairs = selected.iter().zip(&selected[1..]);
    range.contains(&first.index())
        && range.contains(&last.index())
        && pairs.fold(true, |ascends, (before, after)| ascends & (before.index() < after.index()))
}

/// Reserves capacity for `more` elements. A model's selections are long, above all in the first steps, and their memory is
/// kept, so it grows by an eighth at a time and not twofold.
pub(crate) fn make_room<T>(buffer: &mut Vec<T>, more: usize) {
    if buffer.capacity() - buffer.len() < more {
        buffer.reserve_exact(more + buffer.len() / 8);
    }
}

/// About the length of the longest recent selection. The selections of the first steps, from empty residuals, are several
/// times longer than all later ones, and their memory is given back.
#[derive(Debug, Clone, Default)]
pub(crate) struct HighWaterMark(usize);

impl HighWaterMark {
    /// Counts a selection of this length, and shrinks its buffer if that is far longer than the longest and `more` elements.
    pub(crate) fn count<T>(&mut self, length: usize, more: usize, buffer: &mut Vec<T>) {
        // It fades slowly: lengths may go up and down by groups of layers, or kinds of steps.
        self.0 = length.max(self.0 - self.0 / 64);
        // Less than a page or two is not worth it.
        let enough = self.0 + self.0 / 8 + more;
        if buffer.capacity() > enough + self.0 / 4 + 2048 {
            buffer.shrink_to(enough);
        }
    }
}

/// What one layer sends in one step: borrowed from the compressor that made it or the frame that carried it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Packet<'a> {
    /// Every element.
    Dense(&'a [f32]),
    /// Selected elements, each sent as one of two values.
    Sparse(Sparse<'a>),
}

/// Selected elements in ascending order, and the two values that they are sent as.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sparse<'a> {
    /// What a positive element is sent as, then what a negative one is. AdaComp: `[scale, -scale]`.
    pub values: [f32; 2],
    /// The elements.
    pub selected: &'a [Selected],
}

impl<'a> Sparse<'a> {
    /// Returns the elements with an index in this range.
    pub fn within(self, range: Range<usize>) -> Sparse<'a> {
        let before = |index: usize| self.selected.partition_point(|element| element.index() < index);
        let (start, end) = (before(range.start), before(range.end));
        Sparse { selected: &self.selected[start..end.max(start)], ..self }
    }

    /// Returns the index of each element, and what it is sent as.
    pub fn elements(self) -> impl Iterator<Item = (usize, f32)> + use<'a> {
        self.selected.iter().map(move |element| (element.index(), self.values[element.sign()]))
    }
}

impl Packet<'_> {
    /// Adds the packet to `output`, which has one element for each of the layer.
    ///
    /// # Panics
    /// If `output` is shorter than the layer.
    pub fn add_to(&self, output: &mut [f32]) {
        match self {
            Self::Dense(values) => {
                output[..values.len()].iter_mut().zip(*values).for_each(|(sum, value)| *sum += value);
            }
            Self::Sparse(sparse) => sparse.elements().for_each(|(index, value)| output[index] += value),
        }
    }
}
