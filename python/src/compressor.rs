//! One learner's compressor, and who saved its state.

use crate::buffers::{Floats, bytes, f32_array};
use crate::layout::Layout;
use crate::refused;
use adacomp::{Codec, SavedBy, Sending, UnknownName};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use safetensors::tensor::TensorView;
use std::collections::HashMap;

/// Compresses the gradients of one model on one learner, and keeps what was not sent.
#[pyclass(module = "adacomp.research")]
pub(crate) struct Compressor(adacomp::Compressor);

#[pymethods]
impl Compressor {
    #[new]
    #[pyo3(signature = (layout, threads = 1))]
    fn new(layout: &Layout, threads: usize) -> Self {
        Self(adacomp::Compressor::new(layout.0.clone()).with_threads(threads))
    }

    /// Returns the parameters and their treatments.
    #[getter]
    fn layout(&self) -> Layout {
        Layout(self.0.layout().clone())
    }

    /// Compresses all gradients of a step: a buffer for each parameter name. All are checked before anything is changed.
    fn compress(&mut self, py: Python<'_>, gradients: Bound<'_, PyDict>) -> PyResult<()> {
        let gradients = gradients.iter().map(|(name, buffer)| Ok((name.extract()?, Floats::get(&buffer)?)));
        let gradients = gradients.collect::<PyResult<Vec<(String, Floats)>>>()?;
        py.detach(|| {
            let gradients: Vec<_> = gradients
                .iter()
                .map(|(name, floats)| (name.as_str(), floats.gradient(0..floats.len())))
                .collect();
            self.0.compress(&gradients).map_err(refused)
        })
    }

    /// Compresses one parameter of a step; with `flush` it is sent dense, with its residual added.
    #[pyo3(signature = (name, gradient, flush = false))]
    fn compress_layer(
        &mut self,
        py: Python<'_>,
        name: &str,
        gradient: &Bound<'_, PyAny>,
        flush: bool,
    ) -> PyResult<()> {
        let layer = self.layout().number(name)?;
        let floats = Floats::get(gradient)?;
        let sending = if flush { Sending::Flush } else { Sending::Compressed };
        py.detach(|| self.0.compress_layer(layer, floats.gradient(0..floats.len()), sending)).map_err(refused)
    }

    /// Sets what gradients are divided by before anything else.
    fn set_loss_scale(&mut self, scale: f32) -> PyResult<()> {
        self.0.set_inverse_loss_scale(1.0 / scale).map_err(refused)
    }

    /// Returns whether every gradient of the open step is finite.
    #[getter]
    fn is_finite(&self) -> bool {
        self.0.is_finite()
    }

    /// Returns the open step as a frame.
    #[pyo3(signature = (learner = 0, step = 0, codec = "rice"))]
    fn encode<'py>(
        &mut self,
        py: Python<'py>,
        learner: usize,
        step: u64,
        codec: &str,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let codec = read_codec(codec)?;
        let mut frame = Vec::new();
        py.detach(|| self.0.encode(codec, learner, step, &mut frame)).map_err(refused)?;
        Ok(PyBytes::new(py, &frame))
    }

    /// Subtracts what was sent from the residual: every learner has this step.
    fn commit(&mut self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.commit()).map_err(refused)
    }

    /// Leaves what was selected in the residual: no learner uses this step.
    fn rollback(&mut self, py: Python<'_>) {
        py.detach(|| self.0.rollback());
    }

    /// Returns a copy of a parameter's residual, or None if it is sent dense.
    fn residual<'py>(&mut self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let layer = self.layout().number(name)?;
        self.0.residual(layer).map(|values| f32_array(py, values)).transpose()
    }

    /// Returns the residuals as a safetensors file.
    #[pyo3(signature = (learner = 0, learners = 1, step = 0))]
    fn save<'py>(
        &mut self,
        py: Python<'py>,
        learner: usize,
        learners: usize,
        step: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let state = py.detach(|| self.0.save(learner, learners, step)).map_err(refused)?;
        Ok(PyBytes::new(py, &state))
    }

    /// Takes over what was saved: the states of all learners in their order, or with as many learners as before this one's.
    /// Returns the step before which they were saved.
    #[pyo3(signature = (states, learner = 0, learners = 1))]
    fn load(
        &mut self,
        py: Python<'_>,
        states: Vec<Bound<'_, PyAny>>,
        learner: usize,
        learners: usize,
    ) -> PyResult<u64> {
        let states = states.iter().map(bytes).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.0.load(&states, learner, learners)).map_err(refused)
    }

    /// Returns what each parameter sent in the last step: a dict for each name.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (number, layer) in self.0.layout().layers().iter().enumerate() {
            all.set_item(layer.name(), layer_statistics(py, &self.0.layer_statistics(number))?)?;
        }
        Ok(all)
    }
}

pub(crate) fn layer_statistics<'py>(
    py: Python<'py>,
    statistics: &adacomp::LayerStatistics,
) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("elements", statistics.elements)?;
    entry.set_item("selected", statistics.selected)?;
    entry.set_item("bytes", statistics.bytes)?;
    entry.set_item("scale", statistics.scale)?;
    entry.set_item("bad_bins", statistics.bad_bins)?;
    Ok(entry)
}

pub(crate) fn read_codec(name: &str) -> PyResult<Codec> {
    name.parse().map_err(refused::<UnknownName>)
}

/// Returns who saved a state that has this text: the learner, the number of learners, and the step before which it was saved.
/// `position` is that of the state in a list, for the error.
#[pyfunction]
#[pyo3(signature = (text, position = 0))]
pub(crate) fn saved_by(text: &str, position: usize) -> PyResult<(usize, usize, u64)> {
    // The core reads it from a file.
    let metadata = HashMap::from([("adacomp".to_owned(), text.to_owned())]);
    let file =
        safetensors::serialize(Vec::<(&str, TensorView<'_>)>::new(), Some(metadata)).map_err(refused)?;
    let SavedBy { learner, learners, step } = SavedBy::read(&file, position).map_err(refused)?;
    Ok((learner, learners, step))
}
