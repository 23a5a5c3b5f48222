//! Errors.

use adacomp::PolicyError;
use adacomp_exchange::{ExchangeError, TransportError};
use burn::tensor::DType;
use std::fmt::{Debug, Display, Formatter};

/// Why learners could not train on.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing to exchange.
    #[error(
        "no parameter of the model requires a gradient: make it on an autodiff device, or call `train()` on it"
    )]
    NothingTrained,
    /// The policy does not fit the model.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The exchange failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// Statistics or weights could not be moved between learners.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Learners that would never have the same weights.
    #[error(
        "learner {learner} begins with other weights than learner 0: make the model once and clone it for each thread, or call `device.seed(1)` before making it in each process"
    )]
    Weights {
        /// The first that differs.
        learner: usize,
    },
    /// Another model than the one that learners were connected with.
    #[error(
        "the model has {actual} parameters that require a gradient, but had {expected} when the learners were connected: freeze and unfreeze before connecting"
    )]
    Parameters {
        /// When the learners were connected.
        expected: usize,
        /// Now.
        actual: usize,
    },
    /// Gradients of another model.
    #[error(
        "{left} gradients are of no parameter of this model: give the model that they were computed with, or a clone of it"
    )]
    Gradients {
        /// How many.
        left: usize,
    },
    /// A gradient of a type that cannot be exchanged.
    #[error("the gradient of `{parameter}` is {dtype:?}: only f32, f16 and bf16 can be exchanged")]
    Type {
        /// Whose it is.
        parameter: String,
        /// Its type.
        dtype: DType,
    },
    /// A device did not hand out a tensor.
    #[error("`{parameter}` could not be read from its device: {reason}")]
    Read {
        /// Which one.
        parameter: String,
        /// What the device said.
        reason: String,
    },
    /// The number of gradients is not the number of learners that are hosted.
    #[error(
        "gradients or models came for {given} learners, and {hosted} are hosted here: give one for each to `average_hosted`, `after_step_hosted` or `exchange_hosted`"
    )]
    Hosted {
        /// Learners hosted here.
        hosted: usize,
        /// Learners that gradients came for.
        given: usize,
    },
    /// Another learner's statistics do not fit this model.
    #[error(
        "learner {learner} sent statistics of another model: {actual} bytes where {expected} were expected"
    )]
    Statistics {
        /// Whose they are.
        learner: usize,
        /// The bytes of this model's.
        expected: usize,
        /// The bytes that came.
        actual: usize,
    },
}

/// The message: it is what `unwrap` and a `main` that returns the error show.
impl Debug for Error {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        Display::fmt(self, formatter)
    }
}
