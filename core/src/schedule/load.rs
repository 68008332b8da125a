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
}

impl Load {
    /// The load as just reported: nothing routed since.
    #[must_use]
    pub fn reported(queue_tokens: u64, running: u32, waiting: u32) -> Self {
        Self { queue_tokens, running, waiting, routed_tokens: 0, routed: 0 }
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
}
