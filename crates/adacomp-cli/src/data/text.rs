//! Text, character by character.

use super::fetch::{file, home};
use super::{Batch, Data, Samples};
use crate::draw::Draw;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::Arc;

/// The last tenth is for testing, as is usual for Tiny Shakespeare.
const TRAIN_TENTHS: usize = 9;

pub(crate) fn load(folder: &Path, sequence: usize) -> Result<Data> {
    const NAMES: [&str; 3] = ["input.txt", "tinyshakespeare.txt", "shakespeare.txt"];
    let path = file(&home(folder, &NAMES)?, &NAMES)?;
    let shown = path.display().to_string();
    let bytes = std::fs::read(&path).with_context(|| shown.clone())?;
    let mut alphabet: Vec<u8> = bytes.clone();
    alphabet.sort_unstable();
    alphabet.dedup();
    let tokens: Vec<u8> =
        bytes.iter().map(|byte| alphabet.binary_search(byte).map_or(0, |number| number as u8)).collect();
    let middle = tokens.len() * TRAIN_TENTHS / 10;
    // A sample more, because an epoch may start to cut anywhere within the first.
    if tokens.len() - middle <= 2 * sequence {
        bail!("{shown}: {} characters are too few for samples of {sequence}", tokens.len());
    }
    let tokens: Arc<[u8]> = tokens.into();
    let part = |range: std::ops::Range<usize>| Box::new(Text { tokens: tokens.clone(), range, sequence });
    Ok(Data { train: part(0..middle), test: part(middle..tokens.len()), classes: alphabet.len() })
}

/// A text cut into samples of equal length; each character's target is the next one.
struct Text {
    tokens: Arc<[u8]>,
    range: std::ops::Range<usize>,
    sequence: usize,
}

impl Samples for Text {
    fn len(&self) -> usize {
        // One less than fits, because an epoch may start to cut anywhere within the first.
        (self.range.len() - 1) / self.sequence - 1
    }

    fn add(&self, sample: usize, draw: Option<Draw>, batch: &mut Batch) -> Result<()> {
        let offset = draw.map_or(0, |draw| draw.offset(self.sequence));
        let start = self.range.start + offset + sample * self.sequence;
        let text = &self.tokens[start..start + self.sequence + 1];
        batch.tokens.extend(text[..self.sequence].iter().map(|&token| i32::from(token)));
        batch.targets.extend(text[1..].iter().map(|&token| i32::from(token)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_lie_within_their_part_whatever_the_offset() {
        let tokens: Arc<[u8]> = (0..200).collect();
        let text = Text { tokens, range: 10..111, sequence: 10 };
        assert_eq!(text.len(), 9);
        let (mut first, mut last) = (i32::MAX, 0);
        for epoch in 0..100 {
            let draw = Some(Draw { seed: 3, epoch });
            let batch = Batch::of(&text, 0..text.len(), draw).unwrap();
            assert!(batch.tokens.iter().zip(&batch.targets).all(|(token, target)| token + 1 == *target));
            first = first.min(batch.tokens[0]);
            last = last.max(*batch.targets.last().unwrap());
        }
        assert_eq!((first, last), (10, 109));
    }
}
