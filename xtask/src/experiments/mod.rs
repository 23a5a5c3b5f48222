//! `cargo xtask experiments`: the studies in `experiments/`, their results, and the documents made of these.

mod browser;
mod figures;
mod report;
mod results;
mod runner;
mod study;
mod tables;

use crate::shell::Result;
use results::Results;
use study::Study;

/// Makes what is missing of some studies, or of all, and writes the documents anew. Words that are no study choose among the runs:
/// `main mnist-cnn adam`.
pub(crate) fn run(words: &[&str]) -> Result {
    let studies = Study::all()?;
    let is_study = |word: &str| studies.iter().any(|study| study.name == word);
    let (names, words): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| is_study(word));
    let mut nothing = true;
    for study in studies.iter().filter(|study| names.is_empty() || names.contains(&study.name.as_str())) {
        let chosen = study.runs.iter().filter(|run| words.iter().all(|word| run.has(word)));
        let chosen: Vec<_> = chosen.cloned().collect();
        if chosen.is_empty() {
            continue;
        }
        nothing = false;
        println!("== {}", study.name);
        runner::run_all(&chosen)?;
    }
    if nothing {
        let known: Vec<&str> = studies.iter().map(|study| study.name.as_str()).collect();
        return Err(format!("this chooses no run; studies are {}", known.join(", ")));
    }
    report()
}

/// Writes the documents anew.
pub(crate) fn report() -> Result {
    report::written()?.save()
}

/// Whether the documents are what the results give.
pub(crate) fn check() -> Result {
    report::written()?.check()
}

/// Whether a browser draws all figures.
pub(crate) fn check_in_browser() -> Result {
    browser::check()
}

/// Says what there is and what is missing.
pub(crate) fn list() -> Result {
    let results = Results::read()?;
    for study in Study::all()? {
        let done = study.runs.iter().filter(|run| results.get(run).is_some()).count();
        println!("{}: {done} of {} runs", study.name, study.runs.len());
        for run in study.runs.iter().filter(|run| results.get(run).is_none()) {
            println!("  missing: {}", run.name());
        }
    }
    Ok(())
}
