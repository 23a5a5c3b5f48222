//! Numbers in as few bytes as they need: seven bits a byte, lowest first, the top bit set on all but the last.

use crate::error::DecodeError;

/// Appends a number.
pub fn write(mut number: u32, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// The number at the front of `bytes`, which moves past it. Only the shortest form is taken, so that a frame has one
/// encoding.
pub fn read(bytes: &mut &[u8], part: &'static str) -> Result<u32, DecodeError> {
    let mut number = 0u64;
    for shift in (0..).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(DecodeError::Truncated { part })?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            let shortest = byte != 0 || shift == 0;
            return u32::try_from(number).ok().filter(|_| shortest).ok_or(DecodeError::Varint { part });
        }
        if shift == 28 {
            break;
        }
    }
    Err(DecodeError::Varint { part })
}
