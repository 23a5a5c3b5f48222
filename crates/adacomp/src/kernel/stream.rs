//! Writes outputs block by block: large slices past the caches, or only what is not 0.
#![allow(unsafe_code)]

/// Where the averaged gradient of a layer goes.
#[derive(Debug)]
pub enum Output<'a> {
    /// All elements.
    Dense(&'a mut [f32]),
    /// Index and value of those that are not 0, appended by ascending index: for a device that keeps the gradient, so that
    /// nothing of the layer's size is needed here.
    Sparse {
        /// Elements of the layer.
        elements: usize,
        /// What is appended to.
        entries: &'a mut Vec<(u32, f32)>,
    },
}

impl Output<'_> {
    /// Returns the number of elements of its layer.
    pub fn elements(&self) -> usize {
        match self {
            Self::Dense(slice) => slice.len(),
            Self::Sparse { elements, .. } => *elements,
        }
    }

    /// Returns the same output for a shorter time.
    pub fn reborrow(&mut self) -> Output<'_> {
        match self {
            Self::Dense(slice) => Output::Dense(slice),
            Self::Sparse { elements, entries } => Output::Sparse { elements: *elements, entries },
        }
    }
}

/// Elements that are summed in the nearest cache, so that the output is only written, and only once. A place in a block and a sign
/// take less than 16 bits.
pub(crate) const BLOCK: usize = 1 << 12;

/// An output from this length on would not stay in the caches until it is used.
const LARGE: usize = 1 << 20;

/// Writes an output that is mostly zero. Calls `add` for each block, with the index of its first element and zeros to add
/// to, and writes the sums multiplied by `factor`.
pub fn write_blocks(output: &mut Output<'_>, factor: f32, mut add: impl FnMut(usize, &mut [f32])) {
    let is_large = output.elements() >= LARGE;
    let _fence = Fence;
    let mut values = [0.0; BLOCK];
    match output {
        Output::Dense(slice) => {
            for (number, block) in slice.chunks_mut(BLOCK).enumerate() {
                let values = &mut values[..block.len()];
                add(number * BLOCK, values);
                if is_large { stream(values, factor, block) } else { copy(values, factor, block) }
            }
        }
        Output::Sparse { elements, entries } => {
            for start in (0..*elements).step_by(BLOCK) {
                let values = &mut values[..BLOCK.min(*elements - start)];
                add(start, values);
                keep_nonzero(values, factor, start, entries);
            }
        }
    }
}

/// Appends the values that are not 0, multiplied by `factor`, and leaves zeros.
fn keep_nonzero(values: &mut [f32], factor: f32, start: usize, entries: &mut Vec<(u32, f32)>) {
    // Most are 0, so several are looked at together.
    const SOME: usize = 16;
    for (number, some) in values.chunks_mut(SOME).enumerate() {
        if some.iter().fold(0, |bits, value| bits | value.to_bits()) == 0 {
            continue;
        }
        for (index, value) in (start + number * SOME..).zip(some) {
            if value.to_bits() != 0 {
                entries.push((index as u32, factor * std::mem::take(value)));
            }
        }
    }
}

/// Moves values, multiplied by `factor`, and leaves zeros.
fn copy(from: &mut [f32], factor: f32, to: &mut [f32]) {
    for (from, to) in from.iter_mut().zip(to) {
        *to = factor * std::mem::take(from);
    }
}

/// Does the same with stores that bypass the caches. An ordinary store first loads the line that it overwrites, which is half
/// of the memory traffic of a large output.
fn stream(from: &mut [f32], factor: f32, to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            _mm_loadu_ps, _mm_mul_ps, _mm_set1_ps, _mm_setzero_ps, _mm_storeu_ps, _mm_stream_ps,
        };
        const LANES: usize = 4;
        let start = to.as_ptr().align_offset(LANES * size_of::<f32>()).min(to.len());
        let end = to.len() - (to.len() - start) % LANES;
        copy(&mut from[..start], factor, &mut to[..start]);
        copy(&mut from[end..], factor, &mut to[end..]);
        for at in (start..end).step_by(LANES) {
            // SAFETY: every x86-64 machine has SSE; the vector is inside of both slices, and aligned in the second; and the caller
            // has a fence before anybody else uses it.
            unsafe {
                let from = from.as_mut_ptr().add(at);
                let values = _mm_mul_ps(_mm_set1_ps(factor), _mm_loadu_ps(from));
                _mm_stream_ps(to.as_mut_ptr().add(at), values);
                _mm_storeu_ps(from, _mm_setzero_ps());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    copy(from, factor, to);
}

/// Orders the streamed stores before all later ones, also for other threads, and also if `add` has panicked.
struct Fence;

impl Drop for Fence {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 machine has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, LARGE, Output, write_blocks};

    /// Every length around the limits and every alignment, over what was there before.
    #[test]
    fn blocks_cover_the_output_and_nothing_else() {
        for length in [0, 1, BLOCK - 1, BLOCK + 1, LARGE - 1, LARGE, LARGE + 6] {
            for offset in 0..5 {
                let mut memory = vec![-1.0; length + 8];
                let mut covered = 0;
                let mut output = Output::Dense(&mut memory[offset..offset + length]);
                write_blocks(&mut output, 0.5, |start, block| {
                    assert_eq!(start, covered);
                    covered += block.len();
                    assert!(block.iter().all(|value| *value == 0.0));
                    for (value, at) in block.iter_mut().zip(start..) {
                        *value += (at % 7) as f32;
                    }
                });
                assert_eq!(covered, length);
                let (before, rest) = memory.split_at(offset);
                let (output, after) = rest.split_at(length);
                assert!(before.iter().chain(after).all(|value| *value == -1.0));
                assert!(output.iter().enumerate().all(|(at, value)| *value == 0.5 * (at % 7) as f32));
            }
        }
    }

    #[test]
    fn a_sparse_output_has_what_a_dense_one_has_without_zeros() {
        for length in [0, 1, BLOCK - 1, 3 * BLOCK + 5] {
            let value =
                |at: usize| if at % 97 == 5 { -0.0 } else { (at / 97 * usize::from(at % 97 == 3)) as f32 };
            let add = |start: usize, block: &mut [f32]| {
                block.iter_mut().zip(start..).for_each(|(sum, at)| *sum = value(at));
            };
            let (mut dense, mut entries) = (vec![1.0; length], Vec::new());
            write_blocks(&mut Output::Dense(&mut dense), 3.0, add);
            write_blocks(&mut Output::Sparse { elements: length, entries: &mut entries }, 3.0, add);
            assert!(entries.is_sorted_by_key(|(index, _)| *index));
            // A zero with a sign is kept, so that the bits are the same.
            assert!(entries.iter().all(|(_, value)| value.to_bits() != 0));
            let mut written = vec![0.0; length];
            entries.iter().for_each(|&(index, value)| written[index as usize] = value);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&written), bits(&dense));
        }
    }
}
