//! What a frame of 10 ms is made of: its log-mel features, and its state, a third of a phone in its context.

use super::{Labels, RATE};
use anyhow::{Result, ensure};
use rustfft::{FftPlannerScalar, num_complex::Complex};
use std::collections::{BTreeMap, BTreeSet};

/// Samples of a window: 25 ms.
const WINDOW: usize = 400;
/// Samples from one to the next: 10 ms.
const STEP: usize = 160;
/// Features of a window.
pub(crate) const BANDS: usize = 40;
/// Of the Fourier transform.
const POINTS: usize = 512;

/// Returns the features of all windows that fit.
///
/// They are made in 64 bits and without the instructions that only some processors have, so that they
/// are the same on all of them.
pub(crate) fn features(samples: &[i16]) -> Vec<f32> {
    let fft = FftPlannerScalar::new().plan_fft_forward(POINTS);
    let turn = std::f64::consts::TAU / (WINDOW - 1) as f64;
    let hamming: Vec<f64> = (0..WINDOW).map(|index| 0.54 - 0.46 * (turn * index as f64).cos()).collect();
    let filters: Vec<(usize, Vec<f64>)> = (0..BANDS).map(filter).collect();
    let mut scratch = vec![Complex::default(); fft.get_inplace_scratch_len()];
    let mut features = Vec::with_capacity(samples.len() / STEP * BANDS);
    for start in (0..(samples.len() + 1).saturating_sub(WINDOW)).step_by(STEP) {
        let mut spectrum = [Complex::default(); POINTS];
        for (index, weight) in hamming.iter().enumerate() {
            let (before, sample) = (samples[(start + index).saturating_sub(1)], samples[start + index]);
            spectrum[index].re = weight * (f64::from(sample) - 0.97 * f64::from(before));
        }
        fft.process_with_scratch(&mut spectrum, &mut scratch);
        features.extend(filters.iter().map(|(first, weights)| {
            let bins = weights.iter().zip(&spectrum[*first..]);
            let energy: f64 = bins.map(|(weight, bin)| weight * bin.norm_sqr()).sum();
            // The floor is below the noise of rounding to 16 bits.
            energy.max(1.0).ln() as f32
        }));
    }
    features
}

/// Returns where a filter starts in the spectrum, and its weights: on the mel scale, a triangle from the peak
/// of the filter before to the peak of the one after.
fn filter(band: usize) -> (usize, Vec<f64>) {
    let mel = |hertz: f64| 1127.0 * (hertz / 700.0).ln_1p();
    let (low, high) = (mel(64.0), mel(f64::from(RATE / 2).min(8000.0)));
    let weight = |bin: usize| {
        let hertz = bin as f64 * f64::from(RATE) / POINTS as f64;
        let place = (mel(hertz) - low) / (high - low) * (BANDS + 1) as f64;
        1.0 - (place - (band + 1) as f64).abs()
    };
    let bins: Vec<usize> = (0..=POINTS / 2).filter(|&bin| weight(bin) > 0.0).collect();
    (bins[0], bins.into_iter().map(weight).collect())
}

/// As festival names it.
const SILENCE: &str = "pau";

/// A third of a phone between two others; none stands for any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sound<'a> {
    phone: &'a str,
    third: u8,
    left: Option<&'a str>,
    right: Option<&'a str>,
}

impl Sound<'_> {
    /// Returns this and what it falls back to: with its left neighbour, with its right one, with any.
    fn levels(self) -> [Self; 4] {
        let (left, right) = (Sound { right: None, ..self }, Sound { left: None, ..self });
        [self, left, right, Sound { left: None, right: None, ..self }]
    }
}

/// Returns the sound of each frame, by where its middle is. What is after the last label belongs to that.
pub(crate) fn sounds(frames: usize, labels: &Labels) -> Vec<Sound<'_>> {
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

/// Returns the state of each sound, and the number of states.
///
/// What is too rare for a state of its own falls back, together with what else is.
pub(crate) fn number_states<'a>(
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
    fn a_sine_is_loudest_in_its_band() {
        let turn = std::f64::consts::TAU * 1000.0 / f64::from(RATE);
        let sine = (0..RATE).map(|index| (9000.0 * (turn * f64::from(index)).sin()) as i16);
        let features = features(&sine.collect::<Vec<_>>());
        assert_eq!(features.len(), 98 * BANDS);
        for frame in features.chunks(BANDS) {
            let loudest = (0..BANDS).max_by(|&one, &two| frame[one].total_cmp(&frame[two])).unwrap();
            // 1 kHz is halfway between the peaks of these two, which are 952 and 1053 Hz.
            assert!([12, 13].contains(&loudest), "{loudest}");
            assert!(frame[loudest] > frame[3] + 5.0 && frame[loudest] > frame[30] + 5.0);
        }
    }

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
