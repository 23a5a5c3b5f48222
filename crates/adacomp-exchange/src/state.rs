//! Saving and loading what learners keep, also for another number of learners.

use crate::error::ExchangeError;
use crate::protocol::{Protocol, owner_layout};
use crate::shares::share;
use adacomp::{Compressor, StateError};

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
    /// before. With another number of learners, what owners kept goes to all learners' residuals: it is of the average, so
    /// that conserves it. Everything is checked before anything is changed.
    pub fn load(&mut self, states: &[LearnerState]) -> Result<(), ExchangeError> {
        let learners = self.learners();
        let residuals: Vec<&[u8]> = states.iter().map(|state| state.residuals.as_slice()).collect();
        let owners: Vec<&[u8]> = states.iter().filter_map(|state| state.owner.as_deref()).collect();
        if !owners.is_empty() && owners.len() != states.len() {
            return Err(StateError::Empty.into());
        }
        let mut step = 0;
        let mut loaded = Vec::new();
        for learner in self.hosted() {
            let mut compressor = Compressor::new(self.layout().clone());
            step = compressor.load(&residuals, learner, learners)?;
            let mut owner = self.owner(learner).map(|owner| Compressor::new(owner.layout().clone()));
            let own = owner.as_mut().map(|owner| owner.load(&owners, learner, learners));
            if !matches!(own, Some(Ok(_))) {
                self.spread_owners(&owners, &mut compressor)?;
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
        self.set_step(step);
        Ok(())
    }

    /// Adds what so many owners kept to a learner's residuals.
    fn spread_owners(&self, owners: &[&[u8]], compressor: &mut Compressor) -> Result<(), ExchangeError> {
        for (owner, state) in owners.iter().enumerate() {
            let mut kept = Compressor::new(owner_layout(self.layout(), owner, owners.len()));
            kept.load(&[state], owner, owners.len())?;
            for (number, layer) in self.layout().layers().iter().enumerate() {
                if let Some(values) = kept.residual(number) {
                    compressor.add_to_residual(number, share(layer, owner, owners.len()).start, values);
                }
            }
        }
        Ok(())
    }
}
