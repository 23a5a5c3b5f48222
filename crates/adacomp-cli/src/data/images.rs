//! Small pictures that are all in main memory.

use super::{Batch, Data, Samples};
use crate::draw::Draw;
use anyhow::{Result, bail};

/// Pictures of one size, channel after channel, and what each shows.
#[derive(Debug)]
pub(crate) struct Images {
    pub(crate) channels: usize,
    pub(crate) side: usize,
    pub(crate) pixels: Vec<u8>,
    pub(crate) labels: Vec<u8>,
    /// Mean and deviation of each channel, of pixels in 0..1.
    pub(crate) normal: Vec<(f32, f32)>,
    /// Whether a training sample is shifted and mirrored at random.
    pub(crate) augment: bool,
}

/// How far a picture may be shifted.
const SHIFT: usize = 4;

impl Images {
    pub(crate) fn new(channels: usize, side: usize, pixels: Vec<u8>, labels: Vec<u8>) -> Self {
        Self { channels, side, pixels, labels, normal: vec![(0.0, 1.0); channels], augment: false }
    }

    /// That there are as many pictures as labels, and labels below `classes`.
    pub(crate) fn check(&self, classes: u8, source: &str) -> Result<()> {
        let pictures = self.pixels.len() / (self.channels * self.side * self.side);
        if pictures != self.labels.len() {
            bail!("{source}: {pictures} pictures, but {} labels", self.labels.len());
        }
        if pictures == 0 {
            bail!("{source}: no pictures");
        }
        match self.labels.iter().position(|&label| label >= classes) {
            Some(number) => {
                bail!("{source}: label {} of picture {number} is not below {classes}", self.labels[number])
            }
            None => Ok(()),
        }
    }

    /// Mean and deviation of each channel.
    fn measure(&self) -> Vec<(f32, f32)> {
        let area = self.side * self.side;
        let channel = |channel: usize| {
            let planes = self.pixels.chunks_exact(area).skip(channel).step_by(self.channels);
            let (mut sum, mut squares, mut count) = (0u64, 0u64, 0u64);
            for &pixel in planes.flatten() {
                sum += u64::from(pixel);
                squares += u64::from(pixel) * u64::from(pixel);
                count += 1;
            }
            let mean = sum as f64 / count as f64;
            let deviation = (squares as f64 / count as f64 - mean * mean).sqrt().max(1.0);
            ((mean / 255.0) as f32, (deviation / 255.0) as f32)
        };
        (0..self.channels).map(channel).collect()
    }
}

/// Both sets normalised alike, by the training pictures.
pub(crate) fn data(mut train: Images, mut test: Images, classes: usize, augment: bool) -> Data {
    train.normal = train.measure();
    test.normal = train.normal.clone();
    train.augment = augment;
    Data { train: Box::new(train), test: Box::new(test), classes }
}

impl Samples for Images {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn add(&self, sample: usize, draw: Option<Draw>, batch: &mut Batch) -> Result<()> {
        let (side, area) = (self.side, self.side * self.side);
        let (mut right, mut down, mut mirrored) = (SHIFT, SHIFT, false);
        if let (true, Some(draw)) = (self.augment, draw) {
            let mut random = draw.augmentation(sample);
            (right, down, mirrored) = (random.usize(..=2 * SHIFT), random.usize(..=2 * SHIFT), random.bool());
        }
        let picture = &self.pixels[sample * self.channels * area..][..self.channels * area];
        for (plane, &(mean, deviation)) in picture.chunks_exact(area).zip(&self.normal) {
            for y in 0..side {
                for x in 0..side {
                    let x = if mirrored { side - 1 - x } else { x };
                    // What lies outside is black.
                    let (from_x, from_y) = ((x + right).wrapping_sub(SHIFT), (y + down).wrapping_sub(SHIFT));
                    let pixel =
                        if from_x < side && from_y < side { plane[from_y * side + from_x] } else { 0 };
                    batch.values.push((f32::from(pixel) / 255.0 - mean) / deviation);
                }
            }
        }
        batch.targets.push(i32::from(self.labels[sample]));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(augment: bool) -> Images {
        Images { augment, ..Images::new(1, 8, (0..64).collect(), vec![3]) }
    }

    #[test]
    fn without_draws_a_picture_stays_as_it_is() {
        let batch = Batch::of(&picture(true), [0], None).unwrap();
        assert!(batch.values.iter().map(|value| (value * 255.0).round() as u8).eq(0..64));
        assert_eq!(batch.targets, [3]);
    }

    #[test]
    fn augmentation_depends_on_the_sample_and_epoch_only() {
        let batch = |epoch| Batch::of(&picture(true), [0], Some(Draw { seed: 1, epoch })).unwrap();
        assert_eq!(batch(0), batch(0));
        assert!((1..20).any(|epoch| batch(epoch) != batch(0)));
        let plain = Batch::of(&picture(false), [0], Some(Draw { seed: 1, epoch: 0 })).unwrap();
        assert_eq!(plain, Batch::of(&picture(true), [0], None).unwrap());
    }

    #[test]
    fn wrong_labels_and_counts_are_refused() {
        let images = Images::new(1, 2, vec![0; 8], vec![1, 10]);
        assert_eq!(
            images.check(10, "x").unwrap_err().to_string(),
            "x: label 10 of picture 1 is not below 10"
        );
        let images = Images::new(1, 2, vec![0; 8], vec![1]);
        assert_eq!(images.check(10, "x").unwrap_err().to_string(), "x: 2 pictures, but 1 labels");
    }
}
