//! Frames: what travels between learners.
//!
//! This file has the header and writes frames; `decode.rs` reads them; each codec for selected elements has a file of its
//! own. `docs/wire-format.md` of the project specifies the bytes.

pub(crate) mod bits;
mod decode;
mod paper;
pub(crate) mod rice;

pub use decode::{Form, Frame, Section, outline};

use crate::error::{DecodeError, UnknownName};
use crate::packet::{Packet, Sparse, ascend_within};
use crate::policy::{Layout, Treatment};
use half::f16;
use std::fmt;
use std::str::FromStr;

/// The version of the format.
pub const VERSION: u8 = 1;

const MAGIC: [u8; 4] = *b"ADAC";
const NON_FINITE: u8 = 1;

/// How selected elements are written. Its discriminant is the frame's codec byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Codec {
    /// The paper's budget: 8 bits a value for bins under 64 elements, 16 bits for larger ones.
    Paper = 1,
    /// Gaps between elements in Golomb-Rice codes: close to the entropy.
    #[default]
    Rice = 2,
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
        UnknownName::find(name, "codec", "rice or paper", [Self::Paper, Self::Rice])
    }
}

/// Whose frame it is, and of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// How selected elements are written.
    pub codec: Codec,
    /// The learner's gradient has a NaN or an infinity: the frame has no sections, and all learners roll the step back.
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

    /// Writes the header.
    ///
    /// # Panics
    /// If the learner's number takes more than 32 bits.
    fn write(&self, sections: u32, out: &mut Vec<u8>) {
        let learner = u32::try_from(self.learner).expect("a learner number of 32 bits");
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, self.codec as u8, if self.non_finite { NON_FINITE } else { 0 }, 0]);
        out.extend_from_slice(&self.fingerprint.to_le_bytes());
        out.extend_from_slice(&self.step.to_le_bytes());
        out.extend_from_slice(&learner.to_le_bytes());
        out.extend_from_slice(&sections.to_le_bytes());
    }

    /// Reads the header at the front of `bytes`, which moves past it, and the number of sections.
    fn read(bytes: &mut &[u8]) -> Result<(Self, u32), DecodeError> {
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
            .find(|known| *known as u8 == codec)
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

/// Writes a frame section by section.
pub struct FrameWriter<'a> {
    layout: &'a Layout,
    codec: Codec,
    out: &'a mut Vec<u8>,
    sections: u32,
    next_layer: usize,
}

impl<'a> FrameWriter<'a> {
    /// Starts a frame. What was in `out` is overwritten.
    ///
    /// # Panics
    /// If the header's fingerprint is not the layout's, or its learner number takes more than 32 bits.
    pub fn new(header: &Header, layout: &'a Layout, out: &'a mut Vec<u8>) -> Self {
        assert_eq!(header.fingerprint, layout.fingerprint(), "a header of another layout");
        out.clear();
        header.write(0, out);
        Self { layout, codec: header.codec, out, sections: 0, next_layer: 0 }
    }

    /// Writes what a layer sends, and returns the bytes that it takes.
    ///
    /// # Panics
    /// If layers do not come in ascending order, or the packet is not one of that layer, with its elements in ascending order.
    pub fn section(&mut self, layer: usize, packet: Packet<'_>) -> usize {
        if let Packet::Sparse(Sparse { selected, .. }) = packet {
            let layer = &self.layout[layer];
            // A gap below 0 would be written as zeros until memory ends.
            let fits = ascend_within(selected, 0..layer.elements());
            assert!(fits, "not ascending, or of another layer than `{}`", layer.name());
        }
        self.own_section(layer, packet)
    }

    /// The same for a packet of our own, whose elements ascend.
    pub(crate) fn own_section(&mut self, layer: usize, packet: Packet<'_>) -> usize {
        assert!(layer >= self.next_layer, "layer {layer} comes after layer {}", self.next_layer - 1);
        let start = self.out.len();
        bits::write_varint(layer as u32, self.out);
        self.out.push(0);
        let contents = self.out.len();
        self.out[contents - 1] = self.contents(layer, packet) as u8;

        // The length is known only now. It is written last and rotated to its place before the contents.
        let end = self.out.len();
        bits::write_varint((end - contents) as u32, self.out);
        let length_bytes = self.out.len() - end;
        self.out[contents..].rotate_right(length_bytes);
        self.sections += 1;
        self.next_layer = layer + 1;
        self.out.len() - start
    }

    /// Writes a section's contents, and returns its form.
    fn contents(&mut self, layer: usize, packet: Packet<'_>) -> Form {
        let layer = &self.layout[layer];
        match packet {
            Packet::Dense(values) => {
                assert_eq!(values.len(), layer.elements(), "packet of another layer than `{}`", layer.name());
                if layer.treatment == Treatment::Half {
                    self.out.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()));
                    Form::Half
                } else {
                    self.out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                    Form::Dense
                }
            }
            Packet::Sparse(Sparse { values, selected }) => {
                assert!(layer.treatment.selects(), "`{}` is sent dense", layer.name());
                debug_assert!(ascend_within(selected, 0..layer.elements()));
                self.out.extend_from_slice(&values[0].to_le_bytes());
                if matches!(layer.treatment, Treatment::TopK(_)) {
                    self.out.extend_from_slice(&values[1].to_le_bytes());
                }
                match self.codec {
                    Codec::Paper => paper::encode(selected, paper::bin(layer.treatment), self.out),
                    Codec::Rice => rice::encode(selected, self.out),
                }
                Form::Selected
            }
        }
    }

    /// Ends the frame with its checksum.
    pub fn finish(self) {
        let sections_at = Header::LENGTH - 4;
        self.out[sections_at..Header::LENGTH].copy_from_slice(&self.sections.to_le_bytes());
        let checksum = crc32fast::hash(self.out);
        self.out.extend_from_slice(&checksum.to_le_bytes());
    }
}

/// Returns the bytes that a section takes with any codec: for comparisons of codecs.
///
/// # Panics
/// If the packet is not one of that layer.
pub fn section_bytes(layout: &Layout, layer: usize, packet: Packet<'_>, codec: Codec) -> usize {
    let header = Header { codec, non_finite: false, fingerprint: layout.fingerprint(), step: 0, learner: 0 };
    FrameWriter::new(&header, layout, &mut Vec::new()).section(layer, packet)
}

/// Returns the fewest bytes on average for the positions and signs of selected elements, if these are independent:
/// `n h(k/n) + k` bits, where `h` is the binary entropy. A code that knows the bins could take a little less.
pub fn entropy_bytes(elements: usize, selected: usize) -> f64 {
    let share = selected as f64 / elements.max(1) as f64;
    let bits = |share: f64| if share > 0.0 { -share * share.log2() } else { 0.0 };
    (elements as f64 * (bits(share) + bits(1.0 - share)) + selected as f64) / 8.0
}

#[cfg(test)]
mod tests {
    use super::entropy_bytes;

    #[test]
    fn a_coin_takes_a_bit_and_a_sign_another() {
        assert_eq!(entropy_bytes(80, 0), 0.0);
        assert_eq!(entropy_bytes(80, 40), 10.0 + 5.0);
        assert_eq!(entropy_bytes(80, 80), 10.0);
        assert_eq!(entropy_bytes(0, 0), 0.0);
    }
}
