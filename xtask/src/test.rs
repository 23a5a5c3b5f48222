//! `cargo xtask test`: everything that must be true before a change lands.

use crate::job::{Job, root};
use crate::schedule::Lane::{Fetch, Python, Rust};
use crate::schedule::{self, End, Step, step};
use crate::{documents, fuzz, python, release};
use anyhow::{Result, bail, ensure};
use std::time::{Duration, Instant};
use xshell::cmd;

/// A part of the test command, for daily work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Format, lints and tests of adacomp, adacomp-exchange and xtask
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
const CORE_CRATES: [&str; 7] = ["--locked", "-p", "adacomp", "-p", "adacomp-exchange", "-p", "xtask"];

/// The one profile and the one set of features of all that needs Burn, so that it is built once. The README's first command, without
/// MPI, has Burn with the same features.
const PROGRAM_CRATES: [&str; 8] =
    ["--release", "--locked", "-p", "adacomp-burn", "-p", "adacomp-cli", "--features", "adacomp-cli/mpi"];

/// Steps, each in its part; those of no part are run where others need them.
type Steps = &'static [(Option<Part>, Step)];

const SETUP: Option<Part> = None;
const CORE: Option<Part> = Some(Part::Core);
const MPI: Option<Part> = Some(Part::Mpi);
const PROGRAM: Option<Part> = Some(Part::Program);
const PYTHON: Option<Part> = Some(Part::Python);
const DOCUMENTS: Option<Part> = Some(Part::Documents);

const STEPS: Steps = &[
    (SETUP, step("system packages", Fetch, &[], system_packages)),
    (SETUP, step("pytorch", Fetch, &[], python::fetch)),
    (SETUP, step("chromium", Fetch, &[], |job| job.packages(&[("chromium", &["chromium"])]))),
    (CORE, step("format", Rust, &[], format)),
    (CORE, step("core lints", Rust, &[], core_lints)),
    (CORE, step("core tests", Rust, &[], core_tests)),
    // Beside the first build of Burn, while PyTorch arrives.
    (MPI, step("mpi", Python, &["system packages"], mpi)),
    (PROGRAM, step("program lints", Rust, &["system packages"], program_lints)),
    (PROGRAM, step("program tests", Rust, &["system packages"], program_tests)),
    (PROGRAM, step("program over mpi", Rust, &["system packages"], program_mpi)),
    (PROGRAM, step("report in browser", Rust, &["system packages", "chromium"], browser)),
    (PROGRAM, step("first command", Rust, &[], first_command)),
    (PYTHON, step("wheel", Python, &["pytorch"], python::install)),
    (PYTHON, step("python lints", Python, &["wheel"], python::lints)),
    (PYTHON, step("python tests", Python, &["wheel"], python::tests)),
    (DOCUMENTS, step("documents", Python, &["pytorch"], documents::check)),
];

/// What only `--full` runs.
const FULL: Steps = &[
    (PYTHON, step("source distribution", Python, &["pytorch"], python::source_distribution)),
    (CORE, step("memory checks", Python, &[], memory_checks)),
    (CORE, step("fuzzing", Python, &[], fuzz::briefly)),
    (DOCUMENTS, step("documentation", Rust, &["system packages"], documentation)),
    (DOCUMENTS, step("readme commands", Rust, &[], documents::run_readme)),
    (PROGRAM, step("clusters", Rust, &["system packages", "wheel"], clusters)),
    (CORE, step("release", Rust, &["system packages"], release::check)),
    (CORE, step("benchmarks", Rust, &[], |job| release::bench(job, true))),
];

/// Runs the steps of these parts, or of all, and what they need.
pub(crate) fn run(parts: &[Part], full: bool) -> Result<()> {
    let start = Instant::now();
    let ended = schedule::run(&chosen(parts, full))?;
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
    let is_chosen = |part: Part| parts.is_empty() || parts.contains(&part);
    let mut names: Vec<&str> =
        listed.clone().filter(|(part, _)| part.is_some_and(is_chosen)).map(|(_, step)| step.name).collect();
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
    job.run(job.cargo_now().args(["fmt", "--all", "--check"]))?;
    job.run(job.cargo_now().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))
}

fn core_lints(job: &Job) -> Result<()> {
    job.component("clippy", "clippy")?;
    job.run(job.cargo().arg("clippy").args(CORE_CRATES).args(["--all-targets", "--", "-D", "warnings"]))
}

fn core_tests(job: &Job) -> Result<()> {
    job.run(job.cargo().arg("test").args(CORE_CRATES).arg("--no-run"))?;
    job.run(job.cargo_now().arg("test").args(CORE_CRATES))
}

/// Learners in processes of their own. Its tests run one after the other: they measure timeouts, and each starts several processes.
fn mpi(job: &Job) -> Result<()> {
    let package = ["--locked", "-p", "adacomp-exchange", "--features", "mpi"];
    // Also what the tests start.
    job.run(job.cargo().arg("test").args(package).arg("--no-run"))?;
    let only = ["--test", "mpi", "--", "--ignored", "--test-threads=1"];
    job.run(job.cargo_now().arg("test").args(package).args(only))
}

fn program_lints(job: &Job) -> Result<()> {
    job.component("clippy", "clippy")?;
    // Here the exchange has MPI.
    let exchange = ["-p", "adacomp-exchange", "--all-targets", "--", "-D", "warnings"];
    job.run(job.cargo().arg("clippy").args(PROGRAM_CRATES).args(exchange))
}

fn program_tests(job: &Job) -> Result<()> {
    job.run(job.cargo().arg("test").args(PROGRAM_CRATES).arg("--no-run"))?;
    job.run(job.cargo_now().arg("test").args(PROGRAM_CRATES))
}

fn program_mpi(job: &Job) -> Result<()> {
    let only = ["--test", "mpi", "--", "--ignored", "--test-threads=1"];
    job.run(job.cargo_now().arg("test").args(PROGRAM_CRATES).args(only))
}

fn browser(job: &Job) -> Result<()> {
    job.run(job.cargo_now().arg("test").args(PROGRAM_CRATES).args(["--test", "browser", "--", "--ignored"]))
}

/// The README's first command, in an empty folder.
fn first_command(job: &Job) -> Result<()> {
    let manifest = root().join("Cargo.toml");
    let options = ["--release", "--locked", "--manifest-path"];
    job.run(job.cargo().arg("build").args(options).arg(&manifest))?;
    let folder = job.empty_folder("first-command")?;
    let start = Instant::now();
    let _folder = job.sh.push_dir(&folder);
    job.run(job.cargo_now().arg("run").args(options).arg(&manifest))?;
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
    let tests = ["test", "--locked", "-p", "adacomp", "--lib", "--test", "rules", "--"];
    job.run(job.cargo_now().args(tests).args([
        "--skip",
        "every_length",
        "--skip",
        "properties::",
        "--test-threads=2",
    ]))
}

fn documentation(job: &Job) -> Result<()> {
    let _flags = job.sh.push_env("RUSTDOCFLAGS", "-D warnings");
    let options =
        ["--locked", "--no-deps", "--workspace", "--features", "adacomp-exchange/mpi,adacomp-cli/mpi"];
    // In the profile whose dependencies are checked already.
    job.run(job.cargo().args(["doc", "--release"]).args(options))
}

/// What docs/clusters.md says, on two machines that are network namespaces.
fn clusters(job: &Job) -> Result<()> {
    job.run(job.cargo().args(["build", "--bin", "adacomp"]).args(PROGRAM_CRATES))?;
    let python = python::interpreter();
    match job.run(cmd!(job.sh, "{python} -m reproduction clusters")) {
        Err(error) => bail!("{error} (it needs root)"),
        Ok(()) => Ok(()),
    }
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
        assert_eq!(names(&[Part::Core]), ["format", "core lints", "core tests"]);
        assert_eq!(names(&[Part::Mpi]), ["system packages", "mpi"]);
        assert_eq!(names(&[Part::Documents]), ["pytorch", "documents"]);
        let by_need = ["pytorch", "wheel", "python lints", "python tests"];
        assert_eq!(names(&[Part::Python]), by_need);
    }
}
