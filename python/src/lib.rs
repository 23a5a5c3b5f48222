//! The native half of the Python package `adacomp`: layouts, compressors, frames and the exchange, on any buffers.

mod bridge;
mod bucket;
mod buffers;
mod compressor;
mod exchange;
mod layout;
mod learners;
mod selection;

use adacomp::{Outcome, UnknownName};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::str::FromStr;

pyo3::create_exception!(adacomp, Error, PyValueError, "What was given cannot be used; nothing was changed.");
pyo3::create_exception!(
    adacomp,
    ExchangeError,
    PyRuntimeError,
    "Learners could not exchange their gradients."
);

/// Turns any error of the core into an [`Error`].
fn refused<E: std::fmt::Display>(error: E) -> PyErr {
    Error::new_err(error.to_string())
}

/// Turns an error of the exchange into an [`ExchangeError`].
fn failed(error: adacomp_exchange::ExchangeError) -> PyErr {
    ExchangeError::new_err(error.to_string())
}

/// Reads one of the core's names.
fn parse<T: FromStr<Err = UnknownName>>(name: &str) -> PyResult<T> {
    name.parse().map_err(refused)
}

/// Returns the learner whose gradient is not finite, if the step was dropped for that.
fn non_finite(outcome: Outcome) -> Option<usize> {
    match outcome {
        Outcome::Averaged => None,
        Outcome::NonFinite { learner } => Some(learner),
    }
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        Error, ExchangeError, compressor::Compressor, compressor::Frame, compressor::average,
        exchange::Exchange, layout::Layout, layout::growing_bin, layout::kind, learners::Learners,
    };
}
