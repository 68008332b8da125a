//! Outcomes of requests that an instance served, kept until every router has them or the buffer is
//! full.
//!
//! Not here: sending them (`report.rs`), and their use by routers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::RequestId;
use kvfleet_proto::pb;

use crate::fetch::SourceMiss;

/// Outcomes kept for unreachable routers, enough for some seconds. A router that is away longer
/// misses the oldest.
const OUTCOMES_MAX: usize = 1_024;

/// Outcomes in one report.
const REPORT_OUTCOMES_MAX: usize = 256;

/// Misses reported per request.
const MISSES_MAX: usize = 64;

/// Outcome of a request.
#[derive(Clone, Debug)]
pub struct RequestOutcome {
    /// The request's number in its decision.
    pub request: RequestId,
    /// Blocks that were fetched.
    pub hit_blocks: u32,
    /// Time to first token, from when the request was sent; `None` if not measured.
    pub ttft: Option<Duration>,
    /// Sources that delivered less than planned.
    pub misses: Vec<SourceMiss>,
    /// Tokens generated; 0 until the request ends. Earlier results may be reported in a separate
    /// outcome.
    pub output_tokens: u32,
    /// Mean time between output tokens; `None` if not measured.
    pub tbt: Option<Duration>,
}

impl RequestOutcome {
    /// An outcome for the end of a request; the other results were reported before.
    #[must_use]
    pub fn ended(request: RequestId, output_tokens: u32, tbt: Option<Duration>) -> RequestOutcome {
        RequestOutcome { request, hit_blocks: 0, ttft: None, misses: Vec::new(), output_tokens, tbt }
    }
}

fn micros(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

#[derive(Debug, Default)]
struct OutcomeBuffer {
    /// Number of the oldest kept outcome.
    first: u64,
    list: VecDeque<pb::Outcome>,
}

/// The outcomes of one client. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    buffer: Arc<Mutex<OutcomeBuffer>>,
}

impl Outcomes {
    /// A panic leaves no partial update, so a poisoned lock is safe to use.
    fn lock(&self) -> MutexGuard<'_, OutcomeBuffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, outcome: &RequestOutcome) {
        let miss = |miss: &SourceMiss| pb::SourceMiss {
            node: miss.node.0,
            start_blocks: miss.first_missing_block,
            reason: miss.reason as u32,
        };
        let outcome_pb = pb::Outcome {
            request: outcome.request.0,
            hit_blocks: outcome.hit_blocks,
            ttft_us: micros(outcome.ttft),
            misses: outcome.misses.iter().take(MISSES_MAX).map(miss).collect(),
            tbt_us: micros(outcome.tbt),
            output_tokens: outcome.output_tokens,
        };
        let mut buffer = self.lock();
        buffer.list.push_back(outcome_pb);
        if buffer.list.len() > OUTCOMES_MAX {
            buffer.list.pop_front();
            buffer.first += 1;
        }
    }

    /// The outcomes from this number on, as many as fit a report, and the number of the next one.
    pub(crate) fn batch_from(&self, number: u64) -> (Vec<pb::Outcome>, u64) {
        let buffer = self.lock();
        let start = number.max(buffer.first);
        let skipped = usize::try_from(start - buffer.first).unwrap_or(usize::MAX);
        let batch: Vec<_> = buffer.list.iter().skip(skipped).take(REPORT_OUTCOMES_MAX).cloned().collect();
        let next = start + batch.len() as u64;
        (batch, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(request: u64) -> RequestOutcome {
        RequestOutcome { hit_blocks: 1, ..RequestOutcome::ended(RequestId(request), 0, None) }
    }

    #[test]
    fn outcomes_are_handed_out_in_batches() {
        let outcomes = Outcomes::default();
        (0..300).for_each(|request| outcomes.add(&outcome(request)));
        let requests = |told: &[pb::Outcome]| told.iter().map(|one| one.request).collect::<Vec<_>>();
        let (told, next) = outcomes.batch_from(0);
        assert_eq!((requests(&told), next), ((0..256).collect(), 256));
        let (told, next) = outcomes.batch_from(next);
        assert_eq!((requests(&told), next), ((256..300).collect(), 300));
        assert_eq!(outcomes.batch_from(300), (vec![], 300));
    }

    #[test]
    fn absent_router_misses_oldest_outcomes() {
        let outcomes = Outcomes::default();
        (0..2_000).for_each(|request| outcomes.add(&outcome(request)));
        let (told, next) = outcomes.batch_from(3);
        assert_eq!((told[0].request, told.len(), next), (976, 256, 1_232));
    }
}
