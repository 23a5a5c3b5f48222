//! A run as pointers that walk over it bin by bin: what the x86 variants share.
#![allow(unsafe_code)]

use super::{INFINITE, Run};
use crate::packet::{Selected, make_room};

/// How far ahead memory is asked for: past the block whose old selections are being subtracted meanwhile.
const AHEAD: usize = 2 * crate::blocks::BLOCK;

/// Runs a variant over all bins: its `small` where the vectors of a bin are of a number that is listed, which it then knows when it
/// is compiled, and else its `large`.
///
/// It is for functions with `const PLAIN: bool`, in modules with `LANES`, `small::<VECTORS, PLAIN>` and `large::<PLAIN>`.
macro_rules! by_size {
    ($run:expr, $($vectors:literal)+) => {{
        // Entries are written a vector at a time, so up to a vector past the last that counts.
        let mut cursor = Cursor::new($run, LANES);
        match cursor.bin.div_ceil(LANES) {
            $($vectors => small::<$vectors, PLAIN>(&mut cursor),)+
            _ => large::<PLAIN>(&mut cursor),
        }
        // SAFETY: `next` moves only past entries that have been written.
        unsafe { cursor.finish() };
    }};
}
pub(super) use by_size;

pub(super) struct Cursor<'a> {
    /// The current bin's `R`, then `G`.
    pub(super) residual: *mut f32,
    /// The current bin's `dW`.
    pub(super) gradient: *const f32,
    /// Elements of a bin.
    pub(super) bin: usize,
    /// `f - 1`.
    pub(super) extra: f32,
    /// Twice the index of the bin's first element: an entry of the selection without its sign.
    pub(super) entry: u32,
    /// Where the next entry goes, in the spare capacity of `selected`.
    pub(super) next: *mut u32,
    maxima: std::slice::IterMut<'a, f32>,
    selected: &'a mut Vec<Selected>,
}

impl<'a> Cursor<'a> {
    /// Starts at the first bin, with room for an entry for every element and `slack` more.
    pub(super) fn new(run: Run<'a>, slack: usize) -> Self {
        make_room(run.selected, run.residual.len() + slack);
        let next = run.selected.spare_capacity_mut().as_mut_ptr().cast();
        Self {
            residual: run.residual.as_mut_ptr(),
            gradient: run.gradient.as_ptr(),
            bin: run.bin,
            extra: run.extra,
            entry: run.first << 1,
            next,
            maxima: run.maxima.iter_mut(),
            selected: run.selected,
        }
    }

    /// Bins that are left.
    #[inline(always)]
    pub(super) fn bins(&self) -> usize {
        self.maxima.len()
    }

    /// Writes the current bin's maximum down, given as bits; whether the bin is finite.
    #[inline(always)]
    pub(super) fn record(&mut self, peak: u32) -> bool {
        let finite = peak < INFINITE;
        if let Some(maximum) = self.maxima.next() {
            *maximum = if finite { f32::from_bits(peak) } else { f32::NAN };
        }
        finite
    }

    /// Goes to the next bin.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.residual = self.residual.wrapping_add(self.bin);
        self.gradient = self.gradient.wrapping_add(self.bin);
        self.entry = self.entry.wrapping_add(2 * self.bin as u32);
    }

    /// Asks for memory that will be needed soon.
    #[inline(always)]
    pub(super) fn prefetch(&self, at: usize) {
        super::prefetch(self.residual.wrapping_add(at + AHEAD));
        super::prefetch(self.gradient.wrapping_add(at + AHEAD));
    }

    /// Makes the entries part of the selection.
    ///
    /// # Safety
    /// Every entry before `next` must have been written.
    pub(super) unsafe fn finish(self) {
        let start = self.selected.as_ptr().cast::<u32>();
        // SAFETY: both point into the vector's one allocation, which `new` reserved and which has not moved since; the
        // entries are there by the contract above.
        unsafe { self.selected.set_len(self.next.offset_from_unsigned(start)) };
    }
}
