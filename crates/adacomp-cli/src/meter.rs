//! Counting what an epoch costs: loss, bytes, time.

use crate::history::{LayerEpoch, Rates, Seconds, number};
use adacomp::{Codec, Header, Kind, Layer, Layout, entropy_bytes, section_bytes};
use adacomp_exchange::{Exchange, Strategy, Transport};
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// Bytes of a frame's checksum.
const CHECKSUM: usize = 4;

/// Sums over the steps of an epoch, on one learner or, once added up, over all.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    pub(crate) steps: f64,
    /// How often each element would have been sent without compression.
    pub(crate) dense_copies: f64,
    /// Steps that were not averaged.
    pub(crate) dropped: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) loss: f64,
    /// Bytes handed to the transport.
    pub(crate) sent: f64,
    /// Bytes of all messages, each counted once for the copies that its strategy needs.
    pub(crate) moved: f64,
    /// The same for each layer, without what layers share.
    pub(crate) layers: Vec<f64>,
    /// What each layer would have taken with the paper's code, and by entropy at least; with `gather` only.
    #[serde(default)]
    pub(crate) paper: Vec<f64>,
    #[serde(default)]
    pub(crate) floor: Vec<f64>,
}

impl Sums {
    pub(crate) fn new(layers: usize) -> Self {
        let [layers, paper, floor] = [(); 3].map(|()| vec![0.0; layers]);
        Self { layers, paper, floor, ..Self::default() }
    }

    /// Counts a step of a learner that is hosted here.
    pub(crate) fn count<C: Transport>(&mut self, exchange: &mut Exchange<C>, learner: usize) {
        let Some(traffic) = exchange.traffic(learner).cloned() else { return };
        self.sent += traffic.sent as f64;
        let (strategy, learners) = (exchange.options().strategy, exchange.transport().learners());
        self.dense_copies += dense_copies(strategy, learners);
        if strategy != Strategy::Gather {
            self.moved += traffic.sent as f64;
            self.layers.iter_mut().zip(&traffic.layers).for_each(|(sum, layer)| *sum += layer.sent as f64);
            return;
        }
        // A frame goes to every other learner; even where there is none, it has a size.
        let copies = learners - 1;
        let Some(compressor) = exchange.compressor(learner) else { return };
        let mut bytes = (Header::LENGTH + CHECKSUM) as f64;
        for (layer, sum) in self.layers.iter_mut().enumerate() {
            let statistics = compressor.layer_statistics(layer);
            let section = statistics.bytes as f64;
            *sum += section;
            bytes += section;
            let (paper, floor) = match compressor.last_packet(layer) {
                Some(packet) => {
                    let paper = section_bytes(compressor.layout(), layer, packet, Codec::Paper);
                    (paper as f64, entropy_bytes(statistics.elements, statistics.selected))
                }
                None => (section, section),
            };
            // A run that was begun before these were counted has none.
            for (sums, bytes) in [(&mut self.paper, paper), (&mut self.floor, floor)] {
                if let Some(sum) = sums.get_mut(layer) {
                    *sum += bytes;
                }
            }
        }
        self.moved += if copies == 0 { bytes } else { traffic.sent as f64 / copies as f64 };
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.dense_copies += other.dense_copies;
        self.dropped += other.dropped;
        self.loss += other.loss;
        self.sent += other.sent;
        self.moved += other.moved;
        let own = [&mut self.layers, &mut self.paper, &mut self.floor];
        for (sums, others) in own.into_iter().zip([&other.layers, &other.paper, &other.floor]) {
            sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
        }
    }

    /// The sums of all learners, divided by their number.
    pub(crate) fn average<C: Transport>(own: &[Self], transport: &mut C) -> Result<Self> {
        let messages = own.iter().map(serde_json::to_vec).collect::<Result<Vec<_>, _>>()?;
        let all = transport.all_gather(messages)?;
        let all = all.iter().map(|sums| serde_json::from_slice(sums)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self::mean(&all))
    }

    pub(crate) fn mean(all: &[Self]) -> Self {
        let mut mean = Self::new(all.first().map_or(0, |sums| sums.layers.len()));
        all.iter().for_each(|sums| mean.add(sums));
        let Self { steps, dense_copies, dropped, loss, sent, moved, layers, paper, floor } = &mut mean;
        [steps, dense_copies, dropped, loss, sent, moved]
            .into_iter()
            .chain(layers)
            .chain(paper)
            .chain(floor)
            .for_each(|sum| *sum /= all.len() as f64);
        mean
    }

    /// How many times fewer bytes than the same strategy moves without compression.
    pub(crate) fn rates(&self, layout: &Layout) -> Rates {
        self.rates_of(layout, &self.layers, self.moved)
    }

    /// The same if frames were in the paper's code.
    pub(crate) fn paper_rates(&self, layout: &Layout) -> Rates {
        let headers = self.moved - self.layers.iter().sum::<f64>();
        self.rates_of(layout, &self.paper, self.paper.iter().sum::<f64>() + headers)
    }

    /// The same by the entropy of what was selected, without headers.
    pub(crate) fn floor_rates(&self, layout: &Layout) -> Rates {
        self.rates_of(layout, &self.floor, self.floor.iter().sum())
    }

    /// What each layer has done.
    pub(crate) fn layer_epochs(&self, layout: &Layout) -> Vec<LayerEpoch> {
        let layers = layout.layers().iter().zip(&self.layers);
        let epoch = |(layer, &moved): (&Layer, &f64)| LayerEpoch {
            rate: self.rate(layer.elements(), moved),
            residual_norm: None,
        };
        layers.map(epoch).collect()
    }

    fn rate(&self, elements: usize, moved: f64) -> Option<f64> {
        (moved > 0.0 && elements > 0).then(|| 4.0 * elements as f64 * self.dense_copies / moved)
    }

    /// Rates where each layer has taken so many bytes, and all together so many.
    fn rates_of(&self, layout: &Layout, layers: &[f64], all: f64) -> Rates {
        let of_kind = |kind: Kind| {
            let layers = layout.layers().iter().zip(layers);
            let layers = layers.filter(|(layer, _)| layer.parameter.kind == kind);
            let (elements, moved) = layers.fold((0, 0.0), |(elements, moved), (layer, bytes)| {
                (elements + layer.elements(), moved + bytes)
            });
            self.rate(elements, moved)
        };
        let overall =
            if layers.iter().any(|&bytes| bytes > 0.0) { self.rate(layout.elements(), all) } else { None };
        Rates { overall, conv: of_kind(Kind::Conv), matrix: of_kind(Kind::Matrix) }
    }
}

/// How often a learner sends each element in a step when nothing is compressed: once in a frame; otherwise to its owner, and
/// as an owner to all others.
fn dense_copies(strategy: Strategy, learners: usize) -> f64 {
    match strategy {
        Strategy::Gather => 1.0,
        _ => 2.0 * (learners as f64 - 1.0) / learners as f64,
    }
}

impl Seconds {
    /// Counts a step's exchange.
    pub(crate) fn add_exchange(&mut self, step: adacomp_exchange::Seconds) {
        self.compress += step.compress;
        self.encode += step.encode;
        self.wait += step.wait;
        self.decode += step.decode;
    }

    /// What is neither data, model nor test.
    pub(crate) fn exchange(&self) -> f64 {
        self.compress + self.encode + self.wait + self.decode
    }

    pub(crate) fn all(&self) -> f64 {
        self.data + self.model + self.exchange() + self.optimizer + self.test
    }
}
