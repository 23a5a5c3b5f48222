//! What the targets share: learners that are driven by hand, the program's readers, and edits of valid bytes.
//!
//! The fuzzer's input is a script of edits to something valid, rather than the bytes themselves, and checksums are made to fit
//! after. So every input gets past the first checks, without a corpus of seeds.

#![allow(dead_code, unused_imports, unused_macros, reason = "of the program only what reads files is called")]

// The program's own modules, but for those that need Burn, whose build would take many minutes.
#[macro_use]
#[path = "../../crates/adacomp-cli/src/show.rs"]
mod show;
#[path = "../../crates/adacomp-cli/src/args.rs"]
mod args;
#[path = "../../crates/adacomp-cli/src/checkpoint/mod.rs"]
mod checkpoint;
#[path = "../../crates/adacomp-cli/src/config.rs"]
mod config;
#[path = "../../crates/adacomp-cli/src/data/mod.rs"]
mod data;
#[path = "../../crates/adacomp-cli/src/draw.rs"]
mod draw;
#[path = "../../crates/adacomp-cli/src/files.rs"]
mod files;
#[path = "../../crates/adacomp-cli/src/history.rs"]
mod history;
#[path = "../../crates/adacomp-cli/src/inspect.rs"]
mod inspect;
#[path = "../../crates/adacomp-cli/src/optimizer.rs"]
mod optimizer;
#[path = "../../crates/adacomp-cli/src/recipes.rs"]
mod recipes;

pub mod readers;

use adacomp::{Layer, Layout, Outcome, Parameter, Policy, Treatment};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{ExchangeError, Messages, Options};
use std::sync::{Arc, LazyLock};

/// A small model: two compressed layers, a dense one and an empty one.
pub static LAYOUT: LazyLock<Arc<Layout>> = LazyLock::new(|| {
    let parameters = [
        Parameter::new("conv", &[3, 1, 3, 3]),
        Parameter::new("bias", &[3]),
        Parameter::new("fc", &[4, 9]),
        Parameter::new("empty", &[0, 3]),
    ];
    let policy = Policy::adacomp()
        .min_elements(0)
        .for_name("conv", Treatment::Bins(8))
        .for_name("fc", Treatment::Bins(9));
    Arc::new(policy.layout(parameters).expect("a valid layout"))
});

/// The gradients of three learners.
static GRADIENTS: LazyLock<Vec<Vec<Vec<f32>>>> = LazyLock::new(|| {
    let value =
        |learner: usize, layer: usize, i: usize| ((i * 37 + learner * 11 + layer * 5) % 23) as f32 - 11.0;
    let gradient = |learner, (layer, parameter): (usize, &Layer)| {
        (0..parameter.elements()).map(|i| value(learner, layer, i)).collect()
    };
    let layers = || LAYOUT.layers().iter().enumerate();
    (0..3).map(|learner| layers().map(|layer| gradient(learner, layer)).collect()).collect()
});

/// Applies a script to bytes, four bytes an edit: where (two bytes), what, and a value. Returns whether anything changed.
pub fn edit(bytes: &mut Vec<u8>, script: &[u8]) -> bool {
    let before = bytes.clone();
    for &[low, high, what, value] in script.as_chunks().0 {
        let at = usize::from(u16::from_le_bytes([low, high])) % (bytes.len() + 1);
        match what % 5 {
            0 if at < bytes.len() => bytes[at] = value,
            1 if at < bytes.len() => bytes[at] ^= 1 << (value % 8),
            2 => bytes.insert(at, value),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            4 if value < 16 => bytes.truncate(at),
            _ => bytes.extend_from_within(at.saturating_sub(usize::from(value))..at),
        }
    }
    *bytes != before
}

/// Gives an envelope the checksum that its bytes and what both sides know ask for: see docs/exchange.md.
pub fn fix_checksum(
    message: &mut [u8],
    step: u64,
    layers: &[u32],
    flush: bool,
    sender: usize,
    receiver: Option<usize>,
) {
    let Some(end) = message.len().checked_sub(4) else { return };
    let layers: Vec<u8> = layers.iter().flat_map(|layer| layer.to_le_bytes()).collect();
    let mut hash = crc32fast::Hasher::new();
    hash.update(&message[..end]);
    hash.update(&LAYOUT.fingerprint().to_le_bytes());
    hash.update(&step.to_le_bytes());
    hash.update(&crc32fast::hash(&layers).to_le_bytes());
    hash.update(&[u8::from(flush)]);
    hash.update(&(sender as u64).to_le_bytes());
    hash.update(&receiver.map_or(u64::MAX, |receiver| receiver as u64).to_le_bytes());
    message[end..].copy_from_slice(&hash.finalize().to_le_bytes());
}

/// Gives a frame the fingerprint of a layout, if one is given, and the checksum that its bytes ask for.
pub fn fix_frame(frame: &mut [u8], layout: Option<&Layout>) {
    let Some(end) = frame.len().checked_sub(4) else { return };
    if let (Some(layout), Some(fingerprint)) = (layout, frame[..end].get_mut(8..16)) {
        fingerprint.copy_from_slice(&layout.fingerprint().to_le_bytes());
    }
    let checksum = crc32fast::hash(&frame[..end]);
    frame[end..].copy_from_slice(&checksum.to_le_bytes());
}

/// Learners that are driven by hand.
pub struct Learners(pub Vec<ByHand>);

/// How a step ended on one learner, and what it wrote.
pub type Ended = (Result<Outcome, ExchangeError>, Vec<Vec<f32>>);

impl Learners {
    pub fn new(learners: usize, options: impl Into<Options>) -> Self {
        let options = options.into();
        let protocol =
            |learner| ByHand::unconnected((), LAYOUT.clone(), options, learners, learner..learner + 1);
        Self((0..learners).map(|learner| protocol(learner).expect("a valid protocol")).collect())
    }

    /// Submits made-up gradients, the same in each step.
    pub fn submit(&mut self) {
        for (learner, protocol) in self.0.iter_mut().enumerate() {
            for (layer, gradient) in GRADIENTS[learner].iter().enumerate() {
                protocol.submit(learner, layer, gradient.as_slice().into()).expect("a valid gradient");
            }
        }
    }

    /// Carries all messages of a step but for the verdicts. `change` may change each on its way: round, sender, receiver (none
    /// where it is to all).
    pub fn carry(&mut self, mut change: impl FnMut(usize, usize, Option<usize>, &mut Vec<u8>)) {
        let learners = self.0.len();
        for round in 0..self.0[0].rounds() {
            let sent: Vec<_> = self.0.iter_mut().map(|protocol| protocol.outgoing(0, round)).collect();
            let (mut all, mut each) = (Vec::new(), vec![Vec::new(); learners]);
            for (sender, messages) in sent.into_iter().enumerate() {
                match messages {
                    Messages::AllGather(mut messages) => {
                        let mut message = Arc::unwrap_or_clone(messages.remove(0));
                        change(round, sender, None, &mut message);
                        all.push(Arc::new(message));
                    }
                    Messages::AllToAll(mut messages) => {
                        for (receiver, mut message) in messages.remove(0).into_iter().enumerate() {
                            change(round, sender, Some(receiver), &mut message);
                            each[receiver].push(message);
                        }
                    }
                }
            }
            for (receiver, protocol) in self.0.iter_mut().enumerate() {
                let incoming = match all.is_empty() {
                    false => Messages::AllGather(all.clone()),
                    true => Messages::AllToAll(vec![std::mem::take(&mut each[receiver])]),
                };
                protocol.incoming(0, round, &incoming).expect("as many messages as there should be");
            }
        }
    }

    /// Returns all learners' verdicts.
    pub fn verdicts(&mut self) -> Vec<Vec<u8>> {
        self.0.iter_mut().flat_map(ByHand::verdict).collect()
    }

    /// Ends the step on all learners. They must end it in the same way: with the same outcome or error, the same average to the
    /// bit, and nothing written unless the gradient was averaged.
    pub fn conclude(&mut self, verdicts: Vec<Vec<u8>>) -> Ended {
        let verdicts: Vec<_> = verdicts.into_iter().map(Arc::new).collect();
        let untouched: Vec<_> = LAYOUT.layers().iter().map(|layer| vec![7.0; layer.elements()]).collect();
        let mut conclude = |protocol: &mut ByHand| {
            let mut output = untouched.clone();
            let slices = &mut output.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>();
            let outcome = protocol.conclude(&verdicts, Some(slices));
            assert!(matches!(outcome, Ok(Outcome::Averaged)) || output == untouched);
            (outcome, output)
        };
        let mut ended: Vec<Ended> = self.0.iter_mut().map(&mut conclude).collect();
        let (outcome, output) = ended.remove(0);
        let bits =
            |output: &[Vec<f32>]| output.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (other, written) in &ended {
            match (&outcome, other) {
                // A message that is not the same for all may make them name another learner.
                (Ok(Outcome::NonFinite { .. }), Ok(Outcome::NonFinite { .. })) => {}
                (Ok(outcome), Ok(other)) => assert_eq!(outcome, other),
                (Err(error), Err(other)) => assert_eq!(error.to_string(), other.to_string()),
                (outcome, other) => panic!("{outcome:?} and {other:?}"),
            }
            assert_eq!(bits(&output), bits(written));
        }
        (outcome, output)
    }

    /// Runs a step with good messages.
    pub fn good_step(&mut self) -> Ended {
        self.submit();
        self.carry(|_, _, _, _| ());
        let verdicts = self.verdicts();
        self.conclude(verdicts)
    }

    /// Returns what a learner keeps, bit by bit: its residuals, and those that it keeps as an owner.
    pub fn residuals(&mut self, learner: usize) -> [Vec<u32>; 2] {
        let (mut own, mut owned) = (Vec::new(), Vec::new());
        for layer in 0..LAYOUT.len() {
            let protocol = &mut self.0[learner];
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            own.extend(protocol.compressor(learner).and_then(|kept| kept.residual(layer).map(bits)));
            owned.extend(protocol.owner(learner).and_then(|kept| kept.residual(layer).map(bits)));
        }
        [own.concat(), owned.concat()]
    }
}
