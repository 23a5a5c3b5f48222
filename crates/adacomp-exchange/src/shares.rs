//! Who owns which part of a layer.

use adacomp::{Layout, Treatment};
use std::ops::Range;

/// The elements of a layer that a learner owns: the same number of bins for each, as nearly as can be. A layer that is sent
/// whole is cut between any two elements.
///
/// Where bins do not divide evenly, which owners get one more depends on the layer, so that many small layers do not all
/// fall to the same owners.
pub(crate) fn share(layout: &Layout, layer: usize, owner: usize, learners: usize) -> Range<usize> {
    let elements = layout[layer].elements();
    let bin = match layout[layer].treatment {
        Treatment::Bins(bin) => bin as usize,
        _ => 1,
    };
    let bins = elements.div_ceil(bin) as u128;
    let (learners, phase) = (learners as u128, layer as u128 * 7919 % learners as u128);
    let cut = |owner: usize| elements.min(((bins * owner as u128 + phase) / learners) as usize * bin);
    cut(owner)..cut(owner + 1)
}

#[cfg(test)]
mod tests {
    use super::share;
    use adacomp::{Parameter, Policy};

    #[test]
    fn shares_cover_each_layer_and_are_balanced() {
        // Many layers with fewer bins than there are learners, as in large models on many machines.
        let parameters = (0..300).map(|number| Parameter::new(format!("{number}"), &[21, 500]));
        let layout = Policy::adacomp().layout(parameters).unwrap();
        for learners in [1, 2, 7, 128] {
            let mut owned = vec![0; learners];
            for layer in 0..layout.len() {
                let mut next = 0;
                for (owner, owned) in owned.iter_mut().enumerate() {
                    let share = share(&layout, layer, owner, learners);
                    assert_eq!((share.start, share.start % 500), (next, 0));
                    *owned += share.len();
                    next = share.end;
                }
                assert_eq!(next, 21 * 500);
            }
            let (most, mean) = (*owned.iter().max().unwrap(), owned.iter().sum::<usize>() / learners);
            assert!(most as f64 <= 1.15 * mean as f64, "{learners} learners: {most} over {mean}");
        }
    }
}
