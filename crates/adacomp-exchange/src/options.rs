//! How learners exchange.

use crate::strategy::Strategy;
use adacomp::Codec;
use std::num::NonZeroU32;

/// How to exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The strategy.
    pub strategy: Strategy,
    /// How frames are written; only `gather` sends frames.
    pub codec: Codec,
    /// Layers are exchanged in groups of at least so many elements, each as soon as it has been given. Unless told, all
    /// layers are one group.
    pub group: usize,
    /// With `sharded`: how many times shorter than the learners' the bins of owners are. They send about so many times more, and
    /// keep less waiting.
    pub owner_divisor: NonZeroU32,
}

impl From<Strategy> for Options {
    fn from(strategy: Strategy) -> Self {
        Self { strategy, codec: Codec::default(), group: usize::MAX, owner_divisor: NonZeroU32::MIN }
    }
}
