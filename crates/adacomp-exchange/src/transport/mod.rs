//! Moves bytes between learners: the trait, and threads in one process. A transport knows nothing of gradients.

#[cfg(feature = "mpi")]
mod mpi;

use crate::error::TransportError;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
use std::collections::VecDeque;
use std::mem::take;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
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

    /// Returns the other processes of the learner that is hosted here, if several are one learner.
    fn inside(&mut self) -> Option<&mut dyn Inside> {
        None
    }

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

/// Processes that together are one learner, such as those of one machine: each exchanges its part of the model with the processes
/// that have the same part elsewhere. All of them call the same, in the same order.
pub trait Inside {
    /// Replaces the scales of these layers, which are parts of parameters, by those of the whole parameters.
    fn share_scales(&mut self, layers: &[usize], scales: &mut [f32]) -> Result<(), TransportError>;

    /// Returns whether all of them can use the step.
    fn agree(&mut self, good: bool) -> Result<bool, TransportError>;
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

    fn inside(&mut self) -> Option<&mut dyn Inside> {
        (**self).inside()
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
        let (outgoing, incoming): (Vec<_>, Vec<_>) = hosted.iter().map(|_| channel()).unzip();
        let local = |(thread, incoming)| Local {
            thread,
            learners,
            timeout,
            hosted: hosted.clone(),
            outgoing: outgoing.clone(),
            incoming: Mutex::new(incoming),
            arrived: vec![VecDeque::new(); threads],
            ended: vec![false; threads],
            under_way: 0,
        };
        incoming.into_iter().enumerate().map(local).collect()
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

/// The thread that sends, and its messages of a round to another thread; none when it ends.
type Sent = (usize, Option<Messages>);

/// One thread's side of [`Threads`].
#[derive(Debug)]
pub struct Local {
    thread: usize,
    learners: usize,
    timeout: Duration,
    /// The learners of each thread.
    hosted: Vec<Range<usize>>,
    /// To each thread.
    outgoing: Vec<Sender<Sent>>,
    /// In a mutex because bindings to other languages share a transport between threads.
    incoming: Mutex<Receiver<Sent>>,
    /// What has come from each thread of rounds that are not finished, oldest first.
    arrived: Vec<VecDeque<Messages>>,
    ended: Vec<bool>,
    under_way: usize,
}

impl Local {
    /// Returns a transport that hosts all of these learners, so that a single thread runs them.
    pub fn alone(learners: usize) -> Self {
        Threads { threads: 1, ..Threads::new(learners) }.connect().remove(0)
    }
}

impl Transport for Local {
    fn learners(&self) -> usize {
        self.learners
    }

    fn hosted(&self) -> Range<usize> {
        self.hosted[self.thread].clone()
    }

    fn start(&mut self, mut messages: Messages) -> Result<(), TransportError> {
        messages.check(self.hosted().len(), self.learners)?;
        for (outgoing, hosted) in self.outgoing.iter().zip(&self.hosted) {
            let part = match &mut messages {
                Messages::AllGather(messages) => Messages::AllGather(messages.clone()),
                Messages::AllToAll(rows) => {
                    let part = |row: &mut Vec<Vec<u8>>| row[hosted.clone()].iter_mut().map(take).collect();
                    Messages::AllToAll(rows.iter_mut().map(part).collect())
                }
            };
            // A thread that has ended takes no more.
            let _ = outgoing.send((self.thread, Some(part)));
        }
        self.under_way += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        if self.under_way == 0 {
            return Err(TransportError::NotStarted);
        }
        self.wait()?;
        self.under_way -= 1;
        let mut all_gather = Vec::new();
        let mut all_to_all = vec![Vec::new(); self.hosted().len()];
        for messages in self.arrived.iter_mut().filter_map(VecDeque::pop_front) {
            match messages {
                Messages::AllGather(messages) => all_gather.extend(messages),
                Messages::AllToAll(rows) => {
                    for row in rows {
                        all_to_all.iter_mut().zip(row).for_each(|(received, message)| received.push(message));
                    }
                }
            }
        }
        match all_gather.len() {
            0 => Ok(Messages::AllToAll(all_to_all)),
            all if all == self.learners => Ok(Messages::AllGather(all_gather)),
            _ => Err(TransportError::OutOfStep),
        }
    }
}

impl Local {
    /// Waits until the oldest round has come from all threads.
    fn wait(&mut self) -> Result<(), TransportError> {
        // A timeout beyond all time is none.
        let deadline = Instant::now().checked_add(self.timeout);
        loop {
            let threads = 0..self.hosted.len();
            let missing: Vec<usize> = threads.filter(|&thread| self.arrived[thread].is_empty()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            let learners = |threads: Vec<usize>| {
                threads.iter().flat_map(|&thread| self.hosted[thread].clone()).collect()
            };
            let ended: Vec<usize> = missing.iter().copied().filter(|&thread| self.ended[thread]).collect();
            if !ended.is_empty() {
                return Err(TransportError::Ended { learners: learners(ended) });
            }
            let left =
                deadline.map_or(self.timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            let incoming = self.incoming.get_mut().unwrap_or_else(PoisonError::into_inner);
            match incoming.recv_timeout(left) {
                Ok((thread, Some(messages))) => self.arrived[thread].push_back(messages),
                Ok((thread, None)) => self.ended[thread] = true,
                Err(_) => {
                    return Err(TransportError::Timeout {
                        learners: learners(missing),
                        timeout: self.timeout,
                    });
                }
            }
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        for outgoing in &self.outgoing {
            let _ = outgoing.send((self.thread, None));
        }
    }
}
