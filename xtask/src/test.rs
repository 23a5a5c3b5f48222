//! `cargo xtask test`: everything that must be true before a change lands.

use crate::step::Lane::{Beside, Fetch, Main};
use crate::step::{self, End, Job, Step, root, step};
use crate::{bench, documents, fuzz, python, release};
use Part::{Core, Documents, Mpi, Program, Python, Setup};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use xshell::cmd;

/// A part of the test command, for daily work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// What other parts need
    #[value(skip)]
    Setup,
    /// Licences of dependencies; format, lints and tests of adacomp, adacomp-exchange and xtask
    Core,
    /// The exchange over MPI
    Mpi,
    /// The crate for Burn and the program: lints, tests, MPI, the report in Chromium, the README's first command
    Program,
    /// The Python package and the reproduction: wheel, style, types, tests
    Python,
    /// Tables and figures are what results give, links lead somewhere, the README's commands are run by some step
    Documents,
}

/// Crates whose tests do not wait for Burn.
const CORE: [&str; 7] = ["--locked", "-p", "adacomp", "-p", "adacomp-exchange", "-p", "xtask"];

/// The one profile and the one set of features of all that needs Burn, so that it is built once. The README's first command, without
/// MPI, has Burn with the same features.
const PROGRAM: [&str; 8] =
    ["--release", "--locked", "-p", "adacomp-burn", "-p", "adacomp-cli", "--features", "adacomp-cli/mpi"];

/// Tests of several processes run one after the other: they measure timeouts.
const OVER_MPI: [&str; 5] = ["--test", "mpi", "--", "--ignored", "--test-threads=1"];

const STEPS: &[(Part, Step)] = &[
    (Setup, step("system packages", Fetch, &[], system_packages)),
    (Setup, step("pytorch", Fetch, &[], python::fetch)),
    (Setup, step("chromium", Fetch, &[], |job| job.packages(&[("chromium", &["chromium"])]))),
    // It builds the tool for it, which gives way to other builds.
    (Core, step("dependencies", Fetch, &[], release::dependencies)),
    (Core, step("format", Main, &[], format)),
    (Core, step("core lints", Main, &[], core_lints)),
    (Core, step("core tests", Main, &[], core_tests)),
    // While PyTorch arrives.
    (Mpi, step("mpi", Beside, &["system packages"], mpi)),
    (Program, step("program lints", Main, &["system packages"], program_lints)),
    (Program, step("program tests", Main, &["system packages"], program_tests)),
    (Program, step("program over mpi", Main, &["system packages"], program_mpi)),
    (Program, step("report in browser", Main, &["system packages", "chromium"], browser)),
    (Program, step("first command", Main, &[], first_command)),
    (Python, step("wheel", Beside, &["pytorch"], python::install)),
    (Python, step("python lints", Beside, &["wheel"], python::lints)),
    (Python, step("python tests", Beside, &["wheel"], python::tests)),
    (Documents, step("documents", Beside, &["pytorch"], documents::check)),
];

/// What only `--full` runs.
const FULL: &[(Part, Step)] = &[
    (Python, step("source distribution", Beside, &["pytorch"], python::source_distribution)),
    (Core, step("memory checks", Beside, &[], memory_checks)),
    (Core, step("fuzzing", Beside, &[], fuzz::briefly)),
    (Documents, step("documentation", Main, &["system packages"], documentation)),
    (Documents, step("readme commands", Main, &[], documents::run_readme)),
    (Python, step("endurance", Beside, &["wheel"], python::endurance)),
    (Program, step("clusters", Main, &["system packages", "wheel"], clusters)),
    (Program, step("faults", Main, &["system packages", "wheel"], faults)),
    (Program, step("program on wgpu", Main, &[], program_wgpu)),
    (Core, step("packages", Main, &["system packages"], release::packages)),
    (Core, step("benchmarks", Main, &[], |job| bench::run(job, true, false))),
];

/// Runs the steps of these parts, or of all, and what they need.
pub(crate) fn run(parts: &[Part], full: bool) -> Result<()> {
    let start = Instant::now();
    let ended = step::run(&chosen(parts, full))?;
    for step in &ended {
        let word = match step.end {
            End::Passed => "ok",
            End::Failed => "FAILED",
            End::Skipped => "skipped, because it needs a step that has not passed",
        };
        println!("{:<20} {:>5} s  {word}", step.name, step.time.as_secs());
    }
    let failed = ended.iter().filter(|step| step.end != End::Passed).count();
    println!("{:<20} {:>5} s", "all", start.elapsed().as_secs());
    ensure!(failed == 0, "{failed} of {} steps have not passed; logs are in target/test-logs", ended.len());
    Ok(())
}

fn chosen(parts: &[Part], full: bool) -> Vec<Step> {
    let listed = STEPS.iter().chain(if full { FULL } else { &[] });
    let is_chosen = |part: &Part| *part != Setup && (parts.is_empty() || parts.contains(part));
    let mut names: Vec<&str> =
        listed.clone().filter(|(part, _)| is_chosen(part)).map(|(_, step)| step.name).collect();
    // What is needed comes before what needs it.
    for (_, step) in listed.clone().rev() {
        if names.contains(&step.name) {
            names.extend(step.needs);
        }
    }
    listed.map(|(_, step)| *step).filter(|step| names.contains(&step.name)).collect()
}

fn system_packages(job: &Job) -> Result<()> {
    job.packages(&[
        ("mpicc", &["openmpi-bin", "libopenmpi-dev", "libclang-dev"]),
        ("ip", &["iproute2"]),
        // Tests end learners by their process ids.
        ("pgrep", &["procps"]),
    ])
}

fn format(job: &Job) -> Result<()> {
    job.component("rustfmt", "fmt")?;
    job.run(cmd!(job.sh, "cargo fmt --all --check"))?;
    job.run(cmd!(job.sh, "cargo fmt --manifest-path fuzz/Cargo.toml --check"))
}

fn core_lints(job: &Job) -> Result<()> {
    job.component("clippy", "clippy")?;
    job.run(cmd!(job.sh, "nice cargo clippy {CORE...} --all-targets -- -D warnings"))
}

// Builds are `nice`: they give way to tests, some of which measure time.
fn core_tests(job: &Job) -> Result<()> {
    job.run(cmd!(job.sh, "nice cargo test {CORE...} --no-run"))?;
    job.run(cmd!(job.sh, "cargo test {CORE...}"))
}

/// Learners in processes of their own.
fn mpi(job: &Job) -> Result<()> {
    let package = ["--locked", "-p", "adacomp-exchange", "--features", "mpi"];
    // Also what the tests start.
    job.run(cmd!(job.sh, "nice cargo test {package...} --no-run"))?;
    job.run(cmd!(job.sh, "cargo test {package...} {OVER_MPI...}"))
}

fn program_lints(job: &Job) -> Result<()> {
    job.component("clippy", "clippy")?;
    // Here the exchange has MPI.
    job.run(cmd!(job.sh, "nice cargo clippy {PROGRAM...} -p adacomp-exchange --all-targets -- -D warnings"))
}

fn program_tests(job: &Job) -> Result<()> {
    job.run(cmd!(job.sh, "nice cargo test {PROGRAM...} --no-run"))?;
    job.run(cmd!(job.sh, "cargo test {PROGRAM...}"))
}

fn program_mpi(job: &Job) -> Result<()> {
    job.run(cmd!(job.sh, "cargo test {PROGRAM...} {OVER_MPI...}"))
}

fn browser(job: &Job) -> Result<()> {
    job.run(cmd!(job.sh, "cargo test {PROGRAM...} --test browser -- --ignored"))
}

/// Training on a Vulkan device, which may be one that computes on the processor. Burn is built for it in a folder of its own.
fn program_wgpu(job: &Job) -> Result<()> {
    job.packages(&[("vulkaninfo", &["vulkan-tools", "mesa-vulkan-drivers"])])?;
    let package = ["--release", "--locked", "-p", "adacomp-cli", "--features", "wgpu", "--test", "device"];
    job.run(cmd!(job.sh, "nice cargo test {package...} --target-dir target/wgpu"))
}

/// The README's first command, in an empty folder.
fn first_command(job: &Job) -> Result<()> {
    let manifest = root().join("Cargo.toml");
    job.run(cmd!(job.sh, "nice cargo build --release --locked"))?;
    let folder = job.empty_folder("first-command")?;
    let start = Instant::now();
    let _folder = job.sh.push_dir(&folder);
    job.run(cmd!(job.sh, "cargo run --release --locked --manifest-path {manifest}"))?;
    let time = start.elapsed();
    ensure!(time < Duration::from_secs(120), "it took {} s, which must be less than 120", time.as_secs());
    ensure!(folder.join("runs/compare-digits-1/report.html").is_file(), "it wrote no report");
    Ok(())
}

/// The unsafe kernels and the decoder under valgrind, without tests that try very many cases.
fn memory_checks(job: &Job) -> Result<()> {
    job.packages(&[("valgrind", &["valgrind"])])?;
    let valgrind = "valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite";
    let _runner = job.sh.push_env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", valgrind);
    let tests = ["--skip", "every_length", "--skip", "properties::", "--test-threads=2"];
    job.run(cmd!(job.sh, "cargo test --locked -p adacomp --lib --test rules -- {tests...}"))
}

fn documentation(job: &Job) -> Result<()> {
    let _flags = job.sh.push_env("RUSTDOCFLAGS", "-D warnings");
    let features = "adacomp-exchange/mpi,adacomp-cli/mpi";
    // In the profile whose dependencies are checked already.
    job.run(cmd!(job.sh, "nice cargo doc --release --locked --no-deps --workspace --features {features}"))
}

/// What docs/clusters.md says, on two machines that are network namespaces.
fn clusters(job: &Job) -> Result<()> {
    on_machines(job, "clusters")
}

/// Links that fail and clocks that jump, on three of these.
fn faults(job: &Job) -> Result<()> {
    job.packages(&[("nft", &["nftables"]), ("cc", &["gcc"])])?;
    on_machines(job, "faults")
}

fn on_machines(job: &Job, command: &str) -> Result<()> {
    job.run(cmd!(job.sh, "nice cargo build --bin adacomp {PROGRAM...}"))?;
    let python = python::interpreter();
    job.run(cmd!(job.sh, "{python} -m reproduction {command}")).context("it needs root")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_earlier_steps_and_are_chosen_along() {
        let all = chosen(&[], true);
        assert_eq!(all.len(), STEPS.len() + FULL.len());
        for (at, step) in all.iter().enumerate() {
            let is_earlier = |need: &&str| all[..at].iter().any(|earlier| earlier.name == *need);
            assert!(step.needs.iter().all(is_earlier), "{}", step.name);
        }
        let names = |parts: &[Part]| chosen(parts, false).iter().map(|step| step.name).collect::<Vec<_>>();
        assert_eq!(names(&[Part::Core]), ["dependencies", "format", "core lints", "core tests"]);
        assert_eq!(names(&[Part::Mpi]), ["system packages", "mpi"]);
        assert_eq!(names(&[Part::Documents]), ["pytorch", "documents"]);
        let by_need = ["pytorch", "wheel", "python lints", "python tests"];
        assert_eq!(names(&[Part::Python]), by_need);
    }
}
