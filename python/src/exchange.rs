//! One learner's exchange, over a transport that Python provides.

use crate::bridge::Bridge;
use crate::bucket::{Bucket, check_layer};
use crate::buffers::{Floats, array, check_apart, check_shape, f32_array};
use crate::compressor::layer_statistics;
use crate::layout::Layout;
use crate::selection::{Average, Places, Selection, check_groups};
use crate::{failed, non_finite, parse, refused};
use adacomp::internal::STATE_KEY;
use adacomp::{Compressor, SavedBy};
use adacomp_exchange::{GroupAverage, LearnerState, Options, SendVerdict, StrategyChoice, Transport};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::cell::RefCell;
use std::collections::HashMap;

/// Arrays by name.
type Arrays<'py> = HashMap<String, Bound<'py, PyAny>>;

/// One learner's side of every step: gradients in, by buckets, and the averaged gradient out into the same buckets.
#[pyclass(module = "adacomp.research")]
pub(crate) struct Exchange {
    exchange: adacomp_exchange::Exchange<Bridge>,
    learner: usize,
    skip_unused: bool,
    loss_scale: f32,
    scratch: Vec<f32>,
}

#[pymethods]
impl Exchange {
    /// With `skip_unused`, parameters whose gradient is zero everywhere send nothing and keep their residual.
    #[new]
    #[pyo3(signature = (layout, strategy, codec, transport, threads = 1, skip_unused = false, clip = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        layout: &Layout,
        strategy: &str,
        codec: &str,
        transport: Py<PyAny>,
        threads: usize,
        skip_unused: bool,
        clip: Option<f32>,
    ) -> PyResult<Self> {
        let bridge = Bridge::new(py, transport)?;
        let (learner, layout, codec) = (bridge.hosted().start, layout.0.clone(), parse(codec)?);
        let strategy = parse::<StrategyChoice>(strategy)?.resolve(&layout, bridge.learners(), codec);
        let options = Options { codec, threads, clip, ..strategy.into() };
        let mut exchange =
            py.detach(|| adacomp_exchange::Exchange::new(bridge, layout, options)).map_err(failed)?;
        exchange.set_skip_unused(skip_unused);
        Ok(Self { exchange, learner, skip_unused, loss_scale: 1.0, scratch: Vec::new() })
    }

    /// The strategy, by its name; where it was to be chosen, the one that was.
    #[getter]
    fn strategy(&self) -> String {
        self.exchange.options().strategy.to_string()
    }

    /// The number of the step that is next or going on.
    #[getter]
    fn step(&self) -> u64 {
        self.exchange.step()
    }

    /// Goes on with other bins, and with all that waits. All learners must do it before the same step.
    fn set_layout(&mut self, layout: &Layout) -> PyResult<()> {
        self.exchange.set_layout(layout.0.clone()).map_err(failed)
    }

    /// Sets what gradients are divided by, and averages multiplied, so that residuals do not depend on it.
    fn set_loss_scale(&mut self, scale: f32) -> PyResult<()> {
        self.compressor().set_inverse_loss_scale(1.0 / scale).map_err(refused)?;
        self.loss_scale = scale;
        Ok(())
    }

    /// Compresses a bucket, the gradients of these parameters one after the other, and starts its first round.
    fn submit(&mut self, py: Python<'_>, bucket: &Bound<'_, PyAny>, layers: Vec<usize>) -> PyResult<()> {
        let bucket = Bucket::new(Floats::get(bucket)?, self.layout(), &layers)?;
        py.detach(|| {
            self.exchange.begin_group(&bucket.layers())?;
            for (layer, part) in bucket.parts {
                self.exchange.submit(self.learner, layer, bucket.values.gradient(part))?;
            }
            Ok(())
        })
        .map_err(failed)
    }

    /// Submits a bucket of which another device has selected, and starts its first round: the numbers of its parameters; for each
    /// selected element twice its index among the elements of all compressed parameters, plus one if it is negative (int32),
    /// ascending; the bin maxima of the same parameters (float32), NaN for a bin that is not finite; and the gradients of the
    /// others.
    fn submit_selection(
        &mut self,
        py: Python<'_>,
        layers: Vec<usize>,
        selected: PyBuffer<i32>,
        maxima: PyBuffer<f32>,
        dense: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let places = Places::new(self.layout(), &layers)?;
        let (words, maxima, dense) = (selected.to_vec(py)?, maxima.to_vec(py)?, Floats::get(dense)?);
        let selection = Selection { places, words, maxima, dense };
        selection.check()?;
        py.detach(|| {
            self.exchange.begin_group(&selection.places.layers())?;
            let exchange = RefCell::new(&mut self.exchange);
            selection.submit(
                |layer, maxima, selected| {
                    exchange.borrow_mut().submit_selection(self.learner, layer, maxima, selected)
                },
                |layer, gradient| exchange.borrow_mut().submit(self.learner, layer, gradient),
            )
        })
        .map_err(failed)
    }

    /// Ends a step of such buckets, each given by its parameters and its format. Returns the number of a learner whose gradient is
    /// not finite, or None and the averages: for each bucket 32-bit words (int32), and how many indices and values they have.
    ///
    /// The words are the index in the bucket of each element that is not 0, by value; the values (float32); if there are fewer
    /// values than indices, how many elements have each; the scale of each compressed parameter (float32), and how many elements
    /// it has sent; and the averages of the other parameters, in the bucket's format.
    #[allow(clippy::type_complexity, reason = "a tuple for Python")]
    fn finish_selection<'py>(
        &mut self,
        py: Python<'py>,
        buckets: Vec<(Vec<usize>, String)>,
    ) -> PyResult<(Option<usize>, Vec<(Bound<'py, PyAny>, usize, usize)>)> {
        let average = |(layers, format): &(Vec<usize>, String)| {
            Average::new(Places::new(self.layout(), layers)?, format)
        };
        let mut averages = buckets.iter().map(average).collect::<PyResult<Vec<_>>>()?;
        check_groups(self.exchange.groups(), averages.iter().map(|average| average.places.layers()))?;
        let loss_scale = self.loss_scale;
        let verdict = self.verdict(averages.iter().all(Average::is_f32));
        let outcome = py.detach(|| {
            let write = |average: GroupAverage<'_>| averages[average.group()].write(average, loss_scale);
            self.exchange.finish_with(verdict, write)
        });
        if let Some(learner) = non_finite(outcome.map_err(failed)?) {
            return Ok((Some(learner), Vec::new()));
        }
        let compressor = self.compressor();
        let sent = |layer| {
            let statistics = compressor.layer_statistics(layer);
            (statistics.scale, statistics.selected)
        };
        let words = averages.into_iter().map(|average| {
            let (words, indices, values) = average.words(sent);
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            Ok((array(py, &bytes, "int32")?, indices, values))
        });
        Ok((None, words.collect::<PyResult<Vec<_>>>()?))
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
        check_groups(self.exchange.groups(), buckets.iter().map(Bucket::layers))?;
        check_apart(buckets.iter().map(|bucket| &bucket.values))?;
        let verdict = self.verdict(buckets.iter().all(|bucket| bucket.values.f32().is_ok()));
        let (scratch, loss_scale) = (&mut self.scratch, self.loss_scale);
        let outcome = py.detach(|| {
            let write =
                |average: GroupAverage<'_>| buckets[average.group()].write(average, loss_scale, scratch);
            self.exchange.finish_with(verdict, write)
        });
        Ok(non_finite(outcome.map_err(failed)?))
    }

    /// Adds residuals to a bucket's gradients, for a dense step by other means. Returns whether they are finite, and
    /// whether a parameter that is skipped as unused keeps anything.
    fn add_residuals(
        &mut self,
        py: Python<'_>,
        bucket: &Bound<'_, PyAny>,
        layers: Vec<usize>,
    ) -> PyResult<(bool, bool)> {
        let Bucket { mut values, parts } = Bucket::new(Floats::get_mut(bucket)?, self.layout(), &layers)?;
        let Self { exchange, learner, skip_unused, loss_scale, scratch } = self;
        py.detach(|| {
            let (mut good, mut keeps, mut dense) = (true, false, Vec::new());
            for (layer, part) in parts {
                if !exchange.layout()[layer].treatment.selects() {
                    continue;
                }
                let gradient = values.gradient(part.clone());
                if *skip_unused && gradient.is_zero() {
                    keeps |= exchange.keeps(*learner, layer);
                    continue;
                }
                dense.resize(part.len(), 0.0);
                if exchange.flush_layer(*learner, layer, gradient, &mut dense)? {
                    good &= values.write(part, scratch, |output| {
                        output.iter_mut().zip(&dense).for_each(|(value, sum)| *value = sum * *loss_scale);
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

    /// Multiplies what the learner keeps, also as an owner, by a factor from 0 to 1. All learners must do the same, between steps.
    fn decay(&mut self, py: Python<'_>, factor: f32) -> PyResult<()> {
        py.detach(|| self.exchange.decay(factor)).map_err(refused)
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

    /// Replaces a parameter's residual. All values must be finite.
    fn set_residual(&mut self, py: Python<'_>, layer: usize, values: PyBuffer<f32>) -> PyResult<()> {
        check_layer(self.layout(), layer)?;
        check_shape(values.shape(), &self.layout()[layer])?;
        let values = values.to_vec(py)?;
        let compressor = self.compressor();
        if compressor.is_open()
            || compressor.residual(layer).is_none_or(|residual| residual.len() != values.len())
        {
            return Err(refused("a step is open, or the parameter has no residual of this length"));
        }
        compressor.set_residual(layer, &values).map_err(refused)
    }

    /// Returns what the learner keeps: its residuals by name, what it keeps as an owner by name, and a text that says who saved it.
    fn save<'py>(&mut self, py: Python<'py>) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>, String)> {
        let state = py.detach(|| self.exchange.save()).map_err(failed)?.remove(0);
        let (residuals, text) = tensors(py, &state.residuals)?;
        let owner = match state.owner {
            Some(owner) => tensors(py, &owner)?.0,
            None => PyDict::new(py),
        };
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

    /// Returns when the verdict of a step can be sent whose buckets are all f32, or not. An average always fits f32.
    fn verdict(&self, all_f32: bool) -> SendVerdict {
        match all_f32 && self.loss_scale == 1.0 {
            true => SendVerdict::BeforeWriting,
            false => SendVerdict::AfterWriting,
        }
    }

    fn compressor(&mut self) -> &mut Compressor {
        self.exchange.compressor(self.learner).expect("the learner that is hosted here")
    }
}

/// Returns the tensors of a safetensors file by name, as arrays, and its text.
fn tensors<'py>(py: Python<'py>, file: &[u8]) -> PyResult<(Bound<'py, PyDict>, String)> {
    let tensors = SafeTensors::deserialize(file).map_err(refused)?;
    let (_, metadata) = SafeTensors::read_metadata(file).map_err(refused)?;
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(STATE_KEY)).cloned();
    let arrays = PyDict::new(py);
    for (name, tensor) in tensors.iter() {
        let flat = array(py, tensor.data(), "float32")?;
        arrays.set_item(name, flat.call_method1("reshape", (tensor.shape().to_vec(),))?)?;
    }
    Ok((arrays, text.unwrap_or_default()))
}

/// Returns a safetensors file of these arrays and this text.
fn file(arrays: &Arrays<'_>, text: &str) -> PyResult<Vec<u8>> {
    let arrays = arrays.iter().map(|(name, array)| {
        let shape: Vec<usize> = array.getattr("shape")?.extract()?;
        let values = Floats::get(array)?;
        let data: Vec<u8> = values.f32()?.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok((name, shape, data))
    });
    let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
    let views = arrays.iter().map(|(name, shape, data)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), data).map_err(refused)?;
        Ok((name.as_str(), view))
    });
    let views = views.collect::<PyResult<Vec<_>>>()?;
    let metadata = HashMap::from([(STATE_KEY.to_owned(), text.to_owned())]);
    safetensors::serialize(views, Some(metadata)).map_err(refused)
}
