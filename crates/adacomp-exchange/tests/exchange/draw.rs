//! Made-up gradients, for tests and for the example that runs on every engine.

/// The gradient of one layer of one learner in one step: the same whoever asks.
pub(crate) fn gradient(learner: usize, step: u64, layer: usize, elements: usize) -> Vec<f32> {
    let seed = ((learner as u64 + 1) * 0x9e37_79b9) ^ ((step + 1) * 0x85eb_ca6b) ^ ((layer as u64 + 1) << 32);
    let mut random = fastrand::Rng::with_seed(seed);
    (0..elements).map(|_| (2.0 * random.f32() - 1.0f32).powi(3)).collect()
}
