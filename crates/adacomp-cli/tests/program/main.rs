//! The real program, run as its users run it.

mod bad_input;
mod checkpoints;
mod commands;
mod data;
mod local_steps;
mod plan;
mod support;
mod training;
