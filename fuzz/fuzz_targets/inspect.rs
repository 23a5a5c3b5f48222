//! A file that `inspect` is to describe, changed in any way: what is printed has no control characters.
//!
//! The first bytes pick the file and where it is edited, the rest is a script of edits.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adacomp_fuzz::readers::described(data));
