//! What the benchmarks share: random data and timing.
#![allow(dead_code, reason = "each benchmark uses a part")]

use adacomp::{Layout, Parameter, Policy, Selected, Treatment};
use std::time::Instant;

/// A small generator, so that every run sees the same data.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Close to normal: the sum of four uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        let word = self.next();
        let sum: u32 = (0..4).map(|part| (word >> (16 * part)) as u32 & 0xffff).sum();
        (sum as f32 - 131_070.0) / 37_837.0
    }

    /// Heavy-tailed, as gradients are: the compressor then selects 2 to 5 elements a bin, as in training.
    pub(crate) fn gradient(&mut self) -> f32 {
        self.normal() * self.normal().exp()
    }

    /// Elements at uniformly random positions, this share of all.
    pub(crate) fn selection(&mut self, length: usize, density: f64) -> Vec<Selected> {
        let below = (density * (1u64 << 32) as f64) as u64;
        let select = |index| {
            let word = self.next();
            (word >> 32 < below).then(|| Selected::new(index, word & 1 == 1))
        };
        (0..length as u32).filter_map(select).collect()
    }
}

/// Fresh gradients without the cost of making them: a random window of a larger pool for each step.
pub(crate) struct Gradients {
    pool: Vec<f32>,
    random: Random,
}

impl Gradients {
    pub(crate) fn new(elements: usize) -> Self {
        let mut random = Random::new(7);
        let pool = (0..elements * 8 / 5 + 4096).map(|_| random.gradient()).collect();
        Self { pool, random }
    }

    pub(crate) fn fill(&mut self, gradient: &mut [f32]) {
        let start = self.random.next() as usize % (self.pool.len() - gradient.len());
        gradient.copy_from_slice(&self.pool[start..start + gradient.len()]);
    }
}

/// A layout of one layer.
pub(crate) fn layout(length: usize, bin: u32) -> Layout {
    let policy = Policy::adacomp().for_name("*", Treatment::Bins(bin));
    policy.layout([Parameter::new("weight", &[length])]).expect("a valid layout")
}

/// Seconds that `work` takes.
pub(crate) fn time(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Whether the benchmark was called with this flag; cargo adds `--bench`.
pub(crate) fn flag(name: &str) -> bool {
    std::env::args().any(|argument| argument == name)
}
