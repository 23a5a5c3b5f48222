//! `adacomp recipes`

use crate::End;
use crate::config::{Config, value_name};
use crate::recipes::RECIPES;
use anyhow::Result;

pub(crate) fn run() -> Result<End> {
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
            recipe.data.name()
        );
    }
    Ok(End::Done)
}
