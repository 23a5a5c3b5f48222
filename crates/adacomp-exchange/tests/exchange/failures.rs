//! Learners that die or hang.

use crate::support::{given, gradients, model, output, slices};
use adacomp_exchange::{Exchange, ExchangeError, Strategy, Threads, TransportError};
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
