//! Writes large outputs block by block, past the caches.
#![allow(unsafe_code)]

/// Elements that are summed in the nearest cache, so that the output is only written, and only once.
const BLOCK: usize = 1 << 12;

/// An output from this length on would not stay in the caches until it is used.
const LARGE: usize = 1 << 20;

/// Writes an output that is mostly zero. Calls `add` for each block, with the index of its first element and zeros to add
/// to, and writes the sums multiplied by `factor`.
pub fn write_blocks(output: &mut [f32], factor: f32, mut add: impl FnMut(usize, &mut [f32])) {
    let is_large = output.len() >= LARGE;
    let _fence = Fence;
    let mut values = [0.0; BLOCK];
    for (number, block) in output.chunks_mut(BLOCK).enumerate() {
        let values = &mut values[..block.len()];
        add(number * BLOCK, values);
        if is_large { stream(values, factor, block) } else { copy(values, factor, block) }
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
    use super::{BLOCK, LARGE, write_blocks};

    /// Every length around the limits and every alignment, over what was there before.
    #[test]
    fn blocks_cover_the_output_and_nothing_else() {
        for length in [0, 1, BLOCK - 1, BLOCK + 1, LARGE - 1, LARGE, LARGE + 6] {
            for offset in 0..5 {
                let mut memory = vec![-1.0; length + 8];
                let mut covered = 0;
                write_blocks(&mut memory[offset..offset + length], 0.5, |start, block| {
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
}
