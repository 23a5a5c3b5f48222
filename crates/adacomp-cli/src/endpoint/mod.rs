//! One thread or process of a run: the learners that it hosts, step by step.

mod evaluate;

use crate::checkpoint::{self, Checkpoint};
use crate::data::{Batch, Data};
use crate::draw::Draw;
use crate::history::{Epoch, History, LayerInfo, Seconds, Total};
use crate::meter::Sums;
use crate::models::{Network, Training};
use crate::optimizer::Optimizer;
use crate::train::{Reporter, Run};
use adacomp::{Layer, Layout, Outcome, Parameter, Sending};
use adacomp_burn::{
    average_statistics, parameters, set_statistics, set_weights, statistics, take_gradients, untrained,
    weights,
};
use adacomp_exchange::{Exchange, Transport};
use anyhow::{Context, Result};
use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The learners hosted by one thread or process: one copy of the weights, and what each learner has of its own.
pub(crate) struct Endpoint<'a, C> {
    run: &'a Run,
    data: &'a Data,
    device: Device,
    exchange: Exchange<C>,
    layout: Arc<Layout>,
    parameters: Vec<Parameter>,
    /// What the model has besides.
    untrained: Vec<Parameter>,
    model: Network,
    state: State,
    /// Whether there is anything that the last checkpoint does not have.
    unsaved: bool,
    /// Of the step that is going on, a slice for each layer.
    averaged: Vec<Vec<f32>>,
}

/// What a checkpoint keeps, besides residuals.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) step: u64,
    pub(crate) weights: Vec<Vec<f32>>,
    pub(crate) optimizer: Optimizer,
    /// For each learner that is hosted here what is not a gradient: running statistics.
    pub(crate) statistics: Vec<Vec<Vec<f32>>>,
    /// For each learner that is hosted here what this epoch cost so far.
    pub(crate) epoch: Vec<Sums>,
    /// What all epochs before this one cost a learner.
    pub(crate) before: Sums,
    pub(crate) seconds: Seconds,
    pub(crate) history: History,
}

/// How a run ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) history: History,
    pub(crate) steps: u64,
    /// Somebody pressed Ctrl-C.
    pub(crate) interrupted: bool,
    pub(crate) checksum: String,
}

impl<'a, C: Transport> Endpoint<'a, C> {
    /// Connects the learners, with the weights of the seed or of a checkpoint.
    pub(crate) fn new(
        run: &'a Run,
        data: &'a Data,
        mut model: Network,
        transport: C,
        from: Option<&Checkpoint>,
    ) -> Result<Self> {
        let config = &run.config;
        let (parameters, untrained) = (parameters(&model), untrained(&model));
        let layout = Arc::new(config.policy().layout(parameters.clone())?);
        let hosted = transport.hosted();
        let mut exchange = Exchange::new(transport, layout.clone(), config.options())?;
        let state = match from {
            Some(checkpoint) => checkpoint.load(config, &parameters, &untrained, &mut exchange)?,
            None => {
                let weights = weights(&model)?;
                State {
                    step: 0,
                    optimizer: Optimizer::new(config, &weights),
                    weights,
                    statistics: vec![statistics(&model)?; hosted.len()],
                    epoch: vec![Sums::new(layout.len()); hosted.len()],
                    before: Sums::new(layout.len()),
                    seconds: Seconds::default(),
                    history: History {
                        layers: layout.layers().iter().map(describe).collect(),
                        epochs: Vec::new(),
                    },
                }
            }
        };
        model = set_weights(model, &state.weights);
        let averaged = state.weights.iter().map(|layer| vec![0.0; layer.len()]).collect();
        let device = run.device.clone();
        let unsaved = from.is_none_or(|from| from.saved.config != *config);
        Ok(Self {
            run,
            unsaved,
            data,
            device,
            exchange,
            layout,
            parameters,
            untrained,
            model,
            state,
            averaged,
        })
    }

    /// Trains to the end, or until somebody interrupts.
    pub(crate) fn train(mut self, mut reporter: Option<&mut (dyn Reporter + Send)>) -> Result<Ended> {
        let (steps, in_epoch) = self.run.config.steps(self.data.train.len())?;
        let mut order = (usize::MAX, Vec::new());
        let mut interrupted = false;
        while self.state.step < steps && !interrupted {
            let draw = Draw { seed: self.run.config.seed, epoch: (self.state.step / in_epoch) as usize };
            if order.0 != draw.epoch {
                order = (draw.epoch, draw.order(self.data.train.len()));
            }
            let start = (self.state.step % in_epoch) as usize * self.run.config.minibatch;
            let minibatch = &order.1[start..start + self.run.config.minibatch];
            let learning_rate = self.learning_rate(steps);
            let losses = self.step(draw, minibatch, learning_rate)?;
            let loss;
            (loss, interrupted) = self.confer(&losses)?;
            if let Some(reporter) = &mut reporter {
                reporter.step(self.state.step, loss, &self.state.epoch[0], &self.layout);
            }
            let epoch_ends = self.state.step.is_multiple_of(in_epoch) || self.state.step == steps;
            if epoch_ends {
                self.end_epoch(draw.epoch, learning_rate)?;
                if let (Some(reporter), Some(epoch)) = (&mut reporter, self.state.history.epochs.last()) {
                    reporter.epoch(epoch);
                }
            }
            if self.state.step < steps && !interrupted && self.run.is_save_due(self.state.step, epoch_ends) {
                self.save()?;
            }
        }
        self.save()?;
        let average = average_statistics(self.exchange.transport(), &self.state.statistics)?;
        Ok(Ended {
            checksum: checkpoint::checksum(&self.state.weights, &average),
            history: self.state.history,
            steps: self.state.step,
            interrupted,
        })
    }

    fn learning_rate(&self, steps: u64) -> f64 {
        self.run.config.learning_rate * self.run.config.schedule.factor(self.state.step, steps)
    }

    /// A step of the learners that are hosted here: their losses.
    fn step(&mut self, draw: Draw, minibatch: &[u32], learning_rate: f64) -> Result<Vec<f64>> {
        let config = &self.run.config;
        let each = config.minibatch / config.learners;
        if self.state.step < config.warm_up {
            self.exchange.set_sending(Sending::Flush);
        }
        let hosted = self.exchange.transport().hosted();
        let statistics_before = self.state.statistics.clone();
        let mut losses = Vec::with_capacity(hosted.len());
        for (position, learner) in hosted.clone().enumerate() {
            let numbers = minibatch[learner * each..][..each].iter().map(|&number| number as usize);
            let start = Instant::now();
            let batch = Batch::of(&*self.data.train, numbers, Some(draw))?;
            let read = Instant::now();
            self.state.seconds.data += (read - start).as_secs_f64();
            let (loss, model, gradients) = self.differentiate(position, &batch, draw)?;
            let gradients = take_gradients(&model, gradients)?;
            self.state.seconds.model += read.elapsed().as_secs_f64();
            for (layer, gradient) in gradients.iter().enumerate().rev() {
                self.exchange.submit(learner, layer, gradient.as_gradient())?;
            }
            losses.push(loss);
        }
        let mut output: Vec<&mut [f32]> = self.averaged.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome = self.exchange.finish(&mut output)?;
        self.state.seconds.add_exchange(self.exchange.seconds());
        let start = Instant::now();
        if outcome == Outcome::Averaged {
            self.state.optimizer.step(learning_rate, &mut self.state.weights, &self.averaged);
            self.model = set_weights(self.model.clone(), &self.state.weights);
        } else {
            // What is not finite must not stay in running statistics.
            self.state.statistics = statistics_before;
        }
        self.state.seconds.optimizer += start.elapsed().as_secs_f64();
        for ((sums, learner), loss) in self.state.epoch.iter_mut().zip(hosted).zip(&losses) {
            sums.steps += 1.0;
            sums.dropped += f64::from(outcome != Outcome::Averaged);
            sums.loss += loss;
            sums.count(&mut self.exchange, learner);
        }
        self.state.step += 1;
        self.unsaved = true;
        Ok(losses)
    }

    /// Forward and backward for one learner: its loss, the model that it was computed with, and the gradients.
    fn differentiate(
        &mut self,
        position: usize,
        batch: &Batch,
        draw: Draw,
    ) -> Result<(f64, Network, GradientsParams)> {
        let statistics_of_learner = &mut self.state.statistics[position];
        let model = match statistics_of_learner.is_empty() {
            true => self.model.clone(),
            false => set_statistics(self.model.clone(), statistics_of_learner),
        };
        let training = Training { draw, samples: &batch.samples };
        let scores = model.forward(batch, &self.device, Some(training));
        let targets = TensorData::new(batch.targets.clone(), [batch.targets.len(), 1]);
        let targets = Tensor::<2, Int>::from_data(targets, &self.device);
        let loss = log_softmax(scores, 1).gather(1, targets).mean().neg();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        if !statistics_of_learner.is_empty() {
            *statistics_of_learner = statistics(&model)?;
        }
        Ok((loss.into_scalar::<f32>().into(), model, gradients))
    }

    /// The mean of all learners' losses, and whether somebody wants to stop: all learners must stop after the same step.
    fn confer(&mut self, losses: &[f64]) -> Result<(f64, bool)> {
        let stop = u8::from(self.run.stop.load(Ordering::Relaxed));
        let message = |loss: &f64| [loss.to_le_bytes().as_slice(), &[stop]].concat();
        let all = self.exchange.transport().all_gather(losses.iter().map(message).collect())?;
        let (mut sum, mut interrupted) = (0.0, false);
        for message in &all {
            let (loss, stop) = message.split_first_chunk().context("a learner's loss is missing")?;
            sum += f64::from_le_bytes(*loss);
            interrupted |= stop == [1];
        }
        Ok((sum / all.len() as f64, interrupted))
    }

    /// Evaluates, and writes down what the epoch cost.
    fn end_epoch(&mut self, epoch: usize, learning_rate: f64) -> Result<()> {
        let start = Instant::now();
        let (test_loss, test_error) = self.evaluate()?;
        self.state.seconds.test += start.elapsed().as_secs_f64();
        let hosted = self.exchange.transport().hosted();
        let sums = Sums::average(&self.state.epoch, self.exchange.transport())?;
        let mut layers = sums.layer_epochs(&self.layout);
        if let (0, Some(compressor)) = (hosted.start, self.exchange.compressor(0)) {
            for (number, layer) in layers.iter_mut().enumerate() {
                layer.residual_norm = compressor.residual_statistics(number).map(|residual| residual.norm);
            }
        }
        self.state.before.add(&sums);
        let earlier = self.state.history.epochs.last().map_or(0.0, |epoch| epoch.total.seconds);
        self.state.history.epochs.push(Epoch {
            epoch: epoch + 1,
            step: self.state.step,
            learning_rate,
            train_loss: sums.loss / sums.steps,
            test_loss,
            test_error,
            dropped_steps: sums.dropped as u64,
            bytes_sent: sums.sent,
            rate: sums.rates(&self.layout),
            total: Total {
                bytes_sent: self.state.before.sent,
                rate: self.state.before.rates(&self.layout),
                paper_rate: self.state.before.paper_rates(&self.layout),
                floor_rate: self.state.before.floor_rates(&self.layout),
                seconds: earlier + self.state.seconds.all(),
            },
            seconds: std::mem::take(&mut self.state.seconds),
            layers,
        });
        self.state.epoch = vec![Sums::new(self.layout.len()); hosted.len()];
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        if self.unsaved {
            let tensors = [&self.parameters[..], &self.untrained];
            checkpoint::save(&self.run.folder, &self.run.config, tensors, &self.state, &mut self.exchange)?;
            self.unsaved = false;
        }
        Ok(())
    }
}

fn describe(layer: &Layer) -> LayerInfo {
    LayerInfo {
        name: layer.name().to_owned(),
        kind: layer.parameter.kind.to_string(),
        elements: layer.elements(),
        treatment: format!("{:#}", layer.treatment),
    }
}
