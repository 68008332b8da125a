//! The candidates of a decision: instances with their load, and live nodes with their links.
//!
//! Not here: which blocks a node holds (`index/`) and how all this is learned (the router's view).

pub(in crate::schedule) mod in_flight_prefixes;
pub(in crate::schedule) mod inferred_prefixes;
pub(in crate::schedule) mod load;
pub(in crate::schedule) mod reassignment;
pub(in crate::schedule) mod slow_start;
pub(in crate::schedule) mod staleness;
use crate::id::{Category, Epoch, InstanceId, NodeId, Tier, Timestamp};
use crate::place::Ring;
use crate::schedule::disaggregation::{InstanceRole, Placement};
use crate::schedule::explain::decision::{Decision, Prediction, PromptWork};
use crate::schedule::fleet::load::{Load, LoadInstant};
use crate::schedule::fleet::slow_start::SLOW_START;
use crate::schedule::predict::decode_forecast::{DecodeObservation, DecodePrediction};
use crate::schedule::predict::decode_step_model::{DecodeStepModel, LengthModel, StepReport};
use crate::schedule::predict::overtaking::OvertakingModel;
use crate::schedule::predict::prefill_model::PrefillModel;
use crate::schedule::predict::profile::{HardwareProfile, PathSpeed};
use crate::schedule::predict::relative_speed::{RelativeSpeed, slowdown_octaves, slowed_us};
use crate::schedule::predict::slo_margin::SloMargin;
use crate::schedule::predict::ttft_bias::TtftBias;
use crate::schedule::sources::link_stats::{LinkPath, LinkSpeeds, Price, ReadPath};
use std::sync::Arc;
use std::time::Duration;

/// An instance with an older last report is left out. Reports come five times a second: ten missed
/// in a row indicate a lost instance, not a slow one.
pub const REPORT_STALE_AFTER: Duration = Duration::from_secs(2);

/// An instance with more prompt tokens ahead is left out: 4 Mi tokens are thirty-two prompts of 128
/// Ki, more than two minutes of prefill on an H100, which no caller waits for.
pub const QUEUE_TOKENS_MAX: u64 = 4 * 1_024 * 1_024;

/// Limits of routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteLimits {
    /// Oldest report that counts.
    pub report_stale_after: Duration,
    /// Most prompt tokens ahead of a new request.
    pub queue_tokens_max: u64,
    /// Ramp-up time of an instance that joins.
    pub slow_start: Duration,
    /// Number of leading topology levels that a prefill instance and its decode partner must share;
    /// 0 for none.
    pub pair_shared_levels: u8,
    /// Lower bound on the inter-token limit of any request when it keeps others off its instance,
    /// in microseconds; 0 applies each limit as it is.
    pub tbt_limit_floor_us: u64,
}

impl Default for RouteLimits {
    fn default() -> Self {
        Self {
            report_stale_after: REPORT_STALE_AFTER,
            queue_tokens_max: QUEUE_TOKENS_MAX,
            slow_start: SLOW_START,
            pair_shared_levels: 0,
            tbt_limit_floor_us: 0,
        }
    }
}

/// One instance as last reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The instance.
    pub id: InstanceId,
    /// The node on its own host (no network between), if any.
    pub node: Option<NodeId>,
    /// Whether it can fetch from nodes and save to them. An engine without our client has the
    /// blocks in its GPU memory only.
    pub can_fetch: bool,
    /// Whether it starts waiting requests by priority deadline
    /// ([`priority_deadline`](fn@super::priority_deadline)); otherwise in order of arrival.
    pub orders_by_deadline: bool,
    /// Its load.
    pub load: Load,
    /// Arrival time of the report, on the clock of `now`.
    pub reported_at: Timestamp,
    /// When it joined, on the same clock; `None` if it joined before the router knew of it.
    pub joined_at: Option<Timestamp>,
}

/// A node that serves, in its current epoch. A decision treats an unlisted node as dead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveNode {
    /// The node.
    pub node: NodeId,
    /// Its epoch; holders of another epoch are no source.
    pub epoch: Epoch,
    /// Its share of new blocks relative to other nodes; 0 takes none.
    pub weight: u32,
    /// Blocks that it holds, for bounded load.
    pub blocks: u64,
    /// Bytes of one of its blocks; 0 if unknown, then the profile's model applies.
    pub block_bytes: u64,
    /// Link measurements by instances elsewhere; without any, the profile applies.
    pub remote_stats: Option<Arc<LinkSpeeds>>,
    /// Measurements by instances on the same host.
    pub local_stats: Option<Arc<LinkSpeeds>>,
}

impl LiveNode {
    /// The price of reading from this tier over this path.
    #[must_use]
    pub fn price(&self, tier: Tier, reader: ReadPath, profile: &HardwareProfile) -> Price {
        let lanes = if reader.is_local { &self.local_stats } else { &self.remote_stats };
        match lanes {
            Some(lanes) => lanes.price(tier, reader, profile),
            None => LinkSpeeds::default().price(tier, reader, profile),
        }
    }

    /// Time to stream the KV of `tokens` at this speed without latency, in nanoseconds.
    /// `block_tokens` is the size of a block in tokens.
    #[must_use]
    pub fn stream_ns(
        &self,
        lane: PathSpeed,
        tokens: u64,
        block_tokens: u32,
        profile: &HardwareProfile,
    ) -> u64 {
        match u64::from(block_tokens) {
            block_tokens if block_tokens > 0 && self.block_bytes > 0 => {
                let bytes = u128::from(self.block_bytes) * u128::from(tokens);
                lane.stream_ns(bytes.div_ceil(block_tokens.into()))
            }
            _ => profile.stream_ns(lane, tokens),
        }
    }
}

/// Everything that a decision looks at besides the request and the index.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// Hardware profile of predictions.
    pub profile: HardwareProfile,
    /// Limits of routing.
    pub limits: RouteLimits,
    /// Corrections of TTFT predictions, learned from first tokens.
    pub ttft_bias: TtftBias,
    /// Prefill speed, learned from first tokens.
    pub prefill_model: PrefillModel,
    instances: Vec<Instance>,
    /// Parallel to `instances`.
    paths: Vec<InstancePaths>,
    /// Parallel to `instances`.
    placements: Vec<Placement>,
    nodes: Vec<LiveNode>,
    ring: Ring,
    overtaking: OvertakingModel,
    slo_margin: SloMargin,
    /// Of all instances together.
    speed: RelativeSpeed,
    step_model: DecodeStepModel,
    lengths: LengthModel,
}

/// The paths that an instance took lately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct InstancePaths {
    /// The path to most nodes, shared memory left out: the assumed path to a node that it has not
    /// read from.
    pub(in crate::schedule) usual: Option<LinkPath>,
    /// Nodes that it reached over another path, ascending.
    pub(in crate::schedule) exceptions: Vec<(NodeId, LinkPath)>,
}

impl InstancePaths {
    fn of(taken: &[(NodeId, LinkPath)]) -> InstancePaths {
        let count = |path: LinkPath| taken.iter().filter(|(_, taken)| *taken == path).count();
        let network = LinkPath::ALL.into_iter().filter(|path| *path != LinkPath::SharedMemory);
        let used = network.map(|path| (count(path), path)).filter(|(count, _)| *count > 0);
        // A tie goes to the later kind, so that equal reports give equal results.
        let usual = used.max().map(|(_, path)| path);
        let mut exceptions: Vec<_> = taken.iter().filter(|(_, path)| Some(*path) != usual).copied().collect();
        exceptions.sort_unstable();
        exceptions.dedup_by_key(|(node, _)| *node);
        InstancePaths { usual, exceptions }
    }

    /// The path to this node.
    pub(in crate::schedule) fn to(&self, node: NodeId) -> Option<LinkPath> {
        let other = self.exceptions.binary_search_by_key(&node, |(node, _)| *node);
        other.map_or(self.usual, |rank| Some(self.exceptions[rank].1))
    }
}

impl Fleet {
    /// An empty fleet under a profile, with the default limits.
    #[must_use]
    pub fn new(profile: HardwareProfile) -> Self {
        Self { profile, ..Self::default() }
    }

    /// Adds an instance, or replaces its data except for the requests sent there.
    pub fn put_instance(&mut self, instance: Instance) {
        let speeds = self.corrected_profile();
        match self.instances.binary_search_by_key(&instance.id, |known| known.id) {
            Ok(rank) => {
                let known = &mut self.instances[rank];
                // A restarted process has none of the requests sent before.
                let is_restarted = known.joined_at != instance.joined_at;
                let load = if is_restarted {
                    instance.load
                } else {
                    instance.load.carry_over(&known.load, instance.reported_at)
                };
                let (before, reported_at) = (known.load, known.reported_at);
                *known = Instance { load, ..instance };
                if !is_restarted {
                    observe_steps(&mut self.step_model, &speeds, known, &before, reported_at);
                }
            }
            Err(rank) => {
                self.instances.insert(rank, instance);
                self.paths.insert(rank, InstancePaths::default());
                self.placements.insert(rank, Placement::default());
            }
        }
    }

    /// Removes an instance.
    pub fn remove_instance(&mut self, id: InstanceId) -> Option<Instance> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        self.paths.remove(rank);
        self.placements.remove(rank);
        Some(self.instances.remove(rank))
    }

    /// Replaces the known paths of an instance, at most one per node. No effect on an unknown
    /// instance.
    pub fn set_paths(&mut self, id: InstanceId, taken: &[(NodeId, LinkPath)]) {
        if let Ok(rank) = self.instances.binary_search_by_key(&id, |known| known.id) {
            self.paths[rank] = InstancePaths::of(taken);
        }
    }

    /// Sets the role and topology of an instance; the default is both roles and no topology. No
    /// effect on an unknown instance.
    pub fn set_placement(&mut self, id: InstanceId, part: Placement) {
        if let Ok(rank) = self.instances.binary_search_by_key(&id, |known| known.id) {
            self.placements[rank] = part;
        }
    }

    /// The role and topology of an instance.
    #[must_use]
    pub fn placement(&self, id: InstanceId) -> Placement {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id);
        rank.map_or_else(|_| Placement::default(), |rank| self.placements[rank])
    }

    /// Whether some instance has a role other than both.
    pub(in crate::schedule) fn has_roles(&self) -> bool {
        self.placements.iter().any(|part| part.role != InstanceRole::Both)
    }

    /// Every instance with its paths, role and topology.
    pub(in crate::schedule) fn instances_with_placement(
        &self,
    ) -> impl Iterator<Item = (&Instance, &InstancePaths, Placement)> {
        let all = self.instances.iter().zip(&self.paths).zip(&self.placements);
        all.map(|((instance, paths), part)| (instance, paths, *part))
    }

    /// Every instance with its known paths.
    pub(in crate::schedule) fn instances_with_paths(
        &self,
    ) -> impl Iterator<Item = (&Instance, &InstancePaths)> {
        self.instances.iter().zip(&self.paths)
    }

    /// An instance with its known paths.
    pub(in crate::schedule) fn with_paths(&self, id: InstanceId) -> Option<(&Instance, &InstancePaths)> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        Some((&self.instances[rank], &self.paths[rank]))
    }

    /// Records a sent decision in the load of its instance. The second half of routing:
    /// [`choose`](super::choose) changes nothing, so an unsent decision leaves no trace.
    pub fn record(&mut self, decision: &Decision, now: Timestamp) {
        self.record_load(decision, decision.uncorrected.prefill_us, now);
    }

    /// Records it; `prefill_us` is the prefill time that general statistics learn from it.
    fn record_load(&mut self, decision: &Decision, prefill_us: u64, now: Timestamp) {
        let count = self.instances.len();
        if let Ok(rank) = self.instances.binary_search_by_key(&decision.instance, |known| known.id) {
            let tokens = decision.recompute_tokens;
            let added_us = self.added_prefill_us(&self.instances[rank], prefill_us, tokens, now);
            let known = &mut self.instances[rank];
            known.load.record(decision, LoadInstant { now, reported_at: known.reported_at });
            if decision.handover.is_none() {
                known.load.tightest_limit.record(decision, self.limits.tbt_limit_floor_us, now);
            }
            self.overtaking.record(added_us, count, now);
            self.lengths.observe_sent(decision.decode.kv_tokens, tokens, added_us);
        }
        // The decode partner has no prompt to compute, and one more running request.
        let partner = decision.handover.map(|handover| handover.instance);
        let rank = partner.map(|partner| self.instances.binary_search_by_key(&partner, |known| known.id));
        if let Some(Ok(rank)) = rank {
            let load = &mut self.instances[rank].load;
            load.routed = load.routed.saturating_add(1);
            load.tightest_limit.record(decision, self.limits.tbt_limit_floor_us, now);
        }
    }

    /// Records a decision while only `tokens` of its tokens to compute are believed. Its other
    /// amounts count by that share, its inter-token limit keeps no request away, and its prefill
    /// counts no longer than the profile says for this many tokens.
    pub fn record_partial(&mut self, decision: &Decision, tokens: u32, now: Timestamp) {
        let (all, tokens) = (decision.recompute_tokens, tokens.min(decision.recompute_tokens));
        let share = |value: u64| match all {
            0 => value,
            all => (u128::from(value) * u128::from(tokens) / u128::from(all)) as u64,
        };
        let prefill_us = share(decision.uncorrected.prefill_us);
        let parts = Prediction { prefill_us, ..decision.uncorrected };
        let kv_tokens = share(decision.decode.kv_tokens.into()) as u32;
        let pacing = DecodePrediction { kv_tokens, limit_us: 0, ..decision.decode };
        let candidates = Vec::new();
        let counted = Decision {
            recompute_tokens: tokens,
            uncorrected: parts,
            decode: pacing,
            candidates,
            ..decision.clone()
        };
        let alone_us = self.corrected_profile().prefill_ns(0, tokens.into()) / 1_000;
        self.record_load(&counted, prefill_us.min(alone_us), now);
    }

    /// The profile with learned prefill speeds.
    #[must_use]
    pub fn corrected_profile(&self) -> HardwareProfile {
        self.profile.with_prefill_factors(self.prefill_model.factors())
    }

    /// Prompt tokens that wait or run at all instances.
    #[must_use]
    pub fn waiting_tokens(&self) -> u64 {
        let tokens = self.instances.iter().map(|instance| instance.load.tokens_ahead());
        tokens.fold(0, u64::saturating_add)
    }

    /// Learns from a first token that came after `ttft_us`; `parts` is the prediction before
    /// learned corrections.
    pub fn observe_first_token(
        &mut self,
        instance: InstanceId,
        parts: &Prediction,
        ttft_us: u64,
        now: Timestamp,
    ) {
        let known = self.instances.binary_search_by_key(&instance, |known| known.id).ok();
        let times = known.map_or(1.0, |rank| self.slowdown(&self.instances[rank], now));
        let PromptWork { context_tokens, new_tokens } = parts.prompt;
        // For a prompt hashed as text, the number of computed tokens is unknown.
        let is_known = parts.prompt != PromptWork::default();
        let computing_us = |profile: &HardwareProfile| {
            profile.prompt_ns(context_tokens.into(), new_tokens.into()).map(|ns| slowed_us(ns / 1_000, times))
        };
        // Predicts again with current speeds, so that changes learned since then are not learned
        // twice.
        let by_now_us = computing_us(&self.corrected_profile()).into_iter().fold(0, u64::saturating_add);
        let parts = Prediction { prefill_us: if is_known { by_now_us } else { parts.prefill_us }, ..*parts };
        let predicted = self.ttft_bias.apply(&parts, now);
        let octaves = slowdown_octaves(&predicted, ttft_us);
        let others_us = Prediction { prefill_us: 0, ..predicted }.ttft_us();
        let learnt = match is_known {
            true => self.prefill_model.observe(computing_us(&self.profile), others_us, ttft_us),
            false => Some(1.0),
        };
        match learnt {
            Some(times) => {
                self.ttft_bias.observe(&parts, ttft_us);
                self.ttft_bias.rescale_prefill(times);
            }
            None => self.ttft_bias.reset_ttft(),
        }
        let speed = known.map(|rank| &mut self.instances[rank].load.speed);
        if let Some((speed, octaves)) = speed.zip(octaves) {
            // The prediction already includes the instance's believed slowdown.
            let octaves = octaves + times.log2();
            speed.observe(octaves, now);
            self.speed.observe(octaves, now);
        }
    }

    /// Slowdown of an instance relative to the fleet, as a factor.
    pub(in crate::schedule) fn slowdown(&self, instance: &Instance, now: Timestamp) -> f64 {
        instance.load.speed.slowdown(self.speed, now)
    }

    /// Learns from a request of this category that ended with `output_tokens` tokens; a `tbt_us` of
    /// 0 teaches nothing about its speed.
    pub fn observe_completion(
        &mut self,
        category: Category,
        output_tokens: u32,
        paced: DecodeObservation<'_>,
        now: Timestamp,
    ) {
        let DecodeObservation { uncorrected: parts, predicted_us, tokens, tbt_us, limit_us } = paced;
        if output_tokens > 0 {
            self.lengths.observe_output(category, output_tokens);
        }
        // A request admitted against its prediction says nothing about the margin of others. The
        // current prediction is no criterion: it includes bursts that slow all requests.
        if tbt_us > 0 && limit_us > 0 && predicted_us <= limit_us {
            self.slo_margin.observe(tbt_us > limit_us, tokens, now);
        }
        self.ttft_bias.observe_tbt(parts, tbt_us, now);
    }

    pub(in crate::schedule) fn slo_margin(&self) -> &SloMargin {
        &self.slo_margin
    }

    pub(in crate::schedule) fn step_model(&self) -> &DecodeStepModel {
        &self.step_model
    }

    pub(in crate::schedule) fn lengths(&self) -> &LengthModel {
        &self.lengths
    }

    /// Learned factors on the profile's base step time, and on the time that each decoding request
    /// adds.
    #[must_use]
    pub fn step_factors(&self, now: Timestamp) -> [f64; 2] {
        self.step_model.factors_at(now)
    }

    pub(in crate::schedule) fn overtaking(&self) -> &OvertakingModel {
        &self.overtaking
    }

    /// The load of an instance.
    pub(in crate::schedule) fn load_mut(&mut self, id: InstanceId) -> Option<&mut Load> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        Some(&mut self.instances[rank].load)
    }

    /// Replaces the live nodes. Rebuilds the placement ring only if members or weights changed.
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

    /// The instance with this id.
    #[must_use]
    pub fn instance(&self, id: InstanceId) -> Option<&Instance> {
        self.instances.binary_search_by_key(&id, |known| known.id).ok().map(|rank| &self.instances[rank])
    }

    /// The node with this id, if it is live.
    #[must_use]
    pub fn live(&self, node: NodeId) -> Option<&LiveNode> {
        self.nodes.binary_search_by_key(&node, |live| live.node).ok().map(|rank| &self.nodes[rank])
    }

    /// The ring for new blocks of an instance without a live node of its own.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }
}

/// Learns from an instance's report of its steps since the previous report.
fn observe_steps(
    steps: &mut DecodeStepModel,
    profile: &HardwareProfile,
    known: &mut Instance,
    before: &Load,
    at: Timestamp,
) {
    let now = known.reported_at;
    let (tbt_us, took_us) = (known.load.decode.tbt_us, now.since(at).as_micros() as f64);
    // A prompt that is in progress at either end spends time in one interval and counts in the
    // other: its remainder would look like long steps.
    let is_whole = before.queue_tokens == 0 && known.load.queue_tokens == 0;
    if tbt_us == 0 || took_us <= 0.0 || !is_whole {
        return;
    }
    let computed_us = before.computed_us(&known.load, profile.prefill_ns_per_token) as f64;
    let running = (f64::from(before.running) + f64::from(known.load.running)) / 2.0;
    let report = StepReport { running, tbt_us, prefill_share: (computed_us / took_us).min(1.0) };
    if let Some(ratio) = steps.observe(profile, report, now) {
        known.load.pace.observe(ratio, now);
    }
}
