//! How a request is routed to an instance: filter, cost, choose. `choose` changes nothing and reads
//! no clock; a second call, [`Fleet::record`], records a decision that was sent.
//!
//! Not here: which nodes hold the prefix (`index/`), how loads and links are learned (the router's
//! view), and the use of the decision (the client). TTFT = transfer + queue + prefill, after
//! Algorithm 1 of Mooncake (FAST '25), plus the further waits in [`Prediction::ttft_us`]. `cost.rs`
//! predicts each part.

mod admission;
mod disaggregation;
mod explain;
mod fairness;
mod fleet;
mod predict;
mod sources;

use std::time::Duration;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::id::{BlockHash, Category, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp};
use crate::index::{Holder, PrefixMatch};
use crate::place::LOAD_BOUND;

pub use admission::shedding::{Admission, AdmissionRequest};
use disaggregation::DecodePartners;
pub use disaggregation::{DOMAIN_LEVELS, Domain, DomainError, Handover, InstanceRole, Placement};
pub use explain::decision::{
    Candidate, Decision, FilterReason, Prediction, PromptWork, Reason, RejectReason, Rejection, Source,
    SourceOutcome, UnfitReason,
};
pub use explain::miss_reason::{FetchFailure, MissReason, MissingRun, PrefixCoverage, explain_missing};
pub use fairness::priority_deadline::{QueuePriority, priority_deadline};
use fleet::InstancePaths;
pub use fleet::in_flight_prefixes::{InFlightPrefix, InFlightPrefixes};
pub use fleet::inferred_prefixes::InferredPrefixes;
pub use fleet::load::Load;
use fleet::load::{LoadInstant, Newcomer};
pub use fleet::reassignment::RouteRecord;
pub use fleet::slow_start::SLOW_START;
use fleet::slow_start::speed_share;
use fleet::staleness::staleness_cost_us;
pub use fleet::{Fleet, Instance, LiveNode, QUEUE_TOKENS_MAX, REPORT_STALE_AFTER, RouteLimits};
use predict::cost::{FetchContext, FetchPlan, Planner};
use predict::decode_forecast::DecodeForecast;
pub use predict::decode_forecast::{
    BrokenLimit, DecodeObservation, DecodePrediction, DecodeReport, NeighbourTbt,
};
pub use predict::prefill_model::PrefillModel;
pub use predict::profile::{HardwareProfile, PROFILES, PathSpeed};
pub use predict::ttft_bias::TtftBias;
pub use sources::link::{LINK_AGED_AFTER, LinkEstimate, LinkSample, RATE_MIN};
pub use sources::link_stats::{LinkKey, LinkPath, LinkSpeeds, Price, PriceBasis, ReadPath};
use sources::planner_cache::{PlannerCache, fetch_context};

/// Retry hint if no instance has a fresh report: one report interval (five a second).
pub const RETRY_UNREPORTED: Duration = Duration::from_millis(200);

/// Longest retry hint for full queues: a forecast of the load further ahead is guesswork.
pub const RETRY_FULL_MAX: Duration = Duration::from_secs(5);

/// Shortest retry hint for full queues, so that rejected callers do not spin.
pub const RETRY_FULL_MIN: Duration = Duration::from_millis(50);

/// A request as the router knows it. The block hashes themselves went into the index lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteRequest {
    /// The request; also breaks ties between equal instances.
    pub request: RequestId,
    /// Its tenant.
    pub tenant: TenantId,
    /// Its category.
    pub category: Category,
    /// Blocks of its prompt, including a partly filled last one.
    pub blocks: u32,
    /// Hash of its first block: prefixes with the same start are placed on the same node. `None` if
    /// it has no block.
    pub first_block: Option<BlockHash>,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt.
    pub input_tokens: u32,
    /// Tokens that may be generated; 0 if unknown.
    pub output_tokens: u32,
    /// Limit on the time to first token, in microseconds; 0 for none.
    pub ttft_max_us: u64,
    /// Limit on the mean time between tokens after the first, in microseconds; 0 for none.
    pub tbt_max_us: u64,
    /// Its position relative to other waiting requests.
    pub queue_priority: QueuePriority,
    /// The prompt was hashed as text, without a tokenizer: its token count and cached tokens are
    /// estimates.
    pub is_untokenized: bool,
}

/// Leading blocks of the request that an instance has in GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentPrefix {
    /// The instance.
    pub instance: InstanceId,
    /// Number of blocks.
    pub blocks: u32,
}

/// Locations of the leading blocks of a request: the result of both lookups.
#[derive(Clone, Copy, Debug)]
pub struct PrefixLocations<'a> {
    /// Nodes that hold them, from the index.
    pub matched: &'a PrefixMatch,
    /// Instances with blocks in GPU memory, by ascending id; those without a block are left out.
    pub resident: &'a [ResidentPrefix],
    /// Instances that will have blocks before the request starts, by ascending id.
    pub in_flight: &'a [InFlightPrefix],
}

impl PrefixLocations<'_> {
    /// Leading blocks of the request that an instance has in GPU memory.
    fn resident_blocks(&self, instance: InstanceId) -> u32 {
        let rank = self.resident.binary_search_by_key(&instance, |resident| resident.instance);
        rank.map_or(0, |rank| self.resident[rank].blocks)
    }

    /// Blocks that an instance will have before the request starts, if more than are resident.
    fn in_flight_prefix(&self, instance: InstanceId, resident_blocks: u32) -> Option<InFlightPrefix> {
        let rank = self.in_flight.binary_search_by_key(&instance, |coming| coming.instance);
        rank.ok().map(|rank| self.in_flight[rank]).filter(|coming| coming.blocks > resident_blocks)
    }
}

impl<'a> From<&'a PrefixMatch> for PrefixLocations<'a> {
    /// Blocks that nodes hold, without any in GPU memory.
    fn from(matched: &'a PrefixMatch) -> Self {
        PrefixLocations { matched, resident: &[], in_flight: &[] }
    }
}

/// The instances that may be chosen, as given by the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct InstanceFilter<'a> {
    /// Only these, by ascending id; `None` means all.
    pub candidates: Option<&'a [InstanceId]>,
    /// Not these, by ascending id, even if listed in `candidates`: the request failed there, for
    /// example.
    pub excluded: &'a [InstanceId],
    /// Instances that cannot run the request, by ascending id, with the reason.
    pub unfit: &'a [(InstanceId, UnfitReason)],
    /// The request already runs on one of them, and the caller asks how its KV gets there: neither
    /// a full queue nor an old report filters it out.
    pub is_pinned: bool,
}

impl InstanceFilter<'_> {
    fn permits(&self, instance: InstanceId) -> bool {
        let is_in = |list: &[InstanceId]| list.binary_search(&instance).is_ok();
        self.candidates.is_none_or(is_in) && !is_in(self.excluded)
    }

    /// The reason that an instance may not be chosen, if any.
    fn reason_against(&self, instance: InstanceId) -> Option<FilterReason> {
        let unfit = self.unfit.binary_search_by_key(&instance, |(unfit, _)| *unfit);
        let unfit = unfit.ok().map(|rank| FilterReason::Unfit(self.unfit[rank].1));
        unfit.or_else(|| (!self.permits(instance)).then_some(FilterReason::Ineligible))
    }
}

/// Chooses the instance with the least cost ([`Candidate::cost_us`]: predicted TTFT, delay to
/// others, slow start and staleness) and plans how it gets the KV. Instances that meet the TTFT
/// limit come first, then those where no inter-token limit is predicted to be broken. Equal
/// arguments give equal answers.
///
/// # Errors
/// [`Rejection`] if no instance has a fresh report and room in its queue.
pub fn choose<'a>(
    request: &RouteRequest,
    held: impl Into<PrefixLocations<'a>>,
    fleet: &Fleet,
    now: Timestamp,
) -> Result<Decision, Rejection> {
    choose_filtered(request, held, InstanceFilter::default(), fleet, now)
}

/// Same as [`choose`], restricted to the instances in `eligible`.
///
/// # Errors
/// [`Rejection`] if none of them has a fresh report and room in its queue.
pub fn choose_filtered<'a>(
    request: &RouteRequest,
    held: impl Into<PrefixLocations<'a>>,
    eligible: InstanceFilter<'_>,
    fleet: &Fleet,
    now: Timestamp,
) -> Result<Decision, Rejection> {
    let held = held.into();
    let decode = DecodeForecast::for_request(request, fleet, now);
    let mut planners = PlannerCache::new(request, held.matched, fleet);
    let mut candidates = ranked(&price_candidates(held, &mut planners, eligible, fleet, &decode, now));
    let open = candidates.partition_point(|candidate| candidate.filtered.is_none());
    if open == 0 {
        return Err(rejection(fleet, &candidates));
    }
    let best_us = candidates[0].cost_us();
    let limits = |candidate: &Candidate| (candidate.is_late, candidate.broken_limit);
    let best = limits(&candidates[0]);
    let alike = candidates[..open].partition_point(|candidate| limits(candidate) == best);
    let tied = candidates[..alike].partition_point(|candidate| candidate.cost_us() == best_us);
    candidates[..tied].rotate_left(tie_break_index(request.request, tied));
    let chosen = fleet.with_paths(candidates[0].instance).expect("candidates are instances of the fleet");
    let asking = fetch_context(chosen.0, chosen.1);
    let place = planners.index_for(asking);
    let planner = planners.at(place);
    Ok(decide(
        &ChoiceState { request, held, planner, asking, fleet, decode, open, equally_limited: alike, tied },
        candidates,
    ))
}

/// Prices every instance, in fleet order.
fn price_candidates(
    held: PrefixLocations<'_>,
    planners: &mut PlannerCache<'_>,
    eligible: InstanceFilter<'_>,
    fleet: &Fleet,
    decode: &DecodeForecast,
    now: Timestamp,
) -> Vec<Candidate> {
    // Instances without any of the prefix on their own node share one plan if they take the same
    // paths.
    let mut shared_plans: SmallVec<[Option<FetchPlan>; 4]> = SmallVec::new();
    let filtered = |instance: &Instance| {
        let closed = || (!eligible.is_pinned).then(|| filter(instance, &fleet.limits, now)).flatten();
        eligible.reason_against(instance.id).or_else(closed)
    };
    // A pinned request stays on its instance, so partners do not matter.
    let pairs = (!eligible.is_pinned).then_some(planners.request());
    let pairs = pairs.and_then(|request| {
        DecodePartners::find(request, held, fleet, decode, |instance| filtered(instance).is_none())
    });
    let filtered = |instance: &Instance| {
        let decodes = || pairs.is_some() && fleet.placement(instance.id).role == InstanceRole::Decode;
        filtered(instance).or_else(|| decodes().then_some(FilterReason::DecodeOnly))
    };
    let ttft_max_us = planners.request().ttft_max_us;
    // Newly joined instances are ramped up only if a settled instance could be chosen instead.
    let share = |instance: &Instance| speed_share(instance.joined_at, now, fleet.limits.slow_start);
    let is_settled =
        fleet.instances().iter().any(|instance| share(instance) >= 1.0 && filtered(instance).is_none());
    let mut cost = |(instance, paths): (&Instance, &InstancePaths)| {
        let asking = fetch_context(instance, paths);
        if let Some(filtered) = filtered(instance) {
            return filtered_out(instance, filtered);
        }
        let place = planners.index_for(asking);
        let planner = planners.at(place);
        let resident_blocks = held.resident_blocks(instance.id);
        let coming = held.in_flight_prefix(instance.id, resident_blocks);
        if resident_blocks > 0 || coming.is_some() || !asking.can_fetch {
            let price = |blocks, behind| {
                let plan = planner.after_resident(blocks).plan(asking);
                price_plan(instance, &plan, behind, fleet, decode, now)
            };
            return cheaper_of(price(resident_blocks, None), coming, price);
        }
        let whole = planner.after_resident(0);
        if instance.node.is_some_and(|node| whole.holds_any(node)) {
            return price_plan(instance, &whole.plan(asking), None, fleet, decode, now);
        }
        if shared_plans.len() <= place {
            shared_plans.resize_with(place + 1, || None);
        }
        let plan =
            shared_plans[place].get_or_insert_with(|| whole.plan(FetchContext { own_node: None, ..asking }));
        price_plan(instance, plan, None, fleet, decode, now)
    };
    let ramped = |known: (&Instance, &InstancePaths)| {
        let share = if is_settled { share(known.0) } else { 1.0 };
        let mut candidate = cost(known);
        if let Some(pairs) = pairs.as_ref().filter(|_| candidate.filtered.is_none()) {
            candidate = with_decode_partner(candidate, known.0, pairs, fleet.placement(known.0.id));
            candidate = with_partner_decode(candidate, fleet, decode);
        }
        let silent = now.since(known.0.reported_at);
        let staleness_us = staleness_cost_us(silent, fleet.limits.report_stale_after);
        with_instance_costs(candidate, share, staleness_us, ttft_max_us)
    };
    fleet.instances_with_paths().map(ramped).collect()
}

/// Adds the slow-start and staleness costs of the instance: `share` is its ramp share,
/// `staleness_us` its staleness cost.
fn with_instance_costs(candidate: Candidate, share: f64, staleness_us: u64, ttft_max_us: u64) -> Candidate {
    if candidate.filtered.is_some() {
        return candidate;
    }
    let ttft_us = candidate.ttft_us();
    let is_late = ttft_max_us > 0 && ttft_us > ttft_max_us;
    Candidate {
        slow_start_us: fleet::slow_start::slow_start_cost_us(ttft_us, share),
        staleness_us,
        is_late,
        ..candidate
    }
}

/// Time until the prompt is computed on its prefill instance.
fn prefill_done_us(parts: &Prediction) -> u64 {
    parts.queue_us.saturating_add(parts.transfer_us).saturating_add(parts.prefill_us)
}

/// Adds the decode partner, if the instance only prefills, and the delay that decoding the request
/// causes to others there.
fn with_decode_partner(
    candidate: Candidate,
    instance: &Instance,
    pairs: &DecodePartners<'_>,
    part: Placement,
) -> Candidate {
    let handover = match part.role {
        InstanceRole::Prefill => {
            match pairs.best_for(instance, part.domain, prefill_done_us(&candidate.uncorrected)) {
                None => return filtered_out(instance, FilterReason::NoDecodePartner),
                found => found,
            }
        }
        InstanceRole::Both | InstanceRole::Decode => None,
    };
    let running =
        handover.map_or_else(|| disaggregation::active_requests(&instance.load), |handover| handover.running);
    let delays_us = candidate.delay_to_others_us.saturating_add(pairs.pressure_us(running));
    Candidate { handover, delay_to_others_us: delays_us, ..candidate }
}

/// Replaces the decode estimate with that of the decode partner, if there is one: the partner's KV
/// capacity and its neighbours count.
fn with_partner_decode(candidate: Candidate, fleet: &Fleet, decode: &DecodeForecast) -> Candidate {
    let partner = candidate.handover.and_then(|handover| fleet.instance(handover.instance));
    let Some(partner) = partner else { return candidate };
    let forecast = decode.estimate_at_partner(fleet, partner);
    // The partner frees KV capacity while the prompt is computed.
    let room_us = forecast.kv_wait_us.saturating_sub(prefill_done_us(&candidate.uncorrected));
    let parts = Prediction { kv_wait_us: room_us, tbt_us: forecast.tbt_us, ..candidate.uncorrected };
    let predicted = decode.bias.apply(&parts);
    let others_tbt_us = decode.bias.corrected_tbt_us(forecast.others_tbt_us);
    let breaks = decode.broken_limit(partner, predicted.tbt_us, others_tbt_us);
    Candidate { uncorrected: parts, predicted, others_tbt_us, broken_limit: breaks, ..candidate }
}

fn filter(instance: &Instance, limits: &RouteLimits, now: Timestamp) -> Option<FilterReason> {
    let age = now.since(instance.reported_at);
    if age > limits.report_stale_after {
        return Some(FilterReason::Stale { age });
    }
    let tokens = instance.load.tokens_ahead();
    (tokens > limits.queue_tokens_max).then_some(FilterReason::QueueFull { tokens })
}

fn filtered_out(instance: &Instance, filtered: FilterReason) -> Candidate {
    Candidate {
        instance: instance.id,
        uncorrected: Prediction::default(),
        predicted: Prediction::default(),
        delay_to_others_us: 0,
        others_tbt_us: 0,
        is_late: false,
        broken_limit: None,
        slow_start_us: 0,
        staleness_us: 0,
        priority_deadline: Timestamp::default(),
        resident_blocks: 0,
        has_in_flight_blocks: false,
        overlap_blocks: 0,
        handover: None,
        filtered: Some(filtered),
    }
}

/// The candidate now, or the one with the blocks of a request in flight if that costs less: waiting
/// for another request's blocks can take longer than computing them.
fn cheaper_of(
    now: Candidate,
    in_flight: Option<InFlightPrefix>,
    price: impl Fn(u32, Option<Timestamp>) -> Candidate,
) -> Candidate {
    let later = in_flight.map(|prefix| price(prefix.blocks, Some(prefix.priority_deadline)));
    later.filter(|later| later.cost_us() < now.cost_us()).unwrap_or(now)
}

/// Prices a plan. `behind` is the priority deadline of the request that brings in-flight blocks, if
/// the plan needs them.
fn price_plan(
    instance: &Instance,
    plan: &FetchPlan,
    behind: Option<Timestamp>,
    fleet: &Fleet,
    decode: &DecodeForecast,
    now: Timestamp,
) -> Candidate {
    let turn = priority_deadline(instance, decode.queue_priority, plan.prefill_us, now);
    let turn = behind.map_or(turn, |before| turn.max(before.after(Duration::from_micros(1))));
    let default_deadline = priority_deadline(instance, QueuePriority::default(), plan.prefill_us, now);
    let unprioritized = (turn < default_deadline).then_some(default_deadline);
    let times = fleet.slowdown(instance, now);
    let (transfer_us, prefill_us) =
        (plan.transfer_us, predict::relative_speed::slowed_us(plan.prefill_us, times));
    let wait = predict::cost::queue_wait(
        &decode.speeds,
        times,
        &instance.load,
        &Newcomer { priority_deadline: turn, unprioritized_deadline: unprioritized, transfer_us, prefill_us },
        LoadInstant { now, reported_at: instance.reported_at },
    );
    let passed_us = if instance.orders_by_deadline {
        fleet.overtaking().expected_delay_us(wait.work_us, prefill_us)
    } else {
        0
    };
    // Transfer and queueing overlap: only the rest of the wait after the transfer counts. For later
    // requests, an instance with less work ahead is still better.
    let queue_us = wait.us.saturating_sub(transfer_us);
    let later_us = wait.work_us.min(transfer_us).saturating_add(decode.future_delay_us(prefill_us));
    let delays_us = wait.delay_to_others_us.saturating_add(later_us);
    let forecast = decode.estimate(fleet, instance, &wait, prefill_us);
    // KV capacity frees up while the work ahead is done and the transfer runs.
    let room_us = forecast.kv_wait_us.saturating_sub(wait.us.max(transfer_us));
    let tbt_us = forecast.tbt_us;
    let known = PromptWork { context_tokens: plan.context_tokens, new_tokens: plan.recompute_tokens };
    let prompt = if decode.is_untokenized { PromptWork::default() } else { known };
    let parts = Prediction {
        queue_us,
        transfer_us,
        prefill_us,
        overtaking_us: passed_us,
        kv_wait_us: room_us,
        tbt_us,
        prompt,
    };
    let predicted = decode.bias.apply(&parts);
    let others_tbt_us = decode.bias.corrected_tbt_us(forecast.others_tbt_us);
    let FetchPlan { resident_blocks, overlap_blocks, .. } = *plan;
    Candidate {
        instance: instance.id,
        uncorrected: parts,
        predicted,
        delay_to_others_us: delays_us,
        others_tbt_us,
        is_late: false,
        broken_limit: decode.broken_limit(instance, predicted.tbt_us, others_tbt_us),
        slow_start_us: 0,
        staleness_us: 0,
        priority_deadline: turn,
        resident_blocks,
        has_in_flight_blocks: behind.is_some(),
        overlap_blocks,
        handover: None,
        filtered: None,
    }
}

/// Sorts candidates by rank. Ranks are sorted instead of candidates, so that each of the large
/// candidates moves once.
fn ranked(candidates: &[Candidate]) -> Vec<Candidate> {
    let mut ranks: SmallVec<[_; 64]> = candidates.iter().map(rank).zip(0_usize..).collect();
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, at)| candidates[at]).collect()
}

/// Sort key: unfiltered candidates first, then those within the TTFT limit, then those that break
/// no inter-token limit, then by cost. Ids make the order total.
fn rank(candidate: &Candidate) -> u128 {
    let Candidate { is_late, broken_limit: breaks, instance, .. } = *candidate;
    let breaks = match breaks {
        None => 0,
        Some(BrokenLimit::Others) => 1,
        Some(BrokenLimit::Own) => 2,
    };
    let limits = u128::from(candidate.filtered.is_some()) << 3 | u128::from(is_late) << 2 | breaks;
    limits << 96 | u128::from(candidate.cost_us()) << 32 | u128::from(instance.0)
}

/// Index of the equal candidate that a request takes.
fn tie_break_index(request: RequestId, among: usize) -> usize {
    let hash = xxh3_64(&request.0.to_le_bytes());
    (hash % among as u64) as usize
}

/// The state of a decision after the candidates are sorted.
struct ChoiceState<'a> {
    request: &'a RouteRequest,
    held: PrefixLocations<'a>,
    /// Planner of the chosen instance.
    planner: &'a Planner<'a>,
    asking: FetchContext<'a>,
    fleet: &'a Fleet,
    decode: DecodeForecast,
    /// Number of unfiltered candidates.
    open: usize,
    /// Number of those with the same limits met and broken as the best.
    equally_limited: usize,
    /// Number of those with the same cost as the best.
    tied: usize,
}

fn decide(choice: &ChoiceState<'_>, candidates: Vec<Candidate>) -> Decision {
    let ChoiceState { request, planner, asking, fleet, .. } = *choice;
    let chosen = candidates[0];
    let plan = planner.after_resident(chosen.resident_blocks).plan(asking);
    let save_to = asking.can_fetch.then(|| save_to(request, fleet, asking.own_node)).flatten();
    let reasons = explain::reasons::reasons_for(choice, &candidates, &plan, save_to);
    Decision {
        request: request.request,
        instance: chosen.instance,
        resident_blocks: plan.resident_blocks,
        fetch_blocks: plan.fetch_blocks,
        recompute_blocks: request.blocks - plan.resident_blocks - plan.fetch_blocks,
        recompute_tokens: plan.recompute_tokens,
        sources: plan.sources.into_vec(),
        save_to,
        uncorrected: chosen.uncorrected,
        predicted: chosen.predicted,
        handover: chosen.handover,
        decode: decode_prediction(choice, &chosen),
        priority_deadline: chosen.priority_deadline,
        candidates,
        reasons,
    }
}

/// The decode prediction at the instance that decodes.
fn decode_prediction(choice: &ChoiceState<'_>, chosen: &Candidate) -> DecodePrediction {
    let ChoiceState { decode: climate, fleet, .. } = choice;
    // The instance that decodes.
    let goes_on = chosen.handover.map_or(chosen.instance, |handover| handover.instance);
    let instance = fleet.instance(goes_on);
    let alone_us = instance.map_or(0, |instance| climate.alone_tbt_us(fleet, instance));
    let alone_us = climate.bias.corrected_tbt_us(alone_us);
    let kept_us = |limit_us| fleet.slo_margin().margin_us(limit_us, alone_us, climate.now);
    let strictest_us = instance.and_then(|instance| climate.tightest_limit_us(instance));
    DecodePrediction {
        output_tokens: climate.output_tokens,
        kv_tokens: climate.kv_tokens,
        limit_us: climate.limit_us,
        slo_margin_us: kept_us(climate.limit_us),
        alone_tbt_us: alone_us,
        decode_us: chosen.predicted.tbt_us.saturating_mul(climate.output_tokens.into()),
        neighbours: strictest_us.map(|limit_us| NeighbourTbt {
            tbt_us: chosen.others_tbt_us,
            allowed_us: limit_us.saturating_sub(kept_us(limit_us)),
            limit_us,
        }),
        is_trial: instance.is_some_and(|instance| climate.is_trial(fleet, instance)),
    }
}

/// The instance's own node if it takes blocks, else the ring's choice under bounded load.
fn save_to(request: &RouteRequest, fleet: &Fleet, own: Option<NodeId>) -> Option<Holder> {
    let own = own.and_then(|node| fleet.live(node)).filter(|live| live.weight > 0);
    let live = own.or_else(|| {
        let key = request.first_block.unwrap_or_default();
        let blocks = |node| fleet.live(node).map_or(0, |live| live.blocks);
        fleet.ring().place(&key.0, blocks, LOAD_BOUND).and_then(|node| fleet.live(node))
    });
    live.map(|live| Holder { node: live.node, epoch: live.epoch, tier: Tier::Dram })
}

fn rejection(fleet: &Fleet, candidates: &[Candidate]) -> Rejection {
    let full = |candidate: &Candidate| match candidate.filtered {
        Some(FilterReason::QueueFull { tokens }) => Some(tokens),
        _ => None,
    };
    let stale = |candidate: &Candidate| match candidate.filtered {
        Some(FilterReason::Stale { age }) => Some(age),
        _ => None,
    };
    if let Some(tokens) = candidates.iter().filter_map(full).min() {
        let instances = candidates.iter().filter_map(full).count() as u32;
        let reason = RejectReason::AllFull { instances, tokens };
        return Rejection { reason, retry_after: time_to_drain(fleet, tokens) };
    }
    let decode =
        candidates.iter().filter(|one| one.filtered == Some(FilterReason::DecodeOnly)).count() as u32;
    let is_alone = candidates.iter().any(|one| one.filtered == Some(FilterReason::NoDecodePartner));
    let reason = match candidates.iter().filter_map(stale).min() {
        None if candidates.is_empty() => RejectReason::NoInstance,
        _ if is_alone => RejectReason::NoPair { instances: candidates.len() as u32, decode },
        None if decode > 0 => RejectReason::NoPair { instances: candidates.len() as u32, decode },
        None => RejectReason::NoneEligible { instances: candidates.len() as u32 },
        Some(youngest) => {
            let instances = candidates.iter().filter_map(stale).count() as u32;
            RejectReason::AllStale { instances, youngest }
        }
    };
    Rejection { reason, retry_after: RETRY_UNREPORTED }
}

/// Time until a queue of `tokens` is back at the limit.
fn time_to_drain(fleet: &Fleet, tokens: u64) -> Duration {
    let above = tokens.saturating_sub(fleet.limits.queue_tokens_max);
    let ns = above.saturating_mul(fleet.corrected_profile().prefill_ns_per_token);
    Duration::from_nanos(ns).clamp(RETRY_FULL_MIN, RETRY_FULL_MAX)
}

#[cfg(test)]
mod tests;
