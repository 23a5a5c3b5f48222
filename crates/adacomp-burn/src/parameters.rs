//! Reads and writes a module's parameters in the form of the exchange: names, shapes, kinds, and flat values.

use crate::error::Error;
use adacomp::{Gradient, Kind, Parameter};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData, bf16, f16};

/// Returns the parameters that are trained, in the module's order.
///
/// A parameter's name is its path in the module. Its kind follows from [`Kind::of`]: whether it belongs to a convolution,
/// and its number of dimensions.
pub fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    inventory(model, true)
}

/// Returns the float tensors that require no gradient, such as the running statistics of a batch norm, in the module's order.
pub fn untrained<M: Module>(model: &M) -> Vec<Parameter> {
    inventory(model, false)
}

fn inventory<M: Module>(model: &M, trained: bool) -> Vec<Parameter> {
    let mut visitor = Inventory { path: Vec::new(), containers: Vec::new(), trained, found: Vec::new() };
    model.visit(&mut visitor);
    visitor.found
}

struct Inventory {
    /// Names from the root to the visitor's position, and the types that they are in.
    path: Vec<String>,
    containers: Vec<String>,
    trained: bool,
    found: Vec<Parameter>,
}

impl ModuleVisitor for Inventory {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() == self.trained {
            let in_convolution = self.containers.last().is_some_and(|container| container.contains("Conv"));
            let parameter = Parameter::new(self.path.join("."), &param.lazy_shape());
            self.found.push(parameter.with_kind(Kind::of(D, in_convolution)));
        }
    }
}

/// The values of one gradient, in the processor's memory.
#[derive(Debug, Clone)]
pub struct Values(TensorData);

impl Values {
    /// Returns the values of an f32 gradient.
    ///
    /// # Panics
    /// If it is of another type.
    pub fn as_f32(&self) -> &[f32] {
        match self.as_gradient() {
            Gradient::F32(values) => values,
            _ => panic!("a gradient in half precision"),
        }
    }

    /// Returns the values in the form that an exchange takes.
    pub fn as_gradient(&self) -> Gradient<'_> {
        const CHECKED: &str = "the type has been checked";
        match self.0.dtype() {
            DType::F16 => Gradient::F16(self.0.as_slice::<f16>().expect(CHECKED)),
            DType::BF16 => Gradient::Bf16(self.0.as_slice::<bf16>().expect(CHECKED)),
            _ => Gradient::F32(self.0.as_slice::<f32>().expect(CHECKED)),
        }
    }
}

/// Reads the gradients of all [`parameters`], in their order. A parameter that the loss did not depend on has zeros.
pub fn take_gradients<M: Module>(model: &M, gradients: GradientsParams) -> Result<Vec<Values>, Error> {
    let mut visitor = Take { gradients, taken: Vec::new() };
    model.visit(&mut visitor);
    if !visitor.gradients.is_empty() {
        return Err(Error::Gradients { left: visitor.gradients.len() });
    }
    let name = |number: usize| parameters(model).swap_remove(number).name;
    let check = |(number, taken): (usize, Result<TensorData, String>)| {
        let data = taken.map_err(|reason| Error::Read { parameter: name(number), reason })?;
        match data.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Ok(Values(data)),
            dtype => Err(Error::Type { parameter: name(number), dtype }),
        }
    };
    visitor.taken.into_iter().enumerate().map(check).collect()
}

struct Take {
    gradients: GradientsParams,
    taken: Vec<Result<TensorData, String>>,
}

impl ModuleVisitor for Take {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.taken.push(match self.gradients.remove::<D>(param.id) {
                Some(gradient) => gradient.try_into_data().map_err(|error| error.to_string()),
                None => Ok(TensorData::zeros::<f32, _>(param.lazy_shape())),
            });
        }
    }
}

/// Returns the gradients of all [`parameters`], given in their order, for an optimiser, in the types of the parameters.
///
/// # Panics
/// If they are not of this model.
pub(crate) fn to_gradients<M: Module>(model: &M, values: Vec<Vec<f32>>) -> GradientsParams {
    let mut visitor = Give { values: values.into_iter(), gradients: GradientsParams::new() };
    model.visit(&mut visitor);
    visitor.gradients
}

struct Give {
    values: std::vec::IntoIter<Vec<f32>>,
    gradients: GradientsParams,
}

impl ModuleVisitor for Give {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let values = self.values.next().expect("values for every parameter");
            self.gradients.register(param.id, like(&param.val().inner(), values));
        }
    }
}

/// Returns the weights: the values of all [`parameters`], in their order.
pub fn weights<M: Module>(model: &M) -> Result<Vec<Vec<f32>>, Error> {
    read(model, true)
}

/// Returns the values of all [`untrained`] tensors, in their order.
pub fn statistics<M: Module>(model: &M) -> Result<Vec<Vec<f32>>, Error> {
    // Updates of running statistics are pending until a module changes its mode; a copy sees them.
    read(&unshared(model.clone()), false)
}

fn read<M: Module>(model: &M, trained: bool) -> Result<Vec<Vec<f32>>, Error> {
    let mut visitor = Read { trained, read: Vec::new() };
    model.visit(&mut visitor);
    let check = |(number, read): (usize, Result<Vec<f32>, String>)| {
        let parameter = |number: usize| inventory(model, trained).swap_remove(number).name;
        read.map_err(|reason| Error::Read { parameter: parameter(number), reason })
    };
    visitor.read.into_iter().enumerate().map(check).collect()
}

struct Read {
    trained: bool,
    read: Vec<Result<Vec<f32>, String>>,
}

impl ModuleVisitor for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() == self.trained {
            let data = param.val().try_into_data_dtype(DType::F32).map_err(|error| error.to_string());
            let values = data.and_then(|data| data.try_into_vec().map_err(|error| error.to_string()));
            self.read.push(values);
        }
    }
}

/// Returns the model with these [`weights`].
///
/// # Panics
/// If they are not of this model.
pub fn set_weights<M: Module>(model: M, weights: &[Vec<f32>]) -> M {
    model.map(&mut Write { trained: true, values: weights.iter() })
}

/// Returns the model with these [`statistics`], which it does not share with any clone.
///
/// # Panics
/// If they are not of this model.
pub fn set_statistics<M: Module>(model: M, statistics: &[Vec<f32>]) -> M {
    unshared(model).map(&mut Write { trained: false, values: statistics.iter() })
}

/// Returns the model with running statistics of its own. Burn's clones share them, so learners on several threads of one
/// process would mix theirs, in an order that changes from run to run.
pub fn unshared<M: Module>(model: M) -> M {
    model.valid().train()
}

struct Write<'a> {
    trained: bool,
    values: std::slice::Iter<'a, Vec<f32>>,
}

impl ModuleMapper for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.is_require_grad() != self.trained {
            return param;
        }
        let values = self.values.next().expect("values for every tensor");
        let trained = self.trained;
        param.map(|tensor| like(&tensor, values.clone()).set_require_grad(trained))
    }
}

/// Returns a tensor of the same shape, type and device.
fn like<const D: usize>(tensor: &Tensor<D>, values: Vec<f32>) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, tensor.shape()), (&tensor.device(), tensor.dtype()))
}
