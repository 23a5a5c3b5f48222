//! Bounds what one learner can do to the average.

/// Returns whether this can be a clip: less than 1 would shrink what all learners send.
pub fn is_clip(clip: f32) -> bool {
    clip.is_finite() && clip >= 1.0
}

/// Returns the largest magnitude that counts of what any learner sends in a layer: `clip` times the median of the largest
/// magnitudes that learners send in it. Without a clip all counts.
///
/// Of two in the middle the smaller is the median, so that one of two learners cannot raise it.
pub fn bound(clip: Option<f32>, largest: impl IntoIterator<Item = f32>) -> f32 {
    let mut largest: Vec<f32> = clip.map_or_else(Vec::new, |_| largest.into_iter().collect());
    let (Some(clip), Some(middle)) = (clip, largest.len().checked_sub(1)) else { return f32::INFINITY };
    clip * *largest.select_nth_unstable_by(middle / 2, f32::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::bound;

    #[test]
    fn fewer_than_half_cannot_raise_the_bound() {
        assert_eq!(bound(None, [1.0, 1e30]), f32::INFINITY);
        assert_eq!(bound(Some(3.0), [2.0]), 6.0);
        assert_eq!(bound(Some(3.0), [1e30, 2.0]), 6.0);
        assert_eq!(bound(Some(3.0), [1e30, 1.0, 2.0]), 6.0);
        assert_eq!(bound(Some(3.0), [1e30, 1.0, 1e30, 2.0]), 6.0);
        assert_eq!(bound(Some(3.0), [1e30, 1.0, 2.0, 2.5, 1e30]), 7.5);
        assert_eq!(bound(Some(3.0), [0.0, 0.0, 1.0]), 0.0);
    }
}
