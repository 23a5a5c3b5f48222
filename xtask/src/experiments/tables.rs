//! Results as tables.

use super::results::Results;
use super::study::{Run, Study, shown};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Runs that differ in their seeds only.
pub(super) struct Seeds<'a> {
    pub(super) run: &'a Run,
    /// By seed.
    results: BTreeMap<u64, &'a Value>,
}

impl<'a> Seeds<'a> {
    /// The runs of a study by what they are, those that have results.
    pub(super) fn of(study: &'a Study, results: &'a Results) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for run in &study.runs {
            let Some(result) = results.get(run) else { continue };
            let seed = run.number("seed").unwrap_or_default() as u64;
            match groups.iter_mut().find(|group| group.run.without(&["seed"]) == run.without(&["seed"])) {
                Some(group) => drop(group.results.insert(seed, result)),
                None => groups.push(Self { run, results: BTreeMap::from([(seed, result)]) }),
            }
        }
        groups
    }

    /// The same without the seeds that the others have not.
    fn with_seeds_of(&self, others: &Self) -> Self {
        let both = self.results.iter().filter(|(seed, _)| others.results.contains_key(seed));
        Self { run: self.run, results: both.map(|(seed, result)| (*seed, *result)).collect() }
    }

    /// The values of all seeds at this place of their results; NaN where a run has diverged.
    pub(super) fn values(&self, path: &str) -> Vec<f64> {
        let value = |result: &&Value| Some(result.pointer(path)?.as_f64().unwrap_or(f64::NAN));
        self.results.values().filter_map(value).collect()
    }

    pub(super) fn mean(&self, path: &str) -> Option<f64> {
        let values = self.values(path);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        mean.is_finite().then_some(mean)
    }

    /// How many times smaller the layers of a kind are with a code, those that are sent whole left out; of all kinds, nothing is.
    pub(super) fn compressed_rate(&self, code: &str, kind: &str) -> Option<f64> {
        // Rates are of frames, which only gather sends.
        if !["", "gather"].contains(&self.run.text("strategy")) {
            return None;
        }
        let rate = self.mean(&format!("/rates/{code}/{kind}"))?;
        let elements = |which: &str| self.mean(&format!("/elements/{kind}/{which}"));
        let (Some(compressed), Some(whole)) = (elements("compressed"), elements("whole")) else {
            return Some(rate);
        };
        (compressed > 0.0).then(|| compressed / ((compressed + whole) / rate - whole))
    }

    /// What the first seed's epochs ended with.
    pub(super) fn history(&self, of: &str) -> Vec<(f64, f64)> {
        let first = self.results.values().next().and_then(|result| result["history"].as_array());
        let epochs = first.into_iter().flatten();
        epochs.filter_map(|epoch| Some((epoch["step"].as_f64()?, epoch[of].as_f64()?))).collect()
    }
}

/// What a recipe is judged by: where it is in a result, digits, and its unit.
pub(super) struct Measure {
    pub(super) path: &'static str,
    pub(super) name: &'static str,
    digits: usize,
    unit: &'static str,
}

impl Measure {
    pub(super) fn of(recipe: &str) -> Self {
        if recipe.starts_with("shakespeare") {
            Self { path: "/test_loss", name: "test loss", digits: 3, unit: "" }
        } else {
            Self { path: "/test_error", name: "test error", digits: 2, unit: "%" }
        }
    }

    /// The mean, and from where to where.
    fn show(&self, values: &[f64]) -> String {
        let Self { digits, unit, .. } = self;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        match values {
            [] => String::new(),
            _ if mean.is_nan() => "diverged".to_owned(),
            [only] => format!("{only:.digits$}{unit}"),
            _ => {
                let low = values.iter().copied().fold(f64::INFINITY, f64::min);
                let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                format!("{mean:.digits$}{unit} ({low:.digits$} to {high:.digits$})")
            }
        }
    }

    /// How far AdaComp is behind dense, and whether that is what was promised: half a point, or 1.5% of a loss.
    fn behind(&self, dense: f64, adacomp: f64) -> String {
        if self.unit == "%" {
            let points = adacomp - dense;
            format!("{points:+.2} points{}", if points <= 0.5 { "" } else { ", **too much**" })
        } else {
            let percent = 100.0 * (adacomp / dense - 1.0);
            format!("{percent:+.1}%{}", if percent <= 1.5 { "" } else { ", **too much**" })
        }
    }
}

/// Dense against AdaComp, a row for each model and optimiser.
pub(super) fn main_table(study: &Study, results: &Results) -> String {
    let groups = Seeds::of(study, results);
    let mut text = "\n| model, optimiser | seeds | steps | dense | AdaComp | behind | all: `rice`, `paper` | conv: `rice`, `paper`, floor \
                    | matrix: `rice`, `paper`, floor |\n|---|---:|---:|---|---|---|---|---|---|\n"
        .to_owned();
    for adacomp in groups.iter().filter(|group| group.run.text("scheme") == "adacomp") {
        let same = |other: &&Seeds<'_>| {
            other.run.text("scheme") == "dense"
                && other.run.without(&["seed", "scheme"]) == adacomp.run.without(&["seed", "scheme"])
        };
        let Some(dense) = groups.iter().find(same) else { continue };
        let (dense, adacomp) = (dense.with_seeds_of(adacomp), adacomp.with_seeds_of(dense));
        if adacomp.results.is_empty() {
            continue;
        }
        let (recipe, optimizer) = (adacomp.run.text("recipe"), adacomp.run.text("optimizer"));
        let measure = Measure::of(recipe);
        let (dense_values, values) = (dense.values(measure.path), adacomp.values(measure.path));
        let behind = match (dense.mean(measure.path), adacomp.mean(measure.path)) {
            (Some(dense), Some(adacomp)) => measure.behind(dense, adacomp),
            _ => String::new(),
        };
        text += &format!(
            "| {recipe}, {optimizer} | {} | {:.0} | {} | {} | {behind} | {} | {} | {} |\n",
            values.len(),
            adacomp.mean("/steps").unwrap_or_default(),
            measure.show(&dense_values),
            measure.show(&values),
            rates(&adacomp, "overall", &["rice", "paper"]),
            rates(&adacomp, "conv", &["rice", "paper", "floor"]),
            rates(&adacomp, "matrix", &["rice", "paper", "floor"]),
        );
    }
    text + "\n"
}

/// How many times smaller with each code: what is of a kind and compressed, or all of it.
fn rates(group: &Seeds<'_>, kind: &str, codes: &[&str]) -> String {
    let rates = codes.iter().filter_map(|code| group.compressed_rate(code, kind));
    rates.map(|rate| format!("{rate:.0}")).collect::<Vec<_>>().join(", ")
}

/// A row for each setting of a study, with what differs between them.
pub(super) fn table(study: &Study, results: &Results) -> String {
    let groups = Seeds::of(study, results);
    let Some(first) = groups.first() else { return "\nNot measured yet.\n\n".to_owned() };
    let measure = Measure::of(first.run.text("recipe"));
    let keys: BTreeSet<&str> = study.runs.iter().flat_map(|run| run.without(&["seed"]).into_keys()).collect();
    let varies = |key: &&str| study.runs.iter().any(|run| run.0.get(*key) != first.run.0.get(*key));
    let keys: Vec<&str> = keys.into_iter().filter(varies).collect();
    let mut text = format!(
        "\n| {} | {} | matrix: `rice`, `paper`, floor | conv: `rice`, `paper`, floor | received in a step |\n|{}---|---|---:|\n",
        keys.join(" | "),
        measure.name,
        "---|".repeat(keys.len() + 1)
    );
    for group in &groups {
        let settings = keys.iter().map(|key| group.run.0.get(*key).map_or_else(String::new, shown));
        let codes = ["rice", "paper", "floor"];
        text += &format!(
            "| {} | {} | {} | {} | {} |\n",
            settings.collect::<Vec<_>>().join(" | "),
            measure.show(&group.values(measure.path)),
            rates(group, "matrix", &codes),
            rates(group, "conv", &codes),
            group.mean("/received").map_or_else(String::new, |bytes| format!("{bytes:.0}")),
        );
    }
    text + "\n"
}

/// The main table in few words, for the README.
pub(super) fn short_table(study: &Study, results: &Results) -> String {
    let mut text = "\n| model, optimiser | seeds | dense | AdaComp | times smaller: all | conv | matrix |\n|---|---:|---|---|---:|---:|---:|\n"
        .to_owned();
    for line in main_table(study, results).lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [model, seeds, _, dense, adacomp, _, rates @ ..] = cells.as_slice() else { continue };
        // With the code that is used, which comes first.
        let rates = rates.iter().map(|rates| rates.split(',').next().unwrap_or_default());
        text += &format!(
            "| {model} | {seeds} | {dense} | {adacomp} | {} |\n",
            rates.collect::<Vec<_>>().join(" | ")
        );
    }
    text + "\n"
}
