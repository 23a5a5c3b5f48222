//! Where learners live: on threads of this process, or in processes that mpirun started.

use anyhow::Result;
use clap::ValueEnum;
use std::time::Duration;

/// Where learners live.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Threads of this process
    #[default]
    Local,
    /// Processes that mpirun started, one learner each
    Mpi,
}

impl Engine {
    /// The processes, if learners live in several.
    pub(crate) fn start(self, limit: Duration) -> Result<Option<Processes>> {
        match self {
            Self::Local => Ok(None),
            Self::Mpi => start(limit).map(Some),
        }
    }
}

/// Learners in processes.
#[cfg(feature = "mpi")]
pub(crate) type Processes = adacomp_exchange::Mpi;

#[cfg(feature = "mpi")]
fn start(limit: Duration) -> Result<Processes> {
    Ok(adacomp_exchange::Mpi::start(limit)?)
}

/// A program without MPI has no such learners.
#[cfg(not(feature = "mpi"))]
pub(crate) type Processes = adacomp_exchange::Local;

#[cfg(not(feature = "mpi"))]
fn start(_limit: Duration) -> Result<Processes> {
    anyhow::bail!("this program was built without MPI: build it with `cargo build --release --features mpi`")
}
