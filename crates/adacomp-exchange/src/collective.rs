//! Moving bytes between learners. A collective knows nothing of gradients.

use crate::error::CollectiveError;
use std::ops::Range;
use std::sync::Arc;

/// What the learners that are hosted here send in one round; the first index is the hosted learner.
#[derive(Debug, Clone)]
pub enum Outgoing {
    /// One message to all learners.
    ToAll(Vec<Vec<u8>>),
    /// One message to each learner, by its number.
    ToEach(Vec<Vec<Vec<u8>>>),
}

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

    /// Waits until all learners are here.
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.start(Outgoing::ToAll(vec![Vec::new(); self.hosted().len()]))?;
        self.finish().map(drop)
    }
}
