//! A learner of the benchmark on each machine.

use crate::machines::{Machines, name, run_together};
use crate::python;
use crate::shell::{Result, root};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// A run that takes longer is given up.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// What every learner does.
pub(super) struct Learning<'a> {
    pub(super) workload: &'a str,
    pub(super) learners: usize,
    pub(super) arguments: Vec<String>,
    pub(super) allocator: Allocator,
}

/// What becomes of freed memory.
#[derive(Clone, Copy)]
pub(super) enum Allocator {
    /// It stays with the process, as with the allocators that PyTorch's guide to tuning advises. Without it a third of a step is
    /// the kernel's, handing out cleared pages for each gradient.
    Keeps,
    /// It goes back at once, so that what the process has is what is in use.
    GivesBack,
}

impl Allocator {
    fn settings(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Keeps => &[("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "1000000000000")],
            Self::GivesBack => &[("MALLOC_MMAP_THRESHOLD_", "65536")],
        }
    }
}

impl Learning<'_> {
    /// The lines of results of the first learner.
    pub(super) fn run(&self, machines: &Machines) -> Result<Vec<String>> {
        let learners = (0..self.learners).map(|machine| self.learner(machines, machine));
        run_together(learners.collect::<Result<_>>()?, LIMIT)?;
        let output = fs::read_to_string(output_file(0)).map_err(|error| error.to_string())?;
        let lines: Vec<_> = output.lines().filter(|line| line.starts_with('{')).map(str::to_owned).collect();
        if lines.is_empty() { Err(format!("no results:\n{output}")) } else { Ok(lines) }
    }

    fn learner(&self, machines: &Machines, machine: usize) -> Result<Command> {
        let file = fs::File::create(output_file(machine)).map_err(|error| error.to_string())?;
        let mut learner = machines.on(machine);
        learner.arg(python::environment().join("bin/python"));
        learner.args(["python/benches/network.py", self.workload, "--interface", "eth"]);
        learner.args(&self.arguments);
        learner.envs([
            ("MASTER_ADDR", name(0).as_str()),
            ("MASTER_PORT", "29500"),
            ("GLOO_SOCKET_IFNAME", "eth"),
        ]);
        learner.env("RANK", machine.to_string()).env("WORLD_SIZE", self.learners.to_string());
        learner.envs(self.allocator.settings().iter().copied());
        learner.stdout(file);
        Ok(learner)
    }
}

fn output_file(machine: usize) -> PathBuf {
    root().join(format!("target/network-{machine}.log"))
}
