#![doc = include_str!("../README.md")]

mod averager;
mod compressor;
mod error;
mod gradient;
mod kernel;
mod layout;
mod packet;
mod policy;
mod residual;
mod state;
mod statistics;
mod topk;
mod wire;

pub use averager::{Averager, Outcome};
pub use compressor::{Compressor, Sending};
pub use error::{AverageError, CompressError, DecodeError, PolicyError, StateError};
pub use gradient::Gradient;
pub use half;
pub use kernel::Kernel;
pub use layout::{Layer, Layout, MAX_ELEMENTS};
pub use packet::{Packet, Selected, Sparse};
pub use policy::{Kind, MAX_BIN, Parameter, Policy, Treatment};
pub use statistics::{LayerStatistics, ResidualStatistics};
pub use wire::{Codec, Expected, Frame, FrameWriter, Header, VERSION};
