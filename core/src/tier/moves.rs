//! Actions out, results in: byte moves that follow the tiers the book has assigned.
//!
//! At most one move per block is in flight. When it ends, the book compares with the tier assigned
//! *now*: a block that was demoted and wanted back meanwhile costs no further move.

use super::book::Book;
use super::counters::RemovalReason;
use super::order::PolicyEvent;
use super::queues::MoveQueue;
use crate::evict::BlockKey;
use crate::id::{BlockHash, Generation, Tier, Timestamp};
use crate::index::command::DropCause;

/// An operation on bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the block's DRAM bytes to SSD; then call [`Book::on_moved`] to SSD.
    Demote {
        /// Key of the block.
        key: BlockKey,
        /// Hash of the block, for the record header and for logs.
        hash: BlockHash,
    },
    /// Read the block's SSD bytes into DRAM; then call [`Book::on_moved`] to DRAM.
    Promote {
        /// Key of the block.
        key: BlockKey,
        /// Hash of the block, to verify the bytes read.
        hash: BlockHash,
    },
    /// Write the block's DRAM bytes to the GPU; then call [`Book::on_moved`] to GPU.
    PromoteToGpu {
        /// Key of the block.
        key: BlockKey,
        /// Hash of the block, for logs.
        hash: BlockHash,
    },
    /// Read the block's GPU bytes into DRAM; then call [`Book::on_moved`] to DRAM.
    ReadBackFromGpu {
        /// Key of the block.
        key: BlockKey,
        /// Hash of the block, to verify the bytes read.
        hash: BlockHash,
    },
    /// Free the block's DRAM bytes (readers that hold them keep them). Needs no answer.
    DropDram {
        /// Key of the block; it may be reused after this.
        key: BlockKey,
    },
    /// Free the block's SSD slot. Needs no answer.
    DropSsd {
        /// Key of the block; it may be reused after this.
        key: BlockKey,
        /// Hash of the block: readers still waiting for its bytes receive none.
        hash: BlockHash,
        /// Weights generation of the block: another generation may have the same hash.
        generation: Generation,
    },
    /// Free the block's GPU memory. Needs no answer.
    DropGpu {
        /// Key of the block; it may be reused after this.
        key: BlockKey,
        /// Hash of the block: readers still waiting for its bytes receive none.
        hash: BlockHash,
        /// Weights generation of the block: another generation may have the same hash.
        generation: Generation,
    },
}

/// Kinds of moves that can start now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovePermits {
    /// A DRAM slot for a promotion is free.
    pub dram: bool,
    /// An SSD slot for a demotion is free.
    pub ssd: bool,
    /// A DRAM slot for a prefetch is free, beyond those reserved for awaited loads.
    pub prefetch: bool,
    /// The GPU can read an awaited block, and a DRAM slot is free beyond those that SSD loads need.
    /// A block that stays assigned to the GPU is not charged to DRAM meanwhile.
    pub gpu_read: bool,
    /// The GPU can read a block that no reader awaits, and a DRAM slot is free beyond those that
    /// SSD loads need.
    pub gpu_read_back: bool,
    /// The GPU can receive a block.
    pub gpu_promote: bool,
}

impl Book {
    /// The next action: drops first, then awaited loads, demotions, prefetches, read-backs from the
    /// GPU, and promotions to it.
    pub fn next_action(&mut self, room: MovePermits) -> Option<Action> {
        // Invalidated blocks found in a queue turn into drops, so look for drops again.
        self.next_drop().or_else(|| self.next_move(room)).or_else(|| self.next_drop())
    }

    fn next_drop(&mut self) -> Option<Action> {
        let action = self.actions.pop_drop()?;
        if matches!(action, Action::DropGpu { .. }) {
            self.gpu_residency.on_freed();
        }
        Some(action)
    }

    fn next_move(&mut self, room: MovePermits) -> Option<Action> {
        if room.dram
            && let Some(key) = self.next_due(MoveQueue::Promotes)
        {
            return self.start_move(key, Tier::Dram);
        }
        if room.gpu_read
            && let Some(key) = self.next_due(MoveQueue::GpuReads)
        {
            return self.start_move(key, Tier::Dram);
        }
        if room.ssd
            && let Some(key) = self.next_due(MoveQueue::Demotes)
        {
            return self.start_move(key, Tier::Ssd);
        }
        if room.prefetch
            && let Some(key) = self.next_due(MoveQueue::Prefetches)
        {
            return self.start_move(key, Tier::Dram);
        }
        if room.gpu_read_back
            && let Some(key) = self.next_due(MoveQueue::GpuReadBacks)
        {
            return self.start_move(key, Tier::Dram);
        }
        if room.gpu_promote
            && let Some(key) = self.next_due(MoveQueue::GpuPromotions)
        {
            return self.start_move(key, Tier::Gpu);
        }
        None
    }

    fn next_due(&mut self, line: MoveQueue) -> Option<BlockKey> {
        loop {
            let key = self.actions.pop(line)?;
            let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.queued == Some(line)) else {
                continue;
            };
            entry.queued = None;
            if self.drop_if_invalidated(key) {
                continue;
            }
            if self.due_queue(key) == Some(line) {
                return Some(key);
            }
            // Its assignment changed while it was queued; it may belong in another queue.
            self.enqueue(key);
        }
    }

    /// The queue for the move that this block needs now.
    pub(super) fn due_queue(&self, key: BlockKey) -> Option<MoveQueue> {
        let to = self.due(key)?;
        let entry = self.slab.get(key)?;
        Some(match to {
            Tier::Ssd => MoveQueue::Demotes,
            Tier::Gpu => MoveQueue::GpuPromotions,
            Tier::Dram if entry.copies.gpu && entry.awaited => MoveQueue::GpuReads,
            Tier::Dram if entry.copies.gpu => MoveQueue::GpuReadBacks,
            Tier::Dram if entry.prefetch => MoveQueue::Prefetches,
            Tier::Dram => MoveQueue::Promotes,
        })
    }

    fn start_move(&mut self, key: BlockKey, to: Tier) -> Option<Action> {
        let entry = self.slab.get_mut(key)?;
        entry.moving = Some(to);
        let hash = entry.meta.hash;
        Some(match to {
            Tier::Dram if entry.copies.gpu => Action::ReadBackFromGpu { key, hash },
            Tier::Dram => Action::Promote { key, hash },
            Tier::Ssd => Action::Demote { key, hash },
            Tier::Gpu => Action::PromoteToGpu { key, hash },
        })
    }

    /// The move this block needs now, if it can start.
    fn due(&self, key: BlockKey) -> Option<Tier> {
        let entry = self.slab.get(key)?;
        if entry.moving.is_some() || entry.writing {
            return None;
        }
        let place = entry.assigned_tier?;
        // A block demoted from GPU to SSD passes through DRAM.
        let via_dram = place == Tier::Ssd && !entry.copies.ssd;
        let needs_load = !entry.copies.dram && (entry.awaited || place == Tier::Dram || via_dram);
        if needs_load && (entry.copies.ssd || entry.copies.gpu) {
            return Some(Tier::Dram);
        }
        (!entry.copies.has(place) && entry.copies.dram).then_some(place)
    }

    fn enqueue(&mut self, key: BlockKey) {
        let Some(line) = self.due_queue(key) else { return };
        let Some(entry) = self.slab.get_mut(key) else { return };
        if entry.queued.replace(line) != Some(line) {
            self.actions.push(line, key);
        }
    }

    /// Removes a block from the prefetch queue, because its key may soon belong to another block.
    pub(super) fn cancel_queued_prefetch(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.queued == Some(MoveQueue::Prefetches))
        else {
            return;
        };
        entry.queued = None;
        self.actions.remove_prefetch(key);
    }

    /// Reports that a move succeeded.
    pub fn on_moved(&mut self, key: BlockKey, to: Tier) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(to)) else { return };
        entry.moving = None;
        entry.copies.set(to, true);
        if to == Tier::Gpu {
            self.gpu_residency.on_arrived(entry.assigned_tier == Some(Tier::Gpu));
        }
        if to == Tier::Dram {
            entry.awaited = false;
            self.end_prefetch(key);
        }
        self.reconcile(key);
    }

    /// Reports that a move found no free slot; it is queued again.
    pub fn on_move_delayed(&mut self, key: BlockKey, to: Tier) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(to)) else { return };
        entry.moving = None;
        if !entry.copies.any() && entry.assigned_tier.is_some() {
            // Its bytes were lost meanwhile.
            self.count_removal(key, RemovalReason::Failed);
            return self.drop_block(key, DropCause::Failed);
        }
        self.reconcile(key);
    }

    /// Reports that a move failed. A block that could not be read is dropped. One that could not be
    /// written stays in DRAM if it fits, and is dropped otherwise. One that could not be promoted
    /// to the GPU is demoted from it.
    pub fn on_move_failed(&mut self, key: BlockKey, to: Tier, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(to)) else { return };
        entry.moving = None;
        entry.awaited = false;
        let place = entry.assigned_tier;
        if to == Tier::Dram {
            self.end_prefetch(key);
        }
        if to == Tier::Dram && place.is_some() {
            self.count_removal(key, RemovalReason::Failed);
            self.drop_block(key, DropCause::Failed);
        } else if to == Tier::Gpu && place == Some(Tier::Gpu) {
            self.demote_from_gpu(key, RemovalReason::Failed, now);
        } else if to == Tier::Ssd && place == Some(Tier::Ssd) {
            self.keep_in_dram(key, now);
        } else {
            self.reconcile(key);
        }
    }

    /// Reports that a load from SSD was refused because the device is slow; the waiting reader
    /// recomputes the block. The block stays on SSD. A block in the window leaves it until the next
    /// window lists it again, otherwise it would be loaded again at once.
    pub fn on_load_refused(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(Tier::Dram)) else {
            return;
        };
        entry.moving = None;
        entry.awaited = false;
        let (hash, was_prefetch) = (entry.meta.hash, entry.prefetch);
        // Its reserved space in DRAM becomes free for a block that does load.
        let returns_to_ssd =
            entry.assigned_tier == Some(Tier::Dram) && entry.copies.ssd && !entry.copies.dram;
        self.end_prefetch(key);
        if was_prefetch {
            self.remove_from_window(&hash, now);
        }
        if returns_to_ssd { self.return_to_ssd(key, now) } else { self.reconcile(key) }
    }

    /// Assigns the block to SSD again, where its bytes are. Evicts no block there, although its
    /// former space may be taken; the next arrival makes room for both.
    fn return_to_ssd(&mut self, key: BlockKey, now: Timestamp) {
        self.discharge(key);
        self.charge(key, Tier::Ssd);
        if self.slab.get(key).is_some_and(|entry| !entry.held()) {
            self.notify_policy(key, PolicyEvent::MovedIn, now);
        }
        self.reconcile(key);
    }

    /// Reports that a block's SSD copy disappeared. A read in progress may still deliver its bytes.
    pub fn on_ssd_copy_lost(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.copies.ssd) else { return };
        entry.copies.ssd = false;
        if entry.moving.is_some() {
            return;
        }
        if entry.copies.dram {
            return self.reconcile(key);
        }
        self.count_removal(key, RemovalReason::Failed);
        self.drop_block(key, DropCause::Failed);
    }

    /// Reports that a write was refused because the SSD is slow and its queue is full. The block is
    /// dropped, as if there were no SSD.
    pub fn on_write_refused(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(Tier::Ssd)) else {
            return;
        };
        if entry.held() || entry.assigned_tier != Some(Tier::Ssd) {
            return self.on_move_failed(key, Tier::Ssd, now);
        }
        entry.moving = None;
        self.tiers.dram.stats.unwritten_blocks += 1;
        self.count_removal(key, RemovalReason::Dropped);
        self.drop_block(key, DropCause::Capacity);
    }

    /// Reports that a block on SSD must be rewritten, or that its segment could not be freed. The
    /// block is dropped if it is unlikely to be used ([`Book::with_ssd_reuse_min`]) and not held,
    /// pinned or in the window.
    pub fn on_rewrite(&mut self, key: BlockKey, now: Timestamp) {
        let is_asked = self.ssd_writes.reuse_min() > 0.0 && !self.pins.has_pending_begins();
        if self.drop_if_invalidated(key) {
            return;
        }
        let Some(entry) = self.slab.get(key).filter(|entry| is_asked && !entry.parked()) else { return };
        let is_there = entry.assigned_tier == Some(Tier::Ssd) && entry.copies.ssd && entry.moving.is_none();
        let is_full = self.tiers.ssd.shares.has_largest_share(entry.charged_tenant);
        if is_there
            && is_full
            && self.tiers.ssd.policy.reuse_prob_if_kept(key, now) < self.ssd_writes.reuse_min()
        {
            self.tiers.ssd.stats.dropped_blocks += 1;
            self.count_evicted(key, RemovalReason::Dropped, now);
            self.drop_block(key, DropCause::Capacity);
        }
    }

    fn keep_in_dram(&mut self, key: BlockKey, now: Timestamp) {
        // A disk failure must not let an older block evict a newer one, unless the older one is
        // held.
        let Some(entry) = self.slab.get(key) else { return };
        let (held, cost) = (entry.held(), self.cost(entry, Tier::Dram).0);
        // A return above the watermark would evict blocks that then return in turn.
        let may_return = held || self.tiers.dram.limits.goal(self.tiers.dram.used, cost).is_none();
        if !may_return || !self.promote(key, now) {
            self.count_removal(key, RemovalReason::Failed);
            self.drop_block(key, DropCause::Failed);
        } else if self.slab.get(key).is_some_and(|entry| entry.leases == 0) {
            self.notify_policy(key, PolicyEvent::MovedIn, now);
        }
    }

    /// Reconciles copies with the assigned tier: drops surplus copies, announces, queues a move.
    pub(super) fn reconcile(&mut self, key: BlockKey) {
        let is_void = self.slab.is_invalidated(key);
        let Some(entry) = self.slab.get_mut(key) else { return };
        if entry.moving.is_some() || entry.writing {
            return;
        }
        let Some(place) = entry.assigned_tier else { return self.free_copies(key) };
        if is_void && entry.leases == 0 {
            return self.drop_invalidated(key);
        }
        if place != Tier::Gpu && entry.copies.dram && std::mem::take(&mut entry.copies.gpu) {
            // Its bytes have left the GPU, whatever its next tier is.
            self.actions.push_drop(drop_action(key, entry.meta.hash, entry.generation, Tier::Gpu));
        }
        if !entry.copies.has(place) || (entry.awaited && !entry.copies.dram) {
            return self.enqueue(key);
        }
        let (hash, generation) = (entry.meta.hash, entry.generation);
        let announced = entry.announced.replace(place).filter(|_| !is_void);
        entry.awaited = false;
        for other in Tier::ALL {
            if other != place && entry.copies.has(other) {
                entry.copies.set(other, false);
                self.actions.push_drop(drop_action(key, hash, generation, other));
            }
        }
        if let Some(from) = announced.filter(|&from| from != place) {
            self.changes.moved(hash, from, place);
        }
    }

    /// Frees the copies of a removed block, then its key.
    fn free_copies(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get_mut(key) else { return };
        let (copies, hash, generation) =
            (std::mem::take(&mut entry.copies), entry.meta.hash, entry.generation);
        for tier in [Tier::Dram, Tier::Ssd, Tier::Gpu] {
            if copies.has(tier) {
                self.actions.push_drop(drop_action(key, hash, generation, tier));
            }
        }
        self.slab.remove(key);
    }
}

fn drop_action(key: BlockKey, hash: BlockHash, generation: Generation, tier: Tier) -> Action {
    match tier {
        Tier::Dram => Action::DropDram { key },
        Tier::Ssd => Action::DropSsd { key, hash, generation },
        Tier::Gpu => Action::DropGpu { key, hash, generation },
    }
}
