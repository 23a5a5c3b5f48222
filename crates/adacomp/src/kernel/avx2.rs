//! The selection rule with AVX2, eight elements at a time.
//!
//! A bin that is not a multiple of eight ends in a vector that overlaps the one before: it is computed from what stood
//! there before anything was stored, so both vectors give the same bits for the elements they share.
#![allow(unsafe_code)]

use super::{INFINITE, Kernel, MAGNITUDE, Run, scalar};
use crate::packet::{Selected, make_room};
use std::arch::x86_64::*;

const LANES: usize = 8;

/// How far ahead memory is prefetched: past the block from which the last selection is subtracted meanwhile.
const AHEAD: usize = 2 * crate::selection::BLOCK;

/// Returns the variant if this machine can run it.
pub(super) fn kernel() -> Option<Kernel> {
    (is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("popcnt"))
    .then_some(Kernel { name: "avx2", run })
}

/// Runs on a machine on which [`kernel`] found the features.
fn run(run: Run<'_>) {
    if run.bin < LANES {
        return scalar::run(run);
    }
    // SAFETY: only `kernel` hands this function out, and `Run::check` has checked the lengths.
    unsafe {
        // AdaComp itself must stay a plain addition.
        if run.extra == 1.0 { all_bins::<true>(run) } else { all_bins::<false>(run) }
    }
}

#[target_feature(enable = "avx2,bmi1,popcnt")]
fn all_bins<const PLAIN: bool>(run: Run<'_>) {
    let mut cursor = Cursor::new(run);
    let bins = &mut cursor;
    // The number of a small bin's vectors is known when its loop is compiled.
    match bins.bin.div_ceil(LANES) {
        1 => small::<1, PLAIN>(bins),
        2 => small::<2, PLAIN>(bins),
        3 => small::<3, PLAIN>(bins),
        4 => small::<4, PLAIN>(bins),
        5 => small::<5, PLAIN>(bins),
        6 => small::<6, PLAIN>(bins),
        7 => small::<7, PLAIN>(bins),
        8 => small::<8, PLAIN>(bins),
        _ => large::<PLAIN>(bins),
    }
    // SAFETY: `next` moves only past entries that have been written.
    unsafe { cursor.finish() };
}

/// Bins of up to eight vectors, of which the last may overlap, kept in registers between the two passes.
#[target_feature(enable = "avx2,bmi1,popcnt")]
fn small<const VECTORS: usize, const PLAIN: bool>(cursor: &mut Cursor<'_>) {
    let tail = cursor.bin - LANES;
    let at = |vector: usize| if vector + 1 == VECTORS { tail } else { vector * LANES };
    // Lanes of the last vector that the one before has not seen.
    let new_lanes = 0xff << (VECTORS * LANES - cursor.bin) & 0xff;
    for _ in 0..cursor.maxima.len() {
        let mut g = [_mm256_setzero_ps(); VECTORS];
        let mut peak = _mm256_setzero_si256();
        for (vector, g) in g.iter_mut().enumerate() {
            if vector % 2 == 0 {
                cursor.prefetch(vector * LANES);
            }
            // SAFETY: the vector is inside the bin.
            *g = unsafe { load(cursor, at(vector)).0 };
            peak = _mm256_max_epi32(peak, magnitude(*g));
        }
        let peak = spread_max(peak);
        if cursor.record(_mm256_cvtsi256_si32(peak) as u32) {
            for (vector, &g) in g.iter().enumerate() {
                // SAFETY: the vector is inside the bin, and its entries inside the reserved capacity.
                unsafe {
                    let gradient = _mm256_loadu_ps(cursor.gradient.add(at(vector)));
                    let zero = _mm256_cmp_ps::<_CMP_EQ_OQ>(g, _mm256_setzero_ps());
                    let below = _mm256_or_ps(below::<PLAIN>(cursor.extra, g, gradient, peak), zero);
                    let mut hits = !_mm256_movemask_ps(below) as u32 & 0xff;
                    if vector + 1 == VECTORS {
                        hits &= new_lanes;
                    }
                    _mm256_storeu_ps(cursor.residual.add(at(vector)), g);
                    append(cursor, hits, g, at(vector));
                }
            }
        }
        cursor.advance();
    }
}

/// Bins of more than eight vectors, in two passes over the nearest cache.
#[target_feature(enable = "avx2,bmi1,popcnt")]
fn large<const PLAIN: bool>(cursor: &mut Cursor<'_>) {
    let bin = cursor.bin;
    let tail = bin - LANES;
    for _ in 0..cursor.maxima.len() {
        // SAFETY: every vector is inside the bin, and its entries inside the reserved capacity.
        unsafe {
            let (tail_g, tail_gradient) = load(cursor, tail);
            let mut peaks = [magnitude(tail_g); 4];
            let mut at = 0;
            while at + 4 * LANES <= bin {
                for (vector, peak) in peaks.iter_mut().enumerate() {
                    *peak = _mm256_max_epi32(*peak, magnitude(load(cursor, at + vector * LANES).0));
                }
                at += 4 * LANES;
            }
            while at < tail {
                peaks[0] = _mm256_max_epi32(peaks[0], magnitude(load(cursor, at).0));
                at += LANES;
            }
            let [a, b, c, d] = peaks;
            let peak = spread_max(_mm256_max_epi32(_mm256_max_epi32(a, b), _mm256_max_epi32(c, d)));

            if cursor.record(_mm256_cvtsi256_si32(peak) as u32) {
                let mut at = 0;
                while at + 64 <= bin {
                    let low = select_32::<PLAIN>(cursor, at, peak);
                    let high = select_32::<PLAIN>(cursor, at + 32, peak);
                    append_word(cursor, u64::from(high) << 32 | u64::from(low), at);
                    at += 64;
                }
                if at < bin {
                    let word = at;
                    let mut hits = 0;
                    while at < tail {
                        let below = select_8::<PLAIN>(cursor, at, peak);
                        hits |= u64::from(!_mm256_movemask_ps(below) as u8) << (at - word);
                        at += LANES;
                    }
                    let below = below::<PLAIN>(cursor.extra, tail_g, tail_gradient, peak);
                    let last = u64::from(!_mm256_movemask_ps(below) as u8);
                    hits |= last >> (at - tail) << (at - word);
                    _mm256_storeu_ps(cursor.residual.add(tail), tail_g);
                    append_word(cursor, hits, word);
                }
            }
        }
        cursor.advance();
    }
}

/// Loads `G` and `dW` of one vector of the current bin.
///
/// # Safety
/// The vector must be inside the bin.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
unsafe fn load(cursor: &Cursor<'_>, at: usize) -> (__m256, __m256) {
    // SAFETY: by the contract above; `Run::check` has seen that all bins are there.
    unsafe {
        let gradient = _mm256_loadu_ps(cursor.gradient.add(at));
        (_mm256_add_ps(_mm256_loadu_ps(cursor.residual.add(at)), gradient), gradient)
    }
}

/// Returns the lanes, as sign bits, in which the soft threshold `H` is below the bin maximum.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
fn below<const PLAIN: bool>(extra: f32, g: __m256, gradient: __m256, peak: __m256i) -> __m256 {
    let soft = if PLAIN { gradient } else { _mm256_mul_ps(_mm256_set1_ps(extra), gradient) };
    _mm256_castsi256_ps(_mm256_cmpgt_epi32(peak, magnitude(_mm256_add_ps(g, soft))))
}

/// Stores `G` of one vector and returns the lanes, as sign bits, that are below the threshold.
///
/// # Safety
/// The vector must be inside the bin.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
unsafe fn select_8<const PLAIN: bool>(cursor: &Cursor<'_>, at: usize, peak: __m256i) -> __m256 {
    // SAFETY: by the same contract.
    unsafe {
        let (g, gradient) = load(cursor, at);
        _mm256_storeu_ps(cursor.residual.add(at), g);
        below::<PLAIN>(cursor.extra, g, gradient, peak)
    }
}

/// Stores `G` of four vectors and returns the bits of elements that reach the threshold.
///
/// # Safety
/// The vectors must be inside the bin.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
unsafe fn select_32<const PLAIN: bool>(cursor: &Cursor<'_>, at: usize, peak: __m256i) -> u32 {
    cursor.prefetch(at);
    cursor.prefetch(at + 16);
    let mut lanes = [_mm256_setzero_si256(); 4];
    for (vector, lanes) in lanes.iter_mut().enumerate() {
        // SAFETY: by the contract above.
        *lanes = unsafe { _mm256_castps_si256(select_8::<PLAIN>(cursor, at + vector * LANES, peak)) };
    }
    // Packing works within 128-bit halves; the permutation puts the bytes in order.
    let [a, b, c, d] = lanes;
    let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    !_mm256_movemask_epi8(ordered) as u32
}

/// Appends the lanes of one vector that are hit. It takes the same time however many they are: for small bins, where
/// hits are frequent, that beats a loop over them, whose end cannot be predicted.
///
/// # Safety
/// There must be capacity for a full vector at `next`.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
unsafe fn append(cursor: &mut Cursor<'_>, hits: u32, g: __m256, at: usize) {
    // SAFETY: the table has a row for each of the 256 masks; room by the contract above.
    unsafe {
        let lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(HIT_LANES[hits as usize].as_ptr().cast()));
        let negative = _mm256_srli_epi32::<31>(_mm256_permutevar8x32_epi32(_mm256_castps_si256(g), lanes));
        let entry = _mm256_set1_epi32((cursor.entry + 2 * at as u32) as i32);
        let entries = _mm256_add_epi32(_mm256_add_epi32(entry, _mm256_add_epi32(lanes, lanes)), negative);
        _mm256_storeu_si256(cursor.next.cast(), entries);
        cursor.next = cursor.next.add(hits.count_ones() as usize);
    }
}

/// Appends the elements of one 64-bit word that are hit and whose `G` is not 0. Most words of a large bin have at most
/// two hits, so two are written without a branch and counted if they were there.
///
/// # Safety
/// `G` must be stored for every bit that is set, element `at` must exist, and there must be room for two entries more
/// than bits at `next`.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
unsafe fn append_word(cursor: &mut Cursor<'_>, mut hits: u64, at: usize) {
    let mut append = |bit: u32, hit: bool| {
        // SAFETY: by the contract above; where no bit is left, `bit & 63` is 0.
        unsafe {
            let offset = at + (bit & 63) as usize;
            let g = (*cursor.residual.add(offset)).to_bits();
            *cursor.next = cursor.entry + 2 * offset as u32 + (g >> 31);
            cursor.next = cursor.next.add(usize::from(hit & (g & MAGNITUDE != 0)));
        }
    };
    for _ in 0..2 {
        append(hits.trailing_zeros(), hits != 0);
        hits &= hits.wrapping_sub(1);
    }
    while hits != 0 {
        append(hits.trailing_zeros(), true);
        hits &= hits - 1;
    }
}

#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
fn magnitude(value: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(MAGNITUDE as i32))
}

/// Returns the largest lane, in every lane.
#[inline]
#[target_feature(enable = "avx2,bmi1,popcnt")]
fn spread_max(value: __m256i) -> __m256i {
    let value = _mm256_max_epi32(value, _mm256_permute2x128_si256::<1>(value, value));
    let value = _mm256_max_epi32(value, _mm256_shuffle_epi32::<0b01_00_11_10>(value));
    _mm256_max_epi32(value, _mm256_shuffle_epi32::<0b10_11_00_01>(value))
}

/// For each mask of eight lanes the numbers of those that are set, in order.
static HIT_LANES: [[u8; LANES]; 256] = {
    let mut table = [[0; LANES]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut hits) = (0, 0);
        while lane < LANES {
            if mask >> lane & 1 == 1 {
                table[mask][hits] = lane as u8;
                hits += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
};

/// A run as pointers that walk over it bin by bin.
struct Cursor<'a> {
    /// The current bin's `R`, then `G`.
    residual: *mut f32,
    /// The current bin's `dW`.
    gradient: *const f32,
    /// Elements of a bin.
    bin: usize,
    /// `f - 1`.
    extra: f32,
    /// Twice the index of the bin's first element: an entry of the selection without its sign.
    entry: u32,
    /// Where the next entry goes, in the spare capacity of `selected`.
    next: *mut u32,
    maxima: std::slice::IterMut<'a, f32>,
    selected: &'a mut Vec<Selected>,
}

impl<'a> Cursor<'a> {
    /// Starts at the first bin, with room for an entry for every element. Entries are written a vector at a time, so up to
    /// a vector past the last that counts.
    fn new(run: Run<'a>) -> Self {
        make_room(run.selected, run.residual.len() + LANES);
        let next = run.selected.spare_capacity_mut().as_mut_ptr().cast();
        Self {
            residual: run.residual.as_mut_ptr(),
            gradient: run.gradient.as_ptr(),
            bin: run.bin,
            extra: run.extra,
            entry: run.first << 1,
            next,
            maxima: run.maxima.iter_mut(),
            selected: run.selected,
        }
    }

    /// Records the current bin's maximum, given as bits. Returns whether the bin is finite.
    #[inline(always)]
    fn record(&mut self, peak: u32) -> bool {
        let finite = peak < INFINITE;
        if let Some(maximum) = self.maxima.next() {
            *maximum = if finite { f32::from_bits(peak) } else { f32::NAN };
        }
        finite
    }

    /// Goes to the next bin.
    #[inline(always)]
    fn advance(&mut self) {
        self.residual = self.residual.wrapping_add(self.bin);
        self.gradient = self.gradient.wrapping_add(self.bin);
        self.entry = self.entry.wrapping_add(2 * self.bin as u32);
    }

    /// Prefetches memory that is needed soon.
    #[inline(always)]
    fn prefetch(&self, at: usize) {
        for address in [self.residual.cast_const(), self.gradient] {
            // SAFETY: every x86-64 machine has SSE, and prefetching is allowed at any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(at + AHEAD).cast()) };
        }
    }

    /// Makes the entries part of the selection.
    ///
    /// # Safety
    /// Every entry before `next` must have been written.
    unsafe fn finish(self) {
        let start = self.selected.as_ptr().cast::<u32>();
        // SAFETY: both point into the vector's one allocation, which `new` reserved and which has not moved since; the
        // entries are there by the contract above.
        unsafe { self.selected.set_len(self.next.offset_from_unsigned(start)) };
    }
}
