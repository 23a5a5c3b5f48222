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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_depends_on_the_sample_and_not_on_its_neighbours() {
        let device = Device::flex();
        let draw = Draw { seed: 1, epoch: 3 };
        let dropped = |samples: &[usize], layer| {
            let ones = Tensor::<2>::ones([samples.len(), 400], &device);
            let layer = Dropout { share: 0.25, layer };
            let data = layer.forward(ones, Some(Training { draw, samples })).into_data();
            data.try_into_vec::<f32>().unwrap()
        };
        let both = dropped(&[5, 9], 0);
        assert_eq!(both[400..], dropped(&[9], 0));
        assert_ne!(both[400..], dropped(&[9], 1));
        assert_ne!(both[..400], both[400..]);
        assert!(both.iter().all(|&value| value == 0.0 || (value - 4.0 / 3.0).abs() < 1e-6));
        let share = both.iter().filter(|&&value| value == 0.0).count() as f64 / 800.0;
        assert!((share - 0.25).abs() < 0.06, "{share}");
        let kept = Dropout { share: 0.25, layer: 0 }.forward(Tensor::ones([1, 4], &device), None);
        assert_eq!(kept.into_data().try_into_vec::<f32>().unwrap(), [1.0; 4]);
    }

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
