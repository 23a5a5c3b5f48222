//! Four learners on threads train the same weights, each on data of its own, and send a few of their gradients.
//!
//! `cargo run --release -p adacomp-exchange --example threads`

use adacomp::{Outcome, Parameter, Policy};
use adacomp_exchange::{Exchange, Strategy, Threads, Transport};

const ELEMENTS: usize = 100_000;

fn main() {
    let weights = Threads::new(4).run(|transport| {
        let learner = transport.hosted().start;
        let layout = Policy::adacomp().layout([Parameter::new("weights", &[100, 1000])]).unwrap();
        let mut exchange = Exchange::new(transport, layout, Strategy::Gather).unwrap();
        let mut random = fastrand::Rng::with_seed(learner as u64);
        let (mut weights, mut average) = (vec![0.0f32; ELEMENTS], vec![0.0; ELEMENTS]);
        for step in 1..=200 {
            // Noisy data around 0, 1, 2 or 3: together the learners find the mean, 1.5.
            let target = |_| learner as f32 + 4.0 * (random.f32() - 0.5);
            let gradient: Vec<f32> = weights
                .iter()
                .zip((0..ELEMENTS).map(target))
                .map(|(weight, target)| weight - target)
                .collect();
            let outcome =
                exchange.exchange(&[vec![gradient.as_slice().into()]], &mut [&mut average]).unwrap();
            assert_eq!(outcome, Outcome::Averaged);
            weights.iter_mut().zip(&average).for_each(|(weight, average)| *weight -= 0.02 * average);
            if learner == 0 && step % 50 == 0 {
                let mean = weights.iter().sum::<f32>() / ELEMENTS as f32;
                let sent = exchange.traffic(0).unwrap().sent;
                println!("step {step}: mean weight {mean:.3}; sent {sent} bytes, a dense ring sends 600000");
            }
        }
        weights
    });
    println!("all learners have the same weights: {}", weights.iter().all(|other| *other == weights[0]));
}

#[test]
fn it_runs() {
    main();
}
