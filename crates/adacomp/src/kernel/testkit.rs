//! One set of cases that every variant must pass: the same bits as a naive reading of the rules.

use super::{Kernel, Run};
use crate::packet::Selected;

const BINS: [usize; 10] = [1, 2, 7, 16, 50, 63, 64, 500, 501, 16384];

#[test]
fn every_length_and_bin() {
    for round in 0..3 {
        check_all(0..2001, round);
    }
}

#[test]
fn one_bad_element_anywhere_spoils_its_bin_only() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..150 {
            let mut case = Case::new(150, 50, at as u64);
            case.residual.fill(0.5);
            case.gradient.fill(0.25);
            case.gradient[at] = bad;
            for kernel in Kernel::all() {
                let result = case.run(kernel);
                for bin in 0..3 {
                    let here = bin * 50..bin * 50 + 50;
                    let expected = if here.contains(&at) { 0.5f32 } else { 0.75 };
                    assert_eq!(result.residual[here.clone()], [expected.to_bits(); 50], "{kernel} at {at}");
                    assert_eq!(f32::from_bits(result.maxima[bin]).is_nan(), here.contains(&at));
                }
                assert!(result.selected.iter().all(|element| element.index() / 50 != at / 50));
            }
        }
    }
}

#[test]
fn a_sum_that_overflows_is_bad_too() {
    let mut case = Case::new(64, 16, 0);
    case.residual.fill(0.0);
    case.gradient.fill(1.0);
    (case.residual[20], case.gradient[20]) = (f32::MAX, f32::MAX);
    for kernel in Kernel::all() {
        let result = case.run(kernel);
        assert!(f32::from_bits(result.maxima[1]).is_nan());
        assert_eq!(result.residual[20], f32::MAX.to_bits());
        assert_eq!(result.selected.len(), 48, "{kernel}");
    }
}

fn check_all(lengths: impl Iterator<Item = usize>, round: u64) {
    for length in lengths {
        for bin in BINS {
            let case = Case::new(length, bin, (length * 20_000 + bin) as u64 ^ round << 40);
            let expected = case.naive();
            for kernel in Kernel::all() {
                assert_eq!(case.run(kernel), expected, "{kernel} length {length} bin {bin} round {round}");
            }
        }
    }
}

struct Case {
    bin: usize,
    extra: f32,
    /// Elements before the first, so that vectors start at any alignment.
    offset: usize,
    residual: Vec<f32>,
    gradient: Vec<f32>,
}

/// In bits, so that NaN and the two zeros compare.
#[derive(Debug, PartialEq)]
struct Result {
    residual: Vec<u32>,
    maxima: Vec<u32>,
    selected: Vec<Selected>,
}

impl Case {
    fn new(length: usize, bin: usize, seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let flavour = random.below(8);
        let extra = [1.0, 1.0, 0.0, 0.5, 2.0][random.below(5)];
        let offset = random.below(9);
        let mut values = || (0..length).map(|_| random.value(flavour)).collect::<Vec<_>>();
        let (residual, mut gradient) = (values(), values());
        // Residuals that the gradient cancels exactly, which must not be selected.
        if flavour == 3 {
            gradient.iter_mut().zip(&residual).step_by(3).for_each(|(dw, r)| *dw = -r);
        }
        Self { bin, extra, offset, residual, gradient }
    }

    fn run(&self, kernel: Kernel) -> Result {
        let shift = |values: &[f32]| [&vec![0.0; self.offset], values].concat();
        let (mut residual, gradient) = (shift(&self.residual), shift(&self.gradient));
        let (residual, gradient) = (&mut residual[self.offset..], &gradient[self.offset..]);
        let mut maxima = vec![0.0; residual.len().div_ceil(self.bin)];
        let mut selected = Vec::new();
        let full = residual.len() / self.bin * self.bin;
        for (range, bin) in [(0..full, self.bin), (full..residual.len(), residual.len() - full)] {
            if !range.is_empty() {
                kernel.run(Run {
                    residual: &mut residual[range.clone()],
                    gradient: &gradient[range.clone()],
                    bin,
                    extra: self.extra,
                    first: range.start as u32,
                    maxima: &mut maxima[range.start / self.bin..range.end.div_ceil(self.bin)],
                    selected: &mut selected,
                });
            }
        }
        Result { residual: bits(residual), maxima: bits(&maxima), selected }
    }

    /// The rules as they stand in `docs/algorithm.md`, with no thought of speed.
    fn naive(&self) -> Result {
        let mut residual = self.residual.clone();
        let (mut maxima, mut selected) = (Vec::new(), Vec::new());
        for start in (0..residual.len()).step_by(self.bin) {
            let bin = start..residual.len().min(start + self.bin);
            let g: Vec<f32> = bin.clone().map(|i| self.residual[i] + self.gradient[i]).collect();
            if g.iter().any(|g| !g.is_finite()) {
                maxima.push(f32::NAN);
                continue;
            }
            let maximum = g.iter().map(|g| g.abs()).fold(0.0, f32::max);
            maxima.push(maximum);
            for (i, g) in bin.zip(g) {
                let h = g + if self.extra == 1.0 { self.gradient[i] } else { self.extra * self.gradient[i] };
                if maximum > 0.0 && h.abs() >= maximum && g != 0.0 {
                    selected.push(Selected::new(i as u32, g < 0.0));
                }
                residual[i] = g;
            }
        }
        Result { residual: bits(&residual), maxima: bits(&maxima), selected }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() & 0xff_ffff) as f32 / 8_388_608.0 - 1.0
    }

    fn value(&mut self, flavour: usize) -> f32 {
        let unit = self.unit();
        let rare = self.below(60) == 0;
        match flavour {
            0 => unit,
            // Mostly zeros of both signs.
            1 => [0.0, -0.0, 0.0, -0.0, unit][self.below(5)],
            // Denormals.
            2 => f32::from_bits(self.next() as u32 & 0x807f_ffff),
            3 => unit,
            // Ties.
            4 => [-2.0, -1.0, 0.0, 1.0, 2.0][self.below(5)],
            // Huge: sums and soft thresholds overflow now and then.
            5 => unit * f32::MAX * if rare { 1.0 } else { 0.4 },
            // Any exponent.
            6 => f32::from_bits(self.next() as u32 & 0xbfff_ffff),
            _ => match self.below(400) {
                0 => f32::NAN,
                1 => f32::INFINITY,
                2 => f32::NEG_INFINITY,
                _ => unit,
            },
        }
    }
}
