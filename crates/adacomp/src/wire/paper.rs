//! The paper's budget: one 8-bit word a value for bins under 64 elements, one 16-bit word for larger bins.
//!
//! A word has the index within the bin in its lowest 6 or 14 bits, then the sign (1 is negative), then a bit that says
//! that the value is its bin's last. Bins follow each other, so a value's bin is known without being written. Since the
//! last index of a bin is always its bin's last value, that index *without* the last bit is free to mean bins without
//! values: with sign 0 one such bin, with sign 1 as many as the next word says, plus 1.

use super::Cut;
use crate::error::DecodeError;
use crate::packet::{Selected, make_room};

/// The two word widths.
trait Word {
    const INDEX_BITS: u32;
    const SIZE: usize = (Self::INDEX_BITS as usize + 2) / 8;
    const BITS: Bits =
        Bits { sign: 1 << Self::INDEX_BITS, last: 2 << Self::INDEX_BITS, most_empty: 4 << Self::INDEX_BITS };

    fn write(word: usize, out: &mut Vec<u8>);
    fn read(bytes: &[u8]) -> usize;
}

/// The bits above the index, and the longest run of bins without values that a word can hold.
struct Bits {
    sign: usize,
    last: usize,
    most_empty: usize,
}

impl Word for u8 {
    const INDEX_BITS: u32 = 6;

    fn write(word: usize, out: &mut Vec<u8>) {
        out.push(word as u8);
    }

    fn read(bytes: &[u8]) -> usize {
        usize::from(bytes[0])
    }
}

impl Word for u16 {
    const INDEX_BITS: u32 = 14;

    fn write(word: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&(word as u16).to_le_bytes());
    }

    fn read(bytes: &[u8]) -> usize {
        usize::from(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
}

/// Bins from this size on take 16-bit words.
const WIDE: usize = 64;

pub(super) fn encode(selected: &[Selected], cut: Cut, out: &mut Vec<u8>) {
    if cut.bin < WIDE {
        encode_words::<u8>(selected, cut, out)
    } else {
        encode_words::<u16>(selected, cut, out)
    }
}

fn encode_words<W: Word>(selected: &[Selected], cut: Cut, out: &mut Vec<u8>) {
    let Bits { sign, last, most_empty } = W::BITS;
    let mut next_bin = 0;
    for values in selected.chunk_by(|a, b| a.index() / cut.bin == b.index() / cut.bin) {
        let bin = values[0].index() / cut.bin;
        let mut empty = bin - next_bin;
        while empty > 0 {
            let run = empty.min(most_empty);
            if run == 1 {
                W::write(cut.bin - 1, out);
            } else {
                W::write((cut.bin - 1) | sign, out);
                W::write(run - 1, out);
            }
            empty -= run;
        }
        for (position, value) in values.iter().enumerate() {
            let end = if position + 1 == values.len() { last } else { 0 };
            W::write((value.index() - bin * cut.bin) | (value.sign() * sign) | end, out);
        }
        next_bin = bin + 1;
    }
}

/// Appends the elements to `selected` if all of `bytes` is right.
pub(super) fn decode(
    bytes: &[u8],
    layer: usize,
    cut: Cut,
    selected: &mut Vec<Selected>,
) -> Result<(), DecodeError> {
    if cut.bin < WIDE {
        decode_words::<u8>(bytes, layer, cut, selected)
    } else {
        decode_words::<u16>(bytes, layer, cut, selected)
    }
}

fn decode_words<W: Word>(
    bytes: &[u8],
    layer: usize,
    cut: Cut,
    selected: &mut Vec<Selected>,
) -> Result<(), DecodeError> {
    if !bytes.len().is_multiple_of(W::SIZE) {
        return Err(DecodeError::Truncated { part: "selected elements" });
    }
    let Bits { sign, last, most_empty } = W::BITS;
    make_room(selected, bytes.len() / W::SIZE);
    let mut words = bytes.chunks_exact(W::SIZE).map(W::read);
    // The first element of the current bin, the lowest index its next value may have, and the bins just passed over.
    let (mut bin_start, mut lowest, mut passed) = (0, 0, 0);
    while let Some(word) = words.next() {
        let index = word & (sign - 1);
        let ends = word & last != 0;
        if index == cut.bin - 1 && !ends {
            let follows_values = passed == 0 || passed == most_empty;
            passed = match word & sign {
                0 => 1,
                _ => 1 + words.next().ok_or(DecodeError::Truncated { part: "selected elements" })?,
            };
            // A frame has one encoding: runs are as long as they can be, and a run of one takes one word.
            let shortest = follows_values && (passed > 1 || word & sign == 0);
            if lowest != 0 || !shortest {
                return Err(DecodeError::Index { layer });
            }
            bin_start += passed * cut.bin;
            if bin_start >= cut.elements {
                return Err(DecodeError::Index { layer });
            }
            continue;
        }
        if index < lowest || index >= cut.bin || bin_start + index >= cut.elements {
            return Err(DecodeError::Index { layer });
        }
        selected.push(Selected::new((bin_start + index) as u32, word & sign != 0));
        passed = 0;
        if ends {
            bin_start += cut.bin;
            lowest = 0;
        } else {
            lowest = index + 1;
        }
    }
    if lowest != 0 || passed != 0 {
        return Err(DecodeError::Truncated { part: "selected elements" });
    }
    Ok(())
}
