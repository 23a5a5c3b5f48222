//! Learners in one process, on as many threads as one likes.

use crate::error::TransportError;
use crate::transport::{Incoming, Outgoing, Transport};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connects so many learners on so many threads: one transport for each thread, which hosts its share of the learners.
/// Waiting takes at most `limit`.
pub fn local(learners: usize, threads: usize, limit: Duration) -> Vec<Local> {
    let threads = threads.clamp(1, learners.max(1));
    let hosted: Vec<_> =
        (0..threads).map(|thread| learners * thread / threads..learners * (thread + 1) / threads).collect();
    let state = State { rounds: VecDeque::new(), first: 0, ended: vec![false; threads] };
    let shared = Arc::new(Shared { hosted, state: Mutex::new(state), changed: Condvar::new() });
    (0..threads)
        .map(|thread| Local { shared: shared.clone(), thread, learners, limit, started: 0, finished: 0 })
        .collect()
}

/// Runs this for each of so many learners, each on a thread of its own; what they return, in their order.
///
/// # Panics
/// If one of them does.
pub fn on_threads<T: Send>(learners: usize, limit: Duration, work: impl Fn(Local) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let transports = local(learners, learners, limit).into_iter();
        let threads: Vec<_> = transports.map(|transport| scope.spawn(move || work(transport))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// One thread's side of a [`local`] transport.
#[derive(Debug)]
pub struct Local {
    shared: Arc<Shared>,
    thread: usize,
    learners: usize,
    limit: Duration,
    started: u64,
    finished: u64,
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

/// What each thread has put into a round, and how many have taken it out.
#[derive(Debug)]
struct Round {
    outgoing: Vec<Option<Shape>>,
    finished: usize,
}

#[derive(Debug)]
enum Shape {
    AllGather(Vec<Arc<Vec<u8>>>),
    AllToAll(Vec<Vec<Vec<u8>>>),
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

    fn start(&mut self, outgoing: Outgoing) -> Result<(), TransportError> {
        outgoing.check(self.hosted().len(), self.learners)?;
        let threads = self.shared.hosted.len();
        let mut state = self.shared.lock();
        let index = (self.started - state.first) as usize;
        while state.rounds.len() <= index {
            state.rounds.push_back(Round { outgoing: (0..threads).map(|_| None).collect(), finished: 0 });
        }
        state.rounds[index].outgoing[self.thread] = Some(match outgoing {
            Outgoing::AllGather(messages) => Shape::AllGather(messages.into_iter().map(Arc::new).collect()),
            Outgoing::AllToAll(messages) => Shape::AllToAll(messages),
        });
        self.started += 1;
        drop(state);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn finish(&mut self) -> Result<Incoming, TransportError> {
        if self.finished == self.started {
            return Err(TransportError::NotStarted);
        }
        // A limit beyond all time is none.
        let deadline = Instant::now().checked_add(self.limit);
        let mut state = self.shared.lock();
        loop {
            let index = (self.finished - state.first) as usize;
            let missing: Vec<usize> = (0..self.shared.hosted.len())
                .filter(|&thread| state.rounds[index].outgoing[thread].is_none())
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
                deadline.map_or(self.limit, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(TransportError::TimeOut { learners: learners(&missing), limit: self.limit });
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let index = (self.finished - state.first) as usize;
        let incoming = take(&mut state.rounds[index], self.hosted());
        self.finished += 1;
        state.rounds[index].finished += 1;
        while state.rounds.front().is_some_and(|round| round.finished == self.shared.hosted.len()) {
            state.rounds.pop_front();
            state.first += 1;
        }
        incoming
    }
}

/// What a round has for these learners.
fn take(round: &mut Round, hosted: Range<usize>) -> Result<Incoming, TransportError> {
    let shapes = round.outgoing.iter_mut().flatten();
    let mut all_gather = Vec::new();
    let mut all_to_all: Vec<Vec<Vec<u8>>> = vec![Vec::new(); hosted.len()];
    let (mut all, mut each) = (false, false);
    for shape in shapes {
        match shape {
            Shape::AllGather(messages) => {
                all = true;
                all_gather.extend(messages.iter().cloned());
            }
            Shape::AllToAll(senders) => {
                each = true;
                for messages in senders {
                    for (receiver, taken) in hosted.clone().zip(&mut all_to_all) {
                        taken.push(messages.get_mut(receiver).map(std::mem::take).unwrap_or_default());
                    }
                }
            }
        }
    }
    match (all, each) {
        (true, false) => Ok(Incoming::AllGather(all_gather)),
        (false, true) => Ok(Incoming::AllToAll(all_to_all)),
        _ => Err(TransportError::OutOfStep),
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.shared.lock().ended[self.thread] = true;
        self.shared.changed.notify_all();
    }
}
