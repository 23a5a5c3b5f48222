//! State files, changed in any way: they are loaded or refused, and if they are refused nothing has changed.
//!
//! The first bytes pick the strategies and the numbers of learners before and after, and one file; the rest is a script of edits
//! to it.
#![no_main]

use adacomp_exchange::{LearnerState, Strategy};
use adacomp_fuzz::{Learners, edit};
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;

/// What learners have saved after two steps, by strategy and number of learners.
fn saved() -> Vec<Vec<LearnerState>> {
    let saved = |(strategy, learners)| {
        let mut all = Learners::new(learners, strategy);
        for _ in 0..2 {
            let _ = all.good_step();
        }
        all.0.iter_mut().flat_map(|protocol| protocol.save().expect("between steps")).collect()
    };
    STRATEGIES.into_iter().flat_map(|strategy| [(strategy, 1), (strategy, 2)]).map(saved).collect()
}

const STRATEGIES: [Strategy; 2] = [Strategy::Gather, Strategy::Sharded];

thread_local! {
    static SAVED: RefCell<Vec<Vec<LearnerState>>> = RefCell::new(saved());
}

fuzz_target!(|data: &[u8]| {
    let Some((&[from, into, which], script)) = data.split_first_chunk() else { return };
    let mut states = SAVED.with_borrow(|saved| saved[usize::from(from) % saved.len()].clone());
    let state = &mut states[usize::from(which >> 1) % usize::from(from % 2 + 1)];
    let file = match (&mut state.owner, which & 1) {
        (Some(owner), 1) => owner,
        _ => &mut state.residuals,
    };
    let changed = edit(file, script);
    let mut all = Learners::new(1 + usize::from(into / 2 % 3), STRATEGIES[usize::from(into % 2)]);
    let mut loaded = Vec::new();
    for learner in 0..all.0.len() {
        let before = all.residuals(learner);
        loaded.push(all.0[learner].load(&states).is_ok());
        assert!(loaded[learner] || (all.0[learner].step() == 0 && all.residuals(learner) == before));
    }
    assert!(changed || loaded.iter().all(|loaded| *loaded));
    // Where there are as many learners as before, each needs only its own state.
    if into & 64 != 0 && loaded.windows(2).all(|pair| pair[0] == pair[1]) {
        let _ = all.good_step();
    }
});
