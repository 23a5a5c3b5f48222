//! Random numbers that depend on what they are for, never on when or where they are drawn.
//!
//! Order, augmentation and dropout of a sample come from generators of (seed, epoch, sample), so results do not depend on
//! threads, transport or the number of learners, and a resumed run draws what it would have drawn.

use fastrand::Rng;

/// The source of all draws of one epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draw {
    pub(crate) seed: u64,
    pub(crate) epoch: usize,
}

/// What a generator is for: draws for one purpose must not repeat those for another.
const ORDER: u64 = 0;
const OFFSET: u64 = 1;
const AUGMENTATION: u64 = 2;
/// Of the first dropout layer; those of the others follow.
const DROPOUT: u64 = 3;

impl Draw {
    /// Returns all samples, shuffled: the order in which this epoch takes them.
    pub(crate) fn order(&self, samples: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..samples as u32).collect();
        self.generator(ORDER, 0).shuffle(&mut order);
        order
    }

    /// Returns where this epoch starts to cut a text into samples.
    pub(crate) fn offset(&self, below: usize) -> usize {
        self.generator(OFFSET, 0).usize(..below)
    }

    /// Returns a generator for changing a sample.
    pub(crate) fn augmentation(&self, sample: usize) -> Rng {
        self.generator(AUGMENTATION, sample)
    }

    /// Returns a generator for dropping activations of a sample in the dropout layer of this number.
    pub(crate) fn dropout(&self, layer: usize, sample: usize) -> Rng {
        self.generator(DROPOUT + layer as u64, sample)
    }

    fn generator(&self, purpose: u64, sample: usize) -> Rng {
        let parts = [self.seed, self.epoch as u64, purpose, sample as u64];
        Rng::with_seed(parts.into_iter().fold(0, |state, part| mix(state ^ part)))
    }
}

/// Takes SplitMix64's step, so that neighbouring inputs have unrelated outputs. Seeds of old runs depend on it.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_sample_once_and_is_another_in_the_next_epoch() {
        let order = Draw { seed: 7, epoch: 0 }.order(1000);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        assert_eq!(order, Draw { seed: 7, epoch: 0 }.order(1000));
        assert_ne!(order, Draw { seed: 7, epoch: 1 }.order(1000));
        assert_ne!(order, Draw { seed: 8, epoch: 0 }.order(1000));
    }

    #[test]
    fn draws_for_neighbours_and_for_other_purposes_differ() {
        let draw = Draw { seed: 1, epoch: 2 };
        let first = |mut rng: Rng| rng.u64(..);
        let draws = [
            first(draw.augmentation(0)),
            first(draw.augmentation(1)),
            first(draw.dropout(0, 0)),
            first(draw.dropout(1, 0)),
            first(Draw { seed: 1, epoch: 3 }.augmentation(0)),
        ];
        let distinct: std::collections::HashSet<_> = draws.iter().collect();
        assert_eq!(distinct.len(), draws.len());
    }
}
