//! One learner's exchange, over a collective that Python provides.

use crate::buffers::{Floats, array, bytes, f32_array, words};
use crate::compressor::{layer_statistics, read_codec};
use crate::layout::Layout;
use crate::{ExchangeError, refused};
use adacomp::{Compressor, Outcome, SavedBy, Selected};
use adacomp_exchange::{
    Collective, CollectiveError, Incoming, LearnerState, Options, Outgoing, Protocol, Strategy, Writing,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Carries bytes by calling a Python object, which has `learner`, `learners`, `start_to_all(bytes)`, `start_to_each(list of
/// bytes)`, and `finish()`, which gives the messages of all learners of the oldest round.
struct Bridge {
    python: Py<PyAny>,
    learner: usize,
    learners: usize,
    /// Whether the rounds under way are to all, oldest first.
    under_way: std::collections::VecDeque<bool>,
}

impl Collective for Bridge {
    fn learners(&self) -> usize {
        self.learners
    }

    fn hosted(&self) -> Range<usize> {
        self.learner..self.learner + 1
    }

    fn start(&mut self, outgoing: Outgoing) -> Result<(), CollectiveError> {
        // Messages are long, so each goes before the next copy of it is made.
        let started = Python::attach(|py| match outgoing {
            Outgoing::ToAll(messages) => {
                self.under_way.push_back(true);
                let message = PyBytes::new(py, &messages[0]);
                drop(messages);
                self.python.call_method1(py, "start_to_all", (message,))
            }
            Outgoing::ToEach(messages) => {
                self.under_way.push_back(false);
                let copied: Vec<_> = messages[0].iter().map(|message| PyBytes::new(py, message)).collect();
                drop(messages);
                self.python.call_method1(py, "start_to_each", (copied,))
            }
        });
        started.map(drop).map_err(transport)
    }

    fn finish(&mut self) -> Result<Incoming, CollectiveError> {
        let to_all = self.under_way.pop_front().ok_or(CollectiveError::NotStarted)?;
        let messages = Python::attach(|py| {
            let messages = self.python.call_method0(py, "finish")?;
            let messages: Vec<Bound<'_, PyAny>> = messages.extract(py)?;
            messages.iter().map(bytes).collect::<PyResult<Vec<_>>>()
        });
        let messages = messages.map_err(transport)?;
        Ok(match to_all {
            true => Incoming::ToAll(messages.into_iter().map(Arc::new).collect()),
            false => Incoming::ToEach(vec![messages]),
        })
    }
}

fn transport(error: PyErr) -> CollectiveError {
    let reason = Python::attach(|py| error.value(py).to_string());
    CollectiveError::Transport { transport: "torch.distributed", reason }
}

pub(crate) fn read_strategy(name: &str) -> PyResult<Strategy> {
    let strategy = Strategy::ALL.into_iter().find(|strategy| strategy.name() == name);
    strategy.ok_or_else(|| refused(format!("strategy `{name}`; expected gather, reduce or sharded")))
}

pub(crate) fn failed(error: adacomp_exchange::ExchangeError) -> PyErr {
    ExchangeError::new_err(error.to_string())
}

/// Arrays by name.
type Arrays<'py> = HashMap<String, Bound<'py, PyAny>>;

/// One learner's side of every step: gradients in, by buckets, and the averaged gradient out into the same buckets.
#[pyclass(module = "adacomp")]
pub(crate) struct Exchange {
    exchange: adacomp_exchange::Exchange<Bridge>,
    learner: usize,
    loss_scale: f32,
    scratch: Vec<f32>,
}

/// A bucket, and the part of it that each of its layers has, by ascending layer.
struct Bucket {
    values: Floats,
    parts: Vec<(usize, Range<usize>)>,
}

#[pymethods]
impl Exchange {
    #[new]
    fn new(
        py: Python<'_>,
        layout: &Layout,
        strategy: &str,
        codec: &str,
        collective: Py<PyAny>,
        threads: usize,
    ) -> PyResult<Self> {
        let strategy = read_strategy(strategy)?;
        let learner: usize = collective.getattr(py, "learner")?.extract(py)?;
        let learners: usize = collective.getattr(py, "learners")?.extract(py)?;
        if learner >= learners {
            return Err(refused(format!("learner {learner} of {learners}")));
        }
        let options = Options { codec: read_codec(codec)?, ..Options::from(strategy) };
        let bridge = Bridge { python: collective, learner, learners, under_way: Default::default() };
        let layout = layout.0.clone();
        let exchange =
            py.detach(|| adacomp_exchange::Exchange::new(bridge, layout, options)).map_err(failed)?;
        let mut exchange = Self { exchange, learner, loss_scale: 1.0, scratch: Vec::new() };
        let compressor = exchange.compressor();
        *compressor = Compressor::new(compressor.layout().clone()).with_threads(threads);
        Ok(exchange)
    }

    /// The step that is next or going on.
    #[getter]
    fn step(&mut self) -> u64 {
        self.exchange.protocol().step()
    }

    /// Gradients are divided by this, and averages multiplied, so that residuals do not depend on it.
    fn set_loss_scale(&mut self, scale: f32) -> PyResult<()> {
        self.compressor().set_inverse_loss_scale(1.0 / scale).map_err(refused)?;
        self.loss_scale = scale;
        Ok(())
    }

    /// Has parameters whose gradient is zero everywhere send nothing and keep their residual.
    fn set_skip_unused(&mut self, skip: bool) {
        self.exchange.protocol().set_skip_unused(skip);
    }

    /// Compresses a bucket, the gradients of these parameters one after the other, and has it on its way.
    fn give(&mut self, py: Python<'_>, bucket: &Bound<'_, PyAny>, layers: Vec<usize>) -> PyResult<()> {
        let bucket = Floats::get(bucket)?;
        let parts = self.parts(&layers, bucket.len())?;
        py.detach(|| {
            self.exchange.begin_group(&ascending(&layers))?;
            for (layer, part) in parts {
                self.exchange.give(self.learner, layer, bucket.gradient(part))?;
            }
            Ok(())
        })
        .map_err(failed)
    }

    /// Begins a bucket of parameters that are given one by one.
    fn begin(&mut self, layers: Vec<usize>) -> PyResult<()> {
        let elements = self.elements(&layers)?;
        self.parts(&layers, elements)?;
        self.exchange.begin_group(&ascending(&layers)).map(drop).map_err(failed)
    }

    /// Gives one parameter of such a bucket.
    fn give_layer(&mut self, py: Python<'_>, layer: usize, gradient: &Bound<'_, PyAny>) -> PyResult<()> {
        let gradient = Floats::get(gradient)?;
        let (learner, whole) = (self.learner, 0..gradient.len());
        py.detach(|| self.exchange.give(learner, layer, gradient.gradient(whole))).map_err(failed)
    }

    /// Gives what was selected of one parameter of such a bucket on another device: bin maxima (float32), and for each selected
    /// element twice its index, plus one if it is negative (int32), ascending.
    fn give_selection(
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
        py.detach(|| self.exchange.give_selection(self.learner, layer, maxima, &selected)).map_err(failed)
    }

    /// Ends the step: waits for all learners and writes the averaged gradient into the buckets, in the order in which they were
    /// given. None if it did; otherwise the number of a learner whose gradient is not finite, and what is in the buckets counts
    /// for nothing.
    fn finish(
        &mut self,
        py: Python<'_>,
        buckets: Vec<(Bound<'_, PyAny>, Vec<usize>)>,
    ) -> PyResult<Option<u32>> {
        let buckets = buckets.iter().map(|(bucket, layers)| self.bucket(bucket, layers));
        let mut buckets = buckets.collect::<PyResult<Vec<_>>>()?;
        if buckets.len() != self.exchange.protocol().groups() {
            return Err(refused("not all buckets of the step"));
        }
        let (scratch, loss_scale) = (&mut self.scratch, self.loss_scale);
        let writing = match loss_scale == 1.0 && buckets.iter().all(|bucket| bucket.values.f32().is_ok()) {
            true => Writing::Sure,
            false => Writing::MayBeRefused,
        };
        let outcome = py.detach(|| {
            self.exchange.finish_with(writing, |protocol, group| {
                if !buckets[group].write(protocol, group, loss_scale, scratch) {
                    protocol.reject_average();
                }
            })
        });
        match outcome.map_err(failed)? {
            Outcome::Averaged => Ok(None),
            Outcome::NonFinite { learner } => Ok(Some(learner)),
        }
    }

    /// Adds residuals to a bucket's gradients, for a dense step by other means. False if they are not finite. With `skip_unused`,
    /// parameters whose gradient is zero everywhere keep what they have; whether there is any, is the second.
    fn add_residuals(
        &mut self,
        py: Python<'_>,
        bucket: &Bound<'_, PyAny>,
        layers: Vec<usize>,
        skip_unused: bool,
    ) -> PyResult<(bool, bool)> {
        let mut bucket = Floats::get_mut(bucket)?;
        let parts = self.parts(&layers, bucket.len())?;
        let (learner, loss_scale) = (self.learner, self.loss_scale);
        let (protocol, scratch) = (self.exchange.protocol(), &mut self.scratch);
        py.detach(|| {
            let (mut good, mut keeps, mut whole) = (true, false, Vec::new());
            for (layer, part) in parts {
                if !protocol.layout()[layer].treatment.selects() {
                    continue;
                }
                let gradient = bucket.gradient(part.clone());
                if skip_unused && gradient.is_zero() {
                    keeps |= protocol.keeps(learner, layer);
                    continue;
                }
                whole.resize(part.len(), 0.0);
                if protocol.everything(learner, layer, gradient, &mut whole)? {
                    good &= bucket.write(part, scratch, |output| {
                        output.iter_mut().zip(&whole).for_each(|(value, sum)| *value = sum * loss_scale);
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
        py.detach(|| self.exchange.protocol().end_elsewhere(arrived)).map_err(failed)
    }

    /// A copy of a parameter's residual, or None if it is sent whole.
    fn residual<'py>(&mut self, py: Python<'py>, layer: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.check_layer(layer)?;
        self.compressor().residual(layer).map(|values| f32_array(py, values)).transpose()
    }

    /// What the learner keeps of a parameter, such that the mean over learners counts: an owner's values are of the average.
    fn kept<'py>(&mut self, py: Python<'py>, layer: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.check_layer(layer)?;
        let learner = self.learner;
        self.exchange.protocol().kept(learner, layer).map(|values| f32_array(py, &values)).transpose()
    }

    /// Replaces a parameter's residual.
    fn set_residual(&mut self, layer: usize, values: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_layer(layer)?;
        let values = Floats::get(values)?;
        let values = values.f32()?;
        let compressor = self.compressor();
        if compressor.is_open()
            || compressor.residual(layer).is_none_or(|residual| residual.len() != values.len())
        {
            return Err(refused("a step is open, or the parameter has no residual of this length"));
        }
        compressor.set_residual(layer, values);
        Ok(())
    }

    /// What the learner keeps: its residuals by name, what it keeps as an owner by name, and a text that says who saved it.
    fn save<'py>(&mut self, py: Python<'py>) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>, String)> {
        let state = py.detach(|| self.exchange.protocol().save()).map_err(failed)?.remove(0);
        let (residuals, text) = tensors(py, &state.residuals)?;
        let owner = state
            .owner
            .map_or_else(|| Ok(PyDict::new(py)), |owner| tensors(py, &owner).map(|(owner, _)| owner))?;
        Ok((residuals, owner, text))
    }

    /// The text that a state would have that some learner, of so many, has saved at this step.
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
        py.detach(|| self.exchange.protocol().load(&states)).map_err(refused)
    }

    /// For each parameter name what it sent in the last step.
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

    /// The scale that a parameter was sent as in the last step.
    fn scale(&mut self, layer: usize) -> PyResult<f32> {
        self.check_layer(layer)?;
        Ok(self.compressor().layer_statistics(layer).scale)
    }

    /// Where the time of the last step went: compress, encode, wait, decode.
    fn seconds(&self) -> (f64, f64, f64, f64) {
        let seconds = self.exchange.seconds();
        (seconds.compress, seconds.encode, seconds.wait, seconds.decode)
    }
}

impl Exchange {
    /// A bucket of these layers.
    fn bucket(&mut self, values: &Bound<'_, PyAny>, layers: &[usize]) -> PyResult<Bucket> {
        let values = Floats::get_mut(values)?;
        let parts = self.parts(layers, values.len())?;
        Ok(Bucket { values, parts })
    }

    fn compressor(&mut self) -> &mut Compressor {
        self.exchange.protocol().compressor(self.learner).expect("the learner that is hosted here")
    }

    fn check_layer(&mut self, layer: usize) -> PyResult<()> {
        let layers = self.exchange.protocol().layout().len();
        if layer < layers { Ok(()) } else { Err(refused(format!("layer {layer} of {layers}"))) }
    }

    fn elements(&mut self, layers: &[usize]) -> PyResult<usize> {
        layers.iter().try_for_each(|&layer| self.check_layer(layer))?;
        let layout = self.exchange.protocol().layout();
        Ok(layers.iter().map(|&layer| layout[layer].elements()).sum())
    }

    /// The part of a bucket of so many elements that each of its layers has, by ascending layer.
    fn parts(&mut self, layers: &[usize], elements: usize) -> PyResult<Vec<(usize, Range<usize>)>> {
        let expected = self.elements(layers)?;
        if elements != expected {
            return Err(refused(format!("a bucket of {elements} elements, expected {expected}")));
        }
        let layout = self.exchange.protocol().layout();
        let mut start = 0;
        let part = |&layer: &usize| {
            let end = start + layout[layer].elements();
            (layer, std::mem::replace(&mut start, end)..end)
        };
        let mut parts: Vec<_> = layers.iter().map(part).collect();
        parts.sort_by_key(|(layer, _)| *layer);
        if parts.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Err(refused("a parameter is twice in a bucket"));
        }
        Ok(parts)
    }
}

fn ascending(layers: &[usize]) -> Vec<usize> {
    let mut layers = layers.to_vec();
    layers.sort_unstable();
    layers
}

impl Bucket {
    /// Writes the average of a group. Whether it fits the bucket's format.
    fn write(
        &mut self,
        protocol: &mut Protocol,
        group: usize,
        loss_scale: f32,
        scratch: &mut Vec<f32>,
    ) -> bool {
        let whole = 0..self.values.len();
        // By place in the bucket, to cut it into slices, then by layer, as the group has them.
        let mut by_place: Vec<_> = self.parts.iter().cloned().enumerate().collect();
        by_place.sort_by_key(|(_, (_, part))| part.start);
        let fits = self.values.write(whole.clone(), scratch, |mut rest| {
            let mut slices: Vec<(usize, &mut [f32])> = Vec::new();
            for (position, (_, part)) in &by_place {
                let (slice, after) = rest.split_at_mut(part.len());
                slices.push((*position, slice));
                rest = after;
            }
            slices.sort_by_key(|(position, _)| *position);
            let mut slices: Vec<&mut [f32]> = slices.into_iter().map(|(_, slice)| slice).collect();
            protocol.write(group, &mut slices);
            if loss_scale != 1.0 {
                slices.iter_mut().flat_map(|slice| slice.iter_mut()).for_each(|value| *value *= loss_scale);
            }
        });
        fits && (loss_scale == 1.0 || self.values.gradient(whole).is_finite())
    }
}

/// The key of the text that says who saved a state.
const KEY: &str = "adacomp";

/// The tensors of a safetensors file by name, as arrays, and its text.
fn tensors<'py>(py: Python<'py>, file: &[u8]) -> PyResult<(Bound<'py, PyDict>, String)> {
    let tensors = SafeTensors::deserialize(file).map_err(refused)?;
    let (_, metadata) = SafeTensors::read_metadata(file).map_err(refused)?;
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY)).cloned();
    let arrays = PyDict::new(py);
    for (name, tensor) in tensors.iter() {
        let flat = array(py, tensor.data(), "float32")?;
        arrays.set_item(name, flat.call_method1("reshape", (tensor.shape().to_vec(),))?)?;
    }
    Ok((arrays, text.unwrap_or_default()))
}

/// The reverse.
fn file(arrays: &Arrays<'_>, text: &str) -> PyResult<Vec<u8>> {
    let arrays = arrays.iter().map(|(name, array)| {
        let shape: Vec<usize> = array.getattr("shape")?.extract()?;
        Floats::get(array)?.f32()?;
        Ok((name.as_str(), shape, bytes(array)?))
    });
    let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
    let views = arrays
        .iter()
        .map(|(name, shape, data)| Ok((*name, TensorView::new(Dtype::F32, shape.clone(), data)?)));
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>().map_err(refused)?;
    let metadata = HashMap::from([(KEY.to_owned(), text.to_owned())]);
    safetensors::serialize(views, Some(metadata)).map_err(refused)
}
