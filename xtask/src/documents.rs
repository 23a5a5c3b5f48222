//! Documents: generated parts, links, and the README's commands.

use crate::python;
use crate::step::{Job, root};
use anyhow::{Result, ensure};
use xshell::cmd;

/// Commands of the README that steps run as they are.
const RUN_BY_STEPS: [&str; 4] = [
    "cargo run --release",
    "cargo xtask test",
    "pip install './python[torch]'",
    "torchrun --nproc-per-node 2 python/examples/ddp_mnist.py",
];

/// What all other commands start with; `--full` runs them.
const PROGRAM: &str = "cargo run --release -- ";

pub(crate) fn check(job: &Job) -> Result<()> {
    let python = python::interpreter();
    job.run(cmd!(job.sh, "{python} -m reproduction check"))?;
    for command in &readme_commands(job)? {
        ensure!(
            RUN_BY_STEPS.contains(&command.as_str()) || command.starts_with(PROGRAM),
            "no step runs the README's `{command}`: see RUN_BY_STEPS in xtask/src/documents.rs"
        );
    }
    let dead = dead_links(job)?;
    ensure!(dead.is_empty(), "links that lead nowhere:\n{}", dead.join("\n"));
    Ok(())
}

/// Runs the commands of the README that no other step runs.
pub(crate) fn run_readme(job: &Job) -> Result<()> {
    let commands = readme_commands(job)?;
    commands
        .iter()
        .filter(|command| command.starts_with(PROGRAM))
        .try_for_each(|command| job.run(cmd!(job.sh, "sh -c {command}")))
}

/// Returns the lines of the README's shell blocks.
fn readme_commands(job: &Job) -> Result<Vec<String>> {
    let text = job.sh.read_file("README.md")?;
    let blocks = text.split("```").skip(1).step_by(2);
    let shell = blocks.filter_map(|block| block.strip_prefix("sh\n").or(block.strip_prefix("bash\n")));
    let line = |line: &str| line.split(" #").next().unwrap_or_default().trim().to_owned();
    Ok(shell.flat_map(str::lines).map(line).filter(|line| !line.is_empty()).collect())
}

/// Returns links of our documents to files that are not there.
fn dead_links(job: &Job) -> Result<Vec<String>> {
    let mut dead = Vec::new();
    for file in job.output(cmd!(job.sh, "git ls-files *.md"))?.lines() {
        let path = root().join(file);
        let text = job.sh.read_file(&path)?;
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let own = targets.filter(|target| !target.is_empty() && !target.contains("://"));
        let missing = own.filter(|target| !path.parent().unwrap_or(&path).join(target).exists());
        dead.extend(missing.map(|target| format!("{file}: {target}")));
    }
    Ok(dead)
}
