//! Who could take a request and who could give KV for it: instances with their load, live nodes with
//! their links.
//!
//! Not here: which blocks a node holds (`index/`) and how all this is learnt (the router's view).

use std::sync::Arc;
use std::time::Duration;

use super::computing::Computing;
use super::decision::{Decision, Prediction, Prompt};
use super::decoding::{Paced, Pacing};
use super::joining::SLOW_START;
use super::lanes::{LinkLanes, LinkPath, Price, Reader};
use super::learnt::Learnt;
use super::load::{Load, Moment};
use super::margin::Margin;
use super::pairs::{Part, Role};
use super::passing::Passing;
use super::profile::{HardwareProfile, Lane};
use super::speed::{Speed, octaves, slowed};
use super::steps::{Lengths, Steps, Told};
use crate::id::{Category, Epoch, InstanceId, NodeId, Tier, Timestamp};
use crate::place::Ring;

/// An instance whose last report is older is left out. Reports come five times a second: ten missed in
/// a row mean a lost instance rather than a slow one.
pub const REPORT_STALE_AFTER: Duration = Duration::from_secs(2);

/// An instance with more prompt tokens ahead is left out: 4 Mi tokens are thirty-two prompts of 128 Ki,
/// more than two minutes of prefill on an H100, which no caller waits for.
pub const QUEUE_TOKENS_MAX: u64 = 4 * 1_024 * 1_024;

/// What filters an instance out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Oldest report that counts.
    pub report_stale_after: Duration,
    /// Most prompt tokens ahead of a new request.
    pub queue_tokens_max: u64,
    /// For how long an instance that joins is given less than others.
    pub slow_start: Duration,
    /// How many names of their places an instance that computes a prompt and one that goes on must share, the largest first: 0 for none.
    pub pair_within: u8,
    /// No request keeps others away from its instance by a tighter limit between two of its tokens than this, in microseconds; 0 where each counts as it is.
    pub tbt_kept_us: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            report_stale_after: REPORT_STALE_AFTER,
            queue_tokens_max: QUEUE_TOKENS_MAX,
            slow_start: SLOW_START,
            pair_within: 0,
            tbt_kept_us: 0,
        }
    }
}

/// One instance as last reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The instance.
    pub id: InstanceId,
    /// The node it uses as its own (same host, no network between), if any.
    pub node: Option<NodeId>,
    /// Whether it can fetch from nodes and save to them. An engine that links no client of ours has what is in its GPU memory only.
    pub fetches: bool,
    /// Whether it begins what waits in the order of turns ([`turn_of`](super::turn_of)); else in the order in which it came.
    pub orders: bool,
    /// Its work.
    pub load: Load,
    /// When the report came in, on the clock of `now`.
    pub reported_at: Timestamp,
    /// When it joined, on the same clock; nothing where it is there for longer than anybody knows.
    pub joined_at: Option<Timestamp>,
}

/// A node that serves, in the epoch that counts. A node that is not listed is dead to a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveNode {
    /// The node.
    pub node: NodeId,
    /// Its epoch; holders of another epoch are no source.
    pub epoch: Epoch,
    /// Its share of new blocks against other nodes; 0 takes none.
    pub weight: u32,
    /// Blocks it holds, for bounded load.
    pub blocks: u64,
    /// Bytes of one of its blocks; 0 where that is not known, and the profile's model counts.
    pub block_bytes: u64,
    /// What instances elsewhere measured of it, if they did; else the profile counts.
    pub afar: Option<Arc<LinkLanes>>,
    /// What instances measured whose own node it is.
    pub near: Option<Arc<LinkLanes>>,
}

impl LiveNode {
    /// What comes out of this tier to this reader.
    #[must_use]
    pub fn price(&self, tier: Tier, reader: Reader, profile: &HardwareProfile) -> Price {
        let lanes = if reader.is_own { &self.near } else { &self.afar };
        match lanes {
            Some(lanes) => lanes.price(tier, reader, profile),
            None => LinkLanes::default().price(tier, reader, profile),
        }
    }

    /// Time for the KV of `tokens` through a lane without its latency, in nanoseconds, where a block has so many.
    #[must_use]
    pub fn stream_ns(&self, lane: Lane, tokens: u64, block_tokens: u32, profile: &HardwareProfile) -> u64 {
        match u64::from(block_tokens) {
            block_tokens if block_tokens > 0 && self.block_bytes > 0 => {
                let bytes = u128::from(self.block_bytes) * u128::from(tokens);
                lane.stream_ns(bytes.div_ceil(block_tokens.into()))
            }
            _ => profile.stream_ns(lane, tokens),
        }
    }
}

/// Everything a decision looks at besides the request and the index.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// Speeds predictions are made with.
    pub profile: HardwareProfile,
    /// What filters an instance out.
    pub limits: Limits,
    /// What first tokens taught of predictions.
    pub learnt: Learnt,
    /// What they taught of how fast prompts are computed.
    pub computing: Computing,
    instances: Vec<Instance>,
    /// Of the instances, in their order.
    paths: Vec<InstancePaths>,
    /// The same.
    parts: Vec<Part>,
    nodes: Vec<LiveNode>,
    ring: Ring,
    passing: Passing,
    margin: Margin,
    /// Of all instances together.
    speed: Speed,
    steps: Steps,
    lengths: Lengths,
}

/// The paths that an instance took lately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct InstancePaths {
    /// To most nodes, memory of the host left out: what it would take to one that it did not read from.
    pub(super) usual: Option<LinkPath>,
    /// To nodes to which it took another one, by ascending node.
    pub(super) other: Vec<(NodeId, LinkPath)>,
}

impl InstancePaths {
    fn of(taken: &[(NodeId, LinkPath)]) -> InstancePaths {
        let count = |path: LinkPath| taken.iter().filter(|(_, taken)| *taken == path).count();
        let network = LinkPath::ALL.into_iter().filter(|path| *path != LinkPath::SharedMemory);
        let used = network.map(|path| (count(path), path)).filter(|(count, _)| *count > 0);
        // Of equally many the later kind, so that equal reports are understood alike.
        let usual = used.max().map(|(_, path)| path);
        let mut other: Vec<_> = taken.iter().filter(|(_, path)| Some(*path) != usual).copied().collect();
        other.sort_unstable();
        other.dedup_by_key(|(node, _)| *node);
        InstancePaths { usual, other }
    }

    /// The path to this node.
    pub(super) fn to(&self, node: NodeId) -> Option<LinkPath> {
        let other = self.other.binary_search_by_key(&node, |(node, _)| *node);
        other.map_or(self.usual, |rank| Some(self.other[rank].1))
    }
}

impl Fleet {
    /// An empty fleet under a profile, with the default limits.
    #[must_use]
    pub fn new(profile: HardwareProfile) -> Self {
        Self { profile, ..Self::default() }
    }

    /// Adds an instance, or replaces what was known of it but for what was sent there.
    pub fn put_instance(&mut self, instance: Instance) {
        let speeds = self.speeds();
        match self.instances.binary_search_by_key(&instance.id, |known| known.id) {
            Ok(rank) => {
                let known = &mut self.instances[rank];
                // Another process has nothing of what was sent to the one before.
                let is_other = known.joined_at != instance.joined_at;
                let load = if is_other {
                    instance.load
                } else {
                    instance.load.after(&known.load, instance.reported_at)
                };
                let since = (known.load, known.reported_at);
                *known = Instance { load, ..instance };
                if !is_other {
                    heard(&mut self.steps, &speeds, known, &since);
                }
            }
            Err(rank) => {
                self.instances.insert(rank, instance);
                self.paths.insert(rank, InstancePaths::default());
                self.parts.insert(rank, Part::default());
            }
        }
    }

    /// Forgets an instance.
    pub fn remove_instance(&mut self, id: InstanceId) -> Option<Instance> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        self.paths.remove(rank);
        self.parts.remove(rank);
        Some(self.instances.remove(rank))
    }

    /// Replaces what is known of the paths that an instance takes: to each node at most one. Nothing when the instance is
    /// not known.
    pub fn set_paths(&mut self, id: InstanceId, taken: &[(NodeId, LinkPath)]) {
        if let Ok(rank) = self.instances.binary_search_by_key(&id, |known| known.id) {
            self.paths[rank] = InstancePaths::of(taken);
        }
    }

    /// Says what an instance does of a request, and where it stands; who is not said does all, and stands nowhere. Nothing when the instance is not known.
    pub fn set_part(&mut self, id: InstanceId, part: Part) {
        if let Ok(rank) = self.instances.binary_search_by_key(&id, |known| known.id) {
            self.parts[rank] = part;
        }
    }

    /// What an instance does of a request, and where it stands.
    #[must_use]
    pub fn part(&self, id: InstanceId) -> Part {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id);
        rank.map_or_else(|_| Part::default(), |rank| self.parts[rank])
    }

    /// Whether some instance does not do all of a request.
    pub(super) fn has_roles(&self) -> bool {
        self.parts.iter().any(|part| part.role != Role::Both)
    }

    /// Every instance with its paths and its part.
    pub(super) fn instances_with_parts(&self) -> impl Iterator<Item = (&Instance, &InstancePaths, Part)> {
        let all = self.instances.iter().zip(&self.paths).zip(&self.parts);
        all.map(|((instance, paths), part)| (instance, paths, *part))
    }

    /// Every instance with the paths that it takes, as far as they are known.
    pub(super) fn instances_with_paths(&self) -> impl Iterator<Item = (&Instance, &InstancePaths)> {
        self.instances.iter().zip(&self.paths)
    }

    /// An instance with the paths that it takes.
    pub(super) fn with_paths(&self, id: InstanceId) -> Option<(&Instance, &InstancePaths)> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        Some((&self.instances[rank], &self.paths[rank]))
    }

    /// Counts a decision that was sent to its instance into that instance's load. The second half of routing:
    /// [`choose`](super::choose) changes nothing, so a decision that is not sent leaves no trace.
    pub fn record(&mut self, decision: &Decision, now: Timestamp) {
        self.count(decision, decision.parts.prefill_us, now);
    }

    /// Counts it; of prompts in general is learnt that its own takes so long.
    fn count(&mut self, decision: &Decision, prefill_us: u64, now: Timestamp) {
        let count = self.instances.len();
        if let Ok(rank) = self.instances.binary_search_by_key(&decision.instance, |known| known.id) {
            let tokens = decision.recompute_tokens;
            let added_us = self.added_us(&self.instances[rank], prefill_us, tokens, now);
            let known = &mut self.instances[rank];
            known.load.record(decision, Moment { now, reported_at: known.reported_at });
            if decision.handover.is_none() {
                known.load.strictest.sent(decision, self.limits.tbt_kept_us, now);
            }
            self.passing.sent(added_us, count, now);
            let prompt = (tokens, added_us);
            self.lengths.sent(decision.pacing.kv_tokens, prompt);
        }
        // Who goes on has nothing to compute, and one more that runs.
        let partner = decision.handover.map(|handover| handover.instance);
        let rank = partner.map(|partner| self.instances.binary_search_by_key(&partner, |known| known.id));
        if let Some(Ok(rank)) = rank {
            let load = &mut self.instances[rank].load;
            load.routed = load.routed.saturating_add(1);
            load.strictest.sent(decision, self.limits.tbt_kept_us, now);
        }
    }

    /// The same of a decision of which only so many tokens to compute are believed: what it says besides counts as that share of it, its limit keeps nobody away,
    /// and prompts in general take no longer for it than the profile says of so many.
    pub fn record_part(&mut self, decision: &Decision, tokens: u32, now: Timestamp) {
        let (all, tokens) = (decision.recompute_tokens, tokens.min(decision.recompute_tokens));
        let share = |value: u64| match all {
            0 => value,
            all => (u128::from(value) * u128::from(tokens) / u128::from(all)) as u64,
        };
        let prefill_us = share(decision.parts.prefill_us);
        let parts = Prediction { prefill_us, ..decision.parts };
        let kv_tokens = share(decision.pacing.kv_tokens.into()) as u32;
        let pacing = Pacing { kv_tokens, limit_us: 0, ..decision.pacing };
        let candidates = Vec::new();
        let counted = Decision { recompute_tokens: tokens, parts, pacing, candidates, ..decision.clone() };
        let alone_us = self.speeds().prefill_ns(0, tokens.into()) / 1_000;
        self.count(&counted, prefill_us.min(alone_us), now);
    }

    /// The profile, with what first tokens taught of how fast prompts are computed.
    #[must_use]
    pub fn speeds(&self) -> HardwareProfile {
        self.profile.with_prompts(self.computing.factors())
    }

    /// Tokens of prompts that wait or are under way at all instances.
    #[must_use]
    pub fn waiting_tokens(&self) -> u64 {
        let tokens = self.instances.iter().map(|instance| instance.load.tokens_ahead());
        tokens.fold(0, u64::saturating_add)
    }

    /// A first token came from an instance after so long; `parts` is what was predicted of it before what was learnt of all instances.
    pub fn first_token(&mut self, instance: InstanceId, parts: &Prediction, ttft_us: u64, now: Timestamp) {
        let known = self.instances.binary_search_by_key(&instance, |known| known.id).ok();
        let times = known.map_or(1.0, |rank| self.times(&self.instances[rank], now));
        let Prompt { context_tokens, new_tokens } = parts.prompt;
        // Of a prompt that was read as text nobody knows what was computed.
        let is_known = parts.prompt != Prompt::default();
        let computing_us = |profile: &HardwareProfile| {
            profile.prompt_ns(context_tokens.into(), new_tokens.into()).map(|ns| slowed(ns / 1_000, times))
        };
        // As it would be predicted now: what was learnt of computing since then is learnt.
        let by_now_us = computing_us(&self.speeds()).into_iter().fold(0, u64::saturating_add);
        let parts = Prediction { prefill_us: if is_known { by_now_us } else { parts.prefill_us }, ..*parts };
        let predicted = self.learnt.apply(&parts, now);
        let octaves = octaves(&predicted, ttft_us);
        let others_us = Prediction { prefill_us: 0, ..predicted }.ttft_us();
        let learnt = match is_known {
            true => self.computing.observe(computing_us(&self.profile), others_us, ttft_us),
            false => Some(1.0),
        };
        match learnt {
            Some(times) => {
                self.learnt.observe(&parts, ttft_us);
                self.learnt.restate(times);
            }
            None => self.learnt.forget(),
        }
        let speed = known.map(|rank| &mut self.instances[rank].load.speed);
        if let Some((speed, octaves)) = speed.zip(octaves) {
            // How fast it is believed to be is in what was predicted.
            let octaves = octaves + times.log2();
            speed.observe(octaves, now);
            self.speed.observe(octaves, now);
        }
    }

    /// How many times as long an instance takes as all of them do.
    pub(super) fn times(&self, instance: &Instance, now: Timestamp) -> f64 {
        instance.load.speed.times(self.speed, now)
    }

    /// A request of this category ended with so many tokens said, so far apart; without a time nothing is learnt of that.
    pub fn ended(&mut self, category: Category, output_tokens: u32, paced: Paced<'_>, now: Timestamp) {
        let Paced { parts, predicted_us, tokens, tbt_us, limit_us } = paced;
        if output_tokens > 0 {
            self.lengths.ended(category, output_tokens);
        }
        // What was let in although it was predicted to break its limit says nothing of the others. What is predicted by now is no measure of that: a rush that
        // slows all of them is in it.
        if tbt_us > 0 && limit_us > 0 && predicted_us <= limit_us {
            self.margin.ended(tbt_us > limit_us, tokens, now);
        }
        self.learnt.observe_tbt(parts, tbt_us, now);
    }

    pub(super) fn margin(&self) -> &Margin {
        &self.margin
    }

    pub(super) fn steps(&self) -> &Steps {
        &self.steps
    }

    pub(super) fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    /// How many times as long as the profile says a step takes by itself, and what each request that decodes adds to it.
    #[must_use]
    pub fn step_factors(&self, now: Timestamp) -> [f64; 2] {
        self.steps.at(now)
    }

    pub(super) fn passing(&self) -> &Passing {
        &self.passing
    }

    /// The load of an instance.
    pub(super) fn load_mut(&mut self, id: InstanceId) -> Option<&mut Load> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        Some(&mut self.instances[rank].load)
    }

    /// Replaces the live nodes. The placement ring is made anew only when members or weights changed.
    pub fn set_nodes(&mut self, mut nodes: Vec<LiveNode>) {
        nodes.sort_unstable_by_key(|live| (live.node, std::cmp::Reverse(live.epoch)));
        nodes.dedup_by_key(|live| live.node);
        let member = |live: &LiveNode| (live.node, live.weight);
        if !nodes.iter().map(member).eq(self.nodes.iter().map(member)) {
            self.ring = Ring::new(&nodes.iter().map(member).collect::<Vec<_>>());
        }
        self.nodes = nodes;
    }

    /// All instances, ordered by id.
    #[must_use]
    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    /// All live nodes, ordered by id.
    #[must_use]
    pub fn nodes(&self) -> &[LiveNode] {
        &self.nodes
    }

    /// The instance of this id.
    #[must_use]
    pub fn instance(&self, id: InstanceId) -> Option<&Instance> {
        self.instances.binary_search_by_key(&id, |known| known.id).ok().map(|rank| &self.instances[rank])
    }

    /// The node of this id, when it is live.
    #[must_use]
    pub fn live(&self, node: NodeId) -> Option<&LiveNode> {
        self.nodes.binary_search_by_key(&node, |live| live.node).ok().map(|rank| &self.nodes[rank])
    }

    /// Where new blocks go when the instance has no live node of its own.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }
}

/// Learns from what an instance says of its steps since the report before.
fn heard(
    steps: &mut Steps,
    profile: &HardwareProfile,
    known: &mut Instance,
    (before, at): &(Load, Timestamp),
) {
    let now = known.reported_at;
    let (tbt_us, took_us) = (known.load.decoding.tbt_us, now.since(*at).as_micros() as f64);
    // A prompt that is in the middle at either end takes its time in one interval and is counted in the other: what is left of the first would look
    // like long steps.
    let is_whole = before.queue_tokens == 0 && known.load.queue_tokens == 0;
    if tbt_us == 0 || took_us <= 0.0 || !is_whole {
        return;
    }
    let computed_us = before.computed_us(&known.load, profile.prefill_ns_per_token) as f64;
    let running = (f64::from(before.running) + f64::from(known.load.running)) / 2.0;
    let told = Told { running, tbt_us, prompts: (computed_us / took_us).min(1.0) };
    if let Some(ratio) = steps.observe(profile, told, now) {
        known.load.pace.observe(ratio, now);
    }
}
