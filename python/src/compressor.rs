//! Frames by hand: one learner's compressor, a frame that has come, and the average of all learners' frames.

use crate::buffers::{Floats, array, check_apart, f32_array};
use crate::layout::Layout;
use crate::{non_finite, parse, refused};
use adacomp::{Averager, LayerStatistics, Packet};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::sync::Arc;

/// Compresses the gradients of one model on one learner, and keeps what was not sent.
#[pyclass(module = "adacomp.research")]
pub(crate) struct Compressor(adacomp::Compressor);

#[pymethods]
impl Compressor {
    #[new]
    fn new(layout: &Layout) -> Self {
        Self(adacomp::Compressor::new(layout.0.clone()))
    }

    /// Compresses all gradients of a step: a buffer for each parameter name. All are checked before anything is changed.
    fn compress(&mut self, py: Python<'_>, gradients: Bound<'_, PyDict>) -> PyResult<()> {
        let gradients = gradients.iter().map(|(name, buffer)| Ok((name.extract()?, Floats::get(&buffer)?)));
        let gradients = gradients.collect::<PyResult<Vec<(String, Floats)>>>()?;
        let layout = self.0.layout();
        for (name, floats) in &gradients {
            // A name that the layout does not have is refused below.
            layout.number(name).map_or(Ok(()), |layer| floats.check_shape(&layout[layer]))?;
        }
        py.detach(|| {
            let gradients: Vec<_> =
                gradients.iter().map(|(name, floats)| (name.as_str(), floats.all())).collect();
            self.0.compress(&gradients).map_err(refused)
        })
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
        let codec = parse(codec)?;
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
        let layer = self.0.layout().number(name);
        let layer = layer.ok_or_else(|| refused(format!("there is no parameter `{name}`")))?;
        self.0.residual(layer).map(|values| f32_array(py, values)).transpose()
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
    statistics: &LayerStatistics,
) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("elements", statistics.elements)?;
    entry.set_item("selected", statistics.selected)?;
    entry.set_item("bytes", statistics.bytes)?;
    entry.set_item("scale", statistics.scale)?;
    entry.set_item("bad_bins", statistics.bad_bins)?;
    Ok(entry)
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
    fn new(py: Python<'_>, data: PyBuffer<u8>, layout: &Layout) -> PyResult<Self> {
        let (data, layout) = (data.to_vec(py)?, layout.0.clone());
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
        let (mut dense, mut selected) = (Vec::new(), Vec::new());
        for (position, section) in self.frame.sections().enumerate() {
            let packet = self.frame.packet(position, &mut dense, &mut selected);
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
            all.set_item(self.layout[section.layer].name(), PyTuple::new(py, arrays)?)?;
        }
        Ok(all)
    }
}

/// Averages the frames of all learners of a step into a float32 buffer for each parameter name. Returns None if it did, or the
/// number of the first learner whose gradient is not finite, in which case nothing is written and the step must be dropped.
#[pyfunction]
pub(crate) fn average(
    py: Python<'_>,
    layout: &Layout,
    step: u64,
    frames: Vec<PyBuffer<u8>>,
    output: &Bound<'_, PyDict>,
) -> PyResult<Option<usize>> {
    let frames = frames.iter().map(|frame| frame.to_vec(py)).collect::<PyResult<Vec<_>>>()?;
    let output = layout.0.layers().iter().map(|layer| {
        let name = layer.name();
        let buffer = output.get_item(name)?;
        let buffer = buffer.ok_or_else(|| refused(format!("no output for parameter `{name}`")))?;
        let floats = Floats::get_mut(&buffer)?;
        floats.check_shape(layer)?;
        Ok(floats)
    });
    let mut output = output.collect::<PyResult<Vec<_>>>()?;
    check_apart(output.iter())?;
    let mut slices = output.iter_mut().map(Floats::f32_mut).collect::<PyResult<Vec<_>>>()?;
    let mut averager = Averager::new(layout.0.clone());
    py.detach(|| averager.average(step, &frames, &mut slices)).map(non_finite).map_err(refused)
}
