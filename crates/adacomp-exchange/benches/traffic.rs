//! Bytes that a learner sends and receives in a step, by strategy and number of learners, on a layer of a million elements
//! with bins of 500 and on the layers of `mnist-cnn`; the time that messages take, as a multiple of `R += dW`; and how far the
//! strategy that is chosen by itself is from the better one of `gather` and `reduce`.
//!
//! `cargo bench -p adacomp-exchange --bench traffic` prints JSON lines.

#[path = "../../adacomp/benches/common/mod.rs"]
mod common;

use adacomp::{Codec, Kind, Layout, Outcome, Parameter, Policy};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{Messages, Strategy};
use common::{Gradients, flag, median, time};
use std::hint::black_box;
use std::sync::Arc;

const LEARNERS: [usize; 7] = [2, 4, 8, 16, 32, 64, 128];

fn main() {
    let quick = flag("--quick");
    let elements = if quick { 50_000 } else { 1_000_000 };
    let learners = if quick { &LEARNERS[..2] } else { &LEARNERS };
    let layer = vec![Parameter::new("weight", &[1, elements])];
    for (model, parameters) in [("layer", layer), ("mnist-cnn", mnist_cnn())] {
        let layout = Arc::new(Policy::adacomp().layout(parameters).expect("a valid layout"));
        let mut gradients = Gradients::new(layout.elements());
        for &learners in learners {
            let sent = Strategy::ALL
                .map(|strategy| (strategy, measure(model, &layout, strategy, learners, &mut gradients)));
            choice(model, &layout, learners, &sent);
        }
    }
}

/// The parameters of the recipe.
fn mnist_cnn() -> Vec<Parameter> {
    let (conv, vector) = (Kind::Conv, Kind::Vector);
    let parameter = |name: &str, shape: &[usize], kind| Parameter::new(name, shape).with_kind(kind);
    vec![
        parameter("conv1.weight", &[32, 1, 5, 5], conv),
        parameter("conv1.bias", &[32], vector),
        parameter("conv2.weight", &[64, 32, 5, 5], conv),
        parameter("conv2.bias", &[64], vector),
        parameter("fc1.weight", &[1024, 128], Kind::Matrix),
        parameter("fc1.bias", &[128], vector),
        parameter("fc2.weight", &[128, 10], Kind::Matrix),
        parameter("fc2.bias", &[10], vector),
    ]
}

/// Prints what is chosen for a layout and what that costs, of the bytes that each strategy was measured to send.
fn choice(model: &str, layout: &Layout, learners: usize, sent: &[(Strategy, u64)]) {
    let bytes = |wanted: Strategy| {
        sent.iter().find(|(strategy, _)| *strategy == wanted).map_or(0, |(_, bytes)| *bytes) as f64
    };
    let chosen = Strategy::choose(layout, learners, Codec::Rice);
    let (gather, reduce) = (bytes(Strategy::Gather), bytes(Strategy::Reduce));
    let over_best = bytes(chosen) / gather.min(reduce);
    let ring = 2.0 * (learners - 1) as f64 / learners as f64 * 4.0 * layout.elements() as f64;
    let over_ring = bytes(chosen) / ring;
    let [gather, reduce, auto] = [gather, reduce, bytes(chosen)].map(|bytes| ring / bytes);
    println!(
        r#"{{"model": "{model}", "learners": {learners}, "auto": "{chosen}", "auto_bytes_over_best": {over_best:.3}, "auto_over_ring": {over_ring:.6}, "ring_ratio_gather": {gather:.1}, "ring_ratio_reduce": {reduce:.1}, "ring_ratio_auto": {auto:.1}}}"#
    );
}

/// Returns the bytes that a learner sends.
fn measure(
    model: &str,
    layout: &Arc<Layout>,
    strategy: Strategy,
    learners: usize,
    gradients: &mut Gradients,
) -> u64 {
    let elements = layout.elements();
    // The first learner apart, so that its own work can be timed.
    let mut exchanges = [0..1, 1..learners].map(|hosted| {
        ByHand::unconnected((), layout.clone(), strategy, learners, hosted).expect("valid learners")
    });
    let (mut gradient, mut residual) = (vec![0.0; elements], vec![0.0; elements]);
    let mut outputs = [vec![0.0; elements], vec![0.0; elements]];
    // Residuals take a while to fill; dense has none.
    let warm_up = if strategy == Strategy::Dense { 1 } else { 12 };
    let steps = 5;
    let (mut limits, mut encodes, mut decodes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut sent, mut received, mut coded, mut entropy) = (0, 0, 0, 0.0);
    for step in 0..warm_up + steps {
        for learner in (0..learners).rev() {
            gradients.fill(&mut gradient);
            for (layer, part) in parts(layout, &mut gradient).into_iter().enumerate() {
                let submitted = exchanges[learner.min(1)].submit(learner, layer, (&*part).into());
                submitted.expect("a valid gradient");
            }
        }
        let limit = time(|| {
            residual.iter_mut().zip(black_box(&gradient)).for_each(|(r, dw): (&mut f32, _)| *r += dw)
        });
        let (mut encode, mut decode, mut last_round) = (0.0, 0.0, 0);
        for round in 0..exchanges[0].rounds() {
            let mut first = Messages::AllGather(Vec::new());
            encode += time(|| first = exchanges[0].outgoing(0, round));
            let incoming = carry(first, exchanges[1].outgoing(0, round));
            if let Messages::AllGather(messages) = &incoming[0] {
                last_round = messages.iter().map(|message| message.len()).sum();
            }
            exchanges[1].incoming(0, round, &incoming[1]).expect("all messages");
            decode += time(|| exchanges[0].incoming(0, round, &incoming[0]).expect("all messages"));
        }
        let verdicts: Vec<_> = exchanges.iter_mut().flat_map(ByHand::verdict).map(Arc::new).collect();
        let scale = exchanges[0].compressor(0).map_or(0.0, |compressor| compressor.layer_statistics(0).scale);
        for (number, (exchange, output)) in exchanges.iter_mut().zip(&mut outputs).enumerate().rev() {
            let seconds = time(|| {
                let output = &mut parts(layout, output);
                let outcome = exchange.conclude(&verdicts, Some(output)).expect("a good step");
                assert_eq!(outcome, Outcome::Averaged);
            });
            decode += if number == 0 { seconds } else { 0.0 };
        }
        assert_eq!(outputs[0], outputs[1]);
        if step >= warm_up {
            limits.push(limit);
            encodes.push(encode);
            decodes.push(decode);
            for learner in 0..learners {
                let traffic = exchanges[learner.min(1)].traffic(learner).expect("a hosted learner");
                sent += traffic.sent;
                received += traffic.received;
            }
            coded += last_round;
            if strategy == Strategy::Reduce && layout.len() == 1 {
                entropy += sum_entropy(&outputs[0], scale, learners);
            }
        }
    }
    let each = (steps * learners) as u64;
    let (sent, received, limit) = (sent / each, received / each, median(limits));
    let (encode, decode) = (median(encodes) / limit, median(decodes) / limit);
    let sums = match entropy {
        0.0 => String::new(),
        bits => format!(r#", "sums_ratio_to_entropy": {:.3}"#, coded as f64 / (bits / 8.0)),
    };
    println!(
        r#"{{"model": "{model}", "strategy": "{strategy}", "learners": {learners}, "bytes_sent": {sent}, "bytes_received": {received}, "encode_ratio_to_limit": {encode:.2}, "decode_ratio_to_limit": {decode:.2}{sums}}}"#
    );
    sent
}

/// Returns the part of each layer.
fn parts<'a>(layout: &Layout, mut flat: &'a mut [f32]) -> Vec<&'a mut [f32]> {
    let layers = layout.layers().iter();
    layers.map(|layer| flat.split_off_mut(..layer.elements()).expect("as long as all layers")).collect()
}

/// What comes to each of two exchanges, of which the first hosts one learner.
fn carry(first: Messages, rest: Messages) -> [Messages; 2] {
    match (first, rest) {
        (Messages::AllGather(first), Messages::AllGather(rest)) => {
            let messages: Vec<_> = first.into_iter().chain(rest).collect();
            [Messages::AllGather(messages.clone()), Messages::AllGather(messages)]
        }
        (Messages::AllToAll(first), Messages::AllToAll(rest)) => {
            let mut sent: Vec<_> = first.into_iter().chain(rest).collect();
            let learners = sent.len();
            let mut to =
                |receiver: usize| sent.iter_mut().map(|sent| std::mem::take(&mut sent[receiver])).collect();
            [Messages::AllToAll(vec![to(0)]), Messages::AllToAll((1..learners).map(to).collect())]
        }
        _ => unreachable!("both are in the same round"),
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
