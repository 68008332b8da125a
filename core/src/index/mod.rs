//! The replicated index: a state machine that maps blocks to the nodes that hold them.
//!
//! [`Index::apply`] takes commands in log order. [`Index::longest_prefix`] looks up a prompt,
//! [`Index::holders_of`] a single block. Equal logs give equal indexes, byte-equal snapshots and
//! equal digests, whatever snapshot each replica restored on the way. Not here: the log, time,
//! load, and any promise about bytes. An answer says where a block should be; the reader checks that it is there.
//!
//! Read next: `command.rs` for the commands, `nodes.rs` for epochs and fencing, `store.rs` for
//! blocks and their holders. `docs/adr/0018-run-compressed-index.md` shows the structure.

pub mod command;
pub mod digest;

mod bytes;
mod codec;
mod components;
mod directives;
mod entry_points;
mod holders;
mod images;
mod limits;
mod locations;
mod lookup;
mod nodes;
mod pages;
mod restore;
mod run;
mod snapshot;
mod store;
mod table;
#[cfg(any(test, feature = "fuzzing"))]
mod tests;

#[cfg(any(test, feature = "fuzzing"))]
pub use tests::fuzzing;

use std::sync::Arc;

pub use bytes::CodecError;
pub use codec::COMMAND_BYTES_MAX;
pub use components::{Component, Need};
pub use holders::TierSet;
pub use limits::{
    ANNOUNCE_BLOCKS_MAX, ANNOUNCE_CHANGES_MAX, COPIES_MAX, IndexLimits, NODES_MAX, PIN_BLOCKS_MAX,
    PINNED_BLOCKS_MAX, PINS_MAX, QUOTAS_MAX, TEXT_BYTES_MAX, TTLS_MAX,
};
pub use lookup::{Holder, HolderRun, LostHolder, PrefixMatch};
pub use nodes::NodeState;
pub use restore::Restore;
pub use snapshot::{
    SNAPSHOT_CHUNK_BYTES, SNAPSHOT_FORMAT, SnapshotCursor, SnapshotError, SnapshotImages, SnapshotSuperseded,
    check_snapshot_format, is_valid_chunk,
};

use command::{AnnounceOutcome, Announcement, Applied, Change, Command, NodeRecord, Pin, Refusal};
use directives::Directives;
use holders::TierUpdate;
use limits::{added_blocks, check_limit};
use nodes::{ExhaustedSlot, Nodes, SLOTS_MAX};
use store::{ChangedBlocks, PrefetchStage, Store, Writer};

use crate::id::{BlockHash, Epoch, Generation, NodeId, Seq, TenantId, TtlGroupId};

/// Blocks that the sweep visits after a command that names no block. Costs tens of microseconds and
/// frees ten million stale copies within ten thousand commands. One in tests, so that lookups meet
/// stale copies.
const SWEEP_BLOCKS_MIN: u64 = if cfg!(test) { 1 } else { 1_024 };
/// Blocks the sweep visits per block a command adds: more than one, so that it outruns growth.
const SWEEP_BLOCKS_PER_BLOCK: u64 = 4;

/// Blocks of a change that are applied together while the memory of the next part is prefetched.
/// Equals the store's prefetch limit.
const PART_BLOCKS: usize = if cfg!(test) { 3 } else { 64 };

/// Counts of the logical state: equal on replicas that applied the same log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Distinct blocks that some live node holds.
    pub blocks: u64,
    /// (node, block) pairs; a block in several tiers of one node counts once.
    pub copies: u64,
    /// Pins in force.
    pub pins: u64,
    /// Blocks of all pins.
    pub pinned_blocks: u64,
    /// Nodes known, live or fenced.
    pub nodes: u64,
    /// Nodes with an epoch that still counts.
    pub live_nodes: u64,
    /// Tenants with a quota.
    pub quotas: u64,
    /// Groups with a time to live.
    pub ttls: u64,
}

/// The replicated map from prefix to holders, with all other state that the log decides.
#[derive(Clone, Debug, Default)]
pub struct Index {
    limits: IndexLimits,
    nodes: Nodes,
    directives: Directives,
    store: Store,
    /// Token of the snapshot that is being written; its cursor holds the same token.
    active_snapshot: Option<Arc<()>>,
}

impl Index {
    /// An empty index. All replicas of a cluster must use equal limits.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Applies one command of the log. Never fails: a command that cannot be applied gets
    /// [`Applied::Refused`] or [`Applied::Ignored`].
    pub fn apply(&mut self, command: &Command) -> Applied {
        let applied = self.limits.check(command).and_then(|()| self.apply_checked(command));
        self.sweep_after(command);
        applied.unwrap_or_else(Applied::Refused)
    }

    fn apply_checked(&mut self, command: &Command) -> Result<Applied, Refusal> {
        match command {
            Command::Join(record) => self.join(record),
            Command::Admit { record, epoch } => self.admit(record, *epoch),
            Command::Fence { node, epoch } => Ok(self.fence(*node, *epoch)),
            Command::Leave { node, epoch } => Ok(self.leave(*node, *epoch)),
            Command::Announce(batch) => Ok(self.announce(batch)),
            Command::Pin(pin) => self.directives.pin(pin, &self.limits),
            Command::Unpin { pin, owner, ends_ms } => self.directives.unpin(*pin, owner, *ends_ms),
            Command::SetQuota { tenant, bytes } => self.directives.set_quota(*tenant, *bytes, &self.limits),
            Command::SetTtl { group, ttl_ms } => self.directives.set_ttl(*group, *ttl_ms, &self.limits),
            Command::SetGeneration(to) => self.set_generation(*to),
        }
    }

    fn join(&mut self, record: &NodeRecord) -> Result<Applied, Refusal> {
        self.check_identity(record)?;
        self.check_node_limit(record)?;
        let (epoch, exhausted) = self.nodes.join(record.clone());
        self.release_slot(exhausted);
        Ok(Applied::Joined(epoch))
    }

    fn check_identity(&self, record: &NodeRecord) -> Result<(), Refusal> {
        match self.nodes.identity() {
            Some(ours) if ours != record.identity => Err(Refusal::Identity { ours, theirs: record.identity }),
            _ => Ok(()),
        }
    }

    fn check_node_limit(&self, record: &NodeRecord) -> Result<(), Refusal> {
        let known = self.nodes.get(record.node).is_some();
        let grown = self.nodes.len() as u64 + u64::from(!known);
        check_limit("nodes", grown, self.limits.nodes_max.min(SLOTS_MAX).into())
    }

    fn admit(&mut self, record: &NodeRecord, epoch: Epoch) -> Result<Applied, Refusal> {
        self.check_identity(record)?;
        let known = match self.nodes.get(record.node) {
            Some(state) => Some(state.epoch),
            None => self.nodes.departed.get(&record.node).copied(),
        };
        if known.is_some_and(|known| known >= epoch) {
            return Ok(Applied::Ignored);
        }
        self.check_node_limit(record)?;
        let exhausted = self.nodes.admit(record.clone(), epoch);
        self.release_slot(exhausted);
        Ok(Applied::Done)
    }

    fn fence(&mut self, node: NodeId, epoch: Epoch) -> Applied {
        let Some(slot) = self.nodes.slot_of(node) else { return Applied::Ignored };
        match self.nodes.state_mut(slot) {
            Some(state) if state.live && state.epoch == epoch => state.live = false,
            _ => return Applied::Ignored,
        }
        let exhausted = self.nodes.invalidate(slot);
        self.release_slot(exhausted);
        Applied::Done
    }

    /// Moves to the next generation of weights and ends the epoch of every node. Earlier
    /// announcements stop counting and late ones are refused. The sweep frees their memory as after
    /// a fence.
    fn set_generation(&mut self, to: Generation) -> Result<Applied, Refusal> {
        let applied = self.directives.set_generation(to)?;
        if applied == Applied::Done {
            let live = self.nodes.iter().filter(|state| state.live);
            let live: Vec<(NodeId, Epoch)> = live.map(|state| (state.record.node, state.epoch)).collect();
            live.into_iter().for_each(|(node, epoch)| drop(self.fence(node, epoch)));
        }
        Ok(applied)
    }

    fn leave(&mut self, node: NodeId, epoch: Epoch) -> Applied {
        let Some(slot) = self.nodes.slot_of(node) else { return Applied::Ignored };
        if self.nodes.state(slot).is_none_or(|state| state.epoch != epoch) {
            return Applied::Ignored;
        }
        let exhausted = self.nodes.leave(slot);
        self.release_slot(exhausted);
        Applied::Done
    }

    fn announce(&mut self, batch: &[Announcement]) -> Applied {
        let pieces: Vec<ChangePart<'_>> =
            batch.iter().flat_map(|one| &one.changes).flat_map(change_parts).collect();
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut done = 0;
        for one in batch {
            let end = done + one.changes.iter().map(change_part_count).sum::<usize>();
            outcomes.push(self.announce_one(one, &pieces[done..], end - done));
            done = end;
        }
        Applied::Announced(outcomes)
    }

    /// Prefetches memory for the next parts; each part moves one stage deeper per call.
    fn prefetch_ahead(&self, upcoming: &[ChangePart<'_>]) {
        let steps = [
            (0, PrefetchStage::Pages),
            (1, PrefetchStage::Tail),
            (2, PrefetchStage::Run),
            (3, PrefetchStage::Page),
            (4, PrefetchStage::Buckets),
            (6, PrefetchStage::Hashes),
        ];
        for (ahead, depth) in steps {
            if let Some(Some((named, _))) = upcoming.get(ahead) {
                self.store.prefetch(*named, depth);
            }
        }
    }

    /// Applies one announcement: the first `count` of `pieces`. The parts behind them belong to
    /// later announcements and serve only for prefetching.
    fn announce_one(
        &mut self,
        announcement: &Announcement,
        parts: &[ChangePart<'_>],
        count: usize,
    ) -> AnnounceOutcome {
        let Some(slot) = self.nodes.slot_of(announcement.node) else { return AnnounceOutcome::Fenced };
        let state = match self.nodes.state_mut(slot) {
            Some(state) if state.live && state.epoch == announcement.epoch => state,
            _ => return AnnounceOutcome::Fenced,
        };
        let expected = state.next_seq;
        if announcement.seq < expected {
            return AnnounceOutcome::Duplicate { next: expected };
        }
        if announcement.seq > expected || expected.0 == u64::MAX {
            return AnnounceOutcome::Gap { expected };
        }
        let next = Seq(expected.0 + 1);
        state.next_seq = next;
        let mut unlisted = 0;
        for (position, piece) in parts[..count].iter().enumerate() {
            self.prefetch_ahead(&parts[position + 1..]);
            unlisted += self.apply_part(slot, *piece);
        }
        AnnounceOutcome::Applied { next, unlisted }
    }

    /// Applies one part of a change. Returns the blocks that the full index did not list.
    fn apply_part(&mut self, slot: u16, part: ChangePart<'_>) -> u64 {
        let Some((named, tiers)) = part else {
            let exhausted = self.nodes.invalidate(slot);
            self.release_slot(exhausted);
            return 0;
        };
        let max_new_blocks = self.limits.copies_max.saturating_sub(self.nodes.copies());
        let who = Writer { slot, incarnations: &self.nodes.incarnations };
        let delta = self.store.apply_change(who, named, tiers, max_new_blocks);
        self.nodes.apply_delta(slot, &delta);
        delta.unlisted
    }

    fn release_slot(&mut self, exhausted: ExhaustedSlot) {
        if let ExhaustedSlot(Some(slot)) = exhausted {
            self.store.forget_slot(slot);
        }
    }

    fn sweep_after(&mut self, command: &Command) {
        let added = match command {
            Command::Announce(batch) => added_blocks(batch),
            _ => 0,
        };
        self.sweep(added.saturating_mul(SWEEP_BLOCKS_PER_BLOCK).max(SWEEP_BLOCKS_MIN));
    }

    /// Frees memory of stale extents, visiting about `blocks` blocks. Runs only inside
    /// [`Index::apply`]: freed memory decides where the next blocks lie, which must be equal on all
    /// replicas.
    fn sweep(&mut self, blocks: u64) {
        if self.stale_copies() > 0 {
            self.store.sweep(blocks, self.nodes.incarnations());
        }
    }

    /// (node, block) pairs that count. O(1), unlike [`Index::stats`].
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.nodes.copies()
    }

    /// (node, block) pairs that no longer count but still take memory.
    #[must_use]
    pub fn stale_copies(&self) -> u64 {
        self.store.total_copies() - self.nodes.copies()
    }

    /// Counts of the logical state. O(nodes), or O(blocks) while stale copies await the sweep.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        IndexStats {
            blocks: self.count_blocks(),
            copies: self.nodes.copies(),
            pins: self.directives.pins.len() as u64,
            pinned_blocks: self.directives.pinned_blocks,
            nodes: self.nodes.len() as u64,
            live_nodes: self.nodes.iter().filter(|state| state.live).count() as u64,
            quotas: self.directives.quotas.len() as u64,
            ttls: self.directives.ttls.len() as u64,
        }
    }

    fn count_blocks(&self) -> u64 {
        if self.stale_copies() == 0 {
            return self.store.len();
        }
        self.store.count_current(self.nodes.incarnations())
    }

    /// Every node that joined and did not leave, by ascending id.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter()
    }

    /// One node, if it joined and did not leave.
    #[must_use]
    pub fn node(&self, node: NodeId) -> Option<&NodeState> {
        self.nodes.get(node)
    }

    /// Epoch of a node (fenced ones too) and the number its next announcement must carry.
    #[must_use]
    pub fn next_seq(&self, node: NodeId) -> Option<(Epoch, Seq)> {
        self.nodes.get(node).map(|state| (state.epoch, state.next_seq))
    }

    /// Whether everything announced under this epoch is permanently invalid: the node was fenced,
    /// left, or joined again. False for a node or an epoch that this replica does not know yet.
    #[must_use]
    pub fn is_epoch_over(&self, node: NodeId, epoch: Epoch) -> bool {
        match self.nodes.get(node) {
            Some(state) => state.epoch > epoch || (state.epoch == epoch && !state.live),
            None => self.nodes.departed_epoch(node).is_some_and(|last| epoch <= last),
        }
    }

    /// The identity that every node must serve. `None` before the first join and after the last
    /// leave.
    #[must_use]
    pub fn identity(&self) -> Option<crate::id::IdentityDigest> {
        self.nodes.identity()
    }

    /// The generation of the weights, counted from 0. Requests and frames must carry
    /// [`Self::identity`] of this generation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.directives.generation
    }

    /// Pins in force, by ascending number.
    pub fn pins(&self) -> impl Iterator<Item = &Pin> {
        self.directives.pins.values()
    }

    /// Bytes per node of each tenant that has a quota, by ascending tenant.
    pub fn quotas(&self) -> impl Iterator<Item = (TenantId, u64)> + '_ {
        self.directives.quotas.iter().map(|(&tenant, &bytes)| (tenant, bytes))
    }

    /// Time to live of each group that has one, in milliseconds, by ascending group.
    pub fn ttls(&self) -> impl Iterator<Item = (TtlGroupId, u64)> + '_ {
        self.directives.ttls.iter().map(|(&group, &ttl_ms)| (group, ttl_ms))
    }

    /// The limits that the index was created with.
    #[must_use]
    pub fn limits(&self) -> &IndexLimits {
        &self.limits
    }
}

/// Blocks of a change and the tier update they get; `None` for a change that invalidates
/// everything.
type ChangePart<'a> = Option<(ChangedBlocks<'a>, TierUpdate)>;

/// Splits a change into parts of at most [`PART_BLOCKS`] blocks. Applying them in order equals
/// applying the change: the first block of a part follows the last of the previous part.
fn change_parts(change: &Change) -> impl Iterator<Item = ChangePart<'_>> {
    let whole = blocks_and_tiers(change);
    let blocks = whole.map_or(&[][..], |(named, _)| named.blocks());
    let cleared = whole.is_none().then_some(None);
    let parts = blocks.chunks(PART_BLOCKS).enumerate().filter_map(move |(nth, part)| {
        let (whole, tiers) = whole?;
        let named = match whole {
            ChangedBlocks::Chain { parent, .. } => {
                let before = (nth * PART_BLOCKS).checked_sub(1).and_then(|before| blocks.get(before));
                ChangedBlocks::Chain { parent: before.copied().or(parent), blocks: part }
            }
            ChangedBlocks::Unordered(_) => ChangedBlocks::Unordered(part),
        };
        Some(Some((named, tiers)))
    });
    cleared.into_iter().chain(parts)
}

impl<'a> ChangedBlocks<'a> {
    fn blocks(&self) -> &'a [BlockHash] {
        match *self {
            ChangedBlocks::Chain { blocks, .. } | ChangedBlocks::Unordered(blocks) => blocks,
        }
    }
}

/// Number of parts of a change.
fn change_part_count(change: &Change) -> usize {
    blocks_and_tiers(change).map_or(1, |(named, _)| named.blocks().len().div_ceil(PART_BLOCKS))
}

/// The blocks of a change and their tier update; `None` if the change invalidates everything.
fn blocks_and_tiers(change: &Change) -> Option<(ChangedBlocks<'_>, TierUpdate)> {
    let (named, gone, added) = match change {
        Change::Stored { parent, blocks, tier } => {
            (ChangedBlocks::Chain { parent: *parent, blocks }, TierSet::NONE, TierSet::only(*tier))
        }
        Change::Moved { blocks, from, to } => {
            (ChangedBlocks::Unordered(blocks), TierSet::only(*from), TierSet::only(*to))
        }
        Change::Dropped { blocks, tier, .. } => {
            (ChangedBlocks::Unordered(blocks), TierSet::only(*tier), TierSet::NONE)
        }
        Change::Cleared => return None,
    };
    Some((named, TierUpdate { removed: gone, added }))
}
