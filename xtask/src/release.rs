//! What a release consists of, and whether it could be made.

use crate::python;
use crate::step::{Job, root};
use anyhow::{Context, Result, ensure};
use xshell::cmd;

const CRATES: [&str; 4] = ["adacomp", "adacomp-exchange", "adacomp-burn", "adacomp-cli"];

/// Makes all files that are published: the crates, a source distribution and a wheel. Nothing is uploaded.
pub(crate) fn run(job: &Job) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    for (file, line) in
        [("CHANGELOG.md", format!("## {version}")), ("CITATION.cff", format!("version: {version}"))]
    {
        let text = job.sh.read_file(root().join(file))?;
        ensure!(text.lines().any(|each| each == line), "{file} does not have the line {line:?}");
    }
    dependencies(job)?;
    packages(job)?;
    let folder = job.empty_folder("release-files")?;
    for name in CRATES {
        let package = root().join(format!("target/package/{name}-{version}.crate"));
        job.sh.copy_file(&package, &folder).with_context(|| format!("{name} has made no package"))?;
    }
    python::release(job, &folder)?;
    println!("the files of {version} are in {}", folder.display());
    Ok(())
}

/// Checks licences and sources of all that users can build, and versions of all but Burn's crates for GPUs.
pub(crate) fn dependencies(job: &Job) -> Result<()> {
    let tools = root().join("target/tools");
    let deny = tools.join("bin/cargo-deny");
    if !deny.exists() {
        // Without optimisation it takes a fifth of the time to build, and checks in seconds all the same.
        let _debug = job.sh.push_env("CARGO_PROFILE_DEV_DEBUG", "0");
        let plain = ["--locked", "--quiet", "--debug", "--no-default-features"];
        job.run(cmd!(job.sh, "nice cargo install {plain...} cargo-deny --root {tools}"))?;
    }
    job.run(cmd!(job.sh, "{deny} --all-features --exclude xtask check licenses sources"))?;
    job.run(cmd!(job.sh, "{deny} --features mpi --exclude xtask check bans"))
}

/// Checks that the crates make packages.
pub(crate) fn packages(job: &Job) -> Result<()> {
    let package = ["package", "--locked", "--allow-dirty", "--quiet"];
    for name in CRATES {
        let files = job.output(cmd!(job.sh, "cargo {package...} --list -p {name}"))?;
        for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
            ensure!(files.lines().any(|line| line == file), "the package {name} has no {file}");
        }
    }
    let all = CRATES.iter().flat_map(|name| ["-p", name]);
    job.run(cmd!(job.sh, "nice cargo {package...} --no-verify {all...}"))?;
    // Built from its package. The others would be built against packages of the same version that cargo keeps from earlier times.
    job.run(cmd!(job.sh, "nice cargo {package...} -p adacomp"))
}
