//! What a run has shown so far: what tables, JSON lines, reports and checkpoints are made of.

use adacomp::{Codec, Header, Kind, Layer, Layout, entropy_bytes, section_bytes};
use adacomp_exchange::{Exchange, Strategy, Transport};
use anyhow::Result;
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
    name: String,
    /// `conv`, `matrix` or `vector`.
    kind: String,
    /// Its number of weights.
    elements: usize,
    /// How its gradient is sent: `bins of 50`, `dense`, ...
    treatment: String,
}

impl From<&Layer> for LayerInfo {
    fn from(layer: &Layer) -> Self {
        Self {
            name: layer.name().to_owned(),
            kind: layer.parameter.kind.to_string(),
            elements: layer.elements(),
            treatment: format!("{:#}", layer.treatment),
        }
    }
}

/// What is known at the end of an epoch.
///
/// Aliases are the names of older checkpoints, which had no compression ratio.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    /// Counted from 1.
    pub(crate) epoch: usize,
    /// Steps since the start of the run.
    pub(crate) step: u64,
    /// The learning rate of the last step.
    pub(crate) learning_rate: f64,
    /// The mean over the steps of this epoch whose loss is finite.
    #[serde(deserialize_with = "number")]
    pub(crate) train_loss: f64,
    /// The mean over the test data, in nats.
    #[serde(deserialize_with = "number")]
    pub(crate) test_loss: f64,
    /// The share of the test data that is classified wrongly, in percent.
    pub(crate) test_error: f64,
    /// Steps that were dropped in this epoch because a gradient was not finite; those of a dropped round, in the epoch in which it ended.
    pub(crate) dropped_steps: u64,
    /// Bytes that a learner has sent in this epoch, on average over learners. Here and in all ratios, dropped steps do not count.
    pub(crate) bytes_sent: f64,
    /// Bytes of a dense ring all-reduce over bytes sent.
    #[serde(default)]
    pub(crate) compression_ratio: Option<f64>,
    /// The paper's measure, by kind.
    #[serde(alias = "rate")]
    pub(crate) frame_ratio: FrameRatios,
    /// The same since the start of the run.
    pub(crate) total: Total,
    /// Where the time went in this epoch.
    pub(crate) seconds: Seconds,
    /// What each layer did, in the model's order.
    pub(crate) layers: Vec<LayerEpoch>,
}

/// Dense bytes over compressed bytes, of frames or of what a strategy sends in their place; none where nothing is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct FrameRatios {
    /// Of all bytes, headers and layers sent dense included.
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
    #[serde(default)]
    pub(crate) compression_ratio: Option<f64>,
    #[serde(alias = "rate")]
    pub(crate) frame_ratio: FrameRatios,
    /// The frame ratio if frames were in the paper's code; with `gather` only.
    #[serde(default, alias = "paper_rate")]
    pub(crate) paper_frame_ratio: FrameRatios,
    /// The frame ratio by the entropy of what was selected, if positions do not depend on each other.
    #[serde(default, alias = "floor_rate")]
    pub(crate) entropy_frame_ratio: FrameRatios,
    /// Time of training and evaluation.
    pub(crate) seconds: f64,
}

/// One layer in one epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LayerEpoch {
    #[serde(alias = "rate")]
    pub(crate) frame_ratio: Option<f64>,
    /// The norm of learner 0's residual at the end of the epoch; none for a layer that has no residual.
    pub(crate) residual_norm: Option<f64>,
}

/// Reads `null` as a number that is none: JSON has no other word for a loss that is not finite.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
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

impl Seconds {
    /// Adds the parts of a step's exchange.
    pub(crate) fn add_exchange(&mut self, step: adacomp_exchange::Seconds) {
        self.compress += step.compress;
        self.encode += step.encode;
        self.wait += step.wait;
        self.decode += step.decode;
    }

    pub(crate) fn training(&self) -> f64 {
        let exchange = self.compress + self.encode + self.wait + self.decode;
        self.data + self.model + exchange + self.optimizer
    }
}

/// Bytes of a frame's checksum.
const CHECKSUM: usize = 4;

/// Sums over steps, of one learner or of the mean of all.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    pub(crate) steps: f64,
    /// How often a learner would have sent each element in a dense ring all-reduce. Older checkpoints do not say.
    #[serde(default = "unknown")]
    ring_copies: f64,
    /// How often it would have sent each element with the same strategy and without compression.
    dense_copies: f64,
    /// Steps that were not averaged.
    pub(crate) dropped: f64,
    /// The sum of losses that are finite, and their number. Older checkpoints do not say that.
    #[serde(deserialize_with = "number")]
    loss: f64,
    #[serde(default = "unknown")]
    losses: f64,
    /// Bytes handed to the transport.
    pub(crate) sent: f64,
    /// Bytes of all messages, each counted once for the copies that its strategy needs.
    moved: f64,
    /// The same for each layer, without what layers share.
    layers: Vec<f64>,
    /// What each layer would have taken with the paper's code, and by entropy at least; with `gather` only.
    #[serde(default)]
    paper: Vec<f64>,
    #[serde(default, rename = "floor")]
    entropy: Vec<f64>,
}

fn unknown() -> f64 {
    f64::NAN
}

/// Returns how often each of N learners sends each element in one dense ring all-reduce.
fn ring_copies(learners: usize) -> f64 {
    2.0 * (learners as f64 - 1.0) / learners as f64
}

impl Sums {
    pub(crate) fn new(layers: usize) -> Self {
        let [layers, paper, entropy] = [(); 3].map(|()| vec![0.0; layers]);
        Self { layers, paper, entropy, ..Self::default() }
    }

    /// Returns the number of layers that it has sums of.
    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Fills in what an older checkpoint does not say.
    pub(crate) fn complete(&mut self, learners: usize) {
        if self.ring_copies.is_nan() {
            self.ring_copies = self.steps * ring_copies(learners);
        }
        if self.losses.is_nan() {
            self.losses = self.steps;
        }
    }

    /// Counts a step. Where its loss is not finite it will be dropped, and that of the others still tells something.
    pub(crate) fn count_step(&mut self, loss: f64) {
        self.steps += 1.0;
        if loss.is_finite() {
            self.loss += loss;
            self.losses += 1.0;
        }
    }

    /// Returns the mean loss.
    pub(crate) fn mean_loss(&self) -> f64 {
        self.loss / self.losses
    }

    /// Counts the bytes of an exchange, after this many steps, of a learner that is hosted here.
    pub(crate) fn count<T: Transport>(&mut self, exchange: &mut Exchange<T>, learner: usize, steps: u64) {
        let Some(traffic) = exchange.traffic(learner).cloned() else { return };
        let (strategy, learners) = (exchange.options().strategy, exchange.transport().learners());
        self.sent += traffic.sent as f64;
        self.ring_copies += steps as f64 * ring_copies(learners);
        if strategy != Strategy::Gather {
            // There is no frame whose size in another code could be told.
            self.paper.clear();
            self.entropy.clear();
            self.dense_copies += ring_copies(learners);
            self.moved += traffic.sent as f64;
            self.layers.iter_mut().zip(&traffic.layers).for_each(|(sum, layer)| *sum += layer.sent as f64);
            return;
        }
        self.dense_copies += 1.0;
        let Some(compressor) = exchange.compressor(learner) else { return };
        let mut bytes = (Header::LENGTH + CHECKSUM) as f64;
        for (layer, sum) in self.layers.iter_mut().enumerate() {
            let statistics = compressor.layer_statistics(layer);
            let section = statistics.bytes as f64;
            *sum += section;
            bytes += section;
            let (paper, entropy) = match compressor.last_packet(layer) {
                Some(packet) => {
                    let paper = section_bytes(compressor.layout(), layer, packet, Codec::Paper);
                    (paper as f64, entropy_bytes(statistics.elements, statistics.selected))
                }
                None => (section, section),
            };
            // Once something was sent without counting them, they are not known.
            for (sums, bytes) in [(&mut self.paper, paper), (&mut self.entropy, entropy)] {
                if let Some(sum) = sums.get_mut(layer) {
                    *sum += bytes;
                }
            }
        }
        // A frame goes to every other learner; even where there is none, it has a size.
        let copies = learners - 1;
        self.moved += if copies == 0 { bytes } else { traffic.sent as f64 / copies as f64 };
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.ring_copies += other.ring_copies;
        self.dense_copies += other.dense_copies;
        self.dropped += other.dropped;
        self.loss += other.loss;
        self.losses += other.losses;
        self.sent += other.sent;
        self.moved += other.moved;
        let own = [&mut self.layers, &mut self.paper, &mut self.entropy];
        for (sums, others) in own.into_iter().zip([&other.layers, &other.paper, &other.entropy]) {
            // What is not known of a part is not known of the whole.
            sums.truncate(others.len());
            sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
        }
    }

    /// Returns the sums of all learners; `own` are those of the learners that are hosted here.
    pub(crate) fn gather<T: Transport>(own: &[Self], transport: &mut T) -> Result<Vec<Self>> {
        let messages = own.iter().map(serde_json::to_vec).collect::<Result<Vec<_>, _>>()?;
        let all = transport.all_gather(messages)?;
        Ok(all.iter().map(|sums| serde_json::from_slice(sums)).collect::<Result<_, _>>()?)
    }

    pub(crate) fn mean(all: &[Self]) -> Self {
        let mut mean = Self::new(all.first().map_or(0, |sums| sums.layers.len()));
        all.iter().for_each(|sums| mean.add(sums));
        let Self {
            steps,
            ring_copies,
            dense_copies,
            dropped,
            loss,
            losses,
            sent,
            moved,
            layers,
            paper,
            entropy,
        } = &mut mean;
        [steps, ring_copies, dense_copies, dropped, loss, losses, sent, moved]
            .into_iter()
            .chain(layers)
            .chain(paper)
            .chain(entropy)
            .for_each(|sum| *sum /= all.len() as f64);
        mean
    }

    /// Returns the bytes of a dense ring all-reduce over the bytes sent; none with one learner, where nothing is sent.
    pub(crate) fn compression_ratio(&self, layout: &Layout) -> Option<f64> {
        let ring = 4.0 * layout.elements() as f64 * self.ring_copies;
        (self.sent > 0.0 && ring > 0.0).then(|| ring / self.sent)
    }

    pub(crate) fn frame_ratios(&self, layout: &Layout) -> FrameRatios {
        self.ratios_of(layout, &self.layers, self.moved)
    }

    /// Returns the frame ratios if frames were in the paper's code.
    pub(crate) fn paper_frame_ratios(&self, layout: &Layout) -> FrameRatios {
        let headers = self.moved - self.layers.iter().sum::<f64>();
        self.ratios_of(layout, &self.paper, self.paper.iter().sum::<f64>() + headers)
    }

    /// Returns the frame ratios by the entropy of what was selected, without headers.
    pub(crate) fn entropy_frame_ratios(&self, layout: &Layout) -> FrameRatios {
        self.ratios_of(layout, &self.entropy, self.entropy.iter().sum())
    }

    pub(crate) fn layer_epochs(&self, layout: &Layout) -> Vec<LayerEpoch> {
        let layers = layout.layers().iter().zip(&self.layers);
        let epoch = |(layer, &moved): (&Layer, &f64)| LayerEpoch {
            frame_ratio: self.ratio(layer.elements(), moved),
            residual_norm: None,
        };
        layers.map(epoch).collect()
    }

    fn ratio(&self, elements: usize, moved: f64) -> Option<f64> {
        (moved > 0.0 && elements > 0).then(|| 4.0 * elements as f64 * self.dense_copies / moved)
    }

    /// Returns the ratios where layers took these bytes, and all layers with headers took `all` bytes.
    fn ratios_of(&self, layout: &Layout, layers: &[f64], all: f64) -> FrameRatios {
        let of_kind = |kind: Kind| {
            let layers = layout.layers().iter().zip(layers);
            let layers = layers.filter(|(layer, _)| layer.parameter.kind == kind);
            let (elements, moved) = layers.fold((0, 0.0), |(elements, moved), (layer, bytes)| {
                (elements + layer.elements(), moved + bytes)
            });
            self.ratio(elements, moved)
        };
        let overall =
            if layers.iter().any(|&bytes| bytes > 0.0) { self.ratio(layout.elements(), all) } else { None };
        FrameRatios { overall, conv: of_kind(Kind::Conv), matrix: of_kind(Kind::Matrix) }
    }
}
