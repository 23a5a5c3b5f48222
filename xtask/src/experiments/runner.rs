//! Runs what a study asks for, several at a time, each on one core.

use super::results::Results;
use super::study::Run;
use crate::python;
use crate::shell::{Result, cargo, root, run};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

/// Runs at a time: one a core.
fn at_once() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs all that have no result yet, and writes down each as soon as it is there. Those that were stopped go on.
pub(super) fn run_all(wanted: &[Run]) -> Result {
    let mut results = Results::read()?;
    let mut missing: Vec<_> = wanted.iter().filter(|run| results.get(run).is_none()).cloned().collect();
    println!("{} runs, {} of them to be made", wanted.len(), missing.len());
    prepare(&missing)?;
    missing.reverse();
    let total = missing.len();
    let (queue, results, failures) = (Mutex::new(missing), Mutex::new(&mut results), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..at_once() {
            scope.spawn(|| {
                while let Some((next, left)) = take(&queue) {
                    println!("[{}/{total}] {}", total - left, next.name());
                    let start = Instant::now();
                    let kept = train(&next).and_then(|result| lock(&results).add(&next, result));
                    match kept {
                        Ok(()) => println!("      {}: {} s", next.name(), start.elapsed().as_secs()),
                        Err(error) => lock(&failures).push(format!("{}: {error}", next.name())),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_default();
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

fn take(queue: &Mutex<Vec<Run>>) -> Option<(Run, usize)> {
    let mut queue = lock(queue);
    let next = queue.pop()?;
    Some((next, queue.len()))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Builds what the runs need.
fn prepare(missing: &[Run]) -> Result {
    if missing.iter().any(|run| run.text("engine") == "pytorch") {
        python::prepare()?;
    }
    if missing.iter().any(|run| run.text("engine") == "program") {
        run(&mut cargo(&["build", "--release", "--locked", "-p", "adacomp-cli"]))?;
    }
    Ok(())
}

/// Trains to the end, or goes on with what was begun: the result.
fn train(run: &Run) -> Result<Value> {
    let folder = root().join("target/experiments").join(run.name());
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(&folder).map_err(failed)?;
    let log = folder.join("log");
    let mut command = match run.text("engine") {
        "program" => program(run, &folder.join("run")),
        _ => pytorch(run, &folder),
    };
    let file = fs::OpenOptions::new().append(true).create(true).open(&log).map_err(failed)?;
    let errors = file.try_clone().map_err(failed)?;
    let status = command.stdout(file).stderr(errors).stdin(Stdio::null()).status().map_err(failed)?;
    let text = fs::read_to_string(&log).map_err(failed)?;
    if !status.success() {
        let last: Vec<_> = text.lines().rev().take(5).collect();
        return Err(format!("{status}\n{}", last.into_iter().rev().collect::<Vec<_>>().join("\n")));
    }
    match run.text("engine") {
        "program" => program_result(&text),
        _ => text
            .lines()
            .rev()
            .find_map(|line| serde_json::from_str(line).ok())
            .ok_or_else(|| format!("{}: no result", log.display())),
    }
}

fn pytorch(run: &Run, folder: &std::path::Path) -> Command {
    let mut command = Command::new(python::environment().join("bin/python"));
    command.arg("python/experiments/train.py").args(run.arguments()).arg("--out").arg(folder);
    command.current_dir(root());
    command
}

fn program(run: &Run, folder: &PathBuf) -> Command {
    let mut command = Command::new(root().join("target/release/adacomp"));
    command.arg("train");
    // A run that was ended in its first epoch has a folder, but nothing to go on from.
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok());
    if entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with("checkpoint-")) {
        command.arg("--resume").arg(folder);
    } else {
        command.args(run.arguments()).arg("--out").arg(folder);
    }
    command.args(["--threads", "1", "--json"]).current_dir(root());
    command
}

/// The program's lines, epoch by epoch, in the form of the other trainer's result.
fn program_result(log: &str) -> Result<Value> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok());
    // A run that was stopped and went on may have an epoch twice.
    let mut epochs: Vec<Map<String, Value>> = Vec::new();
    for line in lines.filter(|line| line.contains_key("epoch")) {
        epochs.retain(|epoch| epoch["epoch"] != line["epoch"]);
        epochs.push(line);
    }
    let last = epochs.last().ok_or("no epoch in the log")?;
    let history = epochs.iter().map(|epoch| {
        let norms = epoch["layers"].as_array().into_iter().flatten();
        let norms = norms.filter_map(|layer| layer["residual_norm"].as_f64());
        let norm = norms.map(|norm| norm * norm).sum::<f64>().sqrt();
        json!({
            "step": epoch["step"], "train_loss": epoch["train_loss"], "test_loss": epoch["test_loss"],
            "test_error": epoch["test_error"], "residual_norm": norm,
        })
    });
    let steps = last["step"].as_f64().unwrap_or(1.0);
    let total = &last["total"];
    Ok(json!({
        "test_error": last["test_error"],
        "test_loss": last["test_loss"],
        "steps": last["step"],
        "seconds": total["seconds"],
        "sent": total["bytes_sent"].as_f64().unwrap_or(0.0) / steps,
        "rates": { "rice": total["rate"], "paper": total["paper_rate"], "floor": total["floor_rate"] },
        "history": history.collect::<Vec<_>>(),
    }))
}
