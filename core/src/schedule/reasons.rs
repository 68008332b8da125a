//! Why a decision is what it is: the reasons that go with it.
//!
//! Not here: the decision itself (`mod.rs`), and the words (`decision.rs`).

use smallvec::SmallVec;

use super::Choice;
use super::cost::Plan;
use super::decision::{Candidate, Fate, Filtered, Reason, Source, Unfit};
use super::decoding::Breaks;
use super::lanes::Measure;
use crate::id::InstanceId;
use crate::index::Holder;

/// Prices that are told of one decision: of its first sources, and of what was not taken.
const PRICES_MAX: usize = 4;

pub(super) fn of(
    choice: &Choice<'_>,
    candidates: &[Candidate],
    plan: &Plan,
    save_to: Option<Holder>,
) -> Vec<Reason> {
    let own = choice.asking.own;
    let mut reasons = SmallVec::<[Reason; 8]>::new();
    reasons.push(why_instance(choice, candidates));
    for against in [&JOINED, &SILENT] {
        reasons.extend(why_against(&candidates[..choice.alike], against).into_iter().flatten());
    }
    reasons.extend(why_pace(&candidates[..choice.open]));
    reasons.extend(why_in_time(&candidates[..choice.open]));
    let room_us = candidates[0].predicted.room_us;
    reasons.extend((room_us > 0).then_some(Reason::WaitsForRoom { room_us }));
    reasons.extend(why_sources(choice, plan));
    reasons.extend(candidates[0].is_coming.then_some(Reason::Coming));
    reasons.extend(prices(choice, plan));
    match save_to {
        None if !choice.asking.fetches => {}
        None => reasons.push(Reason::NowhereToSave),
        Some(holder) if own != Some(holder.node) => reasons.push(Reason::SavedByRing { node: holder.node }),
        Some(_) => {}
    }
    reasons.extend(candidates[0].handover.map(|handover| Reason::Pair { handover }));
    reasons.extend(why_left_out(choice, candidates));
    reasons.into_vec()
}

/// How many were left out, by what for.
fn why_left_out(choice: &Choice<'_>, candidates: &[Candidate]) -> impl Iterator<Item = Reason> + use<> {
    let stale =
        candidates.iter().filter(|c| matches!(c.filtered, Some(Filtered::Stale { .. }))).count() as u32;
    let of = |filtered| candidates.iter().filter(|one| one.filtered == Some(filtered)).count() as u32;
    let (decode, alone) = (of(Filtered::Decodes), of(Filtered::Alone));
    let [model, context] = [Unfit::Model, Unfit::Context].map(|unfit| of(Filtered::Unfit(unfit)));
    let ineligible = of(Filtered::Ineligible);
    let closed = (candidates.len() - choice.open) as u32;
    let full = closed - stale - ineligible - decode - alone - model - context;
    let roles = (decode + alone > 0).then_some(Reason::Roles { decode, alone });
    let unfit = (model + context > 0).then_some(Reason::Unfit { model, context });
    let filtered = (stale + full + ineligible > 0).then_some(Reason::Filtered { stale, full, ineligible });
    [roles, unfit, filtered].into_iter().flatten()
}

fn why_instance(choice: &Choice<'_>, candidates: &[Candidate]) -> Reason {
    match (choice.alike, choice.tied) {
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

/// How much later than these that cost the same the first of all others would be, by TTFT alone; nothing where that would choose others, or fewer or more.
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

/// Where limits between two tokens would be broken, if that kept the request from there.
fn why_pace(open: &[Candidate]) -> Option<Reason> {
    let count = |whose| open.iter().filter(|candidate| candidate.breaks == Some(whose)).count() as u32;
    let [own, others] = [Breaks::Own, Breaks::Others].map(count);
    let is_kept = open.iter().any(|candidate| candidate.breaks > open[0].breaks);
    is_kept.then_some(Reason::Paced { own, others })
}

/// Where its first token would be late, if that kept the request from there.
fn why_in_time(open: &[Candidate]) -> Option<Reason> {
    let (chosen, others) = open.split_first()?;
    let would_be =
        |other: &&Candidate| other.is_late && !chosen.is_late && other.cost_us() < chosen.cost_us();
    let late = others.iter().filter(would_be).count() as u32;
    (late > 0).then_some(Reason::InTime { late })
}

/// What counts against an instance besides what a request takes there, and how that is told: of the chosen one, and of one that would be chosen else.
struct Against {
    us: fn(&Candidate) -> u64,
    without: fn(Candidate) -> Candidate,
    taken: fn(u64) -> Reason,
    spared: fn(InstanceId, u64) -> Reason,
}

/// That it joined of late.
const JOINED: Against = Against {
    us: |candidate| candidate.ramp_us,
    without: |candidate| Candidate { ramp_us: 0, ..candidate },
    taken: |ramp_us| Reason::Joined { ramp_us },
    spared: |instance, ramp_us| Reason::JoinerSpared { instance, ramp_us },
};

/// That it has said nothing for a while.
const SILENT: Against = Against {
    us: |candidate| candidate.doubt_us,
    without: |candidate| Candidate { doubt_us: 0, ..candidate },
    taken: |doubt_us| Reason::Silent { doubt_us },
    spared: |instance, doubt_us| Reason::SilentSpared { instance, doubt_us },
};

/// What came of that.
fn why_against(open: &[Candidate], against: &Against) -> [Option<Reason>; 2] {
    let Against { us, without, taken, spared } = *against;
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

fn why_sources(choice: &Choice<'_>, plan: &Plan) -> SmallVec<[Reason; 4]> {
    let own = choice.asking.own;
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
    let fetches = choice.asking.fetches;
    say(plan.held_blocks == 0 && fetches, Reason::NothingHeld);
    say(!fetches, Reason::FetchesNothing);
    let blocks = plan.resident_blocks;
    let is_text = choice.request.is_text;
    say(blocks > 0, if is_text { Reason::Guessed { blocks } } else { Reason::Resident { blocks } });
    say(plan.overlap_blocks > 0, Reason::OwnOverlap { blocks: plan.overlap_blocks });
    say(remote > 0, Reason::RemoteFetch { blocks: remote });
    say(cut > 0, Reason::RecomputeCheaper { blocks: cut });
    say(gone > 0 && fetches, Reason::HolderGone { blocks: gone });
    reasons
}

/// With what the blocks were priced, each tier of a node once; of what was not measured there is nothing to tell.
fn prices(choice: &Choice<'_>, plan: &Plan) -> SmallVec<[Reason; PRICES_MAX]> {
    let own = choice.asking.own;
    let behind = choice.planner.behind(plan.resident_blocks);
    let holder = |&Source { node, epoch, tier, .. }: &Source| Holder { node, epoch, tier };
    let afar = plan.sources.iter().find(|source| own != Some(source.node));
    let instead = afar.and_then(|source| behind.instead_of(source));
    let taken = plan.sources.iter().map(|source| (Fate::Taken, holder(source)));
    let others = [(Fate::PassedOver, instead), (Fate::Computed, plan.left)];
    let others = others.into_iter().filter_map(|(fate, holder)| Some((fate, holder?)));
    let mut told = SmallVec::<[Holder; PRICES_MAX]>::new();
    let mut reasons = SmallVec::new();
    // What was not taken has room of its own, or many sources would leave none to say why.
    for (fate, holder) in taken.take(PRICES_MAX - 2).chain(others) {
        if told.contains(&holder) {
            continue;
        }
        told.push(holder);
        let price = choice.planner.price(&holder, choice.asking);
        let Some(price) = price.filter(|price| price.measure != Measure::Profile) else { continue };
        let (node, tier) = (holder.node, holder.tier);
        let path = choice.planner.reader(node, choice.asking).path;
        reasons.push(Reason::Priced { fate, node, tier, path, price });
    }
    reasons
}
