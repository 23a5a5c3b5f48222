//! `adacomp train`

use crate::End;
use crate::args::TrainArguments;
use crate::checkpoint::Checkpoint;
use crate::config::{Config, value_name};
use crate::history::Epoch;
use crate::recipes::{Metric, Recipe};
use crate::session::Session;
use crate::show;
use crate::trainer::Ended;
use adacomp_exchange::Strategy;
use anyhow::{Result, bail};
use serde_json::{Map, Value, json};
use std::path::Path;

pub(crate) fn run(arguments: &TrainArguments) -> Result<End> {
    let from = arguments.training.resume.as_deref().map(Checkpoint::open).transpose()?;
    let mut config = match (&from, &arguments.recipe) {
        (Some(from), Some(recipe)) if *recipe != from.saved.config.recipe => {
            let (folder, saved) = (from.folder.display(), &from.saved.config.recipe);
            bail!(
                "{folder} is of the recipe {saved}, not {recipe}: leave the recipe out, or start a run of its own"
            );
        }
        (Some(from), _) => from.saved.config.clone(),
        (None, Some(recipe)) => Recipe::named(recipe)?.config.clone(),
        (None, None) => bail!("name a recipe, or a run to resume"),
    };
    if let Some(scheme) = arguments.scheme {
        config.scheme = scheme;
    }
    let scheme = config.scheme;
    let mut session = Session::new(config, vec![scheme], &arguments.training)?;
    let config = session.config.clone();
    from.as_ref().map_or(Ok(()), |from| session.check(from, &config))?;
    let folder = session.folder(session.recipe.name)?;
    session.introduce()?;
    let ended = session.train(config.clone(), &folder, arguments.save_every, from.as_ref())?;
    if session.is_reporter() {
        conclude(&session, &config, &ended, &folder);
    }
    session.end();
    Ok(ended.end())
}

fn conclude(session: &Session<'_>, config: &Config, ended: &Ended, folder: &Path) {
    if session.json().is_some() {
        let mut line = Map::from_iter([("recipe".to_owned(), json!(config.recipe))]);
        // An interrupted run may have no result yet.
        if let Some(last) = ended.history.epochs.last() {
            line.insert(value_name(config.scheme), result(session.recipe.metric, ended.strategy, last));
        }
        line.insert("weights_checksum".to_owned(), json!(ended.checksum));
        say!("{}", Value::Object(line));
    } else if let Some(last) = ended.history.epochs.last() {
        say!("\n{}", summary(session.recipe.metric, last, ended.strategy));
    }
    if let Some(peak) = show::peak_memory() {
        note!("peak memory: {}", show::bytes(peak));
    }
    if ended.end() == End::Interrupted {
        note!(
            "interrupted after step {}; go on with: adacomp train --resume {}",
            ended.steps,
            folder.display()
        );
    } else if ended.saved {
        note!("saved in {}", folder.display());
    }
    match session.json() {
        None => say!("weights checksum: {}", ended.checksum),
        Some(_) => note!("weights checksum: {}", ended.checksum),
    }
    if let Some(trouble) = ended.trouble(folder) {
        note!("{trouble}");
    }
}

/// Says what a run has come to: its result, its bytes, and where the time of the last epoch went.
fn summary(metric: Metric, last: &Epoch, strategy: Strategy) -> String {
    let sent = match last.total.compression_ratio {
        None => "nothing sent".to_owned(),
        Some(ratio) => format!(
            "compression ratio {} with {strategy}: {} sent per learner, and {} by a dense ring all-reduce",
            show::ratio(Some(ratio)),
            show::bytes(last.total.bytes_sent),
            show::bytes(ratio * last.total.bytes_sent)
        ),
    };
    let time = &last.seconds;
    let share = |seconds: f64| 100.0 * seconds / time.training();
    format!(
        "{} {}; {sent}\nof a step's time: {:.1}% forward and backward, {:.1}% compress, {:.1}% exchange, {:.1}% decode, \
         {:.1}% optimiser, {:.1}% data",
        metric.name(),
        metric.show(last),
        share(time.model),
        share(time.compress),
        share(time.encode + time.wait),
        share(time.decode),
        share(time.optimizer),
        share(time.data)
    )
}

/// Returns what a run has come to, for programs.
pub(crate) fn result(metric: Metric, strategy: Strategy, last: &Epoch) -> Value {
    let (name, value) = match metric {
        Metric::Error => ("test_error", last.test_error),
        Metric::Loss => ("loss", last.test_loss),
    };
    let total = &last.total;
    json!({
        (name): value,
        "strategy": strategy.to_string(),
        "compression_ratio": total.compression_ratio,
        "frame_ratio": total.frame_ratio,
        "bytes_sent": total.bytes_sent,
        "seconds": total.seconds,
    })
}
