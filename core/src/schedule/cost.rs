//! Predicted TTFT of a candidate: which blocks it fetches from whom, and what queue, transfer and prefill
//! come to.
//!
//! Not here: which candidates exist and which one is taken (`mod.rs`), and the speeds (`profile.rs`).
//!
//! **Where to stop fetching.** Let p be the tokens fetched of an input of N. Transfer grows linearly in p
//! inside a run, because a run has one source and a partly filled tail block moves its filled tokens
//! only; a new source adds its latency once, at its first token. Prefill of the rest is
//! a·(N−p) + b·(N²−p²)/2, which is concave in p for b ≥ 0. Linear plus concave is concave, and a concave
//! function takes its least value over an interval at one of its ends; the upward step of a new source's
//! latency lies right behind an end. So the best p over *all* p is 0 or the end of a run, and `plan` is
//! exact by trying those. Algorithm 1 of Mooncake (FAST '25) compares only "own prefix" with "best
//! prefix" under a balancing threshold; both are among the ends tried here, so no threshold is needed. Blocks that an
//! instance has in GPU memory only move the lower end of the interval: they cost neither transfer nor prefill.

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::RouteRequest;
use super::decision::Source;
use super::fleet::{Fleet, InstancePaths, LiveNode};
use super::lanes::{LinkPath, Price, Reader};
use super::legs::{Hold, Legs, Near, Run, Way};
use super::load::{Ahead, Load, Moment, Newcomer};
use super::profile::{HardwareProfile, Lane};
use super::speed::slowed;
use crate::id::NodeId;
use crate::index::{Holder, HolderRun, PrefixMatch};

/// What an instance would do for a request, and how long that takes, its queue left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Leading blocks that it has in GPU memory.
    pub resident_blocks: u32,
    /// What it fetches, in prefix order, without gaps from the first block that is not resident.
    pub sources: SmallVec<[Source; 4]>,
    pub fetch_blocks: u32,
    pub recompute_tokens: u32,
    /// Tokens before those that are recomputed.
    pub context_tokens: u32,
    pub transfer_us: u64,
    pub prefill_us: u64,
    /// Blocks that the instance's own node holds, from the first that is not resident on.
    pub overlap_blocks: u32,
    /// Leading blocks that are resident or that live nodes hold.
    pub held_blocks: u32,
    /// Where the first block behind the fetched ones would come from, if a live node holds it.
    pub left: Option<Holder>,
}

/// Whose plan it is: what decides, besides the request, from where an instance fetches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking<'a> {
    /// The instance's own node.
    pub own: Option<NodeId>,
    /// Whether it can fetch at all.
    pub fetches: bool,
    /// The paths it takes.
    pub paths: &'a InstancePaths,
}

/// What stands between a newcomer and its own prefill, and what it keeps waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wait {
    /// Time until it begins; its blocks may be there later.
    pub us: u64,
    /// Time that the work ahead of it takes.
    pub work_us: u64,
    /// What it adds to the waiting of those that come behind it.
    pub delays_us: u64,
    /// Requests that begin before it.
    pub requests: u64,
    /// The same work, of what comes behind it.
    pub behind_us: u64,
    /// Of those that begin before it, how many are known, and what room in GPU memory these will take.
    pub known: u64,
    pub kv_tokens: u64,
}

/// Time until the work ahead of a new request is done: its prefill, one step per request, and what the
/// running requests add to each of these steps and to the new one's own. Prefill is that of the requests sent there whose turn comes before; of
/// an instance to which nothing was sent, as of tokens without context. It takes so many times as long as the profile says.
pub(super) fn wait(
    (profile, times): (&HardwareProfile, f64),
    load: &Load,
    newcomer: &Newcomer,
    at: Moment,
) -> Wait {
    let tokens = load.tokens_ahead();
    let ahead = load.ahead(newcomer, at);
    let behind = ahead.map_or(0, |ahead| ahead.behind);
    let requests = load.requests_ahead().saturating_sub(behind);
    let running = u64::from(load.running).saturating_mul(profile.step_ns_per_running);
    let running = running.saturating_mul(requests.saturating_add(1));
    let Ahead { delays_us, behind_us, known, kv_tokens, .. } = ahead.unwrap_or_default();
    let wait = Wait { delays_us, requests, behind_us, known, kv_tokens, ..Wait::default() };
    match ahead {
        // Their steps are in it, and so is how fast it is, as of when they were sent.
        Some(Ahead { wait_us, work_us, .. }) if tokens > 0 => {
            let with = |us: u64| us.saturating_add(slowed(running / NS_PER_US, times));
            Wait { us: with(wait_us), work_us: with(work_us), ..wait }
        }
        _ => {
            let steps = requests.saturating_mul(profile.prompt_step_ns);
            let prefill = tokens.saturating_mul(profile.prefill_ns_per_token);
            let us = slowed(prefill.saturating_add(steps).saturating_add(running) / NS_PER_US, times);
            Wait { us, work_us: us, ..wait }
        }
    }
}

const NS_PER_US: u64 = 1_000;

/// Makes the plans of one request for instances that take the same paths to the nodes that matter. What all of them share is
/// worked out once, in one pass over the runs: which holders are live, and the best one of each run from afar.
pub(super) struct Planner<'a> {
    request: &'a RouteRequest,
    fleet: &'a Fleet,
    /// How fast prompts are computed, as far as that was learnt.
    speeds: HardwareProfile,
    paths: Paths,
    /// Of the whole request, without gaps; nobody live holds some of them.
    runs: SmallVec<[Run; 8]>,
}

/// The paths by which plans differ: the usual one, and those to holders of the prefix, by ascending node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Paths {
    pub usual: Option<LinkPath>,
    pub other: SmallVec<[(NodeId, LinkPath); 2]>,
}

impl Paths {
    /// The usual one alone.
    pub(super) fn without_other(&self) -> Paths {
        Paths { usual: self.usual, ..Paths::default() }
    }

    fn to(&self, node: NodeId) -> Option<LinkPath> {
        self.other.iter().find(|(other, _)| *other == node).map_or(self.usual, |(_, path)| Some(*path))
    }
}

impl<'a> Planner<'a> {
    pub(super) fn new(
        request: &'a RouteRequest,
        matched: &PrefixMatch,
        fleet: &'a Fleet,
        paths: Paths,
    ) -> Self {
        let mut planner = Self { request, fleet, speeds: fleet.speeds(), paths, runs: SmallVec::new() };
        let mut named_blocks = 0;
        for run in &matched.runs {
            let end_blocks = run.start_blocks.saturating_add(run.len_blocks).min(request.blocks);
            if end_blocks <= named_blocks.max(run.start_blocks) {
                break;
            }
            if run.start_blocks > named_blocks {
                planner.runs.push(Run::of_nobody(named_blocks, run.start_blocks));
                named_blocks = run.start_blocks;
            }
            planner.runs.push(planner.resolve(run, named_blocks, end_blocks));
            named_blocks = end_blocks;
        }
        for at in 1..planner.runs.len() {
            let (before, next) = planner.runs.split_at_mut(at);
            if let (Some(run), next) = (before.last_mut(), next.first()) {
                run.put_before(next);
            }
        }
        planner
    }

    /// The paths that its plans are for.
    pub(super) fn paths(&self) -> &Paths {
        &self.paths
    }

    /// What is left for an instance with so many leading blocks in GPU memory.
    pub(super) fn behind(&self, resident_blocks: u32) -> Behind<'_> {
        let resident_blocks = resident_blocks.min(self.request.blocks);
        let before = self.runs.partition_point(|run| run.end_blocks <= resident_blocks);
        let behind = &self.runs[before..];
        match behind.split_first() {
            Some((cut, rest)) if cut.start_blocks < resident_blocks => {
                let mut first = self.cut(cut, resident_blocks);
                first.put_before(rest.first());
                Behind { planner: self, resident_blocks, first: Some(first), rest }
            }
            _ => Behind { planner: self, resident_blocks, first: None, rest: behind },
        }
    }

    /// The part of a run that the request asks for, with the live nodes that hold it.
    fn resolve(&self, run: &HolderRun, start_blocks: u32, end_blocks: u32) -> Run {
        let tokens = self.tokens_between(start_blocks, end_blocks);
        let live = |holder: &Holder| self.fleet.live(holder.node).filter(|live| live.epoch == holder.epoch);
        let holds = run
            .holders
            .iter()
            .filter_map(|holder| live(holder).map(|live| self.hold(holder, live, tokens)))
            .collect();
        Run::new(start_blocks, end_blocks, holds)
    }

    /// A run without its first blocks.
    fn cut(&self, run: &Run, start_blocks: u32) -> Run {
        let tokens = self.tokens_between(start_blocks, run.end_blocks);
        let hold = |holder: &Holder| Some(self.hold(holder, self.fleet.live(holder.node)?, tokens));
        let holds = run.holds.iter().filter_map(|held| hold(&held.holder));
        Run::new(start_blocks, run.end_blocks, holds.collect())
    }

    fn hold(&self, holder: &Holder, live: &LiveNode, tokens: u64) -> Hold {
        let reader = Reader { is_own: false, path: self.paths.to(holder.node) };
        let Price { lane, measure } = live.price(holder.tier, reader, &self.fleet.profile);
        Hold { holder: *holder, far: self.way(live, lane, tokens), measure, turn: self.turn_of(holder.node) }
    }

    fn way(&self, live: &LiveNode, lane: Lane, tokens: u64) -> Way {
        let stream_ns = live.stream_ns(lane, tokens, self.request.block_tokens, &self.fleet.profile);
        Way { latency_ns: lane.latency_ns, stream_ns }
    }

    /// What the asking instance's own node holds of a run.
    fn near<'r>(&self, run: &Run, hold: &'r Hold, asking: Asking<'_>) -> Near<'r> {
        let tokens = self.tokens_between(run.start_blocks, run.end_blocks);
        let priced = self.fleet.live(hold.holder.node).zip(self.price(&hold.holder, asking));
        let (way, measure) = priced.map_or((hold.far, hold.measure), |(live, Price { lane, measure })| {
            (self.way(live, lane, tokens), measure)
        });
        Near { hold, way, measure }
    }

    /// As what the asking instance reads from a node is priced here.
    pub(super) fn reader(&self, node: NodeId, asking: Asking<'_>) -> Reader {
        let is_own = asking.own == Some(node);
        let path = if is_own { asking.paths.to(node) } else { self.paths.to(node) };
        Reader { is_own, path }
    }

    /// What blocks of this holder are priced with; nothing when it is not live.
    pub(super) fn price(&self, holder: &Holder, asking: Asking<'_>) -> Option<Price> {
        let live = self.fleet.live(holder.node)?;
        Some(live.price(holder.tier, self.reader(holder.node, asking), &self.fleet.profile))
    }

    /// The nodes that hold any of it and are live, by ascending node.
    pub(super) fn holders(&self) -> SmallVec<[NodeId; 8]> {
        let all = self.runs.iter().flat_map(|run| run.holds.iter().map(|hold| hold.holder.node));
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

    /// Prefill behind so many leading blocks that are there.
    fn prefill_us(&self, there_blocks: u32) -> u64 {
        let context = self.tokens(there_blocks);
        let new = self.request.input_tokens - context;
        let parts_ns = self.speeds.prompt_ns(context.into(), new.into());
        parts_ns.into_iter().fold(0, u64::saturating_add).div_ceil(NS_PER_US)
    }

    fn turn_of(&self, node: NodeId) -> u64 {
        let mut bytes = [0u8; 12];
        bytes[..8].copy_from_slice(&self.request.request.0.to_le_bytes());
        bytes[8..].copy_from_slice(&node.0.to_le_bytes());
        xxh3_64(&bytes)
    }
}

/// The runs behind the leading blocks that an instance has in GPU memory, most often none.
pub(super) struct Behind<'p> {
    planner: &'p Planner<'p>,
    resident_blocks: u32,
    /// The run in which these blocks end, without them.
    first: Option<Run>,
    rest: &'p [Run],
}

impl Behind<'_> {
    /// Up to the first that nobody live holds.
    fn runs(&self) -> impl Iterator<Item = &Run> {
        self.first.iter().chain(self.rest).take_while(|run| run.nearest.is_some())
    }

    /// Whether a plan for an instance at this node could differ from one for an instance without a node.
    pub(super) fn holds_any(&self, node: NodeId) -> bool {
        self.runs().any(|run| run.held_by(node).is_some())
    }

    /// The plan of least transfer and prefill.
    pub(super) fn plan(&self, asking: Asking<'_>) -> Plan {
        let own = asking.own;
        let Self { planner, resident_blocks, .. } = *self;
        let mut best = Plan { prefill_us: planner.prefill_us(resident_blocks), ..Plan::default() };
        // Ends of what is fetched, of what the own node holds and of what is held, as offsets in the request.
        let (mut fetched_to, mut overlap_to, mut held_blocks) =
            (resident_blocks, resident_blocks, resident_blocks);
        let mut legs = Legs::default();
        let (mut end, mut left) = (None, None);
        for run in self.runs().take_while(|_| asking.fetches) {
            let own_hold = own.and_then(|node| run.held_by(node));
            if overlap_to == run.start_blocks && own_hold.is_some() {
                overlap_to = run.end_blocks;
            }
            legs.push(run, own_hold.map(|hold| planner.near(run, hold, asking)).as_ref());
            held_blocks = run.end_blocks;
            let Some(here) = legs.end() else { break };
            let (transfer_us, prefill_us) =
                (legs.ns(here).div_ceil(NS_PER_US), planner.prefill_us(run.end_blocks));
            // At equal time fetch: it leaves the instance free for others.
            if transfer_us.saturating_add(prefill_us) <= best.transfer_us.saturating_add(best.prefill_us) {
                (fetched_to, end, left) = (run.end_blocks, Some(here), None);
                best = Plan { transfer_us, prefill_us, ..best };
            } else {
                left = left.or_else(|| Some(legs.holder(here)));
            }
        }
        let sources = end.map(|end| legs.sources(end)).unwrap_or_default();
        Plan {
            left,
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

    /// Who else holds the blocks that this source begins with, the best of them.
    pub(super) fn instead_of(&self, source: &Source) -> Option<Holder> {
        let run = self.runs().find(|run| run.start_blocks == source.start_blocks)?;
        let others = run.holds.iter().filter(|hold| hold.holder.node != source.node);
        others.min_by_key(|hold| hold.rank(hold.far.latency_ns)).map(|hold| hold.holder)
    }
}
