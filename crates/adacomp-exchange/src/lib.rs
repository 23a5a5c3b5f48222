#![doc = include_str!("../README.md")]

mod agreement;
mod dense;
mod error;
mod exchange;
mod flush;
mod gather;
mod layers;
mod local;
mod member;
mod message;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod protocol;
mod reduce;
mod round;
mod setting;
mod sharded;
mod shares;
mod state;
mod strategy;
mod sums;
mod traffic;
mod transport;
mod values;
mod verdict;
mod whole;

pub use agreement::check as check_agreement;
pub use error::{Cause, ExchangeError, TransportError};
pub use exchange::{Exchange, Seconds, Writing};
pub use local::{Local, local, on_threads};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use options::Options;
pub use protocol::Protocol;
pub use state::LearnerState;
pub use strategy::Strategy;
pub use sums::{decode_sums, encode_sums};
pub use traffic::{LayerTraffic, Traffic};
pub use transport::{Incoming, Outgoing, TIMEOUT, Transport};
