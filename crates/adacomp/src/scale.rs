//! What a layer's selected elements are sent as.

use crate::error::UnknownName;
use std::fmt;
use std::str::FromStr;

/// How the scale follows from the maxima of a layer's bins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// Their mean: AdaComp.
    #[default]
    Mean,
    /// The same, but none of them counts for more than [`Scale::MOST`] times their median. One gradient that is far too large then
    /// does not inflate what all other selected elements of the layer are sent as. Where none is that large it is the mean, to
    /// the bit.
    Clamped,
}

impl Scale {
    /// What a maximum counts for at most, in medians of those that are not 0.
    pub const MOST: f32 = 10.0;

    /// The scale, and how many bins are not finite.
    pub(crate) fn of(self, maxima: &[f32], scratch: &mut Vec<f32>) -> (f32, usize) {
        let most = match self {
            Self::Mean => f32::INFINITY,
            Self::Clamped => Self::MOST * median(maxima, scratch),
        };
        let finite = maxima.iter().filter(|maximum| !maximum.is_nan());
        let (sum, count) =
            finite.fold((0.0, 0), |(sum, count), &maximum| (sum + f64::from(maximum.min(most)), count + 1));
        let scale = if maxima.is_empty() { 0.0 } else { (sum / maxima.len() as f64) as f32 };
        (scale, maxima.len() - count)
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Mean => "mean",
            Self::Clamped => "clamped",
        })
    }
}

impl FromStr for Scale {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "mean" => Ok(Self::Mean),
            "clamped" => Ok(Self::Clamped),
            _ => Err(UnknownName { what: "scale", given: name.to_owned(), expected: "mean or clamped" }),
        }
    }
}

/// Of those that are above 0; 0 if there are none.
fn median(maxima: &[f32], scratch: &mut Vec<f32>) -> f32 {
    scratch.clear();
    scratch.extend(maxima.iter().filter(|maximum| **maximum > 0.0));
    let middle = scratch.len() / 2;
    if scratch.is_empty() { 0.0 } else { *scratch.select_nth_unstable_by(middle, f32::total_cmp).1 }
}

#[cfg(test)]
mod tests {
    use super::Scale;

    fn scale(scale: Scale, maxima: &[f32]) -> (f32, usize) {
        scale.of(maxima, &mut Vec::new())
    }

    #[test]
    fn a_far_too_large_maximum_counts_for_ten_medians() {
        let maxima = [1.0, 2.0, 3.0, 0.0, 20_000.0];
        assert_eq!(scale(Scale::Mean, &maxima), (20_006.0 / 5.0, 0));
        // The median of those above 0 is the third of four.
        assert_eq!(scale(Scale::Clamped, &maxima), (36.0 / 5.0, 0));
    }

    #[test]
    fn without_one_both_are_the_same() {
        for maxima in [&[][..], &[0.0, 0.0], &[0.5, 1.5, 4.0, 9.0], &[f32::NAN, 1.0]] {
            assert_eq!(scale(Scale::Mean, maxima), scale(Scale::Clamped, maxima), "{maxima:?}");
        }
    }
}
