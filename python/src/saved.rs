//! What learners save: safetensors files to and from arrays by name.

use crate::buffers::{Floats, array, bytes};
use crate::refused;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;

/// Arrays by name.
pub(crate) type Arrays<'py> = HashMap<String, Bound<'py, PyAny>>;

/// The key of the text that says who saved a state.
const KEY: &str = "adacomp";

/// Returns the tensors of a safetensors file by name, as arrays, and its text.
pub(crate) fn tensors<'py>(py: Python<'py>, file: &[u8]) -> PyResult<(Bound<'py, PyDict>, String)> {
    let tensors = SafeTensors::deserialize(file).map_err(refused)?;
    let (_, metadata) = SafeTensors::read_metadata(file).map_err(refused)?;
    let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY)).cloned();
    let arrays = PyDict::new(py);
    for (name, tensor) in tensors.iter() {
        let flat = array(py, tensor.data(), "float32")?;
        arrays.set_item(name, flat.call_method1("reshape", (tensor.shape().to_vec(),))?)?;
    }
    Ok((arrays, text.unwrap_or_default()))
}

/// Returns a safetensors file of these arrays and this text.
pub(crate) fn file(arrays: &Arrays<'_>, text: &str) -> PyResult<Vec<u8>> {
    let arrays = arrays.iter().map(|(name, array)| {
        let shape: Vec<usize> = array.getattr("shape")?.extract()?;
        Floats::get(array)?.f32()?;
        Ok((name.as_str(), shape, bytes(array)?))
    });
    let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
    let views = arrays
        .iter()
        .map(|(name, shape, data)| Ok((*name, TensorView::new(Dtype::F32, shape.clone(), data)?)));
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>().map_err(refused)?;
    let metadata = HashMap::from([(KEY.to_owned(), text.to_owned())]);
    safetensors::serialize(views, Some(metadata)).map_err(refused)
}
