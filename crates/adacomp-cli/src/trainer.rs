//! The training loop of one thread or process, for the learners that it hosts.

use crate::End;
use crate::checkpoint::{self, Checkpoint, State};
use crate::config::Config;
use crate::data::{Batch, Data};
use crate::draw::Draw;
use crate::history::{History, LayerInfo, Seconds, Sums};
use crate::models::{Network, Training};
use crate::optimizer::Optimizer;
use crate::show::Progress;
use adacomp::{Layout, Outcome, Parameter, Sending};
use adacomp_burn::{
    Values, average_statistics, parameters, set_statistics, set_weights, statistics, take_gradients,
    untrained, weights,
};
use adacomp_exchange::{Exchange, Shared, Strategy, StrategyChoice, Transport};
use anyhow::{Context, Result};
use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A configuration, and what else a run needs; results do not depend on the rest.
pub(crate) struct Run {
    pub(crate) config: Config,
    /// The folder for checkpoints.
    pub(crate) folder: PathBuf,
    /// Steps after which to save, besides every epoch.
    pub(crate) save_every: Option<u64>,
    pub(crate) device: Device,
    /// Set by Ctrl-C.
    pub(crate) stop: Arc<AtomicBool>,
}

/// A run ends after this number of dropped steps in a row, and of exchanges with local steps: nothing can change any more.
const MOST_DROPPED: u64 = 100;
const MOST_DROPPED_EXCHANGES: u64 = 10;
/// From this number of dropped steps in a row on, or of exchanges, a run does not replace a checkpoint that was saved before.
const DOUBTFUL: u64 = 10;
const DOUBTFUL_EXCHANGES: u64 = 2;

fn doubtful(config: &Config) -> u64 {
    DOUBTFUL.max(DOUBTFUL_EXCHANGES.saturating_mul(config.local_steps))
}

/// One copy of the shared weights, and what each learner that is hosted here has of its own.
pub(crate) struct Trainer<'a, T> {
    pub(crate) run: &'a Run,
    pub(crate) data: &'a Data,
    pub(crate) exchange: Exchange<T>,
    pub(crate) layout: Arc<Layout>,
    parameters: Vec<Parameter>,
    /// Float tensors of the model that are not trained.
    untrained: Vec<Parameter>,
    pub(crate) model: Network,
    pub(crate) state: State,
    /// Whether something has changed since the last checkpoint.
    unsaved: bool,
    /// Whether the last checkpoint is of a run that was all right.
    saved_sound: bool,
    /// The averaged gradient of this step, one slice for each layer.
    averaged: Vec<Vec<f32>>,
}

/// How a run ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) history: History,
    pub(crate) strategy: Strategy,
    pub(crate) steps: u64,
    /// Steps that were dropped, since the start of the run.
    dropped: u64,
    /// Those of them at its end.
    dropped_in_a_row: u64,
    /// Whether somebody pressed Ctrl-C.
    pub(crate) interrupted: bool,
    /// Whether it was given up because too many steps were dropped in a row.
    pub(crate) diverged: bool,
    /// Whether the last checkpoint holds this end. Otherwise there is one of an earlier step that was still all right, or none.
    pub(crate) saved: bool,
    pub(crate) checksum: String,
}

impl Ended {
    pub(crate) fn end(&self) -> End {
        match self.interrupted {
            _ if self.diverged || !self.saved => End::Diverged,
            true => End::Interrupted,
            false => End::Done,
        }
    }

    /// Says in one line what went wrong, if something did. `folder` is the run's.
    pub(crate) fn trouble(&self, folder: &Path) -> Option<String> {
        let mut text = match self.dropped {
            _ if self.diverged => format!(
                "given up at step {}: the last {} steps were dropped, because gradients were not finite",
                self.steps, self.dropped_in_a_row
            ),
            0 if self.saved => return None,
            0 => format!("weights or the optimiser's moments are not finite after {} steps", self.steps),
            dropped => format!("{dropped} of {} steps were dropped: a gradient was not finite", self.steps),
        };
        if !self.saved {
            text += &match checkpoint::is_in(folder) {
                true => format!("; {} keeps the checkpoint from before", folder.display()),
                false => "; nothing is saved".to_owned(),
            };
        }
        Some(text + "; a lower --learning-rate may help")
    }
}

impl<'a, T: Transport> Trainer<'a, T> {
    /// Connects the learners, with the weights of the seed or of a checkpoint.
    pub(crate) fn new(
        run: &'a Run,
        data: &'a Data,
        model: Network,
        transport: T,
        from: Option<&Checkpoint>,
    ) -> Result<Self> {
        let config = &run.config;
        let (parameters, untrained) = (parameters(&model), untrained(&model));
        let layout = Arc::new(config.policy().layout(parameters.clone())?);
        let hosted = transport.hosted().len();
        let chosen = from.map_or(StrategyChoice::Auto, |from| from.chosen(config));
        let mut exchange = Exchange::new(transport, layout.clone(), config.options(&layout, chosen))?;
        exchange.agree_on(&config.exchanges())?;
        let mut state = match from {
            Some(checkpoint) => checkpoint.load(config, &parameters, &untrained, &mut exchange)?,
            None => {
                let weights = weights(&model)?;
                let statistics = statistics(&model)?;
                // With local steps each learner has weights and an optimiser of its own.
                let (local, optimizers) = if config.is_local() { (hosted, hosted) } else { (0, 1) };
                State {
                    step: 0,
                    unexchanged: 0,
                    dropped_in_a_row: 0,
                    optimizers: vec![Optimizer::new(config, &weights); optimizers],
                    local: vec![weights.clone(); local],
                    statistics: vec![statistics.clone(); hosted],
                    shared: Shared::new(weights),
                    shared_statistics: statistics,
                    epoch: vec![Sums::new(layout.len()); hosted],
                    before: Sums::new(layout.len()),
                    seconds: Seconds::default(),
                    history: History::default(),
                }
            }
        };
        state.history.layers = layout.layers().iter().map(LayerInfo::from).collect();
        Ok(Self {
            run,
            data,
            exchange,
            layout,
            parameters,
            untrained,
            model: set_weights(model, &state.shared.weights),
            averaged: state.shared.weights.iter().map(|layer| vec![0.0; layer.len()]).collect(),
            state,
            saved_sound: from.is_some_and(|from| from.saved.dropped_in_a_row < doubtful(config)),
            unsaved: from.is_none_or(|from| from.saved.config != *config),
        })
    }

    /// Trains to the end, or until somebody interrupts.
    pub(crate) fn train(mut self, mut progress: Option<&mut Progress>) -> Result<Ended> {
        let config = &self.run.config;
        let (steps, in_epoch) = config.steps(self.data.train.len())?;
        let mut order = (usize::MAX, Vec::new());
        let (mut interrupted, mut diverged) = (false, false);
        let most_dropped = MOST_DROPPED.max(MOST_DROPPED_EXCHANGES.saturating_mul(config.local_steps));
        let first = self.state.step;
        while self.state.step < steps && !interrupted && !diverged {
            let draw = Draw { seed: config.seed, epoch: (self.state.step / in_epoch) as usize };
            if order.0 != draw.epoch {
                order = (draw.epoch, draw.order(self.data.train.len()));
            }
            let start = (self.state.step % in_epoch) as usize * config.minibatch;
            let minibatch = &order.1[start..start + config.minibatch];
            let learning_rate = config.learning_rate * config.schedule.factor(self.state.step, steps);
            let losses = self.step(draw, minibatch, learning_rate, self.state.step + 1 == steps)?;
            // Between exchanges no learner waits for another.
            let mut loss = losses.iter().sum::<f64>() / losses.len() as f64;
            if self.state.unexchanged == 0 {
                (loss, interrupted) = self.agree(&losses)?;
            }
            let step = self.state.step;
            // A run that is resumed, with other settings perhaps, gets all of these once more.
            diverged = self.state.dropped_in_a_row.min(step - first) >= most_dropped;
            if let Some(progress) = &mut progress {
                progress.step(step, loss, &self.state.epoch[0], &self.layout);
            }
            let is_complete = step.is_multiple_of(in_epoch);
            let epoch_ends = is_complete || step == steps;
            if epoch_ends {
                self.end_epoch(draw.epoch, is_complete, learning_rate)?;
                if let (Some(progress), Some(epoch)) = (&mut progress, self.state.history.epochs.last()) {
                    progress.epoch(epoch);
                }
            }
            let save_is_due = self.run.save_every.is_some_and(|every| step.is_multiple_of(every));
            if (epoch_ends || save_is_due) && step < steps && !interrupted {
                self.save()?;
            }
        }
        self.save()?;
        let average = self.average_statistics()?;
        Ok(Ended {
            checksum: checkpoint::checksum(&self.state.shared.weights, &average),
            dropped: (self.state.before.dropped + self.state.epoch[0].dropped) as u64,
            dropped_in_a_row: self.state.dropped_in_a_row,
            history: self.state.history,
            strategy: self.exchange.options().strategy,
            steps: self.state.step,
            interrupted,
            diverged,
            saved: !self.unsaved,
        })
    }

    /// Takes a step of the learners that are hosted here, and returns their losses. With local steps, weights are exchanged if it is
    /// time or the step is the last one.
    fn step(&mut self, draw: Draw, minibatch: &[u32], learning_rate: f64, is_last: bool) -> Result<Vec<f64>> {
        let config = &self.run.config;
        let (each, exchanges, is_local) =
            (config.minibatch / config.learners, config.exchanges(), config.is_local());
        if self.state.step <= config.bins_stay_from() {
            let layout = config.policy_at(self.state.step).layout(self.parameters.clone())?;
            if layout.fingerprint() != self.exchange.layout().fingerprint() {
                self.exchange.set_layout(layout)?;
            }
        }
        self.state.unexchanged += 1;
        let is_due = is_last || self.state.unexchanged >= exchanges.every;
        if is_due && self.state.step < config.warm_up {
            self.exchange.set_sending(Sending::Flush);
        }
        if !is_local {
            self.exchange.decay(exchanges.residual_decay)?;
        }
        let hosted = self.exchange.transport().hosted();
        let statistics_before = if is_local { Vec::new() } else { self.state.statistics.clone() };
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
            if is_local {
                self.step_locally(position, learning_rate, &gradients);
            } else {
                for (layer, gradient) in gradients.iter().enumerate().rev() {
                    self.exchange.submit(learner, layer, gradient.as_gradient())?;
                }
            }
            losses.push(loss);
        }
        let outcome = match () {
            () if !is_local => Some(self.descend(learning_rate, statistics_before)?),
            () if is_due => {
                let State { shared, shared_statistics, local, statistics, .. } = &mut self.state;
                let outcome = shared.exchange(&exchanges, &mut self.exchange, local)?;
                if outcome == Outcome::Averaged {
                    *shared_statistics = average_statistics(self.exchange.transport(), statistics)?;
                }
                statistics.iter_mut().for_each(|statistics| statistics.clone_from(shared_statistics));
                self.state.seconds.add_exchange(self.exchange.seconds());
                self.model = set_weights(self.model.clone(), &self.state.shared.weights);
                Some(outcome)
            }
            () => None,
        };
        for ((sums, learner), loss) in self.state.epoch.iter_mut().zip(hosted).zip(&losses) {
            sums.count_step(*loss);
            match outcome {
                None => {}
                // A dropped step sends next to nothing, which is no compression.
                Some(Outcome::NonFinite { .. }) => sums.dropped += self.state.unexchanged as f64,
                Some(Outcome::Averaged) => {
                    sums.count(&mut self.exchange, learner, self.state.unexchanged);
                    if is_local {
                        let others = self.exchange.transport().learners() - 1;
                        let statistics = self.state.shared_statistics.iter().map(Vec::len).sum::<usize>();
                        sums.sent += (4 * statistics * others) as f64;
                    }
                }
            }
        }
        if let Some(outcome) = outcome {
            let dropped = outcome != Outcome::Averaged;
            let steps = std::mem::take(&mut self.state.unexchanged);
            self.state.dropped_in_a_row = if dropped { self.state.dropped_in_a_row + steps } else { 0 };
        }
        self.state.step += 1;
        self.unsaved = true;
        Ok(losses)
    }

    /// Takes a local step of a learner. A gradient that is not finite makes its weights useless until the next exchange, which drops
    /// what all have done since the last one; its optimiser forgets that gradient.
    fn step_locally(&mut self, position: usize, learning_rate: f64, gradients: &[Values]) {
        let start = Instant::now();
        let gradients: Vec<&[f32]> = gradients.iter().map(Values::as_f32).collect();
        let State { local, optimizers, seconds, .. } = &mut self.state;
        let (weights, optimizer) = (&mut local[position], &mut optimizers[position]);
        if gradients.iter().copied().flatten().all(|value| value.is_finite()) {
            optimizer.step(learning_rate, weights, &gradients);
        } else {
            optimizer.skip();
            weights.iter_mut().flatten().for_each(|weight| *weight = f32::NAN);
        }
        seconds.optimizer += start.elapsed().as_secs_f64();
    }

    /// Ends a step in which gradients travel: averages them, and changes the shared weights by them.
    fn descend(&mut self, learning_rate: f64, statistics_before: Vec<Vec<Vec<f32>>>) -> Result<Outcome> {
        let mut output: Vec<&mut [f32]> = self.averaged.iter_mut().map(Vec::as_mut_slice).collect();
        let outcome = self.exchange.finish(&mut output)?;
        self.state.seconds.add_exchange(self.exchange.seconds());
        let start = Instant::now();
        if outcome == Outcome::Averaged {
            let gradients: Vec<&[f32]> = self.averaged.iter().map(Vec::as_slice).collect();
            let State { shared, optimizers, .. } = &mut self.state;
            optimizers[0].step(learning_rate, &mut shared.weights, &gradients);
            self.model = set_weights(self.model.clone(), &shared.weights);
        } else {
            // What is not finite must not stay in running statistics.
            self.state.statistics = statistics_before;
        }
        self.state.seconds.optimizer += start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// Runs forward and backward for one learner. Returns its loss, the model that it was computed with, and the gradients.
    fn differentiate(
        &mut self,
        position: usize,
        batch: &Batch,
        draw: Draw,
    ) -> Result<(f64, Network, GradientsParams)> {
        let device = &self.run.device;
        let model = match self.state.local.get(position) {
            None => self.model.clone(),
            Some(weights) => set_weights(self.model.clone(), weights),
        };
        let statistics_of_learner = &mut self.state.statistics[position];
        let model = match statistics_of_learner.is_empty() {
            true => model,
            false => set_statistics(model, statistics_of_learner),
        };
        let training = Training { draw, samples: &batch.samples };
        let scores = model.forward(batch, device, Some(training));
        let targets = TensorData::new(batch.targets.clone(), [batch.targets.len(), 1]);
        let targets = Tensor::<2, Int>::from_data(targets, device);
        let loss = log_softmax(scores, 1).gather(1, targets).mean().neg();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        if !statistics_of_learner.is_empty() {
            *statistics_of_learner = statistics(&model)?;
        }
        Ok((loss.into_scalar::<f32>().into(), model, gradients))
    }

    /// Returns the mean of all learners' losses, and whether one of them was interrupted: all must stop after the same step.
    fn agree(&mut self, losses: &[f64]) -> Result<(f64, bool)> {
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

    /// Returns the running statistics that belong to the shared weights: the average over learners or, with local steps, what that was
    /// at the last exchange.
    pub(crate) fn average_statistics(&mut self) -> Result<Vec<Vec<f32>>> {
        match self.run.config.is_local() {
            true => Ok(self.state.shared_statistics.clone()),
            false => Ok(average_statistics(self.exchange.transport(), &self.state.statistics)?),
        }
    }

    /// Saves what has changed, unless it is not finite, or would replace a checkpoint of a run that was all right by one that is not.
    fn save(&mut self) -> Result<()> {
        if !self.unsaved {
            return Ok(());
        }
        let sound = self.state.dropped_in_a_row < doubtful(&self.run.config);
        // A learner that has no use for its local weights is waited for: its next exchange brings it back.
        if (sound || !self.saved_sound) && self.is_finite()? {
            self.saved_sound = sound;
            let average = self.average_statistics()?;
            let tensors = [&self.parameters[..], &self.untrained];
            let folder = &self.run.folder;
            checkpoint::save(folder, &self.run.config, tensors, &self.state, &average, &mut self.exchange)?;
            self.unsaved = false;
        }
        Ok(())
    }

    /// Returns whether all that learners have is finite: weights, moments and statistics.
    fn is_finite(&mut self) -> Result<bool> {
        let State { shared, local, optimizers, statistics, .. } = &self.state;
        let shared = [&shared.weights, &shared.velocity];
        let moments = optimizers.iter().flat_map(|optimizer| &optimizer.moments);
        let mut values = shared.into_iter().chain(local).chain(statistics).chain(moments).flatten().flatten();
        let finite = values.all(|value| value.is_finite());
        let transport = self.exchange.transport();
        let all = transport.all_gather(vec![vec![u8::from(finite)]; transport.hosted().len()])?;
        Ok(all.iter().all(|finite| **finite == [1]))
    }
}
