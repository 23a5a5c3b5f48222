//! Groups that come and change as a driver is given them.

use crate::draw::gradient;
use crate::support::{
    STRATEGIES, TIMEOUT, Trace, bits, given, gradients, model, output, residuals, run, slices,
};
use adacomp::{Outcome, Packet, Selected, Sending};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{
    Exchange, ExchangeError, GroupAverage, Local, SendVerdict, Strategy, Threads, Transport,
};

const LEARNERS: usize = 3;

fn on_threads<T: Send>(work: impl Fn(usize, Local) -> T + Sync) -> Vec<T> {
    let threads = Threads { timeout: TIMEOUT, ..Threads::new(LEARNERS) };
    threads.run(|transport| work(transport.hosted().start, transport))
}

/// Writes a group, each layer where it belongs, which can always be used.
fn write(average: GroupAverage<'_>, layers: &[usize], output: &mut [Vec<f32>]) -> bool {
    let slices = output.iter_mut().enumerate().filter(|(layer, _)| layers.contains(layer));
    let mut slices: Vec<&mut [f32]> = slices.map(|(_, values)| values.as_mut_slice()).collect();
    average.write(&mut slices);
    true
}

#[test]
fn groups_as_given_change_nothing() {
    let groupings: [&[&[usize]]; 3] =
        [&[&[0, 1, 2, 3, 4]], &[&[3, 4], &[0, 2], &[1]], &[&[1, 4], &[0, 2, 3]]];
    for strategy in STRATEGIES {
        let traces = on_threads(|learner, transport| {
            let mut exchange = Exchange::new(transport, model(), strategy).unwrap();
            let mut trace = Trace::default();
            for step in 0..6 {
                let gradients = gradients(&model(), learner, step);
                let groups = groupings[step as usize % 3];
                for group in groups {
                    exchange.begin_group(group).unwrap();
                    for &layer in *group {
                        exchange.submit(learner, layer, gradients[layer].as_slice().into()).unwrap();
                    }
                }
                let mut output = output(&model());
                let verdict = if step < 3 { SendVerdict::BeforeWriting } else { SendVerdict::AfterWriting };
                let mut written = Vec::new();
                let outcome = exchange.finish_with(verdict, |average| {
                    let group = average.group();
                    written.push(group);
                    write(average, groups[group], &mut output)
                });
                assert_eq!(outcome.unwrap(), Outcome::Averaged);
                assert_eq!(written, Vec::from_iter(0..groups.len()));
                trace.averages.push(output.iter().flat_map(|layer| bits(layer)).collect());
            }
            trace.residuals.push(residuals(&mut exchange, learner));
            trace
        });
        assert_eq!(traces, run(LEARNERS, LEARNERS, 6, strategy), "{strategy:?}");
    }
}

/// A NaN in the first or the last group of a step whose verdicts leave early: all learners drop it, whatever was written.
#[test]
fn a_bad_gradient_drops_the_step_for_all() {
    let groups: [&[usize]; 2] = [&[2], &[0, 1, 3, 4]];
    for strategy in STRATEGIES {
        for bad in [2, 0] {
            on_threads(|learner, transport| {
                let mut exchange = Exchange::new(transport, model(), strategy).unwrap();
                let mut gradients = gradients(&model(), learner, 0);
                if learner == 1 {
                    gradients[bad][7] = f32::NAN;
                }
                for group in groups {
                    exchange.begin_group(group).unwrap();
                    for &layer in group {
                        exchange.submit(learner, layer, gradients[layer].as_slice().into()).unwrap();
                    }
                }
                let mut output = output(&model());
                let outcome = exchange.finish_with(SendVerdict::BeforeWriting, |average| {
                    let group = average.group();
                    write(average, groups[group], &mut output)
                });
                assert_eq!(outcome.unwrap(), Outcome::NonFinite { learner: 1 }, "{strategy:?}, layer {bad}");
                // Nobody has sent anything, so everything of layers that are compressed is still there.
                if strategy != Strategy::Dense && learner != 1 {
                    let kept = exchange.compressor(learner).unwrap().residual(2).unwrap().to_vec();
                    assert_eq!(kept, gradients[2], "{strategy:?}, layer {bad}");
                }
            });
        }
    }
}

/// Others have been told that it is good.
#[test]
#[should_panic(expected = "sure to be used")]
fn an_average_that_is_sure_cannot_be_refused() {
    let transport = Local::alone(1);
    let mut exchange = Exchange::new(transport, model(), Strategy::Gather).unwrap();
    exchange.begin_group(&[2]).unwrap();
    exchange.submit(0, 2, gradient(0, 0, 2, 2400).as_slice().into()).unwrap();
    let _ = exchange.finish_with(SendVerdict::BeforeWriting, |_| false);
}

/// An average that one learner cannot use, in steps without some layers: residuals keep it all.
#[test]
fn an_average_that_is_rejected_is_not_lost() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        on_threads(|learner, transport| {
            let mut exchange = Exchange::new(transport, model(), strategy).unwrap();
            let mut kept = vec![0.0f32; 2400];
            for step in 0..4 {
                let gradient = gradient(learner, step, 2, 2400);
                kept.iter_mut().zip(&gradient).for_each(|(sum, value)| *sum += value);
                exchange.begin_group(&[2]).unwrap();
                exchange.submit(learner, 2, gradient.as_slice().into()).unwrap();
                let outcome = exchange.finish_with(SendVerdict::AfterWriting, |_| learner != 1);
                assert!(matches!(outcome.unwrap(), Outcome::NonFinite { .. }));
                assert_eq!(exchange.compressor(learner).unwrap().residual(2).unwrap(), kept, "{strategy:?}");
                let owned = exchange.owner(learner).map(|owner| owner.residual(2).unwrap().to_vec());
                assert!(owned.is_none_or(|values| values.iter().all(|value| *value == 0.0)));
            }
        });
    }
}

/// Selections that are made elsewhere by the same rule are worth the same.
#[test]
fn selections_from_elsewhere_are_taken() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        on_threads(|learner, transport| {
            let mut exchange = Exchange::new(transport, model(), strategy).unwrap();
            let mut there = adacomp::Compressor::new(model());
            for step in 0..3 {
                let gradient = gradient(learner, step, 2, 2400);
                let residual = there.residual(2).unwrap().to_vec();
                let magnitudes: Vec<f32> =
                    residual.iter().zip(&gradient).map(|(r, value)| (r + value).abs()).collect();
                let maxima: Vec<f32> =
                    magnitudes.chunks(100).map(|bin| bin.iter().copied().fold(0.0, f32::max)).collect();
                there.compress_layer(2, gradient.as_slice().into(), adacomp::Sending::Compressed).unwrap();
                let Some(Packet::Sparse(sparse)) = there.packet(2) else { panic!("a selection") };
                let selected: Vec<Selected> = sparse.selected.to_vec();

                exchange.begin_group(&[2]).unwrap();
                exchange.submit_selection(learner, 2, &maxima, &selected).unwrap();
                let mut output = output(&model());
                let outcome = exchange
                    .finish_with(SendVerdict::BeforeWriting, |average| write(average, &[2], &mut output));
                assert_eq!(outcome.unwrap(), Outcome::Averaged);
                let compressor = exchange.compressor(learner).unwrap();
                // The residual here takes no part; the one there goes on with the scale that was agreed on.
                assert!(compressor.residual(2).unwrap().iter().all(|value| *value == 0.0));
                there.set_scale(2, compressor.layer_statistics(2).scale).unwrap();
                there.commit().unwrap();
            }
            let own = bits(there.residual(2).unwrap());
            let reference = run(LEARNERS, LEARNERS, 3, strategy);
            assert_eq!(own, reference[learner].residuals[0][2].0, "{strategy:?}");
        });
    }
}

/// A dense step by other means takes along what learners and owners have kept, and keeps it if it does not arrive.
#[test]
fn everything_can_go_by_other_means() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        let sums = on_threads(|learner, transport| {
            let mut exchange = Exchange::new(transport, model(), strategy).unwrap();
            let mut sent = vec![0.0f64; 2400];
            for step in 0..3 {
                let gradient = gradient(learner, step, 2, 2400);
                exchange.begin_group(&[2]).unwrap();
                exchange.submit(learner, 2, gradient.as_slice().into()).unwrap();
                let mut output = output(&model());
                let _ = exchange
                    .finish_with(SendVerdict::BeforeWriting, |average| write(average, &[2], &mut output))
                    .unwrap();
                sent.iter_mut().zip(&output[2]).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            let mut whole = vec![0.0; 2400];
            let mut last = gradient(learner, 3, 2, 2400);
            last[7] = f32::NAN;
            assert!(!exchange.flush_layer(learner, 2, last.as_slice().into(), &mut whole).unwrap());
            assert!(whole.iter().all(|value| *value == 0.0));
            exchange.end_flush(false).unwrap();
            let before = residuals(&mut exchange, learner);
            let kept = exchange.kept(learner, 2).unwrap();
            assert!(exchange.kept(learner, 1).is_none() && exchange.keeps(learner, 2));
            let zeros = vec![0.0; 2400];
            for arrived in [false, true] {
                assert!(exchange.flush_layer(learner, 2, zeros.as_slice().into(), &mut whole).unwrap());
                assert_eq!(whole, kept);
                exchange.end_flush(arrived).unwrap();
                assert_eq!(residuals(&mut exchange, learner) == before, !arrived, "{strategy:?}");
            }
            assert!(residuals(&mut exchange, learner)[2].0.iter().all(|bits| *bits == 0));
            assert!(!exchange.keeps(learner, 2));
            assert!(exchange.flush_layer(learner, 1, zeros[..16].into(), &mut whole[..16]).is_err());
            let short = exchange.flush_layer(learner, 2, zeros.as_slice().into(), &mut whole[..16]);
            assert!(short.unwrap_err().to_string().contains("an output of length 16, expected 2400"));
            (sent, whole)
        });
        for element in 0..2400 {
            // In the broken step only bins without the NaN took the gradient in.
            let steps = if element / 100 == 0 { 0..3 } else { 0..4 };
            let values = (0..LEARNERS)
                .flat_map(|learner| steps.clone().map(move |step| gradient(learner, step, 2, 2400)[element]));
            let given = values.map(f64::from).sum::<f64>() / LEARNERS as f64;
            let whole: f64 = sums.iter().map(|(_, whole)| f64::from(whole[element])).sum();
            let found = sums[0].0[element] + whole / LEARNERS as f64;
            assert!((given - found).abs() < 1e-5, "{strategy:?} {element}: {given} {found}");
        }
    }
}

/// What an owner keeps is sent as many times as there are learners, which may be more than an f32 holds.
#[test]
fn what_does_not_fit_by_other_means_is_kept() {
    let mut exchange = Exchange::unconnected((), model(), Strategy::Sharded, LEARNERS, 0..1).unwrap();
    exchange.owner(0).unwrap().residual_mut(2).fill(f32::MAX / 2.0);
    let before = residuals(&mut exchange, 0);
    let (zeros, mut whole) = (vec![0.0; 2400], vec![0.0; 2400]);
    assert!(!exchange.flush_layer(0, 2, zeros.as_slice().into(), &mut whole).unwrap());
    exchange.end_flush(false).unwrap();
    assert_eq!(residuals(&mut exchange, 0), before);
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let transport = Local::alone(1);
    let mut exchange = Exchange::new(transport, model(), Strategy::Gather).unwrap();
    // What is refused changes nothing: without groups all layers are one.
    assert!(exchange.begin_group(&[4, 3]).is_err());
    let values = gradients(&model(), 0, 0);
    let outcome = exchange.exchange(&given(&values), &mut slices(&mut output(&model()))).unwrap();
    assert_eq!(outcome, Outcome::Averaged);
    exchange.begin_group(&[0, 2]).unwrap();
    for (group, told) in [
        (&[1, 2][..], "`fc.weight` was given twice"),
        (&[4, 3], "[4, 3]"),
        (&[1, 1], "[1, 1]"),
        (&[3, 5], "numbers below 5"),
        (&[], "no layers"),
    ] {
        let error = exchange.begin_group(group).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

/// A gradient of no group would be compressed and never sent.
#[test]
fn a_layer_of_no_group_is_refused() {
    let (layout, mut written) = (model(), output(&model()));
    let mut exchange = Exchange::new(Local::alone(1), layout.clone(), Strategy::Gather).unwrap();
    let values = gradients(&layout, 0, 0);
    exchange.begin_group(&[0]).unwrap();
    exchange.begin_group(&[2]).unwrap();
    let mut submit = |layer: usize| exchange.submit(0, layer, values[layer].as_slice().into());
    assert!(matches!(submit(3), Err(ExchangeError::NoGroup { parameter }) if parameter == "fc.bias"));
    submit(2).unwrap();
    let missing = exchange.finish_with(SendVerdict::BeforeWriting, |_| true).unwrap_err().to_string();
    assert!(missing.contains("for `conv.weight`;"), "{missing}");
    exchange.submit(0, 0, values[0].as_slice().into()).unwrap();
    assert_eq!(exchange.finish_with(SendVerdict::BeforeWriting, |_| true).unwrap(), Outcome::Averaged);
    // The next step has no groups yet.
    let refused = exchange.submit(0, 2, values[2].as_slice().into());
    assert!(matches!(refused, Err(ExchangeError::NoGroup { .. })));
    exchange.begin_group(&[0, 2]).unwrap();
    let refused = exchange.exchange(&given(&values), &mut slices(&mut written));
    assert!(matches!(refused, Err(ExchangeError::NoGroup { .. })) && written == output(&layout));
    exchange.begin_group(&[1, 3, 4]).unwrap();
    let outcome = exchange.exchange(&given(&values), &mut slices(&mut written)).unwrap();
    assert!(outcome == Outcome::Averaged && written != output(&layout));
}

/// What a learner would keep of a layer that it sends whole is on another device.
#[test]
fn a_step_that_sends_everything_takes_no_selections() {
    for (strategy, sending) in [(Strategy::Dense, Sending::Compressed), (Strategy::Reduce, Sending::Flush)] {
        let mut exchange = Exchange::new(Local::alone(1), model(), strategy).unwrap();
        exchange.set_sending(sending);
        let refused = exchange.submit_selection(0, 2, &[1.0; 24], &[Selected::new(7, false)]);
        assert!(matches!(refused, Err(ExchangeError::Selection)), "{strategy:?}");
    }
}

/// What is set before a state is loaded holds after, for owners, too.
#[test]
fn unused_layers_send_nothing_after_loading_either() {
    on_threads(|learner, transport| {
        let mut exchange = Exchange::new(transport, model(), Strategy::Sharded).unwrap();
        exchange.set_skip_unused(true);
        let step = |exchange: &mut Exchange<Local>, gradient: &[f32]| {
            exchange.begin_group(&[2]).unwrap();
            exchange.submit(learner, 2, gradient.into()).unwrap();
            let mut output = output(&model());
            let outcome = exchange
                .finish_with(SendVerdict::BeforeWriting, |average| write(average, &[2], &mut output))
                .unwrap();
            assert_eq!(outcome, Outcome::Averaged);
            output.remove(2)
        };
        assert!(step(&mut exchange, &gradient(learner, 0, 2, 2400)).iter().any(|value| *value != 0.0));
        let states = exchange.save().unwrap();
        exchange.load(&states).unwrap();
        let before = residuals(&mut exchange, learner);
        assert!(step(&mut exchange, &[0.0; 2400]).iter().all(|value| *value == 0.0));
        assert_eq!(residuals(&mut exchange, learner), before);
    });
}

#[test]
fn averages_need_a_slice_for_each_layer() {
    for strategy in STRATEGIES {
        let write = || ByHand::unconnected((), model(), strategy, 1, 0..1).unwrap().average(0).write(&mut []);
        let panic = std::panic::catch_unwind(write).expect_err("too few slices");
        let text = panic.downcast_ref::<String>().expect("a message");
        assert!(text.contains("a slice for each layer of the group"), "{text}");
    }
}
