//! One file a command.

pub(crate) mod compare;
pub(crate) mod data;
pub(crate) mod inspect;
pub(crate) mod plan;
pub(crate) mod recipes;
pub(crate) mod train;
