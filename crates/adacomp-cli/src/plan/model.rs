//! What learners have to exchange of a model.

use crate::models::Network;
use crate::recipes::{RECIPES, Recipe};
use adacomp::{Layer, Layout, Parameter, Policy, Treatment};
use adacomp_exchange::Strategy;
use adacomp_exchange::internal::density_of_bits;
use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// Frame ratios of layers: dense bytes over compressed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Ratios {
    /// Kernels of convolutions.
    pub(super) conv: f64,
    /// Matrices, recurrent ones, too.
    pub(super) matrix: f64,
}

impl Ratios {
    fn of(self, bin: u32) -> f64 {
        if bin < LARGE_BIN { self.conv } else { self.matrix }
    }
}

/// What learners have to exchange in a step.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Model {
    pub(super) name: String,
    /// Gradients in all.
    pub(super) elements: f64,
    /// Those in layers with large bins, and with small ones.
    pub(super) in_large_bins: f64,
    pub(super) in_small_bins: f64,
    /// Elements that a learner selects.
    pub(super) selected: f64,
    /// Bytes that these take.
    pub(super) selection: f64,
    /// Bytes of layers that are sent dense.
    pub(super) dense: f64,
    #[serde(skip)]
    pub(super) layout: Layout,
    #[serde(skip)]
    ratios: Ratios,
}

/// Bins from this size on are large: the kernel is faster there.
const LARGE_BIN: u32 = 100;

impl Model {
    /// Reads a recipe, a safetensors file, or a list of shapes such as `4096x2048,4096`.
    pub(super) fn read(text: &str, ratios: Ratios) -> Result<Self> {
        let parameters = if let Ok(recipe) = Recipe::named(text) {
            of_recipe(recipe)?
        } else if Path::new(text).is_file() {
            of_file(Path::new(text))?
        } else if text.starts_with(|first: char| first.is_ascii_digit()) {
            of_shapes(text)?
        } else {
            let names = RECIPES.iter().map(|recipe| recipe.name).collect::<Vec<_>>().join(", ");
            bail!(
                "`{text}` is no recipe ({names}), no safetensors file, and no list of shapes such as 4096x2048,4096"
            )
        };
        Self::new(text, parameters, ratios)
    }

    fn new(name: &str, parameters: Vec<Parameter>, ratios: Ratios) -> Result<Self> {
        let layout = Policy::adacomp().layout(parameters)?;
        if layout.elements() == 0 {
            bail!("{name} has no tensors of floating-point numbers, so there is nothing to exchange");
        }
        let mut model = Self {
            name: name.to_owned(),
            elements: layout.elements() as f64,
            in_large_bins: 0.0,
            in_small_bins: 0.0,
            selected: 0.0,
            selection: 0.0,
            dense: 0.0,
            layout: layout.clone(),
            ratios,
        };
        for layer in layout.layers() {
            let elements = layer.elements() as f64;
            let Treatment::Bins(bin) = layer.treatment else {
                model.dense += 4.0 * elements;
                continue;
            };
            *(if bin < LARGE_BIN { &mut model.in_small_bins } else { &mut model.in_large_bins }) += elements;
            model.selected += elements * model.density(layer);
            model.selection += 4.0 * elements / ratios.of(bin);
        }
        Ok(model)
    }

    /// Returns the bytes that a learner sends in a step.
    pub(super) fn bytes(&self, strategy: Strategy, learners: usize) -> f64 {
        strategy.expected_bytes(&self.layout, learners, |layer| self.density(layer))
    }

    /// Returns the share of a layer's elements that a learner selects.
    fn density(&self, layer: &Layer) -> f64 {
        match layer.treatment {
            Treatment::Bins(bin) => density_of_bits(32.0 / self.ratios.of(bin)),
            _ => 1.0,
        }
    }

    /// Returns the selected elements that all learners have together, as a multiple of those of one.
    pub(super) fn union(&self, learners: f64) -> f64 {
        let compressed = self.in_large_bins + self.in_small_bins;
        if compressed == 0.0 {
            return 1.0;
        }
        let density = self.selected / compressed;
        (1.0 - (-learners * density).exp()) / density
    }
}

/// Returns a recipe's parameters, with as many classes as its data usually has: loading the data to know would take too long.
fn of_recipe(recipe: &Recipe) -> Result<Vec<Parameter>> {
    let classes = recipe.data.source().classes;
    let network = Network::new(&recipe.architecture, classes, 1, &Device::flex().autodiff())?;
    Ok(adacomp_burn::parameters(&network))
}

/// Returns the floating-point tensors of a safetensors file, of which only the front is read.
fn of_file(path: &Path) -> Result<Vec<Parameter>> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = std::fs::File::open(path)?;
        let mut front = vec![0; 8];
        file.read_exact(&mut front)?;
        let length = u64::from_le_bytes(front[..8].try_into().unwrap_or_default());
        file.take(length.min(MOST_HEADER)).read_to_end(&mut front)?;
        Ok(front)
    };
    let front =
        read().with_context(|| format!("{} cannot be read, or is not a safetensors file", path.display()))?;
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(&front[8..])
        .with_context(|| format!("{} is not a safetensors file", path.display()))?;
    let parameter = |(name, tensor): (&String, &Value)| {
        let is_float = matches!(tensor["dtype"].as_str(), Some("F64" | "F32" | "F16" | "BF16"));
        let shape = tensor["shape"].as_array().filter(|_| is_float)?;
        let shape: Vec<_> = shape.iter().map(|size| size.as_u64().unwrap_or(0) as usize).collect();
        Some(Parameter::new(name, &shape))
    };
    Ok(tensors.iter().filter_map(parameter).collect())
}

/// No file has a longer description of its tensors.
const MOST_HEADER: u64 = 100_000_000;

/// Parses shapes such as `64x3x7x7,1000x512,1000`.
fn of_shapes(text: &str) -> Result<Vec<Parameter>> {
    let shape = |(number, shape): (usize, &str)| {
        let sizes: Result<Vec<usize>, _> = shape.split('x').map(str::parse).collect();
        let sizes = sizes.ok().filter(|sizes| sizes.iter().all(|size| *size > 0));
        let sizes = sizes.with_context(|| format!("a layer of shape `{shape}`: write it like 4096x2048"))?;
        Ok(Parameter::new(format!("layer {number}"), &sizes))
    };
    text.split(',').map(str::trim).enumerate().map(shape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATIOS: Ratios = Ratios { conv: 50.0, matrix: 250.0 };

    #[test]
    fn shapes_and_recipes_are_read() {
        let model = Model::read("1000x1000,64x64x5x5,1000", RATIOS).unwrap();
        assert_eq!(model.elements, 1e6 + 102_400.0 + 1000.0);
        assert_eq!((model.in_large_bins, model.in_small_bins, model.dense), (1e6, 102_400.0, 4000.0));
        assert!((model.selection - (16_000.0 + 8192.0)).abs() < 1e-6);
        assert_eq!(Model::read("resnet18", RATIOS).unwrap().elements, 11_173_962.0);
        for bad in ["nothing", "0x3", "3x", "3xx4", "3,,4"] {
            assert!(Model::read(bad, RATIOS).is_err(), "{bad}");
        }
    }

    #[test]
    fn all_learners_together_select_no_more_than_there_is() {
        let model = Model::read("1000x1000", RATIOS).unwrap();
        assert!(model.union(1.0) > 0.99 && model.union(10_000.0) * model.selected <= 1e6);
    }
}
