//! The envelope of a message between learners: as small as it can be, because there are many.
//!
//! One byte with the version (upper three bits), flags (two bits) and the round (lower three), the lowest byte of the step,
//! a byte of the layout's fingerprint, the contents, and a CRC-32. The checksum is over the bytes and over everything that
//! both sides know: the whole fingerprint and step, sender, receiver, group and mode. So a message that is not exactly the
//! expected one is never taken for it, and the short fields are there to say why.

use crate::error::Cause;

/// The version of the protocol: messages, rounds and agreement.
pub(crate) const VERSION: u8 = 1;

const HEADER: usize = 3;
const CHECKSUM: usize = 4;

/// Everything that both sides know of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) fingerprint: u64,
    pub(crate) step: u64,
    pub(crate) group: u32,
    pub(crate) round: u8,
    pub(crate) flush: bool,
    pub(crate) sender: usize,
    /// All learners where it is none.
    pub(crate) receiver: Option<usize>,
}

/// What state its sender is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flag {
    Good = 0,
    /// Its gradient is not finite: the step is to be dropped.
    NonFinite = 1,
    /// It has refused a message.
    Failed = 2,
}

impl Context {
    /// The checksum of a message, whose own bytes `hash` has seen.
    fn checksum(&self, mut hash: crc32fast::Hasher) -> u32 {
        hash.update(&self.fingerprint.to_le_bytes());
        hash.update(&self.step.to_le_bytes());
        hash.update(&self.group.to_le_bytes());
        hash.update(&[u8::from(self.flush)]);
        hash.update(&(self.sender as u64).to_le_bytes());
        hash.update(&self.receiver.map_or(u64::MAX, |receiver| receiver as u64).to_le_bytes());
        hash.finalize()
    }

    fn layout_byte(&self) -> u8 {
        self.fingerprint.to_le_bytes().into_iter().fold(0, |folded, byte| folded ^ byte)
    }

    /// Closes a message that was begun with [`Context::begin`].
    pub(crate) fn seal(&self, message: &mut Vec<u8>) {
        let checksum = self.checksum(hash(message));
        message.extend_from_slice(&checksum.to_le_bytes());
    }

    /// A message to which the contents are to be appended.
    pub(crate) fn begin(&self, flag: Flag) -> Vec<u8> {
        vec![VERSION << 5 | (flag as u8) << 3 | self.round, self.step as u8, self.layout_byte()]
    }

    /// The contents of a message, if it is the one that is expected.
    pub(crate) fn open<'a>(&self, message: &'a [u8], learners: usize) -> Result<(Flag, &'a [u8]), Cause> {
        let length = message.len();
        if length < HEADER + CHECKSUM {
            return Err(Cause::Truncated { length });
        }
        let (bytes, checksum) = message.split_at(length - CHECKSUM);
        // Once over the bytes, however many contexts are tried.
        let hash = hash(bytes);
        let matches = |context: &Context| context.checksum(hash.clone()).to_le_bytes() == *checksum;
        let (version, round) = (bytes[0] >> 5, bytes[0] & 7);
        if matches(self) && version == VERSION && round == self.round {
            let flag = match bytes[0] >> 3 & 3 {
                0 => Flag::Good,
                1 => Flag::NonFinite,
                _ => Flag::Failed,
            };
            return Ok((flag, &bytes[HEADER..]));
        }
        Err(self.explain(bytes, matches, learners))
    }

    /// Which message this is, if not the expected one.
    fn explain(&self, bytes: &[u8], matches: impl Fn(&Self) -> bool, learners: usize) -> Cause {
        let (version, round) = (bytes[0] >> 5, bytes[0] & 7);
        if matches(self) {
            return if version != VERSION {
                Cause::Version { expected: VERSION, actual: version }
            } else {
                Cause::Round { expected: self.round, actual: round }
            };
        }
        let receivers = || [None, self.receiver].into_iter().chain((0..learners).map(Some));
        for sender in 0..learners {
            if let Some(receiver) = receivers().find(|&receiver| matches(&Self { sender, receiver, ..*self }))
            {
                return Cause::Misrouted { sender, receiver };
            }
        }
        let near = (1..256).flat_map(|by| [self.step.checked_sub(by), self.step.checked_add(by)]).flatten();
        if let Some(actual) = near.into_iter().find(|&step| matches(&Self { step, ..*self })) {
            return Cause::Step { expected: self.step, actual };
        }
        let groups = (0..8).flat_map(|by| [self.group.checked_sub(by), self.group.checked_add(by)]).flatten();
        let modes = groups.flat_map(|group| [(group, false), (group, true)]);
        for (group, flush) in modes {
            if matches(&Self { group, flush, ..*self }) {
                return Cause::Mode { group, flush };
            }
        }
        if version != VERSION {
            Cause::Version { expected: VERSION, actual: version }
        } else if bytes[2] != self.layout_byte() && round == self.round && bytes[1] == self.step as u8 {
            Cause::Layout
        } else {
            Cause::Checksum
        }
    }
}

fn hash(bytes: &[u8]) -> crc32fast::Hasher {
    let mut hash = crc32fast::Hasher::new();
    hash.update(bytes);
    hash
}
