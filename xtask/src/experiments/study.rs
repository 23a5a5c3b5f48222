//! Studies: what `experiments/NAME.toml` says is to be run.

use crate::shell::{Result, root};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

/// A study, as its file says.
pub(super) struct Study {
    pub(super) name: String,
    /// What it is about, in a sentence.
    pub(super) about: String,
    pub(super) runs: Vec<Run>,
}

/// One training run: all that its result depends on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Run(pub(super) BTreeMap<String, Value>);

impl Study {
    /// All studies, by name.
    pub(super) fn all() -> Result<Vec<Self>> {
        let folder = root().join("experiments");
        let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut names: Vec<_> = paths
            .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
            .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
            .collect();
        names.sort();
        names.iter().map(|name| Self::read(name)).collect()
    }

    fn read(name: &str) -> Result<Self> {
        let path = root().join("experiments").join(format!("{name}.toml"));
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = fs::read_to_string(&path).map_err(|error| failed(&error))?;
        let table: toml::Table = text.parse().map_err(|error| failed(&error))?;
        let table = serde_json::to_value(table).map_err(|error| failed(&error))?;
        let runs = table.get("runs").and_then(Value::as_array).ok_or_else(|| failed(&"no [[runs]]"))?;
        let runs = runs.iter().filter_map(Value::as_object).flat_map(expand).collect();
        let about = table.get("about").and_then(Value::as_str).ok_or_else(|| failed(&"no `about`"))?;
        Ok(Self { name: name.to_owned(), about: about.to_owned(), runs })
    }
}

/// All combinations of the settings that are lists; those of the last list change last.
fn expand(settings: &Map<String, Value>) -> Vec<Run> {
    let mut runs = vec![BTreeMap::new()];
    for (key, value) in settings {
        let values = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        let with = |value: &Value| {
            let value = value.clone();
            runs.iter().cloned().map(move |mut run| {
                run.insert(key.clone(), value.clone());
                run
            })
        };
        runs = values.iter().flat_map(with).collect();
    }
    runs.into_iter().map(Run).collect()
}

impl Run {
    pub(super) fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// A setting that is a number.
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.0.get(key)?.as_f64()
    }

    /// The settings but for these.
    pub(super) fn without(&self, keys: &[&str]) -> BTreeMap<&str, &Value> {
        let kept = self.0.iter().filter(|(key, _)| !keys.contains(&key.as_str()));
        kept.map(|(key, value)| (key.as_str(), value)).collect()
    }

    /// Whether some setting is this word.
    pub(super) fn has(&self, word: &str) -> bool {
        self.0.values().any(|value| shown(value) == word)
    }

    /// What identifies it among all.
    pub(super) fn key(&self) -> String {
        Value::from_iter(self.0.clone()).to_string()
    }

    /// A short name for people, and a folder's.
    pub(super) fn name(&self) -> String {
        let mut name = [self.text("recipe"), self.text("scheme")].join("-");
        for (key, value) in &self.0 {
            if !["recipe", "scheme"].contains(&key.as_str()) {
                let _ = write!(name, " {key}={}", shown(value));
            }
        }
        name.replace(' ', "-")
    }

    /// As arguments for either trainer.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![self.text("recipe").to_owned()];
        for (key, value) in self.0.iter().filter(|(key, _)| !["recipe", "engine"].contains(&key.as_str())) {
            arguments.extend([format!("--{key}"), shown(value)]);
        }
        arguments
    }
}

/// A setting as a word.
pub(super) fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_expanded_and_every_study_can_be_read() {
        let settings =
            serde_json::json!({"recipe": "digits", "scheme": ["dense", "adacomp"], "seed": [1, 2]});
        let runs = expand(settings.as_object().unwrap());
        assert_eq!(runs.len(), 4);
        let keys: std::collections::BTreeSet<_> = runs.iter().map(Run::key).collect();
        assert_eq!(keys.len(), 4);
        assert_eq!(runs[0].arguments(), ["digits", "--scheme", "dense", "--seed", "1"]);
        let studies = Study::all().unwrap();
        assert!(!studies.is_empty());
        let trainer = std::fs::read_to_string(root().join("python/experiments/train.py")).unwrap();
        for run in studies.iter().flat_map(|study| &study.runs) {
            assert!(["program", "pytorch"].contains(&run.text("engine")), "{run:?}");
            for key in run.without(&["engine", "recipe"]).keys() {
                assert!(trainer.contains(&format!("\"--{key}\"")), "{key} is no option of the trainer");
            }
        }
    }
}
