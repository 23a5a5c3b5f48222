//! MNIST and what comes in the same files: idx, plain or gzipped.

use super::Data;
use super::images::{self, Images};
use super::place::{file, home};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::Path;

const CLASSES: u8 = 10;
const SIDE: usize = 28;

pub(crate) fn load(folder: &Path) -> Result<Data> {
    let names = forms("train-images-idx3-ubyte");
    let folder = &home(folder, &names.each_ref().map(String::as_str))?;
    let part = |name: &str| -> Result<Images> {
        let (pictures, labels) = (format!("{name}-images-idx3-ubyte"), format!("{name}-labels-idx1-ubyte"));
        let (path, pixels) = read(folder, &pictures)?;
        let ([_, height, width], pixels) = idx(&pixels).with_context(|| path.clone())?;
        if [height, width] != [SIDE, SIDE] {
            bail!("{path}: pictures of {height}x{width}, not {SIDE}x{SIDE}");
        }
        let (labels_path, labels) = read(folder, &labels)?;
        let ([_], labels) = idx(&labels).with_context(|| labels_path)?;
        let images = Images::new(1, height, pixels, labels);
        images.check(CLASSES, &path)?;
        Ok(images)
    };
    Ok(images::data(part("train")?, part("t10k")?, usize::from(CLASSES), false))
}

/// The names that a file may have.
fn forms(name: &str) -> [String; 3] {
    [name.to_owned(), format!("{name}.gz"), name.replace("-idx", ".idx")]
}

/// A file's name for messages, and what is in it.
fn read(folder: &Path, name: &str) -> Result<(String, Vec<u8>)> {
    let path = file(folder, &forms(name).each_ref().map(String::as_str))?;
    let shown = path.display().to_string();
    let mut bytes = std::fs::read(&path).with_context(|| shown.clone())?;
    if path.extension().is_some_and(|extension| extension == "gz") {
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(bytes.as_slice())
            .read_to_end(&mut plain)
            .with_context(|| format!("{shown} is damaged: fetch it again"))?;
        bytes = plain;
    }
    Ok((shown, bytes))
}

/// Dimensions and bytes of an idx file of unsigned bytes.
fn idx<const D: usize>(bytes: &[u8]) -> Result<([usize; D], Vec<u8>)> {
    let number = |at: usize| -> Option<usize> {
        let bytes = bytes.get(at..at + 4)?;
        Some(u32::from_be_bytes(bytes.try_into().ok()?) as usize)
    };
    let magic = 0x0800 + D;
    match number(0) {
        Some(found) if found == magic => {}
        Some(found) => {
            bail!("not an idx file of {D} dimensions: it starts with {found:08x}, not {magic:08x}")
        }
        None => bail!("truncated: {} bytes", bytes.len()),
    }
    let mut dimensions = [0; D];
    for (position, dimension) in dimensions.iter_mut().enumerate() {
        *dimension = number(4 + 4 * position).context("truncated within its header")?;
    }
    let data = &bytes[4 + 4 * D..];
    let expected = dimensions.iter().try_fold(1usize, |product, &dimension| product.checked_mul(dimension));
    match expected {
        Some(expected) if expected == data.len() => Ok((dimensions, data.to_vec())),
        Some(expected) if expected > data.len() => {
            bail!("truncated: {} bytes of data where {expected} should be; fetch it again", data.len())
        }
        _ => bail!("{} bytes of data do not fit the dimensions {dimensions:?}", data.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::idx;

    #[test]
    fn idx_files_are_read_or_refused() {
        let good = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 1, 7, 9];
        assert_eq!(idx::<2>(&good).unwrap(), ([2, 1], vec![7, 9]));
        let refused = |bytes: &[u8]| idx::<2>(bytes).unwrap_err().to_string();
        assert!(refused(&good[..13]).starts_with("truncated: 1 bytes of data where 2 should be"));
        assert!(refused(&good[..9]).starts_with("truncated within its header"));
        assert!(refused(&good[..3]).starts_with("truncated: 3 bytes"));
        assert!(refused(&[good.as_slice(), &[1]].concat()).contains("do not fit"));
        assert!(refused(&[0, 0, 8, 1]).contains("00000801"));
        let huge = [0, 0, 8, 2, 255, 255, 255, 255, 255, 255, 255, 255];
        assert!(refused(&huge).contains("where 18446744065119617025 should be"));
    }
}
