//! What a router knows: the production index of what nodes hold, the same of what instances have in GPU memory, and loads as last
//! reported. Everything in it is as old as the way it came.
//!
//! Not here: when word arrives (`mod.rs`), and what is made of it (`routers/`).

use kv_core::id::{BlockHash, Category, IdentityDigest, InstanceId, NodeId, Timestamp};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use kv_core::index::{Index, PrefixMatch};
use kv_core::schedule::{
    Coming, Decision, Fleet, Held, Instance, Limits, LiveNode, Load, Paced, Prediction, Resident,
    RouteRequest, SentPrefixes,
};

use super::Setup;
use crate::routers::Plane;

/// What is known of one instance besides its [`Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Share of GPU memory that running requests have taken, as reported, 0 to 1.
    pub memory_in_use: f64,
    /// Requests sent there that have not ended, which whoever sends them knows.
    pub in_flight: u32,
    /// Prompt tokens of these.
    pub in_flight_tokens: u64,
}

/// The view.
pub struct View {
    /// All instances, with loads.
    pub fleet: Fleet,
    /// Each alone, for what one instance would do.
    singles: Vec<Fleet>,
    /// By instance.
    pub seen: Vec<Seen>,
    /// From where instances may fetch under a router that is not the production scheduler.
    pub plane: Plane,
    /// Whether instances begin what waits in the order of turns.
    orders: bool,
    /// Whether they tell what they have in GPU memory: of one that does not, nobody waits for what it computes for others.
    tells: bool,
    held: Index,
    resident: Index,
    sent: SentPrefixes,
    live: Vec<LiveNode>,
}

/// One request, as a router is asked.
pub struct Ask<'a> {
    /// What is known of it.
    pub request: RouteRequest,
    /// Who has its leading blocks.
    pub matched: &'a PrefixMatch,
    /// Instances that have leading blocks in GPU memory.
    pub resident: &'a [Resident],
    /// Instances that compute leading blocks for others, for the production scheduler.
    pub coming: &'a [Coming],
    /// Now, on the simulation's clock.
    pub now: Timestamp,
}

impl Ask<'_> {
    /// The two planes, as the production scheduler takes them.
    #[must_use]
    pub fn held(&self) -> Held<'_> {
        Held { matched: self.matched, resident: self.resident, coming: self.coming }
    }

    /// Leading blocks that an instance has in GPU memory.
    #[must_use]
    pub fn resident_blocks(&self, instance: InstanceId) -> u32 {
        self.resident.iter().find(|one| one.instance == instance).map_or(0, |one| one.blocks)
    }

    /// Leading blocks that an instance and its own node have.
    #[must_use]
    pub fn local_blocks(&self, instance: InstanceId) -> u32 {
        self.resident_blocks(instance).max(self.matched.per_node(NodeId(instance.0))).min(self.request.blocks)
    }
}

impl View {
    pub(crate) fn new(setup: &Setup) -> View {
        let Setup { first, nodes, profile, plane, .. } = *setup;
        let live: Vec<LiveNode> = (first..first + nodes).map(|id| live(id, 0)).collect();
        let places = setup.numbers().end as usize;
        let mut view = View {
            fleet: Fleet::new(profile),
            // None has a number below the first.
            singles: vec![Fleet::new(profile); places],
            seen: vec![Seen::default(); places],
            plane,
            orders: setup.orders,
            tells: setup.is_batching(),
            held: Index::default(),
            sent: SentPrefixes::default(),
            resident: Index::default(),
            live: live.clone(),
        };
        view.fleet.set_nodes(live.clone());
        for node in &live {
            view.held.apply(&Command::Join(record(node.node)));
        }
        for id in setup.numbers() {
            let instance = Instance {
                id: InstanceId(id),
                node: (id - first < nodes).then_some(NodeId(id)),
                fetches: true,
                orders: setup.orders,
                load: Load::default(),
                reported_at: Timestamp(0),
                joined_at: None,
            };
            if setup.joins_ns(id).is_none() {
                view.fleet.put_instance(instance);
            }
            let limits = Limits { queue_tokens_max: u64::MAX, ..Limits::default() };
            let single = &mut view.singles[id as usize];
            single.limits = limits;
            single.set_nodes(live.clone());
            single.put_instance(Instance { orders: false, ..instance });
            view.resident.apply(&Command::Join(record(NodeId(id))));
        }
        let epochs: Vec<_> = view.held.nodes().map(|state| (state.record.node, state.epoch)).collect();
        for live in &mut view.live {
            let epoch = epochs.iter().find(|(node, _)| *node == live.node);
            live.epoch = epoch.map_or(live.epoch, |(_, epoch)| *epoch);
        }
        view.tell_nodes();
        view
    }

    /// Word of what nodes hold.
    pub(super) fn announced(&mut self, node: NodeId, changes: Vec<Change>) {
        announce(&mut self.held, node, changes);
    }

    /// Word of what an instance has in GPU memory.
    pub(super) fn told(&mut self, instance: InstanceId, changes: Vec<Change>) {
        announce(&mut self.resident, NodeId(instance.0), changes);
    }

    /// Word of an instance's load, and of the blocks that its node holds.
    pub(crate) fn reported(&mut self, instance: InstanceId, load: Load, memory_in_use: f64, now: Timestamp) {
        let at = instance.0 as usize;
        if self.fleet.instance(instance).is_none()
            && let Some(known) = self.singles[at].instance(instance).copied()
        {
            self.fleet.put_instance(Instance { orders: self.orders, joined_at: Some(now), ..known });
        }
        for fleet in [&mut self.fleet, &mut self.singles[at]] {
            if let Some(known) = fleet.instance(instance).copied() {
                fleet.put_instance(Instance { load, reported_at: now, ..known });
            }
        }
        self.seen[instance.0 as usize].memory_in_use = memory_in_use;
    }

    /// Word of how many blocks each node holds.
    pub(crate) fn counted(&mut self, blocks: impl Fn(NodeId) -> u64) {
        self.live.iter_mut().for_each(|live| live.blocks = blocks(live.node));
        self.tell_nodes();
    }

    fn tell_nodes(&mut self) {
        self.fleet.set_nodes(self.live.clone());
        self.singles.iter_mut().for_each(|single| single.set_nodes(self.live.clone()));
    }

    /// Notes that a decision was sent.
    pub(super) fn sent(
        &mut self,
        (request, hashes): (&RouteRequest, &[BlockHash]),
        decision: &Decision,
        now: Timestamp,
    ) {
        let at = decision.instance.0 as usize;
        for fleet in [&mut self.fleet, &mut self.singles[at]] {
            fleet.record(decision, now);
        }
        if self.tells {
            self.sent.sent(request, hashes, decision, now);
        }
        self.seen[at].in_flight += 1;
        self.seen[at].in_flight_tokens += u64::from(request.input_tokens);
    }

    /// Word of a first token. The fleets of one instance each keep to the profile: by them the routers that others describe are judged.
    pub(super) fn first_token(&mut self, instance: u32, parts: &Prediction, ttft_ns: u64, now_ns: u64) {
        let now = Timestamp(now_ns / 1_000);
        self.fleet.first_token(InstanceId(instance), parts, ttft_ns / 1_000, now);
    }

    /// Word of how much a request said, and how fast, when it has ended.
    pub(super) fn said(
        &mut self,
        (category, output_tokens): (Category, u32),
        paced: Paced<'_>,
        now: Timestamp,
    ) {
        self.fleet.ended(category, output_tokens, paced, now);
    }

    /// Notes that a request ended.
    pub(super) fn ended(&mut self, instance: InstanceId, input_tokens: u64) {
        let seen = &mut self.seen[instance.0 as usize];
        seen.in_flight = seen.in_flight.saturating_sub(1);
        seen.in_flight_tokens = seen.in_flight_tokens.saturating_sub(input_tokens);
    }

    /// What one instance would do for a request.
    #[must_use]
    pub fn single(&self, instance: InstanceId) -> &Fleet {
        &self.singles[instance.0 as usize]
    }

    /// All instances.
    pub fn instances(&self) -> impl Iterator<Item = InstanceId> + '_ {
        self.fleet.instances().iter().map(|instance| instance.id)
    }

    /// The load of an instance, as last reported, and what was routed there since.
    #[must_use]
    pub fn load(&self, instance: InstanceId) -> Load {
        self.fleet.instance(instance).map_or_else(Load::default, |instance| instance.load)
    }

    /// Who computes leading blocks of a prompt for others.
    pub(super) fn coming(&self, request: &RouteRequest, hashes: &[BlockHash], now: Timestamp) -> Vec<Coming> {
        self.sent.of(request, hashes, now).into_vec()
    }

    /// Who has the leading blocks of a prompt.
    pub(super) fn look_up(&self, hashes: &[BlockHash]) -> (PrefixMatch, Vec<Resident>) {
        let resident = self.resident.longest_prefix(hashes);
        let of = |node: NodeId| Resident { instance: InstanceId(node.0), blocks: resident.per_node(node) };
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

fn live(id: u32, blocks: u64) -> LiveNode {
    LiveNode {
        node: NodeId(id),
        epoch: Default::default(),
        weight: 1,
        blocks,
        block_bytes: 0,
        afar: None,
        near: None,
    }
}

fn record(node: NodeId) -> NodeRecord {
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
