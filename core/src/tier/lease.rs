//! Leases: the blocks that a request holds, and the update of the eviction order when it ends.
//!
//! A lease is one request on this node. When it ends, its blocks are touched from tail to head, so
//! the head of a prefix is always younger than its tail. Not here: the table of leases
//! (`lease_table.rs`).

use std::cmp::Reverse;

use super::Requester;
use super::book::Book;
use super::entry::Entry;
use super::lease_table::{LeaseBlock, LeaseBlocks, RejectedBlock};
use super::order::PolicyEvent;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, Category, LeaseId, TenantId, Tier, Timestamp};

/// Blocks of expired leases released in one call, unless a single lease has more. Takes about a
/// millisecond of the task that owns the book, called every 20 ms.
pub const EXPIRED_LEASE_BLOCKS_MAX: usize = 4096;

impl Book {
    /// Restarts the lease's time; a lease that has ended stays ended.
    pub fn renew(&mut self, id: LeaseId, now: Timestamp) {
        self.leases.renew(id, now);
    }

    pub(super) fn hold(&mut self, id: LeaseId, key: BlockKey) {
        self.hold_all(id, &[key]);
    }

    /// Holds blocks that an open lease fetches. Returns for each whether this is the lease's first
    /// fetch of it; a block that the lease saved itself is not.
    pub(super) fn hold_all(&mut self, id: LeaseId, keys: &[BlockKey]) -> Vec<bool> {
        self.hold_each(id, keys, |holds, hold, is_new| holds.mark_used(&hold) || is_new)
    }

    /// Holds blocks that an open lease offered and that are present. This is no hit yet, because
    /// the lease may still fetch them. Policies learn of the use when the lease ends.
    pub(super) fn hold_found(&mut self, id: LeaseId, keys: &[BlockKey]) {
        self.hold_each(id, keys, |holds, hold, is_new| is_new && holds.mark_unused(hold));
    }

    fn hold_each(
        &mut self,
        id: LeaseId,
        keys: &[BlockKey],
        note: impl Fn(&mut LeaseBlocks, LeaseBlock, bool) -> bool,
    ) -> Vec<bool> {
        let Some(mut holds) = self.leases.take_blocks(id) else { return vec![false; keys.len()] };
        holds.reserve(keys.len());
        let one = |&key: &BlockKey| {
            let held = self.hold_one(&mut holds, key);
            held.is_some_and(|(hold, is_new)| note(&mut holds, hold, is_new))
        };
        let results = keys.iter().map(one).collect();
        self.leases.return_blocks(id, holds);
        results
    }

    /// Returns the hold and whether it is new for the lease.
    fn hold_one(&mut self, holds: &mut LeaseBlocks, key: BlockKey) -> Option<(LeaseBlock, bool)> {
        let entry = self.slab.get_mut(key)?;
        let hold = LeaseBlock { offset_blocks: entry.meta.traits.offset_blocks, key, serial: entry.serial };
        let is_new = holds.insert(hold);
        if is_new {
            entry.leases += 1;
            if entry.leases == 1 {
                self.park(key);
            }
        }
        Some((hold, is_new))
    }

    /// Whether this was the lease's last rejected block, and its tenant still has no block with
    /// this hash.
    pub(super) fn was_last_rejected(&self, asker: Requester, hash: &BlockHash) -> bool {
        let last = self.leases.last_rejected(asker.lease);
        last.is_some_and(|last| last.hash == *hash && last.tenant == asker.tenant)
            && self.owner_tenant(hash) != Some(asker.tenant)
    }

    /// Removes the hold of a writing lease on a block that never arrived.
    pub(super) fn unhold(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key) else { return };
        let hold = LeaseBlock { offset_blocks: entry.meta.traits.offset_blocks, key, serial: entry.serial };
        if let Some(writer) = entry.writer {
            self.leases.remove_block(writer, &hold);
        }
    }

    /// Ends a request: releases its blocks and counts them as just used, tail first.
    pub fn release(&mut self, id: LeaseId, now: Timestamp) {
        let Some(lease) = self.leases.end(id) else { return };
        let holds = lease.blocks.into_tail_first();
        let mut live: Vec<BlockKey> = holds.into_iter().filter_map(|hold| self.release_block(hold)).collect();
        let passed = self.merge_rejected(lease.rejected, &mut live);
        let mut tenants: Vec<TenantId> =
            live.iter().filter_map(|key| self.slab.get(*key)).map(|entry| entry.meta.tenant).collect();
        // Hashes are keyed per tenant, so a request's blocks nearly always belong to one tenant.
        tenants.dedup();
        tenants.sort_unstable();
        tenants.dedup();
        self.touch(&live, lease.category, &passed, now);
        // A quota lowered during the request applies from here on.
        tenants.into_iter().for_each(|tenant| self.enforce_quota(tenant));
    }

    /// Traits of the request's rejected blocks, each once, tail to head. If another request saved
    /// such a block for the same tenant meanwhile, it counts as used and joins `live`. A block of
    /// another tenant is skipped.
    fn merge_rejected(&self, mut passed: Vec<RejectedBlock>, live: &mut Vec<BlockKey>) -> Vec<BlockTraits> {
        if passed.is_empty() {
            return Vec::new();
        }
        passed.sort_unstable_by_key(|passed| (Reverse(passed.traits.offset_blocks), passed.hash));
        passed.dedup_by_key(|passed| passed.hash);
        let before = live.len();
        passed.retain(|passed| match self.slab.find(&passed.hash) {
            Some(key) => {
                let is_readable = |entry: &Entry| {
                    !entry.writing && entry.assigned_tier.is_some() && entry.meta.tenant == passed.tenant
                };
                if self.slab.get(key).is_some_and(is_readable) {
                    live.push(key);
                }
                false
            }
            None => true,
        });
        if live.len() > before {
            let offset =
                |key: &BlockKey| self.slab.get(*key).map_or(0, |entry| entry.meta.traits.offset_blocks);
            live.sort_by_key(|key| (Reverse(offset(key)), *key));
            live.dedup();
        }
        passed.into_iter().map(|passed| passed.traits).collect()
    }

    fn release_block(&mut self, hold: LeaseBlock) -> Option<BlockKey> {
        let entry = self.slab.get_mut(hold.key).filter(|entry| entry.serial == hold.serial)?;
        entry.leases -= 1;
        let is_used = !entry.writing && entry.assigned_tier.is_some();
        let is_void = self.slab.is_invalidated(hold.key);
        // Reading an invalidated block is no use: no later request will ask for it.
        self.drop_if_invalidated(hold.key);
        (is_used && !is_void).then_some(hold.key)
    }

    /// Records that a request used these blocks, tail first: they become newest in their tier's
    /// policy and are promoted to DRAM.
    ///
    /// New blocks are inserted first. Then all uses are reported in one sequence, with rejected
    /// blocks in their positions: policies judge the request's blocks as a whole.
    fn touch(&mut self, blocks: &[BlockKey], category: Category, passed: &[BlockTraits], now: Timestamp) {
        let mut passed = passed.iter().map(|traits| BlockTraits { category, ..*traits }).peekable();
        let used_again = self.gpu_candidates(blocks, now);
        let are_new: Vec<bool> =
            blocks.iter().map(|&key| self.insert_into_policy(key, category, now)).collect();
        for (&key, is_new) in blocks.iter().zip(are_new) {
            // A later insertion may have evicted it.
            let Some(entry) = self.slab.get(key).filter(|entry| entry.assigned_tier.is_some()) else {
                continue;
            };
            let traits = entry.meta.traits;
            while let Some(passed) = passed.next_if(|passed| passed.offset_blocks > traits.offset_blocks) {
                self.notify_rejected(passed, now);
            }
            self.curve.record_use(traits.fingerprint);
            let how = if is_new { PolicyEvent::Settled } else { PolicyEvent::Used };
            self.notify_policy(key, how, now);
            self.notify_other_tiers(self.assigned_tier(key), traits, now);
        }
        passed.for_each(|passed| self.notify_rejected(passed, now));
        for (key, gap_us) in used_again {
            self.promote_to_gpu(key, gap_us, now);
        }
    }

    fn notify_rejected(&mut self, passed: BlockTraits, now: Timestamp) {
        self.curve.record_use(passed.fingerprint);
        self.notify_other_tiers(None, passed, now);
    }

    /// Reports a use to the policies of all tiers except `place`. A block enters a slower tier when
    /// its use stops, and leaves it when used. So a slower tier's policy must learn from uses
    /// elsewhere.
    fn notify_other_tiers(&mut self, place: Option<Tier>, traits: BlockTraits, now: Timestamp) {
        for tier in Tier::ALL {
            if place != Some(tier) && self.tiers.exists(tier) {
                self.tier_state_mut(tier).policy.note_absent(traits, now);
            }
        }
    }

    /// Inserts a block into its tier's policy. Returns whether the policy did not know it.
    fn insert_into_policy(&mut self, key: BlockKey, category: Category, now: Timestamp) -> bool {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.assigned_tier.is_some()) else {
            return false;
        };
        entry.meta.traits.category = category;
        entry.last_use = Some(now);
        if entry.assigned_tier == Some(Tier::Ssd) && self.may_promote(key) {
            self.promote(key, now);
        }
        let is_new = self.slab.get(key).is_some_and(|entry| !entry.in_policy);
        if is_new {
            self.notify_policy(key, PolicyEvent::Inserted, now);
        }
        is_new
    }

    /// Ends expired leases, oldest deadline first, up to [`EXPIRED_LEASE_BLOCKS_MAX`] blocks.
    /// Returns the number of leases.
    pub fn expire(&mut self, now: Timestamp) -> usize {
        let (mut ended, mut blocks) = (0, 0);
        while let Some(id) = self.leases.first_expired(now) {
            let more = self.leases.block_count(id).max(1);
            if ended > 0 && blocks + more > EXPIRED_LEASE_BLOCKS_MAX {
                break;
            }
            blocks += more;
            self.release(id, now);
            ended += 1;
        }
        ended
    }
}
