//! One learner's exchange, over a transport that Python provides.

use crate::bridge::Bridge;
use crate::bucket::{self, Bucket, check_layer};
use crate::buffers::{Floats, f32_array, words};
use crate::compressor::{layer_statistics, read_codec};
use crate::layout::Layout;
use crate::saved::{Arrays, file, tensors};
use crate::{ExchangeError, refused};
use adacomp::{Compressor, Outcome, SavedBy, Selected, UnknownName};
use adacomp_exchange::{GroupAverage, LearnerState, Options, SendVerdict, Strategy, Transport};
use pyo3::prelude::*;
use pyo3::types::PyDict;

pub(crate) fn read_strategy(name: &str) -> PyResult<Strategy> {
    name.parse().map_err(refused::<UnknownName>)
}

/// Returns the learner whose gradient is not finite, if the step was dropped for that.
pub(crate) fn non_finite(outcome: Outcome) -> Option<usize> {
    match outcome {
        Outcome::Averaged => None,
        Outcome::NonFinite { learner } => Some(learner),
    }
}

pub(crate) fn failed(error: adacomp_exchange::ExchangeError) -> PyErr {
    ExchangeError::new_err(error.to_string())
}

/// One learner's side of every step: gradients in, by buckets, and the averaged gradient out into the same buckets.
#[pyclass(module = "adacomp")]
pub(crate) struct Exchange {
    exchange: adacomp_exchange::Exchange<Bridge>,
    learner: usize,
    loss_scale: f32,
    scratch: Vec<f32>,
}

#[pymethods]
impl Exchange {
    #[new]
    fn new(
        py: Python<'_>,
        layout: &Layout,
        strategy: &str,
        codec: &str,
        transport: Py<PyAny>,
        threads: usize,
    ) -> PyResult<Self> {
        let options = Options { codec: read_codec(codec)?, threads, ..read_strategy(strategy)?.into() };
        let bridge = Bridge::new(py, transport)?;
        let learner = bridge.hosted().start;
        let layout = layout.0.clone();
        let exchange =
            py.detach(|| adacomp_exchange::Exchange::new(bridge, layout, options)).map_err(failed)?;
        Ok(Self { exchange, learner, loss_scale: 1.0, scratch: Vec::new() })
    }

    /// The number of the step that is next or going on.
    #[getter]
    fn step(&self) -> u64 {
        self.exchange.step()
    }

    /// Sets what gradients are divided by, and averages multiplied, so that residuals do not depend on it.
    fn set_loss_scale(&mut self, scale: f32) -> PyResult<()> {
        self.compressor().set_inverse_loss_scale(1.0 / scale).map_err(refused)?;
        self.loss_scale = scale;
        Ok(())
    }

    /// Makes parameters whose gradient is zero everywhere send nothing and keep their residual.
    fn set_skip_unused(&mut self, skip: bool) {
        self.exchange.set_skip_unused(skip);
    }

    /// Compresses a bucket, the gradients of these parameters one after the other, and starts its first round.
    fn submit(&mut self, py: Python<'_>, bucket: &Bound<'_, PyAny>, layers: Vec<usize>) -> PyResult<()> {
        let Bucket { values, parts } = Bucket::new(Floats::get(bucket)?, self.layout(), &layers)?;
        py.detach(|| {
            self.exchange.begin_group(&bucket::layers(&parts))?;
            for (layer, part) in parts {
                self.exchange.submit(self.learner, layer, values.gradient(part))?;
            }
            Ok(())
        })
        .map_err(failed)
    }

    /// Begins a bucket of parameters that are submitted one by one.
    fn begin(&mut self, layers: Vec<usize>) -> PyResult<()> {
        let parts = bucket::parts(self.layout(), &layers)?;
        self.exchange.begin_group(&bucket::layers(&parts)).map(drop).map_err(failed)
    }

    /// Submits one parameter of such a bucket.
    fn submit_layer(&mut self, py: Python<'_>, layer: usize, gradient: &Bound<'_, PyAny>) -> PyResult<()> {
        let gradient = Floats::get(gradient)?;
        let (learner, all) = (self.learner, 0..gradient.len());
        py.detach(|| self.exchange.submit(learner, layer, gradient.gradient(all))).map_err(failed)
    }

    /// Submits what was selected of one parameter of such a bucket on another device: bin maxima (float32), and for each selected
    /// element twice its index, plus one if it is negative (int32), ascending.
    fn submit_selection(
        &mut self,
        py: Python<'_>,
        layer: usize,
        maxima: &Bound<'_, PyAny>,
        selected: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let maxima = Floats::get(maxima)?;
        let (maxima, selected) = (maxima.f32()?, words(selected)?);
        let element = |word: u32| Selected::new(word >> 1, word & 1 == 1);
        let selected: Vec<Selected> = selected.into_iter().map(element).collect();
        py.detach(|| self.exchange.submit_selection(self.learner, layer, maxima, &selected)).map_err(failed)
    }

    /// Ends the step: waits for all learners and writes the averaged gradient into the buckets, in the order in which they were
    /// submitted. Returns None if it did; otherwise the number of a learner whose gradient is not finite, and what is in the
    /// buckets does not count.
    fn finish(
        &mut self,
        py: Python<'_>,
        buckets: Vec<(Bound<'_, PyAny>, Vec<usize>)>,
    ) -> PyResult<Option<usize>> {
        let layout = self.layout();
        let bucket =
            |(bucket, layers): &(_, Vec<usize>)| Bucket::new(Floats::get_mut(bucket)?, layout, layers);
        let mut buckets = buckets.iter().map(bucket).collect::<PyResult<Vec<_>>>()?;
        if !self.exchange.groups().eq(buckets.iter().map(|bucket| bucket::layers(&bucket.parts))) {
            return Err(refused("not all buckets of the step, as they were given"));
        }
        let (scratch, loss_scale) = (&mut self.scratch, self.loss_scale);
        // An average always fits f32.
        let verdict = match loss_scale == 1.0 && buckets.iter().all(|bucket| bucket.values.f32().is_ok()) {
            true => SendVerdict::BeforeWriting,
            false => SendVerdict::AfterWriting,
        };
        let outcome = py.detach(|| {
            let write =
                |average: GroupAverage<'_>| buckets[average.group()].write(average, loss_scale, scratch);
            self.exchange.finish_with(verdict, write)
        });
        Ok(non_finite(outcome.map_err(failed)?))
    }

    /// Adds residuals to a bucket's gradients, for a dense step by other means. Returns whether they are finite. With
    /// `skip_unused`, parameters whose gradient is zero everywhere keep what they have; the second says whether there is any.
    fn add_residuals(
        &mut self,
        py: Python<'_>,
        bucket: &Bound<'_, PyAny>,
        layers: Vec<usize>,
        skip_unused: bool,
    ) -> PyResult<(bool, bool)> {
        let Bucket { mut values, parts } = Bucket::new(Floats::get_mut(bucket)?, self.layout(), &layers)?;
        let (learner, loss_scale) = (self.learner, self.loss_scale);
        let (exchange, scratch) = (&mut self.exchange, &mut self.scratch);
        py.detach(|| {
            let (mut good, mut keeps, mut dense) = (true, false, Vec::new());
            for (layer, part) in parts {
                if !exchange.layout()[layer].treatment.selects() {
                    continue;
                }
                let gradient = values.gradient(part.clone());
                if skip_unused && gradient.is_zero() {
                    keeps |= exchange.keeps(learner, layer);
                    continue;
                }
                dense.resize(part.len(), 0.0);
                if exchange.flush_layer(learner, layer, gradient, &mut dense)? {
                    good &= values.write(part, scratch, |output| {
                        output.iter_mut().zip(&dense).for_each(|(value, sum)| *value = sum * loss_scale);
                    });
                } else {
                    good = false;
                }
            }
            Ok((good, keeps))
        })
        .map_err(failed)
    }

    /// Ends such a step: what has arrived everywhere leaves the residuals.
    fn end_elsewhere(&mut self, py: Python<'_>, arrived: bool) -> PyResult<()> {
        py.detach(|| self.exchange.end_flush(arrived)).map_err(failed)
    }

    /// Returns a copy of a parameter's residual, or None if it is sent dense.
    fn residual<'py>(&mut self, py: Python<'py>, layer: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        check_layer(self.layout(), layer)?;
        self.compressor().residual(layer).map(|values| f32_array(py, values)).transpose()
    }

    /// Returns what the learner keeps of a parameter, such that the mean over learners counts: an owner's values are of the average.
    fn kept<'py>(&mut self, py: Python<'py>, layer: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        check_layer(self.layout(), layer)?;
        let learner = self.learner;
        self.exchange.kept(learner, layer).map(|values| f32_array(py, &values)).transpose()
    }

    /// Replaces a parameter's residual.
    fn set_residual(&mut self, layer: usize, values: &Bound<'_, PyAny>) -> PyResult<()> {
        check_layer(self.layout(), layer)?;
        let values = Floats::get(values)?;
        let values = values.f32()?;
        let compressor = self.compressor();
        if compressor.is_open()
            || compressor.residual(layer).is_none_or(|residual| residual.len() != values.len())
        {
            return Err(refused("a step is open, or the parameter has no residual of this length"));
        }
        compressor.residual_mut(layer).copy_from_slice(values);
        Ok(())
    }

    /// Returns what the learner keeps: its residuals by name, what it keeps as an owner by name, and a text that says who saved it.
    fn save<'py>(&mut self, py: Python<'py>) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>, String)> {
        let state = py.detach(|| self.exchange.save()).map_err(failed)?.remove(0);
        let (residuals, text) = tensors(py, &state.residuals)?;
        let owner = state
            .owner
            .map_or_else(|| Ok(PyDict::new(py)), |owner| tensors(py, &owner).map(|(owner, _)| owner))?;
        Ok((residuals, owner, text))
    }

    /// Returns the text of a state that this learner of `learners` has saved at this step.
    fn saved_by(&mut self, learner: usize, learners: usize) -> String {
        SavedBy { learner, learners, step: self.step() }.to_string()
    }

    /// Takes over what was saved: the states of all learners in their order, or with as many learners as before this one's.
    fn load(&mut self, py: Python<'_>, states: Vec<(Arrays<'_>, Arrays<'_>, String)>) -> PyResult<()> {
        let states = states.into_iter().map(|(residuals, owner, text)| {
            let owner = if owner.is_empty() { None } else { Some(file(&owner, &text)?) };
            Ok(LearnerState { residuals: file(&residuals, &text)?, owner })
        });
        let states = states.collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.exchange.load(&states)).map_err(refused)
    }

    /// Returns for each parameter name what it sent in the last step.
    fn statistics<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        let traffic = self.exchange.traffic(self.learner).cloned().unwrap_or_default();
        let compressor = self.compressor();
        for (number, layer) in compressor.layout().layers().iter().enumerate() {
            let entry = layer_statistics(py, &compressor.layer_statistics(number))?;
            entry.set_item("bytes", traffic.layers.get(number).map_or(0, |layer| layer.sent))?;
            all.set_item(layer.name(), entry)?;
        }
        Ok(all)
    }

    /// Returns the scale that a parameter was sent as in the last step.
    fn scale(&mut self, layer: usize) -> PyResult<f32> {
        check_layer(self.layout(), layer)?;
        Ok(self.compressor().layer_statistics(layer).scale)
    }

    /// Returns where the time of the last step went: compress, encode, wait, decode.
    fn seconds(&self) -> (f64, f64, f64, f64) {
        let seconds = self.exchange.seconds();
        (seconds.compress, seconds.encode, seconds.wait, seconds.decode)
    }
}

impl Exchange {
    fn layout(&self) -> &adacomp::Layout {
        self.exchange.layout()
    }

    fn compressor(&mut self) -> &mut Compressor {
        self.exchange.compressor(self.learner).expect("the learner that is hosted here")
    }
}
