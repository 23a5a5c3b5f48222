//! What can be said of a frame without the model that it is of.

use super::decode::{next_section, open};
use super::header::Header;
use super::kind;
use crate::error::DecodeError;

/// A frame's header and sections. Its contents are not read: that takes the layout, and is what [`crate::Frame`] is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outline {
    /// Whose frame it is, and of what.
    pub header: Header,
    /// Its sections, in order.
    pub sections: Vec<SectionOutline>,
}

/// One layer's section of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectionOutline {
    /// The layer's number.
    pub layer: usize,
    /// How its elements are written.
    pub form: Form,
    /// Bytes of the section.
    pub bytes: usize,
}

/// How the elements of a section are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Every element, in f32.
    Dense,
    /// Every element, in f16.
    Half,
    /// Selected elements.
    Selected,
}

impl Outline {
    /// Reads the outline of a frame whose checksum is right.
    pub fn read(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (header, count, mut rest) = open(bytes)?;
        let mut sections = Vec::new();
        while !rest.is_empty() {
            let section = next_section(&mut rest)?;
            let layer = section.layer;
            let form = match section.kind {
                kind::DENSE => Form::Dense,
                kind::HALF => Form::Half,
                kind::SELECTED => Form::Selected,
                kind => return Err(DecodeError::Kind { layer, kind }),
            };
            sections.push(SectionOutline { layer, form, bytes: section.bytes });
        }
        match sections.len() == count as usize {
            true => Ok(Self { header, sections }),
            false => Err(DecodeError::Layer {
                position: sections.len().min(count as usize),
                expected: None,
                actual: None,
            }),
        }
    }
}
