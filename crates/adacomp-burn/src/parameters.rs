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
    let mut visitor = Inventory { path: Path::default(), trained, found: Vec::new() };
    model.visit(&mut visitor);
    visitor.found
}

/// The position of a visitor: names from the root, and the types that they are in.
#[derive(Default)]
struct Path {
    names: Vec<String>,
    containers: Vec<String>,
}

impl Path {
    fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    fn name(&self) -> String {
        self.names.join(".")
    }

    fn is_in_convolution(&self) -> bool {
        self.containers.last().is_some_and(|container| container.contains("Conv"))
    }
}

struct Inventory {
    path: Path,
    trained: bool,
    found: Vec<Parameter>,
}

impl ModuleVisitor for Inventory {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() != self.trained {
            return;
        }
        let kind = Kind::of(D, self.path.is_in_convolution());
        self.found.push(Parameter::new(self.path.name(), &param.lazy_shape()).with_kind(kind));
    }
}

/// The values of one gradient, in the processor's memory.
#[derive(Debug, Clone)]
pub struct Values(TensorData);

impl Values {
    fn read<const D: usize>(name: &str, tensor: Tensor<D>) -> Result<Self, Error> {
        let data = tensor
            .try_into_data()
            .map_err(|error| Error::Read { parameter: name.to_owned(), reason: error.to_string() })?;
        match data.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Ok(Self(data)),
            dtype => Err(Error::Type { parameter: name.to_owned(), dtype }),
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
    let mut visitor = Take { path: Path::default(), gradients, taken: Ok(Vec::new()) };
    model.visit(&mut visitor);
    visitor.taken
}

struct Take {
    path: Path,
    gradients: GradientsParams,
    taken: Result<Vec<Values>, Error>,
}

impl ModuleVisitor for Take {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (true, Ok(taken)) = (param.is_require_grad(), self.taken.as_mut()) else { return };
        let values = match self.gradients.remove::<D>(param.id) {
            Some(gradient) => Values::read(&self.path.name(), gradient),
            None => Ok(Values(TensorData::zeros::<f32, _>(param.lazy_shape()))),
        };
        match values {
            Ok(values) => taken.push(values),
            Err(error) => self.taken = Err(error),
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
    let mut visitor = Read { path: Path::default(), trained: true, read: Ok(Vec::new()) };
    model.visit(&mut visitor);
    visitor.read
}

/// Returns the values of all [`untrained`] tensors, in their order.
pub fn statistics<M: Module>(model: &M) -> Result<Vec<Vec<f32>>, Error> {
    let mut visitor = Read { path: Path::default(), trained: false, read: Ok(Vec::new()) };
    // Updates of running statistics are pending until a module changes its mode; a copy sees them.
    model.valid().train().visit(&mut visitor);
    visitor.read
}

struct Read {
    path: Path,
    trained: bool,
    read: Result<Vec<Vec<f32>>, Error>,
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (true, Ok(read)) = (param.is_require_grad() == self.trained, self.read.as_mut()) else { return };
        let data = param.val().try_into_data_dtype(DType::F32);
        match data.map(TensorData::try_into_vec::<f32>) {
            Ok(Ok(values)) => read.push(values),
            Ok(Err(error)) => self.read = Err(self.cannot_read(error)),
            Err(error) => self.read = Err(self.cannot_read(error)),
        }
    }
}

impl Read {
    fn cannot_read(&self, reason: impl ToString) -> Error {
        Error::Read { parameter: self.path.name(), reason: reason.to_string() }
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
