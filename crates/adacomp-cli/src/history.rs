//! What a run has shown so far: what tables, JSON lines, reports and checkpoints are made of.

use serde::{Deserialize, Deserializer, Serialize};

/// A run of one scheme, from its start.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct History {
    /// The layers, in the model's order.
    pub(crate) layers: Vec<LayerInfo>,
    /// What each epoch ended with. The last may be part of an epoch.
    pub(crate) epochs: Vec<Epoch>,
}

/// One layer of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LayerInfo {
    /// Its path in the model.
    pub(crate) name: String,
    /// `conv`, `matrix` or `vector`.
    pub(crate) kind: String,
    /// Its number of weights.
    pub(crate) elements: usize,
    /// How its gradient travels: `bins of 50`, `dense`, ...
    pub(crate) treatment: String,
}

/// What is known at the end of an epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    /// Counted from 1.
    pub(crate) epoch: usize,
    /// Steps since the start of the run.
    pub(crate) step: u64,
    /// The learning rate of the last step.
    pub(crate) learning_rate: f64,
    /// The mean over the steps of this epoch.
    #[serde(deserialize_with = "number")]
    pub(crate) train_loss: f64,
    /// The mean over the test data, in nats.
    #[serde(deserialize_with = "number")]
    pub(crate) test_loss: f64,
    /// The share of the test data that is classified wrongly, in percent.
    pub(crate) test_error: f64,
    /// Steps that were dropped in this epoch because a gradient was not finite.
    pub(crate) dropped_steps: u64,
    /// Bytes that a learner has sent in this epoch, on average over learners.
    pub(crate) bytes_sent: f64,
    /// How many times fewer bytes than the same exchange without compression, in this epoch.
    pub(crate) rate: Rates,
    /// The same since the start of the run.
    pub(crate) total: Total,
    /// Where the time went in this epoch.
    pub(crate) seconds: Seconds,
    /// What each layer did, in the model's order.
    pub(crate) layers: Vec<LayerEpoch>,
}

/// Rates; none where nothing travels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rates {
    /// Of all bytes, headers and exempt tensors included.
    pub(crate) overall: Option<f64>,
    /// Of convolution kernels.
    pub(crate) conv: Option<f64>,
    /// Of fully-connected, recurrent, embedding and attention matrices.
    pub(crate) matrix: Option<f64>,
}

/// Sums since the start of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Total {
    /// Bytes that a learner has sent, on average over learners.
    pub(crate) bytes_sent: f64,
    /// How many times fewer that are.
    pub(crate) rate: Rates,
    /// The same if frames were in the paper's code; with `gather` only.
    #[serde(default)]
    pub(crate) paper_rate: Rates,
    /// The same by the entropy of what was selected, if places do not depend on each other.
    #[serde(default)]
    pub(crate) floor_rate: Rates,
    /// Time of training and evaluation.
    pub(crate) seconds: f64,
}

/// Where the time of one thread or process went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Seconds {
    /// Putting minibatches together.
    pub(crate) data: f64,
    /// Forward and backward passes.
    pub(crate) model: f64,
    /// Compressing gradients.
    pub(crate) compress: f64,
    /// Writing messages.
    pub(crate) encode: f64,
    /// Waiting for the others.
    pub(crate) wait: f64,
    /// Reading messages and writing the averaged gradient.
    pub(crate) decode: f64,
    /// Changing the weights.
    pub(crate) optimizer: f64,
    /// Evaluating on the test data.
    pub(crate) test: f64,
}

/// One layer in one epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LayerEpoch {
    /// How many times fewer bytes.
    pub(crate) rate: Option<f64>,
    /// The norm of learner 0's residual at the end of the epoch; none for a layer that has no residual.
    pub(crate) residual_norm: Option<f64>,
}

/// JSON has no word for what is not a number: a loss that is none is written as `null`, and read as one again.
pub(crate) fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
