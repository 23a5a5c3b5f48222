//! Models of text, which return scores for the next character after each.

use burn::module::{Initializer, Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, sigmoid, tanh};
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

/// One layer of long short-term memory over a sequence.
///
/// Burn's own multiplies each of its four gates by itself; here they are one matrix, and the inputs of all characters are
/// multiplied at once, which takes a fraction of the time.
#[derive(Module, Debug)]
struct Lstm {
    input: Param<Tensor<2>>,
    recurrent: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

impl Lstm {
    fn new(inputs: usize, hidden: usize, device: &Device) -> Self {
        let bound = 1.0 / (hidden as f64).sqrt();
        let initializer = Initializer::Uniform { min: -bound, max: bound };
        Self {
            input: initializer.init([inputs, 4 * hidden], device),
            recurrent: initializer.init([hidden, 4 * hidden], device),
            bias: Initializer::Zeros.init([4 * hidden], device),
        }
    }

    /// Maps `[samples, characters, inputs]` to `[samples, characters, hidden]`.
    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let [samples, characters, inputs] = input.dims();
        let [hidden, gates] = self.recurrent.dims();
        let device = input.device();
        // Characters first, so that those of one moment lie together.
        let by_character = input.swap_dims(0, 1).reshape([characters * samples, inputs]);
        let projected = by_character.matmul(self.input.val()) + self.bias.val().unsqueeze();
        let recurrent = self.recurrent.val();
        let mut output = Tensor::zeros([samples, hidden], &device);
        let mut cell = Tensor::zeros([samples, hidden], &device);
        let mut outputs = Vec::with_capacity(characters);
        for moment in projected.chunk(characters, 0) {
            let moment = moment.reshape([samples, gates]);
            let gates = moment + output.matmul(recurrent.clone());
            let opened = sigmoid(gates.clone().narrow(1, 0, 3 * hidden));
            let [forget, write, read] = [0, 1, 2].map(|gate| opened.clone().narrow(1, gate * hidden, hidden));
            let candidate = tanh(gates.narrow(1, 3 * hidden, hidden));
            cell = forget * cell + write * candidate;
            output = read * tanh(cell.clone());
            outputs.push(output.clone());
        }
        Tensor::stack(outputs, 1)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One step of one unit, by hand.
    #[test]
    fn a_cell_forgets_writes_and_reads() {
        let device = Device::flex();
        let lstm = Lstm::new(1, 1, &device);
        let set = |values: [f32; 4]| Tensor::<1>::from_floats(values, &device).reshape([1, 4]);
        let lstm = Lstm {
            input: Param::from_tensor(set([0.1, 0.2, 0.3, 0.4])),
            recurrent: Param::from_tensor(set([0.5, 0.6, 0.7, 0.8])),
            ..lstm
        };
        let output = lstm.forward(Tensor::<1>::from_floats([1.0, 2.0], &device).reshape([1, 2, 1]));
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (mut output_by_hand, mut cell) = (0.0, 0.0);
        let mut expected = Vec::new();
        for input in [1.0, 2.0] {
            let gate = |w: f64, u: f64| w * input + u * output_by_hand;
            let (forget, write, read) =
                (sigmoid(gate(0.1, 0.5)), sigmoid(gate(0.2, 0.6)), sigmoid(gate(0.3, 0.7)));
            cell = forget * cell + write * f64::tanh(gate(0.4, 0.8));
            output_by_hand = read * f64::tanh(cell);
            expected.push(output_by_hand);
        }
        let output = output.into_data().try_into_vec::<f32>().unwrap();
        output
            .iter()
            .zip(expected)
            .for_each(|(actual, expected)| assert!((f64::from(*actual) - expected).abs() < 1e-6));
    }
}
