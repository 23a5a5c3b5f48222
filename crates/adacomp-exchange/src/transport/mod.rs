//! Moves bytes between learners: the trait, and threads in one process. A transport knows nothing of gradients.

#[cfg(feature = "mpi")]
mod mpi;

use crate::error::TransportError;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long to wait for other learners by default.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The messages of a round, as they are sent or as they came. Learners also get what they sent themselves.
#[derive(Debug, Clone)]
pub enum Messages {
    /// One message to all: sent by each learner that is hosted here; received from each learner, by its number.
    AllGather(Vec<Arc<Vec<u8>>>),
    /// For each learner that is hosted here its messages to, or from, each learner, by its number.
    AllToAll(Vec<Vec<Vec<u8>>>),
}

impl Messages {
    /// Checks that there are this many messages, or rows of messages of this length.
    pub(crate) fn check(&self, rows: usize, row: usize) -> Result<(), TransportError> {
        let check = |actual, expected| match actual == expected {
            true => Ok(()),
            false => Err(TransportError::Messages { expected, actual }),
        };
        match self {
            Self::AllGather(messages) => check(messages.len(), rows),
            Self::AllToAll(messages) => {
                check(messages.len(), rows)?;
                messages.iter().try_for_each(|messages| check(messages.len(), row))
            }
        }
    }
}

/// Moves bytes between learners, of which one or several are hosted here.
///
/// There is no sum of numbers here: sums must be made in learner order to be the same bits everywhere, so they are a strategy's
/// business (`dense`), and a transport only moves bytes.
///
/// Rounds are started and finished in the same order everywhere. Starting does not wait, so that several rounds can be
/// under way while the learner works; finishing waits for the oldest, and never longer than the transport's timeout.
pub trait Transport {
    /// Returns the number of learners.
    fn learners(&self) -> usize;

    /// Returns the learners that are hosted here.
    fn hosted(&self) -> Range<usize>;

    /// Starts a round.
    fn start(&mut self, messages: Messages) -> Result<(), TransportError>;

    /// Finishes the oldest round that was started.
    fn finish(&mut self) -> Result<Messages, TransportError>;

    /// Runs a round while none is under way: sends a message of each learner that is hosted here to all, and returns all
    /// learners' messages.
    fn all_gather(&mut self, messages: Vec<Vec<u8>>) -> Result<Vec<Arc<Vec<u8>>>, TransportError> {
        self.start(Messages::AllGather(messages.into_iter().map(Arc::new).collect()))?;
        match self.finish()? {
            Messages::AllGather(messages) => Ok(messages),
            Messages::AllToAll(_) => Err(TransportError::OutOfStep),
        }
    }

    /// Runs a round while none is under way: sends a message of each learner that is hosted here to each learner, and returns
    /// for each learner that is hosted here all learners' messages to it.
    fn all_to_all(&mut self, messages: Vec<Vec<Vec<u8>>>) -> Result<Vec<Vec<Vec<u8>>>, TransportError> {
        self.start(Messages::AllToAll(messages))?;
        match self.finish()? {
            Messages::AllToAll(messages) => Ok(messages),
            Messages::AllGather(_) => Err(TransportError::OutOfStep),
        }
    }

    /// Waits until all learners are here.
    fn barrier(&mut self) -> Result<(), TransportError> {
        self.all_gather(vec![Vec::new(); self.hosted().len()]).map(drop)
    }
}

/// A borrowed transport, which can be used for something else after.
impl<T: Transport> Transport for &mut T {
    fn learners(&self) -> usize {
        (**self).learners()
    }

    fn hosted(&self) -> Range<usize> {
        (**self).hosted()
    }

    fn start(&mut self, messages: Messages) -> Result<(), TransportError> {
        (**self).start(messages)
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        (**self).finish()
    }
}

/// Learners on threads of one process, to be connected.
///
/// ```
/// use adacomp_exchange::{Threads, Transport};
///
/// // Four learners on two threads.
/// for transport in (Threads { threads: 2, ..Threads::new(4) }).connect() {
///     assert_eq!(transport.hosted().len(), 2);
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Threads {
    /// The number of learners.
    pub learners: usize,
    /// The number of threads. Each hosts its part of the learners; there are never more threads than learners.
    pub threads: usize,
    /// How long to wait for other learners.
    pub timeout: Duration,
}

impl Threads {
    /// Returns learners on a thread each, with the default timeout.
    pub fn new(learners: usize) -> Self {
        Self { learners, threads: learners, timeout: TIMEOUT }
    }

    /// Connects the learners. Returns one transport for each thread.
    pub fn connect(self) -> Vec<Local> {
        let Self { learners, timeout, .. } = self;
        let threads = self.threads.clamp(1, learners.max(1));
        let hosted: Vec<_> = (0..threads)
            .map(|thread| learners * thread / threads..learners * (thread + 1) / threads)
            .collect();
        let state = State { rounds: VecDeque::new(), first: 0, ended: vec![false; threads] };
        let shared = Arc::new(Shared { hosted, state: Mutex::new(state), changed: Condvar::new() });
        (0..threads)
            .map(|thread| Local {
                shared: shared.clone(),
                thread,
                learners,
                timeout,
                started: 0,
                finished: 0,
            })
            .collect()
    }

    /// Connects the learners and runs `work` on each thread. Returns the results in the threads' order.
    ///
    /// # Panics
    /// If one of them does.
    pub fn run<R: Send>(self, work: impl Fn(Local) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let (work, transports) = (&work, self.connect().into_iter());
            let threads: Vec<_> = transports.map(|transport| scope.spawn(move || work(transport))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, R>| {
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }
}

/// One thread's side of [`Threads`].
#[derive(Debug)]
pub struct Local {
    shared: Arc<Shared>,
    thread: usize,
    learners: usize,
    timeout: Duration,
    started: u64,
    finished: u64,
}

impl Local {
    /// Returns a transport that hosts all of these learners, so that a single thread runs them.
    pub fn alone(learners: usize) -> Self {
        Threads { threads: 1, ..Threads::new(learners) }.connect().remove(0)
    }
}

#[derive(Debug)]
struct Shared {
    hosted: Vec<Range<usize>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Rounds that some thread has started and not all have finished.
    rounds: VecDeque<Round>,
    /// The number of the first of them.
    first: u64,
    ended: Vec<bool>,
}

/// What each thread has sent in a round, and how many have received theirs.
#[derive(Debug)]
struct Round {
    sent: Vec<Option<Messages>>,
    finished: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked is marked as ended by its `Drop`; the state itself is never left half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Local {
    fn learners(&self) -> usize {
        self.learners
    }

    fn hosted(&self) -> Range<usize> {
        self.shared.hosted[self.thread].clone()
    }

    fn start(&mut self, messages: Messages) -> Result<(), TransportError> {
        messages.check(self.hosted().len(), self.learners)?;
        let threads = self.shared.hosted.len();
        let mut state = self.shared.lock();
        let index = (self.started - state.first) as usize;
        while state.rounds.len() <= index {
            state.rounds.push_back(Round { sent: (0..threads).map(|_| None).collect(), finished: 0 });
        }
        state.rounds[index].sent[self.thread] = Some(messages);
        self.started += 1;
        drop(state);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        if self.finished == self.started {
            return Err(TransportError::NotStarted);
        }
        // A timeout beyond all time is none.
        let deadline = Instant::now().checked_add(self.timeout);
        let mut state = self.shared.lock();
        loop {
            let index = (self.finished - state.first) as usize;
            let missing: Vec<usize> = (0..self.shared.hosted.len())
                .filter(|&thread| state.rounds[index].sent[thread].is_none())
                .collect();
            if missing.is_empty() {
                break;
            }
            let learners = |threads: &[usize]| -> Vec<usize> {
                threads.iter().flat_map(|&thread| self.shared.hosted[thread].clone()).collect()
            };
            let ended: Vec<usize> = missing.iter().copied().filter(|&thread| state.ended[thread]).collect();
            if !ended.is_empty() {
                return Err(TransportError::Ended { learners: learners(&ended) });
            }
            let left =
                deadline.map_or(self.timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(TransportError::Timeout { learners: learners(&missing), timeout: self.timeout });
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let index = (self.finished - state.first) as usize;
        let received = receive(&mut state.rounds[index], self.hosted());
        self.finished += 1;
        state.rounds[index].finished += 1;
        while state.rounds.front().is_some_and(|round| round.finished == self.shared.hosted.len()) {
            state.rounds.pop_front();
            state.first += 1;
        }
        received
    }
}

/// Takes what a round has for these learners.
fn receive(round: &mut Round, hosted: Range<usize>) -> Result<Messages, TransportError> {
    let mut all_gather = Vec::new();
    let mut all_to_all: Vec<Vec<Vec<u8>>> = vec![Vec::new(); hosted.len()];
    let (mut all, mut each) = (false, false);
    for messages in round.sent.iter_mut().flatten() {
        match messages {
            Messages::AllGather(messages) => {
                all = true;
                all_gather.extend(messages.iter().cloned());
            }
            Messages::AllToAll(senders) => {
                each = true;
                for messages in senders {
                    for (receiver, received) in hosted.clone().zip(&mut all_to_all) {
                        received.push(messages.get_mut(receiver).map(std::mem::take).unwrap_or_default());
                    }
                }
            }
        }
    }
    match (all, each) {
        (true, false) => Ok(Messages::AllGather(all_gather)),
        (false, true) => Ok(Messages::AllToAll(all_to_all)),
        _ => Err(TransportError::OutOfStep),
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.shared.lock().ended[self.thread] = true;
        self.shared.changed.notify_all();
    }
}
