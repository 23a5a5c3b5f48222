//! Bits in bytes, lowest first.

/// Appends bits to bytes.
pub(super) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    word: u64,
    /// Bits of `word` that are used: below 64.
    used: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, word: 0, used: 0 }
    }

    /// The lowest `count` bits of `value`, at most 64; the others must be 0.
    #[inline]
    pub(super) fn write(&mut self, value: u64, count: u32) {
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

    /// Fills the last byte with zeros.
    pub(super) fn finish(self) {
        self.out.extend_from_slice(&self.word.to_le_bytes()[..self.used.div_ceil(8) as usize]);
    }
}

/// Reads bits from bytes. Past the end it reads zeros, and [`BitReader::past_end`] tells.
#[derive(Clone, Copy)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bytes that `word` has taken; it may run past the end.
    taken: usize,
    word: u64,
    /// Bits of `word` that are still to be read.
    left: u32,
}

/// Bits that are at hand after [`BitReader::refill`].
pub(super) const AT_HAND: u32 = 56;

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, taken: 0, word: 0, left: 0 }
    }

    /// Brings at least [`AT_HAND`] bits to hand.
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

    /// The same, if there are eight bytes to take from; whether there were.
    #[inline]
    pub(super) fn refill_before_end(&mut self) -> bool {
        let Some(next) = self.bytes.get(self.taken..).and_then(|rest| rest.first_chunk()) else {
            return false;
        };
        // Taking whole bytes without asking how many are needed keeps the loop free of surprises.
        self.word |= u64::from_le_bytes(*next) << self.left;
        self.taken += (63 - self.left as usize) / 8;
        self.left |= AT_HAND;
        true
    }

    /// The next bits, the first of them lowest.
    #[inline]
    pub(super) fn at_hand(&self) -> u64 {
        self.word
    }

    /// Goes past bits that are at hand.
    #[inline]
    pub(super) fn skip(&mut self, count: u32) {
        debug_assert!(count <= self.left);
        self.word >>= count;
        self.left -= count;
    }

    fn read(&self) -> usize {
        8 * self.taken - self.left as usize
    }

    pub(super) fn past_end(&self) -> bool {
        self.read() > 8 * self.bytes.len()
    }

    /// Whole bytes that are left.
    pub(super) fn bytes_left(&self) -> usize {
        self.bytes.len().saturating_sub(self.read().div_ceil(8))
    }

    /// Whether all that is left is zeros that fill the last byte.
    pub(super) fn only_filling_left(&mut self) -> bool {
        let filling = self.read().next_multiple_of(8) - self.read();
        self.refill();
        self.bytes_left() == 0 && self.word & !(!0 << filling) == 0
    }
}
