//! The cost of a step with each strategy: a small model of the exchange, and its comparison with what was measured.
//!
//! A step takes its time without communication, and on top what the exchange computes, what its bytes take on the link, and the
//! latency of its rounds. Part of the sending hides behind the backward pass.

use super::{Machine, Model, parse_bandwidth};
use adacomp_exchange::Strategy;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Where a model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Setting {
    pub(super) learners: usize,
    /// Bytes a second, each strategy, of a learner's link.
    pub(super) bandwidth: f64,
    /// Seconds that a message of no length takes.
    pub(super) latency: f64,
    /// Seconds of a step without communication.
    pub(super) compute: f64,
    /// Learners that share a processor core.
    pub(super) crowding: f64,
}

/// What to expect of one strategy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Prediction {
    #[serde(with = "crate::config::text")]
    pub(super) strategy: Strategy,
    /// Seconds of a step.
    pub(super) step: f64,
    /// Seconds of it that the learner computes for the exchange.
    pub(super) processor: f64,
    /// Bytes that a learner sends in a step, and as many come.
    pub(super) bytes: f64,
    /// Bytes of memory that a learner needs for it, on top of what training needs.
    pub(super) memory: f64,
    /// The link, in bytes a second, below which it is faster than dense.
    pub(super) break_even: BreakEven,
}

/// Up to which link compression pays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum BreakEven {
    Never,
    Below(f64),
    OnAnyLink,
}

impl Serialize for BreakEven {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Never => serializer.serialize_str("never"),
            Self::Below(bandwidth) => serializer.serialize_f64(*bandwidth),
            Self::OnAnyLink => serializer.serialize_str("any"),
        }
    }
}

/// The share of a step's computing during which messages are sent unnoticed, as it was measured: about half of the backward pass.
const HIDDEN: f64 = 0.3;

/// Bytes that a message takes on top of its contents: its envelope, and the header of its row.
const ENVELOPE: f64 = 15.0;

/// Bytes that a layer takes in a message on top of its elements: a scale, and how many elements there are.
const LAYER: f64 = 5.0;

/// Elements that are exchanged together, PyTorch's 25 MB.
const GROUP: f64 = 6.5e6;

/// Links between which break-even is looked for, in bytes a second.
const LINKS: (f64, f64) = (1e2, 1e13);

/// Predicts all strategies, dense first.
pub(super) fn predict(model: &Model, setting: &Setting, machine: &Machine) -> Vec<Prediction> {
    Strategy::ALL.into_iter().map(|strategy| predict_one(strategy, model, setting, machine)).collect()
}

fn predict_one(strategy: Strategy, model: &Model, setting: &Setting, machine: &Machine) -> Prediction {
    let exchange = Exchange { model, learners: setting.learners as f64, machine };
    Prediction {
        strategy,
        step: exchange.step(strategy, setting),
        processor: (exchange.computing(strategy) + exchange.handling(strategy)) * setting.crowding,
        bytes: exchange.bytes(strategy),
        memory: exchange.memory(strategy),
        break_even: exchange.break_even(strategy, setting),
    }
}

struct Exchange<'a> {
    model: &'a Model,
    learners: f64,
    machine: &'a Machine,
}

impl Exchange<'_> {
    fn step(&self, strategy: Strategy, setting: &Setting) -> f64 {
        if setting.learners == 1 {
            return setting.compute;
        }
        let sending = self.bytes(strategy) / setting.bandwidth - HIDDEN * setting.compute;
        // Bytes are handled while others are on the link.
        let bytes = sending.max(self.handling(strategy) * setting.crowding);
        let calls = self.calls(strategy) * self.machine.transport * setting.crowding;
        let rounds = self.rounds(strategy) * setting.latency + calls;
        setting.compute + self.computing(strategy) * setting.crowding + bytes + rounds
    }

    /// Returns the bytes that a learner sends: those of a ring, or what others need.
    fn bytes(&self, strategy: Strategy) -> f64 {
        let (model, others) = (self.model, self.learners - 1.0);
        let part = others / self.learners;
        match strategy {
            Strategy::Dense => 2.0 * part * 4.0 * model.elements,
            Strategy::Gather => others * (model.selection + model.dense + self.around(1.0)),
            Strategy::Reduce => {
                part * (model.selection + model.sums(self.learners) + 2.0 * model.dense)
                    + others * self.around(3.0)
            }
            Strategy::Sharded => {
                part * ((1.0 + self.down()) * model.selection + 2.0 * model.dense) + others * self.around(2.0)
            }
        }
    }

    /// Returns the bytes around the contents of the messages to one learner in this number of rounds, and of the verdict.
    fn around(&self, rounds: f64) -> f64 {
        let groups = (self.model.elements / GROUP).ceil();
        ENVELOPE + rounds * (groups * ENVELOPE + self.model.layers * LAYER)
    }

    /// Returns what owners send of all shards, as a multiple of what one learner selects: averages of many learners have more elements of
    /// about the same size. As measured, between 1.15 and 1.7 for two learners and 2 for many.
    fn down(&self) -> f64 {
        (1.1 + 0.2 * (self.learners - 1.0)).min(2.0)
    }

    /// Returns the seconds for handling what is sent and received.
    fn handling(&self, strategy: Strategy) -> f64 {
        2.0 * self.bytes(strategy) * self.machine.byte
    }

    /// Returns the seconds of computing.
    fn computing(&self, strategy: Strategy) -> f64 {
        let (model, machine, learners) = (self.model, self.machine, self.learners);
        if learners == 1.0 {
            return 0.0;
        }
        // Into buckets.
        let buckets = model.elements * machine.copy;
        let compress = model.in_large_bins * machine.large_bins + model.in_small_bins * machine.small_bins;
        let write = model.elements * machine.write;
        let code = model.selected * machine.code;
        let exchange = match strategy {
            Strategy::Dense => model.elements * (machine.copy + machine.copy * (learners - 1.0) / learners),
            // Own elements are encoded, everybody's decoded.
            Strategy::Gather => compress + write + code * (1.0 + learners),
            // Encoded for owners, decoded there; sums encoded, and decoded by all.
            Strategy::Reduce => {
                compress + write + code * (2.0 + model.union(learners) * (1.0 + 1.0 / learners))
            }
            // An owner also compresses its shard, and keeps a copy of what it had.
            Strategy::Sharded => {
                (1.0 + 1.0 / learners) * compress
                    + write
                    + model.elements / learners * 2.0 * machine.copy
                    + code * (2.0 + 2.0 * self.down())
            }
        };
        buckets + exchange
    }

    /// Returns the number of latencies one after the other, at the end of a step. What goes to all goes around a ring, as Gloo has it; with thousands of
    /// learners that is what takes longest.
    fn rounds(&self, strategy: Strategy) -> f64 {
        let ring = self.learners - 1.0;
        match strategy {
            Strategy::Dense => 2.0 * ring,
            // Its messages, then everybody's word that all is well.
            Strategy::Gather => 2.0 * ring,
            Strategy::Reduce => 1.0 + 3.0 * ring,
            Strategy::Sharded => 1.0 + 2.0 * ring,
        }
    }

    /// Returns the number of collective calls that are waited for, one after the other, at the end of a step.
    fn calls(&self, strategy: Strategy) -> f64 {
        match strategy {
            Strategy::Dense => 1.0,
            Strategy::Gather => 2.0,
            Strategy::Reduce => 4.0,
            Strategy::Sharded => 3.0,
        }
    }

    /// Returns the bytes that are kept, and those of a step's messages.
    fn memory(&self, strategy: Strategy) -> f64 {
        let (model, learners) = (self.model, self.learners);
        let compressed = model.in_large_bins + model.in_small_bins;
        let residual = 4.0 * compressed;
        let message = model.selection + model.dense;
        // A selected element takes four bytes in memory, and some room to grow.
        let selection = 5.0 * model.selected;
        match strategy {
            Strategy::Dense => 0.0,
            Strategy::Gather => residual + selection + (2.0 * learners + 2.0) * message,
            Strategy::Reduce => {
                residual + selection + 4.0 * message + 16.0 * model.union(learners) * model.selected
            }
            Strategy::Sharded => {
                residual + 2.0 * selection + 4.0 * message + 2.0 * 4.0 * compressed / learners
            }
        }
    }

    fn break_even(&self, strategy: Strategy, setting: &Setting) -> BreakEven {
        let gain = |bandwidth: f64| {
            let setting = Setting { bandwidth, ..*setting };
            self.step(Strategy::Dense, &setting) - self.step(strategy, &setting)
        };
        let (mut slow, mut fast) = LINKS;
        if strategy == Strategy::Dense || gain(slow) <= 0.0 {
            return BreakEven::Never;
        }
        if gain(fast) > 0.0 {
            return BreakEven::OnAnyLink;
        }
        while fast / slow > 1.001 {
            let middle = (slow * fast).sqrt();
            if gain(middle) > 0.0 { slow = middle } else { fast = middle }
        }
        BreakEven::Below(slow)
    }
}

/// A line of the network benchmark.
#[derive(Debug, Clone, Deserialize)]
struct Measured {
    link: String,
    workload: String,
    parameters: f64,
    learners: usize,
    cores: f64,
    method: String,
    step_seconds: f64,
    said_bytes: f64,
}

/// A step time that was predicted, and what it was.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Checked {
    pub(super) workload: String,
    pub(super) learners: usize,
    pub(super) link: String,
    #[serde(with = "crate::config::text")]
    pub(super) strategy: Strategy,
    pub(super) measured: f64,
    pub(super) predicted: f64,
    /// Step time relative to dense, measured and predicted.
    pub(super) measured_ratio: f64,
    pub(super) predicted_ratio: f64,
    /// Whether the link is one of those that predictions must be right for.
    pub(super) slow: bool,
    /// By how much the prediction is too long, as a share of what was measured.
    pub(super) error: f64,
    /// Whether it is on the other side of break-even, by more than one part in ten.
    pub(super) wrong_side: bool,
}

/// See [`Checked::wrong_side`].
fn is_on_the_wrong_side(measured_ratio: f64, predicted_ratio: f64) -> bool {
    let margin = 1.1;
    (measured_ratio > margin && predicted_ratio < 1.0)
        || (measured_ratio < 1.0 / margin && predicted_ratio > 1.0)
}

/// The link that nothing limits, where the bytes of a message are taken from.
const UNSHAPED: &str = "unshaped";
/// Links up to this, in bytes a second, count.
const SLOW: f64 = 125e6;
/// A link between two namespaces of one machine.
const LATENCY: f64 = 50e-6;

/// Predicts what the benchmark has measured. Given are the time of a step without communication in each case, and the bytes of a
/// message of each workload; the rest is predicted.
pub(super) fn check(path: &Path, machine: &Machine) -> Result<Vec<Checked>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    // Others are of memory.
    let lines = text.lines().enumerate().filter(|(_, line)| line.contains("\"step_seconds\""));
    let lines = lines.map(|(number, line)| {
        serde_json::from_str(line)
            .with_context(|| format!("{}, line {}: not of the network benchmark", path.display(), number + 1))
    });
    let lines = lines.collect::<Result<Vec<Measured>>>()?;
    let find = |like: &Measured, link: &str, method: &str| {
        let same = |line: &&Measured| {
            (&line.workload, line.learners, line.link.as_str(), line.method.as_str())
                == (&like.workload, like.learners, link, method)
        };
        lines.iter().find(same)
    };
    let mut checked = Vec::new();
    for dense in lines.iter().filter(|line| line.method == "builtin") {
        let (Some(alone), Some(message)) =
            (find(dense, &dense.link, "none"), find(dense, UNSHAPED, "gather"))
        else {
            continue;
        };
        ensure!(dense.learners > 1, "{}: one learner has nobody to exchange with", path.display());
        let bytes = message.said_bytes / (dense.learners - 1) as f64;
        let model = Model::measured(&dense.workload, dense.parameters, dense.workload == "resnet18", bytes);
        let bandwidth = if dense.link == UNSHAPED { f64::INFINITY } else { parse_bandwidth(&dense.link)? };
        let setting = Setting {
            learners: dense.learners,
            bandwidth,
            latency: LATENCY,
            compute: alone.step_seconds,
            crowding: (dense.learners as f64 / dense.cores).max(1.0),
        };
        let predictions = predict(&model, &setting, machine);
        for Prediction { strategy, step, .. } in &predictions {
            let method =
                if *strategy == Strategy::Dense { "builtin".to_owned() } else { strategy.to_string() };
            let Some(line) = find(dense, &dense.link, &method) else { continue };
            let measured_ratio = line.step_seconds / dense.step_seconds;
            let predicted_ratio = step / predictions[0].step;
            checked.push(Checked {
                workload: dense.workload.clone(),
                learners: dense.learners,
                link: dense.link.clone(),
                strategy: *strategy,
                measured: line.step_seconds,
                predicted: *step,
                measured_ratio,
                predicted_ratio,
                slow: bandwidth <= SLOW,
                error: step / line.step_seconds - 1.0,
                wrong_side: is_on_the_wrong_side(measured_ratio, predicted_ratio),
            });
        }
    }
    ensure!(!checked.is_empty(), "{} has no case with all that is needed", path.display());
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use super::is_on_the_wrong_side;

    #[test]
    fn small_differences_have_no_side() {
        for (measured, predicted, wrong) in
            [(1.05, 0.9, false), (1.2, 0.99, true), (1.2, 1.01, false), (0.95, 1.2, false), (0.8, 1.01, true)]
        {
            assert_eq!(is_on_the_wrong_side(measured, predicted), wrong, "{measured} {predicted}");
        }
    }
}
