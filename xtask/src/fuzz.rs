//! Fuzzing with libFuzzer. The instrumentation needs compiler flags but no other toolchain, so `cargo fuzz` is not needed.

use crate::step::{Job, root};
use anyhow::{Result, ensure};
use std::path::Path;
use xshell::cmd;

const TARGET: &str = "x86_64-unknown-linux-gnu";

const FLAGS: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 --cfg fuzzing";

/// Golden frames by the number that the `decode` target picks their policy with.
const SEEDS: [&str; 5] = ["adacomp", "top-k", "half", "dense", "local-selection"];

/// Runs every target for a short time.
pub(crate) fn briefly(job: &Job) -> Result<()> {
    targets(job)?.iter().try_for_each(|target| run(job, target, 50_000))
}

/// Returns the names of all targets.
fn targets(job: &Job) -> Result<Vec<String>> {
    let files = job.sh.read_dir("fuzz/fuzz_targets")?;
    Ok(files.iter().filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect())
}

/// Runs a target this number of times, from what earlier runs have found.
pub(crate) fn run(job: &Job, target: &str, runs: u64) -> Result<()> {
    let known = targets(job)?;
    let is_known = known.iter().any(|name| name == target);
    ensure!(is_known, "no fuzz target `{target}`: there are {}", known.join(", "));
    job.packages(&[("c++", &["g++"])])?;
    {
        let _folder = job.sh.push_dir("fuzz");
        let _flags = job.sh.push_env("RUSTFLAGS", FLAGS);
        job.run(cmd!(job.sh, "nice cargo build --release --locked --target {TARGET}"))?;
    }
    let corpus = job.sh.create_dir(format!("fuzz/corpus/{target}"))?;
    let artifacts = job.sh.create_dir(format!("fuzz/artifacts/{target}"))?;
    if target == "decode" {
        seed(job, &corpus)?;
    }
    // Frames and gradients, or a script of edits to something valid, which is short.
    let longest = if ["decode", "roundtrip"].contains(&target) { 4096 } else { 128 };
    let binary = root().join("fuzz/target").join(TARGET).join("release").join(target);
    let options = ["-timeout=10", "-verbosity=0", "-print_final_stats=1"];
    let own = [
        format!("-runs={runs}"),
        format!("-max_len={longest}"),
        format!("-artifact_prefix={}/", artifacts.display()),
    ];
    job.run(cmd!(job.sh, "timeout --kill-after=10 3600 {binary} {corpus} {own...} {options...}"))
}

/// Writes valid frames to start from.
fn seed(job: &Job, corpus: &Path) -> Result<()> {
    for (policy, scheme) in (0u8..).zip(SEEDS) {
        for codec in ["paper", "rice"] {
            let name = format!("{scheme}.{codec}.frame");
            let frame = job.sh.read_binary_file(format!("crates/adacomp/tests/golden/{name}"))?;
            job.sh.write_file(corpus.join(name), [&[policy], frame.as_slice()].concat())?;
        }
    }
    Ok(())
}
