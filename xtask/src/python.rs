//! The Python package: built, installed as a user would, and tested with real processes.

use crate::step::{Job, root};
use anyhow::{Result, bail, ensure};
use std::path::{Path, PathBuf};
use xshell::cmd;

/// Returns the Python that tests use, with PyTorch.
pub(crate) fn interpreter() -> PathBuf {
    root().join("target/python/bin/python")
}

const INSTALL: [&str; 5] = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];

/// Prints what the tests need; the package itself is built later.
const REQUIREMENTS: &str = "\
import tomllib; project = tomllib.load(open('python/pyproject.toml', 'rb'))['project']; \
print('\\n'.join(project['dependencies'] + project['optional-dependencies']['test']))";

/// Makes the environment and fetches PyTorch, three gigabytes.
pub(crate) fn fetch(job: &Job) -> Result<()> {
    job.packages(&[("python3", &["python3"])])?;
    make_environment(job, &root().join("target/python"))?;
    let python = interpreter();
    let packages = job.output(cmd!(job.sh, "{python} -c {REQUIREMENTS}"))?;
    let install = cmd!(job.sh, "{python} {INSTALL...} -r reproduction/requirements.txt");
    job.run(install.args(packages.lines()))
}

fn make_environment(job: &Job, folder: &Path) -> Result<()> {
    if folder.join("bin/pip").exists() {
        return Ok(());
    }
    let make = || job.run(cmd!(job.sh, "python3 -m venv --clear {folder}"));
    // Debian's Python comes without what makes environments.
    make().or_else(|_| {
        job.run(cmd!(job.sh, "apt-get install -y -qq python3-venv"))?;
        make()
    })
}

/// Builds the package and installs it.
pub(crate) fn install(job: &Job) -> Result<()> {
    // Not the target folder of the other crates, whose lock is held while Burn is built.
    let _folder = job.sh.push_env("CARGO_TARGET_DIR", root().join("target/wheel"));
    let python = interpreter();
    job.run(cmd!(job.sh, "{python} {INSTALL...} --force-reinstall --no-deps ./python"))
}

/// Style, types, and lints of the binding.
pub(crate) fn lints(job: &Job) -> Result<()> {
    let python = interpreter();
    job.run(cmd!(job.sh, "{python} -m ruff check python reproduction"))?;
    job.run(cmd!(job.sh, "{python} -m ruff format --check python reproduction"))?;
    job.run(cmd!(job.sh, "{python} -m mypy --config-file reproduction/mypy.ini reproduction"))?;
    {
        let _folder = job.sh.push_dir("python");
        job.run(cmd!(job.sh, "{python} -m mypy --strict adacomp tests/typed.py"))?;
    }
    let _folder = job.sh.push_env("CARGO_TARGET_DIR", root().join("target/wheel"));
    job.run(cmd!(job.sh, "nice cargo clippy --release --locked -p adacomp-python -- -D warnings"))
}

pub(crate) fn tests(job: &Job) -> Result<()> {
    let python = interpreter();
    job.run(cmd!(job.sh, "{python} -m pytest -q --durations=10 reproduction"))?;
    job.run(cmd!(job.sh, "{python} -m pytest -q --durations=10 python/tests"))
}

/// A minute of training in which learners are killed, and the same without.
pub(crate) fn endurance(job: &Job) -> Result<()> {
    let python = interpreter();
    job.run(cmd!(job.sh, "{python} python/tests/endurance.py --minutes 1"))
}

/// Builds a wheel from the source distribution, as users without one for their machine would.
pub(crate) fn source_distribution(job: &Job) -> Result<()> {
    let [sources, wheels] = [job.empty_folder("sources")?, job.empty_folder("wheels")?];
    let python = interpreter();
    job.run(cmd!(job.sh, "{python} -m maturin sdist --manifest-path python/Cargo.toml --out {sources}"))?;
    let source = only_file(job, &sources)?;
    let build = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "-w"];
    job.run(cmd!(job.sh, "{python} -m pip wheel {build...} {wheels} {source}"))?;
    use_wheel(job, &only_file(job, &wheels)?)
}

/// Makes what the package index would get: the source distribution, and a wheel for Linux with the C library of 2014 or newer.
pub(crate) fn release(job: &Job, folder: &Path) -> Result<()> {
    fetch(job)?;
    let python = interpreter();
    // The linker of Zig knows the symbols of old C libraries.
    job.run(cmd!(job.sh, "{python} {INSTALL...} maturin[zig]"))?;
    let _path = job.sh.push_env("PATH", with_path(python.parent())?);
    let _folder = job.sh.push_env("CARGO_TARGET_DIR", root().join("target/wheel"));
    let manifest = ["--manifest-path", "python/Cargo.toml", "--out"];
    job.run(cmd!(job.sh, "{python} -m maturin sdist {manifest...} {folder}"))?;
    let build = ["--release", "--locked", "--strip", "--zig", "--compatibility", "manylinux2014"];
    job.run(cmd!(job.sh, "nice {python} -m maturin build {build...} {manifest...} {folder}"))?;
    let wheels =
        job.sh.read_dir(folder)?.into_iter().filter(|file| file.extension().is_some_and(|end| end == "whl"));
    wheels.into_iter().try_for_each(|wheel| use_wheel(job, &wheel))
}

/// Returns the search path with a folder before all others.
fn with_path(first: Option<&Path>) -> Result<std::ffi::OsString> {
    let others = std::env::var_os("PATH").unwrap_or_default();
    let folders = first.into_iter().map(PathBuf::from).chain(std::env::split_paths(&others));
    Ok(std::env::join_paths(folders)?)
}

/// Uses a wheel in a fresh environment, with nothing of Rust on the path.
fn use_wheel(job: &Job, wheel: &Path) -> Result<()> {
    let is_abi3 = wheel.to_string_lossy().contains("-abi3-");
    ensure!(is_abi3, "{} is for one version of Python only", wheel.display());
    let fresh = job.empty_folder("python-fresh")?;
    make_environment(job, &fresh)?;
    let python = fresh.join("bin/python");
    job.run(cmd!(job.sh, "{python} {INSTALL...} {wheel}"))?;
    let program = "import shutil, numpy; from adacomp.research import Compressor, Layout; \
        assert shutil.which('cargo') is None and shutil.which('rustc') is None; \
        compressor = Compressor(Layout([('w', (40, 50), None)])); \
        compressor.compress({'w': numpy.ones(2000, 'f')}); print('wheel:', len(compressor.encode()), 'bytes')";
    let _path = job.sh.push_env("PATH", fresh.join("bin"));
    let _folder = job.sh.push_dir("/");
    job.run(cmd!(job.sh, "{python} -c {program}"))
}

fn only_file(job: &Job, folder: &Path) -> Result<PathBuf> {
    match job.sh.read_dir(folder)?.as_slice() {
        [file] => Ok(file.clone()),
        files => bail!("{} has {} files where one should be", folder.display(), files.len()),
    }
}
