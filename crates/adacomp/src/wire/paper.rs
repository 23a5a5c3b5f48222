//! The paper's budget: one 8-bit word a value for bins under 64 elements, one 16-bit word for larger bins.
//!
//! A word has the index within the bin in its lowest 6 or 14 bits, then the sign (1 is negative), then a bit that says
//! that the value is its bin's last. Bins follow each other, so a value's bin is known without being written. Since the
//! last index of a bin is always its bin's last value, that index *without* the last bit is free to mean bins without
//! values: with sign 0 one such bin, with sign 1 as many as the next word says, plus 1.

use super::Cut;
use crate::error::DecodeError;
use crate::packet::Selected;

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

/// Words that are read a few at a time.
#[derive(Debug, Clone)]
pub(super) struct Words<'a> {
    bytes: &'a [u8],
    layer: usize,
    cut: Cut,
    /// The first element of the current bin.
    bin_start: usize,
    /// The lowest index within it that its next value may have.
    lowest: usize,
    /// The bins just passed over.
    passed: usize,
}

impl<'a> Words<'a> {
    pub(super) fn open(bytes: &'a [u8], layer: usize, cut: Cut) -> Result<Self, DecodeError> {
        let words = Self { bytes, layer, cut, bin_start: 0, lowest: 0, passed: 0 };
        match bytes.len().is_multiple_of(words.size()) {
            true => Ok(words),
            false => Err(TRUNCATED),
        }
    }

    /// Returns the bytes of a word.
    fn size(&self) -> usize {
        if self.cut.bin < WIDE { u8::SIZE } else { u16::SIZE }
    }

    /// Reads the next elements, as many as there are or as `some` has room for, and returns their number.
    pub(super) fn read(&mut self, some: &mut [Selected]) -> Result<usize, DecodeError> {
        for (done, element) in some.iter_mut().enumerate() {
            match self.next()? {
                Some(next) => *element = next,
                None => return Ok(done),
            }
        }
        Ok(some.len())
    }

    /// Reads the next element. After the last it checks that the words end where they may.
    fn next(&mut self) -> Result<Option<Selected>, DecodeError> {
        if self.cut.bin < WIDE { self.next_of::<u8>() } else { self.next_of::<u16>() }
    }

    fn word<W: Word>(&mut self) -> Option<usize> {
        let (word, rest) = self.bytes.split_at_checked(W::SIZE)?;
        self.bytes = rest;
        Some(W::read(word))
    }

    fn next_of<W: Word>(&mut self) -> Result<Option<Selected>, DecodeError> {
        let Bits { sign, last, most_empty } = W::BITS;
        let Cut { bin, elements } = self.cut;
        let outside = DecodeError::Index { layer: self.layer };
        while let Some(word) = self.word::<W>() {
            let index = word & (sign - 1);
            let ends = word & last != 0;
            if index == bin - 1 && !ends {
                let follows_values = self.passed == 0 || self.passed == most_empty;
                self.passed = match word & sign {
                    0 => 1,
                    _ => 1 + self.word::<W>().ok_or(TRUNCATED)?,
                };
                // A frame has one encoding: runs are as long as they can be, and a run of one takes one word.
                let shortest = follows_values && (self.passed > 1 || word & sign == 0);
                if self.lowest != 0 || !shortest {
                    return Err(outside);
                }
                self.bin_start += self.passed * bin;
                if self.bin_start >= elements {
                    return Err(outside);
                }
                continue;
            }
            let here = self.bin_start + index;
            if index < self.lowest || index >= bin || here >= elements {
                return Err(outside);
            }
            self.passed = 0;
            (self.bin_start, self.lowest) =
                if ends { (self.bin_start + bin, 0) } else { (self.bin_start, index + 1) };
            return Ok(Some(Selected::new(here as u32, word & sign != 0)));
        }
        if self.lowest != 0 || self.passed != 0 { Err(TRUNCATED) } else { Ok(None) }
    }
}

const TRUNCATED: DecodeError = DecodeError::Truncated { part: "selected elements" };
