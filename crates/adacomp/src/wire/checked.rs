//! Frames that are checked and then added up straight from their bytes: these take a quarter of the memory of packets, or less.

use super::contents::{Contents, Elements};
use super::decode::{Expected, RawSection, walk};
use super::header::Header;
use crate::error::DecodeError;
use crate::layout::Layout;
use crate::packet::{HighWaterMark, Selected, make_room};
use half::f16;
use std::ops::Range;

/// A frame that has been checked as a whole, in its own bytes. Checking the next one reuses its memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Checked {
    header: Option<Header>,
    sections: Vec<Section>,
    /// The contents of all sections.
    bytes: Vec<u8>,
    high_water: HighWaterMark,
}

#[derive(Debug, Clone)]
struct Section {
    layer: usize,
    kind: u8,
    /// Bytes of all of it.
    bytes: usize,
    /// Where its contents are in `Checked::bytes`.
    contents: Range<usize>,
}

impl Checked {
    /// Checks everything, and keeps it if it is right.
    pub(crate) fn check(
        &mut self,
        bytes: &[u8],
        layout: &Layout,
        expected: Expected<'_>,
    ) -> Result<Header, DecodeError> {
        let Self { header, sections, bytes: kept, high_water } = self;
        *header = None;
        sections.clear();
        kept.clear();
        let result = walk(bytes, layout, expected, |header, section| {
            Contents::open(&section, layout, header.codec)?.check(section.layer)?;
            let RawSection { layer, kind, contents, bytes } = section;
            let start = kept.len();
            make_room(kept, contents.len());
            kept.extend_from_slice(contents);
            sections.push(Section { layer, kind, bytes, contents: start..kept.len() });
            Ok(())
        });
        high_water.count(kept.len(), 0, kept);
        match result {
            Ok(right) => *header = Some(right),
            Err(_) => sections.clear(),
        }
        result
    }

    /// The layers' numbers and the bytes of their sections, in order.
    pub(crate) fn section_bytes(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        self.sections.iter().map(|section| (section.layer, section.bytes))
    }

    /// What adds up the layer at this position among those that the frame has.
    pub(crate) fn adder(&self, position: usize, layout: &Layout) -> Adder<'_> {
        let codec = self.header.expect("a frame that was checked").codec;
        let Section { layer, kind, bytes, contents } = &self.sections[position];
        let section =
            RawSection { layer: *layer, kind: *kind, contents: &self.bytes[contents.clone()], bytes: *bytes };
        Adder {
            contents: Contents::open(&section, layout, codec).expect("checked"),
            some: [Selected::default(); Elements::SOME],
            waiting: 0..0,
        }
    }
}

/// Adds up a layer of a frame, block by block from its start.
#[derive(Debug, Clone)]
pub(crate) struct Adder<'a> {
    contents: Contents<'a>,
    /// Elements that have been read.
    some: [Selected; Elements::SOME],
    /// Which of them have not been added.
    waiting: Range<usize>,
}

impl Adder<'_> {
    /// The memory of adders of one frame for those of another.
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
