//! What can go wrong between learners.

use crate::strategy::Strategy;
use adacomp::{AverageError, CompressError, DecodeError, StateError};
use std::fmt::{Debug, Display, Formatter};
use std::time::Duration;
use thiserror::Error;

/// Bytes that could not be moved. The transport is of no use any more.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A learner did not take part in time.
    #[error(
        "no word from {} within {timeout:?}; a learner hangs, has died, or is slower than the timeout",
        list(learners)
    )]
    Timeout {
        /// The learners that are waited for, where that is known.
        learners: Vec<usize>,
        /// How long was waited.
        timeout: Duration,
    },
    /// A learner has ended.
    #[error("{} ended before the exchange was over", list(learners))]
    Ended {
        /// The learners.
        learners: Vec<usize>,
    },
    /// Learners disagree about which round this is: a mistake in their use.
    #[error("learners are in different rounds: some send to all, some to each")]
    OutOfStep,
    /// Messages that are missing or too many.
    #[error("a round has {actual} messages, expected {expected}")]
    Messages {
        /// How many there should be.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// There is no round to finish.
    #[error("no round was started")]
    NotStarted,
    /// The transport itself failed.
    #[error("{transport}: {reason}")]
    Transport {
        /// Its name.
        transport: &'static str,
        /// What it said.
        reason: String,
    },
}

fn list(learners: &[usize]) -> String {
    match learners {
        [] => "some learner".to_owned(),
        [learner] => format!("learner {learner}"),
        [first, .., last] if last - first + 1 == learners.len() => format!("learners {first} to {last}"),
        _ => format!("learners {}", learners.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// What is wrong with a message.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Cause {
    /// Too short for a message.
    #[error("it ends early, after {length} bytes")]
    Truncated {
        /// Its length.
        length: usize,
    },
    /// Written by another version.
    #[error("it is of protocol version {actual}, expected {expected}")]
    Version {
        /// This version.
        expected: u8,
        /// The message's.
        actual: u8,
    },
    /// Another round of the step.
    #[error("it is of round {actual}, expected round {expected}")]
    Round {
        /// The round.
        expected: u8,
        /// The message's.
        actual: u8,
    },
    /// Another step.
    #[error("it is of step {actual}, expected step {expected}")]
    Step {
        /// The step.
        expected: u64,
        /// The message's.
        actual: u64,
    },
    /// Another model or policy, or another group of layers.
    #[error("it is of another model or policy, or of another group of layers")]
    Layers,
    /// A step in which its sender sends all layers dense and the receiver does not, or the reverse.
    #[error("its layers are sent {}; expected otherwise", if *flush { "whole" } else { "as selected" })]
    Mode {
        /// Whether its sender sends all layers dense.
        flush: bool,
    },
    /// A message that another learner sent, or that was meant for another learner.
    #[error("it was sent by learner {sender} to {}", receiver.map_or("all".to_owned(), |receiver| format!("learner {receiver}")))]
    Misrouted {
        /// Who sent it.
        sender: usize,
        /// To whom.
        receiver: Option<usize>,
    },
    /// Damaged bytes.
    #[error("its checksum does not match: it was damaged on its way")]
    Checksum,
    /// Contents that are not what the layers need.
    #[error("{0}")]
    Contents(#[from] DecodeError),
    /// The sender could not send it because of an earlier failure.
    #[error("it was not sent, because its sender had failed")]
    Failed,
}

/// An exchange that did not take place. What was written does not count, and what was selected stays in the residuals.
#[derive(Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// Learners that were started differently.
    #[error("learner {learner} does not fit learner 0: {what} is {actual}, but {expected} on learner 0")]
    Disagreement {
        /// The first learner that differs.
        learner: usize,
        /// In what.
        what: String,
        /// Learner 0's.
        expected: String,
        /// That learner's.
        actual: String,
    },
    /// A message that some learner refused; every learner gets this error.
    #[error("step {step}: learner {receiver} refused the message of learner {sender}: {reason}")]
    Message {
        /// The step.
        step: u64,
        /// Who sent it.
        sender: usize,
        /// Who refused it.
        receiver: usize,
        /// Why.
        reason: String,
    },
    /// A verdict that cannot be read: other learners may have ended the step in another way, so none can go on.
    #[error(
        "step {step}: the verdict of learner {learner} cannot be read: {source}; go on from the last saved state"
    )]
    Verdict {
        /// The step.
        step: u64,
        /// Whose verdict.
        learner: usize,
        /// Why.
        source: Cause,
    },
    /// Gradients or weights that are not as many as the layout has, for each learner that is hosted here. Nothing was changed.
    #[error("{what}: {actual}, expected {expected}")]
    Count {
        /// What is counted.
        what: String,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        actual: usize,
    },
    /// A learner of another process.
    #[error("learner {learner} is not hosted here")]
    Learner {
        /// The learner.
        learner: usize,
    },
    /// A gradient of a layer that no group of the step has, after groups were begun in some step. Nothing was compressed.
    #[error(
        "parameter `{parameter}` is in no group of this step; begin one with it before its gradient is submitted"
    )]
    NoGroup {
        /// The parameter.
        parameter: String,
    },
    /// A group without layers.
    #[error("a group has no layers; begin groups of one or more")]
    EmptyGroup,
    /// A selection where all layers are sent dense. Nothing was taken.
    #[error("this step sends all layers whole, so it takes no selections; submit the gradient itself")]
    Selection,
    /// A clamped scale where several processes are one learner, each with parts of parameters.
    #[error(
        "a clamped scale takes the bins of a whole parameter, and each process of a learner has those of a part; use the mean"
    )]
    ClampedParts,
    /// A treatment that the strategy cannot exchange.
    #[error("parameter `{parameter}`: {strategy} cannot exchange top-k selections; use gather")]
    Treatment {
        /// The parameter.
        parameter: String,
        /// The strategy.
        strategy: Strategy,
    },
    /// Other bins where owners keep what is waiting.
    #[error(
        "{strategy} cannot go on with other bins, because shards of owners begin where bins do; use another strategy"
    )]
    Shards {
        /// The strategy.
        strategy: Strategy,
    },
    /// A clip that would shrink what all learners send, or is no number.
    #[error("a clip of {clip}: choose a number from 1 on")]
    Clip {
        /// The clip.
        clip: f32,
    },
    /// Local steps that make no sense.
    #[error("{what} of {value}: choose {expected}")]
    LocalSteps {
        /// What is wrong.
        what: &'static str,
        /// What it is.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The bytes could not be moved.
    #[error("step {step}: {source}")]
    Transport {
        /// The step.
        step: u64,
        /// Why.
        source: TransportError,
    },
    /// A gradient that was refused.
    #[error(transparent)]
    Compress(#[from] CompressError),
    /// An output that does not fit the layout.
    #[error(transparent)]
    Output(#[from] AverageError),
    /// A state that could not be saved or loaded.
    #[error(transparent)]
    State(#[from] StateError),
}

/// The message: it is what `unwrap` and a `main` that returns the error show.
impl Debug for ExchangeError {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        Display::fmt(self, formatter)
    }
}
