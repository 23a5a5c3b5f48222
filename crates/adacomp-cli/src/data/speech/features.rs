//! Log-mel features of 10 ms each.

use super::RATE;
use rustfft::{FftPlannerScalar, num_complex::Complex};

/// Samples of a window: 25 ms.
pub(super) const WINDOW: usize = 400;
/// Samples from one to the next: 10 ms.
pub(super) const STEP: usize = 160;
/// Features of a window.
pub(super) const BANDS: usize = 40;
/// Of the Fourier transform.
const POINTS: usize = 512;

/// The features of all windows that fit in whole.
///
/// They are made in 64 bits and without the instructions that only some processors have, so that they
/// are the same on all of them.
pub(super) fn features(samples: &[i16]) -> Vec<f32> {
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

/// Where a filter starts in the spectrum, and its weights: on the mel scale, a triangle from the peak
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
}
