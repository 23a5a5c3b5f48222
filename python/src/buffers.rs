//! Python buffers as slices, in place and without the interpreter's lock: the only unsafe code of the package.

#![allow(unsafe_code)]

use crate::refused;
use adacomp::half::slice::HalfFloatSliceExt;
use adacomp::half::{bf16, f16};
use adacomp::{Gradient, Layer};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use std::ops::Range;

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    F16,
    /// Python has no letter for it: it comes as 16-bit unsigned integers.
    Bf16,
}

impl Format {
    /// Reads one of PyTorch's names.
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        match name {
            "float32" => Ok(Self::F32),
            "float16" => Ok(Self::F16),
            "bfloat16" => Ok(Self::Bf16),
            other => Err(refused(format!("format `{other}`; expected float32, float16 or bfloat16"))),
        }
    }

    /// Returns whether a value is finite in this format.
    pub(crate) fn fits(self, value: f32) -> bool {
        match self {
            Self::F32 => value.is_finite(),
            Self::F16 => f16::from_f32(value).is_finite(),
            Self::Bf16 => bf16::from_f32(value).is_finite(),
        }
    }

    /// Returns values in this format, in words of 32 bits; the last may be filled up with zeros.
    pub(crate) fn words(self, values: &[f32]) -> Vec<u32> {
        let pairs = |bits: fn(f32) -> u16| {
            let pair = |pair: &[f32]| {
                u32::from(bits(pair[0])) | pair.get(1).map_or(0, |value| u32::from(bits(*value)) << 16)
            };
            values.chunks(2).map(pair).collect()
        };
        match self {
            Self::F32 => values.iter().map(|value| value.to_bits()).collect(),
            Self::F16 => pairs(|value| f16::from_f32(value).to_bits()),
            Self::Bf16 => pairs(|value| bf16::from_f32(value).to_bits()),
        }
    }
}

/// Numbers of some Python object: an array, a memory view, anything that has a buffer. The object cannot free or move them
/// while this is alive.
pub(crate) struct Floats {
    buffer: PyUntypedBuffer,
    format: Format,
}

impl Floats {
    pub(crate) fn get(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        let format = match (buffer.format().to_bytes(), buffer.item_size()) {
            (b"f" | b"<f" | b"=f" | b"@f", 4) => Format::F32,
            (b"e" | b"<e" | b"=e" | b"@e", 2) => Format::F16,
            (b"H" | b"<H" | b"=H" | b"@H", 2) => Format::Bf16,
            (other, _) => {
                return Err(refused(format!(
                    "a buffer of format `{}`; expected float32, float16, or bfloat16 as uint16",
                    String::from_utf8_lossy(other)
                )));
            }
        };
        // In any other order the elements would be taken for others.
        if !buffer.is_c_contiguous() {
            return Err(refused(
                "the buffer is not contiguous in C order; numpy.ascontiguousarray makes a copy that is",
            ));
        }
        if buffer.item_count() > 0 && !(buffer.buf_ptr() as usize).is_multiple_of(buffer.item_size()) {
            return Err(refused("the buffer is not aligned; make a copy"));
        }
        Ok(Self { buffer, format })
    }

    /// Takes the same, for writing.
    pub(crate) fn get_mut(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let floats = Self::get(object)?;
        match floats.buffer.readonly() {
            true => Err(refused("the buffer is read-only")),
            false => Ok(floats),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.buffer.item_count()
    }

    pub(crate) fn is_flat(&self) -> bool {
        self.buffer.dimensions() == 1
    }

    /// Checks that it has the shape of a parameter, or is flat with all of its elements.
    pub(crate) fn check_shape(&self, layer: &Layer) -> PyResult<()> {
        check_shape(self.buffer.shape(), layer)
    }

    /// Returns a range as a gradient.
    ///
    /// # Panics
    /// If it is out of bounds.
    pub(crate) fn gradient(&self, range: Range<usize>) -> Gradient<'_> {
        match self.format {
            Format::F32 => self.slice::<f32>(range).into(),
            Format::F16 => self.slice::<f16>(range).into(),
            Format::Bf16 => self.slice::<bf16>(range).into(),
        }
    }

    /// Returns all of it as a gradient.
    pub(crate) fn all(&self) -> Gradient<'_> {
        self.gradient(0..self.len())
    }

    pub(crate) fn f32(&self) -> PyResult<&[f32]> {
        match self.format {
            Format::F32 => Ok(self.slice(0..self.len())),
            _ => Err(refused("expected a buffer of float32")),
        }
    }

    pub(crate) fn f32_mut(&mut self) -> PyResult<&mut [f32]> {
        match self.format {
            Format::F32 => Ok(self.slice_mut(0..self.len())),
            _ => Err(refused("expected a buffer of float32")),
        }
    }

    /// Lets `write` fill a range in f32: in place, or by way of `scratch`. Returns whether all of it fits the buffer's format.
    pub(crate) fn write(
        &mut self,
        range: Range<usize>,
        scratch: &mut Vec<f32>,
        write: impl FnOnce(&mut [f32]),
    ) -> bool {
        if self.format == Format::F32 {
            write(self.slice_mut(range));
            return true;
        }
        scratch.resize(range.len(), 0.0);
        write(scratch);
        match self.format {
            Format::F32 => true,
            Format::F16 => {
                let values: &mut [f16] = self.slice_mut(range);
                values.convert_from_f32_slice(scratch);
                values.iter().all(|value| value.is_finite())
            }
            Format::Bf16 => {
                let values: &mut [bf16] = self.slice_mut(range);
                values.convert_from_f32_slice(scratch);
                values.iter().all(|value| value.is_finite())
            }
        }
    }

    fn slice<T: Number>(&self, range: Range<usize>) -> &[T] {
        assert_eq!(size_of::<T>(), self.buffer.item_size());
        // SAFETY: the buffer is contiguous, aligned and of this item size (checked when it was taken), the numbers are valid for
        // any bits, and its owner keeps it in place while `self.buffer` lives. That nobody writes to it meanwhile is what the
        // Python side must see to, as with any buffer.
        let all = unsafe { std::slice::from_raw_parts(self.start::<T>(), self.len()) };
        &all[range]
    }

    fn slice_mut<T: Number>(&mut self, range: Range<usize>) -> &mut [T] {
        assert_eq!(size_of::<T>(), self.buffer.item_size());
        assert!(!self.buffer.readonly(), "a buffer for writing");
        // SAFETY: as above; and the buffer may be written, by us alone because of `&mut self`.
        let all = unsafe { std::slice::from_raw_parts_mut(self.start::<T>(), self.len()) };
        &mut all[range]
    }

    fn start<T>(&self) -> *mut T {
        // The address of an empty buffer may be anything.
        if self.len() == 0 { std::ptr::dangling_mut() } else { self.buffer.buf_ptr().cast() }
    }
}

pub(crate) fn check_shape(shape: &[usize], layer: &Layer) -> PyResult<()> {
    let expected = &layer.parameter.shape;
    if shape == expected.as_slice() || shape == [layer.elements()] {
        return Ok(());
    }
    let (name, elements) = (layer.name(), layer.elements());
    Err(refused(format!(
        "a buffer of shape {shape:?} for parameter `{name}`; expected {expected:?}, or [{elements}] for its elements in C order"
    )))
}

/// Checks that no two of these share memory, so that each may be written while others are.
pub(crate) fn check_apart<'a>(all: impl Iterator<Item = &'a Floats>) -> PyResult<()> {
    let address = |floats: &Floats| floats.buffer.buf_ptr() as usize;
    let range = |floats: &Floats| address(floats)..address(floats) + floats.buffer.len_bytes();
    let mut ranges: Vec<Range<usize>> = all.filter(|floats| floats.len() > 0).map(range).collect();
    ranges.sort_by_key(|range| range.start);
    match ranges.is_sorted_by(|one, next| one.end <= next.start) {
        true => Ok(()),
        false => Err(refused("buffers for writing overlap; pass an array of its own for each")),
    }
}

/// Types of which any bits are a value.
trait Number {}
impl Number for f32 {}
impl Number for f16 {}
impl Number for bf16 {}

/// Returns values as a NumPy array of their own.
pub(crate) fn array<'py>(py: Python<'py>, bytes: &[u8], dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    let bytes = PyByteArray::new(py, bytes);
    py.import("numpy")?.call_method1("frombuffer", (bytes, dtype))
}

pub(crate) fn f32_array<'py>(py: Python<'py>, values: &[f32]) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    array(py, &bytes, "float32")
}
