//! Steps: what they run, with a log for each, and how they run side by side, in one thread a lane.

use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};
use xshell::{Cmd, Shell, cmd};

/// Steps of a lane run one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Downloads, which need no processor.
    Fetch,
    /// What builds with Burn, and what comes before it.
    Main,
    /// What need not wait for Burn.
    Beside,
}

/// Something that must be true, or be there.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) lane: Lane,
    /// Steps that must have ended well before. They come earlier in the list.
    pub(crate) needs: &'static [&'static str],
    pub(crate) run: fn(&Job) -> Result<()>,
}

pub(crate) const fn step(
    name: &'static str,
    lane: Lane,
    needs: &'static [&'static str],
    run: fn(&Job) -> Result<()>,
) -> Step {
    Step { name, lane, needs, run }
}

/// How a step has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    Passed,
    Failed,
    /// A step that it needs has not passed.
    Skipped,
}

/// A step that has ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) name: &'static str,
    pub(crate) end: End,
    pub(crate) time: Duration,
}

/// Runs all steps; one that fails does not keep others from running, but for those that need it.
pub(crate) fn run(steps: &[Step]) -> Result<Vec<Ended>> {
    let logs = root().join("target/test-logs");
    fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
    let board = Board::default();
    std::thread::scope(|scope| {
        for lane in [Lane::Fetch, Lane::Main, Lane::Beside] {
            let (board, logs) = (&board, &logs);
            scope.spawn(move || {
                for step in steps.iter().filter(|step| step.lane == lane) {
                    let path = logs.join(format!("{}.log", step.name.replace(' ', "-")));
                    let can_run = board.wait_for(step.needs);
                    let start = Instant::now();
                    let end = if can_run {
                        println!(">> {}", step.name);
                        let result = Job::new(Some(&path)).and_then(|job| (step.run)(&job));
                        show(step.name, &path, result, start.elapsed())
                    } else {
                        println!("<< {}: skipped", step.name);
                        End::Skipped
                    };
                    board.add(Ended { name: step.name, end, time: start.elapsed() });
                }
            });
        }
    });
    Ok(board.ended.into_inner().expect(LOCK))
}

/// Prints a step's log once it has ended, in one piece.
fn show(name: &str, log: &Path, result: Result<()>, time: Duration) -> End {
    let text = fs::read(log).unwrap_or_default();
    let (end, word) = match result {
        Ok(()) => (End::Passed, "ok".to_owned()),
        Err(error) => (End::Failed, format!("FAILED: {error:#}")),
    };
    println!("{}<< {name}: {} s, {word}\n", String::from_utf8_lossy(&text), time.as_secs());
    end
}

const LOCK: &str = "no thread panics while it holds the lock";

/// What has ended so far.
#[derive(Default)]
struct Board {
    ended: Mutex<Vec<Ended>>,
    changed: Condvar,
}

impl Board {
    /// Waits until these steps have ended; returns whether all have passed.
    fn wait_for(&self, names: &[&str]) -> bool {
        let mut ended = self.ended.lock().expect(LOCK);
        loop {
            let needed = ended.iter().filter(|step| names.contains(&step.name));
            if needed.clone().any(|step| step.end != End::Passed) {
                return false;
            }
            if needed.count() == names.len() {
                return true;
            }
            ended = self.changed.wait(ended).expect(LOCK);
        }
    }

    fn add(&self, step: Ended) {
        self.ended.lock().expect(LOCK).push(step);
        self.changed.notify_all();
    }
}

/// A step at work.
pub(crate) struct Job {
    pub(crate) sh: Shell,
    /// Where output goes; to the terminal without one.
    log: Option<File>,
}

/// Returns the workspace's folder.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the workspace").to_owned()
}

impl Job {
    /// Starts a step in the workspace's folder.
    pub(crate) fn new(log: Option<&Path>) -> Result<Self> {
        let create = |path: &Path| File::create(path).with_context(|| path.display().to_string());
        let sh = Shell::new()?;
        sh.change_dir(root());
        Ok(Self { sh, log: log.map(create).transpose()? })
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, cmd: Cmd<'_>) -> Result<()> {
        self.wait_for(cmd, false).map(drop)
    }

    /// Runs a program to its end and returns what it prints.
    pub(crate) fn output(&self, cmd: Cmd<'_>) -> Result<String> {
        self.wait_for(cmd, true)
    }

    fn wait_for(&self, cmd: Cmd<'_>, capture: bool) -> Result<String> {
        let shown = cmd.to_string();
        self.say(&format!("$ {shown}"))?;
        let mut command = Command::from(cmd);
        command.stdin(Stdio::null());
        if let Some(log) = &self.log {
            command.stdout(log.try_clone()?).stderr(log.try_clone()?);
        }
        if capture {
            command.stdout(Stdio::piped());
        }
        let output =
            command.spawn().and_then(|child| child.wait_with_output()).with_context(|| shown.clone())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{text}{shown}: {}", output.status);
        Ok(text)
    }

    pub(crate) fn say(&self, line: &str) -> Result<()> {
        match self.log.as_ref() {
            Some(mut log) => writeln!(log, "{line}")?,
            None => println!("{line}"),
        }
        Ok(())
    }

    /// Makes sure that a component of the toolchain is there.
    pub(crate) fn component(&self, name: &str, subcommand: &str) -> Result<()> {
        if self.output(cmd!(self.sh, "cargo {subcommand} --version")).is_ok() {
            return Ok(());
        }
        self.run(cmd!(self.sh, "rustup component add {name}"))
    }

    /// Makes sure that Debian packages are installed; of those whose program is there already, nothing is done.
    pub(crate) fn packages(&self, wanted: &[(&str, &[&str])]) -> Result<()> {
        let missing = wanted.iter().filter(|(program, _)| !is_on_path(program));
        let missing: Vec<&str> = missing.flat_map(|(_, packages)| packages.iter().copied()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let _variable = self.sh.push_env("DEBIAN_FRONTEND", "noninteractive");
        // Another step may be installing, too.
        let apt = ["-qq", "-o", "DPkg::Lock::Timeout=600"];
        let install = ["install", "-y", "--no-install-recommends"];
        self.run(cmd!(self.sh, "apt-get {apt...} update"))
            .and_then(|()| self.run(cmd!(self.sh, "apt-get {apt...} {install...}").args(&missing)))
            .with_context(|| format!("install the Debian packages {} or their like", missing.join(" ")))
    }

    /// Makes an empty folder under `target`.
    pub(crate) fn empty_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = root().join("target").join(name);
        self.sh.remove_path(&folder)?;
        Ok(self.sh.create_dir(&folder)?)
    }
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn a_failing_step_hides_only_those_that_need_it() {
        let steps = [
            step("schedule one", Lane::Fetch, &[], |_| bail!("wanted")),
            step("schedule two", Lane::Main, &["schedule one"], |_| Ok(())),
            step("schedule three", Lane::Main, &[], |_| Ok(())),
            step("schedule four", Lane::Beside, &["schedule three"], |_| Ok(())),
            step("schedule five", Lane::Beside, &["schedule two"], |_| Ok(())),
        ];
        let ended = run(&steps).unwrap();
        let end = |name| ended.iter().find(|ended| ended.name == name).unwrap().end.clone();
        assert_eq!(end("schedule one"), End::Failed);
        assert_eq!(end("schedule two"), End::Skipped);
        assert_eq!(end("schedule three"), End::Passed);
        assert_eq!(end("schedule four"), End::Passed);
        assert_eq!(end("schedule five"), End::Skipped);
    }
}
