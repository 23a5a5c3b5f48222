//! Learners on many machines, by MPI: one learner in each process.
//!
//! MPI runs on a thread of its own. It moves bytes while the learner works, and a learner that waits for others can stop
//! waiting: the calls of MPI have no timeout.

use super::{Messages, Transport};
use crate::error::TransportError;
use mpi::Threading;
use mpi::datatype::{Partition, PartitionMut};
use mpi::traits::{Communicator, CommunicatorCollectives};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// This process as one of MPI's learners.
#[derive(Debug)]
pub struct Mpi {
    learner: usize,
    learners: usize,
    timeout: Duration,
    outgoing: Option<Sender<Messages>>,
    incoming: Receiver<Result<Messages, TransportError>>,
    under_way: usize,
    lost: bool,
}

impl Mpi {
    /// Starts MPI. Waiting for other learners takes at most `timeout` each time.
    pub fn start(timeout: Duration) -> Result<Self, TransportError> {
        let (outgoing, requests) = channel();
        let (replies, incoming) = channel();
        let (introduce, introduced) = channel();
        std::thread::Builder::new()
            .name("mpi".to_owned())
            .spawn(move || serve(&introduce, &requests, &replies))
            .map_err(|error| failed(&error.to_string()))?;
        let (learner, learners) = introduced
            .recv_timeout(timeout)
            .map_err(|_| failed("did not start; is this process run by mpirun?"))?
            .ok_or_else(|| failed("is initialised already, by other code of this process"))?;
        Ok(Self { learner, learners, timeout, outgoing: Some(outgoing), incoming, under_way: 0, lost: false })
    }
}

fn failed(reason: &str) -> TransportError {
    TransportError::Transport { transport: "mpi", reason: reason.to_owned() }
}

/// Runs MPI on its thread: says who it is, then moves bytes until there are no more requests.
fn serve(
    introduce: &Sender<Option<(usize, usize)>>,
    requests: &Receiver<Messages>,
    replies: &Sender<Result<Messages, TransportError>>,
) {
    let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = introduce.send(None);
        return;
    };
    let world = universe.world();
    let _ = introduce.send(Some((world.rank() as usize, world.size() as usize)));
    for outgoing in requests {
        let incoming = match outgoing {
            Messages::AllGather(mut messages) => {
                all_gather(&world, messages.pop().map(Arc::unwrap_or_clone).unwrap_or_default())
            }
            Messages::AllToAll(mut messages) => all_to_all(&world, &messages.pop().unwrap_or_default()),
        };
        if replies.send(incoming).is_err() {
            return;
        }
    }
}

/// Returns the lengths of messages as MPI wants them: 32-bit counts and offsets.
fn counts(lengths: impl Iterator<Item = usize>) -> Result<Vec<i32>, TransportError> {
    let counts: Vec<i32> = lengths
        .map(|length| {
            i32::try_from(length).map_err(|_| failed("a message is longer than 2 GiB; use smaller groups"))
        })
        .collect::<Result<_, _>>()?;
    match counts.iter().try_fold(0i32, |sum, count| sum.checked_add(*count)) {
        Some(_) => Ok(counts),
        None => Err(failed("the messages of a round are longer than 2 GiB; use smaller groups")),
    }
}

fn offsets(counts: &[i32]) -> Vec<i32> {
    counts.iter().scan(0, |next, count| Some(std::mem::replace(next, *next + count))).collect()
}

/// Returns messages of these lengths, which `take` takes from MPI.
fn received(
    lengths: &[u64],
    take: impl FnOnce(&mut PartitionMut<'_, [u8], &[i32], &[i32]>),
) -> Result<Vec<Vec<u8>>, TransportError> {
    let counts = counts(lengths.iter().map(|length| *length as usize))?;
    let (offsets, length) = (offsets(&counts), counts.iter().sum::<i32>() as usize);
    // Even an empty buffer has an address of its own: Rust's address of nothing, 1, is what Open MPI takes for "in place".
    let mut bytes = Vec::with_capacity(length.max(1));
    bytes.resize(length, 0);
    take(&mut PartitionMut::new(&mut bytes[..], &counts[..], &offsets[..]));
    let message = |(&count, &offset)| bytes[offset as usize..(offset + count) as usize].to_vec();
    Ok(counts.iter().zip(&offsets).map(message).collect())
}

fn all_gather(
    world: &impl CommunicatorCollectives,
    mut message: Vec<u8>,
) -> Result<Messages, TransportError> {
    message.reserve(1);
    let mut lengths = vec![0; world.size() as usize];
    world.all_gather_into(&(message.len() as u64), &mut lengths[..]);
    let messages = received(&lengths, |all| world.all_gather_varcount_into(&message[..], all))?;
    Ok(Messages::AllGather(messages.into_iter().map(Arc::new).collect()))
}

fn all_to_all(
    world: &impl CommunicatorCollectives,
    messages: &[Vec<u8>],
) -> Result<Messages, TransportError> {
    let own: Vec<u64> = messages.iter().map(|message| message.len() as u64).collect();
    let mut lengths = vec![0; world.size() as usize];
    world.all_to_all_into(&own[..], &mut lengths[..]);
    let mut bytes = messages.concat();
    bytes.reserve(1);
    let counts = counts(messages.iter().map(Vec::len))?;
    let offsets = offsets(&counts);
    let sent = Partition::new(&bytes[..], &counts[..], &offsets[..]);
    Ok(Messages::AllToAll(vec![received(&lengths, |all| world.all_to_all_varcount_into(&sent, all))?]))
}

impl Transport for Mpi {
    fn learners(&self) -> usize {
        self.learners
    }

    fn hosted(&self) -> Range<usize> {
        self.learner..self.learner + 1
    }

    fn start(&mut self, messages: Messages) -> Result<(), TransportError> {
        messages.check(1, self.learners)?;
        self.check_lost()?;
        let gone = || failed("has ended");
        self.outgoing.as_ref().ok_or_else(gone)?.send(messages).map_err(|_| gone())?;
        self.under_way += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        self.check_lost()?;
        if self.under_way == 0 {
            return Err(TransportError::NotStarted);
        }
        self.under_way -= 1;
        let incoming = self.incoming.recv_timeout(self.timeout).unwrap_or_else(|error| match error {
            // Who it is that does not answer, MPI does not say.
            RecvTimeoutError::Timeout => {
                Err(TransportError::Timeout { learners: Vec::new(), timeout: self.timeout })
            }
            RecvTimeoutError::Disconnected => Err(failed("has ended")),
        });
        self.lost |= incoming.is_err();
        incoming
    }
}

impl Mpi {
    /// Refuses to go on after a timeout: an answer may still come, and would be taken for that of another round.
    fn check_lost(&self) -> Result<(), TransportError> {
        if self.lost { Err(failed("has lost a learner")) } else { Ok(()) }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // MPI ends with its thread, which ends when there are no more requests; but ending waits for all learners, so this
        // must not wait for longer than for anything else.
        self.outgoing = None;
        let start = Instant::now();
        while !self.lost && start.elapsed() < self.timeout {
            let left = self.timeout.saturating_sub(start.elapsed());
            if matches!(self.incoming.recv_timeout(left), Err(RecvTimeoutError::Disconnected)) {
                return;
            }
        }
    }
}
