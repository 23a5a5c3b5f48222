//! Gaps between selected elements in Golomb-Rice codes, with the sign: close to the entropy of where they are.
//!
//! Layout: the count (varint); unless it is 0 the parameter `k` (one byte), then for each element the gap to the one
//! before, `g = index - previous - 1` (the first counts from -1), as `g >> k` zeros and a one, the sign (1 is negative),
//! and the lowest `k` bits of `g`.

use super::bits::{AT_HAND, BitReader, BitWriter, TRUNCATED, read_varint, write_varint};
use crate::error::DecodeError;
use crate::packet::{Selected, ascend_within, make_room};
use std::ops::Range;

/// An index has 31 bits, so no gap needs a larger parameter.
const MAX_PARAMETER: u32 = 30;

pub(super) fn encode(selected: &[Selected], out: &mut Vec<u8>) {
    write_varint(selected.len() as u32, out);
    let Some(last) = selected.last() else { return };
    let parameter = best_parameter(selected, last.index() + 1);
    out.push(parameter as u8);
    encode_codes(selected, 0, parameter, out);
}

/// Writes selected elements of a range without the parameter, which both sides derive from the count. With many short
/// ranges that byte would matter.
///
/// # Panics
/// If the elements are not in ascending order and in the range.
pub fn encode_range(selected: &[Selected], range: Range<usize>, out: &mut Vec<u8>) {
    // A gap below 0 would be written as zeros until memory ends.
    assert!(ascend_within(selected, range.clone()), "elements are not ascending, or not in {range:?}");
    write_varint(selected.len() as u32, out);
    encode_codes(selected, range.start, usual_parameter(selected.len(), range.len()), out);
}

/// Returns the parameter for `count` elements at random positions: the smallest `k` with
/// `2^k >= ln(golden ratio) * span / count`; a larger one takes more bits. In integers, because both sides must find the same.
pub fn usual_parameter(count: usize, span: usize) -> u32 {
    const LN_GOLDEN_RATIO: u128 = 2066789051; // times 2^32
    let wanted = span as u128 * LN_GOLDEN_RATIO;
    (0..MAX_PARAMETER)
        .find(|parameter| (count as u128) << (parameter + 32) >= wanted)
        .unwrap_or(MAX_PARAMETER)
}

fn encode_codes(selected: &[Selected], start: usize, parameter: u32, out: &mut Vec<u8>) {
    let mut bits = BitWriter::new(out);
    for (gap, element) in gaps(selected, start) {
        let quotient = gap >> parameter;
        let remainder = gap & !(!0 << parameter);
        let tail = 1 | (element.sign() as u64) << 1 | remainder << 2;
        bits.write_after_zeros(quotient, tail, parameter + 2);
    }
    bits.finish();
}

fn gaps(selected: &[Selected], start: usize) -> impl Iterator<Item = (u64, Selected)> {
    let mut next = start as u64;
    selected.iter().map(move |&element| {
        let gap = element.index() as u64 - next;
        next = element.index() as u64 + 1;
        (gap, element)
    })
}

/// Returns the parameter that takes the fewest bits. It is near `log2(m ln 2)` for gaps with mean `m`. From there the bits of
/// three neighbours are counted until the middle one is the best. There is only one minimum, so that is the best of all.
fn best_parameter(selected: &[Selected], span: usize) -> u32 {
    let mean = span as f64 / selected.len() as f64 - 1.0;
    let mut middle =
        ((mean * std::f64::consts::LN_2).max(1.0).log2().round() as u32).clamp(1, MAX_PARAMETER - 1);
    loop {
        let mut zeros = [0u64; 3];
        for (gap, _) in gaps(selected, 0) {
            let below = gap >> (middle - 1);
            zeros = [zeros[0] + below, zeros[1] + (below >> 1), zeros[2] + (below >> 2)];
        }
        let [below, here, above] = zeros;
        let count = selected.len() as u64;
        // A step up costs each element a bit and saves it some of its zeros.
        if below < here + count {
            if middle == 1 {
                return 0;
            }
            middle -= 1;
        } else if above + count < here {
            if middle + 1 == MAX_PARAMETER {
                return MAX_PARAMETER;
            }
            middle += 1;
        } else {
            return middle;
        }
    }
}

/// Reads what [`encode_range`] wrote from the front of `bytes`, which moves past it, and appends it to `selected`.
pub fn decode_range(
    bytes: &mut &[u8],
    range: Range<usize>,
    layer: usize,
    selected: &mut Vec<Selected>,
) -> Result<(), DecodeError> {
    let count = read_varint(bytes, "a count")? as usize;
    let parameter = usual_parameter(count, range.len());
    let mut codes = Codes::new(bytes, count, parameter, range, layer)?;
    let start = selected.len();
    make_room(selected, count);
    selected.resize(start + count, Selected::default());
    codes.read(&mut selected[start..])?;
    *bytes = codes.bits.after().ok_or(DecodeError::Trailing { part: "selected elements", count: 0 })?;
    Ok(())
}

/// Codes that are read a few at a time.
#[derive(Debug, Clone)]
pub(super) struct Codes<'a> {
    bits: BitReader<'a>,
    parameter: u32,
    /// Codes that are left.
    left: usize,
    /// The lowest index that the next element may have, and the one behind the highest.
    next: u64,
    end: usize,
    layer: usize,
}

impl<'a> Codes<'a> {
    /// Opens what [`encode`] wrote.
    pub(super) fn open(mut bytes: &'a [u8], layer: usize, elements: usize) -> Result<Self, DecodeError> {
        let count = read_varint(&mut bytes, "a count")? as usize;
        if count == 0 {
            return match bytes.len() {
                0 => Self::new(bytes, 0, 0, 0..elements, layer),
                count => Err(DecodeError::Trailing { part: "an empty selection", count }),
            };
        }
        let (&parameter, bytes) =
            bytes.split_first().ok_or(DecodeError::Truncated { part: "a rice parameter" })?;
        if u32::from(parameter) > MAX_PARAMETER {
            return Err(DecodeError::RiceParameter { layer, actual: parameter });
        }
        Self::new(bytes, count, parameter.into(), 0..elements, layer)
    }

    fn new(
        bytes: &'a [u8],
        count: usize,
        parameter: u32,
        range: Range<usize>,
        layer: usize,
    ) -> Result<Self, DecodeError> {
        // Each element takes at least a one, a sign and the remainder, so the bytes themselves cap what is reserved.
        let most = range.len().min(8 * bytes.len() / (parameter as usize + 2));
        if count > most {
            return Err(DecodeError::Count { layer, count, most });
        }
        let (next, end) = (range.start as u64, range.end);
        Ok(Self { bits: BitReader::new(bytes), parameter, left: count, next, end, layer })
    }

    /// Reads the next elements, as many as there are or as `some` has room for, and returns their number.
    pub(super) fn read(&mut self, some: &mut [Selected]) -> Result<usize, DecodeError> {
        let count = some.len().min(self.left);
        let mut done = 0;
        while done < count {
            let Self { bits, parameter, next, end, .. } = self;
            done += short_codes(bits, *parameter, next, *end, &mut some[done..count]);
            if let Some(element) = some[..count].get_mut(done) {
                let (gap, negative) = any_code(bits, *parameter)?;
                let index = *next + gap;
                if index >= *end as u64 {
                    return Err(DecodeError::Index { layer: self.layer });
                }
                *element = Selected::new(index as u32, negative);
                *next = index + 1;
                done += 1;
            }
        }
        self.left -= count;
        if self.bits.past_end() {
            return Err(TRUNCATED);
        }
        Ok(count)
    }

    /// Checks that nothing follows the last element, once it was read.
    pub(super) fn end(&self) -> Result<(), DecodeError> {
        match self.bits.after() {
            Some([]) => Ok(()),
            _ => Err(DecodeError::Trailing { part: "selected elements", count: self.bits.bytes_left() }),
        }
    }
}

/// Short codes that are read between two refills.
const AT_ONCE: usize = 3;

/// Reads codes as long as they are short, in range and not near the end, and returns their number.
///
/// Nearly all codes are read here, so this works on a copy of the reader that can stay in registers.
fn short_codes(
    bits: &mut BitReader<'_>,
    parameter: u32,
    next: &mut u64,
    end: usize,
    selected: &mut [Selected],
) -> usize {
    let mut reader = *bits;
    let mask = !(!0 << parameter);
    let mut done = 0;
    'all: for some in selected.chunks_mut(AT_ONCE) {
        if !reader.refill_before_end() {
            break;
        }
        for element in some {
            let word = reader.word;
            let zeros = word.trailing_zeros();
            let length = zeros + 2 + parameter;
            let behind = word >> (zeros & 63) >> 1;
            let index = *next + (u64::from(zeros) << parameter | behind >> 1 & mask);
            if length > AT_HAND / AT_ONCE as u32 || index >= end as u64 {
                break 'all;
            }
            reader.skip(length);
            *element = Selected::new(index as u32, behind & 1 == 1);
            *next = index + 1;
            done += 1;
        }
    }
    *bits = reader;
    done
}

/// Reads one code of any length, and returns its gap and whether the sign is negative.
fn any_code(bits: &mut BitReader<'_>, parameter: u32) -> Result<(u64, bool), DecodeError> {
    let zeros = bits.read_zeros()?;
    let behind = bits.read(parameter + 1)?;
    Ok((zeros << parameter | behind >> 1, behind & 1 == 1))
}
