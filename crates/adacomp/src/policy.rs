//! Which parameters are compressed and how, and the layout of a model that follows from it.

use crate::error::{CompressError, PolicyError, UnknownName};
use crate::selection::Scale;
use fnv::FnvHasher;
use std::collections::HashMap;
use std::fmt;
use std::hash::Hasher;
use std::str::FromStr;
use wildmatch::WildMatch;

/// The largest bin: an index within it takes the paper's 14 bits.
pub(crate) const MAX_BIN: u32 = 16_384;

/// What growing bins begin with, and how often they grow.
const SHORT_BIN: u32 = 50;
const STAGES: u128 = 8;

/// What a parameter is used for, which decides its bin size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A convolution kernel.
    Conv,
    /// A fully-connected, recurrent, embedding or attention matrix.
    Matrix,
    /// A tensor of at most one dimension: a bias, a norm.
    Vector,
}

impl Kind {
    /// Returns the kind of a parameter, the one rule for all frameworks: at most one dimension is a vector; a parameter of
    /// a convolution module, or of four and more dimensions, is a convolution kernel; any other is a matrix.
    pub fn of(dimensions: usize, in_convolution: bool) -> Self {
        match dimensions {
            0 | 1 => Self::Vector,
            _ if in_convolution => Self::Conv,
            2 | 3 => Self::Matrix,
            _ => Self::Conv,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Conv => "conv",
            Self::Matrix => "matrix",
            Self::Vector => "vector",
        })
    }
}

impl FromStr for Kind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let all = [Self::Conv, Self::Matrix, Self::Vector];
        UnknownName::find(name, "kind", "conv, matrix or vector", all)
    }
}

/// One parameter tensor of a model, as the policy sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, unique in the model: residuals and checkpoints are keyed by it.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// What it is used for.
    pub kind: Kind,
}

impl Parameter {
    /// Creates a parameter of the kind that follows from its number of dimensions, by [`Kind::of`]. Where that guess is
    /// wrong, say so with [`Parameter::with_kind`].
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        let kind = Kind::of(shape.len(), false);
        Self { name: name.into(), shape: shape.to_vec(), kind }
    }

    /// Returns the parameter with another kind.
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        // A product that overflows is too long for a layer in any case.
        self.shape.iter().fold(1, |product: usize, &dimension| product.saturating_mul(dimension))
    }
}

/// How one parameter's gradient is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Treatment {
    /// AdaComp, or Local Selection when the soft-threshold factor is 1, with bins of this many elements.
    Bins(u32),
    /// Every element, in f32.
    Dense,
    /// Every element, rounded to f16, also in flush steps. A baseline: what rounding removes is lost, and a value above
    /// 65,504 counts as not finite.
    Half,
    /// The largest elements of the tensor by magnitude, this many percent, sent as the mean of the positive and the mean
    /// of the negative ones, with a residual (Dryden et al. 2016). A baseline.
    TopK(f32),
}

impl Treatment {
    /// Returns whether elements are selected and the rest kept in a residual.
    pub fn selects(self) -> bool {
        matches!(self, Self::Bins(_) | Self::TopK(_))
    }
}

/// Returns the elements of a bin in a warm-up: in its first `steps` steps bins grow from 50 elements to `bin`, in eight stages and by the
/// same factor. A learner goes on with them by [`Compressor::set_layout`](crate::Compressor::set_layout).
pub fn growing_bin(bin: u32, step: u64, steps: u64) -> u32 {
    if step >= steps {
        return bin;
    }
    let first = f64::from(bin.min(SHORT_BIN));
    let stage = u128::from(step) * STAGES / u128::from(steps);
    (first * (f64::from(bin) / first).powf(stage as f64 / STAGES as f64)).round() as u32
}

/// Writes `500` for bins of 500, `dense`, `half` or `top-k 1.5`; with `{:#}` words for people, such as `bins of 500`.
impl fmt::Display for Treatment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, formatter.alternate()) {
            (Self::Bins(bin), false) => write!(formatter, "{bin}"),
            (Self::Bins(bin), true) => write!(formatter, "bins of {bin}"),
            (Self::Dense, _) => formatter.write_str("dense"),
            (Self::Half, false) => formatter.write_str("half"),
            (Self::Half, true) => formatter.write_str("f16"),
            (Self::TopK(percent), false) => write!(formatter, "top-k {percent}"),
            (Self::TopK(percent), true) => write!(formatter, "largest {percent}%"),
        }
    }
}

impl FromStr for Treatment {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let treatment = match text {
            "dense" => Some(Self::Dense),
            "half" => Some(Self::Half),
            _ => match text.strip_prefix("top-k ") {
                Some(percent) => percent.parse().ok().map(Self::TopK),
                None => text.parse().ok().map(Self::Bins),
            },
        };
        treatment.ok_or_else(|| {
            let expected = "the number of elements of a bin, \"dense\", \"half\" or \"top-k 1.0\"";
            UnknownName { what: "treatment", given: text.to_owned(), expected }
        })
    }
}

/// Decides the [`Treatment`] of every parameter.
///
/// The defaults are the paper's: bins of 50 for convolution kernels and of 500 for matrices; vectors, and tensors of
/// fewer than 1,024 elements, are dense. A rule by name comes before the minimum size, and that before the kind. Of several
/// matching names the last rule counts.
///
/// ```
/// use adacomp::{Kind, Parameter, Policy, Treatment};
///
/// let layout = Policy::adacomp()
///     .for_kind(Kind::Conv, Treatment::Bins(64))
///     .for_name("head.*", Treatment::Dense)
///     .layout([Parameter::new("conv.weight", &[64, 3, 5, 5]), Parameter::new("head.weight", &[1000, 64])])?;
/// assert_eq!(layout[0].treatment, Treatment::Bins(64));
/// assert_eq!(layout[1].treatment, Treatment::Dense);
/// # Ok::<(), adacomp::PolicyError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Policy {
    /// By [`Kind`].
    kinds: [Treatment; 3],
    min_elements: usize,
    soft_threshold: f32,
    scale: Scale,
    names: Vec<(WildMatch, Treatment)>,
}

impl Policy {
    /// Returns AdaComp with the paper's bins.
    pub fn adacomp() -> Self {
        Self {
            kinds: [Treatment::Bins(50), Treatment::Bins(500), Treatment::Dense],
            min_elements: 1024,
            soft_threshold: 2.0,
            scale: Scale::Mean,
            names: Vec::new(),
        }
    }

    /// Returns the paper's comparison scheme: only bin maxima are selected.
    pub fn local_selection() -> Self {
        Self::adacomp().soft_threshold(1.0)
    }

    /// Returns a baseline: the largest `percent` of each tensor; what is dense in AdaComp is dense here.
    pub fn top_k(percent: f32) -> Self {
        let top_k = Treatment::TopK(percent);
        Self { kinds: [top_k, top_k, Treatment::Dense], ..Self::adacomp() }
    }

    /// Returns a baseline: every parameter in f32.
    pub fn dense() -> Self {
        Self::uniform(Treatment::Dense)
    }

    /// Returns a baseline: every parameter in f16.
    pub fn half() -> Self {
        Self::uniform(Treatment::Half)
    }

    fn uniform(treatment: Treatment) -> Self {
        Self { kinds: [treatment; 3], min_elements: 0, ..Self::adacomp() }
    }

    /// Sets the treatment of one kind.
    pub fn for_kind(mut self, kind: Kind, treatment: Treatment) -> Self {
        self.kinds[kind as usize] = treatment;
        self
    }

    /// Sets the treatment of parameters whose name matches: `*` stands for any text, `?` for any one character.
    pub fn for_name(mut self, pattern: &str, treatment: Treatment) -> Self {
        self.names.push((WildMatch::new(pattern), treatment));
        self
    }

    /// Sends tensors of fewer elements than this dense.
    pub fn min_elements(mut self, elements: usize) -> Self {
        self.min_elements = elements;
        self
    }

    /// Sets the factor `f` of the soft threshold `H = G + (f - 1) dW`: 2 is AdaComp, 1 Local Selection.
    pub fn soft_threshold(mut self, factor: f32) -> Self {
        self.soft_threshold = factor;
        self
    }

    /// Sets the scale of selected elements: AdaComp's mean of bin maxima, or one that a far too large gradient does not inflate.
    pub fn scale(mut self, scale: Scale) -> Self {
        self.scale = scale;
        self
    }

    /// Applies the policy to a model's parameters, which are in the same order on all learners.
    pub fn layout(&self, parameters: impl IntoIterator<Item = Parameter>) -> Result<Layout, PolicyError> {
        let layers = parameters.into_iter().map(|parameter| {
            let treatment = self.treatment(&parameter);
            Layer { parameter, treatment }
        });
        Layout::new(layers.collect(), self.soft_threshold, self.scale)
    }

    fn treatment(&self, parameter: &Parameter) -> Treatment {
        match self.names.iter().rev().find(|(name, _)| name.matches(&parameter.name)) {
            Some((_, treatment)) => *treatment,
            None if parameter.elements() < self.min_elements => Treatment::Dense,
            None => self.kinds[parameter.kind as usize],
        }
    }
}

/// The most elements of a layer: its length in f32 has 32 bits on the wire.
pub(crate) const MAX_ELEMENTS: usize = (1 << 30) - 1;

/// One parameter and its treatment.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The parameter.
    pub parameter: Parameter,
    /// How its gradient is sent.
    pub treatment: Treatment,
}

impl Layer {
    fn check(&self) -> Result<(), PolicyError> {
        let (parameter, elements) = (self.parameter.name.clone(), self.elements());
        match self.treatment {
            Treatment::Bins(bin) if !(1..=MAX_BIN).contains(&bin) => Err(PolicyError::Bin { parameter, bin }),
            Treatment::TopK(percent) if !(percent > 0.0 && percent <= 100.0) => {
                Err(PolicyError::TopK { parameter, percent })
            }
            _ if elements > MAX_ELEMENTS => {
                Err(PolicyError::TooLong { parameter, elements, most: MAX_ELEMENTS })
            }
            _ => Ok(()),
        }
    }

    /// Returns the parameter's name.
    pub fn name(&self) -> &str {
        &self.parameter.name
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.parameter.elements()
    }
}

/// All layers of a model, in an order that every learner shares: what all learners must agree on. Indexing gives a [`Layer`].
#[derive(Debug, Clone)]
pub struct Layout {
    layers: Vec<Layer>,
    /// The numbers of all layers.
    all: Vec<usize>,
    by_name: HashMap<String, usize>,
    soft_threshold: f32,
    scale: Scale,
    fingerprint: u64,
}

impl Layout {
    /// Creates a layout of given treatments. Most often it comes from [`Policy::layout`].
    pub fn new(layers: Vec<Layer>, soft_threshold: f32, scale: Scale) -> Result<Self, PolicyError> {
        if !(soft_threshold.is_finite() && soft_threshold >= 1.0) {
            return Err(PolicyError::SoftThreshold { factor: soft_threshold });
        }
        let mut by_name = HashMap::with_capacity(layers.len());
        for (number, layer) in layers.iter().enumerate() {
            layer.check()?;
            if by_name.insert(layer.name().to_owned(), number).is_some() {
                return Err(PolicyError::Twice { parameter: layer.name().to_owned() });
            }
        }
        let fingerprint = fingerprint(&layers, soft_threshold, scale);
        let all = (0..layers.len()).collect();
        Ok(Self { layers, all, by_name, soft_threshold, scale, fingerprint })
    }

    /// Returns the layers in order.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Returns the numbers of all layers.
    pub fn all(&self) -> &[usize] {
        &self.all
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns the number of the layer with this name.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns the number of elements of all layers.
    pub fn elements(&self) -> usize {
        self.layers.iter().map(Layer::elements).sum()
    }

    /// Returns the soft-threshold factor `f`.
    pub fn soft_threshold(&self) -> f32 {
        self.soft_threshold
    }

    /// Returns how the scale of a layer is made.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// Returns a number that differs when names, shapes, order, treatments, the soft threshold or the scale differ.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

impl std::ops::Index<usize> for Layout {
    type Output = Layer;

    fn index(&self, number: usize) -> &Layer {
        &self.layers[number]
    }
}

/// Refuses layer numbers that do not ascend, or that no layer has.
pub fn check_ascending(layout: &Layout, layers: &[usize]) -> Result<(), CompressError> {
    if layers.is_sorted_by(|a, b| a < b) && layers.last().is_none_or(|&last| last < layout.len()) {
        return Ok(());
    }
    Err(CompressError::Layers { layers: layers.to_vec(), count: layout.len() })
}

/// Hashes all that must agree with FNV-1a, each part with its length so that no two layouts give the same bytes.
fn fingerprint(layers: &[Layer], soft_threshold: f32, scale: Scale) -> u64 {
    let mut hash = FnvHasher::default();
    let number = |hash: &mut FnvHasher, number: usize| hash.write(&(number as u64).to_le_bytes());
    // The default adds nothing: fingerprints are the same as before there was another scale.
    if scale == Scale::Clamped {
        hash.write(b"clamped");
    }
    hash.write(&soft_threshold.to_le_bytes());
    number(&mut hash, layers.len());
    for Layer { parameter, treatment } in layers {
        number(&mut hash, parameter.name.len());
        hash.write(parameter.name.as_bytes());
        number(&mut hash, parameter.shape.len());
        parameter.shape.iter().for_each(|&dimension| number(&mut hash, dimension));
        let (tag, value) = match treatment {
            Treatment::Bins(bin) => (1, *bin),
            Treatment::Dense => (2, 0),
            Treatment::Half => (3, 0),
            Treatment::TopK(percent) => (4, percent.to_bits()),
        };
        hash.write(&[tag]);
        hash.write(&value.to_le_bytes());
    }
    hash.finish()
}
