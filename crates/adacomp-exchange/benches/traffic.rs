//! Bytes that a learner sends and receives in a step, by strategy and number of learners, on a layer of a million elements
//! with bins of 500; and the time that messages take, as a multiple of `R += dW`.
//!
//! `cargo bench -p adacomp-exchange --bench traffic -- --json`.

#[path = "../../adacomp/benches/common/mod.rs"]
mod common;

use adacomp::{Codec, Outcome, Parameter, Policy};
use adacomp_exchange::{Incoming, Outgoing, Protocol, Strategy};
use common::{Gradients, flag, median, number, print, text, time};
use std::hint::black_box;
use std::sync::Arc;

const LEARNERS: [usize; 7] = [2, 4, 8, 16, 32, 64, 128];

fn main() {
    let quick = flag("--quick");
    let elements = if quick { 50_000 } else { 1_000_000 };
    let learners = if quick { &LEARNERS[..2] } else { &LEARNERS };
    let mut gradients = Gradients::new(elements);
    for strategy in Strategy::ALL {
        for &learners in learners {
            measure(strategy, learners, elements, &mut gradients);
        }
    }
}

fn measure(strategy: Strategy, learners: usize, elements: usize, gradients: &mut Gradients) {
    let layout =
        Policy::adacomp().layout([Parameter::new("weight", &[1, elements])]).expect("a valid layout");
    let mut protocol = Protocol::new(layout, strategy, Codec::Rice, learners, 0..learners, usize::MAX)
        .expect("a valid protocol");
    let (mut gradient, mut output, mut residual) =
        (vec![0.0; elements], vec![0.0; elements], vec![0.0; elements]);
    // Residuals take a while to fill; dense has none.
    let warm_up = if strategy == Strategy::Dense { 1 } else { 12 };
    let steps = 5;
    let (mut limits, mut encodes, mut decodes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut sent, mut received, mut coded, mut entropy) = (0, 0, 0, 0.0);
    for step in 0..warm_up + steps {
        for learner in 0..learners {
            gradients.fill(&mut gradient);
            protocol.give(learner, 0, gradient.as_slice().into()).expect("a valid gradient");
        }
        let limit = time(|| {
            residual.iter_mut().zip(black_box(&gradient)).for_each(|(r, dw): (&mut f32, _)| *r += dw)
        });
        let (mut encode, mut decode, mut last_round) = (0.0, 0.0, 0);
        for round in 0..protocol.rounds() {
            let mut outgoing = Outgoing::ToAll(Vec::new());
            encode += time(|| outgoing = protocol.outgoing(0, round)) / learners as f64;
            let incoming = carry(outgoing, learners);
            if let Incoming::ToAll(messages) = &incoming {
                last_round = messages.iter().map(|message| message.len()).sum();
            }
            let taken = time(|| protocol.incoming(0, round, &incoming));
            // What comes to all is the same for all, and was taken once here.
            decode += if matches!(incoming, Incoming::ToAll(_)) { taken } else { taken / learners as f64 };
        }
        let verdicts: Vec<_> = protocol.verdict().into_iter().map(Arc::new).collect();
        let scale = protocol
            .compressor(0)
            .and_then(|compressor| compressor.statistics().next())
            .map_or(0.0, |l| l.scale);
        decode += time(|| {
            let outcome = protocol.conclude(&verdicts, &mut [&mut output]).expect("a good step");
            assert_eq!(outcome, Outcome::Averaged);
        });
        if step >= warm_up {
            limits.push(limit);
            encodes.push(encode);
            decodes.push(decode);
            for learner in 0..learners {
                let traffic = protocol.traffic(learner).expect("a hosted learner");
                sent += traffic.sent;
                received += traffic.received;
            }
            coded += last_round;
            if strategy == Strategy::Reduce {
                entropy += sum_entropy(&output, scale, learners);
            }
        }
    }
    let each = (steps * learners) as u64;
    let limit = median(&mut limits);
    let mut fields = vec![
        ("strategy", text(strategy.name())),
        ("learners", learners.to_string()),
        ("bytes_sent", (sent / each).to_string()),
        ("bytes_received", (received / each).to_string()),
        ("encode_ratio_to_limit", number(median(&mut encodes) / limit, 2)),
        ("decode_ratio_to_limit", number(median(&mut decodes) / limit, 2)),
    ];
    if strategy == Strategy::Reduce {
        fields.push(("sums_ratio_to_entropy", number(coded as f64 / (entropy / 8.0), 3)));
    }
    print(&fields);
}

fn carry(outgoing: Outgoing, learners: usize) -> Incoming {
    match outgoing {
        Outgoing::ToAll(messages) => Incoming::ToAll(messages.into_iter().map(Arc::new).collect()),
        Outgoing::ToEach(mut messages) => {
            let to = |receiver: usize| {
                messages.iter_mut().map(|sent| std::mem::take(&mut sent[receiver])).collect()
            };
            Incoming::ToEach((0..learners).map(to).collect())
        }
    }
}

/// The zero-order entropy of the sums of signs, in bits.
fn sum_entropy(output: &[f32], scale: f32, learners: usize) -> f64 {
    let mut counts = vec![0u64; 2 * learners + 1];
    for value in output {
        let sum = (value * learners as f32 / scale).round() as i64;
        counts[(sum + learners as i64) as usize] += 1;
    }
    let total = output.len() as f64;
    let bits = |&count: &u64| count as f64 * (total / count as f64).log2();
    counts.iter().filter(|count| **count > 0).map(bits).sum()
}
