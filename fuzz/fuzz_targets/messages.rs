//! Messages of every strategy, changed in any way: learners end the step alike, a step that is dropped loses nothing, and they
//! can go on.
//!
//! The first bytes pick the strategy, the mode and one message, the rest is a script of edits to it. Unless told otherwise
//! its checksum is made to fit, so that the edits reach the strategy.
#![no_main]

use adacomp::{Outcome, Sending};
use adacomp_exchange::{ExchangeError, Options, Strategy};
use adacomp_fuzz::{LAYOUT, Learners, edit, fix_checksum, fix_frame};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[how, round, sender, receiver], script)) = data.split_first_chunk() else { return };
    let strategy = Strategy::ALL[usize::from(how % 4)];
    let (flush, fix, learners) = (how & 4 != 0, how < 240, 2 + usize::from(how >> 4 & 1));
    let clip = (how & 8 != 0).then_some(2.0);
    let mut all = Learners::new(learners, Options { clip, ..strategy.into() });
    if how & 32 != 0 {
        assert!(matches!(all.good_step().0, Ok(Outcome::Averaged)));
    }
    let step = all.0[0].step();
    if flush {
        all.0.iter_mut().for_each(|protocol| protocol.set_sending(Sending::Flush));
    }
    let flush = flush || strategy == Strategy::Dense;
    let round = usize::from(round) % all.0[0].rounds();
    let (sender, receiver) = (usize::from(sender) % learners, usize::from(receiver) % learners);
    let owners: Vec<_> = (0..learners).map(|learner| all.residuals(learner)[1].clone()).collect();
    all.submit();
    let mut changed = false;
    all.carry(|at, from, to, message| {
        if (at, from) != (round, sender) || to.is_some_and(|to| to != receiver) {
            return;
        }
        // The checksum is the last four bytes.
        let checksum = message.split_off(message.len() - 4);
        changed = edit(message, script);
        message.extend(checksum);
        match (fix, strategy) {
            (false, _) => {}
            (true, Strategy::Gather) => fix_frame(message, Some(&LAYOUT)),
            (true, _) => fix_checksum(message, step, &[0, 1, 2, 3], flush, from, to),
        }
    });
    let verdicts = all.verdicts();
    let (outcome, _) = all.conclude(verdicts);
    match outcome {
        Ok(Outcome::Averaged) => {}
        Ok(Outcome::NonFinite { .. }) => assert!(changed),
        Err(ExchangeError::Message { step: at, .. }) => assert!(changed && at == step),
        Err(error) => panic!("{error}"),
    }
    if !matches!(outcome, Ok(Outcome::Averaged)) {
        let owned = |learner| all.residuals(learner)[1].clone();
        assert_eq!((0..learners).map(owned).collect::<Vec<_>>(), owners);
    }
    assert!(changed || matches!(outcome, Ok(Outcome::Averaged)));
    // A scale near the largest f32 may be accepted, and a later sum overflow, so that the step is dropped; learners still end alike.
    if how & 64 != 0 {
        let _ = all.good_step();
    }
});
