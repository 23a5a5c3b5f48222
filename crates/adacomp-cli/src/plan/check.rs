//! Compares the cost model with what was measured.

use super::cost::{Prediction, Setting, predict};
use super::{Machine, Model, parse_bandwidth};
use adacomp_exchange::Strategy;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::Path;

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
