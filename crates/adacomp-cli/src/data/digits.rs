//! The 1,797 handwritten digits of 8x8 that come with the crate smartcore.
//!
//! E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0; the test
//! part of it.

use super::{Data, images};
use smartcore::dataset::digits;

/// Digits kept for testing: every sixth, so that training gets 1,497.
const EVERY: usize = 6;
const SIDE: usize = 8;
const CLASSES: usize = 10;

pub(crate) fn load() -> Data {
    let digits = digits::load_dataset();
    let [mut train, mut test] = [(); 2].map(|()| images::Images::new(1, SIDE, Vec::new(), Vec::new()));
    let pictures = digits.data.chunks_exact(SIDE * SIDE).zip(&digits.target);
    for (number, (pixels, &label)) in pictures.enumerate() {
        let part = if number % EVERY == 0 { &mut test } else { &mut train };
        // Pixels are 0 to 16.
        part.pixels.extend(pixels.iter().map(|&pixel| (pixel * 255.0 / 16.0) as u8));
        part.labels.push(label as u8);
    }
    images::data(train, test, CLASSES, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_1797_digits_of_all_classes() {
        let Data { train, test, .. } = load();
        assert_eq!((train.len(), test.len()), (1497, 300));
        let mut seen = [0; CLASSES];
        let batch = crate::data::Batch::of(&*test, 0..test.len(), None).unwrap();
        batch.targets.iter().for_each(|&target| seen[target as usize] += 1);
        assert!(seen.iter().all(|&count| count >= 20), "{seen:?}");
    }
}
