//! What became of requests that an instance served, kept until every router has heard of it, or as many as a bound says.
//!
//! Not here: the telling (`report.rs`), and what routers make of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::RequestId;
use kvfleet_proto::pb;

use crate::fetch::SourceMiss;

/// Outcomes kept for routers that are away: those of some seconds. Who is away for longer misses the oldest, and knows less.
const KEPT_MAX: usize = 1_024;

/// Outcomes in one report.
const TOLD_MAX: usize = 256;

/// Misses that are told of one request.
const MISSES_MAX: usize = 64;

/// What became of a request.
#[derive(Clone, Debug)]
pub struct RequestOutcome {
    /// The request, as its decision has it.
    pub request: RequestId,
    /// Blocks that came, of those that were to be fetched.
    pub hit_blocks: u32,
    /// Until its first token, from when it was sent; nothing where that was not measured.
    pub ttft: Option<Duration>,
    /// Sources that fell short.
    pub misses: Vec<SourceMiss>,
    /// Tokens that it said; 0 until it has ended. What came before may be told in an outcome of its own.
    pub output_tokens: u32,
    /// Mean time between two of these; nothing where that was not measured.
    pub tbt: Option<Duration>,
}

impl RequestOutcome {
    /// A request ended, of which all else was told before.
    #[must_use]
    pub fn ended(request: RequestId, output_tokens: u32, tbt: Option<Duration>) -> RequestOutcome {
        RequestOutcome { request, hit_blocks: 0, ttft: None, misses: Vec::new(), output_tokens, tbt }
    }
}

fn micros(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

#[derive(Debug, Default)]
struct Kept {
    /// Number of the first that is kept.
    first: u64,
    list: VecDeque<pb::Outcome>,
}

/// The outcomes of one client. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    kept: Arc<Mutex<Kept>>,
}

impl Outcomes {
    /// Nothing is left half done by whoever panicked.
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, outcome: &RequestOutcome) {
        let miss = |miss: &SourceMiss| pb::SourceMiss {
            node: miss.node.0,
            start_blocks: miss.first_missing_block,
            reason: miss.reason as u32,
        };
        let told = pb::Outcome {
            request: outcome.request.0,
            hit_blocks: outcome.hit_blocks,
            ttft_us: micros(outcome.ttft),
            misses: outcome.misses.iter().take(MISSES_MAX).map(miss).collect(),
            tbt_us: micros(outcome.tbt),
            output_tokens: outcome.output_tokens,
        };
        let mut kept = self.kept();
        kept.list.push_back(told);
        if kept.list.len() > KEPT_MAX {
            kept.list.pop_front();
            kept.first += 1;
        }
    }

    /// Those from this number on, as many as go into a report, and the number behind them.
    pub(crate) fn from(&self, number: u64) -> (Vec<pb::Outcome>, u64) {
        let kept = self.kept();
        let from = number.max(kept.first);
        let skipped = usize::try_from(from - kept.first).unwrap_or(usize::MAX);
        let told: Vec<_> = kept.list.iter().skip(skipped).take(TOLD_MAX).cloned().collect();
        let next = from + told.len() as u64;
        (told, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(request: u64) -> RequestOutcome {
        RequestOutcome { hit_blocks: 1, ..RequestOutcome::ended(RequestId(request), 0, None) }
    }

    #[test]
    fn each_router_hears_each_outcome_in_turn() {
        let outcomes = Outcomes::default();
        (0..300).for_each(|request| outcomes.add(&outcome(request)));
        let requests = |told: &[pb::Outcome]| told.iter().map(|one| one.request).collect::<Vec<_>>();
        let (told, next) = outcomes.from(0);
        assert_eq!((requests(&told), next), ((0..256).collect(), 256));
        let (told, next) = outcomes.from(next);
        assert_eq!((requests(&told), next), ((256..300).collect(), 300));
        assert_eq!(outcomes.from(300), (vec![], 300));
    }

    #[test]
    fn a_router_that_was_away_misses_the_oldest() {
        let outcomes = Outcomes::default();
        (0..2_000).for_each(|request| outcomes.add(&outcome(request)));
        let (told, next) = outcomes.from(3);
        assert_eq!((told[0].request, told.len(), next), (976, 256, 1_232));
    }
}
