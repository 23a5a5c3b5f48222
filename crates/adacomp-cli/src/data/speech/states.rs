//! Thirds of phones in their context, and the states that they are of.

use super::Labels;
use super::features::{STEP, WINDOW};
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, BTreeSet};

/// As festival names it.
const SILENCE: &str = "pau";

/// A third of a phone between two others; none stands for any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sound<'a> {
    phone: &'a str,
    third: u8,
    left: Option<&'a str>,
    right: Option<&'a str>,
}

impl Sound<'_> {
    /// This and what it falls back to: with its left neighbour, with its right one, with any.
    fn levels(self) -> [Self; 4] {
        let (left, right) = (Sound { right: None, ..self }, Sound { left: None, ..self });
        [self, left, right, Sound { left: None, right: None, ..self }]
    }
}

/// The sound of each frame, by where its middle is. What is after the last label belongs to that.
pub(super) fn sounds(frames: usize, labels: &Labels) -> Vec<Sound<'_>> {
    let phone = |index: usize| labels.get(index).map_or(SILENCE, |(_, phone)| phone);
    let sound = |frame| {
        let middle = frame * STEP + WINDOW / 2;
        let index = labels.partition_point(|(end, _)| *end <= middle).min(labels.len() - 1);
        let start = index.checked_sub(1).map_or(0, |before| labels[before].0);
        let length = (labels[index].0 - start).max(1);
        let third = (3 * (middle - start) / length).min(2) as u8;
        // Wrapped, the number before the first label has no label either.
        let (left, right) = (Some(phone(index.wrapping_sub(1))), Some(phone(index + 1)));
        Sound { phone: phone(index), third, left, right }
    };
    (0..frames).map(sound).collect()
}

/// The state of each sound, and how many states there are.
///
/// What is too rare for a state of its own falls back, together with what else is.
pub(super) fn number_states<'a>(
    counts: &BTreeMap<Sound<'a>, usize>,
) -> Result<(BTreeMap<Sound<'a>, u16>, usize)> {
    // A large corpus has some thousand states too, not ever more.
    let few = (counts.values().sum::<usize>() / 8000).max(80);
    let mut rest = counts.clone();
    let mut states = BTreeMap::new();
    for (level, few) in [few, few, few, 0].into_iter().enumerate() {
        let mut sums: BTreeMap<Sound, usize> = BTreeMap::new();
        for (sound, count) in &rest {
            *sums.entry(sound.levels()[level]).or_default() += count;
        }
        let common = rest.extract_if(.., |sound, _| sums[&sound.levels()[level]] >= few);
        states.extend(common.map(|(sound, _)| (sound, sound.levels()[level])));
    }
    let sorted: BTreeSet<Sound> = states.values().copied().collect();
    ensure!(sorted.len() <= 1 << 16, "{} states are too many: check the names of the phones", sorted.len());
    let numbers: BTreeMap<Sound, u16> = sorted.into_iter().zip(0..=u16::MAX).collect();
    Ok((states.into_iter().map(|(sound, state)| (sound, numbers[&state])).collect(), numbers.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phone_has_thirds_and_neighbours() {
        let labels = vec![(680, "a".to_owned()), (1640, "b".to_owned())];
        let sounds = sounds(10, &labels);
        let thirds: Vec<u8> = sounds.iter().map(|sound| sound.third).collect();
        assert_eq!(thirds, [0, 1, 2, 0, 0, 1, 1, 2, 2, 2]);
        assert_eq!(sounds[2], Sound { phone: "a", third: 2, left: Some(SILENCE), right: Some("b") });
        assert_eq!(sounds[9], Sound { phone: "b", third: 2, left: Some("a"), right: Some(SILENCE) });
    }

    #[test]
    fn what_is_rare_falls_back() {
        let sound = |names: &'static str| Sound {
            phone: "a",
            third: 1,
            left: Some(&names[..1]),
            right: Some(&names[1..]),
        };
        // The last two are only in the test.
        let all = ["xy", "xz", "xw", "vq", "uq", "st", "xk", "mn"].map(sound);
        let counts = all.into_iter().zip([80, 50, 30, 40, 40, 9, 0, 0]).collect();
        let (numbers, states) = number_states(&counts).unwrap();
        assert_eq!((all.map(|sound| numbers[&sound]), states), ([3, 2, 2, 1, 1, 0, 2, 0], 4));
    }
}
