//! The cost of a step with each strategy: a small model of the exchange.
//!
//! A step takes its time without communication, and on top what the exchange computes, what its bytes take on the link, and the
//! latency of its rounds. Part of the sending hides behind the backward pass. With local steps all of that comes once in so many
//! steps, and nothing hides.

use super::{Machine, Model};
use adacomp_exchange::Strategy;
use adacomp_exchange::internal::owners_select;
use serde::Serialize;

/// Where a model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Setting {
    pub(super) learners: usize,
    /// Bytes a second, each way, of a learner's link.
    pub(super) bandwidth: f64,
    /// Seconds that a message of no length takes.
    pub(super) latency: f64,
    /// Seconds of a step without communication.
    pub(super) compute: f64,
    /// Learners that share a processor core.
    pub(super) crowding: f64,
    /// Steps from one exchange of weights to the next; 0 where gradients travel in every step.
    pub(super) local_steps: u64,
}

/// What to expect of one strategy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Prediction {
    #[serde(with = "crate::config::text")]
    pub(super) strategy: Strategy,
    /// Steps from one exchange of weights to the next; 0 where gradients travel in every step.
    pub(super) local_steps: u64,
    /// Seconds of a step; this and what follows are means over steps.
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

/// Links between which break-even is looked for, in bytes a second.
const LINKS: (f64, f64) = (1e2, 1e13);

/// Predicts all strategies: first dense in every step, then dense with the local steps of the setting, if any, then the others.
pub(super) fn predict(model: &Model, setting: &Setting, machine: &Machine) -> Vec<Prediction> {
    let cost = |strategy, steps| {
        Cost::new(strategy, model, setting.learners, machine).with_local_steps(steps, model, machine)
    };
    let dense = cost(Strategy::Dense, 0);
    let prediction = |(strategy, local_steps)| {
        let cost = cost(strategy, local_steps);
        Prediction {
            strategy,
            local_steps,
            step: cost.step(setting),
            processor: (cost.computing + cost.handling) * setting.crowding / cost.every,
            bytes: cost.bytes / cost.every,
            memory: cost.memory,
            break_even: break_even(&dense, &cost, setting),
        }
    };
    let steps = setting.local_steps;
    let every_step = (steps > 0).then_some((Strategy::Dense, 0)).into_iter();
    every_step.chain(Strategy::ALL.map(|strategy| (strategy, steps))).map(prediction).collect()
}

/// What one exchange costs a learner.
#[derive(Default)]
struct Cost {
    /// Steps from one exchange to the next.
    every: f64,
    /// The share of a step's computing during which messages are sent unnoticed.
    hidden: f64,
    /// Bytes that it sends: those of a ring, or what others need.
    bytes: f64,
    /// Seconds of computing.
    computing: f64,
    /// Seconds for handling what is sent and received.
    handling: f64,
    /// Latencies one after the other, at the end of a step. What goes to all goes around a ring, as Gloo has it; with
    /// thousands of learners that is what takes longest.
    rounds: f64,
    /// Seconds of the collective calls that are waited for, one after the other, at the end of a step.
    calls: f64,
    /// Bytes that are kept, and those of a step's messages.
    memory: f64,
}

impl Cost {
    fn new(strategy: Strategy, model: &Model, learners: usize, machine: &Machine) -> Self {
        let bytes = model.bytes(strategy, learners);
        let learners = learners as f64;
        let others = learners - 1.0;
        let compress = model.in_large_bins * machine.large_bins + model.in_small_bins * machine.small_bins;
        let write = model.elements * machine.write;
        let code = model.selected * machine.code;
        let compressed = model.in_large_bins + model.in_small_bins;
        // A selected element takes four bytes in memory, and some room to grow.
        let (residual, selection) = (4.0 * compressed, 5.0 * model.selected);
        let message = model.selection + model.dense;
        let mut cost = match strategy {
            Strategy::Dense => Self {
                computing: model.elements * machine.copy * (1.0 + others / learners),
                rounds: 2.0 * others,
                calls: 1.0,
                ..Self::default()
            },
            Strategy::Gather => Self {
                // Own elements are encoded, everybody's decoded.
                computing: compress + write + code * (1.0 + learners),
                // Its messages, then everybody's word that all is well.
                rounds: 2.0 * others,
                calls: 2.0,
                memory: residual + selection + (2.0 * learners + 2.0) * message,
                ..Self::default()
            },
            Strategy::Reduce => Self {
                // Encoded for owners, decoded there; sums encoded, and decoded by all.
                computing: compress + write + code * (2.0 + model.union(learners) * (1.0 + 1.0 / learners)),
                rounds: 1.0 + 3.0 * others,
                calls: 4.0,
                memory: residual + selection + 4.0 * message + 16.0 * model.union(learners) * model.selected,
                ..Self::default()
            },
            Strategy::Sharded => Self {
                // An owner also compresses its shard, and remembers what a step changes in it.
                computing: (1.0 + 1.0 / learners) * compress
                    + write
                    + model.elements / learners * 2.0 * machine.copy
                    + code * (2.0 + 2.0 * owners_select(learners as usize)),
                rounds: 1.0 + 2.0 * others,
                calls: 3.0,
                memory: residual + 2.0 * selection + 4.0 * message + 2.0 * residual / learners,
                ..Self::default()
            },
        };
        // Gradients are copied into buckets first.
        cost.computing = if learners == 1.0 { 0.0 } else { cost.computing + model.elements * machine.copy };
        (cost.every, cost.hidden) = (1.0, HIDDEN);
        cost.bytes = bytes;
        cost.handling = 2.0 * bytes * machine.byte;
        cost.calls *= machine.transport;
        cost
    }

    /// Returns the cost of an exchange in every so many steps, of how far weights have moved; 0 leaves it as it is.
    fn with_local_steps(mut self, steps: u64, model: &Model, machine: &Machine) -> Self {
        if steps > 0 {
            (self.every, self.hidden) = (steps as f64, 0.0);
            // Shared weights, and the average of an exchange; to subtract the local ones from them, to change them, and to copy them.
            self.memory += 8.0 * model.elements;
            self.computing += if self.computing == 0.0 { 0.0 } else { 3.0 * model.elements * machine.copy };
        }
        self
    }

    /// Returns the seconds of a step.
    fn step(&self, setting: &Setting) -> f64 {
        if setting.learners == 1 {
            return setting.compute;
        }
        let sending = self.bytes / setting.bandwidth - self.hidden * setting.compute;
        // Bytes are handled while others are on the link.
        let bytes = sending.max(self.handling * setting.crowding);
        let computing = (self.computing + self.calls) * setting.crowding;
        setting.compute + (computing + bytes + self.rounds * setting.latency) / self.every
    }
}

fn break_even(dense: &Cost, cost: &Cost, setting: &Setting) -> BreakEven {
    let gain = |bandwidth: f64| {
        let setting = Setting { bandwidth, ..*setting };
        dense.step(&setting) - cost.step(&setting)
    };
    let (mut slow, mut fast) = LINKS;
    // Dense gains nothing over itself.
    if gain(slow) <= 0.0 {
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
