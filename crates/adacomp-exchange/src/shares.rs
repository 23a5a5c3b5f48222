//! Who owns which part of a layer.

use adacomp::{Layer, Treatment};
use std::ops::Range;

/// The elements of a layer that a learner owns: the same number of bins for each, as nearly as can be. A layer that is sent
/// whole is cut between any two elements.
pub(crate) fn share(layer: &Layer, owner: usize, learners: usize) -> Range<usize> {
    let elements = layer.elements();
    let bin = match layer.treatment {
        Treatment::Bins(bin) => bin as usize,
        _ => 1,
    };
    let bins = elements.div_ceil(bin) as u128;
    let cut = |owner: usize| elements.min((bins * owner as u128 / learners as u128) as usize * bin);
    cut(owner)..cut(owner + 1)
}
