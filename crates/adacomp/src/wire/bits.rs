//! Bits in bytes, lowest first, and numbers in few bytes.

use crate::error::DecodeError;

/// Appends bits to bytes.
pub struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    word: u64,
    /// Bits of `word` that are used: below 64.
    used: u32,
}

impl<'a> BitWriter<'a> {
    /// Creates a writer at the end of `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, word: 0, used: 0 }
    }

    /// Writes the lowest `count` bits of `value`, at most 64; the others must be 0.
    #[inline]
    pub fn write(&mut self, value: u64, count: u32) {
        debug_assert!(count == 64 || value >> count == 0);
        let room = 64 - self.used;
        self.word |= value << self.used;
        if count < room {
            self.used += count;
        } else {
            self.out.extend_from_slice(&self.word.to_le_bytes());
            self.word = if room == 64 { 0 } else { value >> room };
            self.used = count - room;
        }
    }

    /// Writes `zeros` zeros, then the lowest `count` bits of `value`, which are fewer than 64.
    #[inline]
    pub(super) fn write_after_zeros(&mut self, mut zeros: u64, value: u64, count: u32) {
        while zeros + u64::from(count) > 64 {
            let some = zeros.min(64);
            self.write(0, some as u32);
            zeros -= some;
        }
        self.write(value << zeros, zeros as u32 + count);
    }

    /// Writes a number in Golomb-Rice code: `number >> parameter` zeros, a one, and the lowest `parameter` bits.
    #[inline]
    pub fn write_rice(&mut self, number: u64, parameter: u32) {
        let remainder = number & !(!0 << parameter);
        self.write_after_zeros(number >> parameter, 1 | remainder << 1, parameter + 1);
    }

    /// Fills the last byte with zeros.
    pub fn finish(self) {
        self.out.extend_from_slice(&self.word.to_le_bytes()[..self.used.div_ceil(8) as usize]);
    }
}

/// Reads bits from bytes.
#[derive(Debug, Clone, Copy)]
pub struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bytes that `word` has taken; it may run past the end.
    taken: usize,
    /// The next bits, the first of them lowest.
    pub(super) word: u64,
    /// Bits of `word` that are still to be read.
    left: u32,
}

/// Bits that `word` has at least after [`BitReader::refill`].
pub(super) const AT_HAND: u32 = 56;

impl<'a> BitReader<'a> {
    /// Creates a reader at the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, taken: 0, word: 0, left: 0 }
    }

    /// Loads `word` with at least [`AT_HAND`] bits; past the end they are 0.
    #[inline]
    pub(super) fn refill(&mut self) {
        if !self.refill_before_end() {
            while self.left < AT_HAND {
                let byte = self.bytes.get(self.taken).copied().unwrap_or_default();
                self.word |= u64::from(byte) << self.left;
                self.taken += 1;
                self.left += 8;
            }
        }
    }

    /// Does the same if there are eight bytes to load. Returns whether there were.
    #[inline]
    pub(super) fn refill_before_end(&mut self) -> bool {
        let Some(next) = self.bytes.get(self.taken..).and_then(|rest| rest.first_chunk()) else {
            return false;
        };
        // Loading without asking how many bytes are needed keeps branches out of the loop.
        self.word |= u64::from_le_bytes(*next) << self.left;
        self.taken += (63 - self.left as usize) / 8;
        self.left |= AT_HAND;
        true
    }

    /// Skips bits that `word` has.
    #[inline]
    pub(super) fn skip(&mut self, count: u32) {
        debug_assert!(count <= self.left);
        self.word >>= count;
        self.left -= count;
    }

    /// Reads `count` bits.
    ///
    /// # Panics
    /// If `count` is above 56.
    pub fn read(&mut self, count: u32) -> Result<u64, DecodeError> {
        assert!(count <= AT_HAND);
        self.refill();
        let value = self.word & !(!0 << count);
        self.skip(count);
        if self.past_end() { Err(TRUNCATED) } else { Ok(value) }
    }

    /// Reads zeros up to and including a one, and returns their number: below 2^31, so that no index overflows.
    pub fn read_zeros(&mut self) -> Result<u64, DecodeError> {
        let mut zeros = 0;
        loop {
            self.refill();
            let here = self.word.trailing_zeros().min(AT_HAND - 1);
            zeros += u64::from(here);
            let ends = self.word >> here & 1 == 1;
            self.skip(here + u32::from(ends));
            if self.past_end() || zeros >> 31 != 0 {
                return Err(TRUNCATED);
            }
            if ends {
                return Ok(zeros);
            }
        }
    }

    /// Reads a number in Golomb-Rice code.
    ///
    /// # Panics
    /// If the parameter is above 30.
    #[inline]
    pub fn read_rice(&mut self, parameter: u32) -> Result<u64, DecodeError> {
        assert!(parameter <= 30);
        self.refill();
        let zeros = self.word.trailing_zeros();
        let length = zeros + 1 + parameter;
        if length > AT_HAND {
            return Ok(self.read_zeros()? << parameter | self.read(parameter)?);
        }
        // Nearly all are short, and read at once.
        let number = u64::from(zeros) << parameter | self.word >> zeros >> 1 & !(!0 << parameter);
        self.skip(length);
        if self.past_end() { Err(TRUNCATED) } else { Ok(number) }
    }

    /// Returns the number of bits read so far.
    fn position(&self) -> usize {
        8 * self.taken - self.left as usize
    }

    /// Returns the bytes after the one that is being read, if the rest of that one is zeros.
    pub fn after(mut self) -> Option<&'a [u8]> {
        let position = self.position();
        let filling = position.next_multiple_of(8) - position;
        self.refill();
        let clean = self.word & !(!0 << filling) == 0;
        self.bytes.get(position.div_ceil(8)..).filter(|_| clean)
    }

    /// Returns whether more was read than there is.
    pub(super) fn past_end(&self) -> bool {
        self.position() > 8 * self.bytes.len()
    }

    /// Returns the number of complete bytes that are left.
    pub(super) fn bytes_left(&self) -> usize {
        self.bytes.len().saturating_sub(self.position().div_ceil(8))
    }
}

pub(super) const TRUNCATED: DecodeError = DecodeError::Truncated { part: "selected elements" };

/// Appends a number in as few bytes as it needs: seven bits a byte, lowest first, the top bit set on all but the last.
pub fn write_varint(mut number: u32, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Reads the number at the front of `bytes`, which moves past it. Only the shortest form is taken, so that a frame has one
/// encoding.
pub fn read_varint(bytes: &mut &[u8], part: &'static str) -> Result<u32, DecodeError> {
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
