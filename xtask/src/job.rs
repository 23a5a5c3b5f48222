//! What a step runs: programs whose output goes to the step's log.

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
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
    pub(crate) fn to_terminal() -> Result<Self> {
        Self::new(None)
    }

    pub(crate) fn to_log(path: &Path) -> Result<Self> {
        Self::new(Some(File::create(path).with_context(|| path.display().to_string())?))
    }

    fn new(log: Option<File>) -> Result<Self> {
        let sh = Shell::new()?;
        sh.change_dir(root());
        Ok(Self { sh, log })
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, cmd: Cmd<'_>) -> Result<()> {
        let shown = self.announce(&cmd)?;
        let mut command = Command::from(cmd);
        if let Some(log) = &self.log {
            command.stdout(log.try_clone()?).stderr(log.try_clone()?);
        }
        let status = command.stdin(Stdio::null()).status().with_context(|| shown.clone())?;
        if status.success() { Ok(()) } else { bail!("{shown}: {status}") }
    }

    /// Runs a program to its end and returns what it prints.
    pub(crate) fn output(&self, cmd: Cmd<'_>) -> Result<String> {
        let shown = self.announce(&cmd)?;
        let mut command = Command::from(cmd);
        if let Some(log) = &self.log {
            command.stderr(log.try_clone()?);
        }
        let output = command.stdin(Stdio::null()).output().with_context(|| shown.clone())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() { Ok(text) } else { bail!("{text}{shown}: {}", output.status) }
    }

    fn announce(&self, cmd: &Cmd<'_>) -> Result<String> {
        let shown = cmd.to_string();
        self.say(&format!("$ {shown}"))?;
        Ok(shown)
    }

    pub(crate) fn say(&self, line: &str) -> Result<()> {
        match self.log.as_ref() {
            Some(mut log) => writeln!(log, "{line}")?,
            None => println!("{line}"),
        }
        Ok(())
    }

    /// Returns `cargo`, to be used for building. It gives way to tests, some of which measure time.
    pub(crate) fn cargo(&self) -> Cmd<'_> {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        cmd!(self.sh, "nice -n 10 {cargo}")
    }

    /// Returns `cargo`, to be used for running tests.
    pub(crate) fn cargo_now(&self) -> Cmd<'_> {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        cmd!(self.sh, "{cargo}")
    }

    /// Makes sure that a component of the toolchain is there.
    pub(crate) fn component(&self, name: &str, subcommand: &str) -> Result<()> {
        if self.output(self.cargo_now().args([subcommand, "--version"])).is_ok() {
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
        let names = &missing;
        let _variable = self.sh.push_env("DEBIAN_FRONTEND", "noninteractive");
        // Another step may be installing, too.
        let apt = ["-qq", "-o", "DPkg::Lock::Timeout=600"];
        self.run(cmd!(self.sh, "apt-get {apt...} update"))
            .and_then(|()| {
                self.run(cmd!(self.sh, "apt-get {apt...} install -y --no-install-recommends {names...}"))
            })
            .with_context(|| format!("install the Debian packages {} or their like", names.join(" ")))
    }

    /// Makes an empty folder under `target`.
    pub(crate) fn empty_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = root().join("target").join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
        }
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(folder)
    }
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).exists())
}
