//! The program `adacomp`: trains models with many learners, dense and with AdaComp, and shows the result.

// They panic where nobody reads: `show.rs` has others.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod show;

mod args;
mod checkpoint;
mod commands;
mod config;
mod data;
mod draw;
mod epoch;
mod files;
mod history;
mod inspect;
mod models;
mod optimizer;
mod plan;
mod recipes;
mod session;
mod trainer;

use args::{Arguments, Command};
use clap::Parser;
use std::process::ExitCode;

/// The exit code of a run that was given up, or whose end was not saved, because numbers were not finite.
const DIVERGED: u8 = 3;
/// The exit code after Ctrl-C.
const INTERRUPTED: u8 = 130;

/// How a command ended, if not with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    Interrupted,
    Diverged,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return explain(&error),
    };
    let result = match arguments.command {
        None => commands::compare::digits(),
        Some(Command::Train(arguments)) => commands::train::run(&arguments),
        Some(Command::Compare(arguments)) => commands::compare::run(&arguments),
        Some(Command::Recipes) => commands::recipes(),
        Some(Command::Data(command)) => commands::data(&command),
        Some(Command::Plan(arguments)) => plan::run(&arguments),
        Some(Command::Inspect { file }) => commands::inspect(&file),
    };
    match result {
        Ok(End::Done) => ExitCode::SUCCESS,
        Ok(End::Diverged) => ExitCode::from(DIVERGED),
        Ok(End::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            note!("error: {}", show::escaped(&one_line(&error)));
            ExitCode::from(show::CANNOT)
        }
    }
}

/// Returns an error and its sources in one line, from the general to the particular. The libraries' messages contain their
/// sources' text already, which is not said twice.
fn one_line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |line, text| match line.contains(&text) {
        true => line,
        false if line.is_empty() => text,
        false => format!("{line}: {text}"),
    })
}

/// Prints help where it was asked for, or else what is wrong with the command line, in one line as all errors.
fn explain(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        tell!("{error}");
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let lines = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let line = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    note!("{line}; --help explains");
    ExitCode::from(show::CANNOT)
}
