//! Moving bytes between learners. A transport knows nothing of gradients.

use crate::error::TransportError;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What the learners that are hosted here send in one round; the first index is the hosted learner.
#[derive(Debug, Clone)]
pub enum Outgoing {
    /// One message to all learners.
    AllGather(Vec<Vec<u8>>),
    /// One message to each learner, by its number.
    AllToAll(Vec<Vec<Vec<u8>>>),
}

impl Outgoing {
    /// That there is a message of each learner that is hosted, and to each learner.
    pub(crate) fn check(&self, hosted: usize, learners: usize) -> Result<(), TransportError> {
        let lengths = match self {
            Self::AllGather(messages) => vec![(messages.len(), hosted)],
            Self::AllToAll(messages) => {
                let each = messages.iter().map(|messages| (messages.len(), learners));
                std::iter::once((messages.len(), hosted)).chain(each).collect()
            }
        };
        check_lengths(lengths)
    }
}

impl Incoming {
    /// That there is a message of each learner, to each that is hosted.
    pub(crate) fn check(
        &self,
        all_gather: bool,
        hosted: usize,
        learners: usize,
    ) -> Result<(), TransportError> {
        match self {
            Self::AllGather(messages) if all_gather => check_lengths(vec![(messages.len(), learners)]),
            Self::AllToAll(messages) if !all_gather => {
                let each = messages.iter().map(|messages| (messages.len(), learners));
                check_lengths(std::iter::once((messages.len(), hosted)).chain(each).collect())
            }
            _ => Err(TransportError::OutOfStep),
        }
    }
}

fn check_lengths(lengths: Vec<(usize, usize)>) -> Result<(), TransportError> {
    match lengths.into_iter().find(|(actual, expected)| actual != expected) {
        Some((actual, expected)) => Err(TransportError::Messages { expected, actual }),
        None => Ok(()),
    }
}

/// How long to wait for other learners, unless told otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// What came of a round. Learners also get what they sent themselves.
#[derive(Debug, Clone)]
pub enum Incoming {
    /// The messages of all learners, by their number: the same for every learner that is hosted here.
    AllGather(Vec<Arc<Vec<u8>>>),
    /// For each learner that is hosted here the messages of all learners to it.
    AllToAll(Vec<Vec<Vec<u8>>>),
}

/// Moves bytes between learners, of which one or several are hosted here.
///
/// There is no sum of numbers here: sums must be made in learner order to be the same bits everywhere, so they are a strategy's
/// business (`dense`), and a transport only moves bytes.
///
/// Rounds are started and finished in the same order everywhere. Starting does not wait, so that several rounds can be
/// under way while the learner works; finishing waits for the oldest, and never longer than the transport's time limit.
pub trait Transport {
    /// How many learners there are.
    fn learners(&self) -> usize;

    /// The learners that are hosted here.
    fn hosted(&self) -> Range<usize>;

    /// Starts a round.
    fn start(&mut self, outgoing: Outgoing) -> Result<(), TransportError>;

    /// Finishes the oldest round that was started.
    fn finish(&mut self) -> Result<Incoming, TransportError>;

    /// A round of its own, while none is under way: a message of each learner that is hosted here goes to all. All learners'
    /// messages.
    fn all_gather(&mut self, messages: Vec<Vec<u8>>) -> Result<Vec<Arc<Vec<u8>>>, TransportError> {
        self.start(Outgoing::AllGather(messages))?;
        match self.finish()? {
            Incoming::AllGather(messages) => Ok(messages),
            Incoming::AllToAll(_) => Err(TransportError::OutOfStep),
        }
    }

    /// A round of its own, while none is under way: each learner that is hosted here sends a message to each. For each learner
    /// that is hosted here, all learners' messages to it.
    fn all_to_all(&mut self, messages: Vec<Vec<Vec<u8>>>) -> Result<Vec<Vec<Vec<u8>>>, TransportError> {
        self.start(Outgoing::AllToAll(messages))?;
        match self.finish()? {
            Incoming::AllToAll(messages) => Ok(messages),
            Incoming::AllGather(_) => Err(TransportError::OutOfStep),
        }
    }

    /// Waits until all learners are here.
    fn barrier(&mut self) -> Result<(), TransportError> {
        self.all_gather(vec![Vec::new(); self.hosted().len()]).map(drop)
    }
}

/// A transport that is only lent, so that it can be used for something else after.
impl<C: Transport> Transport for &mut C {
    fn learners(&self) -> usize {
        (**self).learners()
    }

    fn hosted(&self) -> Range<usize> {
        (**self).hosted()
    }

    fn start(&mut self, outgoing: Outgoing) -> Result<(), TransportError> {
        (**self).start(outgoing)
    }

    fn finish(&mut self) -> Result<Incoming, TransportError> {
        (**self).finish()
    }
}
