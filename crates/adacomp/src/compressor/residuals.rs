//! What layers keep, to look at and to change between steps.

use super::Compressor;
use crate::statistics::ResidualStatistics;

impl Compressor {
    /// A layer's residual, while a step is open with what the step would send still in it; nothing for a layer that is sent
    /// whole.
    pub fn residual(&mut self, layer: usize) -> Option<&[f32]> {
        self.layers[layer].store.residual_mut().map(|residual| &*residual.subtracted())
    }

    /// Adds to a layer's residual from an element on: what was kept elsewhere.
    ///
    /// # Panics
    /// If the layer has no residual or too few elements, or a step is open.
    pub fn add_to_residual(&mut self, layer: usize, start: usize, values: &[f32]) {
        assert!(!self.open, "a step is open");
        let residual = self.layers[layer].store.residual_mut().expect("a layer with a residual").subtracted();
        residual[start..start + values.len()].iter_mut().zip(values).for_each(|(r, value)| *r += value);
    }

    /// Has a layer's residual be this: what was kept elsewhere.
    ///
    /// # Panics
    /// If the layer has no residual or another number of elements, or a step is open.
    pub fn set_residual(&mut self, layer: usize, values: &[f32]) {
        assert!(!self.open, "a step is open");
        let residual = self.layers[layer].store.residual_mut().expect("a layer with a residual").subtracted();
        residual.copy_from_slice(values);
    }

    /// The numbers of the layers that have residuals, and these.
    pub(crate) fn residuals(&mut self) -> impl Iterator<Item = (usize, &mut [f32])> {
        self.layers
            .iter_mut()
            .enumerate()
            .filter_map(|(number, layer)| Some((number, layer.store.residual_mut()?.subtracted())))
    }

    /// The size of a layer's residual: a pass over memory, so sample it.
    pub fn residual_statistics(&mut self, layer: usize) -> Option<ResidualStatistics> {
        self.residual(layer).map(ResidualStatistics::of)
    }
}
