//! A frame into packets. Any bytes give a frame or an error.
//!
//! [`Frame`] has the packets in memory; [`super::checked`] adds them up without.

use super::contents::Contents;
use super::header::Header;
use super::varint;
use crate::error::DecodeError;
use crate::layout::Layout;
use crate::packet::{HighWaterMark, Packet, Selected, Sparse};
use half::f16;
use std::ops::Range;

/// Which layers a frame must have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Expected<'a> {
    /// All of the layout.
    All,
    /// These, by ascending numbers.
    Layers(&'a [usize]),
}

impl Expected<'_> {
    fn count(&self, layout: &Layout) -> usize {
        match self {
            Self::All => layout.len(),
            Self::Layers(layers) => layers.len(),
        }
    }

    fn layer(&self, position: usize) -> usize {
        match self {
            Self::All => position,
            Self::Layers(layers) => layers[position],
        }
    }
}

/// A frame that has been checked as a whole. Decoding the next one into it reuses its memory.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    header: Option<Header>,
    sections: Vec<Section>,
    values: Vec<f32>,
    selected: Vec<Selected>,
    high_water: HighWaterMark,
}

#[derive(Debug, Clone)]
struct Section {
    layer: usize,
    bytes: usize,
    packet: Decoded,
}

#[derive(Debug, Clone)]
enum Decoded {
    /// A range of `Frame::values`.
    Dense(Range<usize>),
    /// Two values, and a range of `Frame::selected`.
    Sparse([f32; 2], Range<usize>),
}

impl Frame {
    /// Reads a frame of all layers. Everything is checked, and after an error the frame has no packets.
    pub fn decode(&mut self, bytes: &[u8], layout: &Layout) -> Result<Header, DecodeError> {
        self.decode_expected(bytes, layout, Expected::All)
    }

    /// Reads a frame of these layers, by ascending numbers.
    pub fn decode_layers(
        &mut self,
        bytes: &[u8],
        layout: &Layout,
        layers: &[usize],
    ) -> Result<Header, DecodeError> {
        self.decode_expected(bytes, layout, Expected::Layers(layers))
    }

    fn decode_expected(
        &mut self,
        bytes: &[u8],
        layout: &Layout,
        expected: Expected<'_>,
    ) -> Result<Header, DecodeError> {
        self.header = None;
        self.sections.clear();
        self.values.clear();
        self.selected.clear();
        let result = self.read(bytes, layout, expected);
        self.high_water.count(self.selected.len(), 0, &mut self.selected);
        match result {
            Ok(header) => self.header = Some(header),
            Err(_) => self.sections.clear(),
        }
        result
    }

    /// The header of the frame that was read last, unless it was bad.
    pub fn header(&self) -> Option<Header> {
        self.header
    }

    /// The layers' numbers and packets, in order; none if the learner's gradient is not finite.
    pub fn packets(&self) -> impl ExactSizeIterator<Item = (usize, Packet<'_>)> {
        self.sections.iter().map(|section| (section.layer, self.packet(section)))
    }

    fn packet(&self, section: &Section) -> Packet<'_> {
        match &section.packet {
            Decoded::Dense(range) => Packet::Dense(&self.values[range.clone()]),
            Decoded::Sparse(values, range) => {
                Packet::Sparse(Sparse { values: *values, selected: &self.selected[range.clone()] })
            }
        }
    }

    /// The layers' numbers and the bytes of their sections, in order.
    pub fn section_bytes(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        self.sections.iter().map(|section| (section.layer, section.bytes))
    }

    fn read(&mut self, bytes: &[u8], layout: &Layout, expected: Expected<'_>) -> Result<Header, DecodeError> {
        walk(bytes, layout, expected, |header, section| {
            let packet = match Contents::open(&section, layout, header.codec)? {
                Contents::Dense(values) => {
                    self.dense(section.layer, values.iter().map(|value| f32::from_le_bytes(*value)))?
                }
                Contents::Half(values) => {
                    self.dense(section.layer, values.iter().map(|value| f16::from_le_bytes(*value).to_f32()))?
                }
                Contents::Selected(values, elements) => {
                    let start = self.selected.len();
                    elements.append_to(&mut self.selected)?;
                    Decoded::Sparse(values, start..self.selected.len())
                }
            };
            self.sections.push(Section { layer: section.layer, bytes: section.bytes, packet });
            Ok(())
        })
    }

    fn dense(&mut self, layer: usize, values: impl Iterator<Item = f32>) -> Result<Decoded, DecodeError> {
        let start = self.values.len();
        self.values.extend(values);
        if !self.values[start..].iter().all(|value| value.is_finite()) {
            return Err(DecodeError::Value { layer });
        }
        Ok(Decoded::Dense(start..self.values.len()))
    }
}

/// Takes the sections of a frame one after the other. They must be those of the layers that are expected.
pub(super) fn walk<'a>(
    bytes: &'a [u8],
    layout: &Layout,
    expected: Expected<'_>,
    mut take: impl FnMut(&Header, RawSection<'a>) -> Result<(), DecodeError>,
) -> Result<Header, DecodeError> {
    let (header, sections, mut rest) = open(bytes)?;
    if header.fingerprint != layout.fingerprint() {
        return Err(DecodeError::Fingerprint { expected: layout.fingerprint(), actual: header.fingerprint });
    }
    let count = if header.non_finite { 0 } else { expected.count(layout) };
    if sections as usize != count {
        let position = count.min(sections as usize);
        let expected = (position < count).then(|| expected.layer(position));
        return Err(DecodeError::Layer { position, expected, actual: None });
    }
    for position in 0..count {
        let expected = expected.layer(position);
        let section = next_section(&mut rest)?;
        let layer = section.layer;
        if layer != expected || layer >= layout.len() {
            return Err(DecodeError::Layer { position, expected: Some(expected), actual: Some(layer) });
        }
        take(&header, section)?;
    }
    match rest.len() {
        0 => Ok(header),
        count => Err(DecodeError::Trailing { part: "the last section", count }),
    }
}

/// The header of a frame whose checksum is right, the number of its sections, and their bytes.
pub(super) fn open(bytes: &[u8]) -> Result<(Header, u32, &[u8]), DecodeError> {
    let (mut rest, checksum) =
        bytes.split_last_chunk().ok_or(DecodeError::Truncated { part: "the checksum" })?;
    let all = rest;
    let (header, sections) = Header::read(&mut rest)?;
    // Magic and version first: a frame of another version may have another checksum.
    let (computed, written) = (crc32fast::hash(all), u32::from_le_bytes(*checksum));
    if computed != written {
        return Err(DecodeError::Checksum { expected: computed, actual: written });
    }
    Ok((header, sections, rest))
}

/// A section as it is written.
pub(super) struct RawSection<'a> {
    pub(super) layer: usize,
    pub(super) kind: u8,
    pub(super) contents: &'a [u8],
    /// Bytes of all of it.
    pub(super) bytes: usize,
}

/// The section at the front of `rest`, which moves past it.
pub(super) fn next_section<'a>(rest: &mut &'a [u8]) -> Result<RawSection<'a>, DecodeError> {
    let before = rest.len();
    let layer = varint::read(rest, "a layer number")? as usize;
    let (&kind, after) = rest.split_first().ok_or(DecodeError::Truncated { part: "a section kind" })?;
    *rest = after;
    let length = varint::read(rest, "a section length")? as usize;
    let (contents, after) =
        rest.split_at_checked(length).ok_or(DecodeError::Truncated { part: "a section" })?;
    *rest = after;
    Ok(RawSection { layer, kind, contents, bytes: before - rest.len() })
}
