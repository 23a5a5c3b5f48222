#![doc = include_str!("../README.md")]

mod error;
mod learners;
mod local;
mod parameters;

pub use adacomp;
pub use adacomp_exchange;
pub use adacomp_exchange::LocalSteps;
pub use error::Error;
pub use learners::{Learners, average_statistics};
pub use local::LocalLearners;
pub use parameters::{
    Values, parameters, set_statistics, set_weights, statistics, take_gradients, unshared, untrained, weights,
};
