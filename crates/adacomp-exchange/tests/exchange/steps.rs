//! Whole steps over threads.

use crate::draw::gradient;
use crate::support::{
    STRATEGIES, TIMEOUT, Trace, begin_groups, given, gradients, model, output, residuals, run, run_in_groups,
    slices,
};
use adacomp::{Averager, Codec, Compressor, Outcome, Sending};
use adacomp_exchange::{Exchange, Local, LocalSteps, Options, Shared, Strategy, Threads, Transport};

#[test]
fn replicas_agree_on_any_number_of_threads() {
    for strategy in STRATEGIES {
        let reference = run(5, 5, 8, strategy);
        let averages = &reference[0].averages;
        assert!(reference.iter().all(|trace| trace.averages == *averages), "{strategy:?}");
        let residuals: Vec<_> = reference.iter().flat_map(|trace| trace.residuals.clone()).collect();
        for threads in [1, 2, 3] {
            let traces = run(5, threads, 8, strategy);
            assert!(
                traces.iter().all(|trace| trace.averages == *averages),
                "{strategy:?} on {threads} threads"
            );
            let all: Vec<_> = traces.into_iter().flat_map(|trace| trace.residuals).collect();
            assert_eq!(all, residuals, "{strategy:?} on {threads} threads");
        }
    }
}

#[test]
fn many_more_learners_than_threads() {
    for strategy in STRATEGIES {
        let traces = run(128, 2, 2, strategy);
        assert_eq!(traces[0].averages, traces[1].averages, "{strategy:?}");
        assert_eq!(traces[0].residuals.len() + traces[1].residuals.len(), 128);
    }
}

#[test]
fn handing_layers_over_early_changes_nothing() {
    for strategy in STRATEGIES {
        let whole: Vec<Trace> = run(3, 2, 6, strategy);
        for group in [1, 100, 2000] {
            assert_eq!(run_in_groups(3, 2, 6, strategy, group), whole, "{strategy:?} in groups of {group}");
        }
    }
}

#[test]
fn one_learner_is_enough() {
    for strategy in STRATEGIES {
        let traces = run(1, 1, 3, strategy);
        assert_eq!(traces[0].averages.len(), 3);
    }
}

/// `gather` is the core's compressors and averager, nothing more.
#[test]
fn gather_is_the_core_with_a_transport() {
    let layout = model();
    let mut compressors = vec![Compressor::new(layout.clone()); 3];
    let mut averager = Averager::new(layout.clone());
    let mut averages = Vec::new();
    for step in 0..4 {
        let mut frames = vec![Vec::new(); 3];
        for (learner, compressor) in compressors.iter_mut().enumerate() {
            for (layer, parameter) in layout.layers().iter().enumerate() {
                let gradient = gradient(learner, step, layer, parameter.elements());
                compressor.compress_layer(layer, gradient.as_slice().into(), Sending::Compressed).unwrap();
            }
            compressor.encode(Codec::Rice, learner, step, &mut frames[learner]).unwrap();
        }
        let mut output = output(&layout);
        let _ = averager.average(step, &frames, &mut slices(&mut output)).unwrap();
        compressors.iter_mut().for_each(|compressor| compressor.commit().unwrap());
        averages.push(output.iter().flat_map(|layer| crate::support::bits(layer)).collect::<Vec<_>>());
    }
    assert_eq!(run(3, 3, 4, Strategy::Gather)[0].averages, averages);
    let paper = Options { codec: Codec::Paper, ..Options::from(Strategy::Gather) };
    assert_eq!(run(3, 3, 4, paper)[0].averages, averages);
}

/// `dense` is the plain average, in learner order.
#[test]
fn dense_is_the_plain_average() {
    let layout = model();
    let trace = &run(3, 1, 1, Strategy::Dense)[0];
    let mut expected = Vec::new();
    for (layer, parameter) in layout.layers().iter().enumerate() {
        let gradients: Vec<_> =
            (0..3).map(|learner| gradient(learner, 0, layer, parameter.elements())).collect();
        for i in 0..parameter.elements() {
            let sum = gradients.iter().fold(0.0f32, |sum, gradient| sum + gradient[i]);
            expected.push((sum * (1.0f32 / 3.0)).to_bits());
        }
    }
    assert_eq!(trace.averages[0], expected);
}

/// With one learner the agreed scale is its own, so `reduce` is `gather`.
#[test]
fn reduce_of_one_learner_is_gather() {
    let (reduce, gather) = (run(1, 1, 6, Strategy::Reduce), run(1, 1, 6, Strategy::Gather));
    assert_eq!(reduce, gather);
}

/// Everything that was given is in the averages or in some residual.
#[test]
fn nothing_is_lost_over_many_steps() {
    let layout = model();
    for strategy in STRATEGIES {
        let (learners, steps) = (4, 12);
        let traces = run(learners, 2, steps, strategy);
        let elements: usize = layout.elements();
        let mut given = vec![0.0f64; elements];
        let mut received = vec![0.0f64; elements];
        for step in 0..steps {
            for learner in 0..learners {
                let all = layout
                    .layers()
                    .iter()
                    .enumerate()
                    .flat_map(|(layer, parameter)| gradient(learner, step, layer, parameter.elements()));
                given.iter_mut().zip(all).for_each(|(sum, value)| *sum += f64::from(value) / learners as f64);
            }
            let average = traces[0].averages[step as usize].iter();
            received
                .iter_mut()
                .zip(average)
                .for_each(|(sum, &value)| *sum += f64::from(f32::from_bits(value)));
        }
        // What learners keep counts as a share, what owners keep is of the average already.
        let mut kept = vec![0.0f64; elements];
        let mut next_share = vec![0; layout.len()];
        for residuals in traces.iter().flat_map(|trace| &trace.residuals) {
            let mut start = 0;
            for (layer, parameter) in layout.layers().iter().enumerate() {
                let here = start..start + parameter.elements();
                let (own, owned) = &residuals[layer];
                let add = |sum: &mut f64, value: &u32, share: f64| {
                    *sum += f64::from(f32::from_bits(*value)) * share
                };
                let own = kept[here.clone()].iter_mut().zip(own);
                own.for_each(|(sum, value)| add(sum, value, 1.0 / learners as f64));
                // Shares follow each other in learner order.
                let owners = kept[here].iter_mut().skip(next_share[layer]).zip(owned);
                owners.for_each(|(sum, value)| add(sum, value, 1.0));
                next_share[layer] += owned.len();
                start += parameter.elements();
            }
        }
        for i in 0..elements {
            let (given, found) = (given[i], received[i] + kept[i]);
            assert!((given - found).abs() < 2e-5, "{strategy:?} element {i}: {given} {found}");
        }
    }
}

/// A step in which everything is sent empties the residuals of learners and owners; the next goes on selecting.
#[test]
fn everything_can_be_sent_in_between() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        let transport = Local::alone(1);
        let layout = model();
        let mut exchange = Exchange::new(transport, layout.clone(), strategy).unwrap();
        for (step, sending) in
            [Sending::Compressed, Sending::Flush, Sending::Compressed].into_iter().enumerate()
        {
            exchange.set_sending(sending);
            let gradients = gradients(&layout, 0, step as u64);
            let mut before = exchange.compressor(0).unwrap().residual(2).unwrap().to_vec();
            if let Some(owner) = exchange.owner(0) {
                before.iter_mut().zip(owner.residual(2).unwrap()).for_each(|(r, kept)| *r += kept);
            }
            let mut output = output(&layout);
            let _ = exchange.exchange(&given(&gradients), &mut slices(&mut output)).unwrap();
            let after = exchange.compressor(0).unwrap().residual(2).unwrap();
            if sending == Sending::Flush {
                assert!(after.iter().all(|&r| r == 0.0));
                let sums = before.iter().zip(&gradients[2]).map(|(r, dw)| r + dw);
                assert!(sums.zip(&output[2]).all(|(sum, sent)| (sum - sent).abs() < 1e-6), "{strategy:?}");
                let owner = exchange.owner(0).map(|owner| owner.residual(2).unwrap());
                assert!(owner.is_none_or(|kept| kept.iter().all(|&r| r == 0.0)));
            } else {
                assert!(after.iter().any(|&r| r != 0.0), "{strategy:?}");
            }
        }
    }
}

#[test]
fn traffic_is_counted_by_layer() {
    for (strategy, learners) in STRATEGIES.into_iter().flat_map(|strategy| [(strategy, 4), (strategy, 2)]) {
        let traffic = std::thread::scope(|scope| {
            let threads: Vec<_> = Threads { timeout: TIMEOUT, ..Threads::new(learners) }
                .connect()
                .into_iter()
                .enumerate()
                .map(|(learner, transport)| {
                    scope.spawn(move || {
                        let layout = model();
                        let mut exchange = Exchange::new(transport, layout.clone(), strategy).unwrap();
                        let gradients = gradients(&layout, learner, 0);
                        let mut output = output(&layout);
                        let _ = exchange.exchange(&given(&gradients), &mut slices(&mut output)).unwrap();
                        let seconds = exchange.seconds();
                        assert!(seconds.compress > 0.0 && seconds.encode > 0.0 && seconds.decode > 0.0);
                        exchange.traffic(learner).unwrap().clone()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let messages = |traffic: &adacomp_exchange::Traffic| -> (u64, u64) {
            (traffic.layers.iter().map(|l| l.sent).sum(), traffic.layers.iter().map(|l| l.received).sum())
        };
        // Envelopes of 7 bytes, frames of 36, to all others in each round; and verdicts.
        let to_one_other = match strategy {
            Strategy::Dense | Strategy::Sharded => 3 * 7,
            Strategy::Gather => 36 + 7,
            Strategy::Reduce => 4 * 7,
        };
        let envelopes = to_one_other * (learners as u64 - 1);
        for traffic in &traffic {
            let (sent, received) = messages(traffic);
            assert_eq!(traffic.sent, sent + envelopes, "{strategy:?}");
            assert_eq!(traffic.received, received + envelopes, "{strategy:?}");
        }
    }
}

/// Early groups have gone all the way when a NaN turns up in the last one; still the step is dropped as a whole.
#[test]
fn a_nan_in_the_last_group_takes_back_the_earlier_ones() {
    let step = |exchange: &mut Exchange<Local>, step: u64, bad: bool| {
        let layout = model();
        begin_groups(exchange, 1);
        for learner in exchange.transport().hosted() {
            for (layer, mut gradient) in gradients(&layout, learner, step).into_iter().enumerate().rev() {
                if bad && (learner, layer) == (3, 0) {
                    gradient[5] = f32::NAN;
                }
                exchange.submit(learner, layer, gradient.as_slice().into()).unwrap();
            }
        }
        exchange.finish(&mut slices(&mut output(&layout))).unwrap()
    };
    for strategy in STRATEGIES {
        std::thread::scope(|scope| {
            for transport in (Threads { threads: 2, timeout: TIMEOUT, ..Threads::new(4) }).connect() {
                scope.spawn(move || {
                    let mut exchange = Exchange::new(transport, model(), strategy).unwrap();
                    assert_eq!(step(&mut exchange, 0, false), Outcome::Averaged);
                    let hosted = exchange.transport().hosted();
                    let all = |exchange: &mut Exchange<Local>| -> Vec<_> {
                        hosted.clone().map(|learner| residuals(exchange, learner)).collect()
                    };
                    let before = all(&mut exchange);
                    assert_eq!(step(&mut exchange, 1, true), Outcome::NonFinite { learner: 3 });
                    for ((learner, before), after) in hosted.clone().zip(before).zip(all(&mut exchange)) {
                        let gradient = gradient(learner, 1, 2, 2400);
                        let sum = |(r, dw): (&u32, &f32)| (f32::from_bits(*r) + dw).to_bits();
                        assert_eq!(
                            after[2].0,
                            before[2].0.iter().zip(&gradient).map(sum).collect::<Vec<_>>()
                        );
                        assert!(
                            after.iter().zip(&before).all(|(after, before)| after.1 == before.1),
                            "{strategy:?}"
                        );
                    }
                    assert_eq!(step(&mut exchange, 2, false), Outcome::Averaged);
                });
            }
        });
    }
}

#[test]
fn gradients_and_outputs_that_do_not_fit_are_refused_before_anything_is_compressed() {
    let transport = Local::alone(1);
    let layout = model();
    let mut exchange = Exchange::new(transport, layout.clone(), Strategy::Reduce).unwrap();
    let good = gradients(&layout, 0, 0);
    let mut short = good.clone();
    short[2].pop();
    let mut output = output(&layout);
    let empty: &[Vec<adacomp::Gradient<'_>>] = &[];
    assert!(exchange.exchange(empty, &mut slices(&mut output)).is_err());
    assert!(exchange.exchange(&given(&short), &mut slices(&mut output)).is_err());
    assert!(exchange.exchange(&given(&good[1..]), &mut slices(&mut output)).is_err());
    assert!(exchange.exchange(&given(&good), &mut slices(&mut output[1..])).is_err());
    assert!(exchange.finish(&mut slices(&mut output)).is_err());
    assert_eq!(exchange.exchange(&given(&good), &mut slices(&mut output)).unwrap(), Outcome::Averaged);
}

/// Owners with shorter bins select more, so less waits with them.
#[test]
fn owners_bins_can_be_shorter() {
    let kept_and_sent = |owner_divisor: u32| {
        let options =
            Options { owner_divisor: owner_divisor.try_into().unwrap(), ..Options::from(Strategy::Sharded) };
        let mut exchange = Exchange::new(Local::alone(2), model(), options).unwrap();
        let layout = model();
        let mut sent = 0;
        for step in 0..6 {
            let gradients: Vec<_> = (0..2).map(|learner| gradients(&layout, learner, step)).collect();
            let given: Vec<_> = gradients.iter().flat_map(|gradients| given(gradients)).collect();
            let mut output = output(&layout);
            let outcome = exchange.exchange(&given, &mut slices(&mut output)).unwrap();
            assert_eq!(outcome, Outcome::Averaged);
            sent += exchange.traffic(0).unwrap().sent;
        }
        let owner = exchange.owner(0).unwrap();
        let norm = |layer| owner.residual_statistics(layer).map_or(0.0, |residual| residual.norm);
        ((0..layout.len()).map(norm).sum::<f64>(), sent)
    };
    let ((kept, sent), (kept_less, sent_more)) = (kept_and_sent(1), kept_and_sent(4));
    assert!(kept_less < kept, "{kept_less} {kept}");
    assert!(sent_more > sent, "{sent_more} {sent}");
}

/// Local steps check all weights before they change anything, residuals among it.
#[test]
fn weights_that_do_not_fit_are_refused() {
    let layout = model();
    let mut exchange = Exchange::new(Local::alone(2), layout.clone(), Strategy::Gather).unwrap();
    let steps = LocalSteps { residual_decay: 0.5, ..LocalSteps::every(1) };
    let mut shared = Shared::new(gradients(&layout, 9, 9));
    let mut local = vec![gradients(&layout, 0, 0), gradients(&layout, 1, 0)];
    assert_eq!(shared.exchange(&steps, &mut exchange, &mut local).unwrap(), Outcome::Averaged);
    let before = [0, 1].map(|learner| residuals(&mut exchange, learner));
    let mut short = local.clone();
    short[1][2].pop();
    let fewer = vec![local[0].clone(), local[1][..4].to_vec()];
    let mut velocity = shared.clone();
    velocity.velocity = vec![vec![0.0; 3]];
    for (shared, mut local, told) in [
        (shared.clone(), local[..1].to_vec(), "hosted here and give weights: 1, expected 2"),
        (shared.clone(), fewer, "layers in the weights of learner 1: 4, expected 5"),
        (shared.clone(), short, "elements of `fc.weight` in the weights of learner 1: 2399, expected 2400"),
        (Shared::new(Vec::new()), local.clone(), "layers in the shared weights: 0, expected 5"),
        (velocity, local.clone(), "layers in the velocity: 1, expected 5"),
    ] {
        let (mut changed, given) = (shared.clone(), local.clone());
        let refused = changed.exchange(&steps, &mut exchange, &mut local).unwrap_err().to_string();
        assert!(refused.contains(told), "{refused}");
        assert_eq!((changed, local), (shared, given));
        assert_eq!([0, 1].map(|learner| residuals(&mut exchange, learner)), before);
    }
}
