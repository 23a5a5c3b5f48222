//! `cargo xtask`: the one test command, and what needs set-up.

mod bench;
mod documents;
mod fuzz;
mod python;
mod release;
mod step;
mod test;

use anyhow::Result;
use clap::Parser;
use std::process::ExitCode;
use step::Job;

#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", about = "Tests, benchmarks and releases the project")]
enum Command {
    /// Runs everything that must be true before a change lands, or some parts of it
    Test {
        /// Parts to run [default: all]
        #[arg(value_enum)]
        parts: Vec<test::Part>,
        /// Add what takes longer: valgrind, fuzzing, clusters, documentation, packages, benchmarks
        #[arg(long)]
        full: bool,
    },
    /// Runs the benchmarks of the core and of the exchange, and compares ratios with those of a committed run
    Bench {
        /// Only show that they run
        #[arg(long)]
        quick: bool,
        /// Make this run the one to compare with
        #[arg(long, conflicts_with = "quick")]
        write: bool,
    },
    /// Makes the files of a release in target/release-files, after checking licences and versions
    Release,
    /// Fuzzes one target of fuzz/Cargo.toml
    Fuzz {
        target: String,
        #[arg(default_value_t = 10_000_000)]
        runs: u64,
    },
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Test { parts, full } => test::run(&parts, full),
        Command::Bench { quick, write } => bench::run(&Job::new(None)?, quick, write),
        Command::Release => release::run(&Job::new(None)?),
        Command::Fuzz { target, runs } => fuzz::run(&Job::new(None)?, &target, runs),
    }
}
