//! How a request is sent to an instance: filter, then cost, then choose. `choose` changes nothing and
//! reads no clock; sending a decision is noted by a second call, [`record`].
//!
//! Not here: who holds the prefix (`index/`), how loads and links are learnt (the router's view), and
//! what is done with the decision (the client). TTFT = transfer + queue + prefill, after Algorithm 1 of
//! Mooncake (FAST '25); `cost.rs` says how each part is predicted.

mod cost;
mod decision;
mod fleet;
mod link;
mod load;
mod profile;

use std::time::Duration;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::id::{BlockHash, Category, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp};
use crate::index::{Holder, PrefixMatch};
use crate::place::LOAD_BOUND;

use cost::{Plan, Planner};
pub use decision::{Candidate, Decision, Filtered, Prediction, Reason, RejectReason, Rejection, Source};
pub use fleet::{Fleet, Instance, Limits, LiveNode, QUEUE_TOKENS_MAX, REPORT_STALE_AFTER};
pub use link::{LINK_AGED_AFTER, LinkEstimate, LinkSample, RATE_MIN};
pub use load::{Load, record};
pub use profile::{HardwareProfile, Lane, PROFILES};

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
    /// Tokens expected to be generated; 0 when unknown.
    pub output_tokens: u32,
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
}

impl Held<'_> {
    /// Leading blocks of the request that an instance has in GPU memory.
    fn resident_blocks(&self, instance: InstanceId) -> u32 {
        let rank = self.resident.binary_search_by_key(&instance, |resident| resident.instance);
        rank.map_or(0, |rank| self.resident[rank].blocks)
    }
}

impl<'a> From<&'a PrefixMatch> for Held<'a> {
    /// What nodes hold, with nothing resident.
    fn from(matched: &'a PrefixMatch) -> Self {
        Held { matched, resident: &[] }
    }
}

/// Chooses the instance with the least predicted TTFT and says how it gets the KV. Equal arguments give
/// equal answers.
///
/// # Errors
/// [`Rejection`] when no instance has a fresh report and room in its queue.
pub fn choose<'a>(
    request: &RouteRequest,
    held: impl Into<Held<'a>>,
    fleet: &Fleet,
    now: Timestamp,
) -> Result<Decision, Rejection> {
    let held = held.into();
    let planner = Planner::new(request, held.matched, fleet);
    let mut candidates = price(held, &planner, fleet, now);
    candidates.sort_unstable_by_key(rank);
    let open = candidates.partition_point(|candidate| candidate.filtered.is_none());
    if open == 0 {
        return Err(rejection(fleet, &candidates));
    }
    let best_us = candidates[0].predicted.ttft_us();
    let tied = candidates[..open].partition_point(|candidate| candidate.predicted.ttft_us() == best_us);
    candidates[..tied].rotate_left(turn(request.request, tied));
    Ok(decide(&Choice { request, held, planner: &planner, fleet, open, tied }, candidates))
}

/// Cost of every instance, in the order of the fleet.
fn price(held: Held<'_>, planner: &Planner<'_>, fleet: &Fleet, now: Timestamp) -> Vec<Candidate> {
    // Instances whose node holds nothing of the prefix all share one plan.
    let whole = planner.behind(0);
    let afar = whole.plan(None);
    let cost = |instance: &Instance| {
        if let Some(filtered) = filter(instance, &fleet.limits, now) {
            return filtered_out(instance, filtered);
        }
        let resident_blocks = held.resident_blocks(instance.id);
        if resident_blocks > 0 {
            let plan = planner.behind(resident_blocks).plan(instance.node);
            return costed(instance, &plan, &fleet.profile);
        }
        let near = instance.node.filter(|&node| whole.holds_any(node)).map(|node| whole.plan(Some(node)));
        costed(instance, near.as_ref().unwrap_or(&afar), &fleet.profile)
    };
    fleet.instances().iter().map(cost).collect()
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
        predicted: Prediction::default(),
        resident_blocks: 0,
        overlap_blocks: 0,
        filtered: Some(filtered),
    }
}

fn costed(instance: &Instance, plan: &Plan, profile: &HardwareProfile) -> Candidate {
    let predicted = Prediction {
        queue_us: cost::queue_us(profile, &instance.load),
        transfer_us: plan.transfer_us,
        prefill_us: plan.prefill_us,
    };
    let Plan { resident_blocks, overlap_blocks, .. } = *plan;
    Candidate { instance: instance.id, predicted, resident_blocks, overlap_blocks, filtered: None }
}

/// Open candidates first, by TTFT; ids make the order total.
fn rank(candidate: &Candidate) -> (bool, u64, u32) {
    (candidate.filtered.is_some(), candidate.predicted.ttft_us(), candidate.instance.0)
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
    planner: &'a Planner<'a>,
    fleet: &'a Fleet,
    /// Candidates that were not filtered.
    open: usize,
    /// Of those, the ones as good as the best.
    tied: usize,
}

fn decide(choice: &Choice<'_>, candidates: Vec<Candidate>) -> Decision {
    let Choice { request, planner, fleet, .. } = *choice;
    let chosen = candidates[0];
    let own = fleet.instance(chosen.instance).and_then(|instance| instance.node);
    let plan = planner.behind(chosen.resident_blocks).plan(own);
    let save_to = save_to(request, fleet, own);
    let reasons = reasons(choice, &candidates, &plan, own, save_to);
    Decision {
        request: request.request,
        instance: chosen.instance,
        resident_blocks: plan.resident_blocks,
        fetch_blocks: plan.fetch_blocks,
        recompute_blocks: request.blocks - plan.resident_blocks - plan.fetch_blocks,
        recompute_tokens: plan.recompute_tokens,
        sources: plan.sources.into_vec(),
        save_to,
        predicted: chosen.predicted,
        candidates,
        reasons,
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

fn reasons(
    choice: &Choice<'_>,
    candidates: &[Candidate],
    plan: &Plan,
    own: Option<NodeId>,
    save_to: Option<Holder>,
) -> Vec<Reason> {
    let mut reasons = SmallVec::<[Reason; 8]>::new();
    reasons.push(why_instance(choice, candidates));
    reasons.extend(why_sources(choice, plan, own));
    match save_to {
        None => reasons.push(Reason::NowhereToSave),
        Some(holder) if own != Some(holder.node) => reasons.push(Reason::SavedByRing { node: holder.node }),
        Some(_) => {}
    }
    let stale = candidates.iter().filter(|c| matches!(c.filtered, Some(Filtered::Stale { .. }))).count();
    let full = candidates.len() - choice.open - stale;
    if stale + full > 0 {
        reasons.push(Reason::Filtered { stale: stale as u32, full: full as u32 });
    }
    reasons.into_vec()
}

fn why_instance(choice: &Choice<'_>, candidates: &[Candidate]) -> Reason {
    match (choice.open, choice.tied) {
        (1, _) => Reason::OnlyCandidate,
        (open, 1) => {
            let margin_us = candidates[1].predicted.ttft_us() - candidates[0].predicted.ttft_us();
            Reason::LeastTtft { others: open as u32 - 1, margin_us }
        }
        (_, tied) => Reason::Tie { among: tied as u32 },
    }
}

fn why_sources(choice: &Choice<'_>, plan: &Plan, own: Option<NodeId>) -> SmallVec<[Reason; 4]> {
    let remote: u32 =
        plan.sources.iter().filter(|source| own != Some(source.node)).map(|source| source.len_blocks).sum();
    let runs = &choice.held.matched.runs;
    let named = runs.last().map_or(0, |run| run.start_blocks.saturating_add(run.len_blocks));
    let gone = named.min(choice.request.blocks).saturating_sub(plan.held_blocks);
    let cut = plan.held_blocks - plan.resident_blocks - plan.fetch_blocks;
    let mut reasons = SmallVec::new();
    let mut say = |holds: bool, reason: Reason| {
        if holds {
            reasons.push(reason);
        }
    };
    say(plan.held_blocks == 0, Reason::NothingHeld);
    say(plan.resident_blocks > 0, Reason::Resident { blocks: plan.resident_blocks });
    say(plan.overlap_blocks > 0, Reason::OwnOverlap { blocks: plan.overlap_blocks });
    say(remote > 0, Reason::RemoteFetch { blocks: remote });
    say(cut > 0, Reason::RecomputeCheaper { blocks: cut });
    say(gone > 0, Reason::HolderGone { blocks: gone });
    reasons
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
    let reason = match candidates.iter().filter_map(stale).min() {
        None => RejectReason::NoInstance,
        Some(youngest) => RejectReason::AllStale { instances: candidates.len() as u32, youngest },
    };
    Rejection { reason, retry_after: RETRY_UNREPORTED }
}

/// Time until a queue of `tokens` is down to the limit.
fn time_to_drain(fleet: &Fleet, tokens: u64) -> Duration {
    let above = tokens.saturating_sub(fleet.limits.queue_tokens_max);
    let ns = above.saturating_mul(fleet.profile.prefill_ns_per_token);
    Duration::from_nanos(ns).clamp(RETRY_FULL_MIN, RETRY_FULL_MAX)
}

#[cfg(test)]
mod tests;
