//! The four strategies. Each says which bytes go to whom in each round, and does no I/O.
//!
//! To add one: a variant of [`Strategy`], which says all that others need to know of it, and a type that implements
//! [`LayerRounds`], or [`Rounds`] if it does not exchange layer by layer. The compiler and the tests that go through
//! [`Strategy::ALL`] find the rest; `choice.rs`, the program's cost model, Python's `config.py` and the guides name strategies, too.

mod by_layer;
mod choice;
mod gather;
mod reduce;
mod sharded;

use crate::error::{Cause, ExchangeError};
use crate::message::Context;
use crate::protocol::Learner;
use adacomp::internal::Output;
use adacomp::{Layer, Layout, Treatment, UnknownName};
#[cfg(doc)]
use by_layer::LayerRounds;
use by_layer::{ByLayer, Dense};
pub use choice::{StrategyChoice, density_of_bits, owners_select};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// How learners turn their gradients into the averaged one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Sends all layers in f32: each owner averages its shard and sends it to all. The traffic of a ring.
    Dense,
    /// The paper's: every learner sends its frame to all. What a learner receives grows with their number.
    Gather,
    /// Learners agree on one scale for each layer; owners add signs as integers and send the coded sums to all. What a learner
    /// receives grows with the logarithm of their number.
    Reduce,
    /// Owners average their shard, compress it again with a residual of their own, and send that to all. What a learner
    /// receives does not grow with their number, but values wait twice.
    Sharded,
}

impl Strategy {
    /// All strategies.
    pub const ALL: [Self; 4] = [Self::Dense, Self::Gather, Self::Reduce, Self::Sharded];

    /// Returns the collective operation of each round.
    pub(crate) fn rounds(self) -> &'static [Collective] {
        match self {
            Self::Dense | Self::Sharded => &[Collective::AllToAll, Collective::AllGather],
            Self::Gather => &[Collective::AllGather],
            Self::Reduce => &[Collective::AllGather, Collective::AllToAll, Collective::AllGather],
        }
    }

    /// Creates what the strategy remembers of a group of layers from round to round.
    pub(crate) fn group(self) -> Box<dyn Rounds> {
        match self {
            Self::Dense => Box::new(ByLayer::<Dense>::default()),
            Self::Gather => Box::new(gather::Gather::default()),
            Self::Reduce => Box::new(ByLayer::<reduce::Reduce>::default()),
            Self::Sharded => Box::new(ByLayer::<sharded::Sharded>::default()),
        }
    }

    /// Returns whether messages are frames, which have a header and checksum of their own, rather than envelopes.
    pub(crate) fn sends_frames(self) -> bool {
        self == Self::Gather
    }

    /// Returns whether every layer is sent dense in every step.
    pub(crate) fn is_dense(self) -> bool {
        self == Self::Dense
    }

    /// Returns whether owners keep residuals of their own.
    pub(crate) fn has_owner_residuals(self) -> bool {
        self == Self::Sharded
    }

    /// Checks that the strategy can exchange all layers.
    pub(crate) fn check(self, layout: &Layout) -> Result<(), ExchangeError> {
        let is_top_k = |layer: &&Layer| matches!(layer.treatment, Treatment::TopK(_));
        match (self, layout.layers().iter().find(is_top_k)) {
            (Self::Reduce | Self::Sharded, Some(layer)) => {
                Err(ExchangeError::Treatment { parameter: layer.name().to_owned(), strategy: self })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Dense => "dense",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Sharded => "sharded",
        })
    }
}

impl FromStr for Strategy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        UnknownName::find(name, "strategy", "dense, gather, reduce or sharded", Self::ALL)
    }
}

/// The collective operation of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    AllGather,
    AllToAll,
}

impl Collective {
    /// Returns to how many other learners a message goes.
    pub(crate) fn copies(self, sender: usize, receiver: usize, learners: usize) -> usize {
        match self {
            Self::AllGather => learners - 1,
            Self::AllToAll => usize::from(receiver != sender),
        }
    }
}

/// What is wrong with a message, and who sent it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fault {
    pub(crate) sender: usize,
    pub(crate) cause: Cause,
}

impl Fault {
    /// Returns a function that makes a fault of what is wrong with a sender's message.
    pub(crate) fn of<C: Into<Cause>>(sender: usize) -> impl Fn(C) -> Self {
        move |cause| Self { sender, cause: cause.into() }
    }
}

/// A strategy's rounds, for one group of layers.
pub(crate) trait Rounds: Send + Sync {
    /// Appends what a learner that is hosted here sends to a receiver. In an all-gather the receiver is the learner itself.
    fn send(&mut self, context: &Context<'_>, learner: &mut Learner, receiver: usize, message: &mut Vec<u8>);

    /// Takes what all learners sent: in an all-gather for all learners that are hosted here, in an all-to-all for one of them.
    /// Returns the first learner whose contents say that its gradient is not finite.
    fn receive(
        &mut self,
        context: &Context<'_>,
        learners: &mut [Learner],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault>;

    /// Writes the averaged gradient, an output for each of the group's layers.
    fn write(&mut self, context: &Context<'_>, output: &mut [Output<'_>]);
}

/// Returns the elements of a layer that a learner owns: the same number of bins for each learner, as nearly as can be. A layer
/// without bins is cut between any two elements.
///
/// Where bins do not divide evenly, which owners get one more depends on the layer, so that many small layers do not all
/// fall to the same owners.
pub fn shard(layout: &Layout, layer: usize, owner: usize, learners: usize) -> Range<usize> {
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

/// Returns the entry at this index, which is created if it is not there.
fn slot<T: Default>(entries: &mut Vec<T>, index: usize) -> &mut T {
    if entries.len() <= index {
        entries.resize_with(index + 1, T::default);
    }
    &mut entries[index]
}

#[cfg(test)]
mod tests {
    use super::shard;
    use adacomp::{Parameter, Policy};

    #[test]
    fn shards_cover_each_layer_and_are_balanced() {
        // Many layers with fewer bins than there are learners, as in large models on many machines.
        let parameters = (0..300).map(|number| Parameter::new(format!("{number}"), &[21, 500]));
        let layout = Policy::adacomp().layout(parameters).unwrap();
        for learners in [1, 2, 7, 128] {
            let mut owned = vec![0; learners];
            for layer in 0..layout.len() {
                let mut next = 0;
                for (owner, owned) in owned.iter_mut().enumerate() {
                    let shard = shard(&layout, layer, owner, learners);
                    assert_eq!((shard.start, shard.start % 500), (next, 0));
                    *owned += shard.len();
                    next = shard.end;
                }
                assert_eq!(next, 21 * 500);
            }
            let (most, mean) = (*owned.iter().max().unwrap(), owned.iter().sum::<usize>() / learners);
            assert!(most as f64 <= 1.15 * mean as f64, "{learners} learners: {most} over {mean}");
        }
    }
}
