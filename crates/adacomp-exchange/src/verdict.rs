//! How learners end a step together.

use crate::error::{Cause, CollectiveError, ExchangeError};
use crate::member::Member;
use crate::message::{Context, Flag};
use crate::protocol::Protocol;

/// The round of verdicts.
const VERDICT: u8 = 7;
const PRIMARY: u8 = 1;
const SECONDARY: u8 = 2;

impl Protocol {
    /// What each learner that is hosted here says of the step: a message to all, empty but for its envelope if it has refused
    /// nothing.
    pub fn verdict(&mut self) -> Vec<Vec<u8>> {
        let contexts: Vec<_> =
            self.members.iter().map(|member| self.verdict_context(member.learner)).collect();
        let copies = self.learners() as u64 - 1;
        let flag = if self.non_finite.is_some() { Flag::NonFinite } else { Flag::Good };
        let verdict = |(member, context): (&mut Member, Context)| {
            let mut message = context.begin(flag);
            if let Some(fault) = &member.fault {
                message.push(if fault.cause == Cause::Failed { SECONDARY } else { PRIMARY });
                message.extend_from_slice(&(fault.sender as u32).to_le_bytes());
                message.extend_from_slice(fault.cause.to_string().as_bytes());
            }
            context.seal(&mut message);
            member.traffic.sent += copies * message.len() as u64;
            message
        };
        self.members.iter_mut().zip(contexts).map(verdict).collect()
    }

    fn verdict_context(&self, sender: usize) -> Context {
        Context {
            fingerprint: self.layout().fingerprint(),
            step: self.step(),
            group: u32::MAX,
            round: VERDICT,
            everything: false,
            sender,
            receiver: None,
        }
    }

    /// What the verdicts amount to: the first learner that knows of a gradient that is not finite, if any does; an error, if
    /// messages were refused, and the first that is not just a consequence of another.
    pub(crate) fn judge(&self, verdicts: &[&[u8]]) -> Result<Option<usize>, ExchangeError> {
        let step = self.step();
        if verdicts.len() != self.learners() {
            let cause = CollectiveError::Messages { expected: self.learners(), actual: verdicts.len() };
            return Err(ExchangeError::Collective { step, cause });
        }
        let (mut refused, mut non_finite) = (Vec::new(), self.non_finite);
        for (learner, verdict) in verdicts.iter().enumerate() {
            let opened = self.verdict_context(learner).open(verdict, self.learners());
            let (flag, contents) = opened.map_err(|cause| ExchangeError::Verdict { step, learner, cause })?;
            if flag == Flag::NonFinite {
                non_finite.get_or_insert(learner);
            }
            if !contents.is_empty() {
                refused.push((learner, contents));
            }
        }
        let primary = refused.iter().find(|(_, contents)| contents[0] == PRIMARY);
        let Some(&(receiver, contents)) = primary.or(refused.first()) else { return Ok(non_finite) };
        let (sender, reason) = contents[1..].split_first_chunk().unwrap_or((&[u8::MAX; 4], &[]));
        let (sender, reason) =
            (u32::from_le_bytes(*sender) as usize, String::from_utf8_lossy(reason).into_owned());
        Err(ExchangeError::Message { step, sender, receiver, reason })
    }
}
