//! The open step as a frame.

use super::{Compressor, Store};
use crate::error::CompressError;
use crate::layout::check_ascending;
use crate::packet::Packet;
use crate::wire::{Codec, FrameWriter, Header};

impl Compressor {
    /// Writes the open step as a frame, over what was in `frame`.
    pub fn encode(
        &mut self,
        codec: Codec,
        learner: usize,
        step: u64,
        frame: &mut Vec<u8>,
    ) -> Result<(), CompressError> {
        self.encode_numbers(codec, learner, step, 0..self.layers.len(), frame)
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
        self.encode_numbers(codec, learner, step, layers.iter().copied(), frame)
    }

    fn encode_numbers(
        &mut self,
        codec: Codec,
        learner: usize,
        step: u64,
        layers: impl Iterator<Item = usize> + Clone,
        frame: &mut Vec<u8>,
    ) -> Result<(), CompressError> {
        if !self.open {
            return Err(CompressError::NotOpen);
        }
        if u32::try_from(learner).is_err() {
            return Err(CompressError::Learner { learner });
        }
        self.check_compressed(layers.clone())?;
        let non_finite = layers.clone().any(|layer| self.layers[layer].statistics.bad_bins > 0);
        let fingerprint = self.layout.fingerprint();
        let header = Header { codec, non_finite, fingerprint, step, learner };
        let mut writer = FrameWriter::new(&header, &self.layout, frame);
        if !non_finite {
            for layer in layers {
                if let Some(packet) = self.packet(layer) {
                    self.layers[layer].statistics.bytes = writer.section(layer, packet);
                }
            }
        }
        writer.finish();
        Ok(())
    }

    /// Returns what a layer of selected elements sent in the last committed step: for comparisons. None if it selected
    /// nothing in that step, or its residual was looked at since.
    pub fn last_packet(&self, layer: usize) -> Option<Packet<'_>> {
        match &self.layers[layer].store {
            Store::Bins(residual, _) | Store::TopK(residual, _) => residual.last_sent(),
            Store::Dense(..) => None,
        }
    }
}
