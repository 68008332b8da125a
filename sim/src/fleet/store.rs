//! The nodes: their blocks, by the production tier book and policies, and the transfer times from
//! there.
//!
//! Moves between tiers take no time; reads over the same link queue behind each other. Not here:
//! the sources of a request (the decision), and the delay until routers see changes (`mod.rs`).

use std::time::Duration;

use kv_core::evict;
use kv_core::id::{BlockHash, CallerId, Category, LeaseId, NodeId, TenantId, Tier, Timestamp};
use kv_core::index::command::Change;
use kv_core::schedule::{HardwareProfile, PathSpeed, Source};
use kv_core::tier::{
    Action, Book, BookLimits, Capacity, Charge, MovePermits, OfferOutcome, Requester, SaveOffer, TierLimits,
};

use super::FleetSetup;

const CHARGE: Charge = Charge { frame: 1, dram: 1, ssd: 1 };
const ROOM: MovePermits = MovePermits {
    dram: true,
    ssd: true,
    prefetch: true,
    gpu_read: true,
    gpu_read_back: true,
    gpu_promote: true,
};
const REFIT_INTERVAL_US: u64 = 1_000_000;

/// A node.
struct SimNode {
    book: Book,
    refitted_us: u64,
    /// When its link to other instances is free, and that to its own instance.
    remote_free_ns: u64,
    local_free_ns: u64,
}

/// All nodes; node n is the own node of instance n.
pub(super) struct NodeStore {
    nodes: Vec<SimNode>,
    profile: HardwareProfile,
    leases: u64,
    /// Whether fetched blocks stay leased until the request's own blocks are saved.
    holds_leases: bool,
}

/// Blocks of a saved prompt that are skipped.
#[derive(Clone, Copy, Debug)]
pub(super) enum SkippedBlocks<'a> {
    /// Leading blocks that were fetched and are still leased.
    Held(&'a FetchResult),
    /// Blocks fetched from nodes: start and number.
    Fetched(u32, u32),
    /// Blocks that the node already has; fetched ones are saved there as well.
    Resident,
}

/// Result of a fetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FetchResult {
    /// Fetched blocks, a prefix of the requested ones.
    pub(super) blocks: u32,
    pub(super) ready_ns: u64,
    /// Fetched blocks from the own node and from others, by tier.
    pub(super) blocks_by_tier: [[u32; 3]; 2],
    /// Lease of the blocks until it is released, if they stay leased.
    pub(super) lease: LeaseId,
}

impl NodeStore {
    /// The nodes of a fleet.
    pub(super) fn new(setup: &FleetSetup) -> NodeStore {
        let profile = setup.actual;
        let (dram_blocks, ssd_blocks) = setup.node_blocks;
        let policy = setup.policy.as_str();
        let (watermark_high, watermark_low) = setup.watermarks;
        let tier = |blocks| TierLimits { capacity: Capacity::Blocks(blocks), watermark_high, watermark_low };
        let node = |seed: u32| {
            let limits = BookLimits {
                dram: tier(dram_blocks),
                ssd: tier(ssd_blocks),
                lease: Duration::MAX,
                leases_max: if setup.is_batching() { 1 } else { usize::MAX },
                seed: seed.into(),
            };
            // Real nodes use no randomness.
            let chance = if setup.is_batching() { seed.into() } else { 0 };
            let policy = || evict::by_name(policy, chance).or_else(|| evict::by_name(evict::DEFAULT, 0));
            let (Some(dram), Some(ssd)) = (policy(), policy()) else {
                unreachable!("the default policy has a name")
            };
            let book = Book::new(&limits, dram, ssd).with_ssd_reuse_min(setup.ssd_reuse_min);
            SimNode { book, refitted_us: 0, remote_free_ns: 0, local_free_ns: 0 }
        };
        // Slots below the first number stay unused.
        NodeStore {
            nodes: (0..setup.first + setup.nodes).map(node).collect(),
            profile,
            leases: 0,
            holds_leases: !setup.is_batching(),
        }
    }

    /// Fetches blocks of a prompt from the sources of a decision, for the instance with this own
    /// node.
    pub(super) fn fetch(
        &mut self,
        sources: &[Source],
        hashes: &[BlockHash],
        own: NodeId,
        block_tokens: u32,
        category: Category,
        now_ns: u64,
    ) -> FetchResult {
        let asker = self.asker(category);
        let mut fetched = FetchResult { ready_ns: now_ns, lease: asker.lease, ..FetchResult::default() };
        for source in sources {
            let range = source.start_blocks as usize..(source.start_blocks + source.len_blocks) as usize;
            let Some(wanted) = hashes.get(range.start..range.end.min(hashes.len())) else { break };
            let reached = self.read(source.node, wanted, own, block_tokens, asker, now_ns);
            fetched.blocks += reached.blocks;
            fetched.ready_ns = fetched.ready_ns.max(reached.ready_ns);
            let sums = fetched.blocks_by_tier.iter_mut().flatten();
            sums.zip(reached.blocks_by_tier.iter().flatten()).for_each(|(sum, blocks)| *sum += blocks);
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
        own: NodeId,
        block_tokens: u32,
        asker: Requester,
        now_ns: u64,
    ) -> FetchResult {
        let is_own = from == own;
        let lanes = Tier::ALL.map(|tier| self.lane(tier, is_own));
        let Some(node) = self.nodes.get_mut(from.0 as usize) else { return FetchResult::default() };
        let now = refit(node, now_ns);
        let reached = node.book.fetch(asker, wanted, now).unwrap_or_default();
        finish_moves(&mut node.book);
        if !self.holds_leases {
            node.book.release(asker.lease, now);
            finish_moves(&mut node.book);
        }
        let mut ready_ns = now_ns;
        let mut from = [[0; 3]; 2];
        for reach in &reached {
            from[usize::from(!is_own)][reach.tier as usize] += 1;
            let lane = lanes[reach.tier as usize];
            let free_ns = if is_own { &mut node.local_free_ns } else { &mut node.remote_free_ns };
            *free_ns = (*free_ns).max(now_ns) + self.profile.stream_ns(lane, block_tokens.into());
            ready_ns = ready_ns.max(*free_ns + lane.latency_ns);
        }
        FetchResult { blocks: reached.len() as u32, ready_ns, blocks_by_tier: from, lease: asker.lease }
    }

    /// Predicts [`NodeStore::fetch`] at this time, if the nodes have what the sources say.
    pub(super) fn predict_fetch(
        &self,
        sources: &[Source],
        own: NodeId,
        block_tokens: u32,
        now_ns: u64,
    ) -> FetchResult {
        let mut fetched = FetchResult { ready_ns: now_ns, ..FetchResult::default() };
        let mut busy: Vec<(NodeId, u64)> = Vec::new();
        for source in sources {
            let Some(node) = self.nodes.get(source.node.0 as usize) else { break };
            let is_own = source.node == own;
            let free_ns = if is_own { node.local_free_ns } else { node.remote_free_ns };
            // An earlier source may occupy the link.
            let before = busy.iter().rev().find(|(node, _)| *node == source.node);
            let from_ns = before.map_or(free_ns, |(_, until_ns)| *until_ns).max(now_ns);
            let lane = self.lane(source.tier, is_own);
            let until_ns =
                from_ns + self.profile.stream_ns(lane, block_tokens.into()) * u64::from(source.len_blocks);
            busy.push((source.node, until_ns));
            fetched.blocks += source.len_blocks;
            fetched.blocks_by_tier[usize::from(!is_own)][source.tier as usize] += source.len_blocks;
            fetched.ready_ns = fetched.ready_ns.max(until_ns + lane.latency_ns);
        }
        fetched
    }

    /// The link out of a tier, to the node's own instance or to others.
    fn lane(&self, tier: Tier, is_own: bool) -> PathSpeed {
        let lane = self.profile.tier(tier);
        if is_own { lane } else { lane.through(self.profile.network) }
    }

    /// Releases the lease of a fetch at these nodes.
    pub(super) fn release(
        &mut self,
        fetched: &FetchResult,
        nodes: impl Iterator<Item = NodeId>,
        now_ns: u64,
    ) {
        for node in nodes {
            if let Some(node) = self.nodes.get_mut(node.0 as usize) {
                let now = refit(node, now_ns);
                node.book.release(fetched.lease, now);
                finish_moves(&mut node.book);
            }
        }
    }

    /// Offers a prompt to a node, without the blocks to skip.
    pub(super) fn save(
        &mut self,
        to: NodeId,
        hashes: &[BlockHash],
        leaves: SkippedBlocks<'_>,
        category: Category,
        now_ns: u64,
    ) {
        let mut asker = self.asker(category);
        if let SkippedBlocks::Held(fetched) = leaves {
            asker.lease = fetched.lease;
        }
        let Some(node) = self.nodes.get_mut(to.0 as usize) else { return };
        let now = refit(node, now_ns);
        let (start, end) = match leaves {
            SkippedBlocks::Held(fetched) => (0, fetched.blocks as usize),
            SkippedBlocks::Fetched(start, blocks) => (start as usize, start as usize + blocks as usize),
            SkippedBlocks::Resident => (0, node.book.fetch(asker, hashes, now).unwrap_or_default().len()),
        };
        finish_moves(&mut node.book);
        let (start, end) = (start.min(hashes.len()), end.min(hashes.len()));
        for range in [0..start, end..hashes.len()].into_iter().filter(|range| !range.is_empty()) {
            let (before, new) = hashes[..range.end].split_at(range.start);
            let offer = SaveOffer {
                parent: before.last().copied(),
                first_offset_blocks: range.start as u32,
                hashes: new,
                charge: CHARGE,
            };
            let offered = node.book.offer(asker, offer, now).unwrap_or_default();
            finish_moves(&mut node.book);
            for answer in offered {
                if let OfferOutcome::Wanted(key) = answer {
                    node.book.commit(key, CHARGE, now);
                }
            }
        }
        node.book.release(asker.lease, now);
        finish_moves(&mut node.book);
    }

    fn asker(&mut self, category: Category) -> Requester {
        self.leases += 1;
        Requester { lease: LeaseId(self.leases), caller: CallerId(0), tenant: TenantId(0), category }
    }

    /// Changes at a node since the last call.
    pub(super) fn take_changes(&mut self, node: NodeId) -> Vec<Change> {
        self.nodes.get_mut(node.0 as usize).map(|node| node.book.take_changes()).unwrap_or_default()
    }

    /// Number of blocks of a node.
    pub(super) fn blocks(&self, node: NodeId) -> u64 {
        let blocks = |book: &Book| [Tier::Dram, Tier::Ssd].map(|tier| book.stats(tier).blocks).iter().sum();
        self.nodes.get(node.0 as usize).map_or(0, |node| blocks(&node.book))
    }
}

fn refit(node: &mut SimNode, now_ns: u64) -> Timestamp {
    let now = Timestamp(now_ns / 1_000);
    if now.0 >= node.refitted_us + REFIT_INTERVAL_US {
        node.refitted_us = now.0;
        node.book.refit(now);
    }
    now
}

/// Completes every move at once.
fn finish_moves(book: &mut Book) {
    while let Some(action) = book.next_action(ROOM) {
        match action {
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::Promote { key, .. } | Action::ReadBackFromGpu { key, .. } => {
                book.on_moved(key, Tier::Dram);
            }
            Action::PromoteToGpu { key, .. } => book.on_moved(key, Tier::Gpu),
            Action::DropDram { .. } | Action::DropSsd { .. } | Action::DropGpu { .. } => {}
        }
    }
}
