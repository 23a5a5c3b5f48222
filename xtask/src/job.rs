//! What a step runs: programs whose output goes to the step's log.

use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xshell::{Cmd, Shell, cmd};

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
