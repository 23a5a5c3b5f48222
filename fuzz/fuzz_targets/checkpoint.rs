//! A checkpoint, changed in any way, with checksums that fit: it is loaded and described, or refused.
//!
//! The first bytes pick the file and where it is edited, the rest is a script of edits.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adacomp_fuzz::readers::checkpoint(data));
