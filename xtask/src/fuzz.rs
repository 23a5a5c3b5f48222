//! Fuzzing with libFuzzer. The instrumentation needs compiler flags but no other toolchain, so `cargo fuzz` is not needed.

use crate::job::{Job, root};
use anyhow::{Context, Result, ensure};
use std::fs;
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
    targets()?.iter().try_for_each(|target| run(job, target, 100_000))
}

/// Returns the targets that fuzz/Cargo.toml lists.
fn targets() -> Result<Vec<String>> {
    let manifest: toml::Table = fs::read_to_string(root().join("fuzz/Cargo.toml"))?.parse()?;
    let bins = manifest.get("bin").and_then(toml::Value::as_array).into_iter().flatten();
    Ok(bins.filter_map(|bin| Some(bin.get("name")?.as_str()?.to_owned())).collect())
}

/// Runs a target this number of times, from what earlier runs have found.
pub(crate) fn run(job: &Job, target: &str, runs: u64) -> Result<()> {
    let known = targets()?;
    ensure!(
        known.iter().any(|name| name == target),
        "no fuzz target `{target}`: there are {}",
        known.join(", ")
    );
    job.packages(&[("c++", &["g++"])])?;
    {
        let _folder = job.sh.push_dir("fuzz");
        let _flags = job.sh.push_env("RUSTFLAGS", FLAGS);
        job.run(job.cargo().args(["build", "--release", "--locked", "--target", TARGET]))?;
    }
    let fuzz = root().join("fuzz");
    let [corpus, artifacts] = ["corpus", "artifacts"].map(|name| fuzz.join(name).join(target));
    for folder in [&corpus, &artifacts] {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    if target == "decode" {
        seed(&corpus).context("seeds for decode")?;
    }
    // Frames and gradients, or a script of edits to something valid, which is short.
    let longest = if ["decode", "roundtrip"].contains(&target) { 4096 } else { 128 };
    let binary = fuzz.join("target").join(TARGET).join("release").join(target);
    let artifacts = format!("-artifact_prefix={}/", artifacts.display());
    let numbers = [format!("-runs={runs}"), format!("-max_len={longest}")];
    let options = ["-timeout=10", "-verbosity=0", "-print_final_stats=1"];
    let fuzzer = cmd!(job.sh, "timeout --kill-after=10 3600 {binary} {corpus}");
    job.run(fuzzer.args(numbers).arg(artifacts).args(options))
}

/// Writes valid frames to start from.
fn seed(corpus: &Path) -> Result<()> {
    let golden = root().join("crates/adacomp/tests/golden");
    for (policy, scheme) in (0u8..).zip(SEEDS) {
        for codec in ["paper", "rice"] {
            let name = format!("{scheme}.{codec}.frame");
            let frame = fs::read(golden.join(&name))?;
            fs::write(corpus.join(name), [&[policy], frame.as_slice()].concat())?;
        }
    }
    Ok(())
}
