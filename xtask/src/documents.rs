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

/// Returns links of our documents to files, or to sections of these, that are not there.
fn dead_links(job: &Job) -> Result<Vec<String>> {
    let mut dead = Vec::new();
    for file in job.output(cmd!(job.sh, "git ls-files *.md"))?.lines() {
        let path = root().join(file);
        let text = job.sh.read_file(&path)?;
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for link in links.filter(|link| !link.contains("://")) {
            let (target, section) = link.split_once('#').unwrap_or((link, ""));
            let target =
                if target.is_empty() { path.clone() } else { path.parent().unwrap_or(&path).join(target) };
            let is_there = target.exists()
                && (section.is_empty() || sections(&job.sh.read_file(&target)?).any(|one| one == section));
            if !is_there {
                dead.push(format!("{file}: {link}"));
            }
        }
    }
    Ok(dead)
}

/// Returns the names by which links lead to the headings of a document.
fn sections(text: &str) -> impl Iterator<Item = String> {
    let outside_of_code = text.split("```").step_by(2);
    let headings = outside_of_code.flat_map(str::lines).filter(|line| line.starts_with('#'));
    headings.map(|line| {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|&letter| letter.is_alphanumeric() || " -_".contains(letter));
        kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
    })
}
