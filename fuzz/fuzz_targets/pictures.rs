//! A picture of a folder, changed in any way: it is cut and scaled to the size that models take, or refused.
//!
//! The first bytes pick the file and where it is edited, the rest is a script of edits.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adacomp_fuzz::readers::pictures(data));
