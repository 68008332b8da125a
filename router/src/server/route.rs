//! Route: look up, choose, note, answer. Report: take the load that choosing needs.
//!
//! Not here: the choice (`kv_core::schedule`) and the load's bookkeeping (`crate::view::fleet`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{
    BlockHash, Epoch, IdentityDigest, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp,
};
use kv_core::index::Index;
use kv_core::schedule::{
    self, Candidate, Coming, Decision, Decoding, Domain, Eligible, Fleet, Handover, Held, LinkKey, LinkPath,
    LinkSample, Load, Part, Prediction, RejectReason, Rejection, Resident, Role, RouteRequest, Source, Unfit,
};
use kvfleet_proto::tls::callers::Caller;
use kvfleet_proto::{convert, pb, trace_context};
use smallvec::SmallVec;
use tonic::Status;
use tracing::Instrument;

use super::lookup::{data_address, freshness, holder_to_pb, ready, resident};
use super::why::{self, Known};
use super::{Shared, check, fresh, millis, moved};
use crate::metrics::Routed;
use crate::view::fleet::{Addresses, Claim, INSTANCES_MAX, Receipt, Report};
use crate::view::holders;
use crate::view::links::{Measured, SAMPLES_MAX};
use crate::view::residency::Standing;

/// What whoever asks within the process says of a request besides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Besides {
    /// Instances that cannot run it, and why.
    pub unfit: Vec<(InstanceId, Unfit)>,
    /// Whether it was decided before, under the same number, and does not run there: what was counted of it is taken back.
    pub again: bool,
    /// Under which identities its prompt may have been hashed in this process, so that the router can tell when none of them is the nodes'; none where
    /// that is not known.
    pub hashed_under: Arc<[IdentityDigest]>,
}

/// Answers a route call, under a span that continues the caller's trace.
pub(crate) async fn route(
    shared: &Shared,
    caller: &Caller,
    request: pb::RouteRequest,
    besides: Besides,
) -> Result<pb::RouteReply, Status> {
    caller.may_name(TenantId(request.tenant))?;
    let span = tracing::info_span!("route", request = request.request, tenant = request.tenant);
    trace_context::set_parent(&span, &request.traceparent);
    decide(shared, caller, request, besides).instrument(span).await
}

async fn decide(
    shared: &Shared,
    caller: &Caller,
    request: pb::RouteRequest,
    Besides { mut unfit, again, hashed_under }: Besides,
) -> Result<pb::RouteReply, Status> {
    let hashes = check::hashes("hashes", &request.hashes)?;
    let (ttft_max_us, tbt_max_us) = (ttft_max_us(shared, &request), tbt_max_us(shared, &request));
    let asked = RouteRequest { ttft_max_us, tbt_max_us, ..asked(&request, &hashes)? };
    may_narrow(caller, &request)?;
    fresh::may(shared, caller, request.fresh)?;
    ready(shared, &hashes, &request.after, request.fresh).await?;
    if let Some((ours, theirs)) = foreign(shared, &request.identity)? {
        // Behind a pointer, since it hardly ever happens and every call would carry it.
        return Err(Box::pin(other_identity(shared, ours, theirs)).await);
    }
    let control = shared.control().published.read();
    let (matched, applied) = holders::longest_prefix(&shared.groups, &control.index, &hashes);
    let now = shared.clock.now();
    if again {
        moved::take_back(shared, (&asked, &hashes), request.text, now);
    }
    let resident = residents(shared, &asked, (&hashes, request.text), now);
    // What comes to where it runs may be what it brings itself.
    let coming = match request.runs_there {
        true => SmallVec::new(),
        false => coming(shared, (&asked, request.text), &hashes, now),
    };
    let held = Held { matched: &matched, resident: &resident, coming: &coming };
    let (among, without) = eligible(&request);
    unfit.sort_unstable_by_key(|(instance, _)| *instance);
    let runs_there = request.runs_there;
    let eligible = Eligible { among: among.as_deref(), without: &without, unfit: &unfit, runs_there };
    let choose = |fleet: &Fleet, standing| {
        let asked = RouteRequest { standing, ..asked };
        schedule::choose_among(&asked, held, eligible, fleet, now)
    };
    let chosen = match request.runs_there {
        true => shared.fleet.plan(choose),
        false => shared.fleet.decide(claim(caller, &request, ttft_max_us), now, choose),
    };
    let held_blocks = holders::end_blocks(&matched);
    if let Ok((decision, _)) = &chosen
        && !request.runs_there
    {
        sent(shared, (&asked, &hashes, held_blocks), request.text, decision, now);
    }
    let (control_index, is_text) = (&control.index, request.text);
    let is_tenants = caller.share().is_some();
    let known = Known {
        request: &asked,
        hashes: &hashes,
        control: control_index,
        held_blocks,
        is_text,
        is_foreign: !is_text && is_foreign(shared, control_index, (&hashes, &hashed_under)),
        is_tenants,
    };
    // Whoever sent it has the story of that, and of who else could have taken it.
    if !(request.runs_there && request.sent_there) {
        // What runs there was counted when it was sent, and of a tenant's perhaps a part.
        let counted_at = (!request.runs_there && !is_tenants).then_some(now);
        why::remember(shared, &known, &chosen, counted_at);
    }
    let answer = answer(shared, control_index, chosen, (is_tenants, now))?;
    drop(control);
    Ok(pb::RouteReply { answer: Some(answer), freshness: Some(freshness(shared, &hashes, applied)) })
}

/// A turn as engines compare it, in Unix time. That of who leads, or goes before others, is before now.
fn turn_ms(now_ms: u64, turn: Timestamp, now: Timestamp) -> u64 {
    now_ms.saturating_add(millis(turn.since(now))).saturating_sub(millis(now.since(turn)))
}

/// What was chosen, in the words of the protocol.
fn answer(
    shared: &Shared,
    index: &Index,
    chosen: Result<(Decision, Addresses), Rejection>,
    (is_tenants, now): (bool, Timestamp),
) -> Result<pb::route_reply::Answer, Status> {
    match chosen {
        Ok((decision, addresses)) => {
            let turn_ms = turn_ms(shared.unix.now_ms(), decision.turn, now);
            let mut decision = decision_to_pb(index, &decision, (addresses, turn_ms));
            if is_tenants {
                own_only(&mut decision);
            }
            Ok(pb::route_reply::Answer::Decision(decision))
        }
        Err(Rejection { reason: RejectReason::NoInstance, .. }) if now < shared.reported_by => {
            Err(Status::unavailable(
                "no instance has reported to this router since it came back; ask another one",
            ))
        }
        Err(rejection) => Ok(pb::route_reply::Answer::Rejected(rejection_to_pb(&rejection))),
    }
}

/// Counts for those that follow: what its instance will have, who waits there, and what it reads from afar.
fn sent(
    shared: &Shared,
    (asked, hashes, held_blocks): (&RouteRequest, &[BlockHash], u32),
    is_text: bool,
    decision: &Decision,
    now: Timestamp,
) {
    expect(shared, (asked, hashes), is_text, decision, now);
    if is_text {
        return;
    }
    let own = shared.fleet.ask(|fleet| fleet.own_node(decision.instance));
    let from_own = decision.sources.iter().filter(|source| Some(source.node) == own);
    let own_blocks = from_own.map(|source| source.len_blocks).sum::<u32>();
    shared.metrics.to_fetch(own_blocks, decision.fetch_blocks.saturating_sub(own_blocks));
    if let Some(hot) = &shared.hot {
        hot.sent(asked, hashes, decision, held_blocks);
    }
}

/// What its instance will have, and who waits there.
pub(super) fn expect(
    shared: &Shared,
    (asked, hashes): (&RouteRequest, &[BlockHash]),
    is_text: bool,
    decision: &Decision,
    now: Timestamp,
) {
    if is_text {
        // No node has blocks of text.
        shared.sent.lock().sent(asked, hashes, decision, now);
        let told = (decision, room_tokens(shared, decision.instance));
        return shared.guessed.lock().sent(asked, hashes, told, now);
    }
    if keeps_prefixes(shared, decision.instance, now) {
        shared.sent.lock().sent(asked, hashes, decision, now);
    }
    if let Some(waits) = &shared.waits {
        waits.lock().sent(asked.tenant, decision, hashes, now);
    }
}

/// What instances have in GPU memory of a prompt, as far as they said, or by a guess where it was read as text.
pub(super) fn residents(
    shared: &Shared,
    asked: &RouteRequest,
    (hashes, is_text): (&[BlockHash], bool),
    now: Timestamp,
) -> Vec<Resident> {
    match is_text {
        true => guessed(shared, asked, hashes, now),
        false => resident(shared, hashes).iter().map(of_instance).collect(),
    }
}

/// Whether an instance tells what it has in GPU memory. Of one that does not, nobody knows that it keeps anything there.
fn keeps_prefixes(shared: &Shared, instance: InstanceId, now: Timestamp) -> bool {
    shared.residency.read().standing(instance, now).is_some()
}

/// Instances that compute leading blocks of the request for others.
fn coming(
    shared: &Shared,
    (asked, is_text): (&RouteRequest, bool),
    hashes: &[BlockHash],
    now: Timestamp,
) -> SmallVec<[Coming; 4]> {
    let mut all = shared.sent.lock().of(asked, hashes, now);
    all.retain(|coming| is_text || keeps_prefixes(shared, coming.instance, now));
    all
}

/// What instances probably have in GPU memory of a prompt that was read as text.
fn guessed(shared: &Shared, asked: &RouteRequest, hashes: &[BlockHash], now: Timestamp) -> Vec<Resident> {
    shared.guessed.lock().of(asked, hashes, |instance| room_tokens(shared, instance), now)
}

/// Tokens that an instance's GPU memory holds; 0 where that is not known.
fn room_tokens(shared: &Shared, instance: InstanceId) -> u64 {
    shared.fleet.ask(|fleet| fleet.instance(instance).map_or(0, |instance| instance.load.kv_tokens_max()))
}

/// What is asked for a request. A tenant's holder puts its requests before nobody's.
fn claim(caller: &Caller, request: &pb::RouteRequest, ttft_max_us: u64) -> Claim {
    let share = caller.share();
    let priority = if share.is_some() { request.priority.min(0) } else { request.priority };
    let ttft_max_us = (ttft_max_us > 0).then_some(ttft_max_us);
    // More names on one certificate are no more shares.
    Claim { share, tenant: share.unwrap_or(TenantId(request.tenant)), priority, ttft_max_us }
}

/// Until when a first token must be out. A request may ask for less time than the router allows, and not for more.
fn ttft_max_us(shared: &Shared, request: &pb::RouteRequest) -> u64 {
    let limits = [request.ttft_max_ms, shared.ttft_max_ms].into_iter().filter(|limit| *limit > 0);
    limits.min().unwrap_or_default().saturating_mul(1_000)
}

/// The same of the time between tokens.
fn tbt_max_us(shared: &Shared, request: &pb::RouteRequest) -> u64 {
    let limits = [request.tbt_max_us, shared.tbt_max_us].into_iter().filter(|limit| *limit > 0);
    limits.min().unwrap_or_default()
}

/// Instances that a tenant's request may leave out: where it failed, and tried again.
const TENANT_WITHOUT_MAX: usize = 8;

/// Whoever names one instance after the other is told how busy each is, which is not for tenants.
fn may_narrow(caller: &Caller, request: &pb::RouteRequest) -> Result<(), Status> {
    if caller.share().is_none() {
        return Ok(());
    }
    if request.among.is_some() {
        return Err(Status::permission_denied(
            "`among` is for the cluster's own processes: leave it out, or use a certificate with the subject alternative name \"kvfleet\"",
        ));
    }
    check::at_most("number of instances in `without`", request.without.len(), TENANT_WITHOUT_MAX)
}

/// Which instances may be chosen, and which of them not, in order.
fn eligible(request: &pb::RouteRequest) -> (Option<Vec<InstanceId>>, Vec<InstanceId>) {
    let all = |numbers: &[u32]| {
        let mut all: Vec<_> = numbers.iter().copied().map(InstanceId).collect();
        all.sort_unstable();
        all
    };
    (request.among.as_ref().map(|among| all(&among.instances)), all(&request.without))
}

/// What is uncertain counts here: most of it is right, and what is not is computed again.
fn of_instance(standing: &Standing) -> Resident {
    Resident { instance: standing.instance, blocks: u32::try_from(standing.blocks).unwrap_or(u32::MAX) }
}

/// How a call ended, for the metrics.
pub(crate) fn outcome(answer: &Result<pb::RouteReply, Status>) -> Routed {
    match answer.as_ref().map(|reply| &reply.answer) {
        Ok(Some(pb::route_reply::Answer::Decision(_))) => Routed::Chosen,
        Ok(_) => Routed::Rejected,
        Err(_) => Routed::Invalid,
    }
}

pub(super) fn asked(request: &pb::RouteRequest, hashes: &[BlockHash]) -> Result<RouteRequest, Status> {
    if !(1..=check::BLOCK_TOKENS_MAX).contains(&request.block_tokens) {
        let (got, limit) = (request.block_tokens, check::BLOCK_TOKENS_MAX);
        return Err(check::invalid(format!("block_tokens is {got}, expected 1 to {limit}")));
    }
    check::input_tokens(request.input_tokens)?;
    // It may have to wait from here on, with all that is in it.
    check::at_most("length of traceparent", request.traceparent.len(), check::TEXT_BYTES_MAX)?;
    if !request.identity.is_empty() {
        convert::identity_field("identity", &request.identity).map_err(check::invalid)?;
    }
    let among = request.among.as_ref().map_or(0, |among| among.instances.len());
    if request.runs_there && among != 1 {
        return Err(check::invalid(format!(
            "`runs_there` with {among} instances in `among`: name the one where the request runs"
        )));
    }
    check::at_most("number of instances in `among`", among, INSTANCES_MAX)?;
    check::at_most("number of instances in `without`", request.without.len(), INSTANCES_MAX)?;
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
        standing: schedule::Standing::default(),
        is_text: request.text,
    })
}

/// The cluster's identity and the request's, if they differ. Which weights of it the instance has loaded is for the nodes to ask, of whoever fetches
/// and saves: frontends that name the manifest need not be told of a change.
fn foreign(shared: &Shared, identity: &[u8]) -> Result<Option<(IdentityDigest, IdentityDigest)>, Status> {
    if identity.is_empty() {
        return Ok(None);
    }
    let theirs = convert::identity_field("identity", identity).map_err(check::invalid)?;
    let identity = shared.control().published.read().index.identity();
    let other = identity.filter(|ours| theirs.generation_over(*ours).is_none());
    Ok(other.map(|ours| (ours, theirs)))
}

/// Whether these hashes are of another identity than the nodes'.
fn is_foreign(
    shared: &Shared,
    index: &Index,
    (hashes, hashed_under): (&[BlockHash], &[IdentityDigest]),
) -> bool {
    // Of no hashes nothing can be said: a prompt under a salt that no tenant has comes without.
    let nodes = index.identity().filter(|_| !hashes.is_empty());
    nodes.is_some_and(|nodes| shared.manifests.are_foreign(hashed_under, nodes))
}

/// A request of another identity can have no hit here; saying so beats a silent miss.
async fn other_identity(shared: &Shared, ours: IdentityDigest, theirs: IdentityDigest) -> Status {
    let fields = shared.manifests.differing(theirs).await.map(|fields| format!(" in {fields}"));
    check::invalid(format!(
        "identity {theirs} differs from the cluster's {ours}{}: use the model manifest the nodes were started with",
        fields.unwrap_or_default()
    ))
}

fn decision_to_pb(
    index: &Index,
    decision: &Decision,
    (Addresses { instance: instance_address, partner }, turn_ms): (Addresses, u64),
) -> pb::Decision {
    pb::Decision {
        instance: decision.instance.0,
        instance_address,
        sources: decision.sources.iter().map(|source| source_to_pb(index, source)).collect(),
        fetch_blocks: decision.fetch_blocks,
        recompute_blocks: decision.recompute_blocks,
        save_to: decision.save_to.as_ref().map(|holder| holder_to_pb(index, holder)),
        predicted: Some(prediction_to_pb(&decision.predicted)),
        candidates: decision.candidates.iter().map(candidate_to_pb).collect(),
        reasons: decision.reasons.iter().map(ToString::to_string).collect(),
        resident_blocks: decision.resident_blocks,
        turn_ms,
        handover: decision
            .handover
            .map(|handover| pb::Handover { address: partner, ..handover_to_pb(&handover) }),
    }
}

/// A tenant is told what it is to do, and not how busy all others are.
fn own_only(decision: &mut pb::Decision) {
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
    let Prediction { queue_us, transfer_us, prefill_us, passed_us, room_us, tbt_us, prompt: _ } = *predicted;
    let queue_us = queue_us.saturating_add(passed_us).saturating_add(room_us);
    pb::Prediction { queue_us, transfer_us, prefill_us, room_us, tbt_us }
}

fn handover_to_pb(handover: &Handover) -> pb::Handover {
    pb::Handover { instance: handover.instance.0, address: String::new(), us: handover.us }
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
        nobody: matches!(
            rejection.reason,
            NoInstance | AllStale { .. } | NoneEligible { .. } | NoPair { .. }
        ),
    }
}

/// Takes a load report.
pub(crate) fn report(shared: &Shared, request: pb::ReportRequest) -> Result<pb::ReportReply, Status> {
    check::at_most("length of address", request.address.len(), check::TEXT_BYTES_MAX)?;
    if request.address.is_empty() && !request.leaving {
        return Err(check::invalid("address is empty: say where the instance takes requests, host:port"));
    }
    let part = part(&request)?;
    // There only for what is told to people: a report is not lost for one that cannot be read.
    let manifest = request.manifest.and_then(|manifest| convert::manifest_from_pb(manifest).ok());
    check::at_most("number of link samples", request.links.len(), SAMPLES_MAX)?;
    let (instance, now) = (InstanceId(request.instance), shared.clock.now());
    // An instance that leaves has ended what it said in this life.
    let counts_from = request.started_us.saturating_add(u64::from(request.leaving));
    let report = Report {
        instance,
        address: request.address,
        node: request.has_node.then_some(NodeId(request.node)),
        fetches: !request.fetches_nothing,
        orders: request.keeps_order,
        part,
        load: Load::reported(request.queue_tokens, request.running, request.waiting).with_decoding(
            Decoding {
                kv_tokens_max: request.kv_tokens_max,
                kv_tokens: request.kv_tokens,
                tbt_us: request.tbt_us,
                chunk_tokens: request.chunk_tokens,
            },
        ),
        sequence: request.sequence,
        started_us: request.started_us,
        leaving: request.leaving,
        links: request.links.iter().map(measured_from_pb).collect(),
    };
    match shared.fleet.report(report, now) {
        Receipt::Full => {
            return Err(Status::resource_exhausted(format!(
                "{INSTANCES_MAX} instances are known, which is the limit"
            )));
        }
        Receipt::Accepted => {
            shared.guessed.lock().lives(instance, counts_from, now);
            shared.manifests.reported(instance, manifest.filter(|_| !request.leaving));
            why::came(shared, instance, &request.outcomes);
            let standing = shared.residency.read().standing(instance, now);
            if standing.is_some_and(|standing| standing.epoch < counts_from) {
                shared.residency.write().started(instance, counts_from, now);
            }
        }
        Receipt::Old => {}
    }
    Ok(pb::ReportReply { freshness: Some(freshness(shared, &[], 0)) })
}

/// What an instance does, and where it stands.
fn part(report: &pb::ReportRequest) -> Result<Part, Status> {
    let role = Role::from_number(report.role).ok_or_else(|| {
        check::invalid(format!("role is {}: 0 is all of a request, 1 prefill, 2 decode", report.role))
    })?;
    check::at_most("length of place", report.place.len(), check::TEXT_BYTES_MAX)?;
    let wrong = |error| check::invalid(format!("place {:?}: {error}", report.place));
    Ok(Part { role, domain: Domain::parse(&report.place).map_err(wrong)? })
}

fn measured_from_pb(link: &pb::LinkSample) -> Measured {
    let sample = LinkSample {
        fetches: link.fetches,
        latency: Duration::from_micros(link.latency_us),
        bytes: link.bytes,
        stream: Duration::from_micros(link.stream_us),
    };
    // What a later release calls by another number counts for what is coarser.
    let tier = link.tier.checked_sub(1).and_then(|tier| u8::try_from(tier).ok()).and_then(Tier::from_u8);
    let path = LinkPath::from_number(link.path);
    Measured { node: NodeId(link.node), epoch: Epoch(link.epoch), sample, key: LinkKey { path, tier } }
}
