//! What a step will take, before anything is bought or rented: a small cost model of the exchange.
//!
//! A step is what it takes without communication, and on top what the exchange computes, what its bytes take on the link, and the
//! latency of its rounds. Part of the sending hides behind the backward pass.

pub(crate) mod check;
pub(crate) mod machine;
pub(crate) mod model;
pub(crate) mod units;

pub(crate) use machine::Machine;
pub(crate) use model::Model;

use serde::Serialize;

/// A way to exchange gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    Dense,
    Gather,
    Reduce,
    Sharded,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [Self::Dense, Self::Gather, Self::Reduce, Self::Sharded];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Sharded => "sharded",
        }
    }
}

/// Where a model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Setting {
    pub(crate) learners: usize,
    /// Bytes a second, each way, of a learner's link.
    pub(crate) bandwidth: f64,
    /// Seconds that a message of no length takes.
    pub(crate) latency: f64,
    /// Seconds of a step without communication.
    pub(crate) compute: f64,
    /// Learners that share a processor core.
    pub(crate) crowding: f64,
}

/// What is to be expected of one way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Prediction {
    pub(crate) way: Way,
    /// Seconds of a step.
    pub(crate) step: f64,
    /// Seconds of it that the learner computes for the exchange.
    pub(crate) processor: f64,
    /// Bytes that a learner sends in a step, and as many come.
    pub(crate) bytes: f64,
    /// Bytes that a learner keeps for it, on top of what training takes anyway.
    pub(crate) memory: f64,
    /// The link, in bytes a second, below which it is faster than dense.
    pub(crate) break_even: BreakEven,
}

/// Up to which link something pays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum BreakEven {
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

/// The share of a step's computing during which messages travel unnoticed, as it was measured: about half of the backward pass.
const HIDDEN: f64 = 0.3;

/// Bytes that a message takes on top of its contents: its envelope, and the header of its row.
const ENVELOPE: f64 = 15.0;

/// Bytes that a layer takes in a message on top of its elements: a scale, and how many elements there are.
const LAYER: f64 = 5.0;

/// Elements that are exchanged together, PyTorch's 25 MB.
const GROUP: f64 = 6.5e6;

/// Links between which break-even is looked for, in bytes a second.
const LINKS: (f64, f64) = (1e2, 1e13);

/// All ways, in their order.
pub(crate) fn predict(model: &Model, setting: &Setting, machine: &Machine) -> Vec<Prediction> {
    Way::ALL.into_iter().map(|way| predict_one(way, model, setting, machine)).collect()
}

fn predict_one(way: Way, model: &Model, setting: &Setting, machine: &Machine) -> Prediction {
    let exchange = Exchange { model, learners: setting.learners as f64, machine };
    Prediction {
        way,
        step: exchange.step(way, setting),
        processor: (exchange.computing(way) + exchange.handling(way)) * setting.crowding,
        bytes: exchange.bytes(way),
        memory: exchange.memory(way),
        break_even: exchange.break_even(way, setting),
    }
}

struct Exchange<'a> {
    model: &'a Model,
    learners: f64,
    machine: &'a Machine,
}

impl Exchange<'_> {
    fn step(&self, way: Way, setting: &Setting) -> f64 {
        if setting.learners == 1 {
            return setting.compute;
        }
        let travel = self.bytes(way) / setting.bandwidth - HIDDEN * setting.compute;
        // Bytes are handled while others travel.
        let bytes = travel.max(self.handling(way) * setting.crowding);
        let transports = self.transports(way) * self.machine.transport * setting.crowding;
        let rounds = self.rounds(way) * setting.latency + transports;
        setting.compute + self.computing(way) * setting.crowding + bytes + rounds
    }

    /// Bytes that a learner sends: a ring, or all that others need.
    fn bytes(&self, way: Way) -> f64 {
        let (model, others) = (self.model, self.learners - 1.0);
        let share = others / self.learners;
        match way {
            Way::Dense => 2.0 * share * 4.0 * model.elements,
            Way::Gather => others * (model.selection + model.whole + self.around(1.0)),
            Way::Reduce => {
                share * (model.selection + model.sums(self.learners) + 2.0 * model.whole)
                    + others * self.around(3.0)
            }
            Way::Sharded => {
                share * ((1.0 + self.down()) * model.selection + 2.0 * model.whole)
                    + others * self.around(2.0)
            }
        }
    }

    /// Bytes around the contents of so many messages to one learner, and of the verdict.
    fn around(&self, rounds: f64) -> f64 {
        let groups = (self.model.elements / GROUP).ceil();
        ENVELOPE + rounds * (groups * ENVELOPE + self.model.layers * LAYER)
    }

    /// What owners send of all shares, as a multiple of what one learner selects: averages of many learners have more elements of
    /// about the same size. As measured, between 1.15 and 1.7 for two learners and 2 for many.
    fn down(&self) -> f64 {
        (1.1 + 0.2 * (self.learners - 1.0)).min(2.0)
    }

    /// Seconds for handling what is sent and received.
    fn handling(&self, way: Way) -> f64 {
        2.0 * self.bytes(way) * self.machine.byte
    }

    /// Seconds of computing.
    fn computing(&self, way: Way) -> f64 {
        let (model, machine, learners) = (self.model, self.machine, self.learners);
        if learners == 1.0 {
            return 0.0;
        }
        // Into buckets.
        let buckets = model.elements * machine.copy;
        let compress = model.in_large_bins * machine.large_bins + model.in_small_bins * machine.small_bins;
        let write = model.elements * machine.write;
        let code = model.selected * machine.code;
        let exchange = match way {
            Way::Dense => model.elements * (machine.copy + machine.copy * (learners - 1.0) / learners),
            // Own elements are encoded, everybody's decoded.
            Way::Gather => compress + write + code * (1.0 + learners),
            // Encoded for owners, decoded there; sums encoded, and decoded by all.
            Way::Reduce => compress + write + code * (2.0 + model.union(learners) * (1.0 + 1.0 / learners)),
            // An owner also compresses its share, and keeps a copy of what it had.
            Way::Sharded => {
                (1.0 + 1.0 / learners) * compress
                    + write
                    + model.elements / learners * 2.0 * machine.copy
                    + code * (2.0 + 2.0 * self.down())
            }
        };
        buckets + exchange
    }

    /// Latencies one after the other, at the end of a step. What goes to all goes around a ring, as Gloo has it; with thousands of
    /// learners that is what takes longest.
    fn rounds(&self, way: Way) -> f64 {
        let ring = self.learners - 1.0;
        match way {
            Way::Dense => 2.0 * ring,
            // Its messages, then everybody's word that all is well.
            Way::Gather => 2.0 * ring,
            Way::Reduce => 1.0 + 3.0 * ring,
            Way::Sharded => 1.0 + 2.0 * ring,
        }
    }

    /// Collectives that are waited for, one after the other, at the end of a step.
    fn transports(&self, way: Way) -> f64 {
        match way {
            Way::Dense => 1.0,
            Way::Gather => 2.0,
            Way::Reduce => 4.0,
            Way::Sharded => 3.0,
        }
    }

    /// Bytes that are kept, and those of a step's messages.
    fn memory(&self, way: Way) -> f64 {
        let (model, learners) = (self.model, self.learners);
        let compressed = model.in_large_bins + model.in_small_bins;
        let residual = 4.0 * compressed;
        let message = model.selection + model.whole;
        // A selected element takes four bytes in memory, and some room to grow.
        let selection = 5.0 * model.selected;
        match way {
            Way::Dense => 0.0,
            Way::Gather => residual + selection + (2.0 * learners + 2.0) * message,
            Way::Reduce => {
                residual + selection + 4.0 * message + 16.0 * model.union(learners) * model.selected
            }
            Way::Sharded => residual + 2.0 * selection + 4.0 * message + 2.0 * 4.0 * compressed / learners,
        }
    }

    fn break_even(&self, way: Way, setting: &Setting) -> BreakEven {
        let gain = |bandwidth: f64| {
            let setting = Setting { bandwidth, ..*setting };
            self.step(Way::Dense, &setting) - self.step(way, &setting)
        };
        let (mut slow, mut fast) = LINKS;
        if way == Way::Dense || gain(slow) <= 0.0 {
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
