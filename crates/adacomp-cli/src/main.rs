//! The program `adacomp`: trains models with many learners, dense and with AdaComp, and shows the result.

mod args;
mod checkpoint;
mod commands;
mod config;
mod data;
mod draw;
mod endpoint;
mod engine;
mod files;
mod history;
mod meter;
mod models;
mod optimizer;
mod progress;
mod recipes;
mod report;
mod reporter;
mod session;
mod show;
mod tensors;
mod train;

use args::{Arguments, Command};
use clap::Parser;
use std::process::ExitCode;

/// What the user asked for cannot be done as asked.
const CANNOT: u8 = 2;
/// The user interrupted.
const INTERRUPTED: u8 = 130;

/// How a command ended, if not with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    Interrupted,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        None => commands::compare::digits(),
        Some(Command::Train(arguments)) => commands::train::run(&arguments),
        Some(Command::Compare(arguments)) => commands::compare::run(&arguments),
        Some(Command::Recipes) => commands::recipes::run(),
        Some(Command::Data(command)) => commands::data::run(&command),
        Some(Command::Inspect { file }) => commands::inspect::run(&file),
    };
    match result {
        Ok(End::Done) => ExitCode::SUCCESS,
        Ok(End::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            // One line, from the general to the particular.
            eprintln!("error: {error:#}");
            ExitCode::from(CANNOT)
        }
    }
}
