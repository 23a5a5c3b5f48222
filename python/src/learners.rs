//! All learners of a run in one process.

use crate::buffers::{Floats, check_apart};
use crate::layout::Layout;
use crate::{failed, non_finite, parse, refused};
use adacomp::{Codec, Packet, Sparse, Treatment, entropy_bytes, section_bytes};
use adacomp_exchange::{Exchange, LearnerState, Local, Options, StrategyChoice, Transport};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};
use std::num::NonZeroU32;

type File<'py> = Bound<'py, PyBytes>;

/// All learners of a run, for experiments in one process and on one thread: the gradients of each in, and the averaged gradient
/// out, to the bit what as many processes get.
#[pyclass(module = "adacomp.research")]
pub(crate) struct Learners(Exchange<Local>);

#[pymethods]
impl Learners {
    #[new]
    #[pyo3(signature = (layout, learners, strategy = "gather", owner_divisor = NonZeroU32::MIN))]
    fn new(layout: &Layout, learners: usize, strategy: &str, owner_divisor: NonZeroU32) -> PyResult<Self> {
        if learners == 0 {
            return Err(refused("no learners; expected 1 or more"));
        }
        let choice: StrategyChoice = parse(strategy)?;
        let options =
            Options { owner_divisor, ..choice.resolve(&layout.0, learners, Codec::default()).into() };
        Exchange::new(Local::alone(learners), layout.0.clone(), options).map(Self).map_err(failed)
    }

    /// Compresses the gradients of a learner: a buffer for each parameter, in the layout's order. All are checked before anything
    /// is taken.
    fn submit(&mut self, py: Python<'_>, learner: usize, gradients: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let gradients = gradients.iter().map(Floats::get).collect::<PyResult<Vec<_>>>()?;
        let (learners, layers) = (self.0.transport().learners(), self.0.layout().len());
        if learner >= learners || gradients.len() != layers {
            return Err(refused(format!(
                "learner {learner} gives {} gradients; there are {learners} learners and {layers} parameters",
                gradients.len()
            )));
        }
        // Before anything is taken: a step that is half submitted can be neither finished nor submitted again.
        check_shapes(self.0.layout(), &gradients)?;
        py.detach(|| {
            gradients
                .iter()
                .enumerate()
                .rev()
                .try_for_each(|(layer, gradient)| self.0.submit(learner, layer, gradient.all()))
        })
        .map_err(failed)
    }

    /// Ends the step, for which all learners have submitted: writes the averaged gradient into a float32 buffer for each parameter. Returns None
    /// if it did; otherwise the number of a learner whose gradient is not finite, and the step is dropped.
    fn finish(&mut self, py: Python<'_>, output: Vec<Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
        let mut output = output.iter().map(Floats::get_mut).collect::<PyResult<Vec<_>>>()?;
        check_shapes(self.0.layout(), &output)?;
        check_apart(output.iter())?;
        let mut slices = output.iter_mut().map(Floats::f32_mut).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.0.finish(&mut slices)).map(non_finite).map_err(failed)
    }

    /// Multiplies what all learners keep, also as owners, by a factor from 0 to 1, between steps.
    fn decay(&mut self, py: Python<'_>, factor: f32) -> PyResult<()> {
        py.detach(|| self.0.decay(factor)).map_err(refused)
    }

    /// Returns the bytes that a learner sent and received in the last step, on average over learners.
    fn traffic(&mut self) -> (f64, f64) {
        let learners = self.0.transport().learners();
        let all = (0..learners).filter_map(|learner| self.0.traffic(learner));
        let (sent, received) =
            all.fold((0, 0), |(sent, received), traffic| (sent + traffic.sent, received + traffic.received));
        (sent as f64 / learners as f64, received as f64 / learners as f64)
    }

    /// Returns what one learner's frame of the last step took, on average over learners: for each parameter name a dict of its
    /// bytes with each code, and those of their entropy. For what is sent dense all are the same. It is of frames, so for
    /// `gather`; other strategies send other messages. What was selected is known until residuals are read, saved or decayed, or the
    /// next step begins: ask before.
    fn sizes<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (layout, learners) = (self.0.layout().clone(), self.0.transport().learners());
        let mut sums = vec![[0.0; 3]; layout.len()];
        for learner in 0..learners {
            let Some(compressor) = self.0.compressor(learner) else { continue };
            for (layer, sums) in sums.iter_mut().enumerate() {
                let statistics = compressor.layer_statistics(layer);
                let coded = |packet, codec| section_bytes(&layout, layer, packet, codec) as f64;
                let sizes = match (layout[layer].treatment, compressor.last_packet(layer)) {
                    (Treatment::Half, _) => [2.0 * statistics.elements as f64; 3],
                    (Treatment::Dense, _) => [4.0 * statistics.elements as f64; 3],
                    (_, Some(packet)) => {
                        let entropy = entropy_bytes(statistics.elements, statistics.selected);
                        [coded(packet, Codec::Rice), coded(packet, Codec::Paper), entropy]
                    }
                    (_, None) if statistics.selected == 0 => {
                        let nothing = Packet::Sparse(Sparse { values: [0.0; 2], selected: &[] });
                        [coded(nothing, Codec::Rice), coded(nothing, Codec::Paper), 0.0]
                    }
                    (_, None) => {
                        return Err(refused(
                            "what was selected is not known any more: ask for sizes right after a step that was averaged",
                        ));
                    }
                };
                sums.iter_mut().zip(sizes).for_each(|(sum, size)| *sum += size / learners as f64);
            }
        }
        let entries = layout.layers().iter().zip(sums).map(|(layer, sums)| {
            let entry = ["rice", "paper", "floor"].into_iter().zip(sums).into_py_dict(py)?;
            Ok((layer.name(), entry))
        });
        entries.collect::<PyResult<Vec<_>>>()?.into_py_dict(py)
    }

    /// Returns the Euclidean norm of a learner's residual of each parameter; None for what is sent dense. A pass over memory.
    #[pyo3(signature = (learner = 0))]
    fn residual_norms(&mut self, py: Python<'_>, learner: usize) -> PyResult<Vec<Option<f64>>> {
        let layers = self.0.layout().len();
        let compressor =
            self.0.compressor(learner).ok_or_else(|| refused(format!("there is no learner {learner}")))?;
        let norm = |layer| compressor.residual_statistics(layer).map(|residual| residual.norm);
        Ok(py.detach(|| (0..layers).map(norm).collect()))
    }

    /// Returns what each learner keeps: its residuals, and if it is an owner what it keeps as such, as safetensors files.
    fn save<'py>(&mut self, py: Python<'py>) -> PyResult<Vec<(File<'py>, Option<File<'py>>)>> {
        let states = py.detach(|| self.0.save()).map_err(failed)?;
        let file = |state: LearnerState| {
            let owner = state.owner.map(|owner| PyBytes::new(py, &owner));
            (PyBytes::new(py, &state.residuals), owner)
        };
        Ok(states.into_iter().map(file).collect())
    }

    /// Takes over what was saved, by the same or another number of learners.
    fn load(&mut self, py: Python<'_>, states: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> PyResult<()> {
        let state = |(residuals, owner)| LearnerState { residuals, owner };
        let states: Vec<LearnerState> = states.into_iter().map(state).collect();
        py.detach(|| self.0.load(&states)).map_err(refused)
    }
}

/// Checks those that there are; how many there must be is checked elsewhere.
fn check_shapes(layout: &adacomp::Layout, buffers: &[Floats]) -> PyResult<()> {
    layout.layers().iter().zip(buffers).try_for_each(|(layer, floats)| floats.check_shape(layer))
}
