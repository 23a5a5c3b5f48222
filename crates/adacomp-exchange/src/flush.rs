//! Steps in which gradients travel whole and by other means: a dense all-reduce that a framework has already.
//!
//! Going from selected to dense gradients must lose nothing, so in the first such step what was kept goes along.

use crate::error::ExchangeError;
use crate::protocol::Protocol;
use crate::shares::share;
use adacomp::{CompressError, Gradient, Packet, Sending};

impl Protocol {
    /// All that a learner has of a layer that is compressed: its gradient, its residual and, because the sum over learners will be
    /// divided by their number, so many times what it keeps as an owner. Whether it is finite; if not, nothing is written. The step
    /// is open from then on, and [`Protocol::end_elsewhere`] ends it. For a layer that is sent whole in any case it is an error.
    pub fn flush(
        &mut self,
        learner: usize,
        layer: usize,
        gradient: Gradient<'_>,
        output: &mut [f32],
    ) -> Result<bool, ExchangeError> {
        let (layout, learners) = (self.layout().clone(), self.learners());
        let unknown = || CompressError::Unknown { parameter: format!("of learner {learner}") };
        let compressor = self.compressor(learner).ok_or_else(unknown)?;
        if !layout.layers().get(layer).is_some_and(|layer| layer.treatment.selects()) {
            return Err(
                CompressError::Unknown { parameter: format!("number {layer} with a residual") }.into()
            );
        }
        compressor.compress_layer(layer, gradient, Sending::Flush)?;
        if compressor.layer_statistics(layer).bad_bins > 0 {
            return Ok(false);
        }
        if let Some(Packet::Dense(values)) = compressor.packet(layer) {
            output.copy_from_slice(values);
        }
        if let Some(owner) = self.owner(learner) {
            let owned = &mut output[share(&layout, layer, learner, learners)];
            owner.compress_layer(layer, vec![0.0; owned.len()].as_slice().into(), Sending::Flush)?;
            if let Some(Packet::Dense(values)) = owner.packet(layer) {
                owned.iter_mut().zip(values).for_each(|(sum, kept)| *sum += learners as f32 * kept);
            }
        }
        Ok(true)
    }

    /// Whether a learner keeps anything of a layer, as a learner or as an owner.
    pub fn keeps(&mut self, learner: usize, layer: usize) -> bool {
        let some = |values: &[f32]| values.iter().any(|value| *value != 0.0);
        let own =
            self.compressor(learner).and_then(|compressor| compressor.residual(layer)).is_some_and(some);
        own || self.owner(learner).and_then(|owner| owner.residual(layer)).is_some_and(some)
    }

    /// What a learner keeps of a layer between steps, such that the mean over learners is what there is of the average: its
    /// residual and, so many times as there are learners, what it keeps as an owner. Nothing for a layer that is sent whole.
    pub fn kept(&mut self, learner: usize, layer: usize) -> Option<Vec<f32>> {
        let mut kept = self.compressor(learner)?.residual(layer)?.to_vec();
        let owned = share(self.layout(), layer, learner, self.learners());
        let learners = self.learners() as f32;
        if let Some(values) = self.owner(learner).and_then(|owner| owner.residual(layer)) {
            kept[owned].iter_mut().zip(values).for_each(|(sum, value)| *sum += learners * value);
        }
        Some(kept)
    }

    /// Ends such a step: what has arrived everywhere leaves the residuals, otherwise it stays. All learners must do the same.
    pub fn end_elsewhere(&mut self, arrived: bool) -> Result<(), ExchangeError> {
        for learner in self.hosted() {
            if let Some(compressor) = self.compressor(learner).filter(|compressor| compressor.is_open()) {
                if arrived { compressor.commit()? } else { compressor.rollback() }
            }
            if let Some(owner) = self.owner(learner).filter(|owner| owner.is_open()) {
                if arrived { owner.commit()? } else { owner.rollback() }
            }
        }
        self.set_step(self.step() + 1);
        Ok(())
    }
}
