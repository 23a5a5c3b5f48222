//! Fuzzing with libFuzzer. The instrumentation needs compiler flags but no other toolchain, so `cargo fuzz` is not needed.

use crate::shell::{Result, cargo, command, install, root, run as run_command};
use std::fs;
use std::path::Path;

const TARGET: &str = "x86_64-unknown-linux-gnu";

const FLAGS: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 --cfg fuzzing";

/// The targets, and the length of their longest inputs: frames and gradients, or a script of edits to something valid.
const TARGETS: [(&str, u32); 6] = [
    ("decode", 4096),
    ("roundtrip", 4096),
    ("messages", 128),
    ("verdicts", 128),
    ("sums", 128),
    ("state", 128),
];

/// Golden frames by the number that the `decode` target picks their policy with.
const SEEDS: [&str; 5] = ["adacomp", "top-k", "half", "dense", "local-selection"];

/// Runs a target this many times, from what earlier runs have found.
pub(crate) fn run(target: &str, runs: u64) -> Result {
    let Some((_, longest)) = TARGETS.into_iter().find(|(name, _)| *name == target) else {
        let names = TARGETS.map(|(name, _)| name).join(", ");
        return Err(format!("no fuzz target `{target}`: there are {names}"));
    };
    install("c++", &["g++"])?;
    let mut build = cargo(&["build", "--release", "--locked", "--target", TARGET]);
    run_command(build.current_dir(root().join("fuzz")).env("RUSTFLAGS", FLAGS))?;

    let corpus = root().join("fuzz/corpus").join(target);
    let artifacts = root().join("fuzz/artifacts").join(target);
    let make =
        |folder: &Path| fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()));
    make(&corpus)?;
    make(&artifacts)?;
    if target == "decode" {
        seed(&corpus).map_err(|error| format!("seeds for decode: {error}"))?;
    }
    let binary = root().join("fuzz/target").join(TARGET).join("release").join(target);
    let mut fuzzer = command("timeout", &["--kill-after=10", "3600"]);
    fuzzer.arg(binary).arg(&corpus).arg(format!("-runs={runs}"));
    fuzzer.arg(format!("-artifact_prefix={}/", artifacts.display()));
    fuzzer.arg(format!("-max_len={longest}"));
    run_command(fuzzer.args(["-timeout=10", "-verbosity=0", "-print_final_stats=1"]))
}

/// Valid frames to start from.
fn seed(corpus: &Path) -> std::io::Result<()> {
    let golden = root().join("crates/adacomp/tests/golden");
    for (policy, scheme) in SEEDS.iter().enumerate() {
        for codec in ["paper", "rice"] {
            let name = format!("{scheme}.{codec}.frame");
            let frame = fs::read(golden.join(&name))?;
            fs::write(corpus.join(name), [&[policy as u8], frame.as_slice()].concat())?;
        }
    }
    Ok(())
}
