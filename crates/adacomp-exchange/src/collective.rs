//! Moving bytes between learners. A collective knows nothing of gradients.

use crate::error::CollectiveError;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What the learners that are hosted here send in one round; the first index is the hosted learner.
#[derive(Debug, Clone)]
pub enum Outgoing {
    /// One message to all learners.
    ToAll(Vec<Vec<u8>>),
    /// One message to each learner, by its number.
    ToEach(Vec<Vec<Vec<u8>>>),
}

impl Outgoing {
    /// That there is a message of each learner that is hosted, and to each learner.
    pub(crate) fn check(&self, hosted: usize, learners: usize) -> Result<(), CollectiveError> {
        let lengths = match self {
            Self::ToAll(messages) => vec![(messages.len(), hosted)],
            Self::ToEach(messages) => {
                let each = messages.iter().map(|messages| (messages.len(), learners));
                std::iter::once((messages.len(), hosted)).chain(each).collect()
            }
        };
        check_lengths(lengths)
    }
}

impl Incoming {
    /// That there is a message of each learner, to each that is hosted.
    pub(crate) fn check(&self, to_all: bool, hosted: usize, learners: usize) -> Result<(), CollectiveError> {
        match self {
            Self::ToAll(messages) if to_all => check_lengths(vec![(messages.len(), learners)]),
            Self::ToEach(messages) if !to_all => {
                let each = messages.iter().map(|messages| (messages.len(), learners));
                check_lengths(std::iter::once((messages.len(), hosted)).chain(each).collect())
            }
            _ => Err(CollectiveError::OutOfStep),
        }
    }
}

fn check_lengths(lengths: Vec<(usize, usize)>) -> Result<(), CollectiveError> {
    match lengths.into_iter().find(|(actual, expected)| actual != expected) {
        Some((actual, expected)) => Err(CollectiveError::Messages { expected, actual }),
        None => Ok(()),
    }
}

/// How long to wait for other learners, unless told otherwise.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// What came of a round. Learners also get what they sent themselves.
#[derive(Debug, Clone)]
pub enum Incoming {
    /// The messages of all learners, by their number: the same for every learner that is hosted here.
    ToAll(Vec<Arc<Vec<u8>>>),
    /// For each learner that is hosted here the messages of all learners to it.
    ToEach(Vec<Vec<Vec<u8>>>),
}

/// Moves bytes between learners, of which one or several are hosted here.
///
/// There is no sum of numbers here: sums must be made in learner order to be the same bits everywhere, so they are a strategy's
/// business (`dense`), and a collective only moves bytes.
///
/// Rounds are started and finished in the same order everywhere. Starting does not wait, so that several rounds can be
/// under way while the learner works; finishing waits for the oldest, and never longer than the collective's time limit.
pub trait Collective {
    /// How many learners there are.
    fn learners(&self) -> usize;

    /// The learners that are hosted here.
    fn hosted(&self) -> Range<usize>;

    /// Starts a round.
    fn start(&mut self, outgoing: Outgoing) -> Result<(), CollectiveError>;

    /// Finishes the oldest round that was started.
    fn finish(&mut self) -> Result<Incoming, CollectiveError>;

    /// A round of its own, while none is under way: a message of each learner that is hosted here goes to all. All learners'
    /// messages.
    fn to_all(&mut self, messages: Vec<Vec<u8>>) -> Result<Vec<Arc<Vec<u8>>>, CollectiveError> {
        self.start(Outgoing::ToAll(messages))?;
        match self.finish()? {
            Incoming::ToAll(messages) => Ok(messages),
            Incoming::ToEach(_) => Err(CollectiveError::OutOfStep),
        }
    }

    /// A round of its own, while none is under way: each learner that is hosted here sends a message to each. For each learner
    /// that is hosted here, all learners' messages to it.
    fn to_each(&mut self, messages: Vec<Vec<Vec<u8>>>) -> Result<Vec<Vec<Vec<u8>>>, CollectiveError> {
        self.start(Outgoing::ToEach(messages))?;
        match self.finish()? {
            Incoming::ToEach(messages) => Ok(messages),
            Incoming::ToAll(_) => Err(CollectiveError::OutOfStep),
        }
    }

    /// Waits until all learners are here.
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.to_all(vec![Vec::new(); self.hosted().len()]).map(drop)
    }
}

/// A collective that is only lent, so that it can be used for something else after.
impl<C: Collective> Collective for &mut C {
    fn learners(&self) -> usize {
        (**self).learners()
    }

    fn hosted(&self) -> Range<usize> {
        (**self).hosted()
    }

    fn start(&mut self, outgoing: Outgoing) -> Result<(), CollectiveError> {
        (**self).start(outgoing)
    }

    fn finish(&mut self) -> Result<Incoming, CollectiveError> {
        (**self).finish()
    }
}
