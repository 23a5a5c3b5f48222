//! Asking for memory before it is needed.
#![allow(unsafe_code)]

/// Asks for the cache line at this address, which need not be valid.
#[inline(always)]
pub(crate) fn prefetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 machine has SSE, and prefetching is allowed at any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
