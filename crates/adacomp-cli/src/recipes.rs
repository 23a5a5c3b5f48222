//! What can be trained by name: a model, its data, and how it is trained unless told otherwise. The recipes are in
//! `recipes.json`.

use crate::config::Config;
use crate::data::DataSet;
use crate::history::Epoch;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// A model's shape, all but what the data decides.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Architecture {
    /// Fully-connected layers.
    Mlp { inputs: usize, hidden: Vec<usize> },
    /// Convolutions of 5x5, each with pooling, and fully-connected layers.
    Cnn { side: usize, channels: Vec<usize>, padded: bool, hidden: Vec<usize> },
    /// AlexNet for pictures of this side.
    AlexNet { side: usize },
    /// A residual network for pictures of this side.
    ResNet { side: usize, blocks: [usize; 4], bottleneck: bool },
    /// Long short-term memory over characters.
    Lstm { hidden: usize, layers: usize },
    /// A decoder-only transformer over characters.
    Transformer { width: usize, heads: usize, layers: usize, context: usize },
}

/// A named model, data and training.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    pub(crate) name: &'static str,
    /// Model and data in one sentence.
    pub(crate) about: &'static str,
    /// What to expect with these defaults.
    pub(crate) expected: &'static str,
    pub(crate) data: DataSet,
    pub(crate) architecture: Architecture,
    /// Whether training pictures are shifted and mirrored.
    #[serde(default)]
    pub(crate) augment: bool,
    #[serde(default)]
    pub(crate) metric: Metric,
    /// What differs from the defaults of all recipes.
    pub(crate) config: Config,
}

/// What a recipe is measured by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metric {
    /// The share that is classified wrongly.
    #[default]
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

/// The recipes, from the smallest to the largest.
pub(crate) static RECIPES: LazyLock<Vec<Recipe>> = LazyLock::new(|| {
    let mut recipes: Vec<Recipe> =
        serde_json::from_str(include_str!("recipes.json")).expect("the recipes are valid");
    for recipe in &mut recipes {
        recipe.config.recipe = recipe.name.to_owned();
    }
    recipes
});

impl Recipe {
    pub(crate) fn named(name: &str) -> Result<&'static Self> {
        RECIPES.iter().find(|recipe| recipe.name == name).with_context(|| {
            let names: Vec<_> = RECIPES.iter().map(|recipe| recipe.name).collect();
            format!("there is no recipe `{name}`: choose one of {}", names.join(", "))
        })
    }

    /// Returns the form for pictures of 224x224 from a folder, if there is one.
    pub(crate) fn for_image_folder(&self) -> Option<Self> {
        let mut recipe = Self { data: DataSet::ImageFolder, ..self.clone() };
        match &mut recipe.architecture {
            Architecture::AlexNet { side } | Architecture::ResNet { side, .. } => *side = 224,
            _ => return None,
        }
        Some(recipe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_valid() {
        for recipe in RECIPES.iter() {
            recipe.config.check(usize::MAX).unwrap();
            assert_eq!(Recipe::named(recipe.name).unwrap().config.recipe, recipe.name);
        }
    }
}
