//! `adacomp inspect`

use crate::checkpoint::{Checkpoint, RUN};
use crate::files;
use crate::show::{self, flat, row, table};
use adacomp::{Form, Header, SavedBy, Section, outline};
use anyhow::{Context, Result, ensure};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// Returns what `adacomp inspect` says of a file or folder.
pub(crate) fn describe(path: &Path) -> Result<String> {
    match path.is_dir() {
        true => checkpoint(path),
        false => {
            ensure!(!path.ends_with(RUN), "{} is part of a checkpoint: name its folder", path.display());
            let failed = || format!("{} is neither a safetensors file nor a frame", path.display());
            file(&files::read(path)?).with_context(failed)
        }
    }
}

/// Describes a run: what it is, how far it is, and what each file holds.
fn checkpoint(folder: &Path) -> Result<String> {
    let checkpoint = Checkpoint::open(folder)?;
    let saved = &checkpoint.saved;
    let mut text = format!("checkpoint {} at step {}\n\n", checkpoint.folder.display(), saved.step);
    for (name, value) in flat(&serde_json::to_value(&saved.config)?) {
        text += &format!("  {name:<15} {value}\n");
    }
    if let Some(epoch) = saved.history.epochs.last() {
        let (error, loss) = (epoch.test_error, epoch.test_loss);
        let (total, frames) = (&epoch.total, show::ratio(epoch.total.frame_ratio.overall));
        text += &format!(
            "\nafter epoch {}: test error {error:.2}%, test loss {loss:.4}, compression ratio {} with {}, frame ratio {frames}\n",
            epoch.epoch,
            show::ratio(total.compression_ratio),
            saved.strategy
        );
    }
    let mut rows = vec![row(["file", "tensors", "elements", "bytes", "norm"])];
    for name in saved.files.keys() {
        let bytes = checkpoint.read(name)?;
        let tensors = SafeTensors::deserialize(&bytes).with_context(|| format!("{name} is damaged"))?;
        let elements: usize =
            tensors.iter().map(|(_, tensor)| tensor.shape().iter().product::<usize>()).sum();
        let norm = tensors
            .iter()
            .map(|(_, tensor)| values(&tensor).map(norm))
            .try_fold(0.0, |all: f64, norm| Some(all.hypot(norm?)));
        rows.push(row([
            &show::short(name),
            &tensors.len().to_string(),
            &elements.to_string(),
            &bytes.len().to_string(),
            &number(norm),
        ]));
    }
    Ok(text + "\n" + &table(&rows))
}

/// Describes the bytes of a safetensors file or a frame.
pub(crate) fn file(bytes: &[u8]) -> Result<String> {
    match SafeTensors::deserialize(bytes) {
        Ok(tensors) => Ok(tensors_table(bytes, &tensors)),
        Err(_) => {
            let (header, sections) = outline(bytes)?;
            Ok(frame_table(&header, &sections, bytes.len()))
        }
    }
}

fn tensors_table(bytes: &[u8], tensors: &SafeTensors<'_>) -> String {
    let title = match SavedBy::read(bytes, 0) {
        Ok(SavedBy { learner, learners, step }) => {
            format!("residuals of learner {learner} of {learners}, before step {step}\n\n")
        }
        Err(_) => "tensors\n\n".to_owned(),
    };
    let mut rows = vec![row(["name", "type", "shape", "norm", "largest"])];
    for (name, tensor) in tensors.iter() {
        rows.push(row([
            &show::short(name),
            &format!("{:?}", tensor.dtype()),
            &show::short(&format!("{:?}", tensor.shape())),
            &number(values(&tensor).map(norm)),
            // A number that is none counts as the largest.
            &number(
                values(&tensor)
                    .map(|values| values.map(f32::abs).max_by(f32::total_cmp).map_or(0.0, f64::from)),
            ),
        ]));
    }
    title + &table(&rows)
}

fn frame_table(header: &Header, sections: &[Section], bytes: usize) -> String {
    let mut text = format!(
        "frame of learner {}, step {}, codec {}, {bytes} bytes, fingerprint {:016x}\n",
        header.learner, header.step, header.codec, header.fingerprint
    );
    if header.non_finite {
        return text + "the learner's gradient is not finite: all learners drop this step\n";
    }
    let mut rows = vec![row(["layer", "elements are", "bytes"])];
    for section in sections {
        let form = match section.form {
            Form::Dense => "all, f32",
            Form::Half => "all, f16",
            Form::Selected => "selected",
        };
        rows.push(row([&section.layer.to_string(), form, &section.bytes.to_string()]));
    }
    text.push('\n');
    text + &table(&rows)
}

/// Returns the values of a tensor, if they are f32.
fn values<'a>(tensor: &TensorView<'a>) -> Option<impl Iterator<Item = f32> + use<'a>> {
    let bytes: &'a [u8] = tensor.data();
    let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    (tensor.dtype() == Dtype::F32).then_some(values)
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.fold(0.0, |sum, value| sum + f64::from(value) * f64::from(value)).sqrt()
}

fn number(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.4e}"))
}
