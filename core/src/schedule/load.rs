//! The last known load of an instance, and what we sent there since it was reported.
//!
//! Not here: how load becomes waiting time (`cost.rs`). Load is soft state: it never enters the log, and
//! a router that starts has none until the first reports.

use super::decision::Decision;
use crate::id::Timestamp;

/// Queued and running work of one instance.
///
/// Reports come a few times a second; in between many requests may be routed. Without counting those, all
/// of them would go to whichever instance looked idle last, so every recorded decision counts here until
/// the next report, which is taken to include it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Prompt tokens that wait for prefill, as reported.
    pub queue_tokens: u64,
    /// Requests being served, as reported.
    pub running: u32,
    /// Requests waiting, as reported.
    pub waiting: u32,
    /// Prompt tokens to compute of the requests routed there since the report.
    pub routed_tokens: u64,
    /// Requests routed there since the report.
    pub routed: u32,
    /// Those routed there that are not computed yet, whether or not a report came since.
    pub(super) sent: Sent,
}

/// Requests kept by [`Sent`]; those besides are taken for as costly as these on average.
const SENT_MAX: usize = 32;

/// A request that was sent to an instance and has something to compute there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct One {
    turn: Timestamp,
    tokens: u32,
    /// Predicted for these tokens.
    prefill_us: u32,
}

/// What of the requests sent to an instance is not computed yet, in the order in which it will be.
///
/// A report says how many tokens wait, and not of which prompts: what was computed since the report before is what came first in this order. A token of a
/// long prompt costs several times one of a short prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sent {
    /// By turn, but for the first one: an instance is never idle while something waits, so that one is begun, and nothing passes it.
    waiting: [One; SENT_MAX],
    len: usize,
}

/// What is computed before a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    /// Time that was predicted for it.
    pub(super) prefill_us: u64,
    /// Requests that come behind it.
    pub(super) behind: u64,
}

impl Sent {
    fn all(&self) -> &[One] {
        &self.waiting[..self.len]
    }

    fn tokens(&self) -> u64 {
        self.all().iter().map(|one| u64::from(one.tokens)).sum()
    }

    fn push(&mut self, turn: Timestamp, tokens: u32, prefill_us: u64) {
        if tokens == 0 {
            return;
        }
        if self.len == SENT_MAX {
            self.pop();
        }
        let fixed = self.len.min(1);
        let at = fixed + self.all()[fixed..].partition_point(|one| one.turn <= turn);
        self.waiting.copy_within(at..self.len, at + 1);
        self.waiting[at] = One { turn, tokens, prefill_us: u32::try_from(prefill_us).unwrap_or(u32::MAX) };
        self.len += 1;
    }

    fn pop(&mut self) {
        self.waiting.copy_within(1..self.len, 0);
        self.len -= 1;
    }

    /// So many tokens are left.
    fn shrink_to(&mut self, tokens: u64) {
        let mut done = self.tokens().saturating_sub(tokens);
        while done > 0 {
            let first = &mut self.waiting[0];
            let all = u64::from(first.tokens);
            if all <= done {
                done -= all;
                self.pop();
                continue;
            }
            // All of its tokens are taken for alike.
            first.prefill_us = (u64::from(first.prefill_us) * (all - done) / all) as u32;
            first.tokens = (all - done) as u32;
            return;
        }
    }

    /// What is computed before a request of this turn, of `tokens` that wait; nothing when nothing is known of them.
    pub(super) fn ahead(&self, tokens: u64, turn: Timestamp) -> Option<Ahead> {
        let fixed = self.len.min(1);
        let before = fixed + self.all()[fixed..].partition_point(|one| one.turn <= turn);
        let us = |all: &[One]| all.iter().map(|one| u64::from(one.prefill_us)).sum::<u64>();
        let known = self.tokens();
        let more = tokens.saturating_sub(known);
        if known == 0 {
            return (more == 0).then(Ahead::default);
        }
        // What is known of nobody may come before.
        let unknown_us = u128::from(us(self.all())) * u128::from(more) / u128::from(known);
        let unknown_us = u64::try_from(unknown_us).unwrap_or(u64::MAX);
        let prefill_us = us(&self.all()[..before]).saturating_add(unknown_us);
        Some(Ahead { prefill_us, behind: (self.len - before) as u64 })
    }
}

impl Load {
    /// The load as just reported: nothing routed since.
    #[must_use]
    pub fn reported(queue_tokens: u64, running: u32, waiting: u32) -> Self {
        Self { queue_tokens, running, waiting, ..Self::default() }
    }

    /// The same, of an instance that is known by an earlier load: of what was sent there, what is left is remembered.
    #[must_use]
    pub fn after(self, before: &Load) -> Self {
        let mut sent = before.sent;
        sent.shrink_to(self.tokens_ahead());
        Self { sent, ..self }
    }

    /// Tokens that are prefilled before a request that comes now.
    #[must_use]
    pub fn tokens_ahead(&self) -> u64 {
        self.queue_tokens.saturating_add(self.routed_tokens)
    }

    /// Requests whose prefill starts before that of a request that comes now.
    #[must_use]
    pub fn requests_ahead(&self) -> u64 {
        u64::from(self.waiting) + u64::from(self.routed)
    }

    /// Counts a decision that was sent here.
    pub(super) fn record(&mut self, decision: &Decision) {
        self.routed_tokens = self.routed_tokens.saturating_add(u64::from(decision.recompute_tokens));
        self.routed = self.routed.saturating_add(1);
        self.sent.push(decision.turn, decision.recompute_tokens, decision.parts.prefill_us);
    }
}
