//! Learners in processes of their own, by MPI. Every run has a time limit that ends all of its processes.
#![cfg(feature = "mpi")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const STRATEGIES: [&str; 4] = ["dense", "gather", "reduce", "sharded"];

/// The program that the learners run: `tests/rig/learner.rs`.
const LEARNER: &str = env!("CARGO_BIN_EXE_exchange-learner");

/// A folder of this test's own.
fn scratch(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("adacomp-mpi-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a scratch folder");
    folder
}

/// `mpirun` with so many learners; `timeout` ends it and all its children.
fn mpirun(learners: usize, flags: &[&str], arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "60", "mpirun", "--allow-run-as-root", "--oversubscribe"]);
    // Learners that wait must leave the cores to those that work.
    command.args(["--mca", "mpi_yield_when_idle", "1"]).args(flags);
    command.args(["-n", &learners.to_string()]).arg(LEARNER).arg("mpi").args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn local(learners: usize, arguments: &[&str]) -> BTreeSet<String> {
    let output = Command::new(LEARNER).args(["threads", &learners.to_string()]).args(arguments).output();
    lines(&output.expect("the learner runs"))
}

/// What learners print, in any order.
fn lines(output: &Output) -> BTreeSet<String> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn threads_and_processes_give_the_same_bits() {
    let mpi = lines(&mpirun(4, &[], &["--steps", "20"]).output().expect("mpirun"));
    assert_eq!(mpi.len(), 4 * STRATEGIES.len(), "{mpi:?}");
    assert_eq!(mpi, local(4, &["--steps", "20"]));
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn learners_that_differ_are_told_before_the_first_step() {
    let output = mpirun(3, &["--enable-recovery"], &["--differ", "1"]).output().expect("mpirun");
    let errors = String::from_utf8_lossy(&output.stderr);
    let told = "learner 1 does not fit learner 0: soft-threshold factor is 1, but 2 on learner 0";
    assert_eq!(errors.matches(told).count(), 3, "{errors}");
    assert!(output.stdout.is_empty());
}

/// Starts four learners and waits until one has stopped in this phase of step 5; its process.
fn stop_one(strategy: &str, phase: &str, state: &Path, flags: &[&str], timeout: &str) -> (Child, u32) {
    stop_one_at(strategy, "5", phase, state, flags, timeout)
}

fn stop_one_at(
    strategy: &str,
    step: &str,
    phase: &str,
    state: &Path,
    flags: &[&str],
    timeout: &str,
) -> (Child, u32) {
    let folder = state.to_str().expect("a readable path");
    let out = state.join("out");
    let arguments =
        ["--strategy", strategy, "--timeout-ms", timeout, "--stop", "2", step, phase, "--state", folder];
    let mut command = mpirun(4, flags, &arguments);
    command.stdout(std::fs::File::create(&out).expect("a file"));
    let child = command.spawn().expect("mpirun");
    let deadline = Instant::now() + Duration::from_secs(30);
    let stopped = || {
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("stopped ")?.trim().parse().ok())
    };
    while stopped().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    (child, stopped().expect("a learner that has stopped"))
}

fn kill(process: u32) {
    let status = Command::new("kill").args(["-9", &process.to_string()]).status();
    assert!(status.expect("kill").success());
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn a_killed_learner_ends_the_others_and_the_run_can_be_resumed() {
    let steps = ["--steps", "9"];
    for strategy in STRATEGIES {
        let undisturbed = local(4, &["--strategy", strategy, "--steps", "9"]);
        // Before it compresses, with a round under way, when messages have come, and before it saves.
        for phase in ["compress", "exchange", "decode", "save"] {
            let state = scratch(&format!("killed-{strategy}-{phase}"));
            let (child, process) = stop_one(strategy, phase, &state, &["--enable-recovery"], "1500");
            let killed = Instant::now();
            kill(process);
            let output = child.wait_with_output().expect("mpirun ends");
            assert!(killed.elapsed() < Duration::from_secs(15), "{phase}: {:?}", killed.elapsed());
            let errors = String::from_utf8_lossy(&output.stderr);
            let step = if phase == "save" { 6 } else { 5 };
            let told = format!("step {step}: no word from some learner within 1.5s");
            assert_eq!(errors.matches(&told).count(), 3, "{strategy} {phase}: {errors}");

            let folder = state.to_str().expect("a readable path");
            let resume = [&["--strategy", strategy, "--state", folder], &steps[..]].concat();
            let resumed = lines(&mpirun(4, &[], &resume).output().expect("mpirun"));
            assert_eq!(resumed, undisturbed, "{strategy} {phase}");
            std::fs::remove_dir_all(state).expect("the scratch folder");
        }
    }
}

/// As users run it: `mpirun` itself ends the job.
#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn without_recovery_mpirun_ends_the_job() {
    let state = scratch("ended");
    let (child, process) = stop_one("gather", "exchange", &state, &[], "60000");
    let killed = Instant::now();
    kill(process);
    let output = child.wait_with_output().expect("mpirun ends");
    assert!(!output.status.success());
    assert!(killed.elapsed() < Duration::from_secs(15));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("exited on signal 9"), "{errors}");
    std::fs::remove_dir_all(state).expect("the scratch folder");
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn a_learner_that_hangs_is_not_waited_for_longer_than_the_timeout() {
    let state = scratch("hangs");
    let (child, process) = stop_one("gather", "compress", &state, &["--enable-recovery"], "1500");
    let stopped = Instant::now();
    // The others end by themselves; the one that hangs is ended only then.
    std::thread::sleep(Duration::from_secs(4));
    kill(process);
    let output = child.wait_with_output().expect("mpirun ends");
    assert!(stopped.elapsed() < Duration::from_secs(10));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.matches("step 5: no word from some learner within 1.5s").count(), 3, "{errors}");
    std::fs::remove_dir_all(state).expect("the scratch folder");
}

/// Ending MPI waits for all learners; a learner that is done does not.
#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn a_learner_that_is_done_does_not_wait_for_one_that_hangs() {
    let state = scratch("done");
    let (child, process) = stop_one_at("gather", "19", "save", &state, &["--enable-recovery"], "1500");
    std::thread::sleep(Duration::from_secs(5));
    // mpirun's children by now: only the one that hangs.
    let running = Command::new("pgrep").args(["--parent", &mpirun_of(&child)]).output().expect("pgrep");
    let running = String::from_utf8_lossy(&running.stdout).trim().to_owned();
    kill(process);
    let output = child.wait_with_output().expect("mpirun ends");
    let printed = std::fs::read_to_string(state.join("out")).expect("what was printed");
    assert_eq!(
        printed.matches("gather learner").count(),
        3,
        "{printed}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(running, process.to_string());
    std::fs::remove_dir_all(state).expect("the scratch folder");
}

/// The process of `mpirun` itself, below its `timeout`.
fn mpirun_of(child: &Child) -> String {
    let found = Command::new("pgrep").args(["--parent", &child.id().to_string()]).output().expect("pgrep");
    String::from_utf8_lossy(&found.stdout).trim().to_owned()
}

/// Two network namespaces with a link between them; they go when this does.
struct TwoMachines {
    folder: PathBuf,
}

impl TwoMachines {
    fn new() -> Self {
        let machines = Self { folder: scratch("machines") };
        machines.delete();
        let commands = "\
            netns add adacomp-a
            netns add adacomp-b
            link add va netns adacomp-a type veth peer name vb netns adacomp-b
            -n adacomp-a addr add 10.77.0.1/24 dev va
            -n adacomp-b addr add 10.77.0.2/24 dev vb
            -n adacomp-a link set va up
            -n adacomp-b link set vb up
            -n adacomp-a link set lo up
            -n adacomp-b link set lo up";
        for command in commands.lines() {
            let status = Command::new("ip").args(command.split_whitespace()).status();
            assert!(status.expect("the ip command").success(), "ip {command}: this test needs root");
        }
        // In place of ssh: runs a command "on" a machine, under a name of its own.
        let agent = "#!/bin/sh\nif [ $1 = 10.77.0.1 ]; then machine=adacomp-a; else machine=adacomp-b; fi\nshift\n\
            exec ip netns exec $machine unshare --uts sh -c \"hostname $machine; $*\"\n";
        std::fs::write(machines.agent(), agent).expect("the agent");
        let status = Command::new("chmod").arg("+x").arg(machines.agent()).status();
        assert!(status.expect("chmod").success());
        machines
    }

    fn agent(&self) -> PathBuf {
        self.folder.join("agent")
    }

    fn delete(&self) {
        for machine in ["adacomp-a", "adacomp-b"] {
            let _ = Command::new("ip").args(["netns", "del", machine]).stderr(Stdio::null()).status();
        }
    }

    /// Bytes that have left a machine.
    fn left(&self, machine: &str, interface: &str) -> u64 {
        let file = format!("/sys/class/net/{interface}/statistics/tx_bytes");
        let output = Command::new("ip").args(["netns", "exec", machine, "cat", &file]).output().expect("ip");
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number of bytes")
    }
}

impl Drop for TwoMachines {
    fn drop(&mut self) {
        self.delete();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
#[ignore = "needs mpirun: run by cargo xtask test"]
fn the_network_carries_what_is_counted() {
    let machines = TwoMachines::new();
    let mut results = Vec::new();
    for strategy in STRATEGIES {
        let before = machines.left("adacomp-b", "vb");
        let run = format!(
            "hostname adacomp-a; exec mpirun --allow-run-as-root --mca plm_rsh_agent {} --mca btl tcp,self \
             --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
             -x ADACOMP_SHOW_TRAFFIC=1 -H 10.77.0.1:1,10.77.0.2:1 -n 2 {} mpi --strategy {strategy} \
             --elements 2000000 --steps 20",
            machines.agent().display(),
            LEARNER
        );
        let mut command = Command::new("timeout");
        command.args([
            "--kill-after=5",
            "120",
            "ip",
            "netns",
            "exec",
            "adacomp-a",
            "unshare",
            "--uts",
            "sh",
            "-c",
        ]);
        let printed = lines(&command.arg(run).output().expect("mpirun"));
        let sent = printed.iter().find_map(|line| line.strip_prefix(&format!("{strategy} 1 sent ")));
        let counted: u64 = sent.and_then(|bytes| bytes.parse().ok()).expect("a count of bytes");
        let carried = machines.left("adacomp-b", "vb") - before;
        results.push((strategy, counted, carried, carried as f64 / counted as f64));
    }
    println!("{results:?}");
    // Frames and acknowledgements of the network come on top, and the start of the processes.
    assert!(results.iter().all(|(_, _, _, ratio)| (1.0..1.06).contains(ratio)), "{results:?}");
}
