//! `adacomp recipes`

use crate::End;
use crate::config::Config;
use crate::recipes::RECIPES;
use anyhow::Result;

pub(crate) fn run() -> Result<End> {
    for recipe in RECIPES {
        let config = Config::of(recipe.name)?;
        println!("{}\n    {}\n    {}", recipe.name, recipe.about, recipe.expected);
        println!(
            "    {} learners, minibatch {}, {} epochs, {:?} at {} ({:?}), data: {}\n",
            config.learners,
            config.minibatch,
            recipe.epochs,
            config.optimizer,
            config.learning_rate,
            config.schedule,
            recipe.data.name()
        );
    }
    Ok(End::Done)
}
