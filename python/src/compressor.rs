//! One learner's compressor, and frames that have come.

use crate::buffers::{Floats, array, bytes, f32_array};
use crate::layout::Layout;
use crate::refused;
use adacomp::{Averager, Codec, Outcome, Packet, SavedBy, Sending, UnknownName};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::sync::Arc;

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

/// What a frame says, checked.
#[pyclass(frozen, module = "adacomp.research")]
pub(crate) struct Frame {
    layout: Arc<adacomp::Layout>,
    frame: adacomp::Frame,
}

#[pymethods]
impl Frame {
    /// Reads a frame of all parameters of a layout. Any bytes give a frame or an error.
    #[new]
    fn new(py: Python<'_>, data: &Bound<'_, PyAny>, layout: &Layout) -> PyResult<Self> {
        let (data, layout) = (bytes(data)?, layout.0.clone());
        let mut frame = adacomp::Frame::default();
        py.detach(|| frame.decode(&data, &layout).map(drop)).map_err(refused)?;
        Ok(Self { layout, frame })
    }

    /// Returns the learner that sent it.
    #[getter]
    fn learner(&self) -> Option<usize> {
        self.frame.header().map(|header| header.learner)
    }

    /// Returns the step that it is of.
    #[getter]
    fn step(&self) -> Option<u64> {
        self.frame.header().map(|header| header.step)
    }

    /// Returns whether the sender's gradients are finite; if not, there are no packets.
    #[getter]
    fn is_finite(&self) -> bool {
        self.frame.header().is_some_and(|header| !header.non_finite)
    }

    /// Returns for each parameter what was sent: indices and values, as arrays.
    fn packets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for (layer, packet) in self.frame.packets() {
            let (indices, values): (Vec<u32>, Vec<f32>) = match packet {
                Packet::Dense(values) => ((0..values.len() as u32).collect(), values.to_vec()),
                Packet::Sparse(sparse) => {
                    let value = |negative| sparse.values[usize::from(negative)];
                    let elements = sparse.selected.iter();
                    elements.map(|element| (element.index() as u32, value(element.is_negative()))).unzip()
                }
            };
            let indices: Vec<u8> = indices.into_iter().flat_map(u32::to_ne_bytes).collect();
            let arrays = [array(py, &indices, "uint32")?, f32_array(py, &values)?];
            all.set_item(self.layout[layer].name(), PyTuple::new(py, arrays)?)?;
        }
        Ok(all)
    }

    /// Adds what was sent to a float32 buffer for each parameter name that the frame has.
    fn add_to(&self, py: Python<'_>, output: &Bound<'_, PyDict>) -> PyResult<()> {
        let mut slices = Vec::new();
        for (layer, _) in self.frame.packets() {
            slices.push(output_of(output, &self.layout[layer])?);
        }
        py.detach(|| {
            for ((_, packet), floats) in self.frame.packets().zip(&mut slices) {
                floats.write(0..floats.len(), &mut Vec::new(), |output| packet.add_to(output));
            }
        });
        Ok(())
    }
}

/// Averages the frames of all learners of a step into a float32 buffer for each parameter name. Returns None if it did, or the
/// number of the first learner whose gradient is not finite, in which case nothing is written and the step must be dropped.
#[pyfunction]
pub(crate) fn average(
    py: Python<'_>,
    layout: &Layout,
    step: u64,
    frames: Vec<Bound<'_, PyAny>>,
    output: &Bound<'_, PyDict>,
) -> PyResult<Option<usize>> {
    let frames = frames.iter().map(bytes).collect::<PyResult<Vec<_>>>()?;
    let mut outputs =
        layout.0.layers().iter().map(|layer| output_of(output, layer)).collect::<PyResult<Vec<_>>>()?;
    py.detach(|| {
        let mut averages: Vec<Vec<f32>> =
            layout.0.layers().iter().map(|layer| vec![0.0; layer.elements()]).collect();
        let mut slices: Vec<&mut [f32]> = averages.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome = Averager::new(layout.0.clone()).average(step, &frames, &mut slices).map_err(refused)?;
        match outcome {
            Outcome::NonFinite { learner } => Ok(Some(learner)),
            Outcome::Averaged => {
                for (floats, average) in outputs.iter_mut().zip(&averages) {
                    floats.write(0..floats.len(), &mut Vec::new(), |output| output.copy_from_slice(average));
                }
                Ok(None)
            }
        }
    })
}

fn output_of(output: &Bound<'_, PyDict>, layer: &adacomp::Layer) -> PyResult<Floats> {
    let name = layer.name();
    let buffer =
        output.get_item(name)?.ok_or_else(|| refused(format!("no output for parameter `{name}`")))?;
    let floats = Floats::get_mut(&buffer)?;
    floats.f32()?;
    match (floats.len(), layer.elements()) {
        (actual, expected) if actual == expected => Ok(floats),
        (actual, expected) => {
            Err(refused(format!("the output for `{name}` has {actual} elements, expected {expected}")))
        }
    }
}
