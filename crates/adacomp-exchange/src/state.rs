//! Saving and loading what learners keep, also for another number of learners.

use crate::error::ExchangeError;
use crate::member::owner_layout;
use crate::protocol::Protocol;
use crate::shares::share;
use crate::strategy::Strategy;
use adacomp::{Compressor, SavedBy, StateError};

/// What one learner keeps between steps, as safetensors files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LearnerState {
    /// Its residuals.
    pub residuals: Vec<u8>,
    /// What it keeps as an owner of shares, with the strategy `sharded`.
    pub owner: Option<Vec<u8>>,
}

impl Protocol {
    /// What the learners that are hosted here keep, in their order.
    pub fn save(&mut self) -> Result<Vec<LearnerState>, ExchangeError> {
        let (step, learners) = (self.step(), self.learners());
        let save = |compressor: &mut Compressor, learner| compressor.save(learner, learners, step);
        self.hosted()
            .map(|learner| {
                let residuals = self.compressor(learner).map(|compressor| save(compressor, learner));
                let owner = self.owner(learner).map(|owner| save(owner, learner)).transpose()?;
                Ok(LearnerState { residuals: residuals.ok_or(StateError::Empty)??, owner })
            })
            .collect()
    }

    /// Takes over what was saved, and goes on with the step before which it was.
    ///
    /// `states` are those of all learners in their order, or of those that are hosted here if there are as many learners as
    /// before. With another number of learners, or another strategy, what owners kept goes to all learners' residuals: it is
    /// of the average, so that conserves it. Everything is checked before anything is changed.
    pub fn load(&mut self, states: &[LearnerState]) -> Result<(), ExchangeError> {
        if self.is_open() {
            return Err(StateError::Open.into());
        }
        let residuals: Vec<&[u8]> = states.iter().map(|state| state.residuals.as_slice()).collect();
        let owners: Vec<&[u8]> = states.iter().filter_map(|state| state.owner.as_deref()).collect();
        if !owners.is_empty() && owners.len() != states.len() {
            return Err(StateError::Owners { with: owners.len(), of: states.len() }.into());
        }
        let saved = one_run(residuals.iter().chain(&owners))?;
        let owners_stay = saved.learners == self.learners() && self.strategy() == Strategy::Sharded;
        let kept_by_owners =
            if owners_stay { Vec::new() } else { self.read_owners(&owners, saved.learners)? };

        let mut loaded = Vec::new();
        for learner in self.hosted() {
            let learners = self.learners();
            let mut compressor = self.compressor(learner).cloned().ok_or(StateError::Empty)?;
            compressor.load(&residuals, learner, learners)?;
            for (layer, start, values) in &kept_by_owners {
                compressor.add_to_residual(*layer, *start, values);
            }
            let mut owner = self.owner(learner).map(|owner| owner.emptied());
            if let Some(owner) = owner.as_mut().filter(|_| owners_stay && !owners.is_empty()) {
                owner.load(&owners, learner, learners)?;
            }
            loaded.push((learner, compressor, owner));
        }
        for (learner, compressor, owner) in loaded {
            if let Some(slot) = self.compressor(learner) {
                *slot = compressor;
            }
            if let (Some(slot), Some(owner)) = (self.owner(learner), owner) {
                *slot = owner;
            }
        }
        self.set_step(saved.step);
        Ok(())
    }

    /// What so many owners kept: layer, first element, values.
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
            let mut kept = Compressor::new(owner_layout(self.layout(), self.options, owner, learners));
            kept.load(&[state], owner, learners)?;
            for layer in 0..self.layout().len() {
                let start = share(self.layout(), layer, owner, learners).start;
                all.extend(kept.residual(layer).map(|values| (layer, start, values.to_vec())));
            }
        }
        Ok(all)
    }
}

/// That states are of one run and step; which.
fn one_run<'a>(states: impl Iterator<Item = &'a &'a [u8]>) -> Result<SavedBy, StateError> {
    let mut first: Option<SavedBy> = None;
    for (position, state) in states.enumerate() {
        let saved = SavedBy::read(state, position)?;
        let expected = *first.get_or_insert(saved);
        if (saved.learners, saved.step) != (expected.learners, expected.step) {
            return Err(StateError::Metadata {
                position,
                key: "adacomp",
                expected: format!("{} learners, step {}", expected.learners, expected.step),
                actual: Some(format!("{} learners, step {}", saved.learners, saved.step)),
            });
        }
    }
    first.ok_or(StateError::Empty)
}
