//! Characterises a trace as the ATC '25 paper does: ideal hit rate, skew and speed of reuse,
//! lifetime of blocks, and turns of conversations.
//!
//! One pass; memory is bounded by the number of unique blocks. Not here: hit rates of policies
//! ([`curve`]) and published numbers of similar traces ([`published`]).

pub mod curve;
mod histogram;
pub mod published;
mod turns;

pub use turns::TurnStats;

use crate::trace::Request;
use histogram::TimeHistogram;
use kv_core::id::{Category, RequestKind};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Turns with a separate row; later ones share the last, as they share a curve in the policy.
const TURNS_DISTINCT_MAX: u8 = 7;

/// One point of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// Horizontal coordinate.
    pub x: f64,
    /// Vertical coordinate.
    pub y: f64,
}

/// Percentiles of a time, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half lie below.
    pub p50_s: f64,
    /// Nine in ten lie below.
    pub p90_s: f64,
    /// Ninety-nine in a hundred lie below.
    pub p99_s: f64,
    /// The largest.
    pub max_s: f64,
}

/// Time from one use of a block to the next, for blocks last used by one category (or by all).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReuseTimes {
    /// Type of the requests; `all` for the whole trace.
    pub kind: &'static str,
    /// Turn of the requests; the last row holds this and all later turns, 0 is unknown or all.
    pub turn: u8,
    /// Number of reuses.
    pub reuses: u64,
    /// Mean, in seconds: the parameter of the exponential fitted to them.
    pub mean_s: f64,
    /// Largest gap between the fitted and the measured curve, 0 to 1.
    pub fit_distance: f64,
    /// Share of reuses within 10 s.
    pub within_10_s: f64,
    /// Share of reuses within 10 min.
    pub within_10_min: f64,
    /// Percentiles, to 3 %.
    pub percentiles: Percentiles,
    /// Share of reuses (y) within a time in seconds (x).
    pub cdf: Vec<CurvePoint>,
}

/// Share of a type of request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KindShare {
    /// Type of the requests.
    pub kind: &'static str,
    /// Requests of the type.
    pub requests: u64,
    /// Share of all requests.
    pub share: f64,
    /// Share of the type's conversations that reach a second turn.
    pub multi_turn: f64,
    /// Share of all hits in requests of the type.
    pub share_of_hits: f64,
}

/// Characteristics of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Characteristics {
    /// Requests.
    pub requests: u64,
    /// First to last arrival, in seconds.
    pub duration_s: f64,
    /// Input tokens.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Tokens per block, of the first request.
    pub block_tokens: u32,
    /// Blocks requested.
    pub block_accesses: u64,
    /// Unique blocks.
    pub unique_blocks: u64,
    /// Hits with unbounded capacity.
    pub ideal_hits: u64,
    /// These hits over accesses, 0 to 1.
    pub ideal_hit_rate: f64,
    /// Share of reuses of the most reused tenth of the blocks.
    pub reuse_share_of_top_tenth: f64,
    /// Share of reuses (y) of the most reused share of blocks (x).
    pub skew: Vec<CurvePoint>,
    /// Share of blocks that are never used again.
    pub used_once: f64,
    /// Reuse times of the whole trace.
    pub reuse: ReuseTimes,
    /// Reuse times per category, for categories with reuses.
    pub reuse_by_category: Vec<ReuseTimes>,
    /// Time from first to last use of a block.
    pub life: Percentiles,
    /// The same for blocks used at least twice.
    pub life_of_reused: Percentiles,
    /// Turn statistics; `None` if the trace has no turns.
    pub turns: Option<TurnStats>,
    /// Types of requests.
    pub kinds: Vec<KindShare>,
    /// Share of all hits in first-turn API requests.
    pub hit_share_of_single_turn_api: f64,
}

/// State of a block while a trace is read.
#[derive(Clone, Copy)]
struct BlockUses {
    first_us: u64,
    last_us: u64,
    uses: u32,
    category: Category,
}

/// Collects statistics of a trace, request by request.
#[derive(Default)]
pub struct Collector {
    uses_by_block: HashMap<u64, BlockUses>,
    reuse: BTreeMap<Category, TimeHistogram>,
    turns: turns::TurnCounts,
    hits_of_kind: [u64; RequestKind::ALL.len()],
    single_turn_api_hits: u64,
    requests: u64,
    arrivals_us: Option<(u64, u64)>,
    tokens: (u64, u64),
    block_tokens: u32,
    accesses: u64,
}

impl Collector {
    /// A collector before the first request.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next request, in order of arrival.
    pub fn add(&mut self, request: &Request) {
        let now_us = request.arrival_us;
        self.requests += 1;
        self.arrivals_us = Some((self.arrivals_us.map_or(now_us, |(first, _)| first), now_us));
        self.tokens.0 += u64::from(request.input_tokens);
        self.tokens.1 += u64::from(request.output_tokens);
        self.accesses += request.blocks.len() as u64;
        if self.block_tokens == 0 {
            self.block_tokens = request.block_tokens;
        }
        self.turns.add(request.category.kind, request.turn);
        let hits =
            request.blocks.iter().take_while(|block| self.uses_by_block.contains_key(block)).count() as u64;
        self.hits_of_kind[request.category.kind as usize] += hits;
        if request.category.kind == RequestKind::Api && request.turn <= 1 {
            self.single_turn_api_hits += hits;
        }
        let turn = request.category.conversation_turn.min(TURNS_DISTINCT_MAX);
        let category = Category { conversation_turn: turn, ..request.category };
        request.blocks.iter().for_each(|&block| self.record_use(block, category, now_us));
    }

    fn record_use(&mut self, block: u64, category: Category, now_us: u64) {
        let fresh = BlockUses { first_us: now_us, last_us: now_us, uses: 0, category };
        let seen = self.uses_by_block.entry(block).or_insert(fresh);
        if seen.uses > 0 {
            let reuse = self.reuse.entry(seen.category).or_default();
            reuse.add(now_us.saturating_sub(seen.last_us));
        }
        *seen = BlockUses { last_us: now_us, uses: seen.uses.saturating_add(1), category, ..*seen };
    }

    /// The characteristics of the added requests.
    #[must_use]
    pub fn finish(self) -> Characteristics {
        let ideal_hits: u64 = self.hits_of_kind.iter().sum();
        let mut all = TimeHistogram::default();
        self.reuse.values().for_each(|histogram| all.merge(histogram));
        let skew = skew(self.uses_by_block.values().map(|seen| seen.uses - 1).collect());
        let lives = |least: u32| {
            let chosen = self.uses_by_block.values().filter(|seen| seen.uses >= least);
            percentiles(chosen.map(|seen| seen.last_us - seen.first_us).collect())
        };
        let once = self.uses_by_block.values().filter(|seen| seen.uses == 1).count() as u64;
        let unique_blocks = self.uses_by_block.len() as u64;
        Characteristics {
            requests: self.requests,
            duration_s: self.arrivals_us.map_or(0.0, |(first, last)| seconds((last - first) as f64)),
            input_tokens: self.tokens.0,
            output_tokens: self.tokens.1,
            block_tokens: self.block_tokens,
            block_accesses: self.accesses,
            unique_blocks,
            ideal_hits,
            ideal_hit_rate: share(ideal_hits, self.accesses),
            reuse_share_of_top_tenth: skew.iter().find(|point| point.x >= 0.1).map_or(0.0, |point| point.y),
            skew,
            used_once: share(once, unique_blocks),
            reuse: reuse_times("all", 0, &all),
            reuse_by_category: self
                .reuse
                .iter()
                .map(|(of, times)| reuse_times(of.kind.name(), of.conversation_turn, times))
                .collect(),
            life: lives(1),
            life_of_reused: lives(2),
            turns: self.turns.summary(),
            kinds: self.turns.kinds(&self.hits_of_kind),
            hit_share_of_single_turn_api: share(self.single_turn_api_hits, ideal_hits),
        }
    }
}

/// Characterises the requests of an iterator.
pub fn characterise(requests: impl IntoIterator<Item = Request>) -> Characteristics {
    let mut collector = Collector::new();
    requests.into_iter().for_each(|request| collector.add(&request));
    collector.finish()
}

/// `part` over `whole`, 0 to 1; 0 if `whole` is 0.
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn seconds(us: f64) -> f64 {
    us / 1e6
}

/// Smallest value with at least `share` of `sorted` at or below it.
fn quantile(sorted: &[u64], share: f64) -> u64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0)
}

fn percentiles(mut times_us: Vec<u64>) -> Percentiles {
    times_us.sort_unstable();
    let at = |share| seconds(quantile(&times_us, share) as f64);
    Percentiles { p50_s: at(0.5), p90_s: at(0.9), p99_s: at(0.99), max_s: at(1.0) }
}

/// Shares of reuses of the most reused 1, 2, … 100 % of the blocks.
fn skew(mut reuses: Vec<u32>) -> Vec<CurvePoint> {
    reuses.sort_unstable_by(|left, right| right.cmp(left));
    let total: u64 = reuses.iter().map(|&count| u64::from(count)).sum();
    let (mut taken, mut sum) = (0, 0);
    let mut point = |percent: usize| {
        let end = reuses.len() * percent / 100;
        sum += reuses[taken..end].iter().map(|&count| u64::from(count)).sum::<u64>();
        taken = end;
        CurvePoint { x: percent as f64 / 100.0, y: share(sum, total) }
    };
    (1..=100).map(&mut point).collect()
}

fn reuse_times(kind: &'static str, turn: u8, times: &TimeHistogram) -> ReuseTimes {
    let at = |share| seconds(times.quantile_us(share));
    ReuseTimes {
        kind,
        turn,
        reuses: times.count(),
        mean_s: seconds(times.mean_us()),
        fit_distance: times.fit().map_or(0.0, |(_, distance)| distance),
        within_10_s: times.share_within(10_000_000),
        within_10_min: times.share_within(600_000_000),
        percentiles: Percentiles { p50_s: at(0.5), p90_s: at(0.9), p99_s: at(0.99), max_s: at(1.0) },
        cdf: times
            .cdf()
            .into_iter()
            .map(|(bound_us, below)| CurvePoint { x: seconds(bound_us), y: below })
            .collect(),
    }
}

#[cfg(test)]
mod tests;
