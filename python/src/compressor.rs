//! One learner's compressor.

use crate::buffers::{Floats, bytes, f32_array};
use crate::layout::Layout;
use crate::refused;
use adacomp::{Codec, Sending, UnknownName};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

/// Compresses the gradients of one model on one learner, and keeps what was not sent.
#[pyclass(module = "adacomp")]
pub(crate) struct Compressor(adacomp::Compressor);

#[pymethods]
impl Compressor {
    #[new]
    #[pyo3(signature = (layout, threads = 1))]
    fn new(layout: &Layout, threads: usize) -> Self {
        Self(adacomp::Compressor::new(layout.0.clone()).with_threads(threads))
    }

    /// The parameters and their treatments.
    #[getter]
    fn layout(&self) -> Layout {
        Layout(self.0.layout().clone())
    }

    /// A whole step: a buffer for each parameter name. Everything is checked before anything is changed.
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

    /// One parameter of a step; with `flush` all of it is sent, with its residual on top.
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

    /// Gradients are divided by this before anything else.
    fn set_loss_scale(&mut self, scale: f32) -> PyResult<()> {
        self.0.set_inverse_loss_scale(1.0 / scale).map_err(refused)
    }

    /// Whether every gradient of the open step is finite.
    #[getter]
    fn is_finite(&self) -> bool {
        self.0.is_finite()
    }

    /// The open step as a frame.
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

    /// Every learner has this step: what was sent leaves the residual.
    fn commit(&mut self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.commit()).map_err(refused)
    }

    /// The step is used nowhere: what was selected stays in the residual.
    fn rollback(&mut self, py: Python<'_>) {
        py.detach(|| self.0.rollback());
    }

    /// A copy of a parameter's residual, or None if it is sent whole.
    fn residual<'py>(&mut self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let layer = self.layout().number(name)?;
        self.0.residual(layer).map(|values| f32_array(py, values)).transpose()
    }

    /// The residuals as a safetensors file.
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
    /// The step before which they were saved.
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

    /// What each parameter sent in the last step: a dict for each name.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (layer, statistics) in self.0.layout().layers().iter().zip(self.0.statistics()) {
            all.set_item(layer.name(), layer_statistics(py, &statistics)?)?;
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
