//! Frames that have come.

use crate::buffers::{Floats, array, bytes, f32_array};
use crate::layout::Layout;
use crate::refused;
use adacomp::{Averager, Outcome, Packet};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;

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

    /// Adds what was sent to a float32 buffer for each parameter name that the frame has.
    fn add_to(&self, py: Python<'_>, output: &Bound<'_, PyDict>) -> PyResult<()> {
        let mut slices = Vec::new();
        for section in self.frame.sections() {
            slices.push(output_of(output, &self.layout[section.layer])?);
        }
        py.detach(|| {
            let (mut values, mut selected) = (Vec::new(), Vec::new());
            for (position, floats) in slices.iter_mut().enumerate() {
                let packet = self.frame.packet(position, &mut values, &mut selected);
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
