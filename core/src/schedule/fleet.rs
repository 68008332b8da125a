//! Who could take a request and who could give KV for it: instances with their load, live nodes with
//! their links.
//!
//! Not here: which blocks a node holds (`index/`) and how all this is learnt (the router's view).

use std::time::Duration;

use super::load::Load;
use super::profile::{HardwareProfile, Lane};
use crate::id::{Epoch, InstanceId, NodeId, Tier, Timestamp};
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
}

impl Default for Limits {
    fn default() -> Self {
        Self { report_stale_after: REPORT_STALE_AFTER, queue_tokens_max: QUEUE_TOKENS_MAX }
    }
}

/// One instance as last reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The instance.
    pub id: InstanceId,
    /// The node it uses as its own (same host, no network between), if any.
    pub node: Option<NodeId>,
    /// Its work.
    pub load: Load,
    /// When the report came in, on the clock of `now`.
    pub reported_at: Timestamp,
}

/// A node that serves, in the epoch that counts. A node that is not listed is dead to a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveNode {
    /// The node.
    pub node: NodeId,
    /// Its epoch; holders of another epoch are no source.
    pub epoch: Epoch,
    /// Its share of new blocks against other nodes; 0 takes none.
    pub weight: u32,
    /// Blocks it holds, for bounded load.
    pub blocks: u64,
    /// Its measured link to others, where one is known; else the profile's network.
    pub link: Option<Lane>,
    /// The measured way of what comes out of one tier to others, medium and link together, in the order of [`Tier::ALL`]; where
    /// one is not known, see [`LiveNode::lane`].
    pub tiers: [Option<Lane>; Tier::ALL.len()],
}

impl LiveNode {
    /// What comes out of this tier to an instance at another node. Where that was not measured, the profile's tier through the
    /// best way that was: of the faster tiers, else the link. `link` pools all tiers, and a slow SSD says nothing of how fast
    /// the node's memory comes: where an SSD was measured the link counts for none, and the profile's network does.
    #[must_use]
    pub fn lane(&self, tier: Tier, profile: &HardwareProfile) -> Lane {
        if let Some(measured) = self.tiers[tier as usize] {
            return measured;
        }
        let faster = [Tier::Dram, Tier::Gpu].into_iter().filter_map(|tier| self.tiers[tier as usize]);
        let best = faster.max_by_key(|lane| (lane.bytes_per_s, std::cmp::Reverse(lane.latency_ns)));
        let link = self.link.filter(|_| self.tiers[Tier::Ssd as usize].is_none());
        profile.tier(tier).through(best.or(link).unwrap_or(profile.network))
    }
}

/// Everything a decision looks at besides the request and the index.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// Speeds predictions are made with.
    pub profile: HardwareProfile,
    /// What filters an instance out.
    pub limits: Limits,
    instances: Vec<Instance>,
    nodes: Vec<LiveNode>,
    ring: Ring,
}

impl Fleet {
    /// An empty fleet under a profile, with the default limits.
    #[must_use]
    pub fn new(profile: HardwareProfile) -> Self {
        Self { profile, ..Self::default() }
    }

    /// Adds an instance, or replaces what was known of it.
    pub fn put_instance(&mut self, instance: Instance) {
        match self.instances.binary_search_by_key(&instance.id, |known| known.id) {
            Ok(rank) => self.instances[rank] = instance,
            Err(rank) => self.instances.insert(rank, instance),
        }
    }

    /// Forgets an instance.
    pub fn remove_instance(&mut self, id: InstanceId) -> Option<Instance> {
        let rank = self.instances.binary_search_by_key(&id, |known| known.id).ok()?;
        Some(self.instances.remove(rank))
    }

    /// The load of an instance, to [`record`](super::record) a decision in.
    pub fn load_mut(&mut self, id: InstanceId) -> Option<&mut Load> {
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
