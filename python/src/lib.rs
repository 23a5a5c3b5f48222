//! The native half of the Python package `adacomp`: layouts, compressors, frames and the exchange, on any buffers.

mod bridge;
mod bucket;
mod buffers;
mod compressor;
mod exchange;
mod frame;
mod layout;
mod learners;
mod saved;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

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

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        Error, ExchangeError, compressor::Compressor, compressor::saved_by, exchange::Exchange, frame::Frame,
        frame::average, layout::Layout, layout::kind, learners::Learners,
    };
}
