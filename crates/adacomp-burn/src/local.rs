//! Learners with local steps.

use crate::error::Error;
use crate::learners::{Learners, average_statistics, check_weights};
use crate::parameters::{set_statistics, set_weights, statistics, weights};
use adacomp::Outcome;
use adacomp_exchange::{LocalSteps, Shared, Transport};
use burn::module::Module;

/// Learners that take local steps: each trains its own model, with its own optimiser and data, and once in some steps learners
/// exchange how far their weights have moved.
pub struct LocalLearners<T> {
    learners: Learners<T>,
    options: LocalSteps,
    shared: Shared,
    /// The average of running statistics at the last exchange.
    statistics: Vec<Vec<f32>>,
    /// Steps since the last exchange.
    steps: u64,
    outcome: Outcome,
}

impl<T: Transport> LocalLearners<T> {
    /// Begins with the weights of this model, which all learners must have. All must have been given the same options, too: if not,
    /// all get an error that says which learner differs.
    pub fn new<M: Module>(mut learners: Learners<T>, model: &M, options: LocalSteps) -> Result<Self, Error> {
        let (shared, statistics) = (Shared::new(weights(model)?), statistics(model)?);
        learners.check_parameters(shared.weights.len())?;
        check_weights(learners.exchange().transport(), &shared.weights)?;
        learners.exchange().agree_on(&options)?;
        Ok(Self { learners, options, shared, statistics, steps: 0, outcome: Outcome::Averaged })
    }

    /// Takes the model of the one learner that is hosted here after each step of its optimiser, and returns the model to go on with:
    /// the same or, once in [`LocalSteps::every`] steps, one with the weights and running statistics that all learners share.
    pub fn after_step<M: Module>(&mut self, model: M) -> Result<M, Error> {
        Ok(self.after_step_hosted(vec![model])?.swap_remove(0))
    }

    /// Does the same where several learners are hosted: takes the model of each, in their order.
    pub fn after_step_hosted<M: Module>(&mut self, models: Vec<M>) -> Result<Vec<M>, Error> {
        self.check_hosted(models.len())?;
        self.steps += 1;
        if self.steps < self.options.every {
            return Ok(models);
        }
        self.exchange_hosted(models)
    }

    /// Exchanges now if steps have been taken since the last exchange: for the end of training. All learners must do the same, after
    /// as many steps.
    pub fn exchange<M: Module>(&mut self, model: M) -> Result<M, Error> {
        Ok(self.exchange_hosted(vec![model])?.swap_remove(0))
    }

    /// Does the same where several learners are hosted: takes the model of each, in their order.
    pub fn exchange_hosted<M: Module>(&mut self, models: Vec<M>) -> Result<Vec<M>, Error> {
        self.check_hosted(models.len())?;
        if self.steps == 0 {
            return Ok(models);
        }
        let mut local = models.iter().map(weights).collect::<Result<Vec<_>, _>>()?;
        local.iter().try_for_each(|local| self.learners.check_parameters(local.len()))?;
        let own = models.iter().map(statistics).collect::<Result<Vec<_>, _>>()?;
        let exchange = self.learners.exchange();
        self.outcome = self.shared.exchange(&self.options, exchange, &mut local)?;
        if self.outcome == Outcome::Averaged {
            self.statistics = average_statistics(exchange.transport(), &own)?;
        }
        self.steps = 0;
        Ok(models.into_iter().map(|model| self.shared_model(model)).collect())
    }

    /// Returns the model with the weights and running statistics that all learners have shared since the last exchange: to evaluate
    /// and to save.
    ///
    /// # Panics
    /// If it is another model than the one that learners were connected with.
    pub fn shared_model<M: Module>(&self, model: M) -> M {
        set_weights(set_statistics(model, &self.statistics), &self.shared.weights)
    }

    fn check_hosted(&mut self, given: usize) -> Result<(), Error> {
        let hosted = self.learners.exchange().transport().hosted().len();
        if given == hosted { Ok(()) } else { Err(Error::Hosted { hosted, given }) }
    }

    /// Returns the shared weights and their momentum. With a momentum, save `velocity` with the model, and set it again before
    /// training goes on.
    pub fn shared(&mut self) -> &mut Shared {
        &mut self.shared
    }

    /// Returns how the last exchange ended. Where a learner's weights were not finite, its optimiser has seen what made them so:
    /// give it a new one.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Returns the learners, for the traffic, times and residuals of their exchange.
    pub fn learners(&mut self) -> &mut Learners<T> {
        &mut self.learners
    }
}
