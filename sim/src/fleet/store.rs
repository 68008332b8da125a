//! The nodes: what each holds, by the production tier book and policies, and how long bytes take from there.
//!
//! Moves between tiers take no time; what is read waits for what is read before it over the same lane. Not here: who is asked for what (the
//! decision), and when routers hear of changes (`mod.rs`).

use std::time::Duration;

use kv_core::evict;
use kv_core::id::{BlockHash, CallerId, Category, LeaseId, NodeId, TenantId, Tier, Timestamp};
use kv_core::index::command::Change;
use kv_core::schedule::{HardwareProfile, Lane, Source};
use kv_core::tier::{Action, Asker, Book, Capacity, Charge, Limits, Offer, Offered, Room, TierLimits};

use super::Setup;

const CHARGE: Charge = Charge { frame: 1, dram: 1, ssd: 1 };
const ROOM: Room = Room { dram: true, ssd: true, prefetch: true, gpu_read: true, lower: true, lift: true };
const REFIT_EVERY_US: u64 = 1_000_000;

/// A node.
struct Node {
    book: Book,
    refitted_us: u64,
    /// When its lane to others is free, and that to its own instance.
    afar_free_ns: u64,
    near_free_ns: u64,
}

/// All nodes; node n is the own one of instance n.
pub(super) struct Store {
    nodes: Vec<Node>,
    profile: HardwareProfile,
    leases: u64,
    /// Whether what a request fetched is held until its own blocks are saved.
    holds: bool,
}

/// Of a prompt that is saved, the blocks that are left out.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leaves<'a> {
    /// Leading ones that came from elsewhere and are held until now.
    Held(&'a Fetched),
    /// From so many on, so many: those that came from nodes.
    Fetched(u32, u32),
    /// Those that the node has: what came from elsewhere is saved there as well.
    Known,
}

/// What a fetch comes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fetched {
    /// Blocks that come, in prefix order from the first asked for.
    pub(super) blocks: u32,
    pub(super) ready_ns: u64,
    /// Of these blocks, those of its own node and those of others, by tier.
    pub(super) from: [[u32; 3]; 2],
    /// Under which they are held until they are given back, if they are.
    pub(super) lease: LeaseId,
}

impl Store {
    /// The nodes of a fleet.
    pub(super) fn new(setup: &Setup) -> Store {
        let profile = setup.actual;
        let (dram_blocks, ssd_blocks) = setup.node_blocks;
        let policy = setup.policy.as_str();
        let (watermark_high, watermark_low) = setup.watermarks;
        let tier = |blocks| TierLimits { capacity: Capacity::Blocks(blocks), watermark_high, watermark_low };
        let node = |seed: u32| {
            let limits = Limits {
                dram: tier(dram_blocks),
                ssd: tier(ssd_blocks),
                lease: Duration::MAX,
                leases_max: if setup.is_batching() { 1 } else { usize::MAX },
                seed: seed.into(),
            };
            // Nodes as they are leave nothing to chance.
            let chance = if setup.is_batching() { seed.into() } else { 0 };
            let policy = || evict::by_name(policy, chance).or_else(|| evict::by_name(evict::DEFAULT, 0));
            let (Some(dram), Some(ssd)) = (policy(), policy()) else {
                unreachable!("the default policy has a name")
            };
            let book = Book::new(&limits, dram, ssd).with_ssd_reuse_min(setup.ssd_reuse_min);
            Node { book, refitted_us: 0, afar_free_ns: 0, near_free_ns: 0 }
        };
        // None has a number below the first.
        Store {
            nodes: (0..setup.first + setup.nodes).map(node).collect(),
            profile,
            leases: 0,
            holds: !setup.is_batching(),
        }
    }

    /// Fetches blocks of a prompt from the sources of a decision, for the instance with this own node.
    pub(super) fn fetch(
        &mut self,
        sources: &[Source],
        hashes: &[BlockHash],
        (own, block_tokens, category): (NodeId, u32, Category),
        now_ns: u64,
    ) -> Fetched {
        let asker = self.asker(category);
        let mut fetched = Fetched { ready_ns: now_ns, lease: asker.lease, ..Fetched::default() };
        for source in sources {
            let range = source.start_blocks as usize..(source.start_blocks + source.len_blocks) as usize;
            let Some(wanted) = hashes.get(range.start..range.end.min(hashes.len())) else { break };
            let reached = self.read(source.node, wanted, (own, block_tokens, asker), now_ns);
            fetched.blocks += reached.blocks;
            fetched.ready_ns = fetched.ready_ns.max(reached.ready_ns);
            let sums = fetched.from.iter_mut().flatten();
            sums.zip(reached.from.iter().flatten()).for_each(|(sum, blocks)| *sum += blocks);
            if reached.blocks < source.len_blocks {
                break;
            }
        }
        fetched
    }

    fn read(
        &mut self,
        from: NodeId,
        wanted: &[BlockHash],
        (own, block_tokens, asker): (NodeId, u32, Asker),
        now_ns: u64,
    ) -> Fetched {
        let is_own = from == own;
        let lanes = Tier::ALL.map(|tier| self.lane(tier, is_own));
        let Some(node) = self.nodes.get_mut(from.0 as usize) else { return Fetched::default() };
        let now = refit(node, now_ns);
        let reached = node.book.fetch(asker, wanted, now).unwrap_or_default();
        act(&mut node.book);
        if !self.holds {
            node.book.release(asker.lease, now);
            act(&mut node.book);
        }
        let mut ready_ns = now_ns;
        let mut from = [[0; 3]; 2];
        for reach in &reached {
            from[usize::from(!is_own)][reach.tier as usize] += 1;
            let lane = lanes[reach.tier as usize];
            let free_ns = if is_own { &mut node.near_free_ns } else { &mut node.afar_free_ns };
            *free_ns = (*free_ns).max(now_ns) + self.profile.stream_ns(lane, block_tokens.into());
            ready_ns = ready_ns.max(*free_ns + lane.latency_ns);
        }
        Fetched { blocks: reached.len() as u32, ready_ns, from, lease: asker.lease }
    }

    /// What [`Store::fetch`] would come to if it were called now and the nodes have what the sources say.
    pub(super) fn would_fetch(
        &self,
        sources: &[Source],
        own: NodeId,
        block_tokens: u32,
        now_ns: u64,
    ) -> Fetched {
        let mut fetched = Fetched { ready_ns: now_ns, ..Fetched::default() };
        let mut busy: Vec<(NodeId, u64)> = Vec::new();
        for source in sources {
            let Some(node) = self.nodes.get(source.node.0 as usize) else { break };
            let is_own = source.node == own;
            let free_ns = if is_own { node.near_free_ns } else { node.afar_free_ns };
            // The lane may be taken by the source before.
            let before = busy.iter().rev().find(|(node, _)| *node == source.node);
            let from_ns = before.map_or(free_ns, |(_, until_ns)| *until_ns).max(now_ns);
            let lane = self.lane(source.tier, is_own);
            let until_ns =
                from_ns + self.profile.stream_ns(lane, block_tokens.into()) * u64::from(source.len_blocks);
            busy.push((source.node, until_ns));
            fetched.blocks += source.len_blocks;
            fetched.from[usize::from(!is_own)][source.tier as usize] += source.len_blocks;
            fetched.ready_ns = fetched.ready_ns.max(until_ns + lane.latency_ns);
        }
        fetched
    }

    /// Out of a tier, to the node's own instance or to others.
    fn lane(&self, tier: Tier, is_own: bool) -> Lane {
        let lane = self.profile.tier(tier);
        if is_own { lane } else { lane.through(self.profile.network) }
    }

    /// Gives back what was fetched from these nodes and is held.
    pub(super) fn give_back(&mut self, fetched: &Fetched, nodes: impl Iterator<Item = NodeId>, now_ns: u64) {
        for node in nodes {
            if let Some(node) = self.nodes.get_mut(node.0 as usize) {
                let now = refit(node, now_ns);
                node.book.release(fetched.lease, now);
                act(&mut node.book);
            }
        }
    }

    /// Offers a prompt to a node, less some of its leading blocks.
    pub(super) fn save(
        &mut self,
        to: NodeId,
        (hashes, leaves): (&[BlockHash], Leaves<'_>),
        category: Category,
        now_ns: u64,
    ) {
        let mut asker = self.asker(category);
        if let Leaves::Held(fetched) = leaves {
            asker.lease = fetched.lease;
        }
        let Some(node) = self.nodes.get_mut(to.0 as usize) else { return };
        let now = refit(node, now_ns);
        let (start, end) = match leaves {
            Leaves::Held(fetched) => (0, fetched.blocks as usize),
            Leaves::Fetched(start, blocks) => (start as usize, start as usize + blocks as usize),
            Leaves::Known => (0, node.book.fetch(asker, hashes, now).unwrap_or_default().len()),
        };
        act(&mut node.book);
        let (start, end) = (start.min(hashes.len()), end.min(hashes.len()));
        for range in [0..start, end..hashes.len()].into_iter().filter(|range| !range.is_empty()) {
            let (before, new) = hashes[..range.end].split_at(range.start);
            let offer = Offer {
                parent: before.last().copied(),
                first_offset_blocks: range.start as u32,
                hashes: new,
                charge: CHARGE,
            };
            let offered = node.book.offer(asker, offer, now).unwrap_or_default();
            act(&mut node.book);
            for answer in offered {
                if let Offered::Wanted(key) = answer {
                    node.book.commit(key, CHARGE, now);
                }
            }
        }
        node.book.release(asker.lease, now);
        act(&mut node.book);
    }

    fn asker(&mut self, category: Category) -> Asker {
        self.leases += 1;
        Asker { lease: LeaseId(self.leases), caller: CallerId(0), tenant: TenantId(0), category }
    }

    /// What changed at a node since the last call.
    pub(super) fn take_changes(&mut self, node: NodeId) -> Vec<Change> {
        self.nodes.get_mut(node.0 as usize).map(|node| node.book.take_changes()).unwrap_or_default()
    }

    /// Blocks that a node has.
    pub(super) fn blocks(&self, node: NodeId) -> u64 {
        let blocks = |book: &Book| [Tier::Dram, Tier::Ssd].map(|tier| book.stats(tier).blocks).iter().sum();
        self.nodes.get(node.0 as usize).map_or(0, |node| blocks(&node.book))
    }
}

fn refit(node: &mut Node, now_ns: u64) -> Timestamp {
    let now = Timestamp(now_ns / 1_000);
    if now.0 >= node.refitted_us + REFIT_EVERY_US {
        node.refitted_us = now.0;
        node.book.refit(now);
    }
    now
}

/// Every move ends at once.
fn act(book: &mut Book) {
    while let Some(action) = book.next_action(ROOM) {
        match action {
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::Promote { key, .. } | Action::Lower { key, .. } => book.on_moved(key, Tier::Dram),
            Action::Lift { key, .. } => book.on_moved(key, Tier::Gpu),
            Action::DropDram { .. } | Action::DropSsd { .. } | Action::DropGpu { .. } => {}
        }
    }
}
