//! Records decisions; explains where a request ran and why blocks were missing.
//!
//! Not here: the reasons (`kv_core::schedule::missing`), the records (`crate::view::decision_log`),
//! and outcomes of requests (`feedback.rs`).

use std::time::Duration;

use kv_core::id::{BlockHash, NodeId, Timestamp};
use kv_core::index::Index;
use kv_core::schedule::{
    Decision, FetchFailure, MissReason, MissingRun, PrefixCoverage, Rejection, RouteRecord, RouteRequest,
    explain_missing,
};
use kvfleet_net::tls::Role;
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use tonic::Status;

use super::feedback::learned_limit_us;
use super::{ServerState, millis};
use crate::view::decision_log::{AnswerStats, DecisionRecord, Placement, RouteAnswer, SentRequest};
use crate::view::fleet::DecisionAddresses;
use crate::view::holders;

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
    /// Whether its caller is a frontend.
    pub(super) is_frontends: bool,
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
    shared.history.decisions().insert(DecisionRecord {
        request,
        tenant,
        category,
        tbt_max_us,
        learned_limit_us: learned_limit_us(tbt_max_us, shared.limits.own_tbt_max_us(), known.is_tenants),
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
        is_frontends: known.is_frontends,
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

/// Answers `kvfleet why` for a request. A frontend may ask about requests of frontends only.
pub(super) async fn why(
    shared: &ServerState,
    caller: &Caller,
    request: &pb::WhyRequest,
) -> Result<pb::WhyReply, Status> {
    let known = shared.history.decisions().get(request.request).cloned();
    let Some(decided) = known else { return Ok(pb::WhyReply::default()) };
    if *caller.role() == Role::Frontend && !decided.is_frontends {
        return Err(Status::permission_denied(format!(
            "request {} was not routed by a frontend, and this certificate is a frontend's: use one with the name \
             {:?}",
            request.request,
            Role::Admin.name()
        )));
    }
    Ok(explain(shared, &decided).await)
}

async fn explain(shared: &ServerState, decided: &DecisionRecord) -> pb::WhyReply {
    let age: Duration = shared.clock.now().since(decided.at);
    let reply = pb::WhyReply {
        known: true,
        tenant: decided.tenant.0,
        age_ms: millis(age),
        blocks: decided.blocks,
        missing: missing_to_pb(shared, decided).await,
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
