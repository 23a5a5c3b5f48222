//! A folder of class folders, as ImageNet comes: `train/CLASS/*.jpg` and `val/CLASS/*.jpg`.

use super::fetch::folders_in;
use super::images::{MOST_PIXELS, decode};
use super::{Batch, Data, Samples};
use crate::draw::Draw;
use crate::files;
use anyhow::{Context, Result, bail};
use fastrand::Rng;
use image::imageops::FilterType;
use image::{DynamicImage, RgbImage};
use std::path::{Path, PathBuf};

/// Width and height of pictures as models take them.
const SIDE: u32 = 224;
/// Mean and deviation of ImageNet's red, green and blue: what models for such pictures are used to.
const NORMAL: [(f32, f32); 3] = [(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)];
/// Without a folder `val`, every tenth picture is for testing.
const EVERY: usize = 10;

pub(crate) fn load(folder: &Path, augment: bool) -> Result<Data> {
    let part = |names: &[&str]| names.iter().map(|name| folder.join(name)).find(|path| path.is_dir());
    let (train, test, classes) = match (part(&["train"]), part(&["val", "test"])) {
        (Some(train), Some(test)) => {
            let (train, classes) = pictures(&train)?;
            let (test, test_classes) = pictures(&test)?;
            if classes != test_classes {
                bail!("{}: the folders for training and for testing have other classes", folder.display());
            }
            (train, test, classes)
        }
        _ => {
            let (all, classes) = pictures(folder)?;
            let (test, train): (Vec<_>, Vec<_>) =
                all.into_iter().enumerate().partition(|(number, _)| number % EVERY == 0);
            let without_number =
                |part: Vec<(usize, Picture)>| part.into_iter().map(|(_, picture)| picture).collect();
            (without_number(train), without_number(test), classes)
        }
    };
    if train.is_empty() || test.is_empty() {
        bail!("{}: too few pictures to train and test with", folder.display());
    }
    let samples = |pictures, augment| Box::new(Folder { pictures, augment });
    Ok(Data { train: samples(train, augment), test: samples(test, false), classes: classes.len() })
}

/// A file and its class.
type Picture = (PathBuf, usize);

/// Returns all pictures in class folders, and the names of the classes.
fn pictures(folder: &Path) -> Result<(Vec<Picture>, Vec<String>)> {
    let (mut pictures, mut classes) = (Vec::new(), Vec::new());
    for class in folders_in(folder) {
        let mut files: Vec<_> = std::fs::read_dir(&class)
            .with_context(|| class.display().to_string())?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| is_picture(path))
            .collect();
        files.sort();
        if !files.is_empty() {
            pictures.extend(files.into_iter().map(|file| (file, classes.len())));
            classes.extend(class.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    if classes.len() < 2 {
        bail!(
            "{}: put a folder for each class there, with its pictures (png or jpg), best within `train` and `val`",
            folder.display()
        );
    }
    Ok((pictures, classes))
}

fn is_picture(path: &Path) -> bool {
    let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
    extension.is_some_and(|extension| ["png", "jpg", "jpeg"].iter().any(|known| extension == *known))
}

/// Pictures that are read when they are needed.
struct Folder {
    pictures: Vec<Picture>,
    augment: bool,
}

impl Samples for Folder {
    fn len(&self) -> usize {
        self.pictures.len()
    }

    fn add(&self, sample: usize, draw: Option<Draw>, batch: &mut Batch) -> Result<()> {
        let (path, class) = &self.pictures[sample];
        let random = draw.filter(|_| self.augment).map(|draw| draw.augmentation(sample));
        let cut = read_picture(&files::read(path)?, random, SIDE, MOST_PIXELS)
            .with_context(|| format!("{} cannot be read as a picture", path.display()))?;
        for (channel, (mean, deviation)) in NORMAL.into_iter().enumerate() {
            let pixels = cut.pixels().map(|pixel| f32::from(pixel[channel]) / 255.0);
            batch.values.extend(pixels.map(|pixel| (pixel - mean) / deviation));
        }
        batch.targets.push(*class as i32);
        Ok(())
    }
}

/// Reads a picture by what it is: some of ImageNet's files have another name than they should. Returns a part of it, scaled to
/// a square.
pub(crate) fn read_picture(bytes: &[u8], random: Option<Rng>, side: u32, most: u64) -> Result<RgbImage> {
    let picture = decode(bytes, most)?;
    Ok(random.map_or_else(|| cut_middle(&picture, side), |random| cut_anywhere(&picture, random, side)))
}

/// Returns the middle square of a picture, seven eighths of its shorter side, as is usual for testing on ImageNet: 224 of 256.
///
/// It is cut first and then scaled, so that memory does not grow with the shape of a picture.
fn cut_middle(picture: &DynamicImage, side: u32) -> RgbImage {
    let shorter = f64::from(picture.width().min(picture.height()));
    let cut = ((shorter * 7.0 / 8.0).round() as u32).max(1);
    let (x, y) = ((picture.width() - cut) / 2, (picture.height() - cut) / 2);
    picture.crop_imm(x, y, cut, cut).resize_exact(side, side, FilterType::Triangle).into_rgb8()
}

/// Returns a part of random place, size and shape, mirrored or not, as is usual for training on ImageNet.
fn cut_anywhere(picture: &DynamicImage, mut random: Rng, side: u32) -> RgbImage {
    let (width, height) = (f64::from(picture.width()), f64::from(picture.height()));
    let area = width * height * (0.08 + 0.92 * random.f64());
    let shape = ((random.f64() * 2.0 - 1.0) * (4.0f64 / 3.0).ln()).exp();
    let (cut_width, cut_height) =
        ((area * shape).sqrt().clamp(1.0, width), (area / shape).sqrt().clamp(1.0, height));
    let (x, y) = (random.f64() * (width - cut_width), random.f64() * (height - cut_height));
    let cut = picture.crop_imm(x as u32, y as u32, cut_width as u32, cut_height as u32);
    let cut = cut.resize_exact(side, side, FilterType::Triangle).into_rgb8();
    if random.bool() { image::imageops::flip_horizontal(&cut) } else { cut }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scaled before it is cut, the longer one would take 19.7 GB.
    #[test]
    fn long_pictures_are_cut_before_they_are_scaled() {
        for (width, height) in [(1, 100_000), (100_000, 1), (3_000, 1), (1, 1)] {
            let picture = DynamicImage::ImageRgb8(RgbImage::from_pixel(width, height, image::Rgb([1, 2, 3])));
            for cut in [
                cut_middle(&picture, SIDE),
                cut_anywhere(&picture, Draw { seed: 1, epoch: 0 }.augmentation(0), SIDE),
            ] {
                assert_eq!(cut.dimensions(), (SIDE, SIDE));
                assert!(cut.pixels().all(|pixel| pixel.0 == [1, 2, 3]));
            }
        }
    }

    #[test]
    fn the_middle_is_what_scaling_first_would_give() {
        let picture = RgbImage::from_fn(512, 640, |x, y| image::Rgb([(x / 4) as u8, (y / 4) as u8, 7]));
        let picture = DynamicImage::ImageRgb8(picture);
        let scaled = picture.resize_exact(256, 320, FilterType::Triangle).into_rgb8();
        let expected = image::imageops::crop_imm(&scaled, 16, 48, SIDE, SIDE).to_image();
        let cut = cut_middle(&picture, SIDE);
        assert!(cut.iter().zip(expected.iter()).all(|(cut, expected)| cut.abs_diff(*expected) <= 1));
    }
}
