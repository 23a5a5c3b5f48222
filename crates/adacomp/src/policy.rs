//! Which parameter is compressed, and how.

use crate::error::{PolicyError, UnknownName};
use crate::layout::{Layer, Layout};
use crate::scale::Scale;
use std::fmt;
use std::str::FromStr;
use wildmatch::WildMatch;

/// The largest bin: an index within it takes the paper's 14 bits.
pub const MAX_BIN: u32 = 16_384;

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
        match name {
            "conv" => Ok(Self::Conv),
            "matrix" => Ok(Self::Matrix),
            "vector" => Ok(Self::Vector),
            _ => {
                let expected = "conv, matrix or vector";
                Err(UnknownName { what: "kind", given: name.to_owned(), expected })
            }
        }
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

    /// The same parameter, of another kind.
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        // A product that overflows is too long for a layer in any case.
        self.shape.iter().fold(1, |product: usize, &dimension| product.saturating_mul(dimension))
    }
}

/// How one parameter's gradient travels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Treatment {
    /// AdaComp, or Local Selection when the soft-threshold factor is 1, with bins of this many elements.
    Bins(u32),
    /// Every element, in f32.
    Dense,
    /// Every element, rounded to f16, also in flush steps. A baseline: what the rounding takes is lost, and
    /// a value above 65,504 counts as not finite.
    Half,
    /// The largest so many percent of the whole tensor by magnitude, sent as the mean of the positive and the mean of
    /// the negative ones, with a residual (Dryden et al. 2016). A baseline.
    TopK(f32),
}

impl Treatment {
    pub(crate) fn check(self, parameter: &Parameter) -> Result<(), PolicyError> {
        let name = || parameter.name.clone();
        match self {
            Self::Bins(bin) if !(1..=MAX_BIN).contains(&bin) => {
                Err(PolicyError::Bin { parameter: name(), bin })
            }
            Self::TopK(percent) if !(percent > 0.0 && percent <= 100.0) => {
                Err(PolicyError::TopK { parameter: name(), percent })
            }
            _ => Ok(()),
        }
    }

    /// Whether elements are selected and the rest kept in a residual.
    pub fn selects(self) -> bool {
        matches!(self, Self::Bins(_) | Self::TopK(_))
    }
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
/// fewer than 1,024 elements, go dense. Rules by name beat the minimum size, which beats the kind; of several matching
/// names the rule given last wins.
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
    conv: Treatment,
    matrix: Treatment,
    vector: Treatment,
    min_elements: usize,
    soft_threshold: f32,
    scale: Scale,
    names: Vec<(WildMatch, Treatment)>,
}

impl Default for Policy {
    fn default() -> Self {
        Self::adacomp()
    }
}

impl Policy {
    /// AdaComp with the paper's bins.
    pub fn adacomp() -> Self {
        Self {
            conv: Treatment::Bins(50),
            matrix: Treatment::Bins(500),
            vector: Treatment::Dense,
            min_elements: 1024,
            soft_threshold: 2.0,
            scale: Scale::Mean,
            names: Vec::new(),
        }
    }

    /// The paper's comparison scheme: only bin maxima are selected.
    pub fn local_selection() -> Self {
        Self::adacomp().soft_threshold(1.0)
    }

    /// A baseline: the largest `percent` of each tensor, exemptions as in AdaComp.
    pub fn top_k(percent: f32) -> Self {
        let top_k = Treatment::TopK(percent);
        Self { conv: top_k, matrix: top_k, ..Self::adacomp() }
    }

    /// A baseline: every parameter in f32.
    pub fn dense() -> Self {
        Self::uniform(Treatment::Dense)
    }

    /// A baseline: every parameter in f16.
    pub fn half() -> Self {
        Self::uniform(Treatment::Half)
    }

    fn uniform(treatment: Treatment) -> Self {
        Self { conv: treatment, matrix: treatment, vector: treatment, min_elements: 0, ..Self::adacomp() }
    }

    /// Treats parameters of one kind this way.
    pub fn for_kind(mut self, kind: Kind, treatment: Treatment) -> Self {
        match kind {
            Kind::Conv => self.conv = treatment,
            Kind::Matrix => self.matrix = treatment,
            Kind::Vector => self.vector = treatment,
        }
        self
    }

    /// Treats parameters whose name matches this way; `*` stands for any text, `?` for any one character.
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

    /// Sends selected elements as this: AdaComp's mean of bin maxima, or one that a gradient which is far too large does not inflate.
    pub fn scale(mut self, scale: Scale) -> Self {
        self.scale = scale;
        self
    }

    /// Applies the policy to a model: its parameters in a fixed order, the same on all learners.
    pub fn layout(&self, parameters: impl IntoIterator<Item = Parameter>) -> Result<Layout, PolicyError> {
        let layers = parameters.into_iter().map(|parameter| {
            let treatment = self.treatment(&parameter);
            Layer { parameter, treatment }
        });
        Ok(Layout::new(layers.collect(), self.soft_threshold)?.with_scale(self.scale))
    }

    fn treatment(&self, parameter: &Parameter) -> Treatment {
        if let Some((_, treatment)) = self.names.iter().rev().find(|(name, _)| name.matches(&parameter.name))
        {
            return *treatment;
        }
        if parameter.elements() < self.min_elements {
            return Treatment::Dense;
        }
        match parameter.kind {
            Kind::Conv => self.conv,
            Kind::Matrix => self.matrix,
            Kind::Vector => self.vector,
        }
    }
}
