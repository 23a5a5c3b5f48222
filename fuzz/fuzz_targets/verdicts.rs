//! Verdicts, changed in any way: all learners that get the same verdicts end the step alike, and unless one cannot be read they
//! can go on.
//!
//! The first bytes pick the strategy, whose verdict, and whether a message was refused before; the rest is a script of edits.
#![no_main]

use adacomp::Outcome;
use adacomp_exchange::{ExchangeError, Strategy};
use adacomp_fuzz::{Learners, edit, fix_checksum};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[how, learner], script)) = data.split_first_chunk() else { return };
    let strategy = Strategy::ALL[usize::from(how % 4)];
    let (refuse, fix) = (how & 4 != 0, how < 240);
    let mut all = Learners::new(2, strategy);
    all.submit();
    all.carry(|round, sender, receiver, message| {
        if refuse && round == 0 && sender == 1 && receiver.is_none_or(|receiver| receiver == 0) {
            message.push(0);
        }
    });
    let learner = usize::from(learner) % 2;
    let mut verdicts = all.verdicts();
    let verdict = &mut verdicts[learner];
    let checksum = verdict.split_off(verdict.len() - 4);
    edit(verdict, script);
    verdict.extend(checksum);
    if fix {
        fix_checksum(verdict, 0, &[], false, learner, None);
    }
    let (outcome, _) = all.conclude(verdicts);
    match outcome {
        Ok(Outcome::Averaged) => assert!(!refuse || !script.is_empty()),
        Ok(Outcome::NonFinite { .. }) | Err(ExchangeError::Message { step: 0, .. }) => {}
        Err(ExchangeError::Verdict { step: 0, learner: of, .. }) => return assert_eq!(of, learner),
        Err(error) => panic!("{error}"),
    }
    if how & 64 != 0 {
        assert!(matches!(all.good_step().0, Ok(Outcome::Averaged)));
    }
});
