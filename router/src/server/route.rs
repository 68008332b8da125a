//! Route: look up, choose, count, answer. Report: take an instance's load.
//!
//! Not here: the choice (`kv_core::schedule`) and load accounting (`crate::view::fleet`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{
    BlockHash, Epoch, IdentityDigest, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp,
};
use kv_core::index::Index;
use kv_core::schedule::{
    self, Candidate, Decision, DecodeReport, Domain, Fleet, Handover, InFlightPrefix, InstanceFilter,
    InstanceRole, LinkKey, LinkPath, LinkSample, Load, Placement, Prediction, PrefixLocations, RejectReason,
    Rejection, ResidentPrefix, RouteRequest, Source, UnfitReason,
};
use kvfleet_net::tls::Role;
use kvfleet_net::tls::callers::Caller;
use kvfleet_net::trace_context;
use kvfleet_proto::{convert, pb};
use smallvec::SmallVec;
use tonic::Status;
use tracing::Instrument;

use super::lookup::{data_address, freshness, holder_to_pb, ready, resident};
use super::prompt_tokens::hash_tokens;
use super::why::{self, DecisionContext};
use super::{ServerState, check, feedback, fresh, millis, moved_requests};
use crate::metrics::RouteOutcome;
use crate::view::fleet::{Claim, DecisionAddresses, INSTANCES_MAX, LoadReport, Receipt};
use crate::view::holders;
use crate::view::links::{LinkMeasurement, SAMPLES_MAX};
use crate::view::residency::ReporterStatus;

/// Hints about a request from a caller inside the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteHints {
    /// Instances that cannot run it, with the reason.
    pub unfit: Vec<(InstanceId, UnfitReason)>,
    /// Whether it was routed before under the same number and does not run there: its counted load
    /// is removed.
    pub is_retry: bool,
    /// Identities that its prompt may be hashed under in this process, so that the router can
    /// detect that none is the nodes'. Empty if unknown.
    pub hashed_under: Arc<[IdentityDigest]>,
}

/// Answers a route call, in a span that continues the caller's trace.
pub(crate) async fn route(
    shared: &ServerState,
    caller: &Caller,
    request: pb::RouteRequest,
    hints: RouteHints,
) -> Result<pb::RouteReply, Status> {
    caller.require_tenant(TenantId(request.tenant))?;
    let request = hash_tokens(shared.tenants.as_ref(), caller, request).await?;
    let span = tracing::info_span!("route", request = request.request, tenant = request.tenant);
    trace_context::set_parent(&span, &request.traceparent);
    decide(shared, caller, request, hints).instrument(span).await
}

async fn decide(
    shared: &ServerState,
    caller: &Caller,
    request: pb::RouteRequest,
    RouteHints { mut unfit, is_retry: again, hashed_under }: RouteHints,
) -> Result<pb::RouteReply, Status> {
    let hashes = check::hashes("hashes", &request.hashes)?;
    let (ttft_max_us, tbt_max_us) = (ttft_max_us(shared, &request), tbt_max_us(shared, &request));
    let asked = RouteRequest { ttft_max_us, tbt_max_us, ..parse_request(&request, &hashes)? };
    check_candidates(caller, &request)?;
    fresh::check_allowed(shared, caller, request.fresh)?;
    ready(shared, &hashes, &request.after, request.fresh).await?;
    if let Some((ours, theirs)) = identity_mismatch(shared, &request.identity)? {
        // Boxed, since it is rare and would enlarge every call's future.
        return Err(Box::pin(other_identity(shared, ours, theirs)).await);
    }
    let control = shared.control().published.read();
    let (matched, applied) = holders::longest_prefix(&shared.groups, &control.index, &hashes);
    let now = shared.clock.now();
    if again {
        moved_requests::uncount(shared, &asked, &hashes, request.text, now);
    }
    let resident = resident_prefixes(shared, &asked, &hashes, request.text, now);
    // For a request that runs there already, blocks in flight may be its own.
    let in_flight = match request.pinned_instance {
        true => SmallVec::new(),
        false => in_flight_prefixes(shared, &asked, request.text, &hashes, now),
    };
    let held = PrefixLocations { matched: &matched, resident: &resident, in_flight: &in_flight };
    let (candidates, excluded) = eligible(&request);
    unfit.sort_unstable_by_key(|(instance, _)| *instance);
    let (candidates, is_pinned) = (candidates.as_deref(), request.pinned_instance);
    let eligible = InstanceFilter { candidates, excluded: &excluded, unfit: &unfit, is_pinned };
    let choose = |fleet: &Fleet, standing| {
        let asked = RouteRequest { queue_priority: standing, ..asked };
        schedule::choose_filtered(&asked, held, eligible, fleet, now)
    };
    let chosen = match request.pinned_instance {
        true => shared.fleet.decide_running(choose),
        false => shared.fleet.decide(claim(caller, &request, ttft_max_us), now, choose),
    };
    let held_blocks = holders::end_blocks(&matched);
    if let Ok((decision, _)) = &chosen
        && !request.pinned_instance
    {
        record_sent(shared, &asked, &hashes, held_blocks, request.text, decision, now);
    }
    let (control_index, is_text) = (&control.index, request.text);
    let is_tenant = caller.share_tenant().is_some();
    let known = DecisionContext {
        request: &asked,
        hashes: &hashes,
        control: control_index,
        held_blocks,
        is_text,
        is_foreign: !is_text && hashes_are_foreign(shared, control_index, &hashes, &hashed_under),
        is_tenants: is_tenant,
        is_frontends: *caller.role() == Role::Frontend,
    };
    // The sender's decision log has this request and its alternatives.
    if !(request.pinned_instance && request.prior_instance) {
        // A running request was counted when it was sent; a tenant's may be counted only in part.
        let counted_at = (!request.pinned_instance && !is_tenant).then_some(now);
        why::record(shared, &known, &chosen, counted_at);
    }
    let answer = answer(shared, control_index, chosen, is_tenant, now)?;
    drop(control);
    Ok(pb::RouteReply { answer: Some(answer), freshness: Some(freshness(shared, &hashes, applied)) })
}

/// The priority deadline as Unix time, for comparison by engines. It is before now for a request
/// ahead of others.
fn priority_deadline_ms(now_ms: u64, deadline: Timestamp, now: Timestamp) -> u64 {
    now_ms.saturating_add(millis(deadline.since(now))).saturating_sub(millis(now.since(deadline)))
}

/// The protocol form of the choice.
fn answer(
    shared: &ServerState,
    index: &Index,
    chosen: Result<(Decision, DecisionAddresses), Rejection>,
    is_tenants: bool,
    now: Timestamp,
) -> Result<pb::route_reply::Answer, Status> {
    match chosen {
        Ok((decision, addresses)) => {
            let deadline_ms = priority_deadline_ms(shared.unix.now_ms(), decision.priority_deadline, now);
            let mut decision = decision_to_pb(index, &decision, addresses, deadline_ms);
            if is_tenants {
                hide_other_candidates(&mut decision);
            }
            Ok(pb::route_reply::Answer::Decision(decision))
        }
        Err(Rejection { reason: RejectReason::NoInstance, .. }) if shared.lifecycle.awaits_reports(now) => {
            Err(Status::unavailable(
                "no instance has reported to this router since it came back; ask another one",
            ))
        }
        Err(rejection) => Ok(pb::route_reply::Answer::Rejected(rejection_to_pb(&rejection))),
    }
}

/// Records a sent request for later decisions: expected prefixes, queued work, and remote reads.
fn record_sent(
    shared: &ServerState,
    asked: &RouteRequest,
    hashes: &[BlockHash],
    held_blocks: u32,
    is_text: bool,
    decision: &Decision,
    now: Timestamp,
) {
    record_expected(shared, asked, hashes, is_text, decision, now);
    if is_text {
        return;
    }
    let own = shared.fleet.with_fleet(|fleet| fleet.own_node(decision.instance));
    let from_own = decision.sources.iter().filter(|source| Some(source.node) == own);
    let own_blocks = from_own.map(|source| source.len_blocks).sum::<u32>();
    shared.metrics.record_planned_fetches(own_blocks, decision.fetch_blocks.saturating_sub(own_blocks));
    shared.history.record_remote_reads(asked, hashes, decision, held_blocks);
}

/// Records the prefixes expected on the instance, and the queued request.
pub(super) fn record_expected(
    shared: &ServerState,
    asked: &RouteRequest,
    hashes: &[BlockHash],
    is_text: bool,
    decision: &Decision,
    now: Timestamp,
) {
    if is_text {
        // Nodes hold no text blocks.
        shared.history.record_in_flight(asked, hashes, decision, now);
        let capacity_tokens = kv_capacity_tokens(shared, decision.instance);
        return shared.history.record_inferred(asked, hashes, decision, capacity_tokens, now);
    }
    if reports_residency(shared, decision.instance, now) {
        shared.history.record_in_flight(asked, hashes, decision, now);
    }
    shared.history.record_queued(asked, hashes, decision, now);
}

/// Leading blocks of a prompt that instances have in GPU memory: as reported, or inferred if the
/// prompt was read as text.
pub(super) fn resident_prefixes(
    shared: &ServerState,
    asked: &RouteRequest,
    hashes: &[BlockHash],
    is_text: bool,
    now: Timestamp,
) -> Vec<ResidentPrefix> {
    match is_text {
        true => inferred_prefixes(shared, asked, hashes, now),
        false => resident(shared, hashes).iter().map(resident_prefix).collect(),
    }
}

/// Whether an instance reports its GPU memory. Otherwise it is unknown whether it keeps prefixes at
/// all.
fn reports_residency(shared: &ServerState, instance: InstanceId, now: Timestamp) -> bool {
    shared.residency.read().status(instance, now).is_some()
}

/// Instances that are computing leading blocks of the request for other requests.
fn in_flight_prefixes(
    shared: &ServerState,
    asked: &RouteRequest,
    is_text: bool,
    hashes: &[BlockHash],
    now: Timestamp,
) -> SmallVec<[InFlightPrefix; 4]> {
    let mut all = shared.history.in_flight(asked, hashes, now);
    all.retain(|in_flight| is_text || reports_residency(shared, in_flight.instance, now));
    all
}

/// Inferred resident prefixes of a prompt that was read as text.
fn inferred_prefixes(
    shared: &ServerState,
    asked: &RouteRequest,
    hashes: &[BlockHash],
    now: Timestamp,
) -> Vec<ResidentPrefix> {
    shared.history.inferred(asked, hashes, |instance| kv_capacity_tokens(shared, instance), now)
}

/// KV capacity of an instance in tokens; 0 if unknown.
fn kv_capacity_tokens(shared: &ServerState, instance: InstanceId) -> u64 {
    shared
        .fleet
        .with_fleet(|fleet| fleet.instance(instance).map_or(0, |instance| instance.load.kv_tokens_max()))
}

/// Tenant, priority and limit of a request. A caller with a tenant certificate cannot raise its
/// priority above 0.
fn claim(caller: &Caller, request: &pb::RouteRequest, ttft_max_us: u64) -> Claim {
    let share = caller.share_tenant();
    let priority = if share.is_some() { request.priority.min(0) } else { request.priority };
    let ttft_max_us = (ttft_max_us > 0).then_some(ttft_max_us);
    // Other tenant names on one certificate give no further shares.
    Claim { share, tenant: share.unwrap_or(TenantId(request.tenant)), priority, ttft_max_us }
}

/// TTFT limit of a request: the tighter of its own and the router's.
fn ttft_max_us(shared: &ServerState, request: &pb::RouteRequest) -> u64 {
    shared.limits.ttft_max_ms(request.ttft_max_ms).saturating_mul(1_000)
}

/// The same for the time between tokens.
fn tbt_max_us(shared: &ServerState, request: &pb::RouteRequest) -> u64 {
    shared.limits.tbt_max_us(request.tbt_max_us)
}

/// Instances that a tenant's request may exclude, after failures.
const TENANT_EXCLUDED_MAX: usize = 8;

/// By naming instances one by one a caller could learn their load, which tenants must not.
fn check_candidates(caller: &Caller, request: &pb::RouteRequest) -> Result<(), Status> {
    if caller.share_tenant().is_none() {
        return Ok(());
    }
    if request.candidates.is_some() {
        return Err(Status::permission_denied(
            "`among` is for the cluster's own processes: leave it out, or use a certificate of an instance or a \
             frontend",
        ));
    }
    check::at_most("number of instances in `without`", request.excluded.len(), TENANT_EXCLUDED_MAX)
}

/// Candidate instances and excluded instances, both sorted.
fn eligible(request: &pb::RouteRequest) -> (Option<Vec<InstanceId>>, Vec<InstanceId>) {
    let all = |numbers: &[u32]| {
        let mut all: Vec<_> = numbers.iter().copied().map(InstanceId).collect();
        all.sort_unstable();
        all
    };
    (request.candidates.as_ref().map(|among| all(&among.instances)), all(&request.excluded))
}

/// Uncertain blocks count: most are still there, and the others are recomputed.
fn resident_prefix(status: &ReporterStatus) -> ResidentPrefix {
    ResidentPrefix { instance: status.instance, blocks: u32::try_from(status.blocks).unwrap_or(u32::MAX) }
}

/// How a call ended, for the metrics.
pub(crate) fn outcome(answer: &Result<pb::RouteReply, Status>) -> RouteOutcome {
    match answer.as_ref().map(|reply| &reply.answer) {
        Ok(Some(pb::route_reply::Answer::Decision(_))) => RouteOutcome::Chosen,
        Ok(_) => RouteOutcome::Rejected,
        Err(_) => RouteOutcome::Invalid,
    }
}

pub(super) fn parse_request(
    request: &pb::RouteRequest,
    hashes: &[BlockHash],
) -> Result<RouteRequest, Status> {
    if !(1..=check::BLOCK_TOKENS_MAX).contains(&request.block_tokens) {
        let (got, limit) = (request.block_tokens, check::BLOCK_TOKENS_MAX);
        return Err(check::invalid(format!("block_tokens is {got}, expected 1 to {limit}")));
    }
    check::input_tokens(request.input_tokens)?;
    // The request may wait from here on, with all its contents.
    check::at_most("length of traceparent", request.traceparent.len(), check::TEXT_BYTES_MAX)?;
    if !request.identity.is_empty() {
        convert::identity_field("identity", &request.identity).map_err(check::invalid)?;
    }
    let among = request.candidates.as_ref().map_or(0, |among| among.instances.len());
    if request.pinned_instance && among != 1 {
        return Err(check::invalid(format!(
            "`pinned_instance` with {among} instances in `among`: name the one where the request runs"
        )));
    }
    check::at_most("number of instances in `among`", among, INSTANCES_MAX)?;
    check::at_most("number of instances in `without`", request.excluded.len(), INSTANCES_MAX)?;
    let blocks = u32::try_from(hashes.len()).map_err(check::invalid)?;
    Ok(RouteRequest {
        request: RequestId(request.request),
        tenant: TenantId(request.tenant),
        category: convert::category_from_pb(request.category.as_ref()),
        blocks,
        first_block: hashes.first().copied(),
        block_tokens: request.block_tokens,
        input_tokens: request.input_tokens,
        output_tokens: request.output_tokens,
        ttft_max_us: 0,
        tbt_max_us: request.tbt_max_us,
        queue_priority: schedule::QueuePriority::default(),
        is_untokenized: request.text,
    })
}

/// The cluster's identity and the request's, if they differ. Weights are not compared here: nodes
/// check them on fetch and save, so that frontends need not follow a change.
fn identity_mismatch(
    shared: &ServerState,
    identity: &[u8],
) -> Result<Option<(IdentityDigest, IdentityDigest)>, Status> {
    if identity.is_empty() {
        return Ok(None);
    }
    let theirs = convert::identity_field("identity", identity).map_err(check::invalid)?;
    let identity = shared.control().published.read().index.identity();
    let other = identity.filter(|ours| theirs.generation_relative_to(*ours).is_none());
    Ok(other.map(|ours| (ours, theirs)))
}

/// Whether these hashes are of another identity than the nodes'.
fn hashes_are_foreign(
    shared: &ServerState,
    index: &Index,
    hashes: &[BlockHash],
    hashed_under: &[IdentityDigest],
) -> bool {
    // Unknown without hashes, for example for a prompt with an unknown salt.
    let nodes = index.identity().filter(|_| !hashes.is_empty());
    nodes.is_some_and(|nodes| shared.manifests.are_foreign_hashes(hashed_under, nodes))
}

/// A request of another identity can have no hit; an error is better than silent misses.
async fn other_identity(shared: &ServerState, ours: IdentityDigest, theirs: IdentityDigest) -> Status {
    let fields = shared.manifests.differences_from_nodes(theirs).await.map(|fields| format!(" in {fields}"));
    check::invalid(format!(
        "identity {theirs} differs from the cluster's {ours}{}: use the model manifest the nodes were started with",
        fields.unwrap_or_default()
    ))
}

fn decision_to_pb(
    index: &Index,
    decision: &Decision,
    addresses: DecisionAddresses,
    priority_deadline_ms: u64,
) -> pb::Decision {
    pb::Decision {
        instance: decision.instance.0,
        instance_address: addresses.instance,
        sources: decision.sources.iter().map(|source| source_to_pb(index, source)).collect(),
        fetch_blocks: decision.fetch_blocks,
        recompute_blocks: decision.recompute_blocks,
        save_to: decision.save_to.as_ref().map(|holder| holder_to_pb(index, holder)),
        predicted: Some(prediction_to_pb(&decision.predicted)),
        candidates: decision.candidates.iter().map(candidate_to_pb).collect(),
        reasons: decision.reasons.iter().map(ToString::to_string).collect(),
        resident_blocks: decision.resident_blocks,
        priority_deadline_ms,
        handover: decision
            .handover
            .map(|handover| pb::Handover { address: addresses.decode_instance, ..handover_to_pb(&handover) }),
    }
}

/// Removes the other candidates, so that a tenant does not learn their load.
fn hide_other_candidates(decision: &mut pb::Decision) {
    let chosen = decision.instance;
    decision.candidates.retain(|candidate| candidate.instance == chosen);
}

fn source_to_pb(index: &Index, source: &Source) -> pb::Source {
    pb::Source {
        node: source.node.0,
        epoch: source.epoch.0,
        address: data_address(index, source.node),
        start_blocks: source.start_blocks,
        len_blocks: source.len_blocks,
        tier: source.tier as u32,
    }
}

pub(super) fn prediction_to_pb(predicted: &Prediction) -> pb::Prediction {
    let Prediction {
        queue_us,
        transfer_us,
        prefill_us,
        overtaking_us: passed_us,
        kv_wait_us: room_us,
        tbt_us,
        prompt: _,
    } = *predicted;
    let queue_us = queue_us.saturating_add(passed_us).saturating_add(room_us);
    pb::Prediction { queue_us, transfer_us, prefill_us, kv_wait_us: room_us, tbt_us }
}

fn handover_to_pb(handover: &Handover) -> pb::Handover {
    pb::Handover { instance: handover.instance.0, address: String::new(), us: handover.handover_us }
}

fn candidate_to_pb(candidate: &Candidate) -> pb::Candidate {
    pb::Candidate {
        instance: candidate.instance.0,
        predicted: Some(prediction_to_pb(&candidate.predicted)),
        overlap_blocks: candidate.overlap_blocks,
        resident_blocks: candidate.resident_blocks,
        handover: candidate.handover.as_ref().map(handover_to_pb),
        filtered: candidate.filtered.map(|why| why.to_string()).unwrap_or_default(),
    }
}

fn rejection_to_pb(rejection: &Rejection) -> pb::Rejected {
    use RejectReason::{AllStale, NoInstance, NoPair, NoneEligible};
    pb::Rejected {
        reason: rejection.reason.to_string(),
        retry_after_ms: millis(rejection.retry_after),
        no_instance: matches!(
            rejection.reason,
            NoInstance | AllStale { .. } | NoneEligible { .. } | NoPair { .. }
        ),
    }
}

/// Takes a load report.
pub(crate) fn report(shared: &ServerState, request: pb::ReportRequest) -> Result<pb::ReportReply, Status> {
    check::at_most("length of address", request.address.len(), check::TEXT_BYTES_MAX)?;
    if request.address.is_empty() && !request.leaving {
        return Err(check::invalid("address is empty: say where the instance takes requests, host:port"));
    }
    let part = part(&request)?;
    // Used for explanations only: an unreadable manifest does not lose the report.
    let manifest = request.manifest.and_then(|manifest| convert::manifest_from_pb(manifest).ok());
    check::at_most("number of link samples", request.links.len(), SAMPLES_MAX)?;
    let (instance, now) = (InstanceId(request.instance), shared.clock.now());
    // A leaving instance ends its residency under this start.
    let counts_from = request.started_us.saturating_add(u64::from(request.leaving));
    let report = LoadReport {
        instance,
        address: request.address,
        node: request.has_node.then_some(NodeId(request.node)),
        fetches: !request.cannot_fetch,
        orders_queue: request.orders_by_deadline,
        part,
        load: Load::reported(request.queue_tokens, request.running, request.waiting).with_decode_report(
            DecodeReport {
                kv_tokens_max: request.kv_tokens_max,
                kv_tokens: request.kv_tokens,
                tbt_us: request.tbt_us,
                chunk_tokens: request.chunk_tokens,
            },
        ),
        sequence: request.sequence,
        started_us: request.started_us,
        leaving: request.leaving,
        links: request.links.iter().map(measurement_from_pb).collect(),
    };
    match shared.fleet.report(report, now) {
        Receipt::Full => {
            return Err(Status::resource_exhausted(format!(
                "{INSTANCES_MAX} instances are known, which is the limit"
            )));
        }
        Receipt::Accepted => {
            shared.history.set_incarnation(instance, counts_from, now);
            shared.manifests.record_instance(instance, manifest.filter(|_| !request.leaving));
            feedback::record_outcomes(shared, instance, &request.outcomes);
            let status = shared.residency.read().status(instance, now);
            if status.is_some_and(|standing| standing.epoch < counts_from) {
                shared.residency.write().observe_start(instance, counts_from, now);
            }
        }
        Receipt::Stale => {}
    }
    Ok(pb::ReportReply { freshness: Some(freshness(shared, &[], 0)) })
}

/// Role and topology domain of an instance.
fn part(report: &pb::ReportRequest) -> Result<Placement, Status> {
    let role = InstanceRole::from_number(report.role).ok_or_else(|| {
        check::invalid(format!("role is {}: 0 is all of a request, 1 prefill, 2 decode", report.role))
    })?;
    check::at_most("length of place", report.topology.len(), check::TEXT_BYTES_MAX)?;
    let wrong = |error| check::invalid(format!("place {:?}: {error}", report.topology));
    Ok(Placement { role, domain: Domain::parse(&report.topology).map_err(wrong)? })
}

fn measurement_from_pb(link: &pb::LinkSample) -> LinkMeasurement {
    let sample = LinkSample {
        fetches: link.fetches,
        latency: Duration::from_micros(link.latency_us),
        bytes: link.bytes,
        stream: Duration::from_micros(link.stream_us),
    };
    // Unknown numbers of a later release count for the coarser key.
    let tier = link.tier.checked_sub(1).and_then(|tier| u8::try_from(tier).ok()).and_then(Tier::from_u8);
    let path = LinkPath::from_number(link.path);
    LinkMeasurement { node: NodeId(link.node), epoch: Epoch(link.epoch), sample, key: LinkKey { path, tier } }
}
