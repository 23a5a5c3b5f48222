//! Learners in processes that mpirun starts come to the same weights as learners on threads.

#![cfg(feature = "mpi")]

use std::path::Path;
use std::process::{Command, Output};
use tempfile::tempdir;

fn checksum(output: Output) -> String {
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("weights checksum: ")).collect();
    assert_eq!(lines.len(), 1, "one process reports for all: {text}");
    lines[0].to_owned()
}

fn local(folder: &Path, arguments: &str) -> String {
    let program = env!("CARGO_BIN_EXE_adacomp");
    checksum(Command::new(program).args(arguments.split_whitespace()).current_dir(folder).output().unwrap())
}

/// Runs this number of processes, for two minutes at most: mpirun then ends them.
fn over_mpi(folder: &Path, processes: usize, arguments: &str) -> Output {
    let options = format!(
        "--allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1 --timeout 120 -n {processes} {} {arguments} --transport mpi",
        env!("CARGO_BIN_EXE_adacomp")
    );
    Command::new("mpirun").args(options.split_whitespace()).current_dir(folder).output().unwrap()
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn processes_and_threads_come_to_the_same_weights() {
    let folder = tempdir().unwrap();
    for settings in [
        "--strategy gather",
        "--strategy reduce",
        "--strategy sharded",
        "--scheme dense --optimizer adam",
        "--local-steps 7 --optimizer adam --outer-momentum 0.5",
        "--warm-up 5 --bin-warm-up 40",
        "--local-steps 4 --strategy sharded --residual-decay 0.9",
    ] {
        let line = format!("train digits --steps 50 --minibatch 48 {settings}");
        let threads = local(folder.path(), &format!("{line} --learners 3"));
        assert_eq!(threads, checksum(over_mpi(folder.path(), 3, &line)), "{settings}");
    }
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn a_run_can_change_its_transport() {
    let folder = tempdir().unwrap();
    let uninterrupted =
        local(folder.path(), "train digits --steps 60 --learners 2 --schedule constant --strategy sharded");
    checksum(over_mpi(
        folder.path(),
        2,
        "train digits --steps 30 --schedule constant --strategy sharded --out run",
    ));
    let threads = local(folder.path(), "train --resume run --steps 45");
    assert_ne!(threads, uninterrupted);
    assert_eq!(checksum(over_mpi(folder.path(), 2, "train --resume run --steps 60")), uninterrupted);
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn as_many_learners_as_processes() {
    let folder = tempdir().unwrap();
    let output = over_mpi(folder.path(), 2, "train digits --learners 4");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("mpirun started 2 processes: leave --learners out"), "{text}");
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn schemes_can_be_compared_over_mpi() {
    let folder = tempdir().unwrap();
    let output = over_mpi(folder.path(), 2, "compare digits --epochs 2 --json --out run");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(last["adacomp"]["frame_ratio"]["matrix"].as_f64().unwrap() > 100.0, "{text}");
    assert!(folder.path().join("run/report.html").is_file());
    // In the folder of an older comparison a new one begins at the start, on all processes.
    let output = over_mpi(&folder.path().join("run"), 2, "compare digits --epochs 1");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("2 processes of one thread"), "{text}");
}

/// What only one process finds wrong ends all of them at once, and not when a timeout has passed.
#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn an_error_of_one_process_ends_all() {
    let folder = tempdir().unwrap();
    std::fs::create_dir(folder.path().join("full")).unwrap();
    std::fs::write(folder.path().join("full/something"), "here").unwrap();
    let start = std::time::Instant::now();
    let output = over_mpi(folder.path(), 3, "train digits --minibatch 48 --out full");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("full is not empty"), "{text}");
    assert!(!output.status.success());
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}
