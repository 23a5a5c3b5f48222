//! The rules that must always hold, tested through the public interface.

mod averager;
mod baselines;
mod golden;
mod policy;
mod properties;
mod state;
mod steps;
mod support;
mod wire;
