//! Whether a release could be made.

use crate::step::{Job, root};
use anyhow::{Result, ensure};
use xshell::cmd;

const CRATES: [&str; 4] = ["adacomp", "adacomp-exchange", "adacomp-burn", "adacomp-cli"];

/// Checks licences, versions and sources of all that users build.
pub(crate) fn dependencies(job: &Job) -> Result<()> {
    let tools = root().join("target/tools");
    let deny = tools.join("bin/cargo-deny");
    if !deny.exists() {
        // Without optimisation it takes a fifth of the time to build, and checks in seconds all the same.
        let _debug = job.sh.push_env("CARGO_PROFILE_DEV_DEBUG", "0");
        let plain = ["--locked", "--quiet", "--debug", "--no-default-features"];
        job.run(cmd!(job.sh, "nice cargo install {plain...} cargo-deny --root {tools}"))?;
    }
    job.run(cmd!(job.sh, "{deny} --all-features --exclude xtask check licenses bans sources"))
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
