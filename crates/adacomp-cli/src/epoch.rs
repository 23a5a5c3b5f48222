//! The end of an epoch: tests the model, and writes down what the epoch has cost.

use crate::data::Batch;
use crate::history::{Epoch, Seconds, Sums, Total};
use crate::trainer::Trainer;
use adacomp_burn::set_statistics;
use adacomp_exchange::Transport;
use anyhow::{Context, Result};
use burn::module::Module;
use std::time::Instant;

/// Test samples that go through a model at once.
const TEST_BATCH: usize = 100;

impl<T: Transport> Trainer<'_, T> {
    /// Ends an epoch; also one that is not `complete`, at the end of a run. A longer run goes on with it.
    pub(crate) fn end_epoch(&mut self, epoch: usize, complete: bool, learning_rate: f64) -> Result<()> {
        let start = Instant::now();
        let (test_loss, test_error) = self.evaluate()?;
        self.state.seconds.test += start.elapsed().as_secs_f64();
        let hosted = self.exchange.transport().hosted();
        let sums = Sums::mean(&Sums::gather(&self.state.epoch, self.exchange.transport())?);
        let mut layers = sums.layer_epochs(&self.layout);
        if let (0, Some(compressor)) = (hosted.start, self.exchange.compressor(0)) {
            for (number, layer) in layers.iter_mut().enumerate() {
                layer.residual_norm = compressor.residual_statistics(number).map(|residual| residual.norm);
            }
        }
        let (layout, state) = (&self.layout, &mut self.state);
        let mut total = state.before.clone();
        total.add(&sums);
        let (seconds, epochs) = (state.seconds, &mut state.history.epochs);
        // What a shorter run has shown of this epoch is part of it.
        epochs.pop_if(|last| state.step.saturating_sub(sums.steps as u64) < last.step);
        let earlier = epochs.last().map_or(0.0, |epoch| epoch.total.seconds);
        epochs.push(Epoch {
            epoch: epoch + 1,
            step: state.step,
            learning_rate,
            train_loss: sums.mean_loss(),
            test_loss,
            test_error,
            dropped_steps: sums.dropped as u64,
            bytes_sent: sums.sent,
            compression_ratio: sums.compression_ratio(layout),
            frame_ratio: sums.frame_ratios(layout),
            total: Total {
                bytes_sent: total.sent,
                compression_ratio: total.compression_ratio(layout),
                frame_ratio: total.frame_ratios(layout),
                paper_frame_ratio: total.paper_frame_ratios(layout),
                entropy_frame_ratio: total.entropy_frame_ratios(layout),
                seconds: earlier + seconds.training() + seconds.test,
            },
            seconds,
            layers,
        });
        if complete {
            state.before = total;
            state.epoch = vec![Sums::new(layout.len()); hosted.len()];
            state.seconds = Seconds::default();
        }
        Ok(())
    }

    /// Returns mean loss and percentage of errors on the test data, of which each learner takes a part.
    fn evaluate(&mut self) -> Result<(f64, f64)> {
        let average = self.average_statistics()?;
        let model = set_statistics(self.model.clone(), &average).valid();
        let device = self.run.device.clone().inner();
        let samples = self.run.config.test_samples.unwrap_or(usize::MAX).min(self.data.test.len());
        let (hosted, learners) = (self.exchange.transport().hosted(), self.exchange.transport().learners());
        let batches = samples.div_ceil(TEST_BATCH);
        // Consecutive batches to a learner, so that threads have equal parts also where learners are more than batches.
        let learner_of = |batch: usize| batch * learners / batches;
        let mut messages = vec![Vec::new(); hosted.len()];
        for (number, first) in (0..samples).step_by(TEST_BATCH).enumerate() {
            let learner = learner_of(number);
            if hosted.contains(&learner) {
                let batch = Batch::of(&*self.data.test, first..(first + TEST_BATCH).min(samples), None)?;
                let scores = model.forward(&batch, &device, None).into_data();
                let scores = scores.as_slice::<f32>().context("scores are f32")?;
                let (loss, wrong) = judge(scores, &batch.targets);
                let result = [loss, wrong, batch.targets.len() as f64].map(f64::to_le_bytes);
                messages[learner - hosted.start].extend_from_slice(result.as_flattened());
            }
        }
        let all = self.exchange.transport().all_gather(messages)?;
        // In the order of the batches, so that the sum does not depend on who worked on which.
        let mut parts: Vec<_> = all.iter().map(|message| message.as_chunks::<24>().0.iter()).collect();
        let mut sums = [0.0; 3];
        for number in 0..batches {
            let part = parts[learner_of(number)].next().context("a learner's part of the test is missing")?;
            let numbers = part.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        let [loss, wrong, targets] = sums;
        Ok((loss / targets, 100.0 * wrong / targets))
    }
}

/// Returns the sum of losses and the number of errors of rows of scores.
fn judge(scores: &[f32], targets: &[i32]) -> (f64, f64) {
    let (mut loss, mut wrong) = (0.0, 0.0);
    for (row, &target) in scores.chunks_exact(scores.len() / targets.len()).zip(targets) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exponentials: f64 = row.iter().map(|&score| f64::from(score - largest).exp()).sum();
        let of_target = row[target as usize];
        loss += exponentials.ln() - f64::from(of_target - largest);
        // A tie counts as wrong, and so does what is not a number.
        let better =
            row.iter().enumerate().filter(|(class, score)| *class != target as usize && **score >= of_target);
        wrong += f64::from(better.count() > 0 || of_target.is_nan());
    }
    (loss, wrong)
}

#[cfg(test)]
mod tests {
    use super::judge;

    #[test]
    fn scores_are_judged() {
        let scores = [0.0, 0.0, /**/ 2.0, 0.0, /**/ f32::NAN, 0.0];
        let (loss, wrong) = judge(&scores[..4], &[0, 0]);
        assert!((loss - (2f64.ln() + (1.0 + (-2f64).exp()).ln())).abs() < 1e-9);
        assert_eq!(wrong, 1.0);
        assert_eq!(judge(&scores[4..], &[0]).1, 1.0);
    }
}
