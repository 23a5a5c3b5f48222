//! Learners that die or hang.

use crate::support::{given, gradients, model, model_with, output, slices};
use adacomp::{Policy, Scale};
use adacomp_exchange::{
    Exchange, ExchangeError, Inside, Local, Messages, Strategy, Threads, Transport, TransportError,
};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Three learners, of which the last leaves after its first step by returning, panicking or sleeping.
fn others_are_told(leave: impl Fn() + Sync, timeout: Duration) -> Vec<(TransportError, Duration)> {
    std::thread::scope(|scope| {
        let leave = &leave;
        let threads: Vec<_> = Threads { timeout, ..Threads::new(3) }
            .connect()
            .into_iter()
            .enumerate()
            .map(|(learner, transport)| {
                scope.spawn(move || {
                    let layout = model();
                    let mut exchange = Exchange::new(transport, layout.clone(), Strategy::Reduce).unwrap();
                    for step in 0..3 {
                        if (learner, step) == (2, 1) {
                            leave();
                            return None;
                        }
                        let start = Instant::now();
                        let gradients = gradients(&layout, learner, step);
                        let mut written = output(&layout);
                        match exchange.exchange(&given(&gradients), &mut slices(&mut written)) {
                            Ok(_) => {}
                            Err(ExchangeError::Transport { step: 1, source }) => {
                                assert_eq!(written, output(&layout));
                                // It stays that way, and at once.
                                let again = exchange.exchange(&given(&gradients), &mut slices(&mut written));
                                assert!(matches!(again, Err(ExchangeError::Transport { .. })));
                                // What was selected is back, and can be saved.
                                assert!(exchange.compressor(learner).unwrap().save(learner, 3, 1).is_ok());
                                return Some((source, start.elapsed()));
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                    None
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
    })
}

#[test]
fn a_learner_that_ends_ends_the_others() {
    let told = others_are_told(|| {}, Duration::from_secs(20));
    assert_eq!(told.len(), 2);
    // Either of the others may have ended first, in its turn.
    assert!(told.iter().all(|(cause, _)| matches!(cause, TransportError::Ended { .. })), "{told:?}");
    assert!(told.iter().any(|(cause, _)| *cause == TransportError::Ended { learners: vec![2] }));
    assert!(told.iter().all(|(_, time)| *time < Duration::from_secs(10)));
}

#[test]
fn a_learner_that_panics_ends_the_others() {
    let told = others_are_told(|| panic!("on purpose"), Duration::from_secs(20));
    assert_eq!(told.len(), 2);
    assert!(told.iter().all(|(_, time)| *time < Duration::from_secs(10)));
}

#[test]
fn a_learner_that_hangs_is_not_waited_for_longer_than_the_timeout() {
    let timeout = Duration::from_millis(300);
    let told = others_are_told(|| std::thread::sleep(Duration::from_secs(3)), timeout);
    assert_eq!(told.len(), 2);
    let timed_out = |cause: &TransportError| *cause == TransportError::Timeout { learners: vec![2], timeout };
    assert!(told.iter().any(|(cause, _)| timed_out(cause)), "{told:?}");
    assert!(told.iter().all(|(_, time)| *time < Duration::from_secs(2)), "{told:?}");
}

/// One learner, of several processes, to which the message of some round comes damaged.
struct Damaged {
    local: Local,
    rounds_before: usize,
}

impl Transport for Damaged {
    fn learners(&self) -> usize {
        self.local.learners()
    }

    fn hosted(&self) -> Range<usize> {
        self.local.hosted()
    }

    fn start(&mut self, messages: Messages) -> Result<(), TransportError> {
        self.local.start(messages)
    }

    fn finish(&mut self) -> Result<Messages, TransportError> {
        let mut messages = self.local.finish()?;
        match (self.rounds_before.checked_sub(1), &mut messages) {
            (Some(before), _) => self.rounds_before = before,
            (None, Messages::AllGather(all)) => all.clone_from(&vec![Default::default(); all.len()]),
            (None, Messages::AllToAll(_)) => {}
        }
        Ok(messages)
    }

    fn inside(&mut self) -> Option<&mut dyn Inside> {
        Some(self)
    }
}

impl Inside for Damaged {
    fn share_scales(&mut self, _: &[usize], _: &mut [f32]) -> Result<(), TransportError> {
        Ok(())
    }

    fn agree(&mut self, good: bool) -> Result<bool, TransportError> {
        Ok(good)
    }
}

#[test]
fn a_verdict_that_cannot_be_read_ends_the_exchange_in_its_step() {
    // Before it come the agreement, the frames and verdicts of a step, and the frames of the next.
    let transport = Damaged { local: Local::alone(1), rounds_before: 4 };
    let mut exchange = Exchange::new(transport, model(), Strategy::Gather).unwrap();
    let mut written = output(&model());
    let mut step = || exchange.exchange(&given(&gradients(&model(), 0, 0)), &mut slices(&mut written));
    assert!(step().is_ok());
    assert!(matches!(step(), Err(ExchangeError::Verdict { step: 1, .. })));
    assert!(matches!(step(), Err(ExchangeError::Transport { step: 1, .. })));
}

/// The limit of a parameter is the median of all its bins, and a process has only some of them.
#[test]
fn parts_of_parameters_have_no_clamped_scale() {
    let transport = Damaged { local: Local::alone(1), rounds_before: usize::MAX };
    let layout = model_with(Policy::adacomp().scale(Scale::Clamped));
    let refused = Exchange::new(transport, layout, Strategy::Gather).err().expect("an error");
    assert!(matches!(refused, ExchangeError::ClampedParts), "{refused}");
}
