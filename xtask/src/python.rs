//! The Python package: built, installed as a user would, and tested with real processes.

use crate::shell::{Result, command, install, output, root, run};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The environment that the tests run in, with PyTorch.
pub(crate) fn environment() -> PathBuf {
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

/// What fetches PyTorch, three gigabytes, while other steps keep the processor busy.
static FETCHING: Mutex<Option<Child>> = Mutex::new(None);

/// Starts to put what the tests need into their environment.
pub(crate) fn fetch_ahead() -> Result {
    let environment = environment();
    make(&environment)?;
    let list = "import tomllib; project = tomllib.load(open('python/pyproject.toml', 'rb'))['project']; \
        print('\\n'.join(project['dependencies'] + project['optional-dependencies']['test']))";
    let packages = output(&mut python(&environment, &["-c", list]))?;
    let mut install = python(&environment, &INSTALL);
    let child = install.args(packages.lines()).spawn().map_err(|error| format!("{install:?}: {error}"))?;
    *fetching() = Some(child);
    Ok(())
}

/// Ends it, if some other step has failed.
pub(crate) fn stop_fetching() {
    if let Some(mut child) = fetching().take() {
        // It may have ended by itself, which is as good.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn fetching() -> MutexGuard<'static, Option<Child>> {
    FETCHING.lock().unwrap_or_else(PoisonError::into_inner)
}

const INSTALL: [&str; 5] = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];

/// All of it: style, the source distribution, the wheel where there is no Rust, and the tests.
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
pub(crate) fn prepare() -> Result {
    if fetching().is_none() {
        fetch_ahead()?;
    }
    let fetched = fetching().take().map(|mut child| child.wait());
    if !fetched.is_some_and(|status| status.is_ok_and(|status| status.success())) {
        return Err("what the Python package needs could not be installed".to_owned());
    }
    run(python(&environment(), &INSTALL).args(["--force-reinstall", "--no-deps", "./python"]))
}

/// The wheel, made from the source distribution as users without one for their machine would, in a fresh environment and with
/// nothing of Rust on the path.
fn wheel_without_rust() -> Result {
    let [sources, wheels, fresh] =
        ["sources", "wheels", "python-fresh"].map(|name| root().join("target").join(name));
    for folder in [&sources, &wheels, &fresh] {
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
    }
    let pack = ["-m", "maturin", "sdist", "--manifest-path", "python/Cargo.toml", "--out"];
    run(python(&environment(), &pack).arg(&sources))?;
    let build =
        ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "-w"];
    run(python(&environment(), &build).arg(&wheels).arg(only_file(&sources)?))?;
    let wheel = only_file(&wheels)?;
    if !wheel.to_string_lossy().contains("-abi3-") {
        return Err(format!("{} is for one version of Python only", wheel.display()));
    }
    make(&fresh)?;
    run(python(&fresh, &INSTALL).arg(&wheel))?;
    let program = "import shutil, adacomp; assert shutil.which('cargo') is None and shutil.which('rustc') is None; \
        layout = adacomp.Layout([('w', (40, 50), None)]); compressor = adacomp.Compressor(layout); \
        import numpy; compressor.compress({'w': numpy.ones(2000, 'f')}); print('wheel:', len(compressor.encode()), 'bytes')";
    print!("{}", output(python(&fresh, &["-c", program]).env("PATH", fresh.join("bin")).current_dir("/"))?);
    Ok(())
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    match files.map(|file| file.path()).collect::<Vec<_>>().as_slice() {
        [file] => Ok(file.clone()),
        files => Err(format!("{} has {} files where one should be", folder.display(), files.len())),
    }
}
