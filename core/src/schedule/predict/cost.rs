//! Predicted TTFT of a candidate: which blocks it fetches from which source, and the resulting
//! queue, transfer and prefill times.
//!
//! Not here: which candidates exist and which one is chosen (`mod.rs`), and the speeds
//! (`profile.rs`).
//!
//! **Where to stop fetching.** Let p be the tokens fetched of an input of N. Transfer grows
//! linearly in p inside a run: a run has one source, and a partly filled last block moves its
//! filled tokens only. A new source adds its latency once, at its first token. Prefill of the rest
//! is a·(N−p) + b·(N²−p²)/2, which is concave in p for b ≥ 0. Linear plus concave is concave, and a
//! concave function takes its least value over an interval at one of its ends. The upward step of a
//! new source's latency lies right after an end. So the best p over *all* p is 0 or the end of a
//! run, and `plan` is exact by trying those. Algorithm 1 of Mooncake (FAST '25) compares only "own
//! prefix" with "best prefix" under a balancing threshold. Both are among the ends tried here, so
//! no threshold is needed. Blocks in the instance's GPU memory only move the lower end of the
//! interval: they cost neither transfer nor prefill.

use crate::id::NodeId;
use crate::index::{Holder, HolderRun, PrefixMatch};
use crate::schedule::RouteRequest;
use crate::schedule::explain::decision::Source;
use crate::schedule::fleet::load::{Load, LoadInstant, Newcomer, QueueForecast};
use crate::schedule::fleet::{Fleet, InstancePaths, LiveNode};
use crate::schedule::predict::profile::{HardwareProfile, PathSpeed};
use crate::schedule::predict::relative_speed::slowed_us;
use crate::schedule::sources::link_stats::{LinkPath, Price, ReadPath};
use crate::schedule::sources::source_choice::{
    LocalHolder, RunHolder, SourceRun, SourceSearch, TransferTime,
};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

/// What an instance would fetch and compute for a request, and how long that takes without its
/// queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct FetchPlan {
    /// Leading blocks in its GPU memory.
    pub resident_blocks: u32,
    /// Blocks to fetch, in prefix order, without gaps from the first non-resident block.
    pub sources: SmallVec<[Source; 4]>,
    pub fetch_blocks: u32,
    pub recompute_tokens: u32,
    /// Tokens before those that are recomputed.
    pub context_tokens: u32,
    pub transfer_us: u64,
    pub prefill_us: u64,
    /// Blocks that the instance's own node holds, from the first non-resident one.
    pub overlap_blocks: u32,
    /// Leading blocks that are resident or held by live nodes.
    pub held_blocks: u32,
    /// Holder of the first block after the fetched ones, if a live node holds it.
    pub next_holder: Option<Holder>,
}

/// The instance-specific inputs of a plan: they decide, besides the request, where it fetches from.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct FetchContext<'a> {
    /// The instance's own node.
    pub own_node: Option<NodeId>,
    /// Whether it can fetch at all.
    pub can_fetch: bool,
    /// Its network paths.
    pub paths: &'a InstancePaths,
}

/// The wait of a newcomer before its own prefill, and its effect on others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct QueueWait {
    /// Time until it starts; its blocks may arrive later.
    pub us: u64,
    /// Time that the work ahead of it takes.
    pub work_us: u64,
    /// Delay that it adds to requests behind it.
    pub delay_to_others_us: u64,
    /// Requests that start before it.
    pub requests: u64,
    /// Time that the work behind it takes.
    pub behind_us: u64,
    /// Known requests among those that start before it, and the KV capacity that these will take,
    /// in tokens.
    pub known_requests: u64,
    pub kv_tokens: u64,
}

/// Time until the work ahead of a new request is done: its prefill, one step per request, and the
/// share of running requests in each of these steps and in its own. Prefill is that of recorded
/// requests with an earlier deadline; for an instance without recorded requests, that of tokens
/// without context. `slowdown` scales the times of the profile to the instance.
pub(in crate::schedule) fn queue_wait(
    speeds: &HardwareProfile,
    slowdown: f64,
    load: &Load,
    newcomer: &Newcomer,
    at: LoadInstant,
) -> QueueWait {
    let tokens = load.tokens_ahead();
    let ahead = load.forecast(newcomer, at);
    let behind = ahead.map_or(0, |ahead| ahead.behind);
    let requests = load.requests_ahead().saturating_sub(behind);
    let running = u64::from(load.running).saturating_mul(speeds.step_ns_per_running);
    let running = running.saturating_mul(requests.saturating_add(1));
    let QueueForecast { delay_to_others_us: delays_us, behind_us, known_requests: known, kv_tokens, .. } =
        ahead.unwrap_or_default();
    let wait = QueueWait {
        delay_to_others_us: delays_us,
        requests,
        behind_us,
        known_requests: known,
        kv_tokens,
        ..QueueWait::default()
    };
    match ahead {
        // These times already include the steps and the instance's speed, as of when the requests
        // were recorded.
        Some(QueueForecast { wait_us, work_us, .. }) if tokens > 0 => {
            let with = |us: u64| us.saturating_add(slowed_us(running / NS_PER_US, slowdown));
            QueueWait { us: with(wait_us), work_us: with(work_us), ..wait }
        }
        _ => {
            let steps = requests.saturating_mul(speeds.prompt_step_ns);
            let prefill = tokens.saturating_mul(speeds.prefill_ns_per_token);
            let us = slowed_us(prefill.saturating_add(steps).saturating_add(running) / NS_PER_US, slowdown);
            QueueWait { us, work_us: us, ..wait }
        }
    }
}

const NS_PER_US: u64 = 1_000;

/// Plans one request for all instances that take the same paths to its holders. The shared part is
/// computed once, in one pass over the runs: live holders, and the best remote one of each run.
pub(in crate::schedule) struct Planner<'a> {
    request: &'a RouteRequest,
    fleet: &'a Fleet,
    /// The hardware profile with learned prefill speeds.
    speeds: HardwareProfile,
    paths: PathSet,
    /// Covers the listed blocks without gaps; a run may have no live holder.
    runs: SmallVec<[SourceRun; 8]>,
}

/// The usual path, and the exceptions for holders of the prefix, by ascending node. Plans differ
/// only in these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct PathSet {
    pub usual: Option<LinkPath>,
    pub exceptions: SmallVec<[(NodeId, LinkPath); 2]>,
}

impl PathSet {
    /// The usual path without exceptions.
    pub(in crate::schedule) fn usual_only(&self) -> PathSet {
        PathSet { usual: self.usual, ..PathSet::default() }
    }

    fn to(&self, node: NodeId) -> Option<LinkPath> {
        self.exceptions.iter().find(|(other, _)| *other == node).map_or(self.usual, |(_, path)| Some(*path))
    }
}

impl<'a> Planner<'a> {
    pub(in crate::schedule) fn new(
        request: &'a RouteRequest,
        matched: &PrefixMatch,
        fleet: &'a Fleet,
        paths: PathSet,
    ) -> Self {
        let mut planner =
            Self { request, fleet, speeds: fleet.corrected_profile(), paths, runs: SmallVec::new() };
        let mut listed_blocks = 0;
        for run in &matched.runs {
            let end_blocks = run.start_blocks.saturating_add(run.len_blocks).min(request.blocks);
            if end_blocks <= listed_blocks.max(run.start_blocks) {
                break;
            }
            if run.start_blocks > listed_blocks {
                planner.runs.push(SourceRun::unheld(listed_blocks, run.start_blocks));
                listed_blocks = run.start_blocks;
            }
            planner.runs.push(planner.resolve(run, listed_blocks, end_blocks));
            listed_blocks = end_blocks;
        }
        for at in 1..planner.runs.len() {
            let (before, next) = planner.runs.split_at_mut(at);
            if let (Some(run), next) = (before.last_mut(), next.first()) {
                run.link_next(next);
            }
        }
        planner
    }

    /// The paths that its plans assume.
    pub(in crate::schedule) fn paths(&self) -> &PathSet {
        &self.paths
    }

    /// The runs that remain for an instance with this many leading blocks in GPU memory.
    pub(in crate::schedule) fn after_resident(&self, resident_blocks: u32) -> RemainingRuns<'_> {
        let resident_blocks = resident_blocks.min(self.request.blocks);
        let before = self.runs.partition_point(|run| run.end_blocks <= resident_blocks);
        let behind = &self.runs[before..];
        match behind.split_first() {
            Some((cut, rest)) if cut.start_blocks < resident_blocks => {
                let mut first = self.without_first_blocks(cut, resident_blocks);
                first.link_next(rest.first());
                RemainingRuns { planner: self, resident_blocks, first: Some(first), rest }
            }
            _ => RemainingRuns { planner: self, resident_blocks, first: None, rest: behind },
        }
    }

    /// The requested part of a run, with its live holders.
    fn resolve(&self, run: &HolderRun, start_blocks: u32, end_blocks: u32) -> SourceRun {
        let tokens = self.tokens_between(start_blocks, end_blocks);
        let live = |holder: &Holder| self.fleet.live(holder.node).filter(|live| live.epoch == holder.epoch);
        let holds = run
            .holders
            .iter()
            .filter_map(|holder| live(holder).map(|live| self.run_holder(holder, live, tokens)))
            .collect();
        SourceRun::new(start_blocks, end_blocks, holds)
    }

    /// A run without its first blocks.
    fn without_first_blocks(&self, run: &SourceRun, start_blocks: u32) -> SourceRun {
        let tokens = self.tokens_between(start_blocks, run.end_blocks);
        let hold = |holder: &Holder| Some(self.run_holder(holder, self.fleet.live(holder.node)?, tokens));
        let holds = run.holders.iter().filter_map(|held| hold(&held.holder));
        SourceRun::new(start_blocks, run.end_blocks, holds.collect())
    }

    fn run_holder(&self, holder: &Holder, live: &LiveNode, tokens: u64) -> RunHolder {
        let reader = ReadPath { is_local: false, path: self.paths.to(holder.node) };
        let Price { speed: lane, basis: measure } = live.price(holder.tier, reader, &self.fleet.profile);
        RunHolder {
            holder: *holder,
            remote: self.transfer_time(live, lane, tokens),
            basis: measure,
            tie_break: self.tie_break(holder.node),
        }
    }

    fn transfer_time(&self, live: &LiveNode, lane: PathSpeed, tokens: u64) -> TransferTime {
        let stream_ns = live.stream_ns(lane, tokens, self.request.block_tokens, &self.fleet.profile);
        TransferTime { latency_ns: lane.latency_ns, stream_ns }
    }

    /// The part of a run that the instance's own node holds.
    fn local_holder<'r>(
        &self,
        run: &SourceRun,
        hold: &'r RunHolder,
        asking: FetchContext<'_>,
    ) -> LocalHolder<'r> {
        let tokens = self.tokens_between(run.start_blocks, run.end_blocks);
        let priced = self.fleet.live(hold.holder.node).zip(self.price(&hold.holder, asking));
        let (way, measure) = priced
            .map_or((hold.remote, hold.basis), |(live, Price { speed: lane, basis: measure })| {
                (self.transfer_time(live, lane, tokens), measure)
            });
        LocalHolder { holder: hold, time: way, basis: measure }
    }

    /// The path from this instance to a node, as priced here.
    pub(in crate::schedule) fn read_path(&self, node: NodeId, asking: FetchContext<'_>) -> ReadPath {
        let is_own = asking.own_node == Some(node);
        let path = if is_own { asking.paths.to(node) } else { self.paths.to(node) };
        ReadPath { is_local: is_own, path }
    }

    /// The price of blocks of this holder; `None` if it is not live.
    pub(in crate::schedule) fn price(&self, holder: &Holder, asking: FetchContext<'_>) -> Option<Price> {
        let live = self.fleet.live(holder.node)?;
        Some(live.price(holder.tier, self.read_path(holder.node, asking), &self.fleet.profile))
    }

    /// Live nodes that hold any block of the prefix, ascending.
    pub(in crate::schedule) fn holders(&self) -> SmallVec<[NodeId; 8]> {
        let all = self.runs.iter().flat_map(|run| run.holders.iter().map(|hold| hold.holder.node));
        let mut all: SmallVec<[NodeId; 8]> = all.collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Tokens in the first `blocks` blocks of the request.
    fn tokens(&self, blocks: u32) -> u32 {
        blocks.saturating_mul(self.request.block_tokens).min(self.request.input_tokens)
    }

    fn tokens_between(&self, start_blocks: u32, end_blocks: u32) -> u64 {
        u64::from(self.tokens(end_blocks) - self.tokens(start_blocks))
    }

    /// Prefill time after this many cached leading blocks.
    fn prefill_us(&self, cached_blocks: u32) -> u64 {
        let context = self.tokens(cached_blocks);
        let new = self.request.input_tokens - context;
        let parts_ns = self.speeds.prompt_ns(context.into(), new.into());
        parts_ns.into_iter().fold(0, u64::saturating_add).div_ceil(NS_PER_US)
    }

    fn tie_break(&self, node: NodeId) -> u64 {
        let mut bytes = [0u8; 12];
        bytes[..8].copy_from_slice(&self.request.request.0.to_le_bytes());
        bytes[8..].copy_from_slice(&node.0.to_le_bytes());
        xxh3_64(&bytes)
    }
}

/// The runs after the resident blocks; usually there are no resident blocks.
pub(in crate::schedule) struct RemainingRuns<'p> {
    planner: &'p Planner<'p>,
    resident_blocks: u32,
    /// The run that the resident blocks end in, without them.
    first: Option<SourceRun>,
    rest: &'p [SourceRun],
}

impl RemainingRuns<'_> {
    /// Runs up to the first without a live holder.
    fn runs(&self) -> impl Iterator<Item = &SourceRun> {
        self.first.iter().chain(self.rest).take_while(|run| run.fastest.is_some())
    }

    /// Whether a plan for an instance at this node could differ from one for an instance without a
    /// node.
    pub(in crate::schedule) fn holds_any(&self, node: NodeId) -> bool {
        self.runs().any(|run| run.held_by(node).is_some())
    }

    /// The plan with the least transfer plus prefill time.
    pub(in crate::schedule) fn plan(&self, asking: FetchContext<'_>) -> FetchPlan {
        let own = asking.own_node;
        let Self { planner, resident_blocks, .. } = *self;
        let mut best = FetchPlan { prefill_us: planner.prefill_us(resident_blocks), ..FetchPlan::default() };
        // Ends of the fetched blocks, of the own node's blocks and of the held blocks, as offsets
        // in the request.
        let (mut fetched_to, mut overlap_to, mut held_blocks) =
            (resident_blocks, resident_blocks, resident_blocks);
        let mut search = SourceSearch::default();
        let (mut end, mut left) = (None, None);
        for run in self.runs().take_while(|_| asking.can_fetch) {
            let own_hold = own.and_then(|node| run.held_by(node));
            if overlap_to == run.start_blocks && own_hold.is_some() {
                overlap_to = run.end_blocks;
            }
            search.push(run, own_hold.map(|hold| planner.local_holder(run, hold, asking)).as_ref());
            held_blocks = run.end_blocks;
            let Some(run_end) = search.end() else { break };
            let (transfer_us, prefill_us) =
                (search.ns(run_end).div_ceil(NS_PER_US), planner.prefill_us(run.end_blocks));
            // At equal time fetch: it leaves the GPU free for others.
            if transfer_us.saturating_add(prefill_us) <= best.transfer_us.saturating_add(best.prefill_us) {
                (fetched_to, end, left) = (run.end_blocks, Some(run_end), None);
                best = FetchPlan { transfer_us, prefill_us, ..best };
            } else {
                left = left.or_else(|| Some(search.holder(run_end)));
            }
        }
        let sources = end.map(|end| search.sources(end)).unwrap_or_default();
        FetchPlan {
            next_holder: left,
            resident_blocks,
            sources,
            fetch_blocks: fetched_to - resident_blocks,
            recompute_tokens: planner.request.input_tokens - planner.tokens(fetched_to),
            context_tokens: planner.tokens(fetched_to),
            overlap_blocks: overlap_to - resident_blocks,
            held_blocks,
            ..best
        }
    }

    /// The best other holder of the first blocks of this source.
    pub(in crate::schedule) fn alternative_to(&self, source: &Source) -> Option<Holder> {
        let run = self.runs().find(|run| run.start_blocks == source.start_blocks)?;
        let others = run.holders.iter().filter(|hold| hold.holder.node != source.node);
        others.min_by_key(|hold| hold.rank(hold.remote.latency_ns)).map(|hold| hold.holder)
    }
}
