//! What learners keep between steps: saving and loading it, also for another number of learners, and sending it by other means.

use crate::error::ExchangeError;
use crate::exchange::{Exchange, Options};
use crate::protocol::Learner;
use crate::strategy::shard;
use adacomp::internal::{STATE_KEY, largest};
use adacomp::{
    CompressError, Compressor, Gradient, Layer, Layout, Packet, Parameter, SavedBy, Sending, StateError,
    Treatment,
};

/// What one learner keeps between steps, as safetensors files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LearnerState {
    /// Its residuals.
    pub residuals: Vec<u8>,
    /// What it keeps as an owner of shards, with the strategy `sharded`.
    pub owner: Option<Vec<u8>>,
}

/// Returns a learner's shards of all layers, as layers of their own.
pub(crate) fn owner_layout(layout: &Layout, options: Options, owner: usize, learners: usize) -> Layout {
    let layers = layout.layers().iter().enumerate().map(|(number, layer)| {
        let elements = shard(layout, number, owner, learners).len();
        let treatment = match layer.treatment {
            Treatment::Bins(bin) => Treatment::Bins((bin / options.owner_divisor.get()).max(1)),
            other => other,
        };
        Layer { parameter: Parameter::new(layer.name(), &[elements]), treatment }
    });
    let shards = Layout::new(layers.collect(), layout.soft_threshold(), layout.scale());
    shards.expect("shards of valid layers are valid layers")
}

impl<T> Exchange<T> {
    /// Returns what the learners that are hosted here keep, in their order.
    pub fn save(&mut self) -> Result<Vec<LearnerState>, ExchangeError> {
        let (step, learners) = (self.step, self.learners);
        let save = |learner: &mut Learner| {
            let number = learner.number;
            let owner = learner.owner.as_mut().map(|owner| owner.save(number, learners, step)).transpose()?;
            Ok(LearnerState { residuals: learner.compressor.save(number, learners, step)?, owner })
        };
        self.hosted.iter_mut().map(save).collect()
    }

    /// Takes over what was saved, and goes on with the step before which it was.
    ///
    /// `states` are those of all learners in their order, or of those that are hosted here if there are as many learners as
    /// before. With another number of learners, or another strategy, what owners kept is added to all learners' residuals: it is
    /// of the average, so that conserves it. All states are checked before anything is changed.
    pub fn load(&mut self, states: &[LearnerState]) -> Result<(), ExchangeError> {
        if self.is_open() {
            return Err(StateError::Open.into());
        }
        let residuals: Vec<&[u8]> = states.iter().map(|state| state.residuals.as_slice()).collect();
        let owners: Vec<&[u8]> = states.iter().filter_map(|state| state.owner.as_deref()).collect();
        if !owners.is_empty() && owners.len() != states.len() {
            return Err(StateError::Owners { with: owners.len(), of: states.len() }.into());
        }
        let saved = one_run(&residuals, None)?;
        one_run(&owners, Some(saved)).map_err(of_owners)?;
        let learners = self.learners;
        let owners_stay = saved.learners == learners && self.options.strategy.has_owner_residuals();
        let kept_by_owners =
            if owners_stay { Vec::new() } else { self.read_owners(&owners, saved.learners)? };

        let mut loaded = Vec::new();
        for learner in &self.hosted {
            let mut compressor = learner.compressor.clone();
            compressor.load(&residuals, learner.number, learners)?;
            for (layer, start, values) in &kept_by_owners {
                let residual = &mut compressor.residual_mut(*layer)[*start..*start + values.len()];
                residual.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                if !largest(residual.iter().copied()).is_finite() {
                    let parameter = self.layout[*layer].name().to_owned();
                    return Err(StateError::NonFinite { learner: learner.number, parameter }.into());
                }
            }
            let mut owner = learner.owner.as_ref().map(Compressor::emptied);
            if let Some(owner) = owner.as_mut().filter(|_| owners_stay && !owners.is_empty()) {
                owner.load(&owners, learner.number, learners).map_err(of_owners)?;
            }
            loaded.push((compressor, owner));
        }
        for (learner, loaded) in self.hosted.iter_mut().zip(loaded) {
            (learner.compressor, learner.owner) = loaded;
        }
        self.begin_step(saved.step, self.sending);
        Ok(())
    }

    /// Returns what owners of a run with another number of learners kept: layer, first element, values.
    fn read_owners(
        &self,
        owners: &[&[u8]],
        learners: usize,
    ) -> Result<Vec<(usize, usize, Vec<f32>)>, ExchangeError> {
        if !owners.is_empty() && owners.len() != learners {
            return Err(StateError::Owners { with: owners.len(), of: learners }.into());
        }
        let mut all = Vec::new();
        for (owner, state) in owners.iter().enumerate() {
            let mut kept = Compressor::new(owner_layout(&self.layout, self.options, owner, learners));
            kept.load(&[state], owner, learners).map_err(of_owners)?;
            for layer in 0..self.layout.len() {
                let start = shard(&self.layout, layer, owner, learners).start;
                all.extend(kept.residual(layer).map(|values| (layer, start, values.to_vec())));
            }
        }
        Ok(all)
    }

    /// Writes all that a learner has of a compressed layer, for a dense step by other means, such as an all-reduce that a
    /// framework has already: its gradient, its residual and, because the sum over learners will be divided by their number, that
    /// many times what it keeps as an owner. So nothing is lost when training goes from compressed to dense steps.
    ///
    /// Returns whether it is finite; if not, what is written does not count. The step is open from then on, and
    /// [`Exchange::end_flush`] ends it. A layer that is always sent dense is an error.
    pub fn flush_layer(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
        output: &mut [f32],
    ) -> Result<bool, ExchangeError> {
        let (layout, learners, count) = (self.layout.clone(), self.learners, self.layout.len());
        let compressor = self.compressor(learner).ok_or(ExchangeError::Learner { learner })?;
        let Layer { parameter, treatment } =
            layout.layers().get(layer).ok_or(CompressError::Layer { layer, count })?;
        let (parameter, expected, actual) = (parameter.name.clone(), parameter.elements(), output.len());
        if !treatment.selects() {
            return Err(CompressError::Treatment { parameter, expected: "compressed" }.into());
        }
        if expected != actual {
            return Err(CompressError::Length { parameter, what: "an output", expected, actual }.into());
        }
        compressor.compress_layer(layer, gradient, Sending::Flush)?;
        if compressor.layer_statistics(layer).bad_bins > 0 {
            return Ok(false);
        }
        if let Some(Packet::Dense(values)) = compressor.packet(layer) {
            output.copy_from_slice(values);
        }
        if let Some(owner) = self.owner(learner) {
            let owned = &mut output[shard(&layout, layer, learner, learners)];
            owner.compress_layer(layer, vec![0.0; owned.len()].as_slice().into(), Sending::Flush)?;
            if let Some(Packet::Dense(values)) = owner.packet(layer) {
                owned.iter_mut().zip(values).for_each(|(sum, kept)| *sum += learners as f32 * kept);
            }
            // The average of what all keep fits, but this need not.
            return Ok(largest(owned.iter().copied()).is_finite());
        }
        Ok(true)
    }

    /// Ends a step of [`Exchange::flush_layer`]: what has arrived everywhere leaves the residuals, otherwise it stays. All
    /// learners must do the same.
    pub fn end_flush(&mut self, arrived: bool) -> Result<(), ExchangeError> {
        for learner in &mut self.hosted {
            if arrived { learner.commit()? } else { learner.rollback() }
        }
        self.begin_step(self.step + 1, self.sending);
        Ok(())
    }

    /// Returns what a learner keeps of a layer between steps, such that the mean over learners is what is still missing of the
    /// average: its residual and, times the number of learners, what it keeps as an owner. None for a layer that is always
    /// sent dense.
    pub fn kept(&mut self, learner: usize, layer: usize) -> Option<Vec<f32>> {
        let mut kept = self.compressor(learner)?.residual(layer)?.to_vec();
        let (owned, learners) = (shard(&self.layout, layer, learner, self.learners), self.learners as f32);
        if let Some(values) = self.owner(learner).and_then(|owner| owner.residual(layer)) {
            kept[owned].iter_mut().zip(values).for_each(|(sum, value)| *sum += learners * value);
        }
        Some(kept)
    }

    /// Returns whether a learner keeps anything of a layer, as a learner or as an owner.
    pub fn keeps(&mut self, learner: usize, layer: usize) -> bool {
        let compressors = self.learner(learner).into_iter().flat_map(Learner::compressors);
        let mut kept = compressors.filter_map(|compressor| compressor.residual(layer)).flatten();
        kept.any(|value| *value != 0.0)
    }
}

fn of_owners(source: StateError) -> StateError {
    StateError::Owner { source: Box::new(source) }
}

/// Checks that states are of one run and step, that of `first` if given, and returns which.
fn one_run(states: &[&[u8]], mut first: Option<SavedBy>) -> Result<SavedBy, StateError> {
    for (position, state) in states.iter().enumerate() {
        let saved = SavedBy::read(state, position)?;
        let expected = *first.get_or_insert(saved);
        if (saved.learners, saved.step) != (expected.learners, expected.step) {
            return Err(StateError::Metadata {
                position,
                key: STATE_KEY,
                expected: format!("{} learners, step {}", expected.learners, expected.step),
                actual: Some(format!("{} learners, step {}", saved.learners, saved.step)),
            });
        }
    }
    first.ok_or(StateError::Empty)
}
