//! What is in a section, read from its start to its end.

use super::decode::RawSection;
use super::header::Codec;
use super::{Cut, kind, paper, rice};
use crate::error::DecodeError;
use crate::layout::Layout;
use crate::packet::Selected;
use crate::policy::Treatment;
use half::f16;

/// The contents of a section of the right kind and length.
#[derive(Debug, Clone)]
pub(super) enum Contents<'a> {
    /// Every element.
    Dense(&'a [[u8; 4]]),
    /// Every element, as f16.
    Half(&'a [[u8; 2]]),
    /// What positive and negative elements are sent as, and these.
    Selected([f32; 2], Elements<'a>),
}

impl<'a> Contents<'a> {
    pub(super) fn open(section: &RawSection<'a>, layout: &Layout, codec: Codec) -> Result<Self, DecodeError> {
        let &RawSection { layer, kind, contents: bytes, .. } = section;
        let (treatment, elements) = (layout[layer].treatment, layout[layer].elements());
        match kind {
            kind::DENSE if treatment != Treatment::Half => Ok(Self::Dense(values(bytes, layer, elements)?)),
            kind::HALF if treatment == Treatment::Half => Ok(Self::Half(values(bytes, layer, elements)?)),
            kind::SELECTED if treatment.selects() => {
                let (values, bytes) = sent_values(bytes, layer, treatment)?;
                let elements = match codec {
                    Codec::Paper => {
                        Elements::Paper(paper::Words::open(bytes, layer, Cut::of(&layout[layer]))?)
                    }
                    Codec::Rice => Elements::Rice(rice::Codes::open(bytes, layer, elements)?),
                };
                Ok(Self::Selected(values, elements))
            }
            kind => Err(DecodeError::Kind { layer, kind }),
        }
    }

    /// Whether all of it is right.
    pub(super) fn check(self, layer: usize) -> Result<(), DecodeError> {
        let all_finite = match self {
            Self::Dense(values) => values.iter().all(|value| f32::from_le_bytes(*value).is_finite()),
            Self::Half(values) => values.iter().all(|value| f16::from_le_bytes(*value).is_finite()),
            Self::Selected(_, mut elements) => {
                let mut some = [Selected::default(); Elements::SOME];
                while elements.read(&mut some)? > 0 {}
                return elements.end();
            }
        };
        if all_finite { Ok(()) } else { Err(DecodeError::Value { layer }) }
    }
}

/// Selected elements in either code.
#[derive(Debug, Clone)]
pub(super) enum Elements<'a> {
    Rice(rice::Codes<'a>),
    Paper(paper::Words<'a>),
}

impl Elements<'_> {
    /// A number of elements that is worth a call and stays in the nearest cache.
    pub(super) const SOME: usize = 96;

    /// The next elements, as many as there are or as `some` has room for; how many.
    pub(super) fn read(&mut self, some: &mut [Selected]) -> Result<usize, DecodeError> {
        match self {
            Self::Rice(codes) => codes.read(some),
            Self::Paper(words) => words.read(some),
        }
    }

    /// Whether there is nothing behind the last element, once none was left to read.
    fn end(&self) -> Result<(), DecodeError> {
        match self {
            Self::Rice(codes) => codes.end(),
            // They go on to the end of the section.
            Self::Paper(_) => Ok(()),
        }
    }

    /// Appends all that are left to `selected`, if all of it is right.
    pub(super) fn append_to(mut self, selected: &mut Vec<Selected>) -> Result<(), DecodeError> {
        match &mut self {
            Self::Rice(codes) => codes.append_to(selected)?,
            Self::Paper(words) => words.append_to(selected)?,
        }
        self.end()
    }
}

/// So many values of `N` bytes.
fn values<const N: usize>(bytes: &[u8], layer: usize, elements: usize) -> Result<&[[u8; N]], DecodeError> {
    match bytes.as_chunks() {
        (values, []) if values.len() == elements => Ok(values),
        _ => {
            let (expected, actual) = (N * elements, bytes.len());
            Err(DecodeError::Length { layer, part: "a dense section", expected, actual })
        }
    }
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
