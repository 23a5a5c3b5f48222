//! Made-up gradients, for tests and for the example that runs on every engine.

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    #[allow(dead_code, reason = "the example does without it")]
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }
}

/// The gradient of one layer of one learner in one step: the same whoever asks.
pub(crate) fn gradient(learner: usize, step: u64, layer: usize, elements: usize) -> Vec<f32> {
    let seed = ((learner as u64 + 1) * 0x9e37_79b9) ^ ((step + 1) * 0x85eb_ca6b) ^ ((layer as u64 + 1) << 32);
    let mut random = Random(seed);
    let value = |_| {
        let unit = (random.next() >> 40) as f32 / 8_388_608.0 - 1.0;
        unit * unit * unit
    };
    (0..elements).map(value).collect()
}
