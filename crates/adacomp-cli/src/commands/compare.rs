//! `adacomp compare`

use crate::End;
use crate::args::CompareArguments;
use crate::checkpoint::Checkpoint;
use crate::commands::train::result;
use crate::config::{Config, Scheme, value_name};
use crate::files::{self, write_atomically};
use crate::recipes::Recipe;
use crate::session::Session;
use crate::show::{self, flat, row};
use crate::trainer::Ended;
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What is compared, saved beside the runs so that all of it can be resumed.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Comparison {
    config: Config,
    schemes: Vec<Scheme>,
}

const COMPARISON: &str = "compare.json";
const REPORT: &str = "report.html";
/// The report's page, whose script reads the data and draws.
const TEMPLATE: &str = include_str!("../report.html");

/// Runs the first thing that newcomers see, and says what to try next.
pub(crate) fn digits() -> Result<End> {
    let end = run(&CompareArguments::parse_from(["adacomp compare", "digits"]))?;
    if end == End::Done {
        note!("\n{NEXT}");
    }
    Ok(end)
}

const NEXT: &str = "Open the report in a browser. What to try next:
  adacomp compare mnist-cnn --learners 8   convolutions and 60,000 pictures; fetches 11 MB, takes some minutes
  adacomp plan resnet18 --bandwidth 1gbit  whether compression would pay on your network
  adacomp recipes                          what else can be trained
With cargo, write `cargo run --release --` for `adacomp`.";

pub(crate) fn run(arguments: &CompareArguments) -> Result<End> {
    let Comparison { config, schemes } = match &arguments.training.resume {
        Some(folder) => read(folder, arguments.recipe.as_deref())?,
        None => {
            let recipe = arguments.recipe.as_deref().context("name a recipe, or a comparison to resume")?;
            Comparison { config: Recipe::named(recipe)?.config.clone(), schemes: arguments.schemes.clone() }
        }
    };
    for (number, scheme) in schemes.iter().enumerate() {
        ensure!(!schemes[..number].contains(scheme), "the scheme {} is named twice", value_name(*scheme));
    }
    let mut session = Session::new(config, schemes, &arguments.training)?;
    let folder = session.folder(&format!("compare-{}", session.recipe.name))?;
    let comparison = Comparison { config: session.config.clone(), schemes: session.schemes.clone() };
    session.introduce()?;
    if session.is_reporter() {
        write_atomically(&folder.join(COMPARISON), &serde_json::to_vec_pretty(&comparison)?)?;
    }
    let mut runs = Vec::new();
    let mut end = End::Done;
    for &scheme in &comparison.schemes {
        let config = Config { scheme, ..comparison.config.clone() };
        let own = folder.join(value_name(scheme));
        let from = Checkpoint::find(&own)?;
        if session.is_reporter() && session.json().is_none() {
            say!("{}", value_name(scheme));
        }
        let ended = session.train(config, &own, None, from.as_ref())?;
        end = ended.end();
        runs.push((scheme, ended));
        if session.is_reporter() {
            let finished = runs.len() == comparison.schemes.len() && end == End::Done;
            write_report(&session, &comparison, &runs, finished, &folder)?;
        }
        if end != End::Done {
            break;
        }
    }
    match end {
        _ if !session.is_reporter() => {}
        End::Interrupted => note!("interrupted; go on with: adacomp compare --resume {}", folder.display()),
        End::Diverged => {}
        End::Done => {
            conclude(&session, &runs)?;
            note!("report: {}", folder.join(REPORT).display());
        }
    }
    for (scheme, ended) in runs.iter().filter(|_| session.is_reporter()) {
        let own = folder.join(value_name(*scheme));
        ended.trouble(&own).inspect(|trouble| note!("{}: {trouble}", value_name(*scheme)));
    }
    session.end();
    Ok(end)
}

fn read(folder: &Path, recipe: Option<&str>) -> Result<Comparison> {
    let path = folder.join(COMPARISON);
    let text = files::read(&path)
        .with_context(|| format!("{}: there is no comparison to resume", folder.display()))?;
    let comparison: Comparison =
        serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))?;
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
    let Recipe { name, about, metric, .. } = &session.recipe;
    let configuration = flat(&serde_json::to_value(&comparison.config)?).into_iter();
    let configuration: Map<String, Value> = configuration
        .filter(|(name, _)| name != "scheme")
        .map(|(name, value)| (name, Value::String(value)))
        .collect();
    let run = |(scheme, ended): &(Scheme, Ended)| json!({ "scheme": scheme, "history": ended.history });
    let data = json!({
        "recipe": name,
        "about": about,
        "metric": metric,
        "finished": finished,
        "command": command_line(),
        "configuration": configuration,
        "machine": format!("{} threads, {} kernel", session.threads, adacomp::Kernel::best()),
        "runs": runs.iter().map(run).collect::<Vec<_>>(),
    });
    // Within a script nothing may look like its end.
    let data = data.to_string().replace('<', "\\u003c");
    let page = TEMPLATE.replace("{{TITLE}}", name).replace("{{DATA}}", &data);
    write_atomically(&folder.join(REPORT), page.as_bytes())
}

/// Returns the command line, as it can be typed again.
fn command_line() -> String {
    let word = |word: std::ffi::OsString| {
        let word = word.to_string_lossy().into_owned();
        let plain = |character: char| character.is_alphanumeric() || "-_./=,:".contains(character);
        if word.chars().all(plain) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
    };
    std::env::args_os().skip(1).map(word).fold("adacomp".to_owned(), |line, word| line + " " + &word)
}

fn conclude(session: &Session<'_>, runs: &[(Scheme, Ended)]) -> Result<()> {
    let recipe = &session.recipe;
    if session.json().is_some() {
        let mut line = Map::from_iter([("recipe".to_owned(), json!(recipe.name))]);
        for (scheme, ended) in runs {
            line.insert(value_name(*scheme), result(recipe.metric, ended)?);
        }
        say!("{}", Value::Object(line));
        return Ok(());
    }
    let mut rows = vec![row([
        recipe.name,
        recipe.metric.name(),
        "compression ratio",
        "sent per learner",
        "frame ratio",
        "conv",
        "matrix",
        "time",
    ])];
    for (scheme, ended) in runs {
        let last = ended.history.epochs.last().context("the run ended before its first test")?;
        let total = &last.total;
        rows.push(row([
            &value_name(*scheme),
            &recipe.metric.show(last),
            &show::ratio(total.compression_ratio),
            &show::bytes(total.bytes_sent),
            &show::ratio(total.frame_ratio.overall),
            &show::ratio(total.frame_ratio.conv),
            &show::ratio(total.frame_ratio.matrix),
            &show::seconds(total.seconds),
        ]));
    }
    say!("\n{}", show::table(&rows));
    Ok(())
}
