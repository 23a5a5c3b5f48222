//! Buckets: gradients that PyTorch hands over together, one after the other in memory.

use crate::buffers::Floats;
use crate::refused;
use adacomp::Layout;
use adacomp_exchange::GroupAverage;
use pyo3::prelude::*;
use std::ops::Range;

/// A bucket, and the part of it that each of its layers has, in the bucket's order.
pub(crate) struct Bucket {
    pub(crate) values: Floats,
    pub(crate) parts: Vec<(usize, Range<usize>)>,
}

impl Bucket {
    /// Returns a bucket of the gradients of these layers, one after the other.
    pub(crate) fn new(values: Floats, layout: &Layout, layers: &[usize]) -> PyResult<Self> {
        let mut parts = Vec::new();
        let mut end = 0;
        for &layer in layers {
            check_layer(layout, layer)?;
            let start = end;
            end += layout[layer].elements();
            parts.push((layer, start..end));
        }
        if values.len() != end {
            return Err(refused(format!("a bucket of {} elements, expected {end}", values.len())));
        }
        if !values.is_flat() {
            return Err(refused("a bucket of several dimensions, expected one; use numpy.ravel"));
        }
        Ok(Self { values, parts })
    }

    /// Returns its layers in ascending order, as groups have them.
    pub(crate) fn layers(&self) -> Vec<usize> {
        let mut layers: Vec<usize> = self.parts.iter().map(|(layer, _)| *layer).collect();
        layers.sort();
        layers
    }

    /// Writes the average of the bucket's group. Returns whether it fits the bucket's format.
    pub(crate) fn write(
        &mut self,
        average: GroupAverage<'_>,
        loss_scale: f32,
        scratch: &mut Vec<f32>,
    ) -> bool {
        let fits = self.values.write(0..self.values.len(), scratch, |mut rest| {
            let mut slices: Vec<(usize, &mut [f32])> = Vec::new();
            for (layer, part) in &self.parts {
                let (slice, after) = rest.split_at_mut(part.len());
                slices.push((*layer, slice));
                rest = after;
            }
            slices.sort_by_key(|(layer, _)| *layer);
            let mut slices: Vec<&mut [f32]> = slices.into_iter().map(|(_, slice)| slice).collect();
            average.write(&mut slices);
            if loss_scale != 1.0 {
                slices.iter_mut().flat_map(|slice| slice.iter_mut()).for_each(|value| *value *= loss_scale);
            }
        });
        fits && (loss_scale == 1.0 || self.values.all().is_finite())
    }
}

pub(crate) fn check_layer(layout: &Layout, layer: usize) -> PyResult<()> {
    if layer < layout.len() { Ok(()) } else { Err(refused(format!("layer {layer} of {}", layout.len()))) }
}
