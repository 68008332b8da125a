//! The two sides held against each other: request by request what was decided, and in sum where the tokens of prompts came from.
//!
//! Not here: how it is said (`show.rs`).

use kv_core::id::Tier;
use kv_core::schedule::{Decision, Prediction};
use kvfleet_proto::pb;
use kvfleet_sim::fleet::Served;
use serde::Serialize;

use super::real::Went;
use super::twin::{Course, Twins};
use crate::args::CrosscheckArgs;

/// Requests of which predictions are not judged: what a router has to learn first.
const WARM: usize = 50;

/// By how many points each share of the tokens may differ.
pub(super) const POINTS_MAX: f64 = 1.0;

/// One run on both fleets.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Compared {
    pub(super) traffic: String,
    pub(super) seed: u64,
    pub(super) lockstep: bool,
    pub(super) requests: usize,
    /// Requests that the real fleet did not serve, and that the other one turned away.
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
    /// Share of what the fleet gets through, and requests a second; nothing in lockstep.
    pub(super) load: Option<f64>,
    pub(super) per_s: Option<f64>,
    /// By how much a request was sent later than it was to be, at most.
    pub(super) late_ms: f64,
    /// Of all tokens of prompts, in percent.
    pub(super) real: Shares,
    pub(super) virtual_time: Shares,
    /// The same of the fleet that is led.
    pub(super) led_shares: Shares,
    /// The share that differs most, in points.
    pub(super) points: f64,
    /// Against the fleet that goes its own way.
    pub(super) alone: Agreement,
    /// Against the one that sends every request where the real one did, and says where it would have.
    pub(super) led: Agreement,
    /// Attempts that failed and sources that fell short in the real fleet.
    pub(super) troubles: Vec<String>,
    /// How many times as long as the profile says prefills took in the real fleet, which is how slow the machine was; the other fleet's take as long.
    pub(super) slower: f64,
    /// And how long requests were on their way from a decision to the instance, in the mean.
    pub(super) delivery_ms: f64,
    /// Mean time to first token in milliseconds, and how far predictions are off: median, and bias of the sums; in the real fleet, in the one in virtual
    /// time, and in the one that is led. Nothing where compute takes no time.
    pub(super) ttft: Option<[Timing; 3]>,
}

/// Times to first token of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Timing {
    pub(super) mean_ms: f64,
    pub(super) error: f64,
    pub(super) bias: f64,
}

/// Where the tokens of prompts came from, in percent: from whom, and the same by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Shares {
    pub(super) own_node: f64,
    pub(super) other_nodes: f64,
    pub(super) dram: f64,
    pub(super) ssd: f64,
    pub(super) recomputed: f64,
}

impl Shares {
    /// With their names.
    pub(super) fn all(&self) -> [(&'static str, f64); 5] {
        [
            ("own node", self.own_node),
            ("other nodes", self.other_nodes),
            ("from DRAM", self.dram),
            ("from SSD", self.ssd),
            ("recomputed", self.recomputed),
        ]
    }

    /// By how many points each is more than another's.
    pub(super) fn differences(&self, other: &Shares) -> [(&'static str, f64); 5] {
        let others = other.all();
        let mut all = self.all();
        all.iter_mut().zip(others).for_each(|((_, share), (_, other))| *share -= other);
        all
    }
}

/// In how many requests two fleets agree, and why not in the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Agreement {
    /// Requests that both decided.
    pub(super) decided: usize,
    /// Those of the same instance.
    pub(super) instance: usize,
    /// Those of which all is the same: sources, where to save, and what came.
    pub(super) whole: usize,
    pub(super) why: Why,
    /// How much later the first token would come really than in virtual time, in milliseconds, as predicted at all instances: the mean, and without regard
    /// to which is the later.
    pub(super) later_ms: f64,
    pub(super) apart_ms: f64,
    /// The mean by part.
    pub(super) later: Parts,
    /// The first request of which something differs, and what the two decided and got.
    pub(super) first: Option<String>,
}

/// Parts of a predicted time to first token, in milliseconds. Waiting has those in it who come later and go before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Parts {
    pub(super) queue: f64,
    pub(super) transfer: f64,
    pub(super) prefill: f64,
}

/// Requests of another instance, by the first of these that holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Why {
    /// One side left out instances that the other did not: reports that were too old, or full queues.
    pub(super) left_out: usize,
    /// The two sides knew of other blocks at the instances' own nodes.
    pub(super) blocks: usize,
    /// The two instances were equally good on one of the sides.
    pub(super) tie: usize,
    /// What was predicted differs: queues as they were reported, and what was learnt.
    pub(super) predicted: usize,
}

/// What one side decided of a request, and what came.
#[derive(Clone, Debug, PartialEq, Eq)]
struct One {
    instance: u32,
    /// (node, tier, first block, blocks) of each.
    sources: Vec<(u32, u32, u32, u32)>,
    save_to: Option<u32>,
    came: Came,
}

/// Blocks that were not computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Came {
    own: u32,
    others: u32,
    dram: u32,
    ssd: u32,
}

/// An instance as one side weighed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Weighed {
    instance: u32,
    /// Waiting, transfer and prefill.
    parts_us: [u64; 3],
    overlap_blocks: u32,
    is_open: bool,
}

impl Weighed {
    fn ttft_us(&self) -> u64 {
        self.parts_us.iter().fold(0, |sum, part| sum.saturating_add(*part))
    }
}

impl Compared {
    pub(super) fn new(
        args: &CrosscheckArgs,
        (traffic, seed, block_tokens, per_s): (String, u64, u32, Option<f64>),
        twins: &Twins,
    ) -> Compared {
        let real: Vec<Option<(One, Vec<Weighed>)>> =
            twins.real.went.iter().map(|went| real_one(went, twins.nodes)).collect();
        let came_real: Vec<_> = real.iter().map(|one| one.as_ref().map(|(one, _)| one.came)).collect();
        let of = |came: &[Option<Came>]| shares(came, &twins.input_tokens, block_tokens);
        let [there, led] = [&twins.alone, &twins.led].map(|course| of(&came(course, real.len())));
        let here = of(&came_real);
        let points = here.differences(&there).map(|(_, points)| points.abs());
        let shape = &args.shape;
        let troubles: std::collections::BTreeSet<&String> =
            twins.real.went.iter().flat_map(|went| &went.troubles).collect();
        Compared {
            traffic,
            seed,
            lockstep: args.lockstep,
            requests: real.len(),
            unserved: [real.iter().filter(|one| one.is_none()).count() as u64, twins.alone.report.rejected],
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
            late_ms: twins.real.late.as_secs_f64() * 1e3,
            real: here,
            virtual_time: there,
            led_shares: led,
            points: points.into_iter().fold(0.0, f64::max),
            alone: agreement(&real, &twins.alone),
            led: agreement(&real, &twins.led),
            troubles: troubles.into_iter().take(8).cloned().collect(),
            slower: twins.slower,
            delivery_ms: twins.delivery.as_secs_f64() * 1e3,
            ttft: (!args.lockstep).then(|| timings(twins)),
        }
    }

    /// Whether everything was served on both sides, and without time every decision and all that came is the same.
    pub(super) fn is_sound(&self) -> bool {
        let is_same = |agreement: &Agreement| agreement.whole == self.requests;
        self.unserved == [0, 0] && (!self.lockstep || is_same(&self.alone) && is_same(&self.led))
    }
}

/// By how many points the share differs most that does, in the mean over all runs: one run is one draw. Runs that differ in opposite directions
/// do not make up for each other.
pub(super) fn points(all: &[Compared]) -> f64 {
    let mut sums = [0.0; 5];
    for compared in all {
        let differences = compared.real.differences(&compared.virtual_time);
        sums.iter_mut().zip(differences).for_each(|(sum, (_, points))| *sum += f64::abs(points));
    }
    sums.into_iter().map(|sum: f64| sum / all.len().max(1) as f64).fold(0.0, f64::max)
}

fn real_one(went: &Went, nodes: u32) -> Option<(One, Vec<Weighed>)> {
    let decision = went.decision.as_ref()?;
    let hits = went.sample.hit_blocks;
    let mut came = Came { dram: hits.dram, ssd: hits.ssd, ..Came::default() };
    // Hits lead: they are of the first sources.
    let mut left = hits.sum();
    for source in &decision.sources {
        let hit = source.len_blocks.min(left);
        left -= hit;
        let is_own = source.node == decision.instance && decision.instance <= nodes;
        *(if is_own { &mut came.own } else { &mut came.others }) += hit;
    }
    let source = |source: &pb::Source| (source.node, source.tier, source.start_blocks, source.len_blocks);
    let one = One {
        instance: decision.instance,
        sources: decision.sources.iter().map(source).collect(),
        save_to: decision.save_to.as_ref().map(|holder| holder.node),
        came,
    };
    let weighed = |candidate: &pb::Candidate| {
        let pb::Prediction { queue_us, transfer_us, prefill_us, .. } =
            candidate.predicted.unwrap_or_default();
        Weighed {
            instance: candidate.instance,
            parts_us: [queue_us, transfer_us, prefill_us],
            overlap_blocks: candidate.overlap_blocks,
            is_open: candidate.filtered.is_empty(),
        }
    };
    Some((one, decision.candidates.iter().map(weighed).collect()))
}

fn virtual_one(decision: &Decision, came: Came) -> (One, Vec<Weighed>) {
    let source = |source: &kv_core::schedule::Source| {
        (source.node.0, source.tier as u32, source.start_blocks, source.len_blocks)
    };
    let one = One {
        instance: decision.instance.0,
        sources: decision.sources.iter().map(source).collect(),
        save_to: decision.save_to.as_ref().map(|holder| holder.node.0),
        came,
    };
    let weighed = |candidate: &kv_core::schedule::Candidate| {
        let Prediction { transfer_us, prefill_us, .. } = candidate.predicted;
        let waits_us = candidate.predicted.ttft_us().saturating_sub(transfer_us).saturating_sub(prefill_us);
        Weighed {
            instance: candidate.instance.0,
            parts_us: [waits_us, transfer_us, prefill_us],
            overlap_blocks: candidate.overlap_blocks,
            is_open: candidate.filtered.is_none(),
        }
    };
    (one, decision.candidates.iter().map(weighed).collect())
}

/// What came of each request of a fleet in virtual time.
fn came(course: &Course, requests: usize) -> Vec<Option<Came>> {
    let mut all = vec![None; requests];
    for Served { nth, fetched: [own, others], .. } in &course.report.served {
        let of = |tier: Tier| own[tier as usize] + others[tier as usize];
        let came = Came {
            own: own.iter().sum(),
            others: others.iter().sum(),
            dram: of(Tier::Dram),
            ssd: of(Tier::Ssd),
        };
        all[*nth] = Some(came);
    }
    all
}

fn agreement(real: &[Option<(One, Vec<Weighed>)>], course: &Course) -> Agreement {
    let came = came(course, real.len());
    let mut sum = Agreement::default();
    let mut weighed_count = 0usize;
    for (nth, real) in real.iter().enumerate() {
        let decided = course.decided.get(nth).and_then(Option::as_ref);
        let (Some((here, weighed)), Some(decided)) = (real, decided) else { continue };
        let (there, theirs) = virtual_one(decided, came[nth].unwrap_or_default());
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
            let of = |one: &One, all: &[Weighed]| {
                let all: Vec<_> =
                    all.iter().map(|one| (one.instance, one.ttft_us(), one.overlap_blocks)).collect();
                format!("{one:?} of (instance, us, blocks there) {all:?}")
            };
            let say = || {
                format!(
                    "request {nth}: {} really, {} in virtual time",
                    of(here, weighed),
                    of(&there, &theirs)
                )
            };
            sum.first.get_or_insert_with(say);
        }
        if here.instance == there.instance {
            sum.instance += 1;
            sum.whole += usize::from(*here == there);
            continue;
        }
        let why = &mut sum.why;
        *match reason([weighed, &theirs], [here.instance, there.instance]) {
            Reason::LeftOut => &mut why.left_out,
            Reason::Blocks => &mut why.blocks,
            Reason::Tie => &mut why.tie,
            Reason::Predicted => &mut why.predicted,
        } += 1;
    }
    let Agreement { later_ms, apart_ms, later: Parts { queue, transfer, prefill }, .. } = &mut sum;
    for sum in [later_ms, apart_ms, queue, transfer, prefill] {
        *sum /= weighed_count.max(1) as f64;
    }
    sum
}

/// How much later the first token would come on one side than on the other, by part, at each instance that both weighed.
fn later_ms<'a>(here: &'a [Weighed], there: &'a [Weighed]) -> impl Iterator<Item = [f64; 3]> + 'a {
    here.iter().filter(|one| one.is_open).filter_map(|one| {
        let other = there.iter().find(|other| other.instance == one.instance && other.is_open)?;
        let later_ms = |part: usize| (one.parts_us[part] as f64 - other.parts_us[part] as f64) / 1e3;
        Some([0, 1, 2].map(later_ms))
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    LeftOut,
    Blocks,
    Tie,
    Predicted,
}

/// Why two sides that weighed instances so chose other ones.
fn reason(sides: [&Vec<Weighed>; 2], chosen: [u32; 2]) -> Reason {
    let of = |side: usize, instance: u32| sides[side].iter().find(|one| one.instance == instance);
    let differ = |what: fn(&Weighed) -> u32| {
        sides[0].iter().any(|one| of(1, one.instance).map(what) != Some(what(one)))
    };
    if differ(|one| one.is_open.into()) {
        return Reason::LeftOut;
    }
    if differ(|one| one.overlap_blocks) {
        return Reason::Blocks;
    }
    let ttft_us = |side, instance| of(side, instance).map(Weighed::ttft_us);
    if (0..2).any(|side| ttft_us(side, chosen[0]) == ttft_us(side, chosen[1])) {
        return Reason::Tie;
    }
    Reason::Predicted
}

/// Sums over all requests that were served, in percent of their tokens.
fn shares(came: &[Option<Came>], input_tokens: &[u32], block_tokens: u32) -> Shares {
    let (mut whole, mut sums) = (0.0, [0.0; 5]);
    for (came, input) in came.iter().zip(input_tokens) {
        let Some(came) = came else { continue };
        let mut left = u64::from(*input);
        // A partly filled last block has fewer tokens.
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
    Shares { own_node, other_nodes, dram, ssd, recomputed }
}

/// Times to first token as instances measured them, and those in virtual time.
fn timings(twins: &Twins) -> [Timing; 3] {
    let real = twins.real.went.iter().enumerate().filter_map(|(nth, went)| {
        let timed = went.sample.timed?;
        Some((nth, went.sample.predicted_ttft_us * 1_000, (timed.queue_us + timed.prefill_us) * 1_000))
    });
    let there = |course: &Course| {
        let served = course.report.served.iter();
        timing(served.map(|served| (served.nth, served.predicted_ns, served.ttft_ns)).collect())
    };
    [timing(real.collect()), there(&twins.alone), there(&twins.led)]
}

/// Of (number, predicted, observed).
fn timing(all: Vec<(usize, u64, u64)>) -> Timing {
    let mean = |sum: f64, count: usize| sum / count.max(1) as f64;
    let mean_ms = mean(all.iter().map(|(.., seen)| *seen as f64 / 1e6).sum(), all.len());
    let judged: Vec<_> = all.into_iter().filter(|(nth, ..)| *nth >= WARM).collect();
    let off = |predicted: &u64, seen: &u64| *predicted as f64 - *seen as f64;
    let mut errors: Vec<f64> = judged
        .iter()
        .map(|(_, predicted, seen)| off(predicted, seen).abs() / (*seen).max(1) as f64)
        .collect();
    errors.sort_by(f64::total_cmp);
    let seen: f64 = judged.iter().map(|(.., seen)| *seen as f64).sum();
    let bias = judged.iter().map(|(_, predicted, seen)| off(predicted, seen)).sum::<f64>() / seen.max(1.0);
    Timing { mean_ms, error: errors.get(errors.len() / 2).copied().unwrap_or_default(), bias }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_once_and_a_last_block_by_what_is_in_it() {
        let came = |own, others, dram, ssd| Some(Came { own, others, dram, ssd });
        // 2 + 1 of 4 blocks, then all 3 of which the last is half full, and one that was not served.
        let all = [came(2, 1, 3, 0), came(0, 3, 1, 2), None];
        let shares = shares(&all, &[400, 250, 999], 100);
        let of = |tokens: f64| 100.0 * tokens / 650.0;
        let expected = [of(200.0), of(350.0), of(400.0), of(150.0), of(100.0)];
        for ((name, share), expected) in shares.all().into_iter().zip(expected) {
            assert!((share - expected).abs() < 1e-9, "{name}: {share} is not {expected}");
        }
    }

    fn weighed(all: &[(u32, u64, u32, bool)]) -> Vec<Weighed> {
        let one = |&(instance, ttft_us, overlap_blocks, is_open)| Weighed {
            instance,
            parts_us: [ttft_us, 0, 0],
            overlap_blocks,
            is_open,
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn a_difference_has_the_first_reason_that_holds() {
        let here = weighed(&[(1, 10, 4, true), (2, 20, 0, true)]);
        let because = |there: &[(u32, u64, u32, bool)]| reason([&here, &weighed(there)], [1, 2]);
        assert_eq!(because(&[(2, 9, 0, true), (1, 12, 4, false)]), Reason::LeftOut);
        assert_eq!(because(&[(2, 9, 3, true), (1, 12, 4, true)]), Reason::Blocks);
        assert_eq!(because(&[(2, 9, 0, true), (1, 9, 4, true)]), Reason::Tie);
        assert_eq!(because(&[(2, 9, 0, true), (1, 12, 4, true)]), Reason::Predicted);
    }

    #[test]
    fn hits_are_of_the_first_sources() {
        let source = |node, start_blocks, len_blocks| pb::Source {
            node,
            start_blocks,
            len_blocks,
            tier: 1,
            ..pb::Source::default()
        };
        let mut went = Went {
            decision: Some(pb::Decision {
                instance: 2,
                sources: vec![source(2, 0, 3), source(1, 3, 4)],
                ..pb::Decision::default()
            }),
            ..Went::default()
        };
        went.sample.hit_blocks.dram = 5;
        let came = |nodes| real_one(&went, nodes).map(|(one, _)| (one.came.own, one.came.others));
        assert_eq!(came(2), Some((3, 2)));
        assert_eq!(came(1), Some((0, 5)), "it has no node of its own");
    }

    #[test]
    fn predictions_are_judged_behind_the_first() {
        let all = (0..WARM + 3).map(|nth| (nth, if nth < WARM { 0 } else { 150 }, 100)).collect();
        let Timing { mean_ms, error, bias } = timing(all);
        assert!(
            (mean_ms - 100.0 / 1e6).abs() < 1e-12 && (error - 0.5).abs() < 1e-9 && (bias - 0.5).abs() < 1e-9
        );
    }
}
