//! The models that recipes train.

mod cnn;
mod language;
mod resnet;

use crate::data::Batch;
use crate::recipes::Architecture;
use anyhow::Result;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use cnn::{AlexNet, Cnn, Mlp};
use language::{LstmLanguage, Transformer};
use resnet::ResNet;
use std::sync::Mutex;

pub(crate) use cnn::Training;

/// Any of the models.
#[allow(clippy::large_enum_variant, reason = "each thread has one")]
#[derive(Module, Debug)]
pub(crate) enum Network {
    Mlp(Mlp),
    Cnn(Cnn),
    AlexNet(AlexNet),
    ResNet(ResNet),
    Lstm(LstmLanguage),
    Transformer(Transformer),
}

/// The process has one generator of Burn: nobody may draw from it while a model is made.
static MAKING: Mutex<()> = Mutex::new(());

impl Network {
    /// Makes a model whose weights depend on the seed only.
    pub(crate) fn new(
        architecture: &Architecture,
        classes: usize,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let _making = MAKING.lock();
        device.seed(seed);
        let network = match *architecture {
            Architecture::Mlp { inputs, ref hidden } => Self::Mlp(Mlp::new(inputs, hidden, classes, device)),
            Architecture::Cnn { side, ref channels, padded, ref hidden } => {
                let inputs = if padded { 3 } else { 1 };
                Self::Cnn(Cnn::new([inputs, side], channels, padded, hidden, classes, device))
            }
            Architecture::AlexNet { side } => Self::AlexNet(AlexNet::new(side, classes, device)),
            Architecture::ResNet { side, blocks, bottleneck } => {
                Self::ResNet(ResNet::new(side, blocks, bottleneck, classes, device))
            }
            Architecture::Lstm { hidden, layers } => {
                Self::Lstm(LstmLanguage::new(classes, hidden, layers, device))
            }
            Architecture::Transformer { width, heads, layers, context } => {
                Self::Transformer(Transformer::new(classes, [width, heads, layers, context], device))
            }
        };
        // Burn makes weights when they are first used: use them here, in the model's order.
        adacomp_burn::weights(&network)?;
        Ok(network)
    }

    /// Returns a row of scores for each target of a batch.
    pub(crate) fn forward(
        &self,
        batch: &Batch,
        device: &Device,
        training: Option<Training<'_>>,
    ) -> Tensor<2> {
        let rows = batch.samples.len();
        let values = || {
            let data = TensorData::new(batch.values.clone(), [rows, batch.values.len() / rows]);
            Tensor::<2>::from_data(data, device)
        };
        let tokens = || {
            let data = TensorData::new(batch.tokens.clone(), [rows, batch.tokens.len() / rows]);
            Tensor::<2, Int>::from_data(data, device)
        };
        match self {
            Self::Mlp(model) => model.forward(values()),
            Self::Cnn(model) => model.forward(values()),
            Self::AlexNet(model) => model.forward(values(), training),
            Self::ResNet(model) => model.forward(values()),
            Self::Lstm(model) => model.forward(tokens()),
            Self::Transformer(model) => model.forward(tokens()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use crate::recipes::{RECIPES, Recipe};
    use adacomp::Kind;
    use adacomp_burn::{Values, parameters, take_gradients};
    use burn::optim::GradientsParams;

    const CLASSES: usize = 7;

    /// Returns two samples that a recipe's model takes.
    fn batch(recipe: &Recipe) -> Batch {
        let mut random = fastrand::Rng::with_seed(1);
        let (values, tokens) = match recipe.architecture {
            Architecture::Mlp { inputs, .. } => (inputs, 0),
            Architecture::Cnn { side, padded, .. } => (side * side * if padded { 3 } else { 1 }, 0),
            Architecture::AlexNet { side } | Architecture::ResNet { side, .. } => (3 * side * side, 0),
            Architecture::Lstm { .. } => (0, 12),
            Architecture::Transformer { context, .. } => (0, context),
        };
        Batch {
            values: (0..2 * values).map(|_| random.f32() - 0.5).collect(),
            tokens: (0..2 * tokens).map(|_| random.i32(0..CLASSES as i32)).collect(),
            targets: vec![0; 2 * tokens.max(1)],
            samples: vec![0, 1],
        }
    }

    fn is_zero(gradient: &Values) -> bool {
        match gradient.as_gradient() {
            adacomp::Gradient::F32(values) => values.iter().all(|value| *value == 0.0),
            other => panic!("{other:?}"),
        }
    }

    fn check(recipe: &Recipe) {
        let device = Device::flex().autodiff();
        let model = Network::new(&recipe.architecture, CLASSES, 1, &device).unwrap();
        let batch = batch(recipe);
        let training = Training { draw: Draw { seed: 1, epoch: 0 }, samples: &batch.samples };
        let scores = model.forward(&batch, &device, Some(training));
        assert_eq!(scores.dims(), [batch.targets.len(), CLASSES], "{}", recipe.name);
        let loss = scores.powf_scalar(2.0).mean();
        let gradients = take_gradients(&model, GradientsParams::from_grads(loss.backward(), &model)).unwrap();
        for (parameter, gradient) in parameters(&model).iter().zip(&gradients) {
            assert!(!is_zero(gradient), "{}: nothing reaches {}", recipe.name, parameter.name);
        }
    }

    #[test]
    fn every_recipe_has_scores_for_its_targets_and_trains_all_its_weights() {
        RECIPES.iter().for_each(check);
    }

    #[test]
    fn so_has_every_form_for_large_pictures() {
        RECIPES.iter().filter_map(Recipe::for_image_folder).for_each(|recipe| check(&recipe));
    }

    /// The sizes that the literature gives, for 10 and 1,000 classes.
    #[test]
    fn models_have_as_many_weights_as_they_should() {
        let weights = |name: &str, large: bool, classes| {
            let recipe = Recipe::named(name).unwrap();
            let recipe = if large { recipe.for_image_folder().unwrap() } else { recipe.clone() };
            let model = Network::new(&recipe.architecture, classes, 1, &Device::flex().autodiff()).unwrap();
            let parameters = parameters(&model);
            let convolutions = parameters.iter().filter(|parameter| parameter.kind == Kind::Conv).count();
            (parameters.iter().map(|parameter| parameter.elements()).sum::<usize>(), convolutions)
        };
        assert_eq!(weights("cifar10-cnn", false, 10), (89_578, 3));
        assert_eq!(weights("resnet18", false, 10), (11_173_962, 20));
        assert_eq!(weights("resnet50", false, 10), (23_520_842, 53));
        assert_eq!(weights("resnet18", true, 1000), (11_689_512, 20));
        assert_eq!(weights("resnet50", true, 1000), (25_557_032, 53));
        assert_eq!(weights("alexnet", true, 1000), (61_100_840, 5));
    }

    #[test]
    fn weights_depend_on_the_seed_only() {
        let device = Device::flex().autodiff();
        let recipe = Recipe::named("digits").unwrap();
        let weights = |seed| {
            let model = Network::new(&recipe.architecture, CLASSES, seed, &device).unwrap();
            adacomp_burn::weights(&model).unwrap()
        };
        assert_eq!(weights(1), weights(1));
        assert_ne!(weights(1), weights(2));
    }
}
