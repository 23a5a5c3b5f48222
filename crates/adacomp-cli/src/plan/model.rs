//! What learners have to exchange of a model.

use crate::models::Network;
use crate::recipes::{RECIPES, Recipe};
use adacomp::{Parameter, Policy, Treatment};
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

/// What learners have to exchange in a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Layers in all.
    pub(super) layers: f64,
}

/// Bins from this size on are large: the kernel is faster there.
const LARGE_BIN: u32 = 100;

/// Bits on top of the entropy of its position that a selected element takes: its sign, and what codes lose.
const EXTRA_BITS: f64 = 2.4;

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
            layers: layout.len() as f64,
        };
        for layer in layout.layers() {
            let elements = layer.elements() as f64;
            let Treatment::Bins(bin) = layer.treatment else {
                model.dense += 4.0 * elements;
                continue;
            };
            let ratio = if bin < LARGE_BIN { ratios.conv } else { ratios.matrix };
            *(if bin < LARGE_BIN { &mut model.in_small_bins } else { &mut model.in_large_bins }) += elements;
            model.selected += elements * density(32.0 / ratio);
            model.selection += 4.0 * elements / ratio;
        }
        Ok(model)
    }

    /// Returns the selected elements that all learners have together, as a multiple of those of one.
    pub(super) fn union(&self, learners: f64) -> f64 {
        match self.density() {
            0.0 => 1.0,
            density => (1.0 - (-learners * density).exp()) / density,
        }
    }

    /// Returns the bytes of the sums of all learners' signs.
    pub(super) fn sums(&self, learners: f64) -> f64 {
        match self.density() {
            0.0 => 0.0,
            density => self.selection * entropy_of_sum(learners * density) / entropy_of_sum(density),
        }
    }

    fn density(&self) -> f64 {
        let compressed = self.in_large_bins + self.in_small_bins;
        if compressed == 0.0 { 0.0 } else { self.selected / compressed }
    }
}

/// Returns the share of elements that is selected if an element takes this number of bits, on average over all.
fn density(bits: f64) -> f64 {
    let mut density: f64 = 0.01;
    for _ in 0..50 {
        density = (bits / ((1.0 / density).log2() + EXTRA_BITS)).clamp(1e-9, 0.5);
    }
    density
}

/// Returns the bits of the sum of random signs, of which there is this number on average.
fn entropy_of_sum(signs: f64) -> f64 {
    // From there on it is a bell curve.
    if signs > 30.0 {
        return 0.5 * (2.0 * std::f64::consts::PI * std::f64::consts::E * signs).log2();
    }
    let most = (signs + 12.0 * signs.sqrt() + 20.0) as usize;
    // How likely each sum is, by the number of signs: first for one sign less, then for one more.
    let mut chances = vec![0.0; 2 * most + 1];
    let mut given = vec![0.0; 2 * most + 3];
    given[most + 1] = 1.0;
    let mut poisson = (-signs).exp();
    for count in 0..=most {
        chances.iter_mut().zip(&given[1..]).for_each(|(chance, given)| *chance += poisson * given);
        poisson *= signs / (count + 1) as f64;
        let before = given.clone();
        for sum in 1..given.len() - 1 {
            given[sum] = 0.5 * (before[sum - 1] + before[sum + 1]);
        }
    }
    chances.iter().filter(|chance| **chance > 0.0).map(|chance| -chance * chance.log2()).sum()
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

    /// A ratio and the elements that are selected belong together as in the format on the wire.
    #[test]
    fn density_follows_from_bytes() {
        for selected in [0.002, 0.01, 0.05] {
            let elements = 1 << 20;
            let mut random = fastrand::Rng::with_seed(1);
            let chosen: Vec<u32> = (0..elements).filter(|_| random.f64() < selected).collect();
            let chosen = chosen.into_iter().map(|index| adacomp::Selected::new(index, random.bool()));
            let chosen: Vec<_> = chosen.collect();
            let mut bytes = Vec::new();
            adacomp::internal::encode_range(&chosen, 0..elements as usize, &mut bytes);
            let estimate = density(8.0 * bytes.len() as f64 / f64::from(elements));
            assert!((estimate / selected - 1.0).abs() < 0.1, "{selected}: {estimate}");
        }
    }

    #[test]
    fn sums_grow_with_the_logarithm() {
        // One rare sign: its entropy. Many: a bell curve's, and both meet.
        let rare: f64 = 0.001;
        let exact = -(1.0 - rare) * (1.0 - rare).log2() - rare * (rare / 2.0).log2();
        assert!((entropy_of_sum(rare) / exact - 1.0).abs() < 0.01);
        assert!((entropy_of_sum(29.99) / entropy_of_sum(30.01) - 1.0).abs() < 0.01);
        let model = Model::read("1000x1000", RATIOS).unwrap();
        assert!((model.sums(1.0) / model.selection - 1.0).abs() < 1e-9);
        assert!(model.sums(100.0) < 40.0 * model.selection);
        assert!(model.union(1.0) > 0.99 && model.union(10_000.0) * model.selected <= 1e6);
    }
}
