//! What runs have shown, a line for each: `docs/results/experiments.jsonl`.

use super::study::Run;
use crate::shell::{Result, root};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

/// All results, by run.
pub(super) struct Results {
    by_key: HashMap<String, Value>,
}

pub(super) fn path() -> PathBuf {
    root().join("docs/results/experiments.jsonl")
}

impl Results {
    pub(super) fn read() -> Result<Self> {
        let mut by_key = HashMap::new();
        for (number, line) in fs::read_to_string(path()).unwrap_or_default().lines().enumerate() {
            let wrong = || format!("{}, line {}: not a result", path().display(), number + 1);
            let line: Value = serde_json::from_str(line).map_err(|_| wrong())?;
            let settings = line["run"].as_object().ok_or_else(wrong)?;
            let run = Run(settings.clone().into_iter().collect());
            by_key.insert(run.key(), line["result"].clone());
        }
        Ok(Self { by_key })
    }

    pub(super) fn get(&self, run: &Run) -> Option<&Value> {
        self.by_key.get(&run.key())
    }

    /// Writes a result down.
    pub(super) fn add(&mut self, run: &Run, result: Value) -> Result {
        let failed = |error: std::io::Error| format!("{}: {error}", path().display());
        let mut file = OpenOptions::new().append(true).create(true).open(path()).map_err(failed)?;
        writeln!(file, "{}", json!({ "run": run.0, "result": result })).map_err(failed)?;
        self.by_key.insert(run.key(), result);
        Ok(())
    }
}
