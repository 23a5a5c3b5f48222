//! Saves residuals to safetensors and loads them, also for another number of learners.

use crate::compressor::Compressor;
use crate::error::list;
use crate::policy::Layout;
use safetensors::tensor::{Dtype, SafeTensors, View};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use thiserror::Error;

/// The key of the metadata that says who saved a state.
pub const STATE_KEY: &str = "adacomp";
const FORMAT: &str = "residuals 1";

/// Residuals that cannot be saved or loaded. The compressor is unchanged.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum StateError {
    /// A step is open, so it is not known yet what was sent.
    #[error("a step is open; commit it or roll it back before saving or loading")]
    Open,
    /// Not a readable safetensors file.
    #[error("state {position}: {source}")]
    File { position: usize, source: safetensors::SafeTensorError },
    /// Residuals cannot be written.
    #[error("residuals cannot be saved: {source}")]
    Write { source: safetensors::SafeTensorError },
    /// Safetensors, but not written by [`crate::Compressor::save`], or of other learners than given.
    #[error(
        "state {position}: `{key}` is {}, expected {expected}; give all saved states in learner order",
        actual.as_deref().unwrap_or("missing")
    )]
    Metadata { position: usize, key: &'static str, expected: String, actual: Option<String> },
    /// Other parameters than the model's.
    #[error(
        "saved residuals do not fit the model: missing {}; extra {}; reshaped {}",
        list(missing),
        list(extra),
        list(reshaped)
    )]
    Parameters { missing: Vec<String>, extra: Vec<String>, reshaped: Vec<String> },
    /// A saved residual that is NaN or infinite.
    #[error("state of learner {learner}: the residual of `{parameter}` is not finite")]
    NonFinite { learner: usize, parameter: String },
    /// No state.
    #[error("no saved state given")]
    Empty,
    /// Only some of the states have residuals of owners.
    #[error("{with} of {of} saved states have what their learners keep as owners; give all or none")]
    Owners { with: usize, of: usize },
    /// A bad state among those that learners keep as owners.
    #[error("what owners keep: {source}")]
    Owner { source: Box<Self> },
    /// A learner number that is not below the number of learners.
    #[error("learner {learner} of {learners}: learners are numbered from 0")]
    Learner { learner: usize, learners: usize },
}

/// Who saved a state, and before which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedBy {
    /// The learner.
    pub learner: usize,
    /// The number of learners.
    pub learners: usize,
    /// The step before which it was saved.
    pub step: u64,
}

/// Writes the text that a state has in its metadata.
impl fmt::Display for SavedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { learner, learners, step } = self;
        write!(f, "{FORMAT}, learner {learner} of {learners}, step {step}")
    }
}

impl SavedBy {
    /// Reads who saved a state. An error names it by `position`.
    pub fn read(state: &[u8], position: usize) -> Result<Self, StateError> {
        Ok(Saved::read(state, position)?.by)
    }

    fn parse(text: &str) -> Option<Self> {
        let (learner, rest) = text.strip_prefix(FORMAT)?.strip_prefix(", learner ")?.split_once(" of ")?;
        let (learners, step) = rest.split_once(", step ")?;
        let (learner, learners) = (learner.parse().ok()?, learners.parse().ok()?);
        Some(Self { learner, learners, step: step.parse().ok()? })
    }
}

impl Compressor {
    /// Returns the residuals as a safetensors file, keyed by parameter name, with who saved them and before which step.
    pub fn save(&mut self, learner: usize, learners: usize, step: u64) -> Result<Vec<u8>, StateError> {
        check_learner(learner, learners)?;
        if self.is_open() {
            return Err(StateError::Open);
        }
        // One key, because the order of several is not defined, and a state must always be the same bytes.
        let saved_by = SavedBy { learner, learners, step };
        let metadata = HashMap::from([(STATE_KEY.to_owned(), saved_by.to_string())]);
        let layout = self.layout().clone();
        let tensors = self.residuals().map(|(number, values)| {
            let parameter = &layout[number].parameter;
            (parameter.name.as_str(), Saving { shape: &parameter.shape, values })
        });
        safetensors::serialize(tensors, Some(metadata)).map_err(|source| StateError::Write { source })
    }

    /// Loads saved residuals for `learner` of now `learners`, and returns the step before which they were saved.
    ///
    /// `states` are the saved states of all learners in their order. If the number of learners is the same, this learner's
    /// own is enough, and it gets its residuals back to the bit. With another number each learner gets the average, so that
    /// the sum over learners of `residual / learners` stays the same. Everything is checked before anything is changed.
    pub fn load(
        &mut self,
        states: &[impl AsRef<[u8]>],
        learner: usize,
        learners: usize,
    ) -> Result<u64, StateError> {
        check_learner(learner, learners)?;
        if self.is_open() {
            return Err(StateError::Open);
        }
        let states = states.iter().enumerate().map(|(position, bytes)| Saved::read(bytes.as_ref(), position));
        let mut states = states.collect::<Result<Vec<_>, _>>()?;
        match states.iter().position(|state| (state.by.learner, state.by.learners) == (learner, learners)) {
            Some(own) => states = vec![states.swap_remove(own)],
            None => check_complete(&states)?,
        }
        let layout = self.layout().clone();
        states.iter().try_for_each(|state| state.check(&layout))?;

        for (number, residual) in self.residuals() {
            let mut saved: Vec<_> = states.iter().map(|state| state.values(layout[number].name())).collect();
            for element in residual {
                let sum = saved
                    .iter_mut()
                    .filter_map(Iterator::next)
                    .map(f64::from)
                    .reduce(|sum, value| sum + value);
                *element = (sum.unwrap_or_default() / states.len() as f64) as f32;
            }
        }
        Ok(states[0].by.step)
    }
}

fn check_learner(learner: usize, learners: usize) -> Result<(), StateError> {
    if learner < learners { Ok(()) } else { Err(StateError::Learner { learner, learners }) }
}

/// Checks that these are the states of all learners of a run, in order.
fn check_complete(states: &[Saved<'_>]) -> Result<(), StateError> {
    for (position, state) in states.iter().enumerate() {
        let wrong = |key, expected: u64, actual: u64| {
            let (expected, actual) = (expected.to_string(), Some(actual.to_string()));
            Err(StateError::Metadata { position, key, expected, actual })
        };
        let (SavedBy { learner, learners, step }, first) = (state.by, states[0].by);
        if learners != states.len() {
            return wrong("learners", states.len() as u64, learners as u64);
        }
        if learner != position {
            return wrong("learner", position as u64, learner as u64);
        }
        if step != first.step {
            return wrong("step", first.step, step);
        }
    }
    if states.is_empty() { Err(StateError::Empty) } else { Ok(()) }
}

/// A residual that is written to a file.
struct Saving<'a> {
    shape: &'a [usize],
    values: &'a [f32],
}

impl View for Saving<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn data_len(&self) -> usize {
        size_of_val(self.values)
    }
}

/// One learner's file.
struct Saved<'a> {
    by: SavedBy,
    tensors: SafeTensors<'a>,
}

impl<'a> Saved<'a> {
    fn read(bytes: &'a [u8], position: usize) -> Result<Self, StateError> {
        let broken = |source| StateError::File { position, source };
        let tensors = SafeTensors::deserialize(bytes).map_err(broken)?;
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(broken)?;
        let value = metadata.metadata().as_ref().and_then(|metadata| metadata.get(STATE_KEY)).cloned();
        match value.as_deref().and_then(SavedBy::parse) {
            Some(by) => Ok(Self { by, tensors }),
            None => Err(StateError::Metadata {
                position,
                key: STATE_KEY,
                expected: format!("{FORMAT}, learner L of N, step S"),
                actual: value,
            }),
        }
    }

    /// Checks that it has the residuals of this model, and only these.
    fn check(&self, layout: &Layout) -> Result<(), StateError> {
        let kept = || layout.layers().iter().filter(|layer| layer.treatment.selects());
        let (mut missing, mut reshaped) = (Vec::new(), Vec::new());
        for layer in kept() {
            let (name, shape) = (layer.name().to_owned(), &layer.parameter.shape);
            match self.tensors.tensor(&name) {
                Err(_) => missing.push(name),
                Ok(tensor) if tensor.dtype() != Dtype::F32 || tensor.shape() != shape => {
                    reshaped.push(format!(
                        "{name}: {:?} {:?} -> F32 {shape:?}",
                        tensor.dtype(),
                        tensor.shape()
                    ));
                }
                Ok(_) => {}
            }
        }
        let known = |name: &str| layout.number(name).is_some_and(|number| layout[number].treatment.selects());
        let mut extra: Vec<_> =
            self.tensors.names().into_iter().filter(|name| !known(name)).map(str::to_owned).collect();
        extra.sort();
        if !(missing.is_empty() && extra.is_empty() && reshaped.is_empty()) {
            return Err(StateError::Parameters { missing, extra, reshaped });
        }
        match kept().find(|layer| !self.values(layer.name()).all(f32::is_finite)) {
            Some(layer) => {
                Err(StateError::NonFinite { learner: self.by.learner, parameter: layer.name().to_owned() })
            }
            None => Ok(()),
        }
    }

    fn values(&self, name: &str) -> impl Iterator<Item = f32> + use<'a> {
        let bytes = self.tensors.tensor(name).map_or(&[][..], |tensor| tensor.data());
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
    }
}
