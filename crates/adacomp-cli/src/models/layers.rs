//! Layers that Burn has not, or not as needed here.

use crate::draw::Draw;
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::{sigmoid, tanh};
use burn::tensor::{Device, Tensor, TensorData};

/// Drops activations in training.
///
/// Burn's own draws from one generator that all threads share, so its results would depend on them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropout {
    /// The share of activations that are dropped.
    pub(crate) share: f32,
    /// Its number among the dropout layers of its model.
    pub(crate) layer: usize,
}

/// Which samples a forward pass is for, if it is for training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training<'a> {
    pub(crate) draw: Draw,
    pub(crate) samples: &'a [usize],
}

impl Dropout {
    pub(crate) fn forward(self, input: Tensor<2>, training: Option<Training<'_>>) -> Tensor<2> {
        let Some(Training { draw, samples }) = training else { return input };
        let [rows, columns] = input.dims();
        assert_eq!(rows, samples.len(), "a row for each sample");
        let kept = 1.0 / (1.0 - self.share);
        let mut mask = Vec::with_capacity(rows * columns);
        for &sample in samples {
            let mut random = draw.dropout(self.layer, sample);
            mask.extend((0..columns).map(|_| if random.f32() < self.share { 0.0 } else { kept }));
        }
        let mask = Tensor::from_data(TensorData::new(mask, [rows, columns]), &input.device());
        input * mask
    }
}

/// One layer of long short-term memory over a whole sequence.
///
/// Burn's own multiplies each of its four gates by itself; here they are one matrix, and the inputs of all characters are
/// multiplied at once, which takes a fraction of the time.
#[derive(Module, Debug)]
pub(crate) struct Lstm {
    input: Param<Tensor<2>>,
    recurrent: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

impl Lstm {
    pub(crate) fn new(inputs: usize, hidden: usize, device: &Device) -> Self {
        let bound = 1.0 / (hidden as f64).sqrt();
        let initializer = Initializer::Uniform { min: -bound, max: bound };
        Self {
            input: initializer.init([inputs, 4 * hidden], device),
            recurrent: initializer.init([hidden, 4 * hidden], device),
            bias: Initializer::Zeros.init([4 * hidden], device),
        }
    }

    /// From `[samples, characters, inputs]` to `[samples, characters, hidden]`.
    pub(crate) fn forward(&self, input: Tensor<3>) -> Tensor<3> {
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
