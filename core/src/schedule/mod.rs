//! How a request is sent to an instance: filter, then cost, then choose. `choose` changes nothing and
//! reads no clock; sending a decision is noted by a second call, [`Fleet::record`].
//!
//! Not here: who holds the prefix (`index/`), how loads and links are learnt (the router's view), and
//! what is done with the decision (the client). TTFT = transfer + queue + prefill, after Algorithm 1 of
//! Mooncake (FAST '25), and what is waited for besides (`Prediction::ttft_us`); `cost.rs` says how each part is predicted.

mod admit;
mod coming;
mod computing;
mod cost;
mod decision;
mod decoding;
mod doubt;
mod fair;
mod fleet;
mod guessed;
mod joining;
mod lanes;
mod learnt;
mod legs;
mod link;
mod load;
mod margin;
mod missing;
mod moved;
mod nearer;
mod pairs;
mod passing;
mod planners;
mod profile;
mod reasons;
mod speed;
mod steps;
mod turn;

use std::time::Duration;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::id::{BlockHash, Category, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp};
use crate::index::{Holder, PrefixMatch};
use crate::place::LOAD_BOUND;

pub use admit::{Admission, Offer};
pub use coming::{Coming, SentPrefixes};
pub use computing::Computing;
use cost::{Asking, Plan, Planner};
pub use decision::{
    Candidate, Decision, Fate, Filtered, Prediction, Prompt, Reason, RejectReason, Rejection, Source, Unfit,
};
use decoding::Climate;
pub use decoding::{Beside, Breaks, Decoding, Paced, Pacing};
use fleet::InstancePaths;
pub use fleet::{Fleet, Instance, Limits, LiveNode, QUEUE_TOKENS_MAX, REPORT_STALE_AFTER};
pub use guessed::GuessedPrefixes;
pub use joining::SLOW_START;
pub use lanes::{LinkKey, LinkLanes, LinkPath, Measure, Price, Reader};
pub use learnt::Learnt;
pub use link::{LINK_AGED_AFTER, LinkEstimate, LinkSample, RATE_MIN};
pub use load::Load;
use load::{Moment, Newcomer};
pub use missing::{Found, Missing, Told, Why, missing};
pub use moved::Counted;
use pairs::Partners;
pub use pairs::{DOMAIN_LEVELS, Domain, DomainError, Handover, Part, Role};
use planners::{Planners, asking};
pub use profile::{HardwareProfile, Lane, PROFILES};
pub use turn::{Standing, turn_of};

/// When no instance has a fresh report: one report interval (five a second) from now there may be one.
pub const RETRY_UNREPORTED: Duration = Duration::from_millis(200);

/// Longest a caller is told to stay away from full queues: load that far ahead is guesswork.
pub const RETRY_FULL_MAX: Duration = Duration::from_secs(5);

/// Shortest a caller is told to stay away from full queues, so that rejected callers do not spin.
pub const RETRY_FULL_MIN: Duration = Duration::from_millis(50);

/// What is known of a request when it is routed. The hashes themselves went into the index lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteRequest {
    /// The request; also spreads it among equal instances.
    pub request: RequestId,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its category.
    pub category: Category,
    /// How many blocks its prompt has, a partly filled last one counted.
    pub blocks: u32,
    /// Hash of its first block: prefixes that start alike are placed alike. Nothing when it has no block.
    pub first_block: Option<BlockHash>,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt.
    pub input_tokens: u32,
    /// Tokens that may be generated; 0 when unknown.
    pub output_tokens: u32,
    /// Until when its first token must be out, in microseconds; 0 where that does not matter.
    pub ttft_max_us: u64,
    /// How far apart its tokens may come, the mean of those behind the first, in microseconds; 0 where that does not matter.
    pub tbt_max_us: u64,
    /// Before and behind whom it goes.
    pub standing: Standing,
    /// It was read as text: how many tokens it has, and how many of them are there already, is a guess.
    pub is_text: bool,
}

/// Leading blocks of the request that an instance has in GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The instance.
    pub instance: InstanceId,
    /// How many.
    pub blocks: u32,
}

/// Who has the leading blocks of a request: the two planes of a lookup.
#[derive(Clone, Copy, Debug)]
pub struct Held<'a> {
    /// Nodes, from the index.
    pub matched: &'a PrefixMatch,
    /// Instances, by ascending number; those without a block are left out.
    pub resident: &'a [Resident],
    /// Instances that will have blocks before the request's turn, by ascending number.
    pub coming: &'a [Coming],
}

impl Held<'_> {
    /// Leading blocks of the request that an instance has in GPU memory.
    fn resident_blocks(&self, instance: InstanceId) -> u32 {
        let rank = self.resident.binary_search_by_key(&instance, |resident| resident.instance);
        rank.map_or(0, |rank| self.resident[rank].blocks)
    }

    /// What an instance will have before the request's turn, where that is more than it has.
    fn coming(&self, instance: InstanceId, resident_blocks: u32) -> Option<Coming> {
        let rank = self.coming.binary_search_by_key(&instance, |coming| coming.instance);
        rank.ok().map(|rank| self.coming[rank]).filter(|coming| coming.blocks > resident_blocks)
    }
}

impl<'a> From<&'a PrefixMatch> for Held<'a> {
    /// What nodes hold, with nothing resident.
    fn from(matched: &'a PrefixMatch) -> Self {
        Held { matched, resident: &[], coming: &[] }
    }
}

/// Which instances may be chosen, as whoever asks says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Eligible<'a> {
    /// Only these, by ascending number; without a list, all.
    pub among: Option<&'a [InstanceId]>,
    /// Not these, by ascending number, though they are among those: the request failed there, say.
    pub without: &'a [InstanceId],
    /// These cannot run it, by ascending number, and why.
    pub unfit: &'a [(InstanceId, Unfit)],
    /// It runs at one of them already, and asks how its KV gets there: neither a full queue nor old reports keep it away.
    pub runs_there: bool,
}

impl Eligible<'_> {
    fn has(&self, instance: InstanceId) -> bool {
        let is_in = |list: &[InstanceId]| list.binary_search(&instance).is_ok();
        self.among.is_none_or(is_in) && !is_in(self.without)
    }

    /// Why an instance may not be chosen, if it may not.
    fn against(&self, instance: InstanceId) -> Option<Filtered> {
        let unfit = self.unfit.binary_search_by_key(&instance, |(unfit, _)| *unfit);
        let unfit = unfit.ok().map(|rank| Filtered::Unfit(self.unfit[rank].1));
        unfit.or_else(|| (!self.has(instance)).then_some(Filtered::Ineligible))
    }
}

/// Chooses the instance with the least cost ([`Candidate::cost_us`]: predicted TTFT, what others wait longer, and more where it joined of
/// late), of those first that are in time and where no limit between two tokens is predicted to be broken, and says how it gets the KV. Equal
/// arguments give equal answers.
///
/// # Errors
/// [`Rejection`] when no instance has a fresh report and room in its queue.
pub fn choose<'a>(
    request: &RouteRequest,
    held: impl Into<Held<'a>>,
    fleet: &Fleet,
    now: Timestamp,
) -> Result<Decision, Rejection> {
    choose_among(request, held, Eligible::default(), fleet, now)
}

/// The same among some instances.
///
/// # Errors
/// [`Rejection`] when none of them has a fresh report and room in its queue.
pub fn choose_among<'a>(
    request: &RouteRequest,
    held: impl Into<Held<'a>>,
    eligible: Eligible<'_>,
    fleet: &Fleet,
    now: Timestamp,
) -> Result<Decision, Rejection> {
    let held = held.into();
    let climate = Climate::of(request, fleet, now);
    let mut planners = Planners::new(request, held.matched, fleet);
    let mut candidates = ranked(&price(held, &mut planners, eligible, (fleet, &climate, now)));
    let open = candidates.partition_point(|candidate| candidate.filtered.is_none());
    if open == 0 {
        return Err(rejection(fleet, &candidates));
    }
    let best_us = candidates[0].cost_us();
    let limits = |candidate: &Candidate| (candidate.is_late, candidate.breaks);
    let best = limits(&candidates[0]);
    let alike = candidates[..open].partition_point(|candidate| limits(candidate) == best);
    let tied = candidates[..alike].partition_point(|candidate| candidate.cost_us() == best_us);
    candidates[..tied].rotate_left(turn(request.request, tied));
    let chosen = fleet.with_paths(candidates[0].instance).expect("candidates are instances of the fleet");
    let asking = asking(chosen);
    let place = planners.place(asking);
    let planner = planners.at(place);
    Ok(decide(&Choice { request, held, planner, asking, fleet, climate, open, alike, tied }, candidates))
}

/// Cost of every instance, in the order of the fleet.
fn price(
    held: Held<'_>,
    planners: &mut Planners<'_>,
    eligible: Eligible<'_>,
    (fleet, climate, now): (&Fleet, &Climate, Timestamp),
) -> Vec<Candidate> {
    // Instances whose node holds nothing of the prefix share one plan with those that take the same paths.
    let mut afar: SmallVec<[Option<Plan>; 4]> = SmallVec::new();
    let filtered = |instance: &Instance| {
        let closed = || (!eligible.runs_there).then(|| filter(instance, &fleet.limits, now)).flatten();
        eligible.against(instance.id).or_else(closed)
    };
    // What runs somewhere stays there.
    let pairs = (!eligible.runs_there).then_some(planners.request());
    let pairs = pairs.and_then(|request| {
        Partners::of(request, held, (fleet, climate), |instance| filtered(instance).is_none())
    });
    let filtered = |instance: &Instance| {
        let decodes = || pairs.is_some() && fleet.part(instance.id).role == Role::Decode;
        filtered(instance).or_else(|| decodes().then_some(Filtered::Decodes))
    };
    let ttft_max_us = planners.request().ttft_max_us;
    // Beside instances that are there for longer and could be chosen, those that joined of late are given less.
    let share = |instance: &Instance| joining::share(instance.joined_at, now, fleet.limits.slow_start);
    let is_settled =
        fleet.instances().iter().any(|instance| share(instance) >= 1.0 && filtered(instance).is_none());
    let mut cost = |known: (&Instance, &InstancePaths)| {
        let (instance, asking) = (known.0, asking(known));
        if let Some(filtered) = filtered(instance) {
            return filtered_out(instance, filtered);
        }
        let place = planners.place(asking);
        let planner = planners.at(place);
        let resident_blocks = held.resident_blocks(instance.id);
        let coming = held.coming(instance.id, resident_blocks);
        if resident_blocks > 0 || coming.is_some() || !asking.fetches {
            let of = |blocks, behind| {
                costed(instance, &planner.behind(blocks).plan(asking), behind, (fleet, climate, now))
            };
            let there = of(resident_blocks, None);
            let later = coming.map(|coming| of(coming.blocks, Some(coming.turn)));
            // To wait for what another request brings may take longer than to compute it.
            return later.filter(|later| later.cost_us() < there.cost_us()).unwrap_or(there);
        }
        let whole = planner.behind(0);
        if instance.node.is_some_and(|node| whole.holds_any(node)) {
            return costed(instance, &whole.plan(asking), None, (fleet, climate, now));
        }
        if afar.len() <= place {
            afar.resize_with(place + 1, || None);
        }
        let plan = afar[place].get_or_insert_with(|| whole.plan(Asking { own: None, ..asking }));
        costed(instance, plan, None, (fleet, climate, now))
    };
    let ramped = |known: (&Instance, &InstancePaths)| {
        let share = if is_settled { share(known.0) } else { 1.0 };
        let mut candidate = cost(known);
        if let Some(pairs) = pairs.as_ref().filter(|_| candidate.filtered.is_none()) {
            candidate = paired(candidate, known.0, pairs, fleet.part(known.0.id));
            candidate = decoded_by_partner(candidate, fleet, climate);
        }
        let silent = now.since(known.0.reported_at);
        believed(candidate, share, doubt::added_us(silent, fleet.limits.report_stale_after), ttft_max_us)
    };
    fleet.instances_with_paths().map(ramped).collect()
}

/// With what counts against its instance, which is given a share of what others are and is doubted so much.
fn believed(candidate: Candidate, share: f64, doubt_us: u64, ttft_max_us: u64) -> Candidate {
    if candidate.filtered.is_some() {
        return candidate;
    }
    let ttft_us = candidate.ttft_us();
    let is_late = ttft_max_us > 0 && ttft_us > ttft_max_us;
    Candidate { ramp_us: joining::added_us(ttft_us, share), doubt_us, is_late, ..candidate }
}

/// Until a prompt is computed where it is computed.
fn until_computed_us(parts: &Prediction) -> u64 {
    parts.queue_us.saturating_add(parts.transfer_us).saturating_add(parts.prefill_us)
}

/// With whoever would go on, if it does not do so itself, and with what it means to others where it is decoded.
fn paired(candidate: Candidate, instance: &Instance, pairs: &Partners<'_>, part: Part) -> Candidate {
    let handover = match part.role {
        Role::Prefill => match pairs.best(instance, part.domain, until_computed_us(&candidate.parts)) {
            None => return filtered_out(instance, Filtered::Alone),
            found => found,
        },
        Role::Both | Role::Decode => None,
    };
    let running = handover.map_or_else(|| pairs::running(&instance.load), |handover| handover.running);
    let delays_us = candidate.delays_us.saturating_add(pairs.pressure_us(running));
    Candidate { handover, delays_us, ..candidate }
}

/// What is predicted of decoding by whoever goes on, if another does: room for it is there, and so are those that it slows.
fn decoded_by_partner(candidate: Candidate, fleet: &Fleet, climate: &Climate) -> Candidate {
    let partner = candidate.handover.and_then(|handover| fleet.instance(handover.instance));
    let Some(partner) = partner else { return candidate };
    let forecast = climate.at_partner(fleet, partner);
    // Its room comes free while the prompt is computed.
    let room_us = forecast.room_us.saturating_sub(until_computed_us(&candidate.parts));
    let parts = Prediction { room_us, tbt_us: forecast.tbt_us, ..candidate.parts };
    let predicted = climate.learnt.apply(&parts);
    let others_tbt_us = climate.learnt.tbt_us(forecast.others_us);
    let breaks = climate.breaks(partner, predicted.tbt_us, others_tbt_us);
    Candidate { parts, predicted, others_tbt_us, breaks, ..candidate }
}

fn filter(instance: &Instance, limits: &Limits, now: Timestamp) -> Option<Filtered> {
    let age = now.since(instance.reported_at);
    if age > limits.report_stale_after {
        return Some(Filtered::Stale { age });
    }
    let tokens = instance.load.tokens_ahead();
    (tokens > limits.queue_tokens_max).then_some(Filtered::QueueFull { tokens })
}

fn filtered_out(instance: &Instance, filtered: Filtered) -> Candidate {
    Candidate {
        instance: instance.id,
        parts: Prediction::default(),
        predicted: Prediction::default(),
        delays_us: 0,
        others_tbt_us: 0,
        is_late: false,
        breaks: None,
        ramp_us: 0,
        doubt_us: 0,
        turn: Timestamp::default(),
        resident_blocks: 0,
        is_coming: false,
        overlap_blocks: 0,
        handover: None,
        filtered: Some(filtered),
    }
}

/// What a plan costs; behind the request of another turn, if it needs what that one brings.
fn costed(
    instance: &Instance,
    plan: &Plan,
    behind: Option<Timestamp>,
    (fleet, climate, now): (&Fleet, &Climate, Timestamp),
) -> Candidate {
    let turn = turn_of(instance, climate.standing, plan.prefill_us, now);
    let turn = behind.map_or(turn, |before| turn.max(before.after(Duration::from_micros(1))));
    let unasked = turn_of(instance, Standing::default(), plan.prefill_us, now);
    let by_right = (turn < unasked).then_some(unasked);
    let times = fleet.times(instance, now);
    let (transfer_us, prefill_us) = (plan.transfer_us, speed::slowed(plan.prefill_us, times));
    let wait = cost::wait(
        (&climate.speeds, times),
        &instance.load,
        &Newcomer { turn, by_right, transfer_us, prefill_us },
        Moment { now, reported_at: instance.reported_at },
    );
    let passed_us =
        if instance.orders { fleet.passing().lengthening_us(wait.work_us, prefill_us) } else { 0 };
    // Both go on at once: of the wait counts what is left when the blocks are there. For those that come later, an instance with less to do is the
    // better one all the same.
    let queue_us = wait.us.saturating_sub(transfer_us);
    let later_us = wait.work_us.min(transfer_us).saturating_add(climate.later_us(prefill_us));
    let delays_us = wait.delays_us.saturating_add(later_us);
    let forecast = climate.at(fleet, instance, &wait, prefill_us);
    // Room comes free while the work ahead is done and blocks come.
    let room_us = forecast.room_us.saturating_sub(wait.us.max(transfer_us));
    let tbt_us = forecast.tbt_us;
    let known = Prompt { context_tokens: plan.context_tokens, new_tokens: plan.recompute_tokens };
    let prompt = if climate.is_text { Prompt::default() } else { known };
    let parts = Prediction { queue_us, transfer_us, prefill_us, passed_us, room_us, tbt_us, prompt };
    let predicted = climate.learnt.apply(&parts);
    let others_tbt_us = climate.learnt.tbt_us(forecast.others_us);
    let Plan { resident_blocks, overlap_blocks, .. } = *plan;
    Candidate {
        instance: instance.id,
        parts,
        predicted,
        delays_us,
        others_tbt_us,
        is_late: false,
        breaks: climate.breaks(instance, predicted.tbt_us, others_tbt_us),
        ramp_us: 0,
        doubt_us: 0,
        turn,
        resident_blocks,
        is_coming: behind.is_some(),
        overlap_blocks,
        handover: None,
        filtered: None,
    }
}

/// Candidates in the order of their ranks. What is put in order are the ranks, and each candidate moves once: they are large, and fleets are as well.
fn ranked(candidates: &[Candidate]) -> Vec<Candidate> {
    let mut ranks: SmallVec<[_; 64]> = candidates.iter().map(rank).zip(0_usize..).collect();
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, at)| candidates[at]).collect()
}

/// Open candidates first, of them those in time and then those where no limit between tokens is broken, by cost; ids make the order total.
fn rank(candidate: &Candidate) -> u128 {
    let Candidate { is_late, breaks, instance, .. } = *candidate;
    let breaks = match breaks {
        None => 0,
        Some(Breaks::Others) => 1,
        Some(Breaks::Own) => 2,
    };
    let limits = u128::from(candidate.filtered.is_some()) << 3 | u128::from(is_late) << 2 | breaks;
    limits << 96 | u128::from(candidate.cost_us()) << 32 | u128::from(instance.0)
}

/// Which of `among` equal candidates a request takes.
fn turn(request: RequestId, among: usize) -> usize {
    let hash = xxh3_64(&request.0.to_le_bytes());
    (hash % among as u64) as usize
}

/// What is settled once the candidates are in order.
struct Choice<'a> {
    request: &'a RouteRequest,
    held: Held<'a>,
    /// That of the chosen instance.
    planner: &'a Planner<'a>,
    asking: Asking<'a>,
    fleet: &'a Fleet,
    climate: Climate,
    /// Candidates that were not filtered.
    open: usize,
    /// Of those, the ones that are in time if the best is, and break the limits of as few.
    alike: usize,
    /// Of those, the ones as good as the best.
    tied: usize,
}

fn decide(choice: &Choice<'_>, candidates: Vec<Candidate>) -> Decision {
    let Choice { request, planner, asking, fleet, .. } = *choice;
    let chosen = candidates[0];
    let plan = planner.behind(chosen.resident_blocks).plan(asking);
    let save_to = asking.fetches.then(|| save_to(request, fleet, asking.own)).flatten();
    let reasons = reasons::of(choice, &candidates, &plan, save_to);
    Decision {
        request: request.request,
        instance: chosen.instance,
        resident_blocks: plan.resident_blocks,
        fetch_blocks: plan.fetch_blocks,
        recompute_blocks: request.blocks - plan.resident_blocks - plan.fetch_blocks,
        recompute_tokens: plan.recompute_tokens,
        sources: plan.sources.into_vec(),
        save_to,
        parts: chosen.parts,
        predicted: chosen.predicted,
        handover: chosen.handover,
        pacing: pacing(choice, &chosen),
        turn: chosen.turn,
        candidates,
        reasons,
    }
}

/// What was predicted of decoding at the chosen instance.
fn pacing(choice: &Choice<'_>, chosen: &Candidate) -> Pacing {
    let Choice { climate, fleet, .. } = choice;
    // Where it decodes.
    let goes_on = chosen.handover.map_or(chosen.instance, |handover| handover.instance);
    let instance = fleet.instance(goes_on);
    let alone_us = instance.map_or(0, |instance| climate.alone_us(fleet, instance));
    let alone_us = climate.learnt.tbt_us(alone_us);
    let kept_us = |limit_us| fleet.margin().kept_us(limit_us, alone_us, climate.now);
    let strictest_us = instance.and_then(|instance| climate.strictest_us(instance));
    Pacing {
        output_tokens: climate.output_tokens,
        kv_tokens: climate.kv_tokens,
        limit_us: climate.limit_us,
        kept_us: kept_us(climate.limit_us),
        alone_us,
        decode_us: chosen.predicted.tbt_us.saturating_mul(climate.output_tokens.into()),
        beside: strictest_us.map(|limit_us| Beside {
            tbt_us: chosen.others_tbt_us,
            within_us: limit_us.saturating_sub(kept_us(limit_us)),
            limit_us,
        }),
        is_trial: instance.is_some_and(|instance| climate.is_trial(fleet, instance)),
    }
}

/// The instance's own node when it takes blocks, else the ring's choice under bounded load.
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
        Some(Filtered::QueueFull { tokens }) => Some(tokens),
        _ => None,
    };
    let stale = |candidate: &Candidate| match candidate.filtered {
        Some(Filtered::Stale { age }) => Some(age),
        _ => None,
    };
    if let Some(tokens) = candidates.iter().filter_map(full).min() {
        let instances = candidates.iter().filter_map(full).count() as u32;
        let reason = RejectReason::AllFull { instances, tokens };
        return Rejection { reason, retry_after: time_to_drain(fleet, tokens) };
    }
    let decode = candidates.iter().filter(|one| one.filtered == Some(Filtered::Decodes)).count() as u32;
    let is_alone = candidates.iter().any(|one| one.filtered == Some(Filtered::Alone));
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

/// Time until a queue of `tokens` is down to the limit.
fn time_to_drain(fleet: &Fleet, tokens: u64) -> Duration {
    let above = tokens.saturating_sub(fleet.limits.queue_tokens_max);
    let ns = above.saturating_mul(fleet.speeds().prefill_ns_per_token);
    Duration::from_nanos(ns).clamp(RETRY_FULL_MIN, RETRY_FULL_MAX)
}

#[cfg(test)]
mod tests;
