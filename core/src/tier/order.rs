//! The orders a block stands in while nothing holds it: its policy's, its tenant's and its group's; or, while a
//! waiting request needs it, its place in the queue instead; or, while it is pinned softly, its last use among such.
//!
//! Every change of a block's hold, place, last use, pin or window goes through here, so that looking for a victim costs
//! no step per block that may not go. Not here: who gives way (`pressure`).

use super::book::Book;
use super::entry::Order;
use crate::evict::BlockKey;
use crate::id::Timestamp;

/// What a policy is told of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It came in.
    Inserted,
    /// It came from another tier, and not by a use.
    MovedIn,
    /// It was used, and was there before.
    Used,
    /// The request that brought it ended.
    Settled,
}

/// Places of the slab that are looked at in one call when a tenant has a quota or a group a time to live for the first
/// time: about a millisecond of the task that owns the book. Called every 20 ms, that is 800,000 blocks a second.
pub const LISTED_BLOCKS_MAX: usize = 16_384;

impl Book {
    /// Has all blocks listed once more: some have an order to stand in that they had not. Begins with it, and
    /// [`Self::list_more`] goes on.
    pub(super) fn relist(&mut self) {
        // One round from where it is now: whoever asks often gets round all the same.
        let from = self.listing.map_or(0, |(from, _)| from);
        self.listing = Some((from, self.slab.places()));
        self.list_more();
    }

    /// Goes on with listing, [`LISTED_BLOCKS_MAX`] places of it. What changes meanwhile is listed by itself. `true` when
    /// there is more.
    pub fn list_more(&mut self) -> bool {
        let Some((from, left)) = self.listing else { return false };
        let (places, count) = (self.slab.places().max(1), left.min(LISTED_BLOCKS_MAX));
        for place in (from..from + count).map(|place| place % places) {
            let key = BlockKey(u32::try_from(place).unwrap_or(u32::MAX));
            let Some(entry) = self.slab.get(key) else { continue };
            let (tenant, group) = (entry.meta.tenant, entry.meta.hash.group());
            if self.quota_rows.has(tenant) || self.ttls.has(group) {
                self.list(key);
            }
        }
        self.listing = (left > count).then_some(((from + count) % places, left - count));
        if self.listing.is_none() {
            self.review_quotas();
        }
        self.listing.is_some()
    }

    /// Makes the block known to its tier's policy as just used.
    pub(super) fn rank(&mut self, key: BlockKey, now: Timestamp) {
        let is_known = self.slab.get(key).is_some_and(|entry| entry.ranked);
        self.tell(key, if is_known { Told::Used } else { Told::Inserted }, now);
    }

    /// Tells the policy of the block's tier. While something holds it, a waiting request needs it or it is pinned, it
    /// stands outside the policy's order.
    pub(super) fn tell(&mut self, key: BlockKey, how: Told, now: Timestamp) {
        self.unlist(key);
        self.stamp += 1;
        let stamp = self.stamp;
        let Some(entry) = self.slab.get_mut(key) else { return };
        // A move is no use: it keeps its age, if it has one.
        if how != Told::MovedIn || entry.stamp == 0 {
            entry.stamp = stamp;
        }
        let (Some(tier), traits, parked) = (entry.place, entry.meta.traits, entry.parked()) else { return };
        entry.ranked = true;
        // A save whose lease ended before its bytes came has had no end of a request to count from.
        entry.last_use.get_or_insert(now);
        let policy = &mut self.shelf_mut(tier).policy;
        match how {
            Told::Inserted => policy.insert(key, traits, now),
            Told::MovedIn => policy.moved_in(key, traits, now),
            Told::Used => policy.access(key, traits, now),
            Told::Settled => policy.settle(key, traits, now),
        }
        if parked {
            policy.park(key);
        }
        self.list(key);
    }

    /// Takes a block that is held from now on out of every order of eviction: looking for a victim must
    /// not cost a step per held block. [`Self::rank`] or [`Self::unpark`] brings it back.
    pub(super) fn park(&mut self, key: BlockKey) {
        self.unlist(key);
        let Some(entry) = self.slab.get(key).filter(|entry| entry.ranked) else { return };
        if let Some(tier) = entry.place {
            self.shelf_mut(tier).policy.park(key);
        }
    }

    /// Brings back a block whose pin ended or that no waiting request needs any more: as the newest, without
    /// counting as a use.
    pub(super) fn unpark(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.ranked && !entry.held()) else { return };
        let (traits, parked) = (entry.meta.traits, entry.parked());
        if let Some(tier) = entry.place {
            if !parked {
                self.shelf_mut(tier).policy.settle(key, traits, now);
            }
            self.list(key);
        }
    }

    /// Lists a block that is ranked and not held wherever it may be looked for. Listing it twice changes nothing.
    pub(super) fn list(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.ranked) else { return };
        let Some(tier) = entry.place else { return };
        let (tenant, share, stamp, order) = (entry.meta.tenant, entry.share, entry.stamp, entry.order());
        let (group, last_use) = (entry.meta.hash.group(), entry.last_use);
        if entry.held() {
            if let (true, Order::Window(near)) = (entry.is_wanted(), order) {
                self.shelf_mut(tier).shares.want(share, near, key);
            }
            return;
        }
        self.quota_rows.insert(tenant, (tier, matches!(order, Order::Pinned(_))), stamp, key);
        let shelf = self.shelf_mut(tier);
        shelf.shares.insert(share, order, key);
        match order {
            Order::Window(near) => {
                shelf.window.insert(near, key);
            }
            // A pin goes before a time to live.
            Order::Pinned(_) => {}
            Order::Policy => self.ttls.insert(group, last_use, key),
        }
    }

    /// Takes a block off every list, before its place, last use, stamp, pin or window changes or while it is held.
    pub(super) fn unlist(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key) else { return };
        let Some(tier) = entry.place else { return };
        let (tenant, share, stamp, order) = (entry.meta.tenant, entry.share, entry.stamp, entry.order());
        let (group, last_use) = (entry.meta.hash.group(), entry.last_use);
        self.quota_rows.remove(tenant, (tier, matches!(order, Order::Pinned(_))), stamp);
        let shelf = self.shelf_mut(tier);
        shelf.shares.remove(share, order, key);
        match order {
            Order::Window(near) => {
                shelf.window.remove(&near);
            }
            Order::Pinned(_) => {}
            Order::Policy => self.ttls.remove(group, last_use, key),
        }
    }
}
