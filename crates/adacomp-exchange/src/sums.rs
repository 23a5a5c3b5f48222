//! Sums of signs in few bytes: gaps between those that are not 0, signs and magnitudes, in Golomb-Rice codes.
//!
//! Layout: how many are not 0 (varint); unless that is 0 one byte with the two parameters (gaps in the lower five bits,
//! magnitudes in the upper three), then for each the gap, a sign bit and the magnitude minus 1.

use adacomp::DecodeError;
use adacomp::codec::{BitReader, BitWriter, read_varint, write_varint};

/// Appends sums to `out`.
pub fn encode_sums(sums: &[i32], out: &mut Vec<u8>) {
    let mut gaps = Vec::new();
    let mut magnitudes = Vec::new();
    let mut next = 0;
    for (index, &sum) in sums.iter().enumerate().filter(|(_, sum)| **sum != 0) {
        gaps.push((index - next) as u64);
        magnitudes.push(u64::from(sum.unsigned_abs()) - 1);
        next = index + 1;
    }
    write_varint(gaps.len() as u32, out);
    if gaps.is_empty() {
        return;
    }
    let (gap_parameter, magnitude_parameter) = (best_parameter(&gaps, 30), best_parameter(&magnitudes, 7));
    out.push((gap_parameter | magnitude_parameter << 5) as u8);
    let signs = sums.iter().filter(|sum| **sum != 0).map(|sum| u64::from(*sum < 0));
    let mut bits = BitWriter::new(out);
    for ((gap, magnitude), sign) in gaps.into_iter().zip(magnitudes).zip(signs) {
        bits.write_rice(gap, gap_parameter);
        bits.write(sign, 1);
        bits.write_rice(magnitude, magnitude_parameter);
    }
    bits.finish();
}

/// The parameter with the fewest bits. Their number has one valley, so the first rise ends the search.
fn best_parameter(numbers: &[u64], most: u32) -> u32 {
    let bits = |parameter: u32| -> u64 {
        numbers.iter().map(|number| (number >> parameter) + u64::from(parameter)).sum()
    };
    (0..most).find(|&parameter| bits(parameter + 1) >= bits(parameter)).unwrap_or(most)
}

/// Reads so many sums of at most `most` either way from the front of `bytes`, which moves past them, and hands over those
/// that are not 0.
pub fn decode_sums(
    bytes: &mut &[u8],
    layer: usize,
    elements: usize,
    most: u32,
    mut take: impl FnMut(usize, i32),
) -> Result<(), DecodeError> {
    let count = read_varint(bytes, "a count")? as usize;
    if count == 0 {
        return Ok(());
    }
    if count > elements {
        return Err(DecodeError::Count { layer, count, most: elements });
    }
    let (&parameters, rest) =
        bytes.split_first().ok_or(DecodeError::Truncated { part: "rice parameters" })?;
    let (gap_parameter, magnitude_parameter) = (u32::from(parameters & 31), u32::from(parameters >> 5));
    if gap_parameter > 30 {
        return Err(DecodeError::RiceParameter { layer, actual: parameters & 31 });
    }
    let mut bits = BitReader::new(rest);
    let mut next = 0;
    for _ in 0..count {
        let index = next + bits.read_rice(gap_parameter)?;
        let negative = bits.read(1)? == 1;
        let magnitude = bits.read_rice(magnitude_parameter)? + 1;
        if index >= elements as u64 {
            return Err(DecodeError::Index { layer });
        }
        if magnitude > u64::from(most) {
            return Err(DecodeError::Value { layer });
        }
        take(index as usize, if negative { -(magnitude as i32) } else { magnitude as i32 });
        next = index + 1;
    }
    *bytes = bits.after().ok_or(DecodeError::Trailing { part: "sums", count: 0 })?;
    Ok(())
}
