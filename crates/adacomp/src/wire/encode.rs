//! Packets into a frame.

use super::header::{Codec, Header};
use super::{Cut, kind, paper, rice, varint};
use crate::layout::Layout;
use crate::packet::{Packet, Sparse};
use crate::policy::Treatment;
use half::f16;

/// Writes a frame section by section.
pub struct FrameWriter<'a> {
    layout: &'a Layout,
    codec: Codec,
    out: &'a mut Vec<u8>,
    sections: u32,
    next_layer: usize,
}

impl<'a> FrameWriter<'a> {
    /// Starts a frame, over what was in `out`.
    ///
    /// # Panics
    /// If the header's fingerprint is not the layout's, or its learner number takes more than 32 bits.
    pub fn new(header: &Header, layout: &'a Layout, out: &'a mut Vec<u8>) -> Self {
        assert_eq!(header.fingerprint, layout.fingerprint(), "a header of another layout");
        out.clear();
        header.write(0, out);
        Self { layout, codec: header.codec, out, sections: 0, next_layer: 0 }
    }

    /// Writes what a layer sends; the bytes that it takes.
    ///
    /// # Panics
    /// If layers do not come in ascending order, or the packet is not one of that layer.
    pub fn section(&mut self, layer: usize, packet: Packet<'_>) -> usize {
        assert!(layer >= self.next_layer, "layer {layer} comes after layer {}", self.next_layer);
        let start = self.out.len();
        varint::write(layer as u32, self.out);
        let kind_at = self.out.len();
        self.out.push(kind::DENSE);
        let contents = self.out.len();
        self.out[kind_at] = self.contents(layer, packet);

        // The length is known only now, and stands before the contents, which make room for it.
        let end = self.out.len();
        varint::write((end - contents) as u32, self.out);
        let length_bytes = self.out.len() - end;
        self.out[contents..].rotate_right(length_bytes);
        self.sections += 1;
        self.next_layer = layer + 1;
        self.out.len() - start
    }

    /// Writes a section's contents; its kind.
    fn contents(&mut self, layer: usize, packet: Packet<'_>) -> u8 {
        let layer = &self.layout[layer];
        match packet {
            Packet::Dense(values) => {
                assert_eq!(values.len(), layer.elements(), "packet of another layer than `{}`", layer.name());
                if layer.treatment == Treatment::Half {
                    self.out.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()));
                    kind::HALF
                } else {
                    self.out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                    kind::DENSE
                }
            }
            Packet::Sparse(Sparse { values, selected }) => {
                assert!(layer.treatment.selects(), "`{}` is sent whole", layer.name());
                let end = selected.last().map_or(0, |last| last.index() + 1);
                assert!(end <= layer.elements(), "packet of another layer than `{}`", layer.name());
                debug_assert!(selected.is_sorted_by(|a, b| a.index() < b.index()));
                self.out.extend_from_slice(&values[0].to_le_bytes());
                if matches!(layer.treatment, Treatment::TopK(_)) {
                    self.out.extend_from_slice(&values[1].to_le_bytes());
                }
                match self.codec {
                    Codec::Paper => paper::encode(selected, Cut::of(layer), self.out),
                    Codec::Rice => rice::encode(selected, self.out),
                }
                kind::SELECTED
            }
        }
    }

    /// Ends the frame with its checksum.
    pub fn finish(self) {
        let sections_at = Header::LENGTH - 4;
        self.out[sections_at..Header::LENGTH].copy_from_slice(&self.sections.to_le_bytes());
        let checksum = crc32fast::hash(self.out);
        self.out.extend_from_slice(&checksum.to_le_bytes());
    }
}
