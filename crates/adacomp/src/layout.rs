//! The layers of one model under one policy: what all learners must agree on.

use crate::error::{CompressError, PolicyError};
use crate::policy::{Parameter, Treatment};
use crate::scale::Scale;
use std::collections::HashMap;

/// Elements a layer may have: its bytes in f32 have a length of 32 bits on the wire.
pub const MAX_ELEMENTS: usize = (1 << 30) - 1;

/// One parameter and its treatment.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The parameter.
    pub parameter: Parameter,
    /// How its gradient travels.
    pub treatment: Treatment,
}

impl Layer {
    /// The parameter's name.
    pub fn name(&self) -> &str {
        &self.parameter.name
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.parameter.elements()
    }
}

/// All layers of a model, in an order that every learner shares. Indexing gives a [`Layer`].
#[derive(Debug, Clone)]
pub struct Layout {
    layers: Vec<Layer>,
    by_name: HashMap<String, usize>,
    soft_threshold: f32,
    scale: Scale,
    fingerprint: u64,
}

impl Layout {
    /// A layout of given treatments. Most often it comes from [`crate::Policy::layout`].
    pub fn new(layers: Vec<Layer>, soft_threshold: f32) -> Result<Self, PolicyError> {
        if !(soft_threshold.is_finite() && soft_threshold >= 1.0) {
            return Err(PolicyError::SoftThreshold { factor: soft_threshold });
        }
        let mut by_name = HashMap::with_capacity(layers.len());
        for (number, layer) in layers.iter().enumerate() {
            layer.treatment.check(&layer.parameter)?;
            if layer.elements() > MAX_ELEMENTS {
                let parameter = layer.name().to_owned();
                return Err(PolicyError::TooLong {
                    parameter,
                    elements: layer.elements(),
                    most: MAX_ELEMENTS,
                });
            }
            if by_name.insert(layer.name().to_owned(), number).is_some() {
                return Err(PolicyError::Twice { parameter: layer.name().to_owned() });
            }
        }
        let scale = Scale::default();
        let fingerprint = fingerprint(&layers, soft_threshold, scale);
        Ok(Self { layers, by_name, soft_threshold, scale, fingerprint })
    }

    /// The same with another scale.
    pub fn with_scale(self, scale: Scale) -> Self {
        let fingerprint = fingerprint(&self.layers, self.soft_threshold, scale);
        Self { scale, fingerprint, ..self }
    }

    /// The layers, in order.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The number of the layer of this name.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The elements of all layers.
    pub fn elements(&self) -> usize {
        self.layers.iter().map(Layer::elements).sum()
    }

    /// The soft-threshold factor `f`.
    pub fn soft_threshold(&self) -> f32 {
        self.soft_threshold
    }

    /// What selected elements are sent as.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// A number that differs when names, shapes, order, treatments, the soft threshold or the scale differ.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

impl std::ops::Index<usize> for Layout {
    type Output = Layer;

    fn index(&self, number: usize) -> &Layer {
        &self.layers[number]
    }
}

/// Refuses layer numbers that do not ascend, or that no layer has.
pub fn check_ascending(layout: &Layout, layers: &[usize]) -> Result<(), CompressError> {
    if layers.is_sorted_by(|a, b| a < b) && layers.last().is_none_or(|&last| last < layout.len()) {
        return Ok(());
    }
    Err(CompressError::Layers { layers: layers.to_vec(), count: layout.len() })
}

/// FNV-1a over everything that must agree, each part with its length so that no two layouts read alike.
fn fingerprint(layers: &[Layer], soft_threshold: f32, scale: Scale) -> u64 {
    let mut hash = Fnv1a(0xcbf2_9ce4_8422_2325);
    match scale {
        // As before there was another.
        Scale::Mean => {}
        Scale::Clamped => hash.add(b"clamped"),
    }
    hash.add(&soft_threshold.to_le_bytes());
    hash.number(layers.len());
    for Layer { parameter, treatment } in layers {
        hash.number(parameter.name.len());
        hash.add(parameter.name.as_bytes());
        hash.number(parameter.shape.len());
        parameter.shape.iter().for_each(|&dimension| hash.number(dimension));
        let (tag, value) = match treatment {
            Treatment::Bins(bin) => (1, *bin),
            Treatment::Dense => (2, 0),
            Treatment::Half => (3, 0),
            Treatment::TopK(percent) => (4, percent.to_bits()),
        };
        hash.add(&[tag]);
        hash.add(&value.to_le_bytes());
    }
    hash.0
}

struct Fnv1a(u64);

impl Fnv1a {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn number(&mut self, number: usize) {
        self.add(&(number as u64).to_le_bytes());
    }
}
