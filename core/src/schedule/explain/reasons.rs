//! The reasons of a decision.
//!
//! Not here: the decision itself (`mod.rs`), and the texts (`decision.rs`).

use smallvec::SmallVec;

use crate::id::InstanceId;
use crate::index::Holder;
use crate::schedule::ChoiceState;
use crate::schedule::explain::decision::{
    Candidate, FilterReason, Reason, Source, SourceOutcome, UnfitReason,
};
use crate::schedule::predict::cost::FetchPlan;
use crate::schedule::predict::decode_forecast::BrokenLimit;
use crate::schedule::sources::link_stats::PriceBasis;

/// Prices reported for one decision: of its first sources, and of the best holders that were not
/// used.
const PRICES_MAX: usize = 4;

pub(in crate::schedule) fn reasons_for(
    choice: &ChoiceState<'_>,
    candidates: &[Candidate],
    plan: &FetchPlan,
    save_to: Option<Holder>,
) -> Vec<Reason> {
    let own = choice.asking.own_node;
    let mut reasons = SmallVec::<[Reason; 8]>::new();
    reasons.push(choice_reason(choice, candidates));
    for against in [&SLOW_START_PENALTY, &STALENESS_PENALTY] {
        reasons.extend(penalty_reasons(&candidates[..choice.equally_limited], against).into_iter().flatten());
    }
    reasons.extend(tbt_limit_reason(&candidates[..choice.open]));
    reasons.extend(ttft_limit_reason(&candidates[..choice.open]));
    let room_us = candidates[0].predicted.kv_wait_us;
    reasons.extend((room_us > 0).then_some(Reason::WaitsForKvCapacity { kv_wait_us: room_us }));
    reasons.extend(source_reasons(choice, plan));
    reasons.extend(candidates[0].has_in_flight_blocks.then_some(Reason::InFlight));
    reasons.extend(price_reasons(choice, plan));
    match save_to {
        None if !choice.asking.can_fetch => {}
        None => reasons.push(Reason::NoSaveTarget),
        Some(holder) if own != Some(holder.node) => reasons.push(Reason::SaveOnRing { node: holder.node }),
        Some(_) => {}
    }
    reasons.extend(candidates[0].handover.map(|handover| Reason::Disaggregated { handover }));
    reasons.extend(filter_reasons(choice, candidates));
    reasons.into_vec()
}

/// Instances that were left out, by cause.
fn filter_reasons(
    choice: &ChoiceState<'_>,
    candidates: &[Candidate],
) -> impl Iterator<Item = Reason> + use<> {
    let stale =
        candidates.iter().filter(|c| matches!(c.filtered, Some(FilterReason::Stale { .. }))).count() as u32;
    let of = |filtered| candidates.iter().filter(|one| one.filtered == Some(filtered)).count() as u32;
    let (decode, alone) = (of(FilterReason::DecodeOnly), of(FilterReason::NoDecodePartner));
    let [model, context] =
        [UnfitReason::Model, UnfitReason::Context].map(|unfit| of(FilterReason::Unfit(unfit)));
    let ineligible = of(FilterReason::Ineligible);
    let closed = (candidates.len() - choice.open) as u32;
    let full = closed - stale - ineligible - decode - alone - model - context;
    let roles = (decode + alone > 0).then_some(Reason::RoleMismatch { decode, unpaired: alone });
    let unfit = (model + context > 0).then_some(Reason::Unfit { model, context });
    let filtered = (stale + full + ineligible > 0).then_some(Reason::Filtered { stale, full, ineligible });
    [roles, unfit, filtered].into_iter().flatten()
}

fn choice_reason(choice: &ChoiceState<'_>, candidates: &[Candidate]) -> Reason {
    match (choice.equally_limited, choice.tied) {
        (1, _) => Reason::OnlyCandidate,
        (open, 1) => {
            let margin_us = candidates[1].cost_us() - candidates[0].cost_us();
            let others = open as u32 - 1;
            if ttft_margin_us(&candidates[..open], 1) == Some(margin_us) {
                Reason::LeastTtft { others, margin_us }
            } else {
                Reason::LeastCost { others, margin_us }
            }
        }
        (open, tied) => {
            let among = tied as u32;
            let is_ttft = ttft_margin_us(&candidates[..open], tied).is_some();
            if is_ttft { Reason::Tie { among } } else { Reason::CostTie { among } }
        }
    }
}

/// TTFT of the next other candidate minus that of the tied ones; `None` if TTFT alone would choose
/// another set of candidates.
fn ttft_margin_us(open: &[Candidate], tied: usize) -> Option<u64> {
    let ttft_us = |candidate: &Candidate| candidate.ttft_us();
    let (tied, others) = open.split_at(tied);
    let best_us = ttft_us(&open[0]);
    if tied.iter().any(|candidate| ttft_us(candidate) != best_us) {
        return None;
    }
    let next_us = others.iter().map(ttft_us).min().unwrap_or(u64::MAX);
    next_us.checked_sub(best_us).filter(|margin_us| *margin_us > 0)
}

/// Instances with broken inter-token limits, if that kept the request from one of them.
fn tbt_limit_reason(open: &[Candidate]) -> Option<Reason> {
    let count = |whose| open.iter().filter(|candidate| candidate.broken_limit == Some(whose)).count() as u32;
    let [own, others] = [BrokenLimit::Own, BrokenLimit::Others].map(count);
    let is_kept = open.iter().any(|candidate| candidate.broken_limit > open[0].broken_limit);
    is_kept.then_some(Reason::TbtLimit { own, others })
}

/// Instances that would miss the TTFT limit, if that kept the request from one of them.
fn ttft_limit_reason(open: &[Candidate]) -> Option<Reason> {
    let (chosen, others) = open.split_first()?;
    let would_be =
        |other: &&Candidate| other.is_late && !chosen.is_late && other.cost_us() < chosen.cost_us();
    let late = others.iter().filter(would_be).count() as u32;
    (late > 0).then_some(Reason::TtftLimit { late })
}

/// A cost added to an instance besides the request's own, and its reasons: for the chosen instance,
/// and for one that would have been chosen otherwise.
struct CostPenalty {
    us: fn(&Candidate) -> u64,
    without_penalty: fn(Candidate) -> Candidate,
    on_chosen: fn(u64) -> Reason,
    on_avoided: fn(InstanceId, u64) -> Reason,
}

/// The instance joined recently.
const SLOW_START_PENALTY: CostPenalty = CostPenalty {
    us: |candidate| candidate.slow_start_us,
    without_penalty: |candidate| Candidate { slow_start_us: 0, ..candidate },
    on_chosen: |ramp_us| Reason::SlowStart { slow_start_us: ramp_us },
    on_avoided: |instance, ramp_us| Reason::SlowStartAvoided { instance, slow_start_us: ramp_us },
};

/// The instance has not reported for a while.
const STALENESS_PENALTY: CostPenalty = CostPenalty {
    us: |candidate| candidate.staleness_us,
    without_penalty: |candidate| Candidate { staleness_us: 0, ..candidate },
    on_chosen: |doubt_us| Reason::StaleReport { staleness_us: doubt_us },
    on_avoided: |instance, doubt_us| Reason::StaleReportAvoided { instance, staleness_us: doubt_us },
};

/// The reasons that come from such a cost.
fn penalty_reasons(open: &[Candidate], against: &CostPenalty) -> [Option<Reason>; 2] {
    let CostPenalty { us, without_penalty: without, on_chosen: taken, on_avoided: spared } = *against;
    let chosen = &open[0];
    let without_us = |candidate: &Candidate| without(*candidate).cost_us();
    let others = open[1..].iter().filter(|candidate| us(candidate) > 0);
    let first = others.min_by_key(|candidate| (without_us(candidate), candidate.instance));
    let first = first.filter(|candidate| without_us(candidate) < chosen.cost_us());
    [
        (us(chosen) > 0).then(|| taken(us(chosen))),
        first.map(|candidate| spared(candidate.instance, us(candidate))),
    ]
}

fn source_reasons(choice: &ChoiceState<'_>, plan: &FetchPlan) -> SmallVec<[Reason; 4]> {
    let own = choice.asking.own_node;
    let remote: u32 =
        plan.sources.iter().filter(|source| own != Some(source.node)).map(|source| source.len_blocks).sum();
    let runs = &choice.held.matched.runs;
    let named = runs.last().map_or(0, |run| run.start_blocks.saturating_add(run.len_blocks));
    let gone = named.min(choice.request.blocks).saturating_sub(plan.held_blocks);
    let cut = plan.held_blocks - plan.resident_blocks - plan.fetch_blocks;
    let mut reasons = SmallVec::new();
    let mut push_if = |holds: bool, reason: Reason| {
        if holds {
            reasons.push(reason);
        }
    };
    let fetches = choice.asking.can_fetch;
    push_if(plan.held_blocks == 0 && fetches, Reason::NothingCached);
    push_if(!fetches, Reason::CannotFetch);
    let blocks = plan.resident_blocks;
    let is_text = choice.request.is_untokenized;
    push_if(
        blocks > 0,
        if is_text { Reason::InferredResident { blocks } } else { Reason::Resident { blocks } },
    );
    push_if(plan.overlap_blocks > 0, Reason::LocalOverlap { blocks: plan.overlap_blocks });
    push_if(remote > 0, Reason::RemoteFetch { blocks: remote });
    push_if(cut > 0, Reason::RecomputeCheaper { blocks: cut });
    push_if(gone > 0 && fetches, Reason::HolderLost { blocks: gone });
    reasons
}

/// The measured prices of blocks, once for each tier of a node; a price by the profile alone is not
/// reported.
fn price_reasons(choice: &ChoiceState<'_>, plan: &FetchPlan) -> SmallVec<[Reason; PRICES_MAX]> {
    let own = choice.asking.own_node;
    let behind = choice.planner.after_resident(plan.resident_blocks);
    let holder = |&Source { node, epoch, tier, .. }: &Source| Holder { node, epoch, tier };
    let afar = plan.sources.iter().find(|source| own != Some(source.node));
    let instead = afar.and_then(|source| behind.alternative_to(source));
    let taken = plan.sources.iter().map(|source| (SourceOutcome::Fetched, holder(source)));
    let others = [(SourceOutcome::FetchedElsewhere, instead), (SourceOutcome::Recomputed, plan.next_holder)];
    let others = others.into_iter().filter_map(|(fate, holder)| Some((fate, holder?)));
    let mut told = SmallVec::<[Holder; PRICES_MAX]>::new();
    let mut reasons = SmallVec::new();
    // Unused holders have reserved entries, or many sources would leave none to explain the choice.
    for (fate, holder) in taken.take(PRICES_MAX - 2).chain(others) {
        if told.contains(&holder) {
            continue;
        }
        told.push(holder);
        let price = choice.planner.price(&holder, choice.asking);
        let Some(price) = price.filter(|price| price.basis != PriceBasis::Profile) else { continue };
        let (node, tier) = (holder.node, holder.tier);
        let path = choice.planner.read_path(node, choice.asking).path;
        reasons.push(Reason::MeasuredPrice { outcome: fate, node, tier, path, price });
    }
    reasons
}
