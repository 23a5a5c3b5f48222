//! `adacomp compare`

use crate::End;
use crate::args::{CompareArguments, TrainingArguments};
use crate::checkpoint::Checkpoint;
use crate::commands::train::result;
use crate::config::{Config, Scheme, value_name};
use crate::endpoint::Ended;
use crate::files::write_atomically;
use crate::recipes::{Metric, Recipe};
use crate::report;
use crate::session::{Session, flat};
use crate::show::{self, row};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What is compared, kept beside the runs so that all of it can be resumed.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Comparison {
    config: Config,
    schemes: Vec<Scheme>,
}

const COMPARISON: &str = "compare.json";
const REPORT: &str = "report.html";

/// The first thing that newcomers see.
pub(crate) fn digits() -> Result<End> {
    run(&CompareArguments {
        recipe: Some("digits".to_owned()),
        schemes: vec![Scheme::Dense, Scheme::Adacomp],
        training: TrainingArguments::default(),
    })
}

pub(crate) fn run(arguments: &CompareArguments) -> Result<End> {
    let Comparison { config, schemes } = match &arguments.training.resume {
        Some(folder) => read(folder, arguments.recipe.as_deref())?,
        None => {
            let recipe = arguments.recipe.as_deref().context("name a recipe, or a comparison to resume")?;
            Comparison { config: Config::of(recipe)?, schemes: arguments.schemes.clone() }
        }
    };
    let mut session = Session::new(config, schemes, &arguments.training)?;
    let folder = session.folder(&format!("compare-{}", session.recipe.name))?;
    let comparison = Comparison { config: session.config.clone(), schemes: session.schemes.clone() };
    session.introduce()?;
    if session.is_reporter() {
        write_atomically(&folder.join(COMPARISON), &serde_json::to_vec_pretty(&comparison)?)?;
    }
    let mut runs = Vec::new();
    for &scheme in &comparison.schemes {
        let config = Config { scheme, ..comparison.config.clone() };
        let own = folder.join(value_name(scheme));
        let from = Checkpoint::find(&own)?;
        if session.is_reporter() && session.json().is_none() {
            say!("{}", value_name(scheme));
        }
        let ended = session.train(config, &own, None, from.as_ref())?;
        let interrupted = ended.interrupted;
        runs.push((scheme, ended));
        if session.is_reporter() {
            let finished = runs.len() == comparison.schemes.len() && !interrupted;
            write_report(&session, &comparison, &runs, finished, &folder)?;
        }
        if interrupted {
            if session.is_reporter() {
                note!("interrupted; go on with: adacomp compare --resume {}", folder.display());
            }
            session.end();
            return Ok(End::Interrupted);
        }
    }
    if session.is_reporter() {
        conclude(&session, &runs)?;
        note!("report: {}", folder.join(REPORT).display());
    }
    session.end();
    Ok(End::Done)
}

fn read(folder: &Path, recipe: Option<&str>) -> Result<Comparison> {
    let path = folder.join(COMPARISON);
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{}: there is no comparison to resume", folder.display()))?;
    let comparison: Comparison =
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?;
    match recipe {
        Some(recipe) if recipe != comparison.config.recipe => {
            bail!("{} is of the recipe {}, not {recipe}", folder.display(), comparison.config.recipe)
        }
        _ => Ok(comparison),
    }
}

fn write_report(
    session: &Session<'_>,
    comparison: &Comparison,
    runs: &[(Scheme, Ended)],
    finished: bool,
    folder: &Path,
) -> Result<()> {
    let Recipe { name, about, metric, .. } = session.recipe;
    let data = report::Data {
        recipe: name,
        about,
        metric,
        finished,
        command: command_line(),
        configuration: flat(&serde_json::to_value(&comparison.config)?)
            .into_iter()
            .filter(|(name, _)| name != "scheme")
            .collect(),
        machine: format!("{} threads, {} kernel", session.threads, adacomp::Kernel::best()),
        runs: runs.iter().map(|(scheme, ended)| (value_name(*scheme), &ended.history)).collect(),
    };
    write_atomically(&folder.join(REPORT), report::page(&data)?.as_bytes())
}

/// What was typed, as it can be typed again.
fn command_line() -> String {
    let word = |word: std::ffi::OsString| {
        let word = word.to_string_lossy().into_owned();
        let plain = |character: char| character.is_alphanumeric() || "-_./=,:".contains(character);
        if word.chars().all(plain) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
    };
    std::env::args_os().skip(1).map(word).fold("adacomp".to_owned(), |line, word| line + " " + &word)
}

fn conclude(session: &Session<'_>, runs: &[(Scheme, Ended)]) -> Result<()> {
    let recipe = session.recipe;
    if session.json().is_some() {
        let mut line = Map::from_iter([("recipe".to_owned(), json!(recipe.name))]);
        for (scheme, ended) in runs {
            line.insert(value_name(*scheme), result(recipe.metric, ended)?);
        }
        say!("{}", Value::Object(line));
        return Ok(());
    }
    let measure = match recipe.metric {
        Metric::Error => "test error",
        Metric::Loss => "test loss",
    };
    let mut rows = vec![row([recipe.name, measure, "rate", "conv", "matrix", "sent a learner", "time"])];
    for (scheme, ended) in runs {
        let last = ended.history.epochs.last().context("the run ended before its first test")?;
        let measured = match recipe.metric {
            Metric::Error => format!("{:.2}%", last.test_error),
            Metric::Loss => format!("{:.4}", last.test_loss),
        };
        rows.push(row([
            &value_name(*scheme),
            &measured,
            &show::rate(last.total.rate.overall),
            &show::rate(last.total.rate.conv),
            &show::rate(last.total.rate.matrix),
            &show::bytes(last.total.bytes_sent),
            &show::seconds(last.total.seconds),
        ]));
    }
    say!("\n{}", show::table(&rows));
    Ok(())
}
