//! The selection rule over a run of bins, in several variants that agree to the bit.
//!
//! [`scalar`] is the definition. Every variant makes two passes over a bin while it is in the nearest cache: the first
//! finds the bin maximum and only reads, so a bin with a NaN or an infinity is known before anything of it is stored;
//! the second stores `G` and selects. What was selected is not subtracted here: the scale is not known before the last
//! bin, and the next step loads every element anyway (see `residual.rs`).
//!
//! A gradient that another thread changes between the passes can bring a NaN into the residual. To look again at what is stored
//! would not be free; the next step finds the bin bad, and `residual.rs` removes the NaN.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;
mod stream;
#[cfg(test)]
mod testkit;

use crate::packet::Selected;
use std::fmt;
pub(crate) use stream::BLOCK;
pub use stream::{Output, write_blocks};

/// Consecutive bins of one tensor, all of one length.
pub(crate) struct Run<'a> {
    /// `R` on entry, `G` on return; a bin that is not finite keeps `R`.
    pub(crate) residual: &'a mut [f32],
    /// `dW`.
    pub(crate) gradient: &'a [f32],
    /// Elements of a bin.
    pub(crate) bin: usize,
    /// `f - 1`: how often the gradient is added on top of `G` for the soft threshold.
    pub(crate) extra: f32,
    /// The index in its tensor of the run's first element.
    pub(crate) first: u32,
    /// Takes the maximum of each bin, NaN for a bin that is not finite.
    pub(crate) maxima: &'a mut [f32],
    /// Selected elements are appended here.
    pub(crate) selected: &'a mut Vec<Selected>,
}

impl Run<'_> {
    /// Checks the lengths that every variant relies on; the unsafe code of a variant is sound only if they hold.
    fn check(&self) {
        assert!(self.bin > 0);
        assert_eq!(self.residual.len(), self.gradient.len());
        assert_eq!(self.residual.len(), self.bin * self.maxima.len());
        assert!(self.first as usize + self.residual.len() <= crate::policy::MAX_ELEMENTS);
    }
}

/// Clears the sign bit of an f32: what is left orders like the absolute value, with NaN above infinity.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// The magnitude of infinity; a larger one is NaN.
const INFINITE: u32 = 0x7f80_0000;

/// Returns the largest magnitude; NaN or infinity if one of the values is not finite.
pub fn largest(values: impl Iterator<Item = f32>) -> f32 {
    f32::from_bits(values.fold(0, |largest, value| largest.max(value.to_bits() & MAGNITUDE)))
}

/// One variant of the selection rule, known to run on this machine.
///
/// All variants give the same bits. Use [`Kernel::best`]; the others are for tests and benchmarks.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    name: &'static str,
    run: fn(Run<'_>),
}

impl Kernel {
    /// Returns the fastest variant of this machine.
    pub fn best() -> Self {
        *Self::all().last().expect("the scalar variant runs everywhere")
    }

    /// Returns the variants that this machine can run, slowest first. The first is the definition of the rule.
    pub fn all() -> Vec<Self> {
        let variants = [
            Some(Self { name: "scalar", run: scalar::run }),
            #[cfg(target_arch = "x86_64")]
            avx2::kernel(),
        ];
        variants.into_iter().flatten().collect()
    }

    pub(crate) fn run(self, run: Run<'_>) {
        run.check();
        (self.run)(run)
    }
}

/// Writes `scalar` or `avx2`.
impl fmt::Display for Kernel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name)
    }
}
