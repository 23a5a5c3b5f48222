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

/// The building blocks of frames, for those who frame selections in their own way.
pub mod codec {
    pub use crate::wire::bits::{BitReader, BitWriter};
    pub use crate::wire::rice::{decode_range, encode_range, usual_parameter};
    pub use crate::wire::varint::{read as read_varint, write as write_varint};
}

pub use averager::{Averager, Outcome};
pub use compressor::{Compressor, Sending};
pub use error::{AverageError, CompressError, DecodeError, PolicyError, StateError};
pub use gradient::Gradient;
pub use half;
pub use kernel::{Kernel, write_blocks};
pub use layout::{Layer, Layout, MAX_ELEMENTS};
pub use packet::{Packet, Selected, Sparse};
pub use policy::{Kind, MAX_BIN, Parameter, Policy, Treatment};
pub use scale::Scale;
pub use state::SavedBy;
pub use statistics::{LayerStatistics, ResidualStatistics, entropy_bytes};
pub use wire::{Codec, Expected, Form, Frame, FrameWriter, Header, Outline, SectionOutline, VERSION};
