//! The paper's budget: one 8-bit word a value for bins under 64 elements, one 16-bit word for larger bins.
//!
//! A word has the index within the bin in its lowest 6 or 14 bits, then the sign (1 is negative), then a bit that says
//! that the value is its bin's last. Bins follow each other, so a value's bin is known without being written. Since the
//! last index of a bin is always its bin's last value, that index *without* the last bit is free to mean bins without
//! values: with sign 0 one such bin, with sign 1 as many as the next word says, plus 1.

use super::bits::TRUNCATED;
use crate::error::DecodeError;
use crate::packet::Selected;
use crate::policy::{MAX_BIN, Treatment};

/// Returns the elements of a bin. Top-k has no bins of its own and uses the largest.
pub(super) fn bin(treatment: Treatment) -> usize {
    match treatment {
        Treatment::Bins(bin) => bin as usize,
        _ => MAX_BIN as usize,
    }
}

/// The words of one width.
#[derive(Debug, Clone, Copy)]
struct Width {
    bytes: usize,
    /// The bit of the sign, which is the one above the index.
    sign: usize,
    /// The bit of a bin's last value.
    last: usize,
    /// The longest run of bins without values that a word can hold.
    most_empty: usize,
}

impl Width {
    fn of(bin: usize) -> Self {
        let (bytes, index_bits) = if bin < 64 { (1, 6) } else { (2, 14) };
        Self { bytes, sign: 1 << index_bits, last: 2 << index_bits, most_empty: 4 << index_bits }
    }

    fn write(self, word: usize, out: &mut Vec<u8>) {
        match self.bytes {
            1 => out.push(word as u8),
            _ => out.extend_from_slice(&(word as u16).to_le_bytes()),
        }
    }
}

// Inlined it would slow down the other codec, which has the same caller.
#[inline(never)]
pub(super) fn encode(selected: &[Selected], bin_size: usize, out: &mut Vec<u8>) {
    let width = Width::of(bin_size);
    let mut next_bin = 0;
    for values in selected.chunk_by(|a, b| a.index() / bin_size == b.index() / bin_size) {
        let bin = values[0].index() / bin_size;
        let mut empty = bin - next_bin;
        while empty > 0 {
            let run = empty.min(width.most_empty);
            if run == 1 {
                width.write(bin_size - 1, out);
            } else {
                width.write((bin_size - 1) | width.sign, out);
                width.write(run - 1, out);
            }
            empty -= run;
        }
        for (position, value) in values.iter().enumerate() {
            let end = if position + 1 == values.len() { width.last } else { 0 };
            width.write((value.index() - bin * bin_size) | (value.sign() * width.sign) | end, out);
        }
        next_bin = bin + 1;
    }
}

/// Words that are read a few at a time.
#[derive(Debug, Clone)]
pub(super) struct Words<'a> {
    bytes: &'a [u8],
    width: Width,
    layer: usize,
    /// Elements of a bin, and of the layer.
    bin: usize,
    elements: usize,
    /// The first element of the current bin.
    bin_start: usize,
    /// The lowest index within it that its next value may have.
    lowest: usize,
    /// The bins just passed over.
    passed: usize,
}

impl<'a> Words<'a> {
    pub(super) fn open(
        bytes: &'a [u8],
        layer: usize,
        bin: usize,
        elements: usize,
    ) -> Result<Self, DecodeError> {
        let width = Width::of(bin);
        match bytes.len().is_multiple_of(width.bytes) {
            true => Ok(Self { bytes, width, layer, bin, elements, bin_start: 0, lowest: 0, passed: 0 }),
            false => Err(TRUNCATED),
        }
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

    fn word(&mut self) -> Option<usize> {
        let (word, rest) = self.bytes.split_at_checked(self.width.bytes)?;
        self.bytes = rest;
        Some(match word {
            &[low, high] => usize::from(u16::from_le_bytes([low, high])),
            _ => usize::from(word[0]),
        })
    }

    /// Reads the next element. After the last it checks that the words end where they may.
    fn next(&mut self) -> Result<Option<Selected>, DecodeError> {
        let Self { bin, elements, width: Width { sign, last, most_empty, .. }, .. } = *self;
        let outside = DecodeError::Index { layer: self.layer };
        while let Some(word) = self.word() {
            let index = word & (sign - 1);
            let ends = word & last != 0;
            if index == bin - 1 && !ends {
                let follows_values = self.passed == 0 || self.passed == most_empty;
                self.passed = match word & sign {
                    0 => 1,
                    _ => 1 + self.word().ok_or(TRUNCATED)?,
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
