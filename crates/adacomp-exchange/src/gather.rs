//! The paper's way: every learner's frame to all.

use crate::error::Cause;
use crate::member::Member;
use crate::setting::Setting;
use crate::strategy::{Addressing, Fault, Rounds};
use adacomp::{AverageError, Averager, Outcome};

#[derive(Default)]
pub(crate) struct Gather {
    averager: Option<Averager>,
}

impl Rounds for Gather {
    fn addressing(&self) -> &'static [Addressing] {
        &[Addressing::AllGather]
    }

    /// A frame has an envelope of its own.
    fn in_envelopes(&self) -> bool {
        false
    }

    fn send(&mut self, setting: &Setting<'_>, member: &mut Member, receiver: usize, message: &mut Vec<u8>) {
        let (compressor, learner) = (&mut member.compressor, member.learner);
        compressor
            .encode_layers(setting.codec, learner, setting.step, setting.layers, message)
            .expect("all layers of a group are given before its first round");
        let copies = Addressing::AllGather.copies(member.learner, receiver, setting.learners);
        for &layer in setting.layers {
            let bytes = member.compressor.layer_statistics(layer).bytes;
            member.traffic.layers[layer].sent += (copies * bytes) as u64;
        }
    }

    fn take_all(
        &mut self,
        setting: &Setting<'_>,
        members: &mut [Member],
        contents: &[&[u8]],
    ) -> Result<Option<usize>, Fault> {
        let Some(first) = members.first() else { return Ok(None) };
        let averager = self.averager.get_or_insert_with(|| Averager::new(first.compressor.layout().clone()));
        let outcome = averager.check_layers(setting.step, contents, setting.layers);
        match outcome {
            Ok(Outcome::Averaged) => {
                for (sender, layer, bytes) in averager.sections() {
                    for member in members.iter_mut().filter(|member| member.learner != sender) {
                        member.traffic.layers[layer].received += bytes as u64;
                    }
                }
                Ok(None)
            }
            Ok(Outcome::NonFinite { learner }) => Ok(Some(learner)),
            Err(error) => {
                let sender = match error {
                    AverageError::Frame { learner, .. } | AverageError::Step { learner, .. } => learner,
                    AverageError::Learner { expected, .. } => expected,
                    _ => 0,
                };
                let cause = match error {
                    AverageError::Frame { source, .. } => Cause::Contents(source),
                    AverageError::Step { expected, actual, .. } => Cause::Step { expected, actual },
                    AverageError::Learner { actual, .. } => {
                        Cause::Misrouted { sender: actual, receiver: None }
                    }
                    other => Cause::Frame(other),
                };
                Err(Fault { sender, cause })
            }
        }
    }

    fn write(&mut self, _setting: &Setting<'_>, output: &mut [&mut [f32]]) {
        if let Some(averager) = &mut self.averager {
            averager.write(output).expect("the frames and the output have been checked");
        }
    }
}
