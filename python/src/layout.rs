//! Parameters and their treatments.

use crate::bucket::check_layer;
use crate::{parse, refused};
use adacomp::{Kind, Layer, Parameter, Policy, Treatment};
use adacomp_exchange::internal::shard;
use pyo3::prelude::*;
use pyo3::types::PyBool;
use std::sync::Arc;

/// The parameters of a model in a fixed order, and how the gradient of each travels.
#[pyclass(frozen, module = "adacomp.research")]
pub(crate) struct Layout(pub(crate) Arc<adacomp::Layout>);

#[pymethods]
impl Layout {
    #[new]
    #[pyo3(signature = (parameters, *, conv = None, matrix = None, vector = None, min_elements = 1024, soft_threshold = 2.0,
        scale = "mean", names = Vec::new()))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        parameters: Vec<(String, Vec<usize>, Option<String>)>,
        conv: Option<Bound<'_, PyAny>>,
        matrix: Option<Bound<'_, PyAny>>,
        vector: Option<Bound<'_, PyAny>>,
        min_elements: usize,
        soft_threshold: f32,
        scale: &str,
        names: Vec<(String, Bound<'_, PyAny>)>,
    ) -> PyResult<Self> {
        let mut policy =
            Policy::adacomp().min_elements(min_elements).soft_threshold(soft_threshold).scale(parse(scale)?);
        for (kind, given) in [(Kind::Conv, conv), (Kind::Matrix, matrix), (Kind::Vector, vector)] {
            if let Some(given) = given {
                policy = policy.for_kind(kind, treatment(&given)?);
            }
        }
        for (pattern, given) in names {
            policy = policy.for_name(&pattern, treatment(&given)?);
        }
        let parameters = parameters.into_iter().map(|(name, shape, kind)| {
            let parameter = Parameter::new(name, &shape);
            Ok(match kind {
                Some(kind) => parameter.with_kind(parse(&kind)?),
                None => parameter,
            })
        });
        let parameters = parameters.collect::<PyResult<Vec<_>>>()?;
        Ok(Self(Arc::new(policy.layout(parameters).map_err(refused)?)))
    }

    /// Returns the layout of parts of these parameters: a number, the first element and the end of each. A part is treated as the
    /// whole, and is named `name[start:end]`.
    fn parts(&self, parts: Vec<(usize, usize, usize)>) -> PyResult<Self> {
        let part = |(layer, start, end): (usize, usize, usize)| {
            check_layer(&self.0, layer)?;
            let Layer { parameter, treatment } = self.0[layer].clone();
            if start > end || end > parameter.elements() {
                return Err(refused(format!("no part {start}:{end} in `{}`", parameter.name)));
            }
            if end - start == parameter.elements() {
                return Ok(Layer { parameter, treatment });
            }
            let name = format!("{}[{start}:{end}]", parameter.name);
            Ok(Layer { parameter: Parameter::new(name, &[end - start]).with_kind(parameter.kind), treatment })
        };
        let layers = parts.into_iter().map(part).collect::<PyResult<Vec<_>>>()?;
        let layout = adacomp::Layout::new(layers, self.0.soft_threshold(), self.0.scale());
        Ok(Self(Arc::new(layout.map_err(refused)?)))
    }

    /// Returns the first element and the end of an owner's shard of a parameter, which is cut between bins.
    fn shard(&self, layer: usize, owner: usize, owners: usize) -> PyResult<(usize, usize)> {
        check_layer(&self.0, layer)?;
        if owner >= owners {
            return Err(refused(format!("owner {owner} of {owners}")));
        }
        let shard = shard(&self.0, layer, owner, owners);
        Ok((shard.start, shard.end))
    }

    /// Returns the names, in order.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.layers().iter().map(|layer| layer.name()).collect()
    }

    /// Returns the number of elements of each parameter.
    #[getter]
    fn elements(&self) -> Vec<usize> {
        self.0.layers().iter().map(|layer| layer.elements()).collect()
    }

    /// Returns for each parameter the number of elements of a bin, `dense`, `half` or `top-k P`.
    #[getter]
    fn treatments(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let treatment = |treatment| match treatment {
            Treatment::Bins(bin) => Ok(bin.into_pyobject(py)?.into_any().unbind()),
            other => Ok(other.to_string().into_pyobject(py)?.into_any().unbind()),
        };
        self.0.layers().iter().map(|layer| treatment(layer.treatment)).collect()
    }
}

/// Reads a treatment as Python says it.
fn treatment(given: &Bound<'_, PyAny>) -> PyResult<Treatment> {
    // For Python a bool is an integer, but True is not meant as bins of 1.
    if !given.is_instance_of::<PyBool>()
        && let Ok(bin) = given.extract::<u32>()
    {
        return Ok(Treatment::Bins(bin));
    }
    // What is neither a number of elements nor a text is refused as the text that Python shows for it.
    let text: String = given.extract().unwrap_or_else(|_| format!("{given:?}"));
    parse(&text)
}

/// Returns the elements of a bin in a step of a warm-up: they grow from 50 to `bin` in its `steps` steps.
#[pyfunction]
pub(crate) fn growing_bin(bin: u32, step: u64, steps: u64) -> u32 {
    adacomp::growing_bin(bin, step, steps)
}

/// Returns the kind of a parameter: `conv`, `matrix` or `vector`, from its number of dimensions and whether it is a convolution's.
#[pyfunction]
pub(crate) fn kind(dimensions: usize, in_convolution: bool) -> String {
    Kind::of(dimensions, in_convolution).to_string()
}
