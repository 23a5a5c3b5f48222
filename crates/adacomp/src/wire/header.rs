//! The fixed part at the front of a frame.

use super::VERSION;
use crate::error::{DecodeError, UnknownName};
use std::fmt;
use std::str::FromStr;

const MAGIC: [u8; 4] = *b"ADAC";
const NON_FINITE: u8 = 1;

/// How selected elements are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Codec {
    /// The paper's budget: 8 bits a value for bins under 64 elements, 16 bits for larger ones.
    Paper,
    /// Gaps between elements in Golomb-Rice codes: close to the entropy.
    #[default]
    Rice,
}

impl Codec {
    fn byte(self) -> u8 {
        match self {
            Self::Paper => 1,
            Self::Rice => 2,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Paper => "paper",
            Self::Rice => "rice",
        })
    }
}

impl FromStr for Codec {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "paper" => Ok(Self::Paper),
            "rice" => Ok(Self::Rice),
            _ => Err(UnknownName { what: "codec", given: name.to_owned(), expected: "rice or paper" }),
        }
    }
}

/// Whose frame it is, and of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// How selected elements are written.
    pub codec: Codec,
    /// The learner's gradient has a NaN or an infinity: the frame has no sections, and all learners drop the step.
    pub non_finite: bool,
    /// [`crate::Layout::fingerprint`] of the sender.
    pub fingerprint: u64,
    /// The step.
    pub step: u64,
    /// The sender; its number takes 32 bits on the wire.
    pub learner: usize,
}

impl Header {
    /// Bytes of a header, with the number of sections.
    pub const LENGTH: usize = 32;

    /// # Panics
    /// If the learner's number takes more than 32 bits.
    pub(super) fn write(&self, sections: u32, out: &mut Vec<u8>) {
        let learner = u32::try_from(self.learner).expect("a learner number of 32 bits");
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, self.codec.byte(), if self.non_finite { NON_FINITE } else { 0 }, 0]);
        out.extend_from_slice(&self.fingerprint.to_le_bytes());
        out.extend_from_slice(&self.step.to_le_bytes());
        out.extend_from_slice(&learner.to_le_bytes());
        out.extend_from_slice(&sections.to_le_bytes());
    }

    /// The header at the front of `bytes`, which moves past it, and the number of sections.
    pub(super) fn read(bytes: &mut &[u8]) -> Result<(Self, u32), DecodeError> {
        let magic: [u8; 4] = take(bytes)?;
        if magic != MAGIC {
            return Err(DecodeError::Magic { actual: magic });
        }
        let [version, codec, flags, reserved] = take(bytes)?;
        if version != VERSION {
            return Err(DecodeError::Version { expected: VERSION, actual: version });
        }
        let codec = [Codec::Paper, Codec::Rice]
            .into_iter()
            .find(|known| known.byte() == codec)
            .ok_or(DecodeError::Codec { actual: codec })?;
        if flags > NON_FINITE || reserved != 0 {
            return Err(DecodeError::Flags { actual: u16::from_le_bytes([flags, reserved]) });
        }
        let header = Self {
            codec,
            non_finite: flags == NON_FINITE,
            fingerprint: u64::from_le_bytes(take(bytes)?),
            step: u64::from_le_bytes(take(bytes)?),
            learner: u32::from_le_bytes(take(bytes)?) as usize,
        };
        Ok((header, u32::from_le_bytes(take(bytes)?)))
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], DecodeError> {
    let (front, rest) = bytes.split_first_chunk().ok_or(DecodeError::Truncated { part: "the header" })?;
    *bytes = rest;
    Ok(*front)
}
