//! Made-up gradients, for tests and for the program that the tests of MPI run, which has no generator of random numbers.

/// Returns the gradient of one layer of one learner in one step: the same whoever asks. Each value is a hash of its position.
pub(crate) fn gradient(learner: usize, step: u64, layer: usize, elements: usize) -> Vec<f32> {
    let seed = ((learner as u64 + 1) * 0x9e37_79b9) ^ ((step + 1) * 0x85eb_ca6b) ^ ((layer as u64 + 1) << 32);
    let unit = |index: u64| {
        let hash = (seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (hash >> 40) as f32 / (1u32 << 24) as f32
    };
    (0..elements as u64).map(|index| (2.0 * unit(index) - 1.0).powi(3)).collect()
}
