#![doc = include_str!("../README.md")]

mod error;
mod exchange;
mod local;
mod message;
mod protocol;
mod state;
mod strategy;
mod sums;
mod transport;

pub use error::{Cause, ExchangeError, TransportError};
pub use exchange::{Exchange, GroupAverage, Options, Seconds, SendVerdict};
pub use local::{LocalSteps, Shared};
pub use protocol::{LayerTraffic, Traffic};
pub use state::LearnerState;
pub use strategy::{Strategy, StrategyChoice};
#[cfg(feature = "mpi")]
pub use transport::Mpi;
pub use transport::{Inside, Local, Messages, TIMEOUT, Threads, Transport};

/// What tests, benchmarks and fuzzing drive by hand. It may change in any release.
#[doc(hidden)]
pub mod internal {
    /// Learners whose messages are carried by hand.
    pub type ByHand = crate::Exchange<()>;
    pub use crate::strategy::{density_of_bits, owners_select, shard};
    pub use crate::sums::{decode_sums, encode_sums};
}
