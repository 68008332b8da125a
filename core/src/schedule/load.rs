//! The last known load of an instance, and what we sent there since it was reported.
//!
//! Not here: how load becomes waiting time (`cost.rs`). Load is soft state: it never enters the log, and
//! a router that starts has none until the first reports.

use super::decision::Decision;

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
    /// The last ones routed there, whether or not a report came since.
    pub(super) sent: Sent,
}

/// Requests kept by [`Sent`]; those before them are taken for as costly as these on average.
const SENT_MAX: usize = 16;

/// What the last requests that were sent to an instance have to compute, newest first: tokens, and the time that was predicted for them.
///
/// A report says how many tokens wait, and not of which prompts. Prompts are computed in the order in which they came, so the tokens that wait are those of
/// the requests sent last. A token of a long prompt costs several times one of a short prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sent {
    last: [(u32, u32); SENT_MAX],
}

impl Sent {
    fn push(&mut self, tokens: u32, prefill_us: u64) {
        if tokens > 0 {
            self.last.copy_within(..SENT_MAX - 1, 1);
            self.last[0] = (tokens, u32::try_from(prefill_us).unwrap_or(u32::MAX));
        }
    }

    /// Time for so many tokens of the requests sent last; nothing when none is known.
    pub(super) fn prefill_us(&self, tokens: u64) -> Option<u64> {
        let (mut left, mut us) = (tokens, 0);
        for (tokens, prefill_us) in self.last.map(|(tokens, us)| (u64::from(tokens), u64::from(us))) {
            if left == 0 || tokens == 0 {
                break;
            }
            // Of the oldest, a part is done; all of its tokens are taken for alike.
            let counted = left.min(tokens);
            us += prefill_us * counted / tokens;
            left -= counted;
        }
        if left == 0 || left == tokens {
            return (left < tokens).then_some(us);
        }
        let known = u128::from(tokens - left);
        let more = u128::from(us) * u128::from(left) / known;
        Some(us.saturating_add(u64::try_from(more).unwrap_or(u64::MAX)))
    }
}

impl Load {
    /// The load as just reported: nothing routed since.
    #[must_use]
    pub fn reported(queue_tokens: u64, running: u32, waiting: u32) -> Self {
        Self { queue_tokens, running, waiting, ..Self::default() }
    }

    /// The same, of an instance that is known by an earlier load: what was sent there is remembered.
    #[must_use]
    pub fn after(self, before: &Load) -> Self {
        Self { sent: before.sent, ..self }
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
}

/// Counts a decision that was sent to its instance into that instance's load. The second half of routing:
/// [`choose`](super::choose) changes nothing, so a decision that is not sent leaves no trace.
pub fn record(load: &mut Load, decision: &Decision) {
    load.routed_tokens = load.routed_tokens.saturating_add(u64::from(decision.recompute_tokens));
    load.routed = load.routed.saturating_add(1);
    load.sent.push(decision.recompute_tokens, decision.predicted.prefill_us);
}
