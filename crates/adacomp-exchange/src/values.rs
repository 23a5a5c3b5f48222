//! Values in messages, and lists that grow as they are filled.

use adacomp::DecodeError;

/// The entry at this index, made if it is not there.
pub(crate) fn slot<T: Default>(entries: &mut Vec<T>, index: usize) -> &mut T {
    if entries.len() <= index {
        entries.resize_with(index + 1, T::default);
    }
    &mut entries[index]
}

pub(crate) fn write_values(values: &[f32], message: &mut Vec<u8>) {
    message.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

/// So many values from the front of `bytes`, which move past them.
pub(crate) fn read_values<'a>(
    bytes: &mut &'a [u8],
    count: usize,
) -> Result<impl Iterator<Item = f32> + use<'a>, DecodeError> {
    let (front, rest) =
        bytes.split_at_checked(4 * count).ok_or(DecodeError::Truncated { part: "dense values" })?;
    *bytes = rest;
    Ok(front.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)))
}

/// A scale from the front of `bytes`, which move past it.
pub(crate) fn read_scale(bytes: &mut &[u8], layer: usize) -> Result<f32, DecodeError> {
    let scale = read_values(bytes, 1)?.next().unwrap_or(f32::NAN);
    if !(scale.is_finite() && scale.is_sign_positive()) {
        return Err(DecodeError::Value { layer });
    }
    Ok(scale)
}
