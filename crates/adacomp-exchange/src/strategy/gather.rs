//! The paper's strategy: every learner sends its frame to all.

use super::{Fault, Rounds};
use crate::error::Cause;
use crate::message::Context;
use crate::protocol::Learner;
use adacomp::internal::Output;
use adacomp::{AverageError, Averager, Outcome};

#[derive(Default)]
pub(crate) struct Gather {
    averager: Option<Averager>,
}

impl Rounds for Gather {
    fn send(&mut self, context: &Context<'_>, learner: &mut Learner, receiver: usize, message: &mut Vec<u8>) {
        learner
            .compressor
            .encode_layers(context.options.codec, learner.number, context.step, context.layers, message)
            .expect("all layers of a group are submitted before its first round");
        let copies = context.collective().copies(learner.number, receiver, context.learners);
        for &layer in context.layers {
            let bytes = learner.compressor.layer_statistics(layer).bytes;
            learner.traffic.layers[layer].sent += (copies * bytes) as u64;
        }
    }

    fn receive(
        &mut self,
        context: &Context<'_>,
        learners: &mut [Learner],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        let averager = self.averager.get_or_insert_with(|| {
            let averager = Averager::new(context.layout.clone()).with_threads(context.options.threads);
            averager.with_clip(context.options.clip)
        });
        match averager.check_layers(context.step, contents, context.layers).map_err(fault)? {
            Outcome::Averaged => {
                for (&layer, &most) in context.layers.iter().zip(averager.bounds()) {
                    learners.iter_mut().for_each(|learner| learner.compressor.clamp_sent(layer, most));
                }
                for (sender, layer, bytes) in averager.sections() {
                    for learner in learners.iter_mut().filter(|learner| learner.number != sender) {
                        learner.traffic.layers[layer].received += bytes as u64;
                    }
                }
                Ok(None)
            }
            Outcome::NonFinite { learner } => Ok(Some(learner)),
        }
    }

    fn write(&mut self, _context: &Context<'_>, output: &mut [Output<'_>]) {
        if let Some(averager) = &self.averager {
            averager.write_to(output).expect("the frames and the output have been checked");
        }
    }
}

fn fault(error: AverageError) -> Fault {
    let (sender, cause) = match error {
        AverageError::Frame { learner, source } => (learner, Cause::Contents(source)),
        AverageError::Step { learner, expected, actual } => (learner, Cause::Step { expected, actual }),
        AverageError::Learner { expected, actual } => {
            (expected, Cause::Misrouted { sender: actual, receiver: None })
        }
        other => unreachable!("there are frames, and nothing is written: {other}"),
    };
    Fault { sender, cause }
}
