//! What a round of a group needs to know, and its envelopes.

use crate::error::Cause;
use crate::message::{Context, Flag};
use crate::shares::share;
use crate::strategy::Fault;
use adacomp::{Codec, Layout};
use std::ops::Range;

/// What a round needs to know.
pub(crate) struct Setting<'a> {
    pub(crate) layout: &'a Layout,
    /// The number of the group in its step.
    pub(crate) group: usize,
    /// The number of the round in its group.
    pub(crate) round: usize,
    /// The layers of the group, ascending.
    pub(crate) layers: &'a [usize],
    pub(crate) learners: usize,
    pub(crate) step: u64,
    pub(crate) codec: Codec,
    /// Whether all layers are sent whole in this step.
    pub(crate) flush: bool,
}

impl Setting<'_> {
    /// Whether a layer is sent whole in this step.
    pub(crate) fn is_whole(&self, layer: usize) -> bool {
        self.flush || !self.layout[layer].treatment.selects()
    }

    /// The elements of a layer that a learner owns.
    pub(crate) fn share(&self, layer: usize, owner: usize) -> Range<usize> {
        share(self.layout, layer, owner, self.learners)
    }
}

/// A setting, and what envelopes need on top.
pub(crate) struct Envelopes<'a> {
    pub(crate) setting: Setting<'a>,
    /// Whether some learner's gradient is known not to be finite.
    pub(crate) known_non_finite: bool,
}

/// What messages contain, and the first sender whose gradient is not finite.
pub(crate) struct Opened<'a> {
    pub(crate) contents: Vec<&'a [u8]>,
    pub(crate) non_finite: Option<usize>,
}

impl Envelopes<'_> {
    pub(crate) fn context(&self, sender: usize, receiver: Option<usize>) -> Context {
        Context {
            fingerprint: self.setting.layout.fingerprint(),
            step: self.setting.step,
            group: self.setting.group as u32,
            round: self.setting.round as u8,
            flush: self.setting.flush,
            sender,
            receiver,
        }
    }

    pub(crate) fn open_all<'m>(
        &self,
        in_envelopes: bool,
        receiver: Option<usize>,
        messages: &[&'m [u8]],
    ) -> Result<Opened<'m>, Fault> {
        let mut opened = Opened { contents: messages.to_vec(), non_finite: None };
        if !in_envelopes {
            return Ok(opened);
        }
        for (sender, contents) in opened.contents.iter_mut().enumerate() {
            let context = self.context(sender, receiver);
            let flag;
            (flag, *contents) = context.open(contents, self.setting.learners).map_err(Fault::of(sender))?;
            match flag {
                Flag::Good => {}
                Flag::NonFinite => opened.non_finite = opened.non_finite.or(Some(sender)),
                Flag::Failed => return Err(Fault { sender, cause: Cause::Failed }),
            }
        }
        Ok(opened)
    }
}
