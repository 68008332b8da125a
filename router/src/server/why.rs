//! Explains where a request ran and why blocks were missing; records outcomes that instances
//! report.
//!
//! Not here: the reasons (`kv_core::schedule::missing`) and the records
//! (`crate::view::decision_log`).

use std::time::Duration;

use kv_core::id::{BlockHash, InstanceId, NodeId, Timestamp};
use kv_core::index::Index;
use kv_core::schedule::{
    Decision, DecodeObservation, FetchFailure, MissReason, MissingRun, PrefixCoverage, Rejection,
    RouteRecord, RouteRequest, explain_missing,
};
use kvfleet_proto::pb;

use super::{ServerState, millis};
use crate::view::decision_log::{
    AnswerStats, DecisionRecord, EndUpdate, OutcomeUpdate, Placement, RouteAnswer, SentRequest, ServedOutcome,
};
use crate::view::fleet::DecisionAddresses;
use crate::view::holders;

/// Limit on outcomes of one report, and on misses of one outcome.
const OUTCOMES_MAX: usize = 256;

/// Facts known at a decision.
pub(super) struct DecisionContext<'a> {
    pub(super) request: &'a RouteRequest,
    pub(super) hashes: &'a [BlockHash],
    /// Index of the control group, for live nodes.
    pub(super) control: &'a Index,
    /// Leading blocks that live nodes hold.
    pub(super) held_blocks: u32,
    /// Whether its blocks are pieces of text, which nodes never hold.
    pub(super) is_text: bool,
    /// Whether its hashes are of another identity than the nodes'.
    pub(super) is_foreign: bool,
    /// Whether its caller has a tenant certificate.
    pub(super) is_tenants: bool,
}

/// The TBT limit that the end of a request teaches about: the looser of its own and the router's. 0
/// for none, and for a tenant's limit without one of the router: it may be impossible to meet and
/// would cost all others capacity.
fn learned_limit_us(asked_us: u64, own_us: u64, is_tenant: bool) -> u64 {
    match asked_us {
        0 => 0,
        _ if is_tenant && own_us == 0 => 0,
        asked_us => asked_us.max(own_us),
    }
}

/// Records a decision and the time it was counted, if it was; counts missing blocks.
pub(super) fn record(
    shared: &ServerState,
    known: &DecisionContext<'_>,
    chosen: &Result<(Decision, DecisionAddresses), Rejection>,
    counted_at: Option<Timestamp>,
) {
    let counted_as =
        |(decision, _): &(Decision, DecisionAddresses)| Some(RouteRecord::of(decision, counted_at?));
    let counted = chosen.as_ref().ok().and_then(counted_as);
    let (answer, missing) = match chosen {
        Err(rejection) => (RouteAnswer::Rejected(rejection.to_string()), Vec::new()),
        Ok((decision, _)) => {
            let missing = if known.is_text { Vec::new() } else { missing_of(shared, known, decision) };
            shared.metrics.record_missing(&missing);
            let sent = SentRequest {
                placement: Placement::from_decision(decision),
                reasons: decision.reasons.clone(),
            };
            (RouteAnswer::Sent(sent), missing)
        }
    };
    let RouteRequest { request, tenant, category, blocks, tbt_max_us, .. } = *known.request;
    let (request, at) = (request.0, shared.clock.now());
    shared.decision_log.lock().insert(DecisionRecord {
        request,
        tenant,
        category,
        tbt_max_us,
        learned_limit_us: learned_limit_us(tbt_max_us, shared.tbt_max_us, known.is_tenants),
        at,
        blocks,
        answer,
        missing,
        outcome: None,
        has_first_token: false,
        answer_stats: AnswerStats::default(),
        is_aborted: false,
        moved_to: None,
        counted,
    });
}

fn missing_of(shared: &ServerState, known: &DecisionContext<'_>, decision: &Decision) -> Vec<MissingRun> {
    let fetches = shared.fleet.fetches(decision.instance);
    let found = PrefixCoverage {
        served_blocks: decision.resident_blocks + decision.fetch_blocks,
        held_blocks: known.held_blocks,
        blocks: known.hashes.len() as u32,
        can_fetch: fetches,
    };
    let there = found.held_blocks.max(found.served_blocks);
    if found.served_blocks >= found.blocks {
        return Vec::new();
    }
    if known.is_foreign {
        let (start_blocks, len_blocks) = (found.served_blocks, found.blocks - found.served_blocks);
        return vec![MissingRun { start_blocks, len_blocks, reason: MissReason::IdentityMismatch }];
    }
    let lost = holders::lost_blocks(&shared.groups, known.control, known.hashes, there);
    let group = holders::answering_group(&shared.groups, known.hashes);
    let left = |block: u32| group.published.last_drop(*known.hashes.get(block as usize)?);
    explain_missing(found, lost, left)
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
        record_end(
            shared,
            (told.request, instance),
            AnswerStats { output_tokens: told.output_tokens, tbt_us: told.tbt_us },
        );
        let update = shared.decision_log.lock().record_outcome(told.request, instance, outcome);
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
pub(crate) fn record_end(shared: &ServerState, (request, instance): (u64, InstanceId), said: AnswerStats) {
    let ended = shared.decision_log.lock().record_end(request, instance, said);
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
    shared.decision_log.lock().record_abort(request);
    stop_waiting(shared, request);
}

/// Removes a request from the prefetch windows.
pub(crate) fn stop_waiting(shared: &ServerState, request: u64) {
    if let Some(waits) = &shared.queued_requests {
        waits.lock().remove(request);
    }
}

/// Records the time of a first token, as the gateway saw it.
pub(crate) fn record_first_token(shared: &ServerState, request: u64, instance: InstanceId, after: Duration) {
    let timed = shared.decision_log.lock().record_first_token(request, instance);
    if let Some((predicted, parts)) = timed {
        stop_waiting(shared, request);
        let ttft_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX).max(1);
        shared.metrics.record_ttft_error(predicted.ttft_us(), ttft_us);
        shared.fleet.record_first_token(instance, &parts, ttft_us, shared.clock.now());
    }
}

/// Answers `kvfleet why` for a request.
pub(super) async fn why(shared: &ServerState, request: &pb::WhyRequest) -> pb::WhyReply {
    let known = shared.decision_log.lock().get(request.request).cloned();
    let Some(decided) = known else { return pb::WhyReply::default() };
    let age: Duration = shared.clock.now().since(decided.at);
    let reply = pb::WhyReply {
        known: true,
        tenant: decided.tenant.0,
        age_ms: millis(age),
        blocks: decided.blocks,
        missing: missing_to_pb(shared, &decided).await,
        ..pb::WhyReply::default()
    };
    let reply = match &decided.answer {
        RouteAnswer::Rejected(reason) => pb::WhyReply { rejected: reason.clone(), ..reply },
        RouteAnswer::Sent(sent) => pb::WhyReply {
            instance: sent.placement.instance.0,
            resident_blocks: sent.placement.resident_blocks,
            fetch_blocks: sent.placement.fetch_blocks,
            predicted: Some(super::route::prediction_to_pb(&sent.placement.predicted)),
            reasons: sent.reasons.iter().map(ToString::to_string).collect(),
            ..reply
        },
    };
    let AnswerStats { output_tokens, tbt_us } = decided.answer_stats;
    let answered_by = decided.moved_to.map(|moved| moved.decoding_instance().0);
    let reply = pb::WhyReply { output_tokens, tbt_us, answered_by, ..reply };
    match &decided.outcome {
        None => reply,
        Some(outcome) => pb::WhyReply {
            has_outcome: true,
            hit_blocks: outcome.hit_blocks,
            ttft_us: outcome.ttft_us,
            ..reply
        },
    }
}

/// Missing blocks; for an identity mismatch with the differing fields, if known.
async fn missing_to_pb(shared: &ServerState, decided: &DecisionRecord) -> Vec<pb::MissingBlocks> {
    let mut all: Vec<_> = decided.missing.iter().map(missing_block_to_pb).collect();
    for (missing, told) in decided.missing.iter().zip(&mut all) {
        let text = match missing.reason {
            MissReason::IdentityMismatch => hash_identity_text(shared).await,
            MissReason::NotFetched { node, failure: FetchFailure::IdentityDiffers } => {
                fetch_identity_text(shared, node, decided).await
            }
            _ => None,
        };
        if let Some(text) = text {
            told.text = text;
        }
    }
    all
}

async fn hash_identity_text(shared: &ServerState) -> Option<String> {
    let fields = shared.manifests.engine_differences_from_nodes().await?;
    Some(format!("hashed under another identity than the nodes': it differs in {fields}"))
}

async fn fetch_identity_text(shared: &ServerState, node: NodeId, decided: &DecisionRecord) -> Option<String> {
    let instance = decided.prefill_instance()?;
    let fields = shared.manifests.differences_from_instance(instance).await?;
    Some(format!("{node} serves another identity than {instance}: it differs in {fields}"))
}

fn missing_block_to_pb(missing: &MissingRun) -> pb::MissingBlocks {
    pb::MissingBlocks {
        start_blocks: missing.start_blocks,
        len_blocks: missing.len_blocks,
        reason: missing.reason.name().to_owned(),
        text: missing.reason.to_string(),
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
