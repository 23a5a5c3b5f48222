//! Compresses a model's gradients on one learner, step by step, and keeps the residuals.

use crate::error::CompressError;
use crate::gradient::Gradient;
use crate::kernel::{Kernel, largest};
use crate::packet::{Packet, Selected, ascend_within};
use crate::policy::{Layer, Layout, Treatment, check_ascending};
use crate::residual::{Residual, ResidualStatistics};
use crate::selection::{Rule, Scratch};
use crate::wire::{Codec, FrameWriter, Header};
use half::f16;
use std::sync::Arc;

/// Compresses the gradients of one model on one learner, and keeps what was not sent.
///
/// The first gradient begins a step. Once every learner has the frames, the step is committed; otherwise it is rolled back.
/// Until then what was selected is pending. A rollback leaves it in the residual, so it is delayed and not lost. Dense
/// layers have no residual: their gradients of a step that is rolled back are gone, as they are without compression.
#[derive(Debug, Clone)]
pub struct Compressor {
    layout: Arc<Layout>,
    layers: Vec<LayerState>,
    kernel: Kernel,
    threads: usize,
    inverse_loss_scale: f32,
    skip_unused: bool,
    scratch: Scratch,
    open: bool,
}

#[derive(Debug, Clone)]
struct LayerState {
    /// What was not sent; None for a dense layer.
    residual: Option<Residual>,
    /// The values of a dense layer, within a step.
    dense: Vec<f32>,
    compressed: bool,
    statistics: LayerStatistics,
}

impl LayerState {
    /// Returns whether its gradient in the open step is not finite.
    fn is_bad(&self) -> bool {
        self.compressed && self.statistics.bad_bins > 0
    }
}

/// How much of the gradient a step sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sending {
    /// What the policy says.
    #[default]
    Compressed,
    /// All of it in f32, with the residual added, which a commit then clears: for dense steps between compressed ones.
    Flush,
}

/// What one layer sent in one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerStatistics {
    /// Elements of the layer.
    pub elements: usize,
    /// Elements sent.
    pub selected: usize,
    /// Bytes of its section in the last frame; 0 before it is encoded.
    pub bytes: usize,
    /// What a selected positive element is sent as: AdaComp's scale. 0 for a dense layer.
    pub scale: f32,
    /// Bins whose gradient is not finite; a dense layer counts as one bin.
    pub bad_bins: usize,
}

impl Compressor {
    /// Creates a compressor with empty residuals. Each learner has one; all share the layout.
    pub fn new(layout: impl Into<Arc<Layout>>) -> Self {
        let layout = layout.into();
        let state = |layer: &Layer| LayerState {
            residual: layer.treatment.selects().then(|| Residual::new(layer.elements())),
            dense: Vec::new(),
            compressed: false,
            statistics: LayerStatistics { elements: layer.elements(), ..Default::default() },
        };
        Self {
            layers: layout.layers().iter().map(state).collect(),
            layout,
            kernel: Kernel::best(),
            threads: 1,
            inverse_loss_scale: 1.0,
            skip_unused: false,
            scratch: Scratch::default(),
            open: false,
        }
    }

    /// Returns a compressor with the same settings and empty residuals.
    pub fn emptied(&self) -> Self {
        let Self { kernel, threads, inverse_loss_scale, skip_unused, .. } = *self;
        Self { kernel, threads, inverse_loss_scale, skip_unused, ..Self::new(self.layout.clone()) }
    }

    /// Uses this kernel instead of the fastest: for tests and benchmarks.
    pub fn with_kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Lets large tensors use up to `threads` threads. The result is the same to the bit.
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Multiplies all gradients by this from now on, before anything else: 1 / loss scale in mixed-precision training. So
    /// residuals do not depend on the loss scale.
    pub fn set_inverse_loss_scale(&mut self, scale: f32) -> Result<(), CompressError> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(CompressError::LossScale { scale });
        }
        self.inverse_loss_scale = scale;
        Ok(())
    }

    /// Sends nothing for layers whose gradient is zero everywhere, where AdaComp would send from their residual. This is for
    /// DDP, which does not give the average to parameters that no learner used: what such a parameter sent would be lost.
    pub fn set_skip_unused(&mut self, skip: bool) {
        self.skip_unused = skip;
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Goes on with bins of other lengths, and with all that waits. All else of the layout must be as before.
    pub fn set_layout(&mut self, layout: impl Into<Arc<Layout>>) -> Result<(), CompressError> {
        let layout = layout.into();
        if self.open {
            return Err(CompressError::Open);
        }
        let fails = |what: &str| Err(CompressError::Layout { what: what.to_owned() });
        if layout.len() != self.layout.len() {
            return fails("the number of layers");
        }
        if (layout.soft_threshold(), layout.scale()) != (self.layout.soft_threshold(), self.layout.scale()) {
            return fails("the soft threshold and the way of scales");
        }
        for (layer, before) in layout.layers().iter().zip(self.layout.layers()) {
            let is_binned = |layer: &Layer| matches!(layer.treatment, Treatment::Bins(_));
            let same_treatment = layer.treatment == before.treatment || is_binned(layer) && is_binned(before);
            if layer.parameter != before.parameter || !same_treatment {
                return fails(&format!("parameter `{}`", before.name()));
            }
        }
        self.layout = layout;
        Ok(())
    }

    /// Compresses the gradients of all parameters, in any order. Everything is checked before anything is changed.
    pub fn compress(&mut self, gradients: &[(&str, Gradient<'_>)]) -> Result<(), CompressError> {
        if self.open {
            return Err(CompressError::Open);
        }
        // `compressed` is false everywhere while no step is open, so it can mark what has been seen.
        let checked = self.check_all(gradients);
        self.layers.iter_mut().for_each(|layer| layer.compressed = false);
        checked?;
        for &(name, gradient) in gradients {
            if let Some(layer) = self.layout.number(name) {
                self.compress_layer(layer, gradient, Sending::Compressed)?;
            }
        }
        self.open = true;
        Ok(())
    }

    fn check_all(&mut self, gradients: &[(&str, Gradient<'_>)]) -> Result<(), CompressError> {
        for &(name, gradient) in gradients {
            let layer = self
                .layout
                .number(name)
                .ok_or_else(|| CompressError::Unknown { parameter: name.to_owned() })?;
            self.check_layer(layer, gradient)?;
            self.layers[layer].compressed = true;
        }
        self.check_compressed(self.layout.all())
    }

    /// Compresses one layer, by its number in the layout, as soon as the backward pass has its gradient. The first layer
    /// opens the step.
    ///
    /// Where memory is shared with other languages, nothing may change the gradient meanwhile. If something does, what is sent is
    /// undefined, and a NaN that came into the residual makes the next step not finite and is then set to 0.
    pub fn compress_layer(
        &mut self,
        layer: usize,
        gradient: Gradient<'_>,
        sending: Sending,
    ) -> Result<(), CompressError> {
        self.check_layer(layer, gradient)?;
        self.open = true;
        let Self { layout, layers, scratch, .. } = self;
        let state = &mut layers[layer];
        let factor = self.inverse_loss_scale;
        let skip = self.skip_unused && sending == Sending::Compressed && gradient.is_zero();
        let bad_bins = match (layout[layer].treatment, &mut state.residual) {
            (_, Some(residual)) if skip => {
                residual.take_selection(0.0, &[]);
                0
            }
            (Treatment::Bins(bin), Some(residual)) => {
                let rule = Rule {
                    bin: bin as usize,
                    soft_threshold: layout.soft_threshold(),
                    scale: layout.scale(),
                    factor,
                    kernel: self.kernel,
                    threads: self.threads,
                };
                residual.select_bins(gradient, rule, scratch)
            }
            (Treatment::TopK(percent), Some(residual)) => {
                residual.select_top(gradient, factor, percent, scratch)
            }
            (treatment, _) => {
                let values = &mut state.dense;
                values.clear();
                values.extend_from_slice(gradient.read(0..gradient.len(), factor, &mut scratch.converted));
                if treatment == Treatment::Half {
                    values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32());
                }
                usize::from(!values.iter().all(|value| value.is_finite()))
            }
        };
        // Selected first also in a flush, so that a gradient that is not finite harms its bin only.
        if let (Sending::Flush, Some(residual)) = (sending, &mut state.residual) {
            residual.flush();
        }
        self.note_compressed(layer, bad_bins);
        Ok(())
    }

    /// Takes a selection that another device made by the same rule from a gradient and residual that it keeps: the bin
    /// maxima, with NaN for a bin that is not finite, and the selected elements in ascending order. The residual here is not
    /// changed. Once the step is committed, the device subtracts what was sent, with the scale that
    /// [`Compressor::layer_statistics`] then has.
    pub fn take_selection(
        &mut self,
        layer: usize,
        maxima: &[f32],
        selected: &[Selected],
    ) -> Result<(), CompressError> {
        let state = self.not_submitted(layer)?;
        let parameter = || self.layout[layer].name().to_owned();
        let elements = state.statistics.elements;
        let Treatment::Bins(bin) = self.layout[layer].treatment else {
            return Err(CompressError::Treatment { parameter: parameter(), expected: "compressed by bins" });
        };
        let (what, expected, actual) = ("bin maxima", elements.div_ceil(bin as usize), maxima.len());
        if expected != actual {
            return Err(CompressError::Length { parameter: parameter(), what, expected, actual });
        }
        if let Some(&maximum) = maxima.iter().find(|maximum| maximum.is_infinite() || **maximum < 0.0) {
            return Err(CompressError::Maximum { parameter: parameter(), maximum });
        }
        if !ascend_within(selected, 0..elements) {
            return Err(CompressError::Selection { parameter: parameter() });
        }
        self.open = true;
        let (scale, bad_bins) = self.layout.scale().of(maxima, &mut self.scratch.sorted);
        if let Some(residual) = &mut self.layers[layer].residual {
            residual.take_selection(scale, selected);
        }
        self.note_compressed(layer, bad_bins);
        Ok(())
    }

    fn note_compressed(&mut self, layer: usize, bad_bins: usize) {
        let state = &mut self.layers[layer];
        state.compressed = true;
        state.statistics.bad_bins = bad_bins;
        state.statistics.bytes = 0;
        let (selected, scale) = match self.packet(layer) {
            Some(Packet::Sparse(sparse)) => (sparse.selected.len(), sparse.values[0]),
            Some(Packet::Dense(values)) => (values.len(), 0.0),
            None => (0, 0.0),
        };
        let statistics = &mut self.layers[layer].statistics;
        (statistics.selected, statistics.scale) = (selected, scale);
    }

    /// Returns a layer that the open step does not have yet.
    fn not_submitted(&self, layer: usize) -> Result<&LayerState, CompressError> {
        match self.layers.get(layer) {
            None => Err(CompressError::Layer { layer, count: self.layers.len() }),
            Some(state) if state.compressed => {
                Err(CompressError::Twice { parameter: self.layout[layer].name().to_owned() })
            }
            Some(state) => Ok(state),
        }
    }

    fn check_layer(&self, layer: usize, gradient: Gradient<'_>) -> Result<(), CompressError> {
        let (expected, actual) = (self.not_submitted(layer)?.statistics.elements, gradient.len());
        if actual != expected {
            let (parameter, what) = (self.layout[layer].name().to_owned(), "a gradient");
            return Err(CompressError::Length { parameter, what, expected, actual });
        }
        Ok(())
    }

    fn check_compressed(&self, layers: &[usize]) -> Result<(), CompressError> {
        let missing = layers.iter().filter(|&&layer| !self.layers[layer].compressed);
        let parameters: Vec<_> = missing.map(|&layer| self.layout[layer].name().to_owned()).collect();
        if parameters.is_empty() { Ok(()) } else { Err(CompressError::Missing { parameters }) }
    }

    /// Returns what a layer sends in the open step; None before it is compressed.
    pub fn packet(&self, layer: usize) -> Option<Packet<'_>> {
        let LayerState { residual, dense, compressed, .. } = &self.layers[layer];
        match residual {
            Some(residual) => residual.packet(),
            None => compressed.then_some(Packet::Dense(dense)),
        }
    }

    /// Sets the scale of a layer of bins in the open step to one that all learners have agreed on.
    ///
    /// # Panics
    /// If there is no such layer. So does every method that takes a layer's number and returns no error for it.
    pub fn set_scale(&mut self, layer: usize, scale: f32) -> Result<(), CompressError> {
        let Layer { parameter, treatment } = &self.layout[layer];
        if !(scale.is_finite() && scale.is_sign_positive()) {
            return Err(CompressError::Scale { parameter: parameter.name.clone(), scale });
        }
        let LayerState { residual, statistics, .. } = &mut self.layers[layer];
        match (treatment, residual) {
            (Treatment::Bins(_), Some(residual)) if residual.has_selection() => {
                residual.set_scale(scale);
                statistics.scale = scale;
                Ok(())
            }
            _ => Err(CompressError::NoSelection { parameter: parameter.name.clone() }),
        }
    }

    /// Lets no more than `most` count of each value that a layer sends in the open step, as all learners have agreed on. What is
    /// beyond stays in the residual; of a layer without one it is gone.
    ///
    /// # Panics
    /// If `most` is negative or NaN, or there is no such layer.
    pub fn clamp_sent(&mut self, layer: usize, most: f32) {
        assert!(most >= 0.0, "values clamped to {most}");
        let LayerState { residual, statistics, compressed, .. } = &mut self.layers[layer];
        if let (true, Some(residual)) = (*compressed, residual) {
            residual.clamp(most);
            statistics.scale = statistics.scale.min(most);
        }
    }

    /// Returns whether every gradient of the open step so far is finite. If not, the frame says so in place of the
    /// gradients, and all learners roll the step back.
    pub fn is_finite(&self) -> bool {
        !self.layers.iter().any(LayerState::is_bad)
    }

    /// Ends a step that every learner has: what was sent leaves the residual. Layers that were not compressed in it keep
    /// their residual.
    pub fn commit(&mut self) -> Result<(), CompressError> {
        if !self.open {
            return Err(CompressError::NotOpen);
        }
        let bad = self.layout.layers().iter().zip(&self.layers).filter(|(_, state)| state.is_bad());
        let parameters: Vec<_> = bad.map(|(layer, _)| layer.name().to_owned()).collect();
        if !parameters.is_empty() {
            return Err(CompressError::NonFinite { parameters });
        }
        self.close(Residual::commit);
        Ok(())
    }

    /// Ends a step that is used nowhere: what was selected stays in the residual. In a bin whose gradient is not finite the
    /// residual is what it was before the step.
    pub fn rollback(&mut self) {
        self.close(Residual::rollback);
    }

    fn close(&mut self, end: impl Fn(&mut Residual)) {
        for layer in &mut self.layers {
            layer.residual.iter_mut().for_each(&end);
            layer.compressed = false;
        }
        self.scratch.end_step();
        self.open = false;
    }

    /// Returns whether a step is open.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Returns what one layer sent in the last step.
    pub fn layer_statistics(&self, layer: usize) -> LayerStatistics {
        self.layers[layer].statistics
    }

    /// Writes the open step as a frame. What was in `frame` is overwritten.
    pub fn encode(
        &mut self,
        codec: Codec,
        learner: usize,
        step: u64,
        frame: &mut Vec<u8>,
    ) -> Result<(), CompressError> {
        let layout = self.layout.clone();
        self.encode_layers(codec, learner, step, layout.all(), frame)
    }

    /// Writes some layers of the open step as a frame of their own. Their numbers must ascend.
    pub fn encode_layers(
        &mut self,
        codec: Codec,
        learner: usize,
        step: u64,
        layers: &[usize],
        frame: &mut Vec<u8>,
    ) -> Result<(), CompressError> {
        check_ascending(&self.layout, layers)?;
        if !self.open {
            return Err(CompressError::NotOpen);
        }
        if u32::try_from(learner).is_err() {
            return Err(CompressError::Learner { learner });
        }
        self.check_compressed(layers)?;
        let non_finite = layers.iter().any(|&layer| self.layers[layer].is_bad());
        let fingerprint = self.layout.fingerprint();
        let header = Header { codec, non_finite, fingerprint, step, learner };
        let mut writer = FrameWriter::new(&header, &self.layout, frame);
        if !non_finite {
            for &layer in layers {
                if let Some(packet) = self.packet(layer) {
                    self.layers[layer].statistics.bytes = writer.own_section(layer, packet);
                }
            }
        }
        writer.finish();
        Ok(())
    }

    /// Returns what a layer selected in the last committed step, to measure it with [`crate::section_bytes`]. None if it
    /// selected nothing, another device did, or its residual was read since.
    pub fn last_packet(&self, layer: usize) -> Option<Packet<'_>> {
        self.layers[layer].residual.as_ref()?.last_sent()
    }

    /// Returns a layer's residual; None for a dense layer. While a step is open, what the step sends is still in it.
    pub fn residual(&mut self, layer: usize) -> Option<&[f32]> {
        self.layers[layer].residual.as_mut().map(|residual| &*residual.subtracted())
    }

    /// Replaces a layer's residual by values that were kept elsewhere. All must be finite: with a NaN in its residual every step of
    /// the layer would be.
    ///
    /// # Panics
    /// If the layer has no residual, or a step is open.
    pub fn set_residual(&mut self, layer: usize, values: &[f32]) -> Result<(), CompressError> {
        let parameter = || self.layout[layer].name().to_owned();
        let (what, expected, actual) = ("a residual", self.layout[layer].elements(), values.len());
        if expected != actual {
            return Err(CompressError::Length { parameter: parameter(), what, expected, actual });
        }
        if !largest(values.iter().copied()).is_finite() {
            return Err(CompressError::Residual { parameter: parameter() });
        }
        self.residual_mut(layer).copy_from_slice(values);
        Ok(())
    }

    /// Returns a layer's residual, to change it in place. What is written must be finite.
    ///
    /// # Panics
    /// If the layer has no residual, or a step is open.
    #[doc(hidden)]
    pub fn residual_mut(&mut self, layer: usize) -> &mut [f32] {
        assert!(!self.open, "a step is open");
        self.layers[layer].residual.as_mut().expect("a layer with a residual").subtracted()
    }

    /// Multiplies all residuals by a factor between steps, so that what is never sent is forgotten. With 1 nothing changes.
    pub fn decay(&mut self, factor: f32) -> Result<(), CompressError> {
        if !(0.0..=1.0).contains(&factor) {
            return Err(CompressError::Decay { factor });
        }
        if self.open {
            return Err(CompressError::Open);
        }
        if factor < 1.0 {
            let residuals = self.layers.iter_mut().filter_map(|layer| layer.residual.as_mut());
            residuals.flat_map(Residual::subtracted).for_each(|value| *value *= factor);
        }
        Ok(())
    }

    /// Returns the residuals and the numbers of their layers.
    #[cfg(feature = "state")]
    pub(crate) fn residuals(&mut self) -> impl Iterator<Item = (usize, &mut [f32])> {
        let layers = self.layers.iter_mut().enumerate();
        layers.filter_map(|(number, layer)| Some((number, layer.residual.as_mut()?.subtracted())))
    }

    /// Returns the size of a layer's residual. It takes a pass over memory, so sample it.
    pub fn residual_statistics(&mut self, layer: usize) -> Option<ResidualStatistics> {
        self.residual(layer).map(ResidualStatistics::of)
    }
}
