//! A borrowed gradient in any of the float formats that training uses.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::ops::Range;

/// One parameter's gradient of this step. It is accumulated in f32 whatever its format.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// Single precision: used in place.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// The upper half of a single.
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Gradient<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(values)
    }
}

impl<'a> From<&'a [f16]> for Gradient<'a> {
    fn from(values: &'a [f16]) -> Self {
        Self::F16(values)
    }
}

impl<'a> From<&'a [bf16]> for Gradient<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Self::Bf16(values)
    }
}

impl<'a> Gradient<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether every element is zero.
    pub fn is_zero(&self) -> bool {
        match self {
            Self::F32(values) => values.iter().all(|value| *value == 0.0),
            Self::F16(values) => values.iter().all(|value| *value == f16::ZERO),
            Self::Bf16(values) => values.iter().all(|value| *value == bf16::ZERO),
        }
    }

    /// Returns whether every element is finite.
    pub fn is_finite(&self) -> bool {
        match self {
            Self::F32(values) => values.iter().all(|value| value.is_finite()),
            Self::F16(values) => values.iter().all(|value| value.is_finite()),
            Self::Bf16(values) => values.iter().all(|value| value.is_finite()),
        }
    }

    /// Returns a range in f32, multiplied by `factor`: in place where possible, otherwise in `buffer`.
    pub(crate) fn read<'b>(self, range: Range<usize>, factor: f32, buffer: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        if let (Self::F32(values), 1.0) = (self, factor) {
            return &values[range];
        }
        buffer.resize(range.len(), 0.0);
        match self {
            Self::F32(values) => buffer.copy_from_slice(&values[range]),
            Self::F16(values) => values[range].convert_to_f32_slice(buffer),
            Self::Bf16(values) => values[range].convert_to_f32_slice(buffer),
        }
        if factor != 1.0 {
            buffer.iter_mut().for_each(|value| *value *= factor);
        }
        buffer
    }
}
