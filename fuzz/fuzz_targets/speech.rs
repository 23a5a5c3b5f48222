//! A recording and its labels, changed in any way: they give frames and states, or are refused.
//!
//! The first bytes pick the file and where it is edited, the rest is a script of edits.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| adacomp_fuzz::readers::speech(data));
