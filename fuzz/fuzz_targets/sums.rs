//! Any bytes give sums of signs that are in range, or an error; sums survive being encoded.
//!
//! The first bytes pick the number of elements and the largest sum. Then come the sums themselves, which are encoded, and a
//! script of edits to the result.
#![no_main]

use adacomp_exchange::internal::{decode_sums, encode_sums};
use adacomp_fuzz::edit;
use libfuzzer_sys::fuzz_target;

fn decode(bytes: &mut &[u8], elements: usize, most: u32) -> Option<Vec<(u32, i32)>> {
    let mut sums = Vec::new();
    decode_sums(bytes, 0, elements, most, |index, sum| sums.push((index as u32, sum))).ok()?;
    let in_range =
        |(index, sum): &(u32, i32)| (*index as usize) < elements && (1..=most).contains(&sum.unsigned_abs());
    assert!(sums.iter().all(in_range));
    assert!(sums.is_sorted_by(|one, other| one.0 < other.0));
    Some(sums)
}

fuzz_target!(|data: &[u8]| {
    let Some((&[low, high, most, given], rest)) = data.split_first_chunk() else { return };
    let (elements, most) = (usize::from(u16::from_le_bytes([low, high])) % 300, u32::from(most % 40) + 1);
    let (values, script) = rest.split_at(usize::from(given).min(rest.len()));
    // The values repeat, so that few bytes fill many elements.
    let value = |&byte: &u8| i32::from(byte as i8) % (most as i32 + 1);
    let values = values.iter().map(value).cycle().take(if values.is_empty() { 0 } else { elements });
    let sums: Vec<(u32, i32)> = (0..).zip(values).filter(|(_, sum)| *sum != 0).collect();
    let mut bytes = Vec::new();
    encode_sums(elements, &sums, &mut bytes);
    let mut rest = bytes.as_slice();
    assert_eq!(decode(&mut rest, elements, most), Some(sums));
    assert!(rest.is_empty());

    edit(&mut bytes, script);
    if let Some(sums) = decode(&mut bytes.as_slice(), elements, most) {
        let mut again = Vec::new();
        encode_sums(elements, &sums, &mut again);
        assert_eq!(decode(&mut again.as_slice(), elements, most), Some(sums));
    }
});
