//! Learners that train one model together.

use crate::error::Error;
use crate::parameters::{parameters, set_statistics, statistics, take_gradients, to_gradients, weights};
use adacomp::{Outcome, Policy};
use adacomp_exchange::{Exchange, Options, Transport};
use burn::module::Module;
use burn::optim::GradientsParams;
use std::hash::{DefaultHasher, Hasher};

/// The learners that are hosted here, connected to all others by their transport.
pub struct Learners<T> {
    exchange: Exchange<T>,
    outcome: Outcome,
}

impl<T: Transport> Learners<T> {
    /// Connects the learners to train this model. All must have the same model with the same weights: if not, all get an error.
    pub fn new<M: Module>(
        transport: T,
        model: &M,
        policy: &Policy,
        options: impl Into<Options>,
    ) -> Result<Self, Error> {
        let parameters = parameters(model);
        if parameters.is_empty() {
            return Err(Error::NothingTrained);
        }
        let mut exchange = Exchange::new(transport, policy.layout(parameters)?, options)?;
        check_weights(exchange.transport(), &weights(model)?)?;
        Ok(Self { exchange, outcome: Outcome::Averaged })
    }

    /// Exchanges the gradients of the one learner that is hosted here, and returns the average over all learners.
    ///
    /// If some learner's gradient is not finite, all learners get no gradients at all: an optimiser then changes nothing,
    /// and [`Learners::outcome`] says whose gradient it was.
    pub fn average<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, Error> {
        self.average_hosted(model, vec![gradients])
    }

    /// Does the same where several learners are hosted: takes the gradients of each, in their order.
    pub fn average_hosted<M: Module>(
        &mut self,
        model: &M,
        gradients: Vec<GradientsParams>,
    ) -> Result<GradientsParams, Error> {
        let hosted = self.exchange.transport().hosted();
        if gradients.len() != hosted.len() {
            return Err(Error::Hosted { hosted: hosted.len(), given: gradients.len() });
        }
        let elements: Vec<usize> =
            self.exchange.layout().layers().iter().map(|layer| layer.elements()).collect();
        let values = gradients.into_iter().map(|gradients| {
            let values = take_gradients(model, gradients)?;
            self.check_parameters(values.len())?;
            Ok(values)
        });
        let values = values.collect::<Result<Vec<_>, Error>>()?;
        let gradients: Vec<Vec<_>> =
            values.iter().map(|values| values.iter().map(|values| values.as_gradient()).collect()).collect();
        let mut averaged: Vec<Vec<f32>> = elements.iter().map(|&elements| vec![0.0; elements]).collect();
        let mut output: Vec<&mut [f32]> = averaged.iter_mut().map(Vec::as_mut_slice).collect();
        self.outcome = self.exchange.exchange(&gradients, &mut output)?;
        Ok(match self.outcome {
            Outcome::Averaged => to_gradients(model, averaged),
            Outcome::NonFinite { .. } => GradientsParams::new(),
        })
    }

    /// Checks that a model has as many parameters as the one that the learners were connected with.
    pub(crate) fn check_parameters(&self, actual: usize) -> Result<(), Error> {
        let expected = self.exchange.layout().len();
        if expected == actual { Ok(()) } else { Err(Error::Parameters { expected, actual }) }
    }

    /// Returns how the last step ended.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Returns the model with the average over learners of its [`statistics`], such as the running statistics of a batch norm:
    /// call it before evaluating or saving the model. Each learner goes on training with its own.
    pub fn average_statistics<M: Module>(&mut self, model: &M) -> Result<M, Error> {
        let own = vec![statistics(model)?; self.exchange.transport().hosted().len()];
        let average = average_statistics(self.exchange.transport(), &own)?;
        Ok(set_statistics(model.clone(), &average))
    }

    /// Returns the exchange, for its traffic, times and residuals.
    pub fn exchange(&mut self) -> &mut Exchange<T> {
        &mut self.exchange
    }
}

/// Checks that all learners begin with the same bits.
pub(crate) fn check_weights<T: Transport>(transport: &mut T, weights: &[Vec<f32>]) -> Result<(), Error> {
    // The same in all processes of one program.
    let mut hash = DefaultHasher::new();
    weights.iter().flatten().for_each(|weight| hash.write_u32(weight.to_bits()));
    let own = hash.finish().to_le_bytes().to_vec();
    let all = transport.all_gather(vec![own; transport.hosted().len()])?;
    match all.iter().position(|other| other != &all[0]) {
        None => Ok(()),
        Some(learner) => Err(Error::Weights { learner }),
    }
}

/// Returns the average over all learners of their [`statistics`]; `own` are those of the learners that are hosted here.
///
/// Sums are in f64 and in learner order, so all learners get the same bits, and values that all have in common stay as
/// they are.
pub fn average_statistics<T: Transport>(
    transport: &mut T,
    own: &[Vec<Vec<f32>>],
) -> Result<Vec<Vec<f32>>, Error> {
    let Some(lengths) = own.first().map(|own| own.iter().map(Vec::len).collect::<Vec<_>>()) else {
        return Ok(Vec::new());
    };
    let expected = 4 * lengths.iter().sum::<usize>();
    if expected == 0 {
        return Ok(own[0].clone());
    }
    let bytes =
        |tensors: &Vec<Vec<f32>>| tensors.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    let all = transport.all_gather(own.iter().map(bytes).collect())?;
    let mut sums = vec![0.0f64; expected / 4];
    for (learner, bytes) in all.iter().enumerate() {
        if bytes.len() != expected {
            return Err(Error::Statistics { learner, expected, actual: bytes.len() });
        }
        for (sum, value) in sums.iter_mut().zip(bytes.as_chunks().0) {
            *sum += f64::from(f32::from_le_bytes(*value));
        }
    }
    let mut averages = sums.into_iter().map(|sum| (sum / all.len() as f64) as f32);
    Ok(lengths.into_iter().map(|length| averages.by_ref().take(length).collect()).collect())
}
