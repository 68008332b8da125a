//! The replicated index: a state machine that maps blocks to the nodes that hold them.
//!
//! Commands go in through [`Index::apply`], in log order; lookups of prompts come out of
//! [`Index::longest_prefix`], those of a single block out of [`Index::holders_of`]. Equal logs give equal indexes, byte-equal snapshots and equal digests,
//! whatever each replica has restored on the way. Not here: the log, time, load, and any promise about
//! bytes: an answer says where a block should be, the reader checks that it is.
//!
//! Next: `command.rs` for what can be said, `nodes.rs` for epochs and fencing, `store.rs` for blocks and
//! their holders. The picture of the structure is in `docs/adr/0018-run-compressed-index.md`.

pub mod command;
pub mod digest;

mod bytes;
mod codec;
mod components;
mod directives;
mod heads;
mod holders;
mod images;
mod limits;
mod lookup;
mod nodes;
mod pages;
mod places;
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
pub use lookup::{Holder, HolderRun, Lost, PrefixMatch};
pub use nodes::NodeState;
pub use restore::Restore;
pub use snapshot::{
    SNAPSHOT_CHUNK_BYTES, SNAPSHOT_FORMAT, SnapshotCursor, SnapshotError, SnapshotImages, Superseded,
    check_snapshot_format, is_whole_chunk,
};

use command::{AnnounceOutcome, Announcement, Applied, Change, Command, NodeRecord, Pin, Refusal};
use directives::Directives;
use holders::Tiers;
use limits::{added_blocks, within};
use nodes::{Exhausted, Nodes, SLOTS_MAX};
use store::{Depth, Named, Store, Who};

use crate::id::{BlockHash, Epoch, Generation, GroupId, NodeId, Seq, TenantId};

/// Blocks the sweep visits after a command that names no block: some tens of microseconds, so that ten
/// million stale holds are gone after ten thousand commands. One in tests, so that readers meet them.
const SWEEP_BLOCKS_MIN: u64 = if cfg!(test) { 1 } else { 1_024 };
/// Blocks the sweep visits per block a command adds: more than one, so that it outruns growth.
const SWEEP_BLOCKS_PER_BLOCK: u64 = 4;

/// Blocks that are applied at a time, with the memory of the next ones asked for ahead of their turn: as many as
/// the store asks for at once.
const PIECE_BLOCKS: usize = if cfg!(test) { 3 } else { 64 };

/// Counts of the logical state: equal on replicas that applied the same log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Distinct blocks that some live node holds.
    pub blocks: u64,
    /// (node, block) pairs; tiers are not counted apart.
    pub copies: u64,
    /// Pins in force.
    pub pins: u64,
    /// Blocks of all pins.
    pub pinned_blocks: u64,
    /// Nodes known, live or fenced.
    pub nodes: u64,
    /// Nodes whose epoch counts.
    pub live_nodes: u64,
    /// Tenants with a quota.
    pub quotas: u64,
    /// Groups with a time to live.
    pub ttls: u64,
}

/// The replicated map from prefix to holders, with everything else that the log decides.
#[derive(Clone, Debug, Default)]
pub struct Index {
    limits: IndexLimits,
    nodes: Nodes,
    directives: Directives,
    store: Store,
    /// The snapshot that is being made; its cursor has the same.
    snapshot: Option<Arc<()>>,
}

impl Index {
    /// An empty index. All replicas of a cluster must use equal limits.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Applies one command of the log. Never fails: what cannot be done is an answer.
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
        self.check_room(record)?;
        let (epoch, exhausted) = self.nodes.join(record.clone());
        self.recycle(exhausted);
        Ok(Applied::Joined(epoch))
    }

    fn check_identity(&self, record: &NodeRecord) -> Result<(), Refusal> {
        match self.nodes.identity() {
            Some(ours) if ours != record.identity => Err(Refusal::Identity { ours, theirs: record.identity }),
            _ => Ok(()),
        }
    }

    fn check_room(&self, record: &NodeRecord) -> Result<(), Refusal> {
        let known = self.nodes.get(record.node).is_some();
        let grown = self.nodes.len() as u64 + u64::from(!known);
        within("nodes", grown, self.limits.nodes_max.min(SLOTS_MAX).into())
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
        self.check_room(record)?;
        let exhausted = self.nodes.admit(record.clone(), epoch);
        self.recycle(exhausted);
        Ok(Applied::Done)
    }

    fn fence(&mut self, node: NodeId, epoch: Epoch) -> Applied {
        let Some(slot) = self.nodes.slot_of(node) else { return Applied::Ignored };
        match self.nodes.state_mut(slot) {
            Some(state) if state.live && state.epoch == epoch => state.live = false,
            _ => return Applied::Ignored,
        }
        let exhausted = self.nodes.void(slot);
        self.recycle(exhausted);
        Applied::Done
    }

    /// Ends the epoch of every node. What they announced stops counting with that, and late announcements are refused;
    /// its memory is swept as that of a node that was fenced.
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
        self.recycle(exhausted);
        Applied::Done
    }

    fn announce(&mut self, batch: &[Announcement]) -> Applied {
        let pieces: Vec<Piece<'_>> = batch.iter().flat_map(|one| &one.changes).flat_map(pieces).collect();
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut done = 0;
        for one in batch {
            let end = done + one.changes.iter().map(pieces_count).sum::<usize>();
            outcomes.push(self.announce_one(one, &pieces[done..], end - done));
            done = end;
        }
        Applied::Announced(outcomes)
    }

    /// Asks the memory for what the next pieces will look at, each a step deeper with every turn.
    fn look_ahead(&self, next: &[Piece<'_>]) {
        let steps = [
            (0, Depth::Pages),
            (1, Depth::Tail),
            (2, Depth::Run),
            (3, Depth::Page),
            (4, Depth::Buckets),
            (6, Depth::Hashes),
        ];
        for (ahead, depth) in steps {
            if let Some(Some((named, _))) = next.get(ahead) {
                self.store.prefetch(*named, depth);
            }
        }
    }

    /// Makes one announcement: the first `count` of the pieces, behind which come those of the next ones.
    fn announce_one(
        &mut self,
        announcement: &Announcement,
        pieces: &[Piece<'_>],
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
        for (position, piece) in pieces[..count].iter().enumerate() {
            self.look_ahead(&pieces[position + 1..]);
            unlisted += self.change(slot, *piece);
        }
        AnnounceOutcome::Applied { next, unlisted }
    }

    /// Makes one piece of a change, and counts the blocks that a full index did not list.
    fn change(&mut self, slot: u16, piece: Piece<'_>) -> u64 {
        let Some((named, tiers)) = piece else {
            let exhausted = self.nodes.void(slot);
            self.recycle(exhausted);
            return 0;
        };
        let room = self.limits.copies_max.saturating_sub(self.nodes.copies());
        let who = Who { slot, incarnations: &self.nodes.incarnations };
        let tally = self.store.change(who, named, tiers, room);
        self.nodes.book(slot, &tally);
        tally.unlisted
    }

    fn recycle(&mut self, exhausted: Exhausted) {
        if let Exhausted(Some(slot)) = exhausted {
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

    /// Frees memory of holds that no longer count, looking at about so many blocks. Part of every command,
    /// and of nothing else: what is freed decides where the next blocks lie, and that is equal on all
    /// replicas.
    fn sweep(&mut self, blocks: u64) {
        if self.stale_holds() > 0 {
            self.store.sweep(blocks, self.nodes.incarnations());
        }
    }

    /// (node, block) pairs that count. O(1), which [`Index::stats`] is not.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.nodes.copies()
    }

    /// (node, block) pairs that no longer count and still take memory.
    #[must_use]
    pub fn stale_holds(&self) -> u64 {
        self.store.held() - self.nodes.copies()
    }

    /// Counts of the logical state. O(nodes), and O(blocks) while stale holds wait for the sweep.
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
        if self.stale_holds() == 0 {
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

    /// Whether everything announced under this epoch is void for good: the node was fenced, left, or
    /// joined again. A node or an epoch that this replica has not heard of yet is not over.
    #[must_use]
    pub fn is_over(&self, node: NodeId, epoch: Epoch) -> bool {
        match self.nodes.get(node) {
            Some(state) => state.epoch > epoch || (state.epoch == epoch && !state.live),
            None => self.nodes.departed_epoch(node).is_some_and(|last| epoch <= last),
        }
    }

    /// The identity every node must serve: that of the nodes known; none before the first join.
    #[must_use]
    pub fn identity(&self) -> Option<crate::id::IdentityDigest> {
        self.nodes.identity()
    }

    /// The generation of the weights, which counts from 0: the identity that requests and frames must have is
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

    /// Milliseconds of each group that has a time to live, by ascending group.
    pub fn ttls(&self) -> impl Iterator<Item = (GroupId, u64)> + '_ {
        self.directives.ttls.iter().map(|(&group, &ttl_ms)| (group, ttl_ms))
    }

    /// The limits it was made with.
    #[must_use]
    pub fn limits(&self) -> &IndexLimits {
        &self.limits
    }
}

/// Some blocks of a change and what becomes of their tiers; nothing for a change that voids everything.
type Piece<'a> = Option<(Named<'a>, Tiers)>;

/// A change in pieces of at most [`PIECE_BLOCKS`], which come to the same one after the other: the first block of
/// a piece follows the last of the one before.
fn pieces(change: &Change) -> impl Iterator<Item = Piece<'_>> {
    let whole = named(change);
    let blocks = whole.map_or(&[][..], |(named, _)| named.blocks());
    let cleared = whole.is_none().then_some(None);
    let parts = blocks.chunks(PIECE_BLOCKS).enumerate().filter_map(move |(nth, part)| {
        let (whole, tiers) = whole?;
        let named = match whole {
            Named::Chain { parent, .. } => {
                let before = (nth * PIECE_BLOCKS).checked_sub(1).and_then(|before| blocks.get(before));
                Named::Chain { parent: before.copied().or(parent), blocks: part }
            }
            Named::Loose(_) => Named::Loose(part),
        };
        Some(Some((named, tiers)))
    });
    cleared.into_iter().chain(parts)
}

impl<'a> Named<'a> {
    fn blocks(&self) -> &'a [BlockHash] {
        match *self {
            Named::Chain { blocks, .. } | Named::Loose(blocks) => blocks,
        }
    }
}

/// How many pieces a change has.
fn pieces_count(change: &Change) -> usize {
    named(change).map_or(1, |(named, _)| named.blocks().len().div_ceil(PIECE_BLOCKS))
}

/// The blocks of a change and what becomes of their tiers; nothing when it voids everything.
fn named(change: &Change) -> Option<(Named<'_>, Tiers)> {
    let (named, gone, added) = match change {
        Change::Stored { parent, blocks, tier } => {
            (Named::Chain { parent: *parent, blocks }, TierSet::NONE, TierSet::only(*tier))
        }
        Change::Moved { blocks, from, to } => {
            (Named::Loose(blocks), TierSet::only(*from), TierSet::only(*to))
        }
        Change::Dropped { blocks, tier, .. } => (Named::Loose(blocks), TierSet::only(*tier), TierSet::NONE),
        Change::Cleared => return None,
    };
    Some((named, Tiers { gone, added }))
}
