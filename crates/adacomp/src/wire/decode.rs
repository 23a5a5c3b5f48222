//! Reads frames: any bytes give a frame or an error.
//!
//! A frame is read once, and checked completely while it is read. What it selects is kept by blocks, two bytes an element, which is
//! half the memory of a packet; all blocks of all frames can then be added up in any order, and on any thread.

use super::{Codec, Header, bits, paper, rice};
use crate::error::DecodeError;
use crate::kernel::{BLOCK, largest};
use crate::packet::{HighWaterMark, Packet, Selected, Sparse, make_room};
use crate::policy::{Layout, Treatment};
use half::f16;
use std::ops::Range;

/// A frame that has been checked. Decoding the next one into it reuses its memory.
#[derive(Debug, Clone, Default)]
pub struct Frame {
    header: Option<Header>,
    sections: Vec<Checked>,
    /// The contents of all dense sections.
    dense: Vec<u8>,
    /// The selected elements of all other sections: for each its place in its block of the layer, and its sign in the lowest bit.
    places: Vec<u16>,
    /// For each of these sections where its blocks begin among its places, and where the last ends.
    starts: Vec<u32>,
    high_water: [HighWaterMark; 2],
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

/// How the elements of a section are written. Its discriminant is the section's form byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Every element, in f32.
    Dense = 0,
    /// Every element, in f16.
    Half = 1,
    /// Selected elements, by the frame's codec.
    Selected = 2,
}

/// A section whose contents are right, and where they are.
#[derive(Debug, Clone)]
struct Checked {
    section: Section,
    kept: Kept,
    /// The largest magnitude of what it sends.
    largest: f32,
}

/// Where a frame keeps the contents of a section.
#[derive(Debug, Clone)]
enum Kept {
    /// In `Frame::dense`, in f32.
    Dense(Range<usize>),
    /// There, in f16.
    Half(Range<usize>),
    /// In `Frame::places` and `Frame::starts`; and what positive and negative elements are sent as.
    Selected { values: [f32; 2], places: Range<usize>, starts: Range<usize> },
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
        self.dense.clear();
        self.places.clear();
        self.starts.clear();
        let result = self.read(bytes, layout, layers);
        self.header = result.as_ref().ok().copied();
        if result.is_err() {
            self.sections.clear();
        }
        let [dense, places] = &mut self.high_water;
        dense.count(self.dense.len(), 0, &mut self.dense);
        places.count(self.places.len(), 0, &mut self.places);
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
            return Err(DecodeError::Sections { expected: layers.len(), actual: count });
        }
        walk(count, rest, |section, contents| {
            let (position, layer) = (self.sections.len(), section.layer);
            if layer != layers[position] || layer >= layout.len() {
                return Err(DecodeError::Layer { position, expected: layers[position], actual: layer });
            }
            let (treatment, elements) = (layout[layer].treatment, layout[layer].elements());
            let contents = Contents::open(section, treatment, elements, contents, header.codec)?;
            let largest = contents.largest();
            if !largest.is_finite() {
                return Err(DecodeError::Value { layer });
            }
            let kept = self.keep(contents, elements)?;
            self.sections.push(Checked { section, kept, largest });
            Ok(())
        })?;
        Ok(header)
    }

    /// Keeps the contents of a section, and checks of selected elements that all of them are right.
    fn keep(&mut self, contents: Contents<'_>, elements: usize) -> Result<Kept, DecodeError> {
        let (values, mut selected) = match contents {
            Contents::Dense(values) => return Ok(Kept::Dense(self.keep_dense(values.as_flattened()))),
            Contents::Half(values) => return Ok(Kept::Half(self.keep_dense(values.as_flattened()))),
            Contents::Selected(values, selected) => (values, selected),
        };
        let (first, first_start) = (self.places.len(), self.starts.len());
        let mut some = [Selected::default(); Elements::SOME];
        while let count @ 1.. = selected.read(&mut some)? {
            let some = &some[..count];
            let read = self.places.len() - first;
            // Blocks that begin here: usually none, or one.
            for block in self.starts.len() - first_start..=some[count - 1].index() / BLOCK {
                let before = some.partition_point(|element| element.index() < block * BLOCK);
                self.starts.push((read + before) as u32);
            }
            make_room(&mut self.places, count);
            self.places.extend(some.iter().map(|element| element.place()));
        }
        // Those of the paper's code go on to the end of the section.
        if let Elements::Rice(codes) = selected {
            codes.end()?;
        }
        let (last, blocks) = (self.places.len(), elements.div_ceil(BLOCK));
        self.starts.resize(first_start + blocks + 1, (last - first) as u32);
        Ok(Kept::Selected { values, places: first..last, starts: first_start..self.starts.len() })
    }

    fn keep_dense(&mut self, bytes: &[u8]) -> Range<usize> {
        let start = self.dense.len();
        make_room(&mut self.dense, bytes.len());
        self.dense.extend_from_slice(bytes);
        start..self.dense.len()
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
        match &self.sections[position].kept {
            Kept::Dense(range) => {
                values.extend(floats(&self.dense[range.clone()]));
                Packet::Dense(values)
            }
            Kept::Half(range) => {
                values.extend(halves(&self.dense[range.clone()]));
                Packet::Dense(values)
            }
            Kept::Selected { values, starts, .. } => {
                for block in 0..starts.len() - 1 {
                    let places = self.block(position, block).iter();
                    selected.extend(places.map(|place| Selected::at(block, *place)));
                }
                Packet::Sparse(Sparse { values: *values, selected })
            }
        }
    }

    /// Returns the largest magnitude of what the section at this position sends.
    pub(crate) fn largest(&self, position: usize) -> f32 {
        self.sections[position].largest
    }

    /// Clamps what the section at this position sends to at most this magnitude; f16 are rounded once more.
    pub(crate) fn clamp(&mut self, position: usize, most: f32) {
        let Checked { kept, largest, .. } = &mut self.sections[position];
        if *largest <= most {
            return;
        }
        *largest = most;
        let clamped = |value: f32| value.clamp(-most, most);
        match kept {
            Kept::Dense(range) => {
                let values = self.dense[range.clone()].as_chunks_mut().0.iter_mut();
                values.for_each(|value| *value = clamped(f32::from_le_bytes(*value)).to_le_bytes());
            }
            Kept::Half(range) => {
                let values = self.dense[range.clone()].as_chunks_mut().0.iter_mut();
                values.for_each(|value| {
                    *value = f16::from_f32(clamped(f16::from_le_bytes(*value).to_f32())).to_le_bytes();
                });
            }
            Kept::Selected { values, .. } => *values = values.map(clamped),
        }
    }

    /// Adds a block of the section at this position to `sums`, which are as long as the block.
    pub(crate) fn add_block(&self, position: usize, block: usize, sums: &mut [f32]) {
        let start = block * BLOCK;
        let part = |range: &Range<usize>, bytes: usize| {
            &self.dense[range.start + bytes * start..][..bytes * sums.len()]
        };
        match &self.sections[position].kept {
            Kept::Dense(range) => {
                let values = floats(part(range, 4));
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            Kept::Half(range) => {
                let values = halves(part(range, 2));
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            Kept::Selected { values, .. } => {
                for place in self.block(position, block) {
                    sums[usize::from(place >> 1)] += values[usize::from(place & 1)];
                }
            }
        }
    }

    /// Returns the places of the elements of a block.
    fn block(&self, position: usize, block: usize) -> &[u16] {
        let Kept::Selected { places, starts, .. } = &self.sections[position].kept else { return &[] };
        let starts = &self.starts[starts.clone()];
        &self.places[places.clone()][starts[block] as usize..starts[block + 1] as usize]
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value))
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32())
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
    fn open(
        Section { layer, form, .. }: Section,
        treatment: Treatment,
        elements: usize,
        bytes: &'a [u8],
        codec: Codec,
    ) -> Result<Self, DecodeError> {
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
            form => Err(DecodeError::Form { layer, form: form as u8 }),
        }
    }

    /// Returns the largest magnitude of its values; NaN or infinity if one of them is not finite.
    fn largest(&self) -> f32 {
        match self {
            Self::Dense(values) => largest(floats(values.as_flattened())),
            Self::Half(values) => largest(halves(values.as_flattened())),
            Self::Selected(values, _) => largest(values.iter().copied()),
        }
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
    fn read(layer: usize, form: u8) -> Result<Self, DecodeError> {
        match form {
            0 => Ok(Self::Dense),
            1 => Ok(Self::Half),
            2 => Ok(Self::Selected),
            _ => Err(DecodeError::Form { layer, form }),
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
        let (&form, after) = rest.split_first().ok_or(DecodeError::Truncated { part: "a section form" })?;
        rest = after;
        let length = bits::read_varint(&mut rest, "a section length")? as usize;
        let (contents, after) =
            rest.split_at_checked(length).ok_or(DecodeError::Truncated { part: "a section" })?;
        rest = after;
        let form = Form::read(layer, form)?;
        take(Section { layer, form, bytes: before - rest.len() }, contents)?;
    }
    match rest.len() {
        0 => Ok(()),
        count => Err(DecodeError::Trailing { part: "the last section", count }),
    }
}
