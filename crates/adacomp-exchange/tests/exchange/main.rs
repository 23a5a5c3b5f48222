//! Exchanges between learners: over threads, and by hand without any transport.

mod agreement;
mod clip;
mod draw;
mod failures;
mod faults;
mod groups;
mod hand;
mod numbers;
mod state;
mod steps;
mod support;
