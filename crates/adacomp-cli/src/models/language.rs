//! Models of text: scores for the next character after each.

use super::layers::Lstm;
use burn::module::{Initializer, Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor};

/// Layers of long short-term memory.
#[derive(Module, Debug)]
pub(crate) struct LstmLanguage {
    embedding: Embedding,
    layers: Vec<Lstm>,
    top: Linear,
}

impl LstmLanguage {
    pub(crate) fn new(characters: usize, hidden: usize, layers: usize, device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(characters, hidden).init(device),
            layers: (0..layers).map(|_| Lstm::new(hidden, hidden, device)).collect(),
            top: LinearConfig::new(hidden, characters).init(device),
        }
    }

    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let embedded = self.embedding.forward(tokens);
        let values = self.layers.iter().fold(embedded, |values, layer| layer.forward(values));
        self.top.forward(values.flatten::<2>(0, 1))
    }
}

/// A decoder-only transformer with norms before each part, as GPT-2 has them.
#[derive(Module, Debug)]
pub(crate) struct Transformer {
    embedding: Embedding,
    positions: Param<Tensor<2>>,
    blocks: Vec<TransformerBlock>,
    norm: LayerNorm,
    top: Linear,
}

impl Transformer {
    pub(crate) fn new(
        characters: usize,
        [width, heads, layers, context]: [usize; 4],
        device: &Device,
    ) -> Self {
        // As GPT-2: narrow, so that the first scores are all alike.
        let narrow = Initializer::Normal { mean: 0.0, std: 0.02 };
        Self {
            embedding: EmbeddingConfig::new(characters, width).with_initializer(narrow.clone()).init(device),
            positions: narrow.init([context, width], device),
            blocks: (0..layers).map(|_| TransformerBlock::new(width, heads, device)).collect(),
            norm: LayerNormConfig::new(width).init(device),
            top: LinearConfig::new(width, characters).with_bias(false).init(device),
        }
    }

    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [_, length] = tokens.dims();
        let positions = self.positions.val().narrow(0, 0, length).unsqueeze();
        let mut values = self.embedding.forward(tokens) + positions;
        for block in &self.blocks {
            values = block.forward(values);
        }
        self.top.forward(self.norm.forward(values).flatten::<2>(0, 1))
    }
}

/// Attention, then two fully-connected layers, each beside a short cut.
#[derive(Module, Debug)]
struct TransformerBlock {
    attention_norm: LayerNorm,
    /// Queries, keys and values at once.
    projections: Linear,
    output: Linear,
    norm: LayerNorm,
    wide: Linear,
    narrow: Linear,
    heads: usize,
}

impl TransformerBlock {
    fn new(width: usize, heads: usize, device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self {
            attention_norm: LayerNormConfig::new(width).init(device),
            projections: linear(width, 3 * width),
            output: linear(width, width),
            norm: LayerNormConfig::new(width).init(device),
            wide: linear(width, 4 * width),
            narrow: linear(4 * width, width),
            heads,
        }
    }

    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let values = input.clone() + self.attend(self.attention_norm.forward(input));
        let wide = gelu(self.wide.forward(self.norm.forward(values.clone())));
        values + self.narrow.forward(wide)
    }

    fn attend(&self, input: Tensor<3>) -> Tensor<3> {
        let [samples, length, width] = input.dims();
        let projected = self.projections.forward(input);
        let [queries, keys, values] = [0, 1, 2].map(|part| {
            let part = projected.clone().narrow(2, part * width, width);
            part.reshape([samples, length, self.heads, width / self.heads]).swap_dims(1, 2)
        });
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let attended = attention(queries, keys, values, None, None, options);
        self.output.forward(attended.swap_dims(1, 2).reshape([samples, length, width]))
    }
}
