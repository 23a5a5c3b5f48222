//! `cargo xtask bench network`: learners in network namespaces of their own, over links of several speeds.

mod learning;
mod picture;
mod report;

use crate::machines::{Machines, inside, is_inside};
use crate::python;
use crate::shell::{Result, root};
use learning::{Allocator, Learning};
use report::Results;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// A link: how it is called, what the kernel calls its speed, and how often each method takes its turn, for how many seconds.
struct Link {
    name: &'static str,
    rate: Option<&'static str>,
    turns: u32,
    seconds: u32,
}

const LINKS: [Link; 5] = [
    Link { name: "unshaped", rate: None, turns: 2, seconds: 4 },
    Link { name: "10gbit", rate: Some("10gbit"), turns: 2, seconds: 4 },
    Link { name: "1gbit", rate: Some("1gbit"), turns: 2, seconds: 6 },
    Link { name: "100mbit", rate: Some("100mbit"), turns: 2, seconds: 10 },
    Link { name: "10mbit", rate: Some("10mbit"), turns: 1, seconds: 20 },
];

const WORKLOADS: [&str; 3] = ["mlp", "resnet18", "lstm"];
const LEARNERS: [usize; 2] = [2, 4];
const METHODS: [&str; 11] = [
    "builtin",
    "fp16",
    "bf16",
    "powersgd-1",
    "powersgd-4",
    "top-k",
    "gather",
    "reduce",
    "sharded",
    "auto",
    "none",
];

/// What is to be measured.
#[derive(Default)]
struct Wanted {
    links: Vec<&'static str>,
    workloads: Vec<&'static str>,
    learners: Vec<usize>,
    methods: Vec<&'static str>,
    memory: bool,
}

impl Wanted {
    /// From words such as `mlp 2 1gbit`; of what is not mentioned, all.
    fn read(words: &[&str]) -> Result<Self> {
        let mut wanted = Self::default();
        for word in words {
            let named = |names: &[&'static str]| names.iter().find(|name| *name == word).copied();
            let learners = LEARNERS.iter().find(|number| number.to_string() == *word);
            if let Some(link) = named(&LINKS.map(|link| link.name)) {
                wanted.links.push(link);
            } else if let Some(workload) = named(&WORKLOADS) {
                wanted.workloads.push(workload);
            } else if let Some(method) = named(&METHODS) {
                wanted.methods.push(method);
            } else if let Some(learners) = learners {
                wanted.learners.push(*learners);
            } else if *word == "memory" {
                wanted.memory = true;
            } else {
                return Err(format!(
                    "`{word}`: expected a link ({}), a workload ({}), a number of learners (2, 4), a method ({}), or `memory`",
                    LINKS.map(|link| link.name).join(", "),
                    WORKLOADS.join(", "),
                    METHODS.join(", ")
                ));
            }
        }
        Ok(wanted)
    }
}

fn among<T: PartialEq>(wanted: &[T], one: &T) -> bool {
    wanted.is_empty() || wanted.contains(one)
}

/// Whether the document shows what was measured.
pub(crate) fn check() -> Result {
    report::check()
}

/// Runs what is not in the results yet, and writes them down anew; with `memory` that part only. With chosen methods it prints only.
pub(crate) fn bench(words: &[&str]) -> Result {
    if words == ["report"] {
        return report::write();
    }
    let wanted = Wanted::read(words)?;
    if !is_inside() {
        python::prepare()?;
    }
    let mut all = vec!["bench", "network"];
    all.extend(words);
    if !inside(&all)? {
        return report::write();
    }
    for learners in LEARNERS.into_iter().filter(|learners| among(&wanted.learners, learners)) {
        for link in LINKS.iter().filter(|link| among(&wanted.links, &link.name)) {
            for workload in WORKLOADS.into_iter().filter(|workload| among(&wanted.workloads, workload)) {
                if !wanted.memory {
                    measure(workload, learners, link, &wanted.methods)?;
                }
                // What it is does not depend on the link, nor much on the number of learners.
                let asked = wanted.memory || wanted.methods.is_empty();
                if asked && learners == LEARNERS[0] && link.rate.is_none() {
                    memory(workload, learners, &wanted.methods)?;
                }
            }
        }
    }
    Ok(())
}

/// Where results are kept, a line for each method.
fn results() -> PathBuf {
    root().join("docs/results/network.jsonl")
}

fn measure(workload: &str, learners: usize, link: &Link, methods: &[&str]) -> Result {
    println!("{workload}, {learners} learners, {}", link.name);
    let done = Results::read()?;
    let is_done = |method: &&str| done.get(workload, learners, link.name, method).is_some();
    if methods.is_empty() && METHODS.iter().all(is_done) {
        println!("is there already");
        return Ok(());
    }
    let start = Instant::now();
    let machines = Machines::new(learners, link.rate)?;
    // The mlp is what claims are made about; the others' turns are long enough once they share cores.
    let turns = if learners > 2 && workload != "mlp" { 1 } else { link.turns };
    let mut arguments = vec![
        "--states".to_owned(),
        root().join("target/network").display().to_string(),
        "--blocks".to_owned(),
        turns.to_string(),
        "--budget".to_owned(),
        link.seconds.to_string(),
    ];
    if !methods.is_empty() {
        arguments.extend(["--methods".to_owned(), methods.join(",")]);
    }
    let lines = Learning { workload, learners, arguments, allocator: Allocator::Keeps }.run(&machines)?;
    let lines = lines.iter().map(|line| line.replacen('{', &format!("{{\"link\": \"{}\", ", link.name), 1));
    let lines: Vec<_> = lines.collect();
    println!("{}\n{} s", lines.join("\n"), start.elapsed().as_secs());
    if methods.is_empty() { keep(&lines) } else { Ok(()) }
}

/// The most memory that learners take, each method in processes of its own.
fn memory(workload: &str, learners: usize, methods: &[&str]) -> Result {
    println!("{workload}, {learners} learners: memory");
    let done = Results::read()?;
    let machines = Machines::new(learners, None)?;
    for method in METHODS.iter().filter(|method| among(methods, method)) {
        if methods.is_empty() && done.has_peak(workload, method) {
            continue;
        }
        let arguments = vec!["--memory".to_owned(), "--methods".to_owned(), (*method).to_owned()];
        let lines =
            Learning { workload, learners, arguments, allocator: Allocator::GivesBack }.run(&machines)?;
        println!("{}", lines.join("\n"));
        if methods.is_empty() {
            keep(&lines)?;
        }
    }
    Ok(())
}

fn keep(lines: &[String]) -> Result {
    let failed = |error: std::io::Error| format!("{}: {error}", results().display());
    fs::create_dir_all(results().parent().unwrap_or(&root())).map_err(failed)?;
    let mut file = OpenOptions::new().append(true).create(true).open(results()).map_err(failed)?;
    lines.iter().try_for_each(|line| writeln!(file, "{line}")).map_err(failed)
}
