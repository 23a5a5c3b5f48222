//! The ways to exchange.

use crate::dense::Dense;
use crate::error::Cause;
use crate::gather::Gather;
use crate::layers::ByLayer;
use crate::member::Member;
use crate::reduce::Reduce;
use crate::setting::Setting;
use crate::sharded::Sharded;
use adacomp::UnknownName;
use std::fmt;
use std::str::FromStr;

/// How learners turn their gradients into the averaged one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Everything, in f32: each owner sums its share and sends it to all. The traffic of a ring.
    Dense,
    /// The paper's: every learner sends its frame to all. What a learner receives grows with their number.
    Gather,
    /// Learners agree on a scale a layer, owners add signs as integers and send the coded sums to all. Nothing is delayed
    /// further, and what a learner receives grows with the logarithm of their number.
    Reduce,
    /// Owners average their share, compress it again with a residual of their own, and send that to all. What a learner
    /// receives does not grow with their number, but values wait twice.
    Sharded,
}

impl Strategy {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Dense, Self::Gather, Self::Reduce, Self::Sharded];

    pub(crate) fn rounds(self) -> Box<dyn Rounds> {
        match self {
            Self::Dense => Box::new(ByLayer::<Dense>::default()),
            Self::Gather => Box::new(Gather::default()),
            Self::Reduce => Box::new(ByLayer::<Reduce>::default()),
            Self::Sharded => Box::new(ByLayer::<Sharded>::default()),
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
        match name {
            "dense" => Ok(Self::Dense),
            "gather" => Ok(Self::Gather),
            "reduce" => Ok(Self::Reduce),
            "sharded" => Ok(Self::Sharded),
            _ => {
                let expected = "gather, reduce or sharded";
                Err(UnknownName { what: "strategy", given: name.to_owned(), expected })
            }
        }
    }
}

/// To whom a round's messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Addressing {
    AllGather,
    AllToAll,
}

impl Addressing {
    /// How often a learner's message is sent to others.
    pub(crate) fn copies(self, sender: usize, receiver: usize, learners: usize) -> usize {
        match self {
            Self::AllGather => learners - 1,
            Self::AllToAll => usize::from(receiver != sender),
        }
    }
}

/// Contents that are bad, and whose they are.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fault {
    pub(crate) sender: usize,
    pub(crate) cause: Cause,
}

impl Fault {
    /// What is wrong with a sender's contents.
    pub(crate) fn of<C: Into<Cause>>(sender: usize) -> impl Fn(C) -> Self {
        move |cause| Self { sender, cause: cause.into() }
    }
}

/// A strategy's rounds, for one group of layers. It says what bytes go to whom and takes what came; it does no I/O.
pub(crate) trait Rounds: Send + Sync {
    /// To whom each round goes.
    fn addressing(&self) -> &'static [Addressing];

    /// Whether messages come in the common envelope, rather than one of their own.
    fn in_envelopes(&self) -> bool {
        true
    }

    /// Appends what a hosted learner sends to a receiver, or to all, to `message`.
    fn send(&mut self, setting: &Setting<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>);

    /// Takes what all learners sent to one that is hosted here.
    fn take_each(
        &mut self,
        _setting: &Setting<'_>,
        _member: &mut Member,
        _contents: &[&[u8]],
    ) -> Result<(), Fault> {
        Ok(())
    }

    /// Takes what all learners sent to all; the first learner whose contents say that its gradient is not finite.
    fn take_all(
        &mut self,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault>;

    /// Writes the averaged gradient, a slice for each of the group's layers.
    fn write(&mut self, setting: &Setting<'_>, output: &mut [&mut [f32]]);
}
