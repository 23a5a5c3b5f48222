//! How learners end a step together.

use crate::error::{Cause, ExchangeError, TransportError};
use crate::member::Member;
use crate::message::{Context, Flag};
use crate::protocol::Protocol;
use adacomp::{Outcome, Sending};
use std::sync::Arc;

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

    /// Whether, as far as is known here, the step will be averaged.
    pub fn is_good(&self) -> bool {
        self.non_finite.is_none() && self.members.iter().all(|member| member.fault.is_none())
    }

    /// Has all learners drop the step, because the averaged gradient cannot be used: it does not fit the format that it is
    /// wanted in. Before the verdict, which says so.
    pub fn reject_average(&mut self) {
        // All learners find the same, so the first is named.
        self.non_finite.get_or_insert(0);
    }

    /// Ends the step as all learners' verdicts say. The output, a slice for each layer, is written only if the gradient was
    /// averaged. After [`ExchangeError::Verdict`] and [`ExchangeError::Transport`] learners cannot go on; after other errors
    /// they can.
    pub fn conclude(
        &mut self,
        verdicts: &[Arc<Vec<u8>>],
        output: &mut [&mut [f32]],
    ) -> Result<Outcome, ExchangeError> {
        self.check_output(output)?;
        self.conclude_with(verdicts, |protocol| {
            for group in 0..protocol.in_use {
                let layers = protocol.groups[group].layers.clone();
                let slices = output.iter_mut().enumerate().filter(|(layer, _)| layers.contains(layer));
                let mut slices: Vec<&mut [f32]> = slices.map(|(_, slice)| &mut **slice).collect();
                protocol.write(group, &mut slices);
            }
        })
    }

    /// The same for drivers that have written every group already, with [`Protocol::write`]. What they have written counts
    /// only if the gradient was averaged.
    pub fn conclude_written(&mut self, verdicts: &[Arc<Vec<u8>>]) -> Result<Outcome, ExchangeError> {
        self.conclude_with(verdicts, |_| ())
    }

    fn conclude_with(
        &mut self,
        verdicts: &[Arc<Vec<u8>>],
        write: impl FnOnce(&mut Self),
    ) -> Result<Outcome, ExchangeError> {
        let step = self.step;
        let messages: Vec<&[u8]> = verdicts.iter().map(|verdict| verdict.as_slice()).collect();
        self.members.iter_mut().for_each(|member| member.count_received(&messages));
        match self.judge(&messages) {
            Err(error) => {
                self.rollback();
                return Err(error);
            }
            Ok(Some(learner)) => {
                self.rollback();
                return Ok(Outcome::NonFinite { learner });
            }
            Ok(None) => write(self),
        }
        for member in &mut self.members {
            member.owner_before = None;
            for compressor in [Some(&mut member.compressor), member.owner.as_mut()].into_iter().flatten() {
                if compressor.is_open() {
                    compressor.commit()?;
                }
            }
        }
        self.begin_at(step + 1, Sending::Compressed);
        Ok(Outcome::Averaged)
    }

    /// Ends the step without using it. Where learners cannot agree on that, none of them can go on.
    pub fn rollback(&mut self) {
        for member in &mut self.members {
            member.compressor.rollback();
            // What came to the owner is back with its senders, so it must not stay here.
            if let Some(before) = member.owner_before.take() {
                member.owner = Some(before);
            }
        }
        self.begin_at(self.step + 1, Sending::Compressed);
    }

    fn verdict_context(&self, sender: usize) -> Context {
        Context {
            fingerprint: self.layout().fingerprint(),
            step: self.step(),
            group: u32::MAX,
            round: VERDICT,
            flush: false,
            sender,
            receiver: None,
        }
    }

    /// What the verdicts amount to: the first learner that knows of a gradient that is not finite, if any does; an error, if
    /// messages were refused, and the first that is not just a consequence of another.
    fn judge(&self, verdicts: &[&[u8]]) -> Result<Option<usize>, ExchangeError> {
        let step = self.step();
        if verdicts.len() != self.learners() {
            let source = TransportError::Messages { expected: self.learners(), actual: verdicts.len() };
            return Err(ExchangeError::Transport { step, source });
        }
        let (mut refused, mut non_finite) = (Vec::new(), self.non_finite);
        for (learner, verdict) in verdicts.iter().enumerate() {
            let opened = self.verdict_context(learner).open(verdict, self.learners());
            let (flag, contents) =
                opened.map_err(|source| ExchangeError::Verdict { step, learner, source })?;
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
