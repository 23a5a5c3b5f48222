//! The messages of a step: their envelope, and values in their contents.
//!
//! The envelope is as small as it can be, because there are many: one byte with the version (upper three bits), flags (two
//! bits) and the round (lower three), the lowest byte of the step, a byte of the layout and the group, the contents, and a
//! CRC-32. The checksum is over the bytes and over everything that both sides know: all of the fingerprint and step, sender,
//! receiver, the group's layers and mode. So a message that is not exactly the expected one is never taken for it, and the short fields are
//! there to say why.

use crate::error::{Cause, ExchangeError};
use crate::exchange::Options;
use crate::strategy::{Collective, Fault};
use adacomp::internal::{bound, largest};
use adacomp::{DecodeError, Layout};
use std::sync::Arc;

/// The version of the protocol: messages, rounds and agreement.
const VERSION: u8 = 2;

const HEADER: usize = 3;
const CHECKSUM: usize = 4;

/// The round of verdicts, which is of no group.
const VERDICT: usize = 7;

/// What all learners know of a round of a group of layers.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) layout: &'a Arc<Layout>,
    pub(crate) options: Options,
    pub(crate) learners: usize,
    pub(crate) step: u64,
    /// Whether all layers are sent dense in this step.
    pub(crate) flush: bool,
    /// The number of the group in its step.
    pub(crate) group: usize,
    /// The layers of the group, ascending.
    pub(crate) layers: &'a [usize],
    /// Their [`layers_checksum`].
    pub(crate) layers_checksum: u32,
    /// The number of the round in its group.
    pub(crate) round: usize,
}

/// What state the sender of a message is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flag {
    Good = 0,
    /// Its gradient is not finite: the step is to be dropped.
    NonFinite = 1,
    /// It has refused a message.
    Failed = 2,
}

impl<'a> Context<'a> {
    /// Returns the context of the verdicts that end a step.
    pub(crate) fn verdict(layout: &'a Arc<Layout>, options: Options, learners: usize, step: u64) -> Self {
        let (layers, layers_checksum) = (&[][..], layers_checksum(&[]));
        let (flush, group, round) = (false, 0, VERDICT);
        Self { layout, options, learners, step, flush, group, layers, layers_checksum, round }
    }

    /// Returns the collective operation of the round.
    pub(crate) fn collective(&self) -> Collective {
        self.options.strategy.rounds()[self.round]
    }

    pub(crate) fn is_last_round(&self) -> bool {
        self.round + 1 == self.options.strategy.rounds().len()
    }

    /// Returns whether messages have the envelope of this module. Frames have one of their own.
    pub(crate) fn has_envelope(&self) -> bool {
        !self.options.strategy.sends_frames() || self.round == VERDICT
    }

    /// Writes a message around the contents that `write` appends; without a receiver it is to all.
    pub(crate) fn seal(
        &self,
        flag: Flag,
        sender: usize,
        receiver: Option<usize>,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Vec<u8> {
        let mut message = Vec::new();
        if !self.has_envelope() {
            write(&mut message);
            return message;
        }
        let first = VERSION << 5 | (flag as u8) << 3 | self.round as u8;
        message.extend([first, self.step as u8, self.layers_byte()]);
        write(&mut message);
        let checksum = self.checksum(hash(&message), sender, receiver);
        message.extend_from_slice(&checksum.to_le_bytes());
        message
    }

    /// Returns the flag and contents of a message, if it is the one that is expected.
    pub(crate) fn open<'m>(
        &self,
        message: &'m [u8],
        sender: usize,
        receiver: Option<usize>,
    ) -> Result<(Flag, &'m [u8]), Cause> {
        if !self.has_envelope() {
            return Ok((Flag::Good, message));
        }
        let length = message.len();
        if length < HEADER + CHECKSUM {
            return Err(Cause::Truncated { length });
        }
        let (bytes, checksum) = message.split_at(length - CHECKSUM);
        // Once over the bytes, however many contexts are tried.
        let hash = hash(bytes);
        let matches = |context: &Self, sender, receiver| {
            context.checksum(hash.clone(), sender, receiver).to_le_bytes() == *checksum
        };
        let (version, round) = (bytes[0] >> 5, usize::from(bytes[0] & 7));
        if matches(self, sender, receiver) && version == VERSION && round == self.round {
            let flag = match bytes[0] >> 3 & 3 {
                0 => Flag::Good,
                1 => Flag::NonFinite,
                _ => Flag::Failed,
            };
            return Ok((flag, &bytes[HEADER..]));
        }
        Err(self.explain(bytes, sender, receiver, matches))
    }

    /// Opens all learners' messages. Returns their contents, and the first sender whose gradient is not finite.
    pub(crate) fn open_all<'m>(
        &self,
        messages: &[&'m [u8]],
        receiver: Option<usize>,
    ) -> Result<(Vec<&'m [u8]>, Option<usize>), Fault> {
        let (mut contents, mut non_finite) = (Vec::with_capacity(messages.len()), None);
        for (sender, message) in messages.iter().enumerate() {
            let (flag, inner) = self.open(message, sender, receiver).map_err(Fault::of(sender))?;
            match flag {
                Flag::Good => {}
                Flag::NonFinite => non_finite = non_finite.or(Some(sender)),
                Flag::Failed => return Err(Fault { sender, cause: Cause::Failed }),
            }
            contents.push(inner);
        }
        Ok((contents, non_finite))
    }

    /// Returns the checksum of a message whose own bytes `hash` has seen.
    fn checksum(&self, mut hash: crc32fast::Hasher, sender: usize, receiver: Option<usize>) -> u32 {
        hash.update(&self.layout.fingerprint().to_le_bytes());
        hash.update(&self.step.to_le_bytes());
        hash.update(&self.layers_checksum.to_le_bytes());
        hash.update(&[u8::from(self.flush)]);
        hash.update(&(sender as u64).to_le_bytes());
        hash.update(&receiver.map_or(u64::MAX, |receiver| receiver as u64).to_le_bytes());
        hash.finalize()
    }

    /// Returns a byte that most often differs if the layout, or the layers of the group, do.
    fn layers_byte(&self) -> u8 {
        let known = self.layout.fingerprint() ^ u64::from(self.layers_checksum);
        known.to_le_bytes().into_iter().fold(0, |folded, byte| folded ^ byte)
    }

    /// Returns which message this is, if not the expected one.
    fn explain(
        &self,
        bytes: &[u8],
        sender: usize,
        receiver: Option<usize>,
        matches: impl Fn(&Self, usize, Option<usize>) -> bool,
    ) -> Cause {
        let (version, round) = (bytes[0] >> 5, bytes[0] & 7);
        let other_version = Cause::Version { expected: VERSION, actual: version };
        if matches(self, sender, receiver) {
            return match version == VERSION {
                false => other_version,
                true => Cause::Round { expected: self.round as u8, actual: round },
            };
        }
        let receivers = || [None, receiver].into_iter().chain((0..self.learners).map(Some));
        for sender in 0..self.learners {
            if let Some(receiver) = receivers().find(|&receiver| matches(self, sender, receiver)) {
                return Cause::Misrouted { sender, receiver };
            }
        }
        let alike = |context: Self| matches(&context, sender, receiver);
        let near = (1..256).flat_map(|by| [self.step.checked_sub(by), self.step.checked_add(by)]).flatten();
        if let Some(actual) = near.into_iter().find(|&step| alike(Self { step, ..*self })) {
            return Cause::Step { expected: self.step, actual };
        }
        let flush = !self.flush;
        if alike(Self { flush, ..*self }) {
            Cause::Mode { flush }
        } else if version != VERSION {
            other_version
        } else if bytes[2] != self.layers_byte()
            && usize::from(round) == self.round
            && bytes[1] == self.step as u8
        {
            Cause::Layers
        } else {
            Cause::Checksum
        }
    }
}

/// Returns what stands for the layers of a group in the checksum of a message.
pub(crate) fn layers_checksum(layers: &[usize]) -> u32 {
    let mut hash = crc32fast::Hasher::new();
    layers.iter().for_each(|layer| hash.update(&(*layer as u32).to_le_bytes()));
    hash.finalize()
}

fn hash(bytes: &[u8]) -> crc32fast::Hasher {
    let mut hash = crc32fast::Hasher::new();
    hash.update(bytes);
    hash
}

pub(crate) fn write_values(values: &[f32], message: &mut Vec<u8>) {
    message.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// Reads values of a layer from the front of `bytes`, which move past them, and hands them on block by block, with the number of
/// the first. All must be finite; each block is checked while it is in the nearest cache.
pub(crate) fn read_values(
    bytes: &mut &[u8],
    layer: usize,
    count: usize,
    mut take: impl FnMut(usize, &[f32]),
) -> Result<(), DecodeError> {
    const BLOCK: usize = 512;
    let (front, rest) = bytes.split_at_checked(4 * count).ok_or(TRUNCATED)?;
    *bytes = rest;
    let mut block = [0.0; BLOCK];
    for (number, values) in front.as_chunks().0.chunks(BLOCK).enumerate() {
        let block = &mut block[..values.len()];
        block.iter_mut().zip(values).for_each(|(to, from)| *to = f32::from_le_bytes(*from));
        if !largest(block.iter().copied()).is_finite() {
            return Err(DecodeError::Value { layer });
        }
        take(number * BLOCK, block);
    }
    Ok(())
}

const TRUNCATED: DecodeError = DecodeError::Truncated { part: "dense values" };

/// Reads a scale from the front of `bytes`, which move past it.
pub(crate) fn read_scale(bytes: &mut &[u8], layer: usize) -> Result<f32, DecodeError> {
    let (front, rest) = bytes.split_first_chunk().ok_or(TRUNCATED)?;
    *bytes = rest;
    let scale = f32::from_le_bytes(*front);
    if !(scale.is_finite() && scale.is_sign_positive()) {
        return Err(DecodeError::Value { layer });
    }
    Ok(scale)
}

/// Reads each learner's scale, or the largest magnitude that it sends of a layer, from the front of its contents. Returns them,
/// and the largest magnitude that counts.
pub(crate) fn read_scales(
    contents: &mut [&[u8]],
    layer: usize,
    clip: Option<f32>,
) -> Result<(Vec<f32>, f32), Fault> {
    let read = |(sender, bytes)| read_scale(bytes, layer).map_err(Fault::of(sender));
    let scales = contents.iter_mut().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
    let most = bound(clip, scales.iter().copied());
    Ok((scales, most))
}

/// Describes what a learner was started with, which all learners must have in common: on each line a thing, `: `, and what it
/// is, so that a difference can be named.
pub(crate) fn describe(layout: &Layout, options: Options, learners: usize) -> Vec<u8> {
    // Threads change nothing but the time, so they may differ.
    let Options { strategy, codec, owner_divisor, clip, threads: _ } = options;
    let mut lines = vec![
        format!("protocol version: {VERSION}"),
        format!("frame version: {}", adacomp::VERSION),
        format!("number of learners: {learners}"),
        format!("strategy: {strategy}"),
        format!("codec: {codec}"),
        format!("divisor of owners' bins: {owner_divisor}"),
        format!("clip: {}", clip.map_or_else(|| "none".to_owned(), |clip| clip.to_string())),
        format!("soft-threshold factor: {}", layout.soft_threshold()),
        format!("scale: {}", layout.scale()),
        format!("number of parameters: {}", layout.len()),
    ];
    for (number, layer) in layout.layers().iter().enumerate() {
        // A name may have line ends of its own, which must not look like ours.
        let name = layer.name().escape_debug();
        lines
            .push(format!("parameter {number}: `{name}` {:?}, {:#}", layer.parameter.shape, layer.treatment));
    }
    lines.push(format!("layout fingerprint: {:016x}", layout.fingerprint()));
    lines.join("\n").into_bytes()
}

const END: &str = "end of the description: there";

/// Checks that all learners described themselves in the same way. All see the same texts, so all get the same error.
pub(crate) fn check_agreement(texts: &[Arc<Vec<u8>>]) -> Result<(), ExchangeError> {
    let Some(first) = texts.first() else { return Ok(()) };
    let Some((learner, other)) = texts.iter().enumerate().find(|(_, text)| *text != first) else {
        return Ok(());
    };
    let (first, other) = (String::from_utf8_lossy(first), String::from_utf8_lossy(other));
    // A text that ends early differs in the first line that it does not have.
    let mut pairs = first.lines().chain([END]).zip(other.lines().chain([END]));
    let (expected, actual) = pairs.find(|(expected, actual)| expected != actual).unwrap_or_default();
    let split = |line: &str| {
        let (what, value) = line.split_once(": ").unwrap_or_default();
        (what.to_owned(), value.to_owned())
    };
    let (what, expected) = split(expected);
    Err(ExchangeError::Disagreement { learner, what, expected, actual: split(actual).1 })
}

#[cfg(test)]
mod tests {
    use super::{check_agreement, describe};
    use crate::strategy::Strategy;
    use adacomp::{Parameter, Policy};
    use std::sync::Arc;

    #[test]
    fn another_version_is_named() {
        let layout = Policy::adacomp().layout([Parameter::new("fc", &[40, 50])]).unwrap();
        let ours = describe(&layout, Strategy::Reduce.into(), 3);
        let text = String::from_utf8(ours.clone()).unwrap();
        let theirs = text.replace("protocol version: 2", "protocol version: 3").into_bytes();
        let shorter = text.lines().next().unwrap().as_bytes().to_vec();
        let [ours, theirs, shorter] = [ours, theirs, shorter].map(Arc::new);
        assert!(check_agreement(&[ours.clone(), ours.clone()]).is_ok());
        let told = check_agreement(&[ours.clone(), ours.clone(), theirs]).unwrap_err().to_string();
        assert_eq!(told, "learner 2 does not fit learner 0: protocol version is 3, but 2 on learner 0");
        let told = check_agreement(&[ours, shorter]).unwrap_err().to_string();
        assert!(told.starts_with("learner 1 does not fit learner 0: frame version"), "{told}");
    }
}
