//! Numbers that show what compression does.

/// One layer in one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerStatistics {
    /// Elements of the layer.
    pub elements: usize,
    /// Elements sent.
    pub selected: usize,
    /// Bytes of its section in the last frame; 0 before it is encoded.
    pub bytes: usize,
    /// What a selected positive element is sent as: AdaComp's scale. 0 for a dense layer.
    pub scale: f32,
    /// Bins whose gradient is not finite; a dense layer counts as one bin.
    pub bad_bins: usize,
}

impl LayerStatistics {
    /// Returns how many times fewer bytes the section takes than dense f32, once it is encoded. A frame has 36 bytes more
    /// than its sections.
    pub fn frame_ratio(&self) -> Option<f64> {
        (self.bytes > 0).then(|| (4 * self.elements) as f64 / self.bytes as f64)
    }
}

/// The size of a residual. Unlike [`LayerStatistics`] it takes a pass over memory, so sample it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResidualStatistics {
    /// The Euclidean norm.
    pub norm: f64,
    /// The largest magnitude.
    pub largest: f32,
}

impl ResidualStatistics {
    pub(crate) fn of(residual: &[f32]) -> Self {
        // Independent sums, so that the loop is not one long chain of additions.
        let mut squares = [0.0f64; 8];
        let mut largest = [0.0f32; 8];
        let (blocks, rest) = residual.as_chunks::<8>();
        let mut add = |values: &[f32]| {
            for ((square, largest), value) in squares.iter_mut().zip(&mut largest).zip(values) {
                *square += f64::from(*value) * f64::from(*value);
                *largest = largest.max(value.abs());
            }
        };
        blocks.iter().for_each(|block| add(block));
        add(rest);
        Self { norm: squares.iter().sum::<f64>().sqrt(), largest: largest.into_iter().fold(0.0, f32::max) }
    }
}
