//! Four learners on threads train one weight vector together: each sends a few of its gradients, and all take the same steps.
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
        let (mut weights, mut average) = (vec![0.0f32; ELEMENTS], vec![0.0; ELEMENTS]);
        for step in 0..200 {
            // Each learner pulls towards a target of its own; together they find the mean of the targets, 1.5.
            let gradient: Vec<f32> = weights.iter().map(|weight| weight - learner as f32).collect();
            let outcome =
                exchange.exchange(&[vec![gradient.as_slice().into()]], &mut [&mut average]).unwrap();
            assert_eq!(outcome, Outcome::Averaged);
            weights.iter_mut().zip(&average).for_each(|(weight, average)| *weight -= 0.1 * average);
            if learner == 0 && step % 50 == 49 {
                let sent = exchange.traffic(0).unwrap().sent;
                let mean = weights.iter().sum::<f32>() / ELEMENTS as f32;
                println!("step {}: mean weight {mean:.3}, {sent} bytes sent", step + 1);
            }
        }
        weights
    });
    println!(
        "the weights of all learners are the same: {}",
        weights.iter().all(|other| *other == weights[0])
    );
}
