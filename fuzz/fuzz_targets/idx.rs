//! An idx file, plain or gzipped, changed in any way: it is read as its header says, or refused.
//!
//! The first bytes pick the file and where it is edited, the rest is a script of edits.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adacomp_fuzz::readers::idx(data));
