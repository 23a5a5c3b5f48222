//! The definition of the selection rule. Its loops are written so that the compiler can vectorise them.

use super::{INFINITE, MAGNITUDE, Run};
use crate::packet::Selected;

/// Elements whose selection is decided together, apart from the appending, which does not vectorise.
const CHUNK: usize = 64;

pub(super) fn run(run: Run<'_>) {
    // AdaComp itself must stay a plain addition.
    if run.extra == 1.0 {
        each_bin(run, |gradient, _| gradient)
    } else {
        each_bin(run, |gradient, extra| extra * gradient)
    }
}

#[inline(always)]
fn each_bin(run: Run<'_>, soft: impl Fn(f32, f32) -> f32 + Copy) {
    let residuals = run.residual.chunks_exact_mut(run.bin);
    let gradients = run.gradient.chunks_exact(run.bin);
    let mut first = run.first;
    for ((residual, gradient), maximum) in residuals.zip(gradients).zip(run.maxima) {
        let peak = peak(residual, gradient);
        if peak < INFINITE {
            *maximum = f32::from_bits(peak);
            select(residual, gradient, peak, |gradient| soft(gradient, run.extra), first, run.selected);
        } else {
            *maximum = f32::NAN;
        }
        first += run.bin as u32;
    }
}

/// The bin maximum as bits. Integers order NaN above infinity, so one maximum finds both.
#[inline(always)]
fn peak(residual: &[f32], gradient: &[f32]) -> u32 {
    residual.iter().zip(gradient).fold(0, |peak, (r, dw)| peak.max((r + dw).to_bits() & MAGNITUDE))
}

#[inline(always)]
fn select(
    residual: &mut [f32],
    gradient: &[f32],
    peak: u32,
    soft: impl Fn(f32) -> f32,
    first: u32,
    selected: &mut Vec<Selected>,
) {
    for (chunk, (residual, gradient)) in residual.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK)).enumerate() {
        let mut hits = [false; CHUNK];
        for ((r, &dw), hit) in residual.iter_mut().zip(gradient).zip(&mut hits) {
            let g = *r + dw;
            let h = g + soft(dw);
            *r = g;
            // In a bin whose maximum is 0 every G is 0, so the second condition also guards against that.
            *hit = (h.to_bits() & MAGNITUDE >= peak) & (g.to_bits() & MAGNITUDE != 0);
        }
        let first = first + (chunk * CHUNK) as u32;
        for (eighth, hits) in hits.as_chunks::<8>().0.iter().enumerate() {
            if *hits == [false; 8] {
                continue;
            }
            for offset in (eighth * 8..).zip(hits).filter_map(|(offset, &hit)| hit.then_some(offset)) {
                selected.push(Selected::new(first + offset as u32, residual[offset].is_sign_negative()));
            }
        }
    }
}
