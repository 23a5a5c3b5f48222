//! Carrying messages by hand, so that anything can be done to them.

use crate::draw::gradient;
use crate::support::{model, output, slices};
use adacomp::{Layout, Outcome};
use adacomp_exchange::internal::ByHand;
use adacomp_exchange::{ExchangeError, Messages, Strategy};
use std::sync::Arc;

/// One protocol for each learner, each hosting one.
pub(crate) fn protocols(learners: usize, strategy: Strategy) -> Vec<ByHand> {
    protocols_of(model(), learners, strategy)
}

pub(crate) fn protocols_of(layout: Arc<Layout>, learners: usize, strategy: Strategy) -> Vec<ByHand> {
    let one = |learner| ByHand::unconnected((), layout.clone(), strategy, learners, learner..learner + 1);
    (0..learners).map(|learner| one(learner).unwrap()).collect()
}

pub(crate) fn submit(protocols: &mut [ByHand], step: u64) {
    assert!(protocols.iter().all(|protocol| protocol.step() == step));
    for (learner, protocol) in protocols.iter_mut().enumerate() {
        let layout = protocol.layout().clone();
        for (layer, parameter) in layout.layers().iter().enumerate() {
            let gradient = gradient(learner, step, layer, parameter.elements());
            protocol.submit(learner, layer, gradient.as_slice().into()).unwrap();
        }
    }
}

/// A message on its way: round, sender, receiver.
pub(crate) type Place = (usize, usize, usize);

/// What a learner ends a step with.
pub(crate) type Concluded = Result<(Outcome, Vec<Vec<f32>>), ExchangeError>;

/// Carries all messages of a step, letting `meddle` change each on its way to each receiver; what every learner concludes.
pub(crate) fn carry(protocols: &mut [ByHand], mut meddle: impl FnMut(Place, &mut Vec<u8>)) -> Vec<Concluded> {
    let learners = protocols.len();
    for round in 0..protocols[0].rounds() {
        let sent: Vec<_> = protocols.iter_mut().map(|protocol| protocol.outgoing(0, round)).collect();
        for (receiver, protocol) in protocols.iter_mut().enumerate() {
            let mut message = |sender: usize| {
                let mut bytes = match &sent[sender] {
                    Messages::AllGather(messages) => messages[0].to_vec(),
                    Messages::AllToAll(messages) => messages[0][receiver].clone(),
                };
                meddle((round, sender, receiver), &mut bytes);
                bytes
            };
            let messages: Vec<_> = (0..learners).map(&mut message).collect();
            let incoming = match &sent[0] {
                Messages::AllGather(_) => Messages::AllGather(messages.into_iter().map(Arc::new).collect()),
                Messages::AllToAll(_) => Messages::AllToAll(vec![messages]),
            };
            protocol.incoming(0, round, &incoming).unwrap();
        }
    }
    let verdicts: Vec<_> =
        protocols.iter_mut().map(|protocol| Arc::new(protocol.verdict().remove(0))).collect();
    let mut conclude = |protocol: &mut ByHand| {
        let mut output = output(&model());
        let untouched = output.clone();
        let outcome = protocol.conclude(&verdicts, Some(&mut slices(&mut output)));
        assert!(matches!(outcome, Ok(Outcome::Averaged)) || output == untouched);
        outcome.map(|outcome| (outcome, output))
    };
    protocols.iter_mut().map(&mut conclude).collect()
}
