//! The optimisers.
//!
//! Burn's optimisers key their state by numbers that are drawn anew in each process, in a format of their own; these keep
//! theirs by parameter name in safetensors, follow PyTorch's conventions, and take one pass over memory.

use crate::checkpoint;
use crate::config::{Config, OptimizerKind};

/// An optimiser and its state: `moments[m][layer][element]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Optimizer {
    kind: OptimizerKind,
    /// Of SGD, or the decay of Adam's first moment.
    momentum: f32,
    weight_decay: f32,
    /// The largest norm of the gradient of all weights.
    clip: Option<f64>,
    /// Steps taken so far.
    pub(crate) steps: u64,
    pub(crate) moments: Vec<Vec<Vec<f32>>>,
}

/// That of Adam's second moment.
const SECOND_DECAY: f32 = 0.999;
const ADAM_EPSILON: f32 = 1e-8;

impl Optimizer {
    pub(crate) fn new(config: &Config, weights: &[Vec<f32>]) -> Self {
        let zeros: Vec<Vec<f32>> = weights.iter().map(|layer| vec![0.0; layer.len()]).collect();
        let moments = match config.optimizer {
            OptimizerKind::Sgd => vec![zeros],
            OptimizerKind::Adam => vec![zeros.clone(), zeros],
        };
        Self {
            kind: config.optimizer,
            momentum: config.momentum as f32,
            weight_decay: config.weight_decay as f32,
            clip: config.clip,
            steps: 0,
            moments,
        }
    }

    /// Takes one step down the gradient, which is scaled down first if its norm is too large.
    pub(crate) fn step(&mut self, learning_rate: f64, weights: &mut [Vec<f32>], gradients: &[&[f32]]) {
        self.steps += 1;
        let factor = self.clip.map_or(1.0, |clip| (clip / norm(gradients)).min(1.0)) as f32;
        match self.kind {
            OptimizerKind::Sgd => self.descend(learning_rate as f32, factor, weights, gradients),
            OptimizerKind::Adam => self.adapt(learning_rate, factor, weights, gradients),
        }
    }

    /// Returns the mean of several learners' optimisers, which have taken as many steps.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mut mean = all[0].clone();
        for (number, moments) in mean.moments.iter_mut().enumerate() {
            let of_all: Vec<_> = all.iter().map(|optimizer| optimizer.moments[number].clone()).collect();
            *moments = checkpoint::mean(&of_all);
        }
        mean
    }

    /// Counts a step whose gradient is of no use, and forgets it.
    pub(crate) fn skip(&mut self) {
        self.steps += 1;
    }

    fn descend(&mut self, learning_rate: f32, factor: f32, weights: &mut [Vec<f32>], gradients: &[&[f32]]) {
        let (momentum, decay) = (self.momentum, self.weight_decay);
        for ((weights, gradients), velocities) in weights.iter_mut().zip(gradients).zip(&mut self.moments[0])
        {
            for ((weight, gradient), velocity) in weights.iter_mut().zip(*gradients).zip(velocities) {
                *velocity = momentum * *velocity + (gradient * factor + decay * *weight);
                *weight -= learning_rate * *velocity;
            }
        }
    }

    fn adapt(&mut self, learning_rate: f64, factor: f32, weights: &mut [Vec<f32>], gradients: &[&[f32]]) {
        let (first_decay, second_decay) = (self.momentum, SECOND_DECAY);
        // Moments start at 0, so early ones are too small by a known factor.
        let correction = |decay: f32| 1.0 - f64::from(decay).powi(self.steps.min(1 << 30) as i32);
        let rate = (learning_rate / correction(first_decay)) as f32;
        let root = correction(second_decay).sqrt() as f32;
        let [first, second] = self.moments.as_mut_slice() else { unreachable!("Adam has two moments") };
        let moments = first.iter_mut().zip(second);
        for ((weights, gradients), (first, second)) in weights.iter_mut().zip(gradients).zip(moments) {
            let moments = first.iter_mut().zip(second);
            for ((weight, gradient), (first, second)) in weights.iter_mut().zip(*gradients).zip(moments) {
                let gradient = gradient * factor + self.weight_decay * *weight;
                *first = first_decay * *first + (1.0 - first_decay) * gradient;
                *second = second_decay * *second + (1.0 - second_decay) * gradient * gradient;
                *weight -= rate * *first / (second.sqrt() / root + ADAM_EPSILON);
            }
        }
    }
}

/// Returns the Euclidean norm of all layers together.
fn norm(gradients: &[&[f32]]) -> f64 {
    let squares = gradients.iter().copied().flatten().map(|&value| f64::from(value) * f64::from(value));
    squares.sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(optimizer: OptimizerKind) -> Config {
        Config { optimizer, ..Config::default() }
    }

    /// The numbers are PyTorch's for the same weights and gradients.
    #[test]
    fn sgd_with_momentum_and_decay_follows_pytorch() {
        let config = Config { weight_decay: 0.1, ..config(OptimizerKind::Sgd) };
        let mut weights = vec![vec![1.0f32, -2.0]];
        let mut optimizer = Optimizer::new(&config, &weights);
        optimizer.step(0.1, &mut weights, &[&[0.5, 1.0]]);
        optimizer.step(0.1, &mut weights, &[&[-0.5, 1.0]]);
        let expected = [0.9266, -2.2312];
        weights[0]
            .iter()
            .zip(expected)
            .for_each(|(actual, expected)| assert!((actual - expected).abs() < 1e-6, "{weights:?}"));
    }

    #[test]
    fn adam_takes_steps_of_its_learning_rate_at_first() {
        let mut weights = vec![vec![1.0f32, -2.0, 3.0]];
        let mut optimizer = Optimizer::new(&config(OptimizerKind::Adam), &weights);
        optimizer.step(0.1, &mut weights, &[&[0.5, -1e-3, 0.0]]);
        let expected = [0.9, -1.9, 3.0];
        weights[0]
            .iter()
            .zip(expected)
            .for_each(|(actual, expected)| assert!((actual - expected).abs() < 2e-6, "{weights:?}"));
    }

    #[test]
    fn adam_without_momentum_follows_the_last_gradient() {
        let mut weights = vec![vec![1.0f32]];
        let config = Config { momentum: 0.0, ..config(OptimizerKind::Adam) };
        let mut optimizer = Optimizer::new(&config, &weights);
        optimizer.step(0.1, &mut weights, &[&[0.5]]);
        optimizer.step(0.1, &mut weights, &[&[-0.5]]);
        assert!((weights[0][0] - 1.0).abs() < 2e-6, "{weights:?}");
    }

    #[test]
    fn a_gradient_is_clipped_by_the_norm_of_all_layers() {
        let config = Config { clip: Some(1.0), momentum: 0.0, ..config(OptimizerKind::Sgd) };
        let mut weights = vec![vec![0.0f32], vec![0.0]];
        Optimizer::new(&config, &weights).step(1.0, &mut weights, &[&[3.0], &[4.0]]);
        assert_eq!(weights, [[-0.6], [-0.8]]);
        let mut weights = vec![vec![0.0f32], vec![0.0]];
        Optimizer::new(&config, &weights).step(1.0, &mut weights, &[&[0.3], &[0.4]]);
        assert_eq!(weights, [[-0.3], [-0.4]]);
    }
}
