//! What can be trained by name: a model, its data, and how it is trained unless told otherwise.

use crate::config::{OptimizerKind, Schedule};
use crate::data::{DataSet, Wanted};
use crate::history::Epoch;
use crate::models::Architecture;

/// A named model, data and training. All defaults of a recipe are here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipe {
    pub(crate) name: &'static str,
    /// Model and data in one sentence.
    pub(crate) about: &'static str,
    /// What to expect with these defaults.
    pub(crate) expected: &'static str,
    pub(crate) architecture: Architecture,
    pub(crate) data: DataSet,
    /// Whether training pictures are shifted and mirrored.
    pub(crate) augment: bool,
    pub(crate) metric: Metric,
    pub(crate) learners: usize,
    pub(crate) minibatch: usize,
    pub(crate) epochs: usize,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) learning_rate: f64,
    pub(crate) schedule: Schedule,
    pub(crate) weight_decay: f64,
    pub(crate) clip: Option<f64>,
}

/// What a recipe is measured by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metric {
    /// The share that is classified wrongly.
    Error,
    /// The cross entropy in nats.
    Loss,
}

impl Metric {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Error => "test error",
            Self::Loss => "test loss",
        }
    }

    /// Returns its value at the end of an epoch, for people.
    pub(crate) fn show(self, epoch: &Epoch) -> String {
        match self {
            Self::Error => format!("{:.2}%", epoch.test_error),
            Self::Loss => format!("{:.4}", epoch.test_loss),
        }
    }
}

const BASE: Recipe = Recipe {
    name: "",
    about: "",
    expected: "",
    architecture: Architecture::Mlp { inputs: 64, hidden: &[] },
    data: DataSet::Digits,
    augment: false,
    metric: Metric::Error,
    learners: 4,
    minibatch: 128,
    epochs: 10,
    optimizer: OptimizerKind::Sgd,
    learning_rate: 0.01,
    schedule: Schedule::Cosine,
    weight_decay: 0.0,
    clip: None,
};

const RESNET18: Recipe = Recipe {
    name: "resnet18",
    about: "ResNet-18 on CIFAR-10, or on 224x224 pictures of a folder",
    expected: "not trained to its end on two cores, where that takes days; for ratios, a few hundred steps are enough",
    architecture: Architecture::ResNet { side: 32, blocks: [2, 2, 2, 2], bottleneck: false },
    data: DataSet::Cifar10,
    augment: true,
    epochs: 30,
    learning_rate: 0.1,
    weight_decay: 5e-4,
    ..BASE
};

/// The recipes, from the smallest to the largest.
pub(crate) const RECIPES: [Recipe; 10] = [
    Recipe {
        name: "digits",
        about: "three fully-connected layers on 1,797 handwritten digits of 8x8",
        expected: "about 2% test error in a few seconds; nothing to fetch",
        architecture: Architecture::Mlp { inputs: 64, hidden: &[256, 256] },
        minibatch: 32,
        epochs: 40,
        learning_rate: 0.02,
        ..BASE
    },
    Recipe {
        name: "mnist-dnn",
        about: "three fully-connected layers on MNIST",
        expected: "about 1.8% test error",
        architecture: Architecture::Mlp { inputs: 784, hidden: &[400, 400] },
        data: DataSet::Mnist,
        learning_rate: 0.02,
        ..BASE
    },
    Recipe {
        name: "mnist-cnn",
        about: "two convolutions of 5x5 and two fully-connected layers on MNIST",
        expected: "about 0.75% test error",
        architecture: Architecture::Cnn { side: 28, channels: &[32, 64], padded: false, hidden: &[128] },
        data: DataSet::Mnist,
        epochs: 5,
        learning_rate: 0.02,
        ..BASE
    },
    Recipe {
        name: "cifar10-cnn",
        about: "three convolutions of 5x5 and a fully-connected layer on CIFAR-10",
        expected: "about 25% test error; an epoch takes about two minutes on two cores",
        architecture: Architecture::Cnn { side: 32, channels: &[32, 32, 64], padded: true, hidden: &[] },
        data: DataSet::Cifar10,
        epochs: 20,
        ..BASE
    },
    Recipe {
        name: "alexnet",
        about: "AlexNet on CIFAR-10, or on 224x224 pictures of a folder",
        expected: "not trained to its end on two cores, where that takes hours; for ratios, a few hundred steps are enough",
        architecture: Architecture::AlexNet { side: 32 },
        data: DataSet::Cifar10,
        augment: true,
        epochs: 30,
        weight_decay: 5e-4,
        ..BASE
    },
    RESNET18,
    Recipe {
        name: "resnet50",
        about: "ResNet-50 on CIFAR-10, or on 224x224 pictures of a folder",
        architecture: Architecture::ResNet { side: 32, blocks: [3, 4, 6, 3], bottleneck: true },
        ..RESNET18
    },
    Recipe {
        name: "speech-dnn",
        about: "six hidden layers of 1,024 from 11 frames of speech to thousands of triphone states",
        expected: "83% test error dense and 89% with AdaComp after two epochs, far from its end; an epoch takes about seven minutes on two cores",
        architecture: Architecture::Mlp { inputs: 440, hidden: &[1024; 6] },
        data: DataSet::Speech,
        minibatch: 256,
        epochs: 5,
        learning_rate: 0.05,
        ..BASE
    },
    Recipe {
        name: "shakespeare-lstm",
        about: "two layers of long short-term memory of 128 on Tiny Shakespeare, 50 characters a sample",
        expected: "a test loss of about 1.55",
        architecture: Architecture::Lstm { hidden: 128, layers: 2 },
        data: DataSet::Shakespeare,
        metric: Metric::Loss,
        minibatch: 16,
        epochs: 8,
        learning_rate: 0.5,
        clip: Some(5.0),
        ..BASE
    },
    Recipe {
        name: "shakespeare-transformer",
        about: "a transformer of four blocks of 128 on Tiny Shakespeare, 64 characters a sample",
        expected: "a test loss of about 1.54 dense; AdaComp ends about 9% higher: see reproduction/README.md",
        architecture: Architecture::Transformer { width: 128, heads: 4, layers: 4, context: 64 },
        data: DataSet::Shakespeare,
        metric: Metric::Loss,
        minibatch: 32,
        epochs: 8,
        optimizer: OptimizerKind::Adam,
        learning_rate: 1e-3,
        clip: Some(1.0),
        ..BASE
    },
];

/// Characters in a sample, unless the model decides.
const SEQUENCE: usize = 50;

impl Recipe {
    pub(crate) fn named(name: &str) -> Option<Self> {
        RECIPES.into_iter().find(|recipe| recipe.name == name)
    }

    /// Returns the form for pictures of 224x224 from a folder, if there is one.
    pub(crate) fn for_image_folder(mut self) -> Option<Self> {
        match &mut self.architecture {
            Architecture::AlexNet { side } | Architecture::ResNet { side, .. } => *side = 224,
            _ => return None,
        }
        self.data = DataSet::ImageFolder;
        Some(self)
    }

    /// Returns the data that it needs.
    pub(crate) fn wanted(&self) -> Wanted {
        let (sequence, side) = match self.architecture {
            Architecture::Transformer { context, .. } => (context, 0),
            Architecture::AlexNet { side } | Architecture::ResNet { side, .. } => (SEQUENCE, side),
            _ => (SEQUENCE, 0),
        };
        Wanted { data: self.data, augment: self.augment, sequence, side }
    }
}
