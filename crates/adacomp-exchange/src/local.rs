//! Local steps: learners train alone for some steps, then exchange how far their weights have moved.
//!
//! For each learner, every `every` steps, in f32:
//!
//! ```text
//! D = shared - local             residual *= residual_decay      average = exchange(D)
//! momentum 0: update = average   otherwise: v = momentum * v + average; update = average + momentum * v
//! shared -= rate * update        local = shared
//! ```

use crate::error::ExchangeError;
use crate::exchange::Exchange;
use crate::message::check_agreement;
use crate::transport::Transport;
use adacomp::Outcome;

/// How learners take local steps. All must have the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalSteps {
    /// Steps from one exchange to the next.
    pub every: u64,
    /// The rate at which shared weights follow the average of how far learners have moved. 1 moves them as far.
    pub rate: f32,
    /// The Nesterov momentum of shared weights, as PyTorch's SGD has it; 0 for none.
    pub momentum: f32,
    /// What residuals are multiplied by before each exchange. 1 loses nothing.
    pub residual_decay: f32,
}

impl LocalSteps {
    /// Returns an exchange in every so many steps, with rate 1, no momentum and no decay.
    pub fn every(steps: u64) -> Self {
        Self { every: steps, rate: 1.0, momentum: 0.0, residual_decay: 1.0 }
    }

    /// Checks that all of it makes sense.
    pub fn check(&self) -> Result<(), ExchangeError> {
        let Self { every, rate, momentum, residual_decay } = *self;
        let wrong = |what, value: String, expected| Err(ExchangeError::LocalSteps { what, value, expected });
        match () {
            () if every == 0 => wrong("steps from one exchange to the next", every.to_string(), "1 or more"),
            () if !(rate.is_finite() && rate > 0.0) => {
                wrong("an outer rate", rate.to_string(), "a number above 0")
            }
            () if !(0.0..1.0).contains(&momentum) => {
                wrong("an outer momentum", momentum.to_string(), "0 or more, and below 1")
            }
            () if !(0.0..=1.0).contains(&residual_decay) => {
                wrong("a residual decay", residual_decay.to_string(), "a number from 0 to 1")
            }
            () => Ok(()),
        }
    }
}

impl<T: Transport> Exchange<T> {
    /// Checks that local steps make sense, and that all learners take them alike: if not, all get an error that says which learner
    /// differs and in what.
    pub fn agree_on(&mut self, steps: &LocalSteps) -> Result<(), ExchangeError> {
        steps.check()?;
        let LocalSteps { every, rate, momentum, residual_decay } = steps;
        let text = format!(
            "local steps: {every}\nouter rate: {rate}\nouter momentum: {momentum}\nresidual decay: {residual_decay}\n"
        );
        let (step, transport) = (self.step, self.transport());
        let texts = transport.all_gather(vec![text.into_bytes(); transport.hosted().len()]);
        check_agreement(&texts.map_err(|source| ExchangeError::Transport { step, source })?)
    }
}

/// The weights that all learners share since the last exchange, the same to the bit everywhere.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Shared {
    /// The weights, a vector for each layer.
    pub weights: Vec<Vec<f32>>,
    /// Their momentum; empty where there is none.
    pub velocity: Vec<Vec<f32>>,
}

impl Shared {
    /// Begins with these weights, which all learners must have.
    pub fn new(weights: Vec<Vec<f32>>) -> Self {
        Self { weights, velocity: Vec::new() }
    }

    /// Exchanges how far the weights of each learner that is hosted here have moved, changes the shared weights by the average of
    /// that, and gives the shared weights to the learners.
    ///
    /// If one has weights that are not finite, the shared weights stay as they are, and all learners return to them. How far the
    /// others have moved then waits in their residuals; of layers that are sent dense it is gone.
    pub fn exchange<T: Transport>(
        &mut self,
        steps: &LocalSteps,
        exchange: &mut Exchange<T>,
        local: &mut [Vec<Vec<f32>>],
    ) -> Result<Outcome, ExchangeError> {
        exchange.check_all("weights", local, Vec::len)?;
        exchange.check_layers("shared weights", self.weights.iter().map(Vec::len))?;
        if !self.velocity.is_empty() {
            exchange.check_layers("velocity", self.velocity.iter().map(Vec::len))?;
        }
        exchange.decay(steps.residual_decay)?;
        let mut moved = Vec::new();
        for (learner, local) in exchange.transport().hosted().zip(&*local) {
            for (layer, (shared, local)) in self.weights.iter().zip(local).enumerate().rev() {
                moved.clear();
                moved.extend(shared.iter().zip(local).map(|(shared, local)| shared - local));
                exchange.submit(learner, layer, moved.as_slice().into())?;
            }
        }
        let mut average: Vec<Vec<f32>> = self.weights.iter().map(|layer| vec![0.0; layer.len()]).collect();
        let mut output: Vec<&mut [f32]> = average.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome = exchange.finish(&mut output)?;
        if outcome == Outcome::Averaged {
            self.follow(steps, average);
        }
        local.iter_mut().for_each(|local| local.clone_from(&self.weights));
        Ok(outcome)
    }

    fn follow(&mut self, steps: &LocalSteps, mut update: Vec<Vec<f32>>) {
        let (rate, momentum) = (steps.rate, steps.momentum);
        if momentum != 0.0 {
            if self.velocity.is_empty() {
                self.velocity = update.iter().map(|layer| vec![0.0; layer.len()]).collect();
            }
            let velocities = self.velocity.iter_mut().flatten();
            for (update, velocity) in update.iter_mut().flatten().zip(velocities) {
                *velocity = momentum * *velocity + *update;
                *update += momentum * *velocity;
            }
        }
        let weights = self.weights.iter_mut().flatten();
        weights.zip(update.iter().flatten()).for_each(|(weight, update)| *weight -= rate * update);
    }
}
