//! One of the learners that are hosted here, in a step.

use crate::options::Options;
use crate::shares::share;
use crate::strategy::{Fault, Strategy};
use crate::traffic::Traffic;
use adacomp::{Compressor, Layer, Layout, Parameter, Treatment};
use std::sync::Arc;

/// One learner that is hosted here.
pub(crate) struct Member {
    pub(crate) learner: usize,
    /// Its place among those that are hosted here.
    pub(crate) position: usize,
    pub(crate) compressor: Compressor,
    /// What it keeps as an owner: the residuals of its shares of averaged gradients.
    pub(crate) owner: Option<Compressor>,
    /// The same as it was before the step: what came to an owner goes back to its senders if the step is dropped.
    pub(crate) owner_before: Option<Compressor>,
    pub(crate) traffic: Traffic,
    /// What it has refused in this step.
    pub(crate) fault: Option<Fault>,
}

impl Member {
    /// A learner, and its place among those that are hosted here; with an owner's residuals if it needs them.
    pub(crate) fn new(
        layout: &Arc<Layout>,
        learner: usize,
        learners: usize,
        position: usize,
        options: Options,
    ) -> Self {
        Self {
            learner,
            position,
            compressor: Compressor::new(layout.clone()),
            owner: (options.strategy == Strategy::Sharded)
                .then(|| Compressor::new(owner_layout(layout, options, learner, learners))),
            owner_before: None,
            traffic: Traffic::default(),
            fault: None,
        }
    }

    pub(crate) fn refuse(&mut self, fault: &Fault) {
        // The first fault is the cause of those that follow.
        self.fault.get_or_insert_with(|| fault.clone());
    }

    /// Counts a layer's bytes in the messages of all learners, by what is left of them before and after it.
    pub(crate) fn count_received_layer(&mut self, layer: usize, before: &[&[u8]], after: &[&[u8]]) {
        let lengths = before.iter().zip(after).enumerate().filter(|(sender, _)| *sender != self.learner);
        let bytes: usize = lengths.map(|(_, (before, after))| before.len() - after.len()).sum();
        self.traffic.layers[layer].received += bytes as u64;
    }

    /// Counts whole messages of all learners.
    pub(crate) fn count_received(&mut self, messages: &[&[u8]]) {
        let others = messages.iter().enumerate().filter(|(sender, _)| *sender != self.learner);
        self.traffic.received += others.map(|(_, message)| message.len() as u64).sum::<u64>();
    }
}

/// A learner's shares of all layers, as layers of their own.
pub(crate) fn owner_layout(layout: &Layout, options: Options, owner: usize, learners: usize) -> Layout {
    let layers = layout.layers().iter().enumerate().map(|(number, layer)| {
        let elements = share(layout, number, owner, learners).len();
        let treatment = match layer.treatment {
            Treatment::Bins(bin) => Treatment::Bins((bin / options.owner_divisor.get()).max(1)),
            other => other,
        };
        Layer { parameter: Parameter::new(layer.name(), &[elements]), treatment }
    });
    let shares = Layout::new(layers.collect(), layout.soft_threshold());
    shares.expect("shares of valid layers are valid layers").with_scale(layout.scale())
}
