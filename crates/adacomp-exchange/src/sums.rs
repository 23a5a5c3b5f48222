//! Sums of signs in few bytes, close to their entropy.
//!
//! First come the elements whose sum is not 0, with their signs, as the core writes a selection. Then, level by level, which
//! of the elements of the level before have a larger magnitude: how many (varint) and, as gaps in Golomb-Rice codes, which;
//! where these are more than three in five, which are not. The last level has none. If more than three in five sums are not 0,
//! they are written as such a level too, and their signs behind it, a bit each.

use adacomp::internal::{
    BitReader, BitWriter, decode_range, encode_range, read_varint, usual_parameter, write_varint,
};
use adacomp::{DecodeError, Selected};
use std::ops::Range;

/// The number of elements whose signs are added up in the nearest cache.
const BLOCK: usize = 1 << 12;

/// Signs that are read together.
const SIGNS_AT_ONCE: usize = 32;

/// Adds up the signs of all senders, each with its selection from a range in ascending order. Writes the elements whose sum is
/// not 0, by their offset in the range, and the sum.
pub(crate) fn add_signs(senders: &[Vec<Selected>], range: Range<usize>, sums: &mut Vec<(u32, i32)>) {
    sums.clear();
    let mut rests: Vec<&[Selected]> = senders.iter().map(Vec::as_slice).collect();
    let (mut block, mut touched) = ([0i32; BLOCK], [0u64; BLOCK / 64]);
    for start in range.clone().step_by(BLOCK) {
        for rest in &mut rests {
            while let [element, after @ ..] = *rest
                && element.index() < start + BLOCK
            {
                let index = element.index() - start;
                block[index] += if element.is_negative() { -1 } else { 1 };
                touched[index / 64] |= 1 << (index % 64);
                *rest = after;
            }
        }
        for (word, bits) in touched.iter_mut().enumerate() {
            while *bits != 0 {
                let index = 64 * word + bits.trailing_zeros() as usize;
                match std::mem::take(&mut block[index]) {
                    0 => {}
                    sum => sums.push(((start - range.start + index) as u32, sum)),
                }
                *bits &= *bits - 1;
            }
        }
    }
}

/// Appends the sums of this many elements to `out`. `sums` are those that are not 0, by ascending index.
pub fn encode_sums(elements: usize, sums: &[(u32, i32)], out: &mut Vec<u8>) {
    let mut magnitudes: Vec<u32> = sums.iter().map(|(_, sum)| sum.unsigned_abs()).collect();
    if is_crowded(sums.len(), elements) {
        let mut all = vec![0; elements];
        sums.iter().for_each(|(index, sum)| all[*index as usize] = sum.unsigned_abs());
        encode_larger(&all, 1, out);
        let mut bits = BitWriter::new(out);
        sums.iter().for_each(|(_, sum)| bits.write(u64::from(*sum < 0), 1));
        bits.finish();
    } else {
        let selected: Vec<_> = sums.iter().map(|&(index, sum)| Selected::new(index, sum < 0)).collect();
        encode_range(&selected, 0..elements, out);
    }
    for level in 1.. {
        magnitudes.retain(|&magnitude| magnitude >= level);
        if magnitudes.is_empty() {
            break;
        }
        encode_larger(&magnitudes, level + 1, out);
    }
}

/// Returns whether `count` is more than three in five: from there on it takes fewer bits to write the others.
fn is_crowded(count: usize, of: usize) -> bool {
    5 * count > 3 * of
}

/// Appends which magnitudes reach a level.
fn encode_larger(magnitudes: &[u32], level: u32, out: &mut Vec<u8>) {
    let larger = magnitudes.iter().filter(|magnitude| **magnitude >= level).count();
    write_varint(larger as u32, out);
    let (written, of_larger) = written(larger, magnitudes.len());
    let parameter = usual_parameter(written, magnitudes.len());
    let mut bits = BitWriter::new(out);
    let mut next = 0;
    for (position, &magnitude) in magnitudes.iter().enumerate() {
        if (magnitude >= level) == of_larger {
            bits.write_rice((position - next) as u64, parameter);
            next = position + 1;
        }
    }
    bits.finish();
}

/// Returns how many positions are written, and whether they are of those that reach the level.
fn written(larger: usize, of: usize) -> (usize, bool) {
    if is_crowded(larger, of) { (of - larger, false) } else { (larger, true) }
}

/// Reads the sums of this many elements, of at most `most` either way, from the front of `bytes`, which moves past them. Calls
/// `take` with the index and value of those that are not 0.
pub fn decode_sums(
    bytes: &mut &[u8],
    layer: usize,
    elements: usize,
    most: u32,
    mut take: impl FnMut(usize, i32),
) -> Result<(), DecodeError> {
    let selected = decode_nonzero(bytes, layer, elements)?;
    let mut magnitudes = vec![1u32; selected.len()];
    // Positions of the elements that have reached the level before.
    let mut reached: Vec<u32> = (0..selected.len() as u32).collect();
    while !reached.is_empty() {
        reached = decode_larger(bytes, layer, &reached)?;
        reached.iter().for_each(|&position| magnitudes[position as usize] += 1);
        if reached.first().is_some_and(|&position| magnitudes[position as usize] > most) {
            return Err(DecodeError::Value { layer });
        }
    }
    for (element, magnitude) in selected.iter().zip(magnitudes) {
        take(element.index(), if element.is_negative() { -(magnitude as i32) } else { magnitude as i32 });
    }
    Ok(())
}

/// Returns the elements whose sum is not 0, with their signs.
fn decode_nonzero(bytes: &mut &[u8], layer: usize, elements: usize) -> Result<Vec<Selected>, DecodeError> {
    let mut selected = Vec::new();
    let count = read_varint(&mut &**bytes, "a count")? as usize;
    if !is_crowded(count, elements) {
        decode_range(bytes, 0..elements, layer, &mut selected)?;
        return Ok(selected);
    }
    let all: Vec<u32> = (0..elements as u32).collect();
    let indices = decode_larger(bytes, layer, &all)?;
    let mut bits = BitReader::new(bytes);
    selected.reserve_exact(indices.len());
    for some in indices.chunks(SIGNS_AT_ONCE) {
        let signs = bits.read(some.len() as u32)?;
        selected.extend((0..).zip(some).map(|(bit, index)| Selected::new(*index, signs >> bit & 1 == 1)));
    }
    *bytes = bits.after().ok_or(DecodeError::Trailing { part: "signs", count: 0 })?;
    Ok(selected)
}

/// Returns those of these positions that reach the next level.
fn decode_larger(bytes: &mut &[u8], layer: usize, reached: &[u32]) -> Result<Vec<u32>, DecodeError> {
    let larger = read_varint(bytes, "a count")? as usize;
    if larger > reached.len() {
        return Err(DecodeError::Count { layer, count: larger, most: reached.len() });
    }
    let (written, of_larger) = written(larger, reached.len());
    let parameter = usual_parameter(written, reached.len());
    let mut bits = BitReader::new(bytes);
    let mut next_level = Vec::with_capacity(larger);
    let mut next = 0;
    for _ in 0..written {
        let gap = bits.read_rice(parameter)? as usize;
        let between = reached.get(next..next + gap).ok_or(DecodeError::Index { layer })?;
        let written = *reached.get(next + gap).ok_or(DecodeError::Index { layer })?;
        if of_larger {
            next_level.push(written);
        } else {
            next_level.extend_from_slice(between);
        }
        next += gap + 1;
    }
    if !of_larger {
        next_level.extend_from_slice(&reached[next..]);
    }
    *bytes = bits.after().ok_or(DecodeError::Trailing { part: "sums", count: 0 })?;
    Ok(next_level)
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, add_signs, decode_sums, encode_sums};
    use adacomp::Selected;
    use fastrand::Rng;

    /// Returns sums of the signs of this many learners, each of which is there with a chance of 1 in `rare`.
    fn sums(elements: usize, learners: u64, rare: u64, random: &mut Rng) -> Vec<i32> {
        let mut one = || match random.u64(..2 * rare) {
            0 => 1,
            1 => -1,
            _ => 0,
        };
        (0..elements).map(|_| (0..learners).map(|_| one()).sum()).collect()
    }

    fn encoded(sums: &[i32]) -> Vec<u8> {
        let nonzero = (0..).zip(sums.iter().copied()).filter(|(_, sum)| *sum != 0);
        let mut bytes = Vec::new();
        encode_sums(sums.len(), &nonzero.collect::<Vec<_>>(), &mut bytes);
        bytes
    }

    #[test]
    fn signs_add_up() {
        let mut random = Rng::with_seed(3);
        for (range, rare) in [(0..0, 2), (5..6, 1), (100..100 + 3 * BLOCK + 17, 10), (7..BLOCK + 7, 1)] {
            let mut expected = vec![0; range.len()];
            let sender = |_| {
                let mut selected = Vec::new();
                for index in range.clone() {
                    if random.u64(..rare) == 0 {
                        let negative = random.u64(..2) == 0;
                        expected[index - range.start] += if negative { -1 } else { 1 };
                        selected.push(Selected::new(index as u32, negative));
                    }
                }
                selected
            };
            let senders: Vec<_> = (0..4).map(sender).collect();
            let mut sums = vec![(9, 9)];
            add_signs(&senders, range, &mut sums);
            let expected: Vec<_> = (0..).zip(expected).filter(|(_, sum)| *sum != 0).collect();
            assert_eq!(sums, expected);
        }
    }

    #[test]
    fn sums_survive_and_stay_near_their_entropy() {
        let mut random = Rng::with_seed(7);
        for (learners, rare) in
            [(1, 100), (2, 100), (8, 100), (32, 100), (64, 100), (128, 100), (128, 18), (1024, 18), (3, 1)]
        {
            let sums = sums(60_000, learners, rare, &mut random);
            let bytes = encoded(&sums);
            let (mut rest, mut decoded) = (bytes.as_slice(), vec![0; sums.len()]);
            decode_sums(&mut rest, 0, sums.len(), learners as u32, |index, sum| decoded[index] = sum)
                .unwrap();
            assert!(rest.is_empty());
            assert_eq!(decoded, sums);
            let mut counts = std::collections::HashMap::new();
            sums.iter().for_each(|sum| *counts.entry(sum).or_insert(0.0) += 1.0);
            let total = sums.len() as f64;
            let entropy: f64 = counts.values().map(|count: &f64| count * (total / count).log2() / 8.0).sum();
            let ratio = bytes.len() as f64 / entropy;
            assert!(ratio < 1.08, "{learners} learners, 1 in {rare}: {ratio}");
        }
    }

    #[test]
    fn bad_bytes_are_refused() {
        let mut random = Rng::with_seed(9);
        let sums = sums(500, 8, 10, &mut random);
        let good = encoded(&sums);
        for length in 0..good.len() {
            let mut rest = &good[..length];
            assert!(decode_sums(&mut rest, 0, 500, 8, |_, _| {}).is_err(), "length {length}");
        }
        // More than the learners can add up to.
        assert!(decode_sums(&mut good.as_slice(), 0, 500, 1, |_, _| {}).is_err());
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..1 + random.u64(..3) {
                let at = random.u64(..bytes.len() as u64) as usize;
                bytes[at] = random.u64(..256) as u8;
            }
            let mut rest = bytes.as_slice();
            let _ = decode_sums(&mut rest, 0, 500, 8, |index, sum| assert!(index < 500 && sum.abs() <= 8));
        }
    }
}
