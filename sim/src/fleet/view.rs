//! A router's knowledge: the production index of nodes' blocks, the same of instances' GPU memory,
//! and the last reported loads. All of it is as old as its delivery took.
//!
//! Not here: delays of delivery (`mod.rs`), and decisions (`routers/`).

use kv_core::id::{BlockHash, Category, IdentityDigest, InstanceId, NodeId, Timestamp};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use kv_core::index::{Index, PrefixMatch};
use kv_core::schedule::{
    Decision, DecodeObservation, Fleet, InFlightPrefix, InFlightPrefixes, Instance, LiveNode, Load,
    Prediction, PrefixLocations, ResidentPrefix, RouteLimits, RouteRequest,
};

use super::FleetSetup;
use crate::routers::FetchScope;

/// State of one instance besides its [`Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InstanceUse {
    /// Reported share of GPU memory reserved by running requests, 0 to 1.
    pub memory_in_use: f64,
    /// Requests sent to it that have not ended, known to the router without a report.
    pub in_flight: u32,
    /// Prompt tokens of these requests.
    pub in_flight_tokens: u64,
}

/// A router's view of the fleet.
pub struct RouterView {
    /// All instances, with loads.
    pub fleet: Fleet,
    /// A fleet of each instance alone, to plan for that instance.
    single_fleets: Vec<Fleet>,
    /// Use of each instance.
    pub instance_use: Vec<InstanceUse>,
    /// Nodes that instances may fetch from under routers other than the production scheduler.
    pub fetch_scope: FetchScope,
    /// Whether instances start waiting requests by their priority deadline.
    uses_priority_deadlines: bool,
    /// Whether instances report their GPU memory: if not, no request waits for blocks that they
    /// compute for others.
    reports_residency: bool,
    held: Index,
    resident: Index,
    sent: InFlightPrefixes,
    live: Vec<LiveNode>,
}

/// One request, as given to a router.
pub struct RouteQuery<'a> {
    /// The request.
    pub request: RouteRequest,
    /// Nodes that hold its leading blocks.
    pub matched: &'a PrefixMatch,
    /// Instances that have leading blocks in GPU memory.
    pub resident: &'a [ResidentPrefix],
    /// Instances that compute leading blocks for others, for the production scheduler.
    pub in_flight_prefixes: &'a [InFlightPrefix],
    /// Current time of the simulation.
    pub now: Timestamp,
}

impl RouteQuery<'_> {
    /// Holders, residency and in-flight prefixes, in the production scheduler's form.
    #[must_use]
    pub fn held(&self) -> PrefixLocations<'_> {
        PrefixLocations { matched: self.matched, resident: self.resident, in_flight: self.in_flight_prefixes }
    }

    /// Leading blocks in an instance's GPU memory.
    #[must_use]
    pub fn resident_blocks(&self, instance: InstanceId) -> u32 {
        self.resident.iter().find(|one| one.instance == instance).map_or(0, |one| one.blocks)
    }

    /// Leading blocks in an instance or its own node.
    #[must_use]
    pub fn local_blocks(&self, instance: InstanceId) -> u32 {
        self.resident_blocks(instance)
            .max(self.matched.node_prefix_blocks(NodeId(instance.0)))
            .min(self.request.blocks)
    }
}

impl RouterView {
    /// The view before any report.
    #[must_use]
    pub fn new(setup: &FleetSetup) -> RouterView {
        let FleetSetup { first, nodes, profile, fetch_scope: plane, .. } = *setup;
        let live: Vec<LiveNode> = (first..first + nodes).map(|id| live_node(id, 0)).collect();
        let places = setup.instance_ids().end as usize;
        let mut view = RouterView {
            fleet: Fleet::new(profile),
            // Slots below the first number stay unused.
            single_fleets: vec![Fleet::new(profile); places],
            instance_use: vec![InstanceUse::default(); places],
            fetch_scope: plane,
            uses_priority_deadlines: setup.uses_priority_deadlines,
            reports_residency: setup.is_batching(),
            held: Index::default(),
            sent: InFlightPrefixes::default(),
            resident: Index::default(),
            live: live.clone(),
        };
        view.fleet.set_nodes(live.clone());
        for node in &live {
            view.held.apply(&Command::Join(node_record(node.node)));
        }
        for id in setup.instance_ids() {
            let instance = Instance {
                id: InstanceId(id),
                node: (id - first < nodes).then_some(NodeId(id)),
                can_fetch: true,
                orders_by_deadline: setup.uses_priority_deadlines,
                load: Load::default(),
                reported_at: Timestamp(0),
                joined_at: None,
            };
            if setup.join_ns(id).is_none() {
                view.fleet.put_instance(instance);
            }
            let limits = RouteLimits { queue_tokens_max: u64::MAX, ..RouteLimits::default() };
            let single = &mut view.single_fleets[id as usize];
            single.limits = limits;
            single.set_nodes(live.clone());
            single.put_instance(Instance { orders_by_deadline: false, ..instance });
            view.resident.apply(&Command::Join(node_record(NodeId(id))));
        }
        let epochs: Vec<_> = view.held.nodes().map(|state| (state.record.node, state.epoch)).collect();
        for live in &mut view.live {
            let epoch = epochs.iter().find(|(node, _)| *node == live.node);
            live.epoch = epoch.map_or(live.epoch, |(_, epoch)| *epoch);
        }
        view.publish_nodes();
        view
    }

    /// Applies announced changes of a node's blocks.
    pub(super) fn apply_node_changes(&mut self, node: NodeId, changes: Vec<Change>) {
        announce(&mut self.held, node, changes);
    }

    /// Applies reported changes of an instance's GPU memory.
    pub(super) fn apply_memory_changes(&mut self, instance: InstanceId, changes: Vec<Change>) {
        announce(&mut self.resident, NodeId(instance.0), changes);
    }

    /// Applies a load report; a late instance joins with its first one.
    pub fn apply_load(&mut self, instance: InstanceId, load: Load, memory_in_use: f64, now: Timestamp) {
        let at = instance.0 as usize;
        if self.fleet.instance(instance).is_none()
            && let Some(known) = self.single_fleets[at].instance(instance).copied()
        {
            self.fleet.put_instance(Instance {
                orders_by_deadline: self.uses_priority_deadlines,
                joined_at: Some(now),
                ..known
            });
        }
        for fleet in [&mut self.fleet, &mut self.single_fleets[at]] {
            if let Some(known) = fleet.instance(instance).copied() {
                fleet.put_instance(Instance { load, reported_at: now, ..known });
            }
        }
        self.instance_use[instance.0 as usize].memory_in_use = memory_in_use;
    }

    /// Applies reported block counts of the nodes.
    pub fn apply_block_counts(&mut self, blocks: impl Fn(NodeId) -> u64) {
        self.live.iter_mut().for_each(|live| live.blocks = blocks(live.node));
        self.publish_nodes();
    }

    fn publish_nodes(&mut self) {
        self.fleet.set_nodes(self.live.clone());
        self.single_fleets.iter_mut().for_each(|single| single.set_nodes(self.live.clone()));
    }

    /// Records a decision that was sent.
    pub(super) fn record_sent(
        &mut self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        now: Timestamp,
    ) {
        let at = decision.instance.0 as usize;
        for fleet in [&mut self.fleet, &mut self.single_fleets[at]] {
            fleet.record(decision, now);
        }
        if self.reports_residency {
            self.sent.record(request, hashes, decision, now);
        }
        self.instance_use[at].in_flight += 1;
        self.instance_use[at].in_flight_tokens += u64::from(request.input_tokens);
    }

    /// Records a first token. Single-instance fleets keep the plain profile, because they model
    /// other routers' plans.
    pub(super) fn record_first_token(
        &mut self,
        instance: u32,
        parts: &Prediction,
        ttft_ns: u64,
        now_ns: u64,
    ) {
        let now = Timestamp(now_ns / 1_000);
        self.fleet.observe_first_token(InstanceId(instance), parts, ttft_ns / 1_000, now);
    }

    /// Records the output length and pacing of a finished request.
    pub(super) fn record_output(
        &mut self,
        category: Category,
        output_tokens: u32,
        paced: DecodeObservation<'_>,
        now: Timestamp,
    ) {
        self.fleet.observe_completion(category, output_tokens, paced, now);
    }

    /// Records the end of a request.
    pub(super) fn record_end(&mut self, instance: InstanceId, input_tokens: u64) {
        let seen = &mut self.instance_use[instance.0 as usize];
        seen.in_flight = seen.in_flight.saturating_sub(1);
        seen.in_flight_tokens = seen.in_flight_tokens.saturating_sub(input_tokens);
    }

    /// The fleet of one instance alone.
    #[must_use]
    pub fn single_fleet(&self, instance: InstanceId) -> &Fleet {
        &self.single_fleets[instance.0 as usize]
    }

    /// All instances.
    pub fn instances(&self) -> impl Iterator<Item = InstanceId> + '_ {
        self.fleet.instances().iter().map(|instance| instance.id)
    }

    /// The last reported load of an instance, plus requests routed there since.
    #[must_use]
    pub fn load(&self, instance: InstanceId) -> Load {
        self.fleet.instance(instance).map_or_else(Load::default, |instance| instance.load)
    }

    /// Instances that compute leading blocks of a prompt for others.
    pub(super) fn in_flight_prefixes(
        &self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        now: Timestamp,
    ) -> Vec<InFlightPrefix> {
        self.sent.lookup(request, hashes, now).into_vec()
    }

    /// Holders and residency of the leading blocks of a prompt.
    pub(super) fn look_up(&self, hashes: &[BlockHash]) -> (PrefixMatch, Vec<ResidentPrefix>) {
        let resident = self.resident.longest_prefix(hashes);
        let of = |node: NodeId| ResidentPrefix {
            instance: InstanceId(node.0),
            blocks: resident.node_prefix_blocks(node),
        };
        (self.held.longest_prefix(hashes), resident.nodes().map(of).collect())
    }
}

fn announce(index: &mut Index, node: NodeId, changes: Vec<Change>) {
    if !changes.is_empty()
        && let Some((epoch, seq)) = index.next_seq(node)
    {
        index.apply(&Command::Announce(vec![Announcement { node, epoch, seq, changes }]));
    }
}

fn live_node(id: u32, blocks: u64) -> LiveNode {
    LiveNode {
        node: NodeId(id),
        epoch: Default::default(),
        weight: 1,
        blocks,
        block_bytes: 0,
        remote_stats: None,
        local_stats: None,
    }
}

fn node_record(node: NodeId) -> NodeRecord {
    NodeRecord {
        node,
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest::default(),
        block_bytes: 0,
    }
}
