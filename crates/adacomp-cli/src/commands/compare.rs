//! `adacomp compare`

use crate::End;
use crate::args::CompareArguments;
use crate::checkpoint::{COMPARISON, Checkpoint};
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
    /// What was typed to begin it. Older ones do not say.
    #[serde(default = "command_line")]
    command: String,
}

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
    let before = match &arguments.training.resume {
        Some(folder) => read(folder, arguments.recipe.as_deref())?,
        None => {
            let recipe = arguments.recipe.as_deref().context("name a recipe, or a comparison to resume")?;
            let (config, schemes) = (Recipe::named(recipe)?.config.clone(), arguments.schemes.clone());
            Comparison { config, schemes, command: command_line() }
        }
    };
    let schemes = &before.schemes;
    for (number, scheme) in schemes.iter().enumerate() {
        ensure!(!schemes[..number].contains(scheme), "the scheme {} is named twice", value_name(*scheme));
    }
    let mut session = Session::new(before.config.clone(), schemes.clone(), &arguments.training)?;
    let is_resumed = arguments.training.resume.is_some();
    if is_resumed && !session.config.has_settings_of(&before.config) {
        bail!("a comparison keeps its settings, but for --epochs or --steps, --learners and --data");
    }
    let folder = session.folder(&format!("compare-{}", session.recipe.name))?;
    let comparison = Comparison { config: session.config.clone(), ..before };
    let mut found = Vec::new();
    for &scheme in &comparison.schemes {
        let from = if is_resumed { Checkpoint::find(&folder.join(value_name(scheme)))? } else { None };
        let config = Config { scheme, ..comparison.config.clone() };
        from.as_ref().map_or(Ok(()), |from| session.check(from, &config))?;
        found.push((config, from));
    }
    session.introduce()?;
    if session.is_reporter() {
        write_atomically(&folder.join(COMPARISON), &serde_json::to_vec_pretty(&comparison)?)?;
    }
    let mut runs = Vec::new();
    let mut end = End::Done;
    for (config, from) in found {
        let scheme = config.scheme;
        let own = folder.join(value_name(scheme));
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
    if session.is_reporter() {
        conclude(&session, &runs);
        note!("report: {}", folder.join(REPORT).display());
        if end == End::Interrupted {
            note!("interrupted; go on with: adacomp compare --resume {}", folder.display());
        }
        for (scheme, ended) in &runs {
            let own = folder.join(value_name(*scheme));
            ended.trouble(&own).inspect(|trouble| note!("{}: {trouble}", value_name(*scheme)));
        }
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
    let run = |(scheme, ended): &(Scheme, Ended)| json!({ "scheme": scheme, "diverged": ended.end() == End::Diverged, "history": ended.history });
    let data = json!({
        "recipe": name,
        "about": about,
        "metric": metric,
        "finished": finished,
        "command": comparison.command,
        "configuration": configuration,
        "machine": format!("{}, {} kernel", session.workers(), adacomp::Kernel::best()),
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

/// Shows the runs that have been tested.
fn conclude(session: &Session<'_>, runs: &[(Scheme, Ended)]) {
    let recipe = &session.recipe;
    let runs = runs.iter().filter_map(|(scheme, ended)| Some((scheme, ended, ended.history.epochs.last()?)));
    if session.json().is_some() {
        let mut line = Map::from_iter([("recipe".to_owned(), json!(recipe.name))]);
        for (scheme, ended, last) in runs {
            line.insert(value_name(*scheme), result(recipe.metric, ended.strategy, last));
        }
        return say!("{}", Value::Object(line));
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
    for (scheme, _, last) in runs {
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
}
