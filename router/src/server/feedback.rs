//! Outcomes of requests, from which predictions are learned: first tokens, times between tokens,
//! output lengths and failed fetches, as instances and the gateway report them.
//!
//! Not here: the learning itself (`kv_core::schedule`), the records (`crate::view::decision_log`),
//! and explanations of a request (`why.rs`).

use std::time::Duration;

use kv_core::id::{InstanceId, NodeId};
use kv_core::schedule::{DecodeObservation, FetchFailure};
use kvfleet_proto::pb;

use super::ServerState;
use crate::view::decision_log::{AnswerStats, EndUpdate, OutcomeUpdate, ServedOutcome};

/// Limit on outcomes of one report, and on misses of one outcome.
const OUTCOMES_MAX: usize = 256;

/// The TBT limit that the end of a request teaches about: the looser of its own and the router's. 0
/// for none, and for a tenant's limit without one of the router: it may be impossible to meet and
/// would cost all others capacity.
pub(super) fn learned_limit_us(asked_us: u64, own_us: u64, is_tenant: bool) -> u64 {
    match asked_us {
        0 => 0,
        _ if is_tenant && own_us == 0 => 0,
        asked_us => asked_us.max(own_us),
    }
}

/// Records the outcomes that an instance reports.
pub(super) fn record_outcomes(shared: &ServerState, instance: InstanceId, outcomes: &[pb::Outcome]) {
    for told in outcomes.iter().take(OUTCOMES_MAX) {
        let misses = told.misses.iter().take(OUTCOMES_MAX).filter_map(|miss| {
            Some((NodeId(miss.node), miss.start_blocks, FetchFailure::from_number(miss.reason)?))
        });
        let outcome =
            ServedOutcome { hit_blocks: told.hit_blocks, ttft_us: told.ttft_us, misses: misses.collect() };
        let ttft_us = outcome.ttft_us;
        let stats = AnswerStats { output_tokens: told.output_tokens, tbt_us: told.tbt_us };
        record_end(shared, told.request, instance, stats);
        let update = shared.history.decisions().record_outcome(told.request, instance, outcome);
        if update.is_some() {
            stop_waiting(shared, told.request);
        }
        if let Some(OutcomeUpdate { predicted, added }) = update {
            shared.metrics.record_missing(&added);
            if let Some((predicted, parts)) = predicted.filter(|_| ttft_us > 0) {
                shared.metrics.record_ttft_error(predicted.ttft_us(), ttft_us);
                shared.fleet.record_first_token(instance, &parts, ttft_us, shared.clock.now());
            }
        }
    }
}

/// Records output length and time between tokens, from the instance or from the gateway.
pub(crate) fn record_end(shared: &ServerState, request: u64, instance: InstanceId, said: AnswerStats) {
    let ended = shared.history.decisions().record_end(request, instance, said);
    if let Some(EndUpdate {
        category,
        predicted,
        uncorrected: parts,
        learned_limit_us: taught_us,
        tokens,
        new_stats: news,
    }) = ended
    {
        if news.tbt_us > 0 {
            shared.metrics.record_tbt_error(predicted.tbt_us, news.tbt_us);
        }
        let paced = DecodeObservation {
            uncorrected: &parts,
            predicted_us: predicted.tbt_us,
            tokens,
            tbt_us: news.tbt_us,
            limit_us: taught_us,
        };
        shared.fleet.record_end(category, news.output_tokens, paced, shared.clock.now());
    }
}

/// Records a request that ended before its answer did; its output length is not representative.
pub(crate) fn record_abort(shared: &ServerState, request: u64) {
    shared.history.decisions().record_abort(request);
    stop_waiting(shared, request);
}

/// Removes a request from the prefetch windows.
pub(crate) fn stop_waiting(shared: &ServerState, request: u64) {
    shared.history.stop_waiting(request);
}

/// Records the time of a first token, as the gateway saw it.
pub(crate) fn record_first_token(shared: &ServerState, request: u64, instance: InstanceId, after: Duration) {
    let timed = shared.history.decisions().record_first_token(request, instance);
    if let Some((predicted, parts)) = timed {
        stop_waiting(shared, request);
        let ttft_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX).max(1);
        shared.metrics.record_ttft_error(predicted.ttft_us(), ttft_us);
        shared.fleet.record_first_token(instance, &parts, ttft_us, shared.clock.now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenants_own_limit_is_not_learned_from() {
        for is_tenants in [false, true] {
            assert_eq!(learned_limit_us(0, 0, is_tenants), 0);
            assert_eq!(learned_limit_us(8_000, 8_000, is_tenants), 8_000, "the router's own");
            assert_eq!(learned_limit_us(5_000, 8_000, is_tenants), 8_000, "tighter than it");
        }
        assert_eq!(
            (learned_limit_us(5_000, 0, false), learned_limit_us(5_000, 0, true)),
            (5_000, 0),
            "the caller's own"
        );
    }
}
