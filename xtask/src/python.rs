//! The Python package: built, installed as a user would, and tested with real processes.

use crate::shell::{Result, command, install, output, root, run};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment that the tests run in, with PyTorch.
fn environment() -> PathBuf {
    root().join("target/python")
}

fn python(environment: &Path, arguments: &[&str]) -> Command {
    let mut python = Command::new(environment.join("bin/python"));
    python.args(arguments).current_dir(root());
    python
}

/// A new environment, or the one that is there.
fn make(environment: &Path) -> Result {
    if environment.join("bin/pip").exists() {
        return Ok(());
    }
    install("python3", &["python3", "python3-venv"])?;
    let make = || run(command("python3", &["-m", "venv", "--clear"]).arg(environment));
    // Debian's Python comes without what makes environments.
    make().or_else(|_| {
        println!("installing python3-venv");
        run(&mut command("apt-get", &["install", "-y", "-qq", "python3-venv"]))?;
        make()
    })
}

/// All of it: style, the wheel where there is no Rust, and the tests.
pub(crate) fn test() -> Result {
    prepare()?;
    let ruff =
        |arguments: &[&str]| run(python(&environment(), &["-m", "ruff"]).args(arguments).arg("python"));
    ruff(&["check"])?;
    ruff(&["format", "--check"])?;
    wheel_without_rust()?;
    run(&mut python(&environment(), &["-m", "pytest", "-q", "--durations=5", "python/tests"]))
}

/// The environment, with the package as it is now.
fn prepare() -> Result {
    let environment = environment();
    make(&environment)?;
    run(&mut python(
        &environment,
        &["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "./python[test]"],
    ))
}

/// The wheel, in a fresh environment and with nothing of Rust on the path.
fn wheel_without_rust() -> Result {
    let (wheels, fresh) = (root().join("target/wheels"), root().join("target/python-fresh"));
    for folder in [&wheels, &fresh] {
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
    }
    let build =
        ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "./python", "-w"];
    run(python(&environment(), &build).arg(&wheels))?;
    let wheel = std::fs::read_dir(&wheels).ok().and_then(|mut files| files.next()?.ok());
    let wheel = wheel.ok_or("no wheel was built")?.path();
    if !wheel.to_string_lossy().contains("-abi3-") {
        return Err(format!("{} is for one version of Python only", wheel.display()));
    }
    make(&fresh)?;
    run(python(&fresh, &["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).arg(&wheel))?;
    let program = "import shutil, adacomp; assert shutil.which('cargo') is None and shutil.which('rustc') is None; \
        layout = adacomp.Layout([('w', (40, 50), None)]); compressor = adacomp.Compressor(layout); \
        import numpy; compressor.compress({'w': numpy.ones(2000, 'f')}); print('wheel:', len(compressor.encode()), 'bytes')";
    print!("{}", output(python(&fresh, &["-c", program]).env("PATH", fresh.join("bin")).current_dir("/"))?);
    Ok(())
}
