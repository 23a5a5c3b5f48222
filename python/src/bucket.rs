//! Buckets: gradients that PyTorch hands over together, one after the other in memory.

use crate::buffers::Floats;
use crate::refused;
use adacomp::Layout;
use adacomp_exchange::GroupAverage;
use pyo3::prelude::*;
use std::ops::Range;

/// Layers and the part of a bucket that each of them has, by ascending layer.
pub(crate) type Parts = Vec<(usize, Range<usize>)>;

/// A bucket, and the part of it that each of its layers has, by ascending layer.
pub(crate) struct Bucket {
    pub(crate) values: Floats,
    pub(crate) parts: Parts,
}

impl Bucket {
    /// Returns a bucket of the gradients of these layers, one after the other.
    pub(crate) fn new(values: Floats, layout: &Layout, layers: &[usize]) -> PyResult<Self> {
        let parts = parts(layout, layers)?;
        let (actual, expected) = (values.len(), parts.iter().map(|(_, part)| part.len()).sum::<usize>());
        if actual != expected {
            return Err(refused(format!("a bucket of {actual} elements, expected {expected}")));
        }
        Ok(Self { values, parts })
    }

    /// Writes the average of the bucket's group. Returns whether it fits the bucket's format.
    pub(crate) fn write(
        &mut self,
        average: GroupAverage<'_>,
        loss_scale: f32,
        scratch: &mut Vec<f32>,
    ) -> bool {
        let all = 0..self.values.len();
        // By place in the bucket, to cut it into slices, then by layer, as the group has them.
        let mut by_place: Vec<_> = self.parts.iter().cloned().enumerate().collect();
        by_place.sort_by_key(|(_, (_, part))| part.start);
        let fits = self.values.write(all.clone(), scratch, |mut rest| {
            let mut slices: Vec<(usize, &mut [f32])> = Vec::new();
            for (position, (_, part)) in &by_place {
                let (slice, after) = rest.split_at_mut(part.len());
                slices.push((*position, slice));
                rest = after;
            }
            slices.sort_by_key(|(position, _)| *position);
            let mut slices: Vec<&mut [f32]> = slices.into_iter().map(|(_, slice)| slice).collect();
            average.write(&mut slices);
            if loss_scale != 1.0 {
                slices.iter_mut().flat_map(|slice| slice.iter_mut()).for_each(|value| *value *= loss_scale);
            }
        });
        fits && (loss_scale == 1.0 || self.values.gradient(all).is_finite())
    }
}

/// Returns the parts of a bucket of these layers, which are in the bucket's order.
pub(crate) fn parts(layout: &Layout, layers: &[usize]) -> PyResult<Parts> {
    let mut start = 0;
    let part = |&layer: &usize| {
        check_layer(layout, layer)?;
        let end = start + layout[layer].elements();
        Ok((layer, std::mem::replace(&mut start, end)..end))
    };
    let mut parts = layers.iter().map(part).collect::<PyResult<Parts>>()?;
    parts.sort_by_key(|(layer, _)| *layer);
    if parts.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(refused("a parameter is twice in a bucket"));
    }
    Ok(parts)
}

/// Returns the layers that have these parts.
pub(crate) fn layers(parts: &Parts) -> Vec<usize> {
    parts.iter().map(|(layer, _)| *layer).collect()
}

pub(crate) fn check_layer(layout: &Layout, layer: usize) -> PyResult<()> {
    if layer < layout.len() { Ok(()) } else { Err(refused(format!("layer {layer} of {}", layout.len()))) }
}
