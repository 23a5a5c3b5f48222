//! Sixteen elements at a time, with the end of a bin masked.
#![allow(unsafe_code)]

use super::cursor::{self, Cursor};
use super::{MAGNITUDE, Run};
use std::arch::x86_64::*;

const LANES: usize = 16;

/// Proof that this machine has AVX-512F.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("popcnt")).then_some(Self(()))
    }

    pub(super) fn run(self, run: Run<'_>) {
        // SAFETY: `new` found the features, and `Run::check` has checked the lengths.
        unsafe {
            // AdaComp itself must stay a plain addition.
            if run.extra == 1.0 { all_bins::<true>(run) } else { all_bins::<false>(run) }
        }
    }
}

#[target_feature(enable = "avx512f,popcnt")]
fn all_bins<const PLAIN: bool>(run: Run<'_>) {
    cursor::by_size!(run, 1 2 3 4)
}

/// Where a bin's last vector begins, which of its lanes are in the bin, and which of these no other vector has. It overlaps the
/// one before, because masks in memory take longer; a bin that is shorter than a vector needs them.
#[inline(always)]
fn last_vector(bin: usize) -> (usize, __mmask16, __mmask16) {
    match bin.checked_sub(LANES) {
        Some(at) => (at, !0, !0 << ((LANES - bin % LANES) % LANES)),
        None => (0, !(!0 << bin), !(!0 << bin)),
    }
}

/// Bins of up to four vectors, kept in registers between the two passes.
#[target_feature(enable = "avx512f,popcnt")]
fn small<const VECTORS: usize, const PLAIN: bool>(cursor: &mut Cursor<'_>) {
    let last = last_vector(cursor.bin);
    let vector = |number: usize| if number + 1 == VECTORS { last } else { (number * LANES, !0, !0) };
    for _ in 0..cursor.bins() {
        let mut loaded = [(_mm512_setzero_ps(), _mm512_setzero_ps()); VECTORS];
        let mut peaks = _mm512_setzero_si512();
        for (number, loaded) in loaded.iter_mut().enumerate() {
            cursor.prefetch(number * LANES);
            let (at, lanes, _) = vector(number);
            // SAFETY: the lanes are inside the bin.
            *loaded = unsafe { load(cursor, at, lanes) };
            peaks = _mm512_max_epu32(peaks, magnitude(loaded.0));
        }
        let peak = _mm512_reduce_max_epu32(peaks);
        if cursor.record(peak) {
            for (number, &(g, gradient)) in loaded.iter().enumerate() {
                // SAFETY: the lanes are inside the bin, and its entries inside the reserved capacity.
                unsafe { select::<PLAIN>(cursor, vector(number), g, gradient, peak) };
            }
        }
        cursor.advance();
    }
}

/// Bins of more than four vectors, in two passes over the nearest cache.
#[target_feature(enable = "avx512f,popcnt")]
fn large<const PLAIN: bool>(cursor: &mut Cursor<'_>) {
    let bin = cursor.bin;
    let last = last_vector(bin);
    for _ in 0..cursor.bins() {
        // SAFETY: all lanes are inside the bin, and its entries inside the reserved capacity.
        unsafe {
            // Before anything is stored, because it overlaps what is.
            let (last_g, last_gradient) = load(cursor, last.0, !0);
            let mut peaks = [_mm512_setzero_si512(); 4];
            peaks[3] = magnitude(last_g);
            let mut at = 0;
            while at + 4 * LANES <= bin {
                for (vector, peak) in peaks.iter_mut().enumerate() {
                    *peak = _mm512_max_epu32(*peak, magnitude(load(cursor, at + vector * LANES, !0).0));
                }
                at += 4 * LANES;
            }
            while at < last.0 {
                peaks[0] = _mm512_max_epu32(peaks[0], magnitude(load(cursor, at, !0).0));
                at += LANES;
            }
            let [a, b, c, d] = peaks;
            let peak =
                _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d)));

            if cursor.record(peak) {
                let mut at = 0;
                while at < last.0 {
                    cursor.prefetch(at);
                    let (g, gradient) = load(cursor, at, !0);
                    select::<PLAIN>(cursor, (at, !0, !0), g, gradient, peak);
                    at += LANES;
                }
                cursor.prefetch(at);
                select::<PLAIN>(cursor, last, last_g, last_gradient, peak);
            }
        }
        cursor.advance();
    }
}

/// `G` and `dW` of one vector of the current bin, 0 in the other lanes.
///
/// # Safety
/// `lanes` must be inside the bin.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn load(cursor: &Cursor<'_>, at: usize, lanes: __mmask16) -> (__m512, __m512) {
    // SAFETY: masked lanes are not read; the others by the contract above.
    unsafe {
        let gradient = _mm512_maskz_loadu_ps(lanes, cursor.gradient.wrapping_add(at));
        let residual = _mm512_maskz_loadu_ps(lanes, cursor.residual.wrapping_add(at));
        (_mm512_add_ps(residual, gradient), gradient)
    }
}

/// Stores `G` of one vector, which begins at an element of the bin and has some lanes in it, and appends the elements that are
/// selected among those of its own.
///
/// # Safety
/// The lanes must be inside the bin, and there must be room for a whole vector of entries at `next`.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn select<const PLAIN: bool>(
    cursor: &mut Cursor<'_>,
    (at, lanes, own): (usize, __mmask16, __mmask16),
    g: __m512,
    gradient: __m512,
    peak: u32,
) {
    let soft = if PLAIN { gradient } else { _mm512_mul_ps(_mm512_set1_ps(cursor.extra), gradient) };
    let h = magnitude(_mm512_add_ps(g, soft));
    let not_zero = _mm512_mask_test_epi32_mask(own, magnitude(g), magnitude(g));
    let hits = _mm512_mask_cmpge_epu32_mask(not_zero, h, _mm512_set1_epi32(peak as i32));
    let twice = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let entry = _mm512_set1_epi32((cursor.entry + 2 * at as u32) as i32);
    let negative = _mm512_srli_epi32::<31>(_mm512_castps_si512(g));
    let entries = _mm512_or_si512(_mm512_add_epi32(entry, twice), negative);
    // SAFETY: by the contract above. Storing a whole vector is faster than a compressing store.
    unsafe {
        _mm512_mask_storeu_ps(cursor.residual.wrapping_add(at), lanes, g);
        _mm512_storeu_si512(cursor.next.cast(), _mm512_maskz_compress_epi32(hits, entries));
        cursor.next = cursor.next.add(hits.count_ones() as usize);
    }
}

#[inline]
#[target_feature(enable = "avx512f,popcnt")]
fn magnitude(value: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(MAGNITUDE as i32))
}
