//! A frame into packets. Any bytes give a frame or an error.

use super::header::{Codec, Header};
use super::{Cut, kind, paper, rice, varint};
use crate::error::DecodeError;
use crate::layout::Layout;
use crate::packet::{Lately, Packet, Selected, Sparse};
use crate::policy::Treatment;
use half::f16;
use std::ops::Range;

/// Which layers a frame must have.
#[derive(Debug, Clone, Copy)]
pub enum Expected<'a> {
    /// All of the layout.
    Whole,
    /// These, by ascending numbers.
    Layers(&'a [usize]),
}

impl Expected<'_> {
    fn count(&self, layout: &Layout) -> usize {
        match self {
            Self::Whole => layout.len(),
            Self::Layers(layers) => layers.len(),
        }
    }

    fn layer(&self, position: usize) -> usize {
        match self {
            Self::Whole => position,
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
    lately: Lately,
}

#[derive(Debug, Clone)]
struct Section {
    layer: usize,
    bytes: usize,
    contents: Contents,
}

#[derive(Debug, Clone)]
enum Contents {
    /// A range of `Frame::values`.
    Dense(Range<usize>),
    /// Two values, and a range of `Frame::selected`.
    Sparse([f32; 2], Range<usize>),
}

impl Frame {
    /// Reads a frame. Everything is checked, and after an error there is no packet to be had.
    pub fn decode(
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
        self.lately.count(&mut self.selected);
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

    /// The packet of the layer that is at this position among those that the frame has.
    pub(crate) fn packet_at(&self, position: usize) -> Packet<'_> {
        self.packet(&self.sections[position])
    }

    fn packet(&self, section: &Section) -> Packet<'_> {
        match &section.contents {
            Contents::Dense(range) => Packet::Dense(&self.values[range.clone()]),
            Contents::Sparse(values, range) => {
                Packet::Sparse(Sparse { values: *values, selected: &self.selected[range.clone()] })
            }
        }
    }

    /// The layers' numbers and the bytes of their sections, in order.
    pub fn section_bytes(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        self.sections.iter().map(|section| (section.layer, section.bytes))
    }

    fn read(&mut self, bytes: &[u8], layout: &Layout, expected: Expected<'_>) -> Result<Header, DecodeError> {
        let (header, sections, mut rest) = open(bytes)?;
        if header.fingerprint != layout.fingerprint() {
            return Err(DecodeError::Fingerprint {
                expected: layout.fingerprint(),
                actual: header.fingerprint,
            });
        }
        let count = if header.non_finite { 0 } else { expected.count(layout) };
        if sections as usize != count {
            let position = count.min(sections as usize);
            let expected = (position < count).then(|| expected.layer(position));
            return Err(DecodeError::Layer { position, expected, actual: None });
        }
        for position in 0..count {
            let expected = expected.layer(position);
            let RawSection { layer, kind, contents, bytes } = next_section(&mut rest)?;
            if layer != expected || layer >= layout.len() {
                return Err(DecodeError::Layer { position, expected: Some(expected), actual: Some(layer) });
            }
            let contents = self.contents(contents, kind, layer, layout, header.codec)?;
            self.sections.push(Section { layer, bytes, contents });
        }
        if rest.is_empty() {
            Ok(header)
        } else {
            Err(DecodeError::Trailing { part: "the last section", count: rest.len() })
        }
    }

    fn contents(
        &mut self,
        bytes: &[u8],
        kind: u8,
        layer: usize,
        layout: &Layout,
        codec: Codec,
    ) -> Result<Contents, DecodeError> {
        let treatment = layout[layer].treatment;
        let elements = layout[layer].elements();
        match kind {
            kind::DENSE if treatment != Treatment::Half => {
                self.dense(bytes, layer, elements, |value: [u8; 4]| f32::from_le_bytes(value))
            }
            kind::HALF if treatment == Treatment::Half => {
                self.dense(bytes, layer, elements, |value: [u8; 2]| f16::from_le_bytes(value).to_f32())
            }
            kind::SELECTED if treatment.selects() => {
                let (values, bytes) = sent_values(bytes, layer, treatment)?;
                let start = self.selected.len();
                match codec {
                    Codec::Paper => paper::decode(bytes, layer, Cut::of(&layout[layer]), &mut self.selected)?,
                    Codec::Rice => rice::decode(bytes, layer, elements, &mut self.selected)?,
                }
                Ok(Contents::Sparse(values, start..self.selected.len()))
            }
            kind => Err(DecodeError::Kind { layer, kind }),
        }
    }

    fn dense<const N: usize>(
        &mut self,
        bytes: &[u8],
        layer: usize,
        elements: usize,
        value: impl Fn([u8; N]) -> f32,
    ) -> Result<Contents, DecodeError> {
        if bytes.len() != N * elements {
            let (expected, actual) = (N * elements, bytes.len());
            return Err(DecodeError::Length { layer, part: "a dense section", expected, actual });
        }
        let start = self.values.len();
        self.values.extend(bytes.as_chunks::<N>().0.iter().map(|bytes| value(*bytes)));
        if !self.values[start..].iter().all(|value| value.is_finite()) {
            return Err(DecodeError::Value { layer });
        }
        Ok(Contents::Dense(start..self.values.len()))
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

/// What positive and negative elements are sent as, and the bytes behind: one scale, or for top-k two means.
fn sent_values(bytes: &[u8], layer: usize, treatment: Treatment) -> Result<([f32; 2], &[u8]), DecodeError> {
    let truncated = DecodeError::Truncated { part: "a scale" };
    let (first, rest) = bytes.split_first_chunk().ok_or(truncated.clone())?;
    let positive = f32::from_le_bytes(*first);
    let (negative, rest) = if matches!(treatment, Treatment::TopK(_)) {
        let (second, rest) = rest.split_first_chunk().ok_or(truncated)?;
        (f32::from_le_bytes(*second), rest)
    } else {
        (-positive, rest)
    };
    let signs_fit = positive.is_sign_positive() && negative <= 0.0;
    if positive.is_finite() && negative.is_finite() && signs_fit {
        Ok(([positive, negative], rest))
    } else {
        Err(DecodeError::Value { layer })
    }
}
