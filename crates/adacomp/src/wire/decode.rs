//! Reads frames: any bytes give a frame or an error.
//!
//! A frame is checked completely and kept as its bytes, which take a quarter of the memory of packets, or less. Learners
//! add its sections up straight from these bytes, block by block.

use super::{Codec, Header, bits, paper, rice};
use crate::error::DecodeError;
use crate::kernel::largest;
use crate::packet::{HighWaterMark, Packet, Selected, Sparse, make_room};
use crate::policy::{Layout, Treatment};
use half::f16;
use std::ops::Range;

/// A frame that has been checked. Decoding the next one into it reuses its memory.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    header: Option<Header>,
    sections: Vec<Checked>,
    /// The contents of all sections.
    bytes: Vec<u8>,
    high_water: HighWaterMark,
}

/// One layer's part of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    /// The layer's number.
    pub layer: usize,
    /// How its elements are written.
    pub form: Form,
    /// Bytes of the section.
    pub bytes: usize,
}

/// How the elements of a section are written. Its discriminant is the section's kind byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Every element, in f32.
    Dense = 0,
    /// Every element, in f16.
    Half = 1,
    /// Selected elements, by the frame's codec.
    Selected = 2,
}

/// A section whose contents are right, and what it takes to read them again.
#[derive(Debug, Clone)]
struct Checked {
    section: Section,
    treatment: Treatment,
    elements: usize,
    /// Where its contents are in `Frame::bytes`.
    contents: Range<usize>,
    /// The largest magnitude of what it sends.
    largest: f32,
}

impl Frame {
    /// Reads a frame of all layers. Everything is checked, and after an error the frame has no sections.
    pub fn decode(&mut self, bytes: &[u8], layout: &Layout) -> Result<Header, DecodeError> {
        self.decode_layers(bytes, layout, layout.all())
    }

    /// Reads a frame of these layers, by ascending numbers.
    pub fn decode_layers(
        &mut self,
        bytes: &[u8],
        layout: &Layout,
        layers: &[usize],
    ) -> Result<Header, DecodeError> {
        self.sections.clear();
        self.bytes.clear();
        let result = self.read(bytes, layout, layers);
        self.header = result.as_ref().ok().copied();
        if result.is_err() {
            self.sections.clear();
        }
        self.high_water.count(self.bytes.len(), 0, &mut self.bytes);
        result
    }

    fn read(&mut self, bytes: &[u8], layout: &Layout, layers: &[usize]) -> Result<Header, DecodeError> {
        let (header, count, rest) = open(bytes)?;
        if header.fingerprint != layout.fingerprint() {
            let (expected, actual) = (layout.fingerprint(), header.fingerprint);
            return Err(DecodeError::Fingerprint { expected, actual });
        }
        let layers = if header.non_finite { &[] } else { layers };
        if count != layers.len() {
            let position = count.min(layers.len());
            let expected = layers.get(position).copied();
            return Err(DecodeError::Layer { position, expected, actual: None });
        }
        walk(count, rest, |section, contents| {
            let (position, layer) = (self.sections.len(), section.layer);
            if layer != layers[position] || layer >= layout.len() {
                let (expected, actual) = (Some(layers[position]), Some(layer));
                return Err(DecodeError::Layer { position, expected, actual });
            }
            let (treatment, elements) = (layout[layer].treatment, layout[layer].elements());
            let start = self.bytes.len();
            let range = start..start + contents.len();
            let mut checked = Checked { section, treatment, elements, contents: range, largest: 0.0 };
            checked.largest = Contents::open(&checked, contents, header.codec)?.check(layer)?;
            make_room(&mut self.bytes, contents.len());
            self.bytes.extend_from_slice(contents);
            self.sections.push(checked);
            Ok(())
        })?;
        Ok(header)
    }

    /// Returns the header of the frame that was read last, unless it was bad.
    pub fn header(&self) -> Option<Header> {
        self.header
    }

    /// Returns the sections in order; none if the learner's gradient is not finite.
    pub fn sections(&self) -> impl ExactSizeIterator<Item = Section> {
        self.sections.iter().map(|checked| checked.section)
    }

    /// Reads what a section sends, by its position among the sections, into memory of the caller: all values of a dense
    /// layer into `values`, else the elements into `selected`.
    ///
    /// # Panics
    /// If there is no such section.
    pub fn packet<'a>(
        &self,
        position: usize,
        values: &'a mut Vec<f32>,
        selected: &'a mut Vec<Selected>,
    ) -> Packet<'a> {
        values.clear();
        selected.clear();
        match self.contents(position) {
            Contents::Dense(all) => {
                values.extend(all.iter().map(|value| f32::from_le_bytes(*value)));
                Packet::Dense(values)
            }
            Contents::Half(all) => {
                values.extend(all.iter().map(|value| f16::from_le_bytes(*value).to_f32()));
                Packet::Dense(values)
            }
            Contents::Selected(values, mut elements) => {
                let mut some = [Selected::default(); Elements::SOME];
                while let count @ 1.. = elements.read(&mut some).expect("checked") {
                    selected.extend_from_slice(&some[..count]);
                }
                Packet::Sparse(Sparse { values, selected })
            }
        }
    }

    /// Returns the largest magnitude of what the section at this position sends.
    pub(crate) fn largest(&self, position: usize) -> f32 {
        self.sections[position].largest
    }

    /// Returns what adds up the section at this position.
    pub(crate) fn adder(&self, position: usize) -> Adder<'_> {
        Adder {
            contents: self.contents(position),
            some: [Selected::default(); Elements::SOME],
            waiting: 0..0,
        }
    }

    fn contents(&self, position: usize) -> Contents<'_> {
        let checked = &self.sections[position];
        let codec = self.header.expect("a frame with sections has a header").codec;
        Contents::open(checked, &self.bytes[checked.contents.clone()], codec).expect("checked")
    }
}

/// Reads the header and the sections of a frame whose checksum is right, without the layout. The contents of the sections
/// are not read: that takes the layout, and is what [`Frame`] is for.
pub fn outline(bytes: &[u8]) -> Result<(Header, Vec<Section>), DecodeError> {
    let (header, count, rest) = open(bytes)?;
    let mut sections = Vec::new();
    walk(count, rest, |section, _| {
        sections.push(section);
        Ok(())
    })?;
    Ok((header, sections))
}

/// Adds up a section of a frame, block by block from its start.
#[derive(Debug, Clone)]
pub(crate) struct Adder<'a> {
    contents: Contents<'a>,
    /// Elements that have been read.
    some: [Selected; Elements::SOME],
    /// Which of them have not been added.
    waiting: Range<usize>,
}

impl Adder<'_> {
    /// Reuses the memory of adders of one frame for those of another.
    pub(crate) fn reuse<'a>(mut adders: Vec<Self>) -> Vec<Adder<'a>> {
        adders.clear();
        adders.into_iter().map(|_| unreachable!("there are none")).collect()
    }

    /// Adds the elements from `start` on for which `block` has room, where the block before has ended.
    pub(crate) fn add_block(&mut self, start: usize, block: &mut [f32]) {
        let end = start + block.len();
        match &mut self.contents {
            Contents::Dense(values) => {
                let values = values[start..end].iter().map(|value| f32::from_le_bytes(*value));
                block.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            Contents::Half(values) => {
                let values = values[start..end].iter().map(|value| f16::from_le_bytes(*value).to_f32());
                block.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            Contents::Selected(values, elements) => loop {
                for element in &self.some[self.waiting.clone()] {
                    let Some(sum) = block.get_mut(element.index() - start) else { return };
                    *sum += values[element.sign()];
                    self.waiting.start += 1;
                }
                self.waiting = 0..elements.read(&mut self.some).expect("checked");
                if self.waiting.is_empty() {
                    return;
                }
            },
        }
    }
}

/// The contents of a section of the right form and length.
#[derive(Debug, Clone)]
enum Contents<'a> {
    /// Every element.
    Dense(&'a [[u8; 4]]),
    /// Every element, as f16.
    Half(&'a [[u8; 2]]),
    /// What positive and negative elements are sent as, and these.
    Selected([f32; 2], Elements<'a>),
}

impl<'a> Contents<'a> {
    fn open(section: &Checked, bytes: &'a [u8], codec: Codec) -> Result<Self, DecodeError> {
        let &Checked { section: Section { layer, form, .. }, treatment, elements, .. } = section;
        match form {
            Form::Dense if treatment != Treatment::Half => Ok(Self::Dense(values(bytes, layer, elements)?)),
            Form::Half if treatment == Treatment::Half => Ok(Self::Half(values(bytes, layer, elements)?)),
            Form::Selected if treatment.selects() => {
                let (values, bytes) = sent_values(bytes, layer, treatment)?;
                let elements = match codec {
                    Codec::Paper => {
                        Elements::Paper(paper::Words::open(bytes, layer, paper::bin(treatment), elements)?)
                    }
                    Codec::Rice => Elements::Rice(rice::Codes::open(bytes, layer, elements)?),
                };
                Ok(Self::Selected(values, elements))
            }
            form => Err(DecodeError::Kind { layer, kind: form as u8 }),
        }
    }

    /// Checks that all of it is right. Returns the largest magnitude of its values.
    fn check(self, layer: usize) -> Result<f32, DecodeError> {
        let largest = match self {
            Self::Dense(values) => largest(values.iter().map(|value| f32::from_le_bytes(*value))),
            Self::Half(values) => largest(values.iter().map(|value| f16::from_le_bytes(*value).to_f32())),
            Self::Selected(values, mut elements) => {
                let mut some = [Selected::default(); Elements::SOME];
                while elements.read(&mut some)? > 0 {}
                // Those of the paper's code go on to the end of the section.
                if let Elements::Rice(codes) = elements {
                    codes.end()?;
                }
                largest(values.into_iter())
            }
        };
        if largest.is_finite() { Ok(largest) } else { Err(DecodeError::Value { layer }) }
    }
}

/// Selected elements in either code.
#[derive(Debug, Clone)]
enum Elements<'a> {
    Rice(rice::Codes<'a>),
    Paper(paper::Words<'a>),
}

impl Elements<'_> {
    /// A number of elements that is worth a call and stays in the nearest cache.
    const SOME: usize = 96;

    /// Reads the next elements, as many as there are or as `some` has room for, and returns their number.
    fn read(&mut self, some: &mut [Selected]) -> Result<usize, DecodeError> {
        match self {
            Self::Rice(codes) => codes.read(some),
            Self::Paper(words) => words.read(some),
        }
    }
}

impl Form {
    fn read(layer: usize, kind: u8) -> Result<Self, DecodeError> {
        match kind {
            0 => Ok(Self::Dense),
            1 => Ok(Self::Half),
            2 => Ok(Self::Selected),
            _ => Err(DecodeError::Kind { layer, kind }),
        }
    }
}

/// Reads a value of `N` bytes for each element.
fn values<const N: usize>(bytes: &[u8], layer: usize, elements: usize) -> Result<&[[u8; N]], DecodeError> {
    match bytes.as_chunks() {
        (values, []) if values.len() == elements => Ok(values),
        _ => {
            let (expected, actual) = (N * elements, bytes.len());
            Err(DecodeError::Length { layer, part: "a dense section", expected, actual })
        }
    }
}

/// Reads what positive and negative elements are sent as: one scale, or for top-k two means. Returns the bytes after it, too.
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

/// Returns the header of a frame whose checksum is right, the number of its sections, and their bytes.
fn open(bytes: &[u8]) -> Result<(Header, usize, &[u8]), DecodeError> {
    let (mut rest, checksum) =
        bytes.split_last_chunk().ok_or(DecodeError::Truncated { part: "the checksum" })?;
    let all = rest;
    let (header, sections) = Header::read(&mut rest)?;
    // Magic and version first: a frame of another version may have another checksum.
    let (computed, written) = (crc32fast::hash(all), u32::from_le_bytes(*checksum));
    if computed != written {
        return Err(DecodeError::Checksum { expected: computed, actual: written });
    }
    Ok((header, sections as usize, rest))
}

/// Hands on the sections of a frame with their contents. There must be `count` in all of `rest`.
fn walk<'a>(
    count: usize,
    mut rest: &'a [u8],
    mut take: impl FnMut(Section, &'a [u8]) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    for _ in 0..count {
        let before = rest.len();
        let layer = bits::read_varint(&mut rest, "a layer number")? as usize;
        let (&kind, after) = rest.split_first().ok_or(DecodeError::Truncated { part: "a section kind" })?;
        rest = after;
        let length = bits::read_varint(&mut rest, "a section length")? as usize;
        let (contents, after) =
            rest.split_at_checked(length).ok_or(DecodeError::Truncated { part: "a section" })?;
        rest = after;
        let form = Form::read(layer, kind)?;
        take(Section { layer, form, bytes: before - rest.len() }, contents)?;
    }
    match rest.len() {
        0 => Ok(()),
        count => Err(DecodeError::Trailing { part: "the last section", count }),
    }
}
