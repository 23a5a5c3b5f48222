//! A transport that Python provides.

use crate::refused;
use adacomp_exchange::{Inside, Messages, Transport, TransportError};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Moves bytes by calling a Python object, which has `learner`, `learners`, `start_all_gather(bytes)`, `start_all_to_all(list of
/// bytes)`, and `finish()`, which returns the messages of all learners of the oldest round. Its `inside`, if not None, speaks with
/// the other processes of the same learner: `share_scales(layers, scales)`, which returns scales, and `agree(good)`.
pub(crate) struct Bridge {
    python: Py<PyAny>,
    inside: Option<Py<PyAny>>,
    learner: usize,
    learners: usize,
    /// Whether the rounds under way are all-gathers, oldest first.
    under_way: VecDeque<bool>,
}

impl Bridge {
    pub(crate) fn new(py: Python<'_>, python: Py<PyAny>) -> PyResult<Self> {
        let learner: usize = python.getattr(py, "learner")?.extract(py)?;
        let learners: usize = python.getattr(py, "learners")?.extract(py)?;
        if learner >= learners {
            return Err(refused(format!("learner {learner} of {learners}")));
        }
        let inside = python.bind(py).getattr_opt("inside")?.filter(|inside| !inside.is_none());
        let inside = inside.map(Bound::unbind);
        Ok(Self { python, inside, learner, learners, under_way: VecDeque::new() })
    }
}

impl Transport for Bridge {
    fn learners(&self) -> usize {
        self.learners
    }

    fn hosted(&self) -> Range<usize> {
        self.learner..self.learner + 1
    }

    fn start(&mut self, outgoing: Messages) -> Result<(), TransportError> {
        // Messages are long, so each goes before the next copy of it is made.
        let started = Python::attach(|py| match outgoing {
            Messages::AllGather(messages) => {
                self.under_way.push_back(true);
                let message = PyBytes::new(py, &messages[0]);
                drop(messages);
                self.python.call_method1(py, "start_all_gather", (message,))
            }
            Messages::AllToAll(messages) => {
                self.under_way.push_back(false);
                let copied: Vec<_> = messages[0].iter().map(|message| PyBytes::new(py, message)).collect();
                drop(messages);
                self.python.call_method1(py, "start_all_to_all", (copied,))
            }
        });
        started.map(drop).map_err(transport)
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        let all_gather = self.under_way.pop_front().ok_or(TransportError::NotStarted)?;
        let messages = Python::attach(|py| {
            let messages: Vec<PyBuffer<u8>> = self.python.call_method0(py, "finish")?.extract(py)?;
            messages.iter().map(|message| message.to_vec(py)).collect::<PyResult<Vec<_>>>()
        });
        let messages = messages.map_err(transport)?;
        Ok(match all_gather {
            true => Messages::AllGather(messages.into_iter().map(Arc::new).collect()),
            false => Messages::AllToAll(vec![messages]),
        })
    }

    fn inside(&mut self) -> Option<&mut dyn Inside> {
        if self.inside.is_some() { Some(self) } else { None }
    }
}

impl Inside for Bridge {
    fn share_scales(&mut self, layers: &[usize], scales: &mut [f32]) -> Result<(), TransportError> {
        let shared: Vec<f32> = Python::attach(|py| {
            self.asked(py)?.call_method1("share_scales", (layers.to_vec(), scales.to_vec()))?.extract()
        })
        .map_err(transport)?;
        if shared.len() != scales.len() {
            return Err(TransportError::Messages { expected: scales.len(), actual: shared.len() });
        }
        scales.copy_from_slice(&shared);
        Ok(())
    }

    fn agree(&mut self, good: bool) -> Result<bool, TransportError> {
        Python::attach(|py| self.asked(py)?.call_method1("agree", (good,))?.extract()).map_err(transport)
    }
}

impl Bridge {
    /// Returns what speaks with the other processes of the same learner.
    fn asked<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        self.inside.as_ref().map(|inside| inside.bind(py)).ok_or_else(|| refused("a learner of one process"))
    }
}

fn transport(error: PyErr) -> TransportError {
    let reason = Python::attach(|py| error.value(py).to_string());
    TransportError::Transport { transport: "torch.distributed", reason }
}
