//! A bound on what one learner can do to the average.

use crate::draw::gradient;
use crate::hand::{Concluded, carry};
use crate::support::{STRATEGIES, bits, model, residuals, run};
use adacomp::{Outcome, Sending};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{ExchangeError, Options, Strategy};

const LEARNERS: usize = 4;
const CLIP: f32 = 3.0;

fn clipped(strategy: Strategy) -> Options {
    Options { clip: Some(CLIP), ..strategy.into() }
}

fn protocols(options: Options) -> Vec<ByHand> {
    let protocol = |learner| ByHand::unconnected((), model(), options, LEARNERS, learner..learner + 1);
    (0..LEARNERS).map(|learner| protocol(learner).unwrap()).collect()
}

/// A learner's gradient, `factor` times what it should be.
fn scaled(learner: usize, step: u64, layer: usize, factor: f32) -> Vec<f32> {
    let gradient = gradient(learner, step, layer, model()[layer].elements());
    gradient.into_iter().map(|value| factor * value).collect()
}

/// Runs a step in which the last learner's gradient is this many times too large. Returns the average, the same on all.
fn step(protocols: &mut [ByHand], step: u64, factor: f32) -> Vec<Vec<f32>> {
    for (learner, protocol) in protocols.iter_mut().enumerate() {
        let factor = if learner == LEARNERS - 1 { factor } else { 1.0 };
        for layer in 0..model().len() {
            let gradient = scaled(learner, step, layer, factor);
            protocol.submit(learner, layer, gradient.as_slice().into()).unwrap();
        }
    }
    let concluded = carry(protocols, |_, _| {});
    let averages: Vec<_> = concluded.into_iter().map(averaged).collect();
    let same = |average: &Vec<Vec<f32>>| bits(&average.concat()) == bits(&averages[0].concat());
    assert!(averages.iter().all(same));
    averages[0].clone()
}

fn averaged(concluded: Concluded) -> Vec<Vec<f32>> {
    let (outcome, average) = concluded.unwrap();
    assert_eq!(outcome, Outcome::Averaged);
    average
}

/// Returns what owners keep of a layer.
fn owned(protocols: &mut [ByHand], layer: usize) -> Vec<f32> {
    let learners = protocols.iter_mut().enumerate();
    let kept = learners.flat_map(|(learner, protocol)| residuals(protocol, learner).swap_remove(layer).1);
    kept.map(f32::from_bits).collect()
}

/// Adds up what owners keep, which is of the average, too.
fn with_owned(protocols: &mut [ByHand], mut average: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    for (layer, average) in average.iter_mut().enumerate() {
        average.iter_mut().zip(owned(protocols, layer)).for_each(|(sum, kept)| *sum += kept);
    }
    average
}

#[test]
fn a_generous_bound_keeps_the_bits() {
    for strategy in STRATEGIES {
        let generous = Options { clip: Some(1e6), ..strategy.into() };
        assert_eq!(run(LEARNERS, 2, 5, generous), run(LEARNERS, 2, 5, strategy), "{strategy}");
    }
}

#[test]
fn one_learner_moves_the_average_by_no_more_than_the_bound() {
    for strategy in STRATEGIES {
        let mut honest = protocols(clipped(strategy));
        let mut silent = protocols(clipped(strategy));
        let mut hostile = protocols(clipped(strategy));
        let mut unbounded = protocols(strategy.into());
        let _ = step(&mut honest, 0, 1.0);
        let [without, with, free] =
            [(&mut silent, 0.0), (&mut hostile, 1e6), (&mut unbounded, 1e6)].map(|(protocols, factor)| {
                let average = step(protocols, 0, factor);
                with_owned(protocols, average)
            });
        for layer in 0..model().len() {
            // The scale of a compressed layer, else the largest magnitude.
            let largest = |learner: usize| match honest[learner].compressor(learner) {
                Some(compressor) if compressor.layer_statistics(layer).scale > 0.0 => {
                    let scale = compressor.layer_statistics(layer).scale;
                    // With `reduce` that is the mean of all by now, which is as good as the median here.
                    if strategy == Strategy::Reduce { 1.2 * scale } else { scale }
                }
                _ => {
                    scaled(learner, 0, layer, 1.0).into_iter().fold(0.0, |most, value| value.abs().max(most))
                }
            };
            let mut all: Vec<f32> = (0..LEARNERS).map(largest).collect();
            all.sort_by(f32::total_cmp);
            // The median is at most the largest of all but the hostile one.
            let bound = CLIP * all[LEARNERS - 2];
            // With `reduce` all learners send with the scale that one of them has raised.
            let most = if strategy == Strategy::Reduce { bound } else { bound / LEARNERS as f32 };
            let moved = |one: &[f32]| {
                one.iter()
                    .zip(&without[layer])
                    .fold(0.0, |most: f32, (one, other)| most.max((one - other).abs()))
            };
            assert!(moved(&with[layer]) <= 1.0001 * most, "{strategy} {layer}: {}", moved(&with[layer]));
            assert!(with[layer].is_empty() || moved(&free[layer]) > 1000.0 * most, "{strategy} {layer}");
        }
    }
}

/// Of an honest learner that had a gradient far above all others nothing is lost, only delayed; also by a flush.
#[test]
fn what_is_clipped_stays_in_the_residual() {
    for strategy in [Strategy::Gather, Strategy::Reduce, Strategy::Sharded] {
        let mut protocols = protocols(clipped(strategy));
        let (mut sent, mut given) = (vec![0.0f64; 2400], vec![0.0f64; 2400]);
        const FC: usize = 2;
        for (at, factor) in [(0, 1.0), (1, 1e4), (2, 1.0), (3, 1e4), (4, 1.0)] {
            if at == 3 {
                protocols.iter_mut().for_each(|protocol| protocol.set_sending(Sending::Flush));
            }
            let average = step(&mut protocols, at, factor);
            for learner in 0..LEARNERS {
                let gradient = scaled(learner, at, FC, if learner == LEARNERS - 1 { factor } else { 1.0 });
                given.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += f64::from(value));
            }
            sent.iter_mut().zip(&average[FC]).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        let owned = owned(&mut protocols, FC);
        let mut kept: Vec<f64> = vec![0.0; 2400];
        for (learner, protocol) in protocols.iter_mut().enumerate() {
            let own = residuals(protocol, learner).swap_remove(FC).0;
            kept.iter_mut().zip(own).for_each(|(sum, bits)| *sum += f64::from(f32::from_bits(bits)));
        }
        let largest = given.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        for element in 0..2400 {
            let owned = owned.get(element).map_or(0.0, |kept| f64::from(*kept));
            let found = kept[element] + LEARNERS as f64 * (sent[element] + owned);
            assert!((found - given[element]).abs() < 1e-6 * largest, "{strategy} {element}");
        }
        // It is there, and has not been sent.
        assert!(kept.iter().any(|kept| kept.abs() > 0.1 * largest), "{strategy}");
        assert!(sent.iter().all(|sent| sent.abs() < 0.1 * largest), "{strategy}");
    }
}

#[test]
fn a_clip_that_makes_no_sense_is_refused() {
    for clip in [0.5, -1.0, f32::NAN, f32::INFINITY] {
        let options = Options { clip: Some(clip), ..Strategy::Gather.into() };
        let refused = ByHand::unconnected((), model(), options, 1, 0..1).err().unwrap();
        assert!(matches!(refused, ExchangeError::Clip { .. }), "{clip}");
    }
}
