//! One error type for each boundary, one variant for each broken rule.

use thiserror::Error;

/// A text that names no value of an enum.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{what} `{given}`; expected {expected}")]
pub struct UnknownName {
    /// What was to be read.
    pub what: &'static str,
    /// What was given.
    pub given: String,
    /// The names that there are.
    pub expected: &'static str,
}

impl UnknownName {
    /// Returns the one of `all` that displays as `given`: how [`std::str::FromStr`] reads what [`std::fmt::Display`] writes.
    pub fn find<T: std::fmt::Display>(
        given: &str,
        what: &'static str,
        expected: &'static str,
        all: impl IntoIterator<Item = T>,
    ) -> Result<T, Self> {
        let unknown = || Self { what, given: given.to_owned(), expected };
        all.into_iter().find(|value| value.to_string() == given).ok_or_else(unknown)
    }
}

/// A policy that cannot be applied to a model.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum PolicyError {
    /// A bin size out of range.
    #[error("parameter `{parameter}`: bin size {bin} is not in 1..=16384")]
    Bin { parameter: String, bin: u32 },
    /// A top-k share out of range.
    #[error("parameter `{parameter}`: top-k share of {percent}% is not above 0 and at most 100")]
    TopK { parameter: String, percent: f32 },
    /// A soft-threshold factor out of range.
    #[error("soft-threshold factor {factor} is not a number of at least 1 (2 is AdaComp, 1 Local Selection)")]
    SoftThreshold { factor: f32 },
    /// Two parameters of one name.
    #[error("parameter `{parameter}` is listed twice; names must be unique")]
    Twice { parameter: String },
    /// A tensor whose length in bytes does not fit 32 bits.
    #[error("parameter `{parameter}` has {elements} elements, and at most {most} are possible; split it")]
    TooLong { parameter: String, elements: usize, most: usize },
}

/// A step that the compressor refuses. Residuals are unchanged.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum CompressError {
    /// A gradient of a parameter that the layout does not have.
    #[error("unknown parameter `{parameter}`; the layout lists the parameters of this model")]
    Unknown { parameter: String },
    /// A layer number that the layout does not have.
    #[error("layer {layer} of {count}: layers are numbered from 0")]
    Layer { layer: usize, count: usize },
    /// A layout that differs in more than the lengths of bins.
    #[error("{what} cannot change; only the lengths of bins can")]
    Layout { what: String },
    /// A gradient, or something else of a parameter, of another length than the parameter's.
    #[error("parameter `{parameter}`: {what} of length {actual}, expected {expected}")]
    Length { parameter: String, what: &'static str, expected: usize, actual: usize },
    /// Something that a parameter's treatment does not allow.
    #[error("parameter `{parameter}` is not {expected}")]
    Treatment { parameter: String, expected: &'static str },
    /// A parameter compressed twice in one step.
    #[error("parameter `{parameter}` was given twice in one step")]
    Twice { parameter: String },
    /// Parameters without a gradient in this step.
    #[error("no gradient in this step for {}; give zeros for unused parameters", list(parameters))]
    Missing { parameters: Vec<String> },
    /// A new step while one is open.
    #[error("the step before is still open; commit it or roll it back first")]
    Open,
    /// Something that needs an open step.
    #[error("no step is open; compress a gradient first")]
    NotOpen,
    /// A commit of a step with NaN or infinite gradients.
    #[error("the gradient of {} is not finite; roll the step back on all learners", list(parameters))]
    NonFinite { parameters: Vec<String> },
    /// A scale for a layer that has nothing selected: of another treatment, not compressed yet, or flushed.
    #[error("parameter `{parameter}` has no selection in this step that a scale could be set for")]
    NoSelection { parameter: String },
    /// A selection that was made elsewhere and is not of this layer's elements in ascending order.
    #[error("parameter `{parameter}`: selected elements are not ascending, or beyond its end")]
    Selection { parameter: String },
    /// A bin maximum that was found elsewhere and is negative or infinite.
    #[error(
        "parameter `{parameter}`: bin maximum {maximum} is neither NaN, for a bin that is not finite, nor a finite number of at least 0"
    )]
    Maximum { parameter: String, maximum: f32 },
    /// A residual from elsewhere that is NaN or infinite.
    #[error("parameter `{parameter}`: a residual must be finite")]
    Residual { parameter: String },
    /// Layers that are not in the layout, or not in ascending order.
    #[error("layers {layers:?} are not ascending numbers below {count}")]
    Layers { layers: Vec<usize>, count: usize },
    /// An agreed scale that is negative or not finite.
    #[error("parameter `{parameter}`: scale {scale} is not a finite number of at least 0")]
    Scale { parameter: String, scale: f32 },
    /// A learner number that does not fit a frame's 32 bits.
    #[error("learner {learner} is not below 2^32")]
    Learner { learner: usize },
    /// A factor for residuals that is not between 0 and 1.
    #[error("residuals cannot be multiplied by {factor}: choose a number from 0 to 1")]
    Decay { factor: f32 },
    /// An inverse loss scale that is not a positive number.
    #[error("inverse loss scale {scale} is not a positive finite number")]
    LossScale { scale: f32 },
}

/// Bytes that are not a frame of the expected layout. Nothing of them was applied.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum DecodeError {
    /// Fewer bytes than the parts of a frame or message need.
    #[error("the bytes end early, in {part}")]
    Truncated { part: &'static str },
    /// The first four bytes are not a frame's.
    #[error("not an adacomp frame: it starts with {actual:02x?}")]
    Magic { actual: [u8; 4] },
    /// A version this code does not read.
    #[error("frame version {actual}, expected {expected}; use the same adacomp version on all learners")]
    Version { expected: u8, actual: u8 },
    /// An unknown codec.
    #[error("unknown codec {actual}")]
    Codec { actual: u8 },
    /// Flags or reserved bits that must be zero.
    #[error("unknown flags {actual:#06x}")]
    Flags { actual: u16 },
    /// The checksum does not match: the bytes were damaged.
    #[error("checksum {actual:08x}, expected {expected:08x}: the frame was damaged on its way")]
    Checksum { expected: u32, actual: u32 },
    /// Another model or policy.
    #[error("layout fingerprint {actual:016x}, expected {expected:016x}: another model or policy")]
    Fingerprint { expected: u64, actual: u64 },
    /// More or fewer sections than expected.
    #[error("{actual} sections, expected {expected}")]
    Sections { expected: usize, actual: usize },
    /// Another layer than expected, or out of order.
    #[error("section {position} is of layer {actual}, expected layer {expected}")]
    Layer { position: usize, expected: usize, actual: usize },
    /// A section of a form that its layer does not have.
    #[error("layer {layer}: section form {form} does not fit its treatment")]
    Form { layer: usize, form: u8 },
    /// A section of another length than its contents.
    #[error("layer {layer}: {part} takes {expected} bytes, found {actual}")]
    Length { layer: usize, part: &'static str, expected: usize, actual: usize },
    /// More selected elements than the layer, or the bytes, can hold.
    #[error("layer {layer}: {count} selected elements are more than {most}")]
    Count { layer: usize, count: usize, most: usize },
    /// A codec parameter out of range.
    #[error("layer {layer}: rice parameter {actual} is above 30")]
    RiceParameter { layer: usize, actual: u8 },
    /// An index outside the layer or its bin, or not above the one before.
    #[error("layer {layer}: an index is out of range or out of order")]
    Index { layer: usize },
    /// A scale, mean or dense value that is NaN or infinite, or a scale below zero.
    #[error("layer {layer}: a value is not finite or has the wrong sign")]
    Value { layer: usize },
    /// Bytes or bits after the end.
    #[error("{count} bytes too many after {part}")]
    Trailing { part: &'static str, count: usize },
    /// A number that takes more bytes than it needs, or overflows.
    #[error("a number in {part} is not in its shortest form or too large")]
    Varint { part: &'static str },
}

/// Frames that cannot be averaged. The output is unchanged.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum AverageError {
    /// One learner's frame is bad.
    #[error("frame of learner {learner}: {source}")]
    Frame { learner: usize, source: DecodeError },
    /// A frame of another learner than its position says.
    #[error("frame {expected} is of learner {actual}; give frames in learner order")]
    Learner { expected: usize, actual: usize },
    /// A frame of another step.
    #[error("frame of learner {learner} is of step {actual}, expected step {expected}")]
    Step { learner: usize, expected: u64, actual: u64 },
    /// An output slice of another length than its layer, or not one for each layer of the frames.
    #[error("output {position} has {actual} elements, expected {expected}")]
    Output { position: usize, expected: usize, actual: usize },
    /// No frames.
    #[error("no frames to average")]
    Empty,
}

pub(crate) fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
