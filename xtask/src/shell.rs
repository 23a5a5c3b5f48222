//! Running other programs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

pub(crate) type Result<T = ()> = std::result::Result<T, String>;

/// The workspace's folder.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the workspace").to_owned()
}

/// A program that will run in the workspace's folder.
pub(crate) fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root());
    command
}

pub(crate) fn cargo(arguments: &[&str]) -> Command {
    command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()), arguments)
}

/// Runs it to its end, its output on ours.
pub(crate) fn run(command: &mut Command) -> Result {
    let status = command.status().map_err(|error| format!("{command:?}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}")) }
}

/// Runs it to its end, for what it prints.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() { Ok(text) } else { Err(format!("{text}{command:?}: {}", output.status)) }
}

/// Makes sure that these Debian packages are installed, if `probe` is not there yet.
pub(crate) fn install(probe: &str, packages: &[&str]) -> Result {
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&on_path).any(|folder| folder.join(probe).exists()) {
        return Ok(());
    }
    println!("installing {}", packages.join(" "));
    let mut update = command("apt-get", &["update", "-qq"]);
    let mut install = command("apt-get", &["install", "-y", "-qq", "--no-install-recommends"]);
    install.args(packages).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
    run(&mut update).and_then(|()| run(&mut install)).map_err(|error| {
        format!(
            "{error}\n`{probe}` is needed: install the Debian packages {} or their like",
            packages.join(" ")
        )
    })
}
