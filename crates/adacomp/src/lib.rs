#![doc = include_str!("../README.md")]

mod averager;
mod blocks;
mod compressor;
mod error;
mod gradient;
mod kernel;
mod layout;
mod packet;
mod policy;
mod residual;
mod scale;
mod state;
mod statistics;
mod topk;
mod wire;

/// Has the code in the README of the whole project tested.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}

/// What the other crates of this workspace build on. It may change in any release.
#[doc(hidden)]
pub mod internal {
    pub use crate::kernel::write_blocks;
    pub use crate::layout::check_ascending;
    pub use crate::wire::bits::{BitReader, BitWriter, read_varint, write_varint};
    pub use crate::wire::rice::{decode_range, encode_range, usual_parameter};
}

pub use averager::{Averager, Outcome};
pub use compressor::{Compressor, Sending};
pub use error::{AverageError, CompressError, DecodeError, PolicyError, StateError, UnknownName};
pub use gradient::Gradient;
pub use half;
pub use kernel::Kernel;
pub use layout::{Layer, Layout, MAX_ELEMENTS};
pub use packet::{Packet, Selected, Sparse};
pub use policy::{Kind, MAX_BIN, Parameter, Policy, Treatment};
pub use scale::Scale;
pub use state::SavedBy;
pub use statistics::{LayerStatistics, ResidualStatistics};
pub use wire::{
    Codec, Form, Frame, FrameWriter, Header, Section, VERSION, entropy_bytes, outline, section_bytes,
};
