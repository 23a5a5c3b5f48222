//! Named f32 tensors to and from safetensors.

use adacomp::Parameter;
use anyhow::{Context, Result, bail};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// What comes before the names of parameters in a file, the parameters, and their values.
type Named<'a> = (&'a str, &'a [Parameter], &'a [Vec<f32>]);

/// A file of one tensor for each parameter.
pub(crate) fn write(tensors: &[Named<'_>]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (prefix, parameters, values) in tensors {
        for (parameter, values) in parameters.iter().zip(*values) {
            let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            bytes.push((format!("{prefix}{}", parameter.name), &parameter.shape, data));
        }
    }
    let views = bytes
        .iter()
        .map(|(name, shape, data)| Ok((name, TensorView::new(Dtype::F32, shape.to_vec(), data)?)));
    Ok(safetensors::serialize(views.collect::<Result<Vec<_>>>()?, None)?)
}

/// The tensors of these parameters, in their order.
pub(crate) fn read(bytes: &[u8], prefix: &str, parameters: &[Parameter]) -> Result<Vec<Vec<f32>>> {
    let tensors = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
    let read = |parameter: &Parameter| {
        let name = format!("{prefix}{}", parameter.name);
        let tensor = tensors.tensor(&name).with_context(|| format!("it has no tensor `{name}`"))?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != parameter.shape {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            bail!("`{name}` is {dtype:?} {shape:?} where F32 {:?} should be", parameter.shape);
        }
        Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    parameters.iter().map(read).collect()
}
