//! Counting bytes, as they are handed to the transport.

/// Bytes of one layer, without the envelopes that layers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerTraffic {
    /// Handed to the transport for other learners.
    pub sent: u64,
    /// Handed over by the transport from other learners.
    pub received: u64,
}

/// Bytes of one learner in one step.
///
/// A message to all counts once for each other learner. What a learner sends to itself does not count.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Handed to the transport for other learners, envelopes included.
    pub sent: u64,
    /// Handed over by the transport from other learners, envelopes included.
    pub received: u64,
    /// The same for each layer, without envelopes.
    pub layers: Vec<LayerTraffic>,
}

impl Traffic {
    pub(crate) fn clear(&mut self, layers: usize) {
        *self = Self { layers: std::mem::take(&mut self.layers), ..Self::default() };
        self.layers.clear();
        self.layers.resize(layers, LayerTraffic::default());
    }
}
