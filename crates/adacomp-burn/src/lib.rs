#![doc = include_str!("../README.md")]

mod error;
mod learners;
mod parameters;

pub use adacomp;
pub use adacomp_exchange;
pub use error::Error;
pub use learners::{Learners, average_statistics};
pub use parameters::{
    Values, parameters, set_statistics, set_weights, statistics, take_gradients, unshared, untrained, weights,
};
