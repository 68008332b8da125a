//! Compares the real and the simulated fleet: the decision of each request, and where prompt tokens
//! came from in total.
//!
//! `show.rs` prints the comparison.

use kv_core::id::Tier;
use kv_core::schedule::{Decision, Prediction};
use kvfleet_proto::pb;
use kvfleet_sim::fleet::ServedRequest;
use serde::Serialize;

use super::mirror::{CrosscheckSides, SimulatedRun};
use super::real::RequestRecord;
use crate::args::CrosscheckArgs;

/// Leading requests excluded from prediction errors, because routers still learn.
const WARMUP_REQUESTS: usize = 50;

/// Maximum difference of each token share in percentage points.
pub(super) const POINTS_MAX: f64 = 1.0;

/// One run on both fleets.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RunComparison {
    pub(super) traffic: String,
    pub(super) seed: u64,
    pub(super) lockstep: bool,
    pub(super) requests: usize,
    /// Requests not served by the real fleet, and requests rejected by the simulated one.
    pub(super) unserved: [u64; 2],
    pub(super) instances: u32,
    pub(super) nodes: u32,
    pub(super) routers: u32,
    pub(super) block_tokens: u32,
    pub(super) policy: String,
    pub(super) dram: Option<String>,
    pub(super) ssd: Option<String>,
    pub(super) profile: String,
    pub(super) time_scale: f64,
    /// Load relative to the capacity of the fleet, and requests per second; `None` in lockstep.
    pub(super) load: Option<f64>,
    pub(super) per_s: Option<f64>,
    /// Maximum delay between a request's due time and its sending.
    pub(super) late_ms: f64,
    /// Percentages of all prompt tokens.
    pub(super) real: TokenShares,
    pub(super) virtual_time: TokenShares,
    /// Token shares of the simulated fleet that replays the real decisions.
    pub(super) led_shares: TokenShares,
    /// The largest difference of a share in percentage points.
    pub(super) points: f64,
    /// Agreement with the simulated fleet that decides independently.
    pub(super) alone: DecisionAgreement,
    /// Agreement with the simulated fleet that sends each request where the real one did and
    /// records where it would have sent it.
    pub(super) led: DecisionAgreement,
    /// Failed attempts and incomplete sources in the real fleet.
    pub(super) troubles: Vec<String>,
    /// Ratio of measured prefill times to those of the profile, which shows how slow the machine
    /// was; the simulated fleet uses the same ratio.
    pub(super) slower: f64,
    /// Mean time from a decision until its request reached the instance.
    pub(super) delivery_ms: f64,
    /// Mean TTFT in milliseconds, median prediction error and bias of the sums: of the real fleet,
    /// of the independent simulated fleet and of the replaying one. `None` if compute takes no
    /// time.
    pub(super) ttft: Option<[Timing; 3]>,
}

/// TTFT of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Timing {
    pub(super) mean_ms: f64,
    pub(super) error: f64,
    pub(super) bias: f64,
}

/// Where prompt tokens came from, in percent: by node, and again by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct TokenShares {
    pub(super) own_node: f64,
    pub(super) other_nodes: f64,
    pub(super) dram: f64,
    pub(super) ssd: f64,
    pub(super) recomputed: f64,
}

impl TokenShares {
    /// All shares with their names.
    pub(super) fn all(&self) -> [(&'static str, f64); 5] {
        [
            ("own node", self.own_node),
            ("other nodes", self.other_nodes),
            ("from DRAM", self.dram),
            ("from SSD", self.ssd),
            ("recomputed", self.recomputed),
        ]
    }

    /// By how many percentage points each share exceeds that of `other`.
    pub(super) fn differences(&self, other: &TokenShares) -> [(&'static str, f64); 5] {
        let others = other.all();
        let mut all = self.all();
        all.iter_mut().zip(others).for_each(|((_, share), (_, other))| *share -= other);
        all
    }
}

/// In how many requests two fleets agree, and why they differ in the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct DecisionAgreement {
    /// Requests that both fleets decided.
    pub(super) decided: usize,
    /// Requests sent to the same instance.
    pub(super) instance: usize,
    /// Requests that agree in everything: instance, sources, save target and hits.
    pub(super) whole: usize,
    pub(super) why: DisagreementCounts,
    /// How much later the real prediction of the first token is than the simulated one, in
    /// milliseconds over all instances: the mean, and the mean of absolute values.
    pub(super) later_ms: f64,
    pub(super) apart_ms: f64,
    /// The mean by part.
    pub(super) later: TtftParts,
    /// The first request that differs, with both decisions and results.
    pub(super) first: Option<String>,
}

/// Parts of a predicted TTFT in milliseconds. Queueing includes later requests that are served
/// earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct TtftParts {
    pub(super) queue: f64,
    pub(super) transfer: f64,
    pub(super) prefill: f64,
}

/// Requests sent to different instances, by the first matching reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct DisagreementCounts {
    /// One side left out instances that the other considered, for old reports or full queues.
    pub(super) left_out: usize,
    /// The sides knew of different blocks at the instances' own nodes.
    pub(super) blocks: usize,
    /// Both instances were rated equal on one of the sides.
    pub(super) tie: usize,
    /// The predictions differ: reported queues, or what the routers had learned.
    pub(super) predicted: usize,
}

/// The decision of one side for a request, and its hits.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DecidedRequest {
    instance: u32,
    /// (node, tier, first block, blocks) of each source.
    sources: Vec<(u32, u32, u32, u32)>,
    save_to: Option<u32>,
    hits: HitSources,
}

/// Blocks that were hits, by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HitSources {
    own: u32,
    others: u32,
    dram: u32,
    ssd: u32,
}

/// An instance as rated by one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RatedCandidate {
    instance: u32,
    /// Queueing, transfer and prefill.
    parts_us: [u64; 3],
    overlap_blocks: u32,
    is_open: bool,
}

impl RatedCandidate {
    fn ttft_us(&self) -> u64 {
        self.parts_us.iter().fold(0, |sum, part| sum.saturating_add(*part))
    }
}

impl RunComparison {
    pub(super) fn new(
        args: &CrosscheckArgs,
        traffic: String,
        seed: u64,
        block_tokens: u32,
        per_s: Option<f64>,
        sides: &CrosscheckSides,
    ) -> RunComparison {
        let real: Vec<Option<(DecidedRequest, Vec<RatedCandidate>)>> =
            sides.real.requests.iter().map(|went| real_decision(went, sides.nodes)).collect();
        let real_hits: Vec<_> = real.iter().map(|one| one.as_ref().map(|(one, _)| one.hits)).collect();
        let of = |came: &[Option<HitSources>]| token_shares(came, &sides.input_tokens, block_tokens);
        let [independent, replayed] =
            [&sides.independent, &sides.replayed].map(|course| of(&hit_sources(course, real.len())));
        let real_shares = of(&real_hits);
        let points = real_shares.differences(&independent).map(|(_, points)| points.abs());
        let shape = &args.shape;
        let troubles: std::collections::BTreeSet<&String> =
            sides.real.requests.iter().flat_map(|went| &went.problems).collect();
        RunComparison {
            traffic,
            seed,
            lockstep: args.lockstep,
            requests: real.len(),
            unserved: [
                real.iter().filter(|one| one.is_none()).count() as u64,
                sides.independent.report.rejected,
            ],
            instances: shape.instances,
            nodes: shape.nodes,
            routers: shape.routers,
            block_tokens,
            policy: shape.policy.clone(),
            dram: shape.dram.map(|size| size.to_string()),
            ssd: shape.ssd.map(|size| size.to_string()),
            profile: shape.profile.clone(),
            time_scale: shape.time_scale,
            load: per_s.map(|_| args.load),
            per_s,
            late_ms: sides.real.max_delay.as_secs_f64() * 1e3,
            real: real_shares,
            virtual_time: independent,
            led_shares: replayed,
            points: points.into_iter().fold(0.0, f64::max),
            alone: agreement(&real, &sides.independent),
            led: agreement(&real, &sides.replayed),
            troubles: troubles.into_iter().take(8).cloned().collect(),
            slower: sides.prefill_ratio,
            delivery_ms: sides.delivery.as_secs_f64() * 1e3,
            ttft: (!args.lockstep).then(|| timings(sides)),
        }
    }

    /// Whether both sides served everything and, in lockstep, agree on every decision and result.
    pub(super) fn is_sound(&self) -> bool {
        let is_same = |agreement: &DecisionAgreement| agreement.whole == self.requests;
        self.unserved == [0, 0] && (!self.lockstep || is_same(&self.alone) && is_same(&self.led))
    }
}

/// The largest mean difference of a share over all runs, in percentage points. Absolute differences
/// are averaged, so runs that differ in opposite directions do not cancel out.
pub(super) fn mean_points(all: &[RunComparison]) -> f64 {
    let mut sums = [0.0; 5];
    for compared in all {
        let differences = compared.real.differences(&compared.virtual_time);
        sums.iter_mut().zip(differences).for_each(|(sum, (_, points))| *sum += f64::abs(points));
    }
    sums.into_iter().map(|sum: f64| sum / all.len().max(1) as f64).fold(0.0, f64::max)
}

fn real_decision(record: &RequestRecord, nodes: u32) -> Option<(DecidedRequest, Vec<RatedCandidate>)> {
    let decision = record.decision.as_ref()?;
    let hits = record.sample.hit_blocks;
    let mut by_source = HitSources { dram: hits.dram, ssd: hits.ssd, ..HitSources::default() };
    // Hits are a prefix, so they belong to the first sources.
    let mut left = hits.sum();
    for source in &decision.sources {
        let hit = source.len_blocks.min(left);
        left -= hit;
        let is_own = source.node == decision.instance && decision.instance <= nodes;
        *(if is_own { &mut by_source.own } else { &mut by_source.others }) += hit;
    }
    let source = |source: &pb::Source| (source.node, source.tier, source.start_blocks, source.len_blocks);
    let one = DecidedRequest {
        instance: decision.instance,
        sources: decision.sources.iter().map(source).collect(),
        save_to: decision.save_to.as_ref().map(|holder| holder.node),
        hits: by_source,
    };
    let weighed = |candidate: &pb::Candidate| {
        let pb::Prediction { queue_us, transfer_us, prefill_us, .. } =
            candidate.predicted.unwrap_or_default();
        RatedCandidate {
            instance: candidate.instance,
            parts_us: [queue_us, transfer_us, prefill_us],
            overlap_blocks: candidate.overlap_blocks,
            is_open: candidate.filtered.is_empty(),
        }
    };
    Some((one, decision.candidates.iter().map(weighed).collect()))
}

fn virtual_decision(decision: &Decision, hits: HitSources) -> (DecidedRequest, Vec<RatedCandidate>) {
    let source = |source: &kv_core::schedule::Source| {
        (source.node.0, source.tier as u32, source.start_blocks, source.len_blocks)
    };
    let one = DecidedRequest {
        instance: decision.instance.0,
        sources: decision.sources.iter().map(source).collect(),
        save_to: decision.save_to.as_ref().map(|holder| holder.node.0),
        hits,
    };
    let weighed = |candidate: &kv_core::schedule::Candidate| {
        let Prediction { transfer_us, prefill_us, .. } = candidate.predicted;
        let waits_us = candidate.predicted.ttft_us().saturating_sub(transfer_us).saturating_sub(prefill_us);
        RatedCandidate {
            instance: candidate.instance.0,
            parts_us: [waits_us, transfer_us, prefill_us],
            overlap_blocks: candidate.overlap_blocks,
            is_open: candidate.filtered.is_none(),
        }
    };
    (one, decision.candidates.iter().map(weighed).collect())
}

/// The hits of each request in a simulated fleet.
fn hit_sources(simulated: &SimulatedRun, requests: usize) -> Vec<Option<HitSources>> {
    let mut all = vec![None; requests];
    for ServedRequest { nth, fetched: [own, others], .. } in &simulated.report.served {
        let of = |tier: Tier| own[tier as usize] + others[tier as usize];
        let came = HitSources {
            own: own.iter().sum(),
            others: others.iter().sum(),
            dram: of(Tier::Dram),
            ssd: of(Tier::Ssd),
        };
        all[*nth] = Some(came);
    }
    all
}

fn agreement(
    real: &[Option<(DecidedRequest, Vec<RatedCandidate>)>],
    simulated: &SimulatedRun,
) -> DecisionAgreement {
    let hits = hit_sources(simulated, real.len());
    let mut sum = DecisionAgreement::default();
    let mut weighed_count = 0usize;
    for (nth, real) in real.iter().enumerate() {
        let decided = simulated.decided.get(nth).and_then(Option::as_ref);
        let (Some((here, weighed)), Some(decided)) = (real, decided) else { continue };
        let (there, theirs) = virtual_decision(decided, hits[nth].unwrap_or_default());
        sum.decided += 1;
        for [queue, transfer, prefill] in later_ms(weighed, &theirs) {
            weighed_count += 1;
            let later_ms = queue + transfer + prefill;
            sum.later_ms += later_ms;
            sum.apart_ms += later_ms.abs();
            sum.later.queue += queue;
            sum.later.transfer += transfer;
            sum.later.prefill += prefill;
        }
        if *here != there {
            let of = |one: &DecidedRequest, all: &[RatedCandidate]| {
                let all: Vec<_> =
                    all.iter().map(|one| (one.instance, one.ttft_us(), one.overlap_blocks)).collect();
                format!("{one:?} of (instance, us, blocks there) {all:?}")
            };
            let describe = || {
                format!(
                    "request {nth}: {} in the real fleet, {} in virtual time",
                    of(here, weighed),
                    of(&there, &theirs)
                )
            };
            sum.first.get_or_insert_with(describe);
        }
        if here.instance == there.instance {
            sum.instance += 1;
            sum.whole += usize::from(*here == there);
            continue;
        }
        let why = &mut sum.why;
        *match disagreement_reason([weighed, &theirs], [here.instance, there.instance]) {
            DisagreementReason::LeftOut => &mut why.left_out,
            DisagreementReason::Blocks => &mut why.blocks,
            DisagreementReason::Tie => &mut why.tie,
            DisagreementReason::Predicted => &mut why.predicted,
        } += 1;
    }
    let DecisionAgreement { later_ms, apart_ms, later: TtftParts { queue, transfer, prefill }, .. } =
        &mut sum;
    for sum in [later_ms, apart_ms, queue, transfer, prefill] {
        *sum /= weighed_count.max(1) as f64;
    }
    sum
}

/// How much later the first token is on side `here` than on `there`, by part, at each instance that
/// both rated.
fn later_ms<'a>(
    here: &'a [RatedCandidate],
    there: &'a [RatedCandidate],
) -> impl Iterator<Item = [f64; 3]> + 'a {
    here.iter().filter(|one| one.is_open).filter_map(|one| {
        let other = there.iter().find(|other| other.instance == one.instance && other.is_open)?;
        let later_ms = |part: usize| (one.parts_us[part] as f64 - other.parts_us[part] as f64) / 1e3;
        Some([0, 1, 2].map(later_ms))
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DisagreementReason {
    LeftOut,
    Blocks,
    Tie,
    Predicted,
}

/// Why two sides with these ratings chose different instances.
fn disagreement_reason(sides: [&Vec<RatedCandidate>; 2], chosen: [u32; 2]) -> DisagreementReason {
    let of = |side: usize, instance: u32| sides[side].iter().find(|one| one.instance == instance);
    let differ = |what: fn(&RatedCandidate) -> u32| {
        sides[0].iter().any(|one| of(1, one.instance).map(what) != Some(what(one)))
    };
    if differ(|one| one.is_open.into()) {
        return DisagreementReason::LeftOut;
    }
    if differ(|one| one.overlap_blocks) {
        return DisagreementReason::Blocks;
    }
    let ttft_us = |side, instance| of(side, instance).map(RatedCandidate::ttft_us);
    if (0..2).any(|side| ttft_us(side, chosen[0]) == ttft_us(side, chosen[1])) {
        return DisagreementReason::Tie;
    }
    DisagreementReason::Predicted
}

/// Sums over all served requests, in percent of their tokens.
fn token_shares(hits: &[Option<HitSources>], input_tokens: &[u32], block_tokens: u32) -> TokenShares {
    let (mut whole, mut sums) = (0.0, [0.0; 5]);
    for (came, input) in hits.iter().zip(input_tokens) {
        let Some(came) = came else { continue };
        let mut left = u64::from(*input);
        // A partially filled last block has fewer tokens.
        let part = |left: &mut u64, blocks: u32| {
            let tokens = (u64::from(blocks) * u64::from(block_tokens)).min(*left);
            *left -= tokens;
            tokens as f64
        };
        let by_node = [part(&mut left, came.own), part(&mut left, came.others)];
        let recomputed = left as f64;
        let mut left = u64::from(*input);
        let by_tier = [part(&mut left, came.dram), part(&mut left, came.ssd)];
        let of_request = by_node.into_iter().chain(by_tier).chain([recomputed]);
        sums.iter_mut().zip(of_request).for_each(|(sum, tokens)| *sum += tokens);
        whole += f64::from(*input);
    }
    let [own_node, other_nodes, dram, ssd, recomputed] =
        sums.map(|sum| if whole > 0.0 { 100.0 * sum / whole } else { 0.0 });
    TokenShares { own_node, other_nodes, dram, ssd, recomputed }
}

/// TTFT as measured by instances, and as simulated.
fn timings(sides: &CrosscheckSides) -> [Timing; 3] {
    let real = sides.real.requests.iter().enumerate().filter_map(|(nth, went)| {
        let timed = went.sample.timed?;
        Some((nth, went.sample.predicted_ttft_us * 1_000, (timed.queue_us + timed.prefill_us) * 1_000))
    });
    let there = |course: &SimulatedRun| {
        let served = course.report.served.iter();
        timing(served.map(|served| (served.nth, served.predicted_ns, served.ttft_ns)).collect())
    };
    [timing(real.collect()), there(&sides.independent), there(&sides.replayed)]
}

/// Each item is (request number, predicted, observed).
fn timing(all: Vec<(usize, u64, u64)>) -> Timing {
    let mean = |sum: f64, count: usize| sum / count.max(1) as f64;
    let mean_ms = mean(all.iter().map(|(.., seen)| *seen as f64 / 1e6).sum(), all.len());
    let evaluated: Vec<_> = all.into_iter().filter(|(nth, ..)| *nth >= WARMUP_REQUESTS).collect();
    let off = |predicted: &u64, seen: &u64| *predicted as f64 - *seen as f64;
    let mut errors: Vec<f64> = evaluated
        .iter()
        .map(|(_, predicted, seen)| off(predicted, seen).abs() / (*seen).max(1) as f64)
        .collect();
    errors.sort_by(f64::total_cmp);
    let seen: f64 = evaluated.iter().map(|(.., seen)| *seen as f64).sum();
    let bias = evaluated.iter().map(|(_, predicted, seen)| off(predicted, seen)).sum::<f64>() / seen.max(1.0);
    Timing { mean_ms, error: errors.get(errors.len() / 2).copied().unwrap_or_default(), bias }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_tokens_once_and_partial_last_blocks() {
        let hits = |own, others, dram, ssd| Some(HitSources { own, others, dram, ssd });
        // 3 of 4 blocks (2 own, 1 other), then 3 blocks with a half-filled last one, and an
        // unserved request.
        let all = [hits(2, 1, 3, 0), hits(0, 3, 1, 2), None];
        let shares = token_shares(&all, &[400, 250, 999], 100);
        let of = |tokens: f64| 100.0 * tokens / 650.0;
        let expected = [of(200.0), of(350.0), of(400.0), of(150.0), of(100.0)];
        for ((name, share), expected) in shares.all().into_iter().zip(expected) {
            assert!((share - expected).abs() < 1e-9, "{name}: {share} is not {expected}");
        }
    }

    fn weighed(all: &[(u32, u64, u32, bool)]) -> Vec<RatedCandidate> {
        let one = |&(instance, ttft_us, overlap_blocks, is_open)| RatedCandidate {
            instance,
            parts_us: [ttft_us, 0, 0],
            overlap_blocks,
            is_open,
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn disagreements_have_the_first_matching_reason() {
        let here = weighed(&[(1, 10, 4, true), (2, 20, 0, true)]);
        let reason_against =
            |there: &[(u32, u64, u32, bool)]| disagreement_reason([&here, &weighed(there)], [1, 2]);
        assert_eq!(reason_against(&[(2, 9, 0, true), (1, 12, 4, false)]), DisagreementReason::LeftOut);
        assert_eq!(reason_against(&[(2, 9, 3, true), (1, 12, 4, true)]), DisagreementReason::Blocks);
        assert_eq!(reason_against(&[(2, 9, 0, true), (1, 9, 4, true)]), DisagreementReason::Tie);
        assert_eq!(reason_against(&[(2, 9, 0, true), (1, 12, 4, true)]), DisagreementReason::Predicted);
    }

    #[test]
    fn hits_belong_to_the_first_sources() {
        let source = |node, start_blocks, len_blocks| pb::Source {
            node,
            start_blocks,
            len_blocks,
            tier: 1,
            ..pb::Source::default()
        };
        let mut went = RequestRecord {
            decision: Some(pb::Decision {
                instance: 2,
                sources: vec![source(2, 0, 3), source(1, 3, 4)],
                ..pb::Decision::default()
            }),
            ..RequestRecord::default()
        };
        went.sample.hit_blocks.dram = 5;
        let hits_with_nodes =
            |nodes| real_decision(&went, nodes).map(|(one, _)| (one.hits.own, one.hits.others));
        assert_eq!(hits_with_nodes(2), Some((3, 2)));
        assert_eq!(hits_with_nodes(1), Some((0, 5)), "it has no node of its own");
    }

    #[test]
    fn warmup_requests_are_not_evaluated() {
        let all = (0..WARMUP_REQUESTS + 3)
            .map(|nth| (nth, if nth < WARMUP_REQUESTS { 0 } else { 150 }, 100))
            .collect();
        let Timing { mean_ms, error, bias } = timing(all);
        assert!(
            (mean_ms - 100.0 / 1e6).abs() < 1e-12 && (error - 0.5).abs() < 1e-9 && (bias - 0.5).abs() < 1e-9
        );
    }
}
