//! Frames: what travels between learners. The format is specified in `docs/wire-format.md`.
//!
//! The envelope is here and in [`header`]; each codec for selected elements has a file of its own.

pub(crate) mod bits;
mod checked;
mod contents;
mod decode;
mod encode;
mod header;
mod outline;
mod paper;
pub(crate) mod rice;
pub(crate) mod varint;

pub(crate) use checked::{Adder, Checked};
pub(crate) use decode::Expected;
pub use decode::Frame;
pub use encode::FrameWriter;
pub use header::{Codec, Header};
pub use outline::{Form, Outline, SectionOutline};

/// The version of the format.
pub const VERSION: u8 = 1;

/// The kind byte of a section.
mod kind {
    /// Every element, in f32.
    pub(super) const DENSE: u8 = 0;
    /// Every element, in f16.
    pub(super) const HALF: u8 = 1;
    /// Selected elements, by the frame's codec.
    pub(super) const SELECTED: u8 = 2;
}

/// How selected elements are cut for the paper's codec.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Elements of the layer.
    elements: usize,
    /// Elements of a bin: top-k has no bins of its own and uses the largest.
    bin: usize,
}

impl Cut {
    fn of(layer: &crate::layout::Layer) -> Self {
        let bin = match layer.treatment {
            crate::policy::Treatment::Bins(bin) => bin,
            _ => crate::policy::MAX_BIN,
        };
        Self { elements: layer.elements(), bin: bin as usize }
    }
}
