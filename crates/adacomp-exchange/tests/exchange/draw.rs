//! Made-up gradients, for tests and for the example that runs on every engine.

/// The gradient of one layer of one learner in one step: the same whoever asks.
pub(crate) fn gradient(learner: usize, step: u64, layer: usize, elements: usize) -> Vec<f32> {
    let mut seed =
        ((learner as u64 + 1) * 0x9e37_79b9) ^ ((step + 1) * 0x85eb_ca6b) ^ ((layer as u64 + 1) << 32);
    (0..elements)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let unit = (seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / 8_388_608.0 - 1.0;
            unit * unit * unit
        })
        .collect()
}
