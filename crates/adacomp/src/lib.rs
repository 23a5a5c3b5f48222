#![doc = include_str!("../README.md")]

mod averager;
mod clip;
mod compressor;
mod error;
mod gradient;
mod kernel;
mod packet;
mod policy;
mod residual;
mod selection;
#[cfg(feature = "state")]
mod state;
mod wire;

/// What the other crates of this workspace build on. It may change in any release.
#[doc(hidden)]
pub mod internal {
    pub use crate::averager::check_output;
    pub use crate::clip::{bound, is_clip};
    pub use crate::kernel::{Output, largest, write_blocks};
    pub use crate::policy::check_ascending;
    #[cfg(feature = "state")]
    pub use crate::state::STATE_KEY;
    pub use crate::wire::bits::{BitReader, BitWriter, read_varint, write_varint};
    pub use crate::wire::rice::{decode_range, encode_range, usual_parameter};
}

pub use averager::{Averager, Outcome};
pub use compressor::{Compressor, LayerStatistics, Sending};
pub use error::{AverageError, CompressError, DecodeError, PolicyError, UnknownName};
pub use gradient::Gradient;
pub use half;
pub use kernel::Kernel;
pub use packet::{Packet, Selected, Sparse};
pub use policy::{Kind, Layer, Layout, Parameter, Policy, Treatment, growing_bin};
pub use residual::ResidualStatistics;
pub use selection::Scale;
#[cfg(feature = "state")]
pub use state::{SavedBy, StateError};
pub use wire::{
    Codec, Form, Frame, FrameWriter, Header, Section, VERSION, entropy_bytes, outline, section_bytes,
};
