//! Keeps each evictable block in the eviction orders it belongs to.
//!
//! A block that no lease, write or hard pin holds is in the order of its policy, its tenant and its
//! group. A block that a queued request needs is ordered by its queue position instead. A softly
//! pinned block is ordered by its last use.
//!
//! Every change of a block's hold, tier, last use, pin or window goes through here. So the search
//! for a victim never steps over a block that may not leave. Not here: the choice of the victim
//! (`pressure`).

use super::book::Book;
use super::entry::EvictionOrder;
use crate::evict::BlockKey;
use crate::id::Timestamp;

/// An event that is reported to a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyEvent {
    /// The block became resident by a request.
    Inserted,
    /// The block arrived from another tier without a use.
    MovedIn,
    /// A resident block was used.
    Used,
    /// The request that brought the block ended.
    Settled,
}

/// Slots of the slab scanned in one call when a quota or a time to live is new for a tenant or
/// group. Takes about a millisecond of the task that owns the book, called every 20 ms.
pub const LISTED_BLOCKS_MAX: usize = 16_384;

impl Book {
    /// Starts listing all blocks again, because a tenant or group became limited.
    /// [`Self::list_more`] continues.
    pub(super) fn relist(&mut self) {
        self.scans.restart_listing(self.slab.slot_count());
        self.list_more();
    }

    /// Continues listing by [`LISTED_BLOCKS_MAX`] slots. Blocks that change meanwhile are listed by
    /// that change. Returns `true` if slots remain.
    pub fn list_more(&mut self) -> bool {
        let Some(slots) = self.scans.next_listed_slots(self.slab.slot_count()) else { return false };
        for place in slots {
            let key = BlockKey(u32::try_from(place).unwrap_or(u32::MAX));
            let Some(entry) = self.slab.get(key) else { continue };
            let (tenant, group) = (entry.meta.tenant, entry.meta.hash.ttl_group());
            if self.tenants.is_limited(tenant) || self.ttls.has(group) {
                self.list(key);
            }
        }
        let is_listing = self.scans.is_listing();
        if !is_listing {
            self.tenants.review();
        }
        is_listing
    }

    /// Reports the block to its tier's policy as just used.
    pub(super) fn rank(&mut self, key: BlockKey, now: Timestamp) {
        let is_known = self.slab.get(key).is_some_and(|entry| entry.in_policy);
        self.notify_policy(key, if is_known { PolicyEvent::Used } else { PolicyEvent::Inserted }, now);
    }

    /// Reports an event to the policy of the block's tier. A block that is held, needed by a queued
    /// request or pinned stays parked, outside the policy's order.
    pub(super) fn notify_policy(&mut self, key: BlockKey, how: PolicyEvent, now: Timestamp) {
        self.unlist(key);
        let stamp = self.slab.next_stamp();
        let Some(entry) = self.slab.get_mut(key) else { return };
        // A move is not a use: the block keeps its stamp if it has one.
        if how != PolicyEvent::MovedIn || entry.stamp == 0 {
            entry.stamp = stamp;
        }
        let (Some(tier), traits, parked) = (entry.assigned_tier, entry.meta.traits, entry.parked()) else {
            return;
        };
        entry.in_policy = true;
        // The lease of a save can end before its bytes arrive; then there is no request end to
        // count from.
        entry.last_use.get_or_insert(now);
        let policy = &mut self.tier_state_mut(tier).policy;
        match how {
            PolicyEvent::Inserted => policy.insert(key, traits, now),
            PolicyEvent::MovedIn => policy.insert_moved(key, traits, now),
            PolicyEvent::Used => policy.access(key, traits, now),
            PolicyEvent::Settled => policy.settle(key, traits, now),
        }
        if parked {
            policy.park(key);
        }
        self.list(key);
    }

    /// Removes a block that is now held from every eviction order, so that the victim search costs
    /// no step per held block. [`Self::rank`] or [`Self::unpark`] restores it.
    pub(super) fn park(&mut self, key: BlockKey) {
        self.unlist(key);
        let Some(entry) = self.slab.get(key).filter(|entry| entry.in_policy) else { return };
        if let Some(tier) = entry.assigned_tier {
            self.tier_state_mut(tier).policy.park(key);
        }
    }

    /// Restores a block after its pin ended or the last queued request that needed it left. It
    /// becomes the newest, without counting as a use.
    pub(super) fn unpark(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.in_policy && !entry.held()) else { return };
        let (traits, parked) = (entry.meta.traits, entry.parked());
        if let Some(tier) = entry.assigned_tier {
            if !parked {
                self.tier_state_mut(tier).policy.settle(key, traits, now);
            }
            self.list(key);
        }
    }

    /// Inserts a block into every order it belongs to, unless it is held or unknown to the policy.
    /// Idempotent.
    pub(super) fn list(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.in_policy) else { return };
        let Some(tier) = entry.assigned_tier else { return };
        let (tenant, share, stamp, order) =
            (entry.meta.tenant, entry.charged_tenant, entry.stamp, entry.order());
        let (group, last_use) = (entry.meta.hash.ttl_group(), entry.last_use);
        if entry.held() {
            if let (true, EvictionOrder::Window(near)) = (entry.is_promote_only(), order) {
                self.tier_state_mut(tier).shares.insert_promote_only(share, near, key);
            }
            return;
        }
        self.tenants.list(tenant, (tier, matches!(order, EvictionOrder::Pinned(_))), stamp, key);
        let state = self.tier_state_mut(tier);
        state.shares.insert(share, order, key);
        match order {
            EvictionOrder::Window(near) => {
                state.window.insert(near, key);
            }
            // A pin takes precedence over a time to live.
            EvictionOrder::Pinned(_) => {}
            EvictionOrder::Policy => self.ttls.insert(group, last_use, key),
        }
    }

    /// Removes a block from every order. Call before its tier, last use, stamp, pin or window
    /// changes, or while it is held.
    pub(super) fn unlist(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key) else { return };
        let Some(tier) = entry.assigned_tier else { return };
        let (tenant, share, stamp, order) =
            (entry.meta.tenant, entry.charged_tenant, entry.stamp, entry.order());
        let (group, last_use) = (entry.meta.hash.ttl_group(), entry.last_use);
        self.tenants.unlist(tenant, (tier, matches!(order, EvictionOrder::Pinned(_))), stamp);
        let state = self.tier_state_mut(tier);
        state.shares.remove(share, order, key);
        match order {
            EvictionOrder::Window(near) => {
                state.window.remove(&near);
            }
            EvictionOrder::Pinned(_) => {}
            EvictionOrder::Policy => self.ttls.remove(group, last_use, key),
        }
    }
}
