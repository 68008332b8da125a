//! The table of leases: callers, deadlines, held blocks and rejected blocks.
//!
//! Not here: what a hold does to a block, and what happens to a request's blocks at its end
//! (`lease.rs`).

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::time::Duration;

use super::{LeasesFull, Requester};
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, CallerId, Category, LeaseId, TenantId, Timestamp};

/// Rejected blocks that one lease remembers until it ends (a prompt of 65,536 tokens in blocks of
/// 16), and that all leases together remember (at most 10 MiB). The policies do not learn of
/// further ones.
const REJECTED_PER_LEASE_MAX: usize = 4096;
const REJECTED_BLOCKS_MAX: usize = 131_072;

/// One request in progress.
#[derive(Clone, Debug)]
struct Lease {
    caller: CallerId,
    category: Category,
    deadline: Timestamp,
    blocks: LeaseBlocks,
    /// Blocks that were offered and rejected, in the order of offers. The policies learn of them at
    /// the end of the lease.
    rejected: Vec<RejectedBlock>,
}

/// A block that was offered and rejected.
#[derive(Clone, Copy, Debug)]
pub(super) struct RejectedBlock {
    pub(super) hash: BlockHash,
    pub(super) tenant: TenantId,
    pub(super) traits: BlockTraits,
}

/// Blocks that a lease holds, each once, by offset. Requests name them in that order, so most are
/// appended.
#[derive(Clone, Debug, Default)]
pub(super) struct LeaseBlocks {
    ordered: Vec<LeaseBlock>,
    /// Blocks in `ordered` that are no longer held.
    removed: BTreeSet<LeaseBlock>,
    /// Blocks added after one with a larger offset.
    out_of_order: BTreeSet<LeaseBlock>,
    /// Blocks that a save found present and that no fetch has requested yet.
    unused: BTreeSet<LeaseBlock>,
}

impl LeaseBlocks {
    /// Prepares for as many further blocks.
    pub(super) fn reserve(&mut self, blocks: usize) {
        self.ordered.reserve(blocks);
    }

    /// Remembers a held block that no fetch has requested yet.
    pub(super) fn mark_unused(&mut self, hold: LeaseBlock) -> bool {
        self.unused.insert(hold)
    }

    /// Forgets that no fetch has requested the block. Returns whether that was so.
    pub(super) fn mark_used(&mut self, hold: &LeaseBlock) -> bool {
        self.unused.remove(hold)
    }

    /// Returns `false` if it was present.
    pub(super) fn insert(&mut self, hold: LeaseBlock) -> bool {
        if self.removed.remove(&hold) {
            return true;
        }
        let is_behind = |last: Option<&LeaseBlock>| last.is_none_or(|last| *last < hold);
        if is_behind(self.ordered.last()) && is_behind(self.out_of_order.last()) {
            self.ordered.push(hold);
            return true;
        }
        self.ordered.binary_search(&hold).is_err() && self.out_of_order.insert(hold)
    }

    fn remove(&mut self, hold: &LeaseBlock) {
        self.unused.remove(hold);
        if self.ordered.last() == Some(hold) {
            self.ordered.pop();
            self.removed.remove(hold);
        } else if self.ordered.binary_search(hold).is_ok() {
            // An aborted save removes every block it offered; removal must not shift the others.
            self.removed.insert(*hold);
        } else {
            self.out_of_order.remove(hold);
        }
    }

    /// All held blocks, last first.
    pub(super) fn into_tail_first(self) -> Vec<LeaseBlock> {
        let mut all = self.ordered;
        if !self.removed.is_empty() {
            all.retain(|hold| !self.removed.contains(hold));
        }
        if !self.out_of_order.is_empty() {
            all.extend(self.out_of_order);
            all.sort_unstable();
        }
        all.reverse();
        all
    }

    fn len(&self) -> usize {
        self.ordered.len() + self.out_of_order.len() - self.removed.len()
    }
}

/// A held block. A key that was reused has another serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LeaseBlock {
    pub(super) offset_blocks: u32,
    pub(super) key: BlockKey,
    pub(super) serial: u64,
}

/// A lease that just ended.
#[derive(Debug)]
pub(super) struct EndedLease {
    pub(super) category: Category,
    pub(super) blocks: LeaseBlocks,
    /// In the order of offers.
    pub(super) rejected: Vec<RejectedBlock>,
}

/// All leases.
#[derive(Debug)]
pub(super) struct LeaseTable {
    leases: BTreeMap<LeaseId, Lease>,
    deadlines: BTreeSet<(Timestamp, LeaseId)>,
    /// Number of leases of each caller; callers without a lease are absent.
    callers: BTreeMap<CallerId, usize>,
    /// Time after which an unreleased lease expires.
    span: Duration,
    leases_max: usize,
    /// Rejected blocks that all leases remember.
    rejected_blocks: usize,
}

impl LeaseTable {
    pub(super) fn new(span: Duration, leases_max: usize) -> LeaseTable {
        let (leases, deadlines, callers) = Default::default();
        LeaseTable { leases, deadlines, callers, span, leases_max, rejected_blocks: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.leases.len()
    }

    /// Opens the lease or renews it.
    pub(super) fn open(&mut self, asker: Requester, now: Timestamp) -> Result<(), LeasesFull> {
        if let Some(lease) = self.leases.get_mut(&asker.lease) {
            lease.category = asker.category;
            self.renew(asker.lease, now);
            return Ok(());
        }
        let Requester { lease: id, caller, category, .. } = asker;
        let (limit, held) = (self.leases_max, self.leases.len());
        let own = self.callers.get(&caller).copied().unwrap_or(0);
        // A sole caller may take half of all leases, the next one half of the rest. So a new caller
        // always finds some, however long others keep theirs.
        if own >= limit.saturating_sub(held) {
            return Err(LeasesFull { limit, held, own });
        }
        self.callers.insert(caller, own + 1);
        let deadline = now.after(self.span);
        let lease =
            Lease { caller, category, deadline, blocks: LeaseBlocks::default(), rejected: Vec::new() };
        self.leases.insert(id, lease);
        self.deadlines.insert((deadline, id));
        Ok(())
    }

    /// Restarts the lease's time; a lease that has ended stays ended.
    pub(super) fn renew(&mut self, id: LeaseId, now: Timestamp) {
        let deadline = now.after(self.span);
        if let Some(lease) = self.leases.get_mut(&id) {
            self.deadlines.remove(&(lease.deadline, id));
            lease.deadline = deadline;
            self.deadlines.insert((deadline, id));
        }
    }

    /// Ends the lease; `None` if it has ended before.
    pub(super) fn end(&mut self, id: LeaseId) -> Option<EndedLease> {
        let Lease { caller, category, deadline, blocks, rejected } = self.leases.remove(&id)?;
        self.deadlines.remove(&(deadline, id));
        self.decrement_caller(caller);
        self.rejected_blocks -= rejected.len();
        Some(EndedLease { category, blocks, rejected })
    }

    /// Subtracts one lease from the caller's count.
    fn decrement_caller(&mut self, caller: CallerId) {
        if let btree_map::Entry::Occupied(mut own) = self.callers.entry(caller) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }

    /// The expired lease with the oldest deadline.
    pub(super) fn first_expired(&self, now: Timestamp) -> Option<LeaseId> {
        self.deadlines.first().filter(|(deadline, _)| *deadline <= now).map(|(_, id)| *id)
    }

    /// Blocks that the end of the lease processes, held and rejected.
    pub(super) fn block_count(&self, id: LeaseId) -> usize {
        self.leases.get(&id).map_or(0, |lease| lease.blocks.len() + lease.rejected.len())
    }

    /// Takes the held blocks of an open lease out of the table; [`Self::return_blocks`] puts them
    /// back. So the lease is looked up once for many blocks.
    pub(super) fn take_blocks(&mut self, id: LeaseId) -> Option<LeaseBlocks> {
        self.leases.get_mut(&id).map(|lease| std::mem::take(&mut lease.blocks))
    }

    pub(super) fn return_blocks(&mut self, id: LeaseId, blocks: LeaseBlocks) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.blocks = blocks;
        }
    }

    /// Removes a held block from the lease.
    pub(super) fn remove_block(&mut self, id: LeaseId, hold: &LeaseBlock) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.blocks.remove(hold);
        }
    }

    /// Remembers that a block of an open lease was rejected.
    pub(super) fn note_rejected(&mut self, id: LeaseId, passed: RejectedBlock) {
        if self.rejected_blocks < REJECTED_BLOCKS_MAX
            && let Some(lease) = self.leases.get_mut(&id)
            && lease.rejected.len() < REJECTED_PER_LEASE_MAX
        {
            lease.rejected.push(passed);
            self.rejected_blocks += 1;
        }
    }

    /// The block of the lease that was rejected last.
    pub(super) fn last_rejected(&self, id: LeaseId) -> Option<&RejectedBlock> {
        self.leases.get(&id).and_then(|lease| lease.rejected.last())
    }

    /// Leases by caller, as counted and as recomputed.
    #[cfg(test)]
    pub(super) fn callers(&self) -> [BTreeMap<CallerId, usize>; 2] {
        let mut are = BTreeMap::new();
        self.leases.values().for_each(|lease| *are.entry(lease.caller).or_default() += 1);
        [self.callers.clone(), are]
    }

    /// Number of blocks a lease holds.
    #[cfg(test)]
    pub(super) fn held_by(&self, id: LeaseId) -> usize {
        self.leases.get(&id).map_or(0, |lease| lease.blocks.len())
    }

    #[cfg(test)]
    pub(super) fn rejected_blocks(&self) -> usize {
        self.rejected_blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hold(number: u32) -> LeaseBlock {
        LeaseBlock { offset_blocks: number, key: BlockKey(number), serial: 1 }
    }

    proptest! {
        #[test]
        fn lease_blocks_are_a_set_ordered_by_offset(steps in prop::collection::vec((any::<bool>(), 0u32..12), 0..200)) {
            let (mut holds, mut expected) = (LeaseBlocks::default(), BTreeSet::new());
            for (is_new, number) in steps {
                if is_new {
                    prop_assert_eq!(holds.insert(hold(number)), expected.insert(hold(number)));
                } else {
                    holds.remove(&hold(number));
                    expected.remove(&hold(number));
                }
                prop_assert_eq!(holds.len(), expected.len());
            }
            prop_assert_eq!(holds.into_tail_first(), expected.into_iter().rev().collect::<Vec<_>>());
        }
    }
}
