//! Parameters and their treatments.

use crate::refused;
use adacomp::{Kind, Parameter, Policy, Scale, Treatment};
use pyo3::prelude::*;
use std::sync::Arc;

/// The parameters of a model in a fixed order, and how the gradient of each travels.
#[pyclass(frozen, module = "adacomp")]
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
        let scale = Scale::named(scale)
            .ok_or_else(|| refused(format!("scale `{scale}`; expected mean or clamped")))?;
        let mut policy =
            Policy::adacomp().min_elements(min_elements).soft_threshold(soft_threshold).scale(scale);
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
            let Some(given) = kind else { return Ok(parameter) };
            let kind = Kind::ALL.into_iter().find(|kind| kind.name() == given);
            let unknown = || refused(format!("kind `{given}`; expected conv, matrix or vector"));
            Ok(parameter.with_kind(kind.ok_or_else(unknown)?))
        });
        let parameters = parameters.collect::<PyResult<Vec<_>>>()?;
        Ok(Self(Arc::new(policy.layout(parameters).map_err(refused)?)))
    }

    /// The names, in order.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.layers().iter().map(|layer| layer.name()).collect()
    }

    /// The number of elements of each parameter.
    #[getter]
    fn elements(&self) -> Vec<usize> {
        self.0.layers().iter().map(|layer| layer.elements()).collect()
    }

    /// For each parameter the number of elements of a bin, `dense`, `half` or `top-k P`.
    #[getter]
    fn treatments(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let text = |text: &str| Ok(text.into_pyobject(py)?.into_any().unbind());
        let treatment = |treatment| match treatment {
            Treatment::Bins(bin) => Ok(bin.into_pyobject(py)?.into_any().unbind()),
            Treatment::Dense => text("dense"),
            Treatment::Half => text("half"),
            Treatment::TopK(percent) => text(&format!("top-k {percent}")),
        };
        self.0.layers().iter().map(|layer| treatment(layer.treatment)).collect()
    }

    /// What all learners must have in common, in 64 bits.
    #[getter]
    fn fingerprint(&self) -> u64 {
        self.0.fingerprint()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        let elements: usize = self.0.layers().iter().map(|layer| layer.elements()).sum();
        format!("Layout({} parameters, {elements} elements)", self.0.len())
    }
}

impl Layout {
    pub(crate) fn number(&self, name: &str) -> PyResult<usize> {
        self.0.number(name).ok_or_else(|| refused(format!("there is no parameter `{name}`")))
    }
}

/// A treatment as Python says it.
fn treatment(given: &Bound<'_, PyAny>) -> PyResult<Treatment> {
    let wrong = || {
        refused(format!(
            "treatment {given:?}; expected the number of elements of a bin, \"dense\", \"half\" or \"top-k 1.0\""
        ))
    };
    if let Ok(bin) = given.extract::<u32>() {
        return Ok(Treatment::Bins(bin));
    }
    let text: String = given.extract().map_err(|_| wrong())?;
    match text.as_str() {
        "dense" => Ok(Treatment::Dense),
        "half" => Ok(Treatment::Half),
        other => {
            let percent = other.strip_prefix("top-k ").and_then(|percent| percent.parse().ok());
            percent.map(Treatment::TopK).ok_or_else(wrong)
        }
    }
}
