//! Fair shares of a tier: under pressure, the tenant with the largest share evicts (max-min with
//! equal shares; the isolation that FairRide, NSDI '16, asks of a shared cache).
//!
//! A block is charged to the tenant that saved it. Hashes are keyed per tenant, so tenants never
//! share a block. A tenant may evict its own blocks and those of a tenant with a larger share: a
//! flood cannot displace smaller tenants, and demand splits evenly. Within a tenant the tier's
//! policy picks the victim if it can; otherwise the longest unused block leaves. Not here: limits
//! that also hold without pressure (`quota`).

use std::collections::BTreeMap;

use super::entry::EvictionOrder;
use super::pressure::{PINNED_POSITION, SpaceClaim};
use crate::evict::BlockKey;
use crate::evict::queue::{Links, Queue};
use crate::id::TenantId;

/// Tenants accounted separately in a tier; later ones share one entry. A decision scans them all if
/// there is more than one. The limit fits a platform's teams, and the scan takes microseconds.
pub const TENANTS_MAX: usize = 256;

/// The shared entry of all tenants beyond [`TENANTS_MAX`].
const OVERFLOW_TENANT: TenantId = TenantId(u32::MAX);

/// One tenant's part of a tier.
#[derive(Debug, Default)]
struct TenantShare {
    /// Held or not, in the capacity's unit.
    used: u64,
    /// Number of those blocks.
    blocks: u64,
    /// Evictable blocks, in the order of last uses.
    queue: Queue,
    /// Evicted after `queue` is empty: softly pinned blocks, the longest unused first.
    pinned: BTreeMap<u64, BlockKey>,
    /// Evicted last: blocks that queued requests need, by queue position.
    window: BTreeMap<u32, BlockKey>,
    /// Blocks that queued requests need and a hard pin holds: they may be promoted, but not
    /// evicted.
    promote_only: BTreeMap<u32, BlockKey>,
}

impl TenantShare {
    fn furthest(&self, yields_to: u32) -> Option<BlockKey> {
        self.window.range(yields_to..).next_back().map(|(_, key)| *key)
    }

    fn pinned(&self, yields_to: u32) -> Option<BlockKey> {
        self.pinned.first_key_value().filter(|_| yields_to <= PINNED_POSITION).map(|(_, key)| *key)
    }

    /// The block to evict when the policy's order is empty.
    fn last_resort(&self, yields_to: u32) -> Option<BlockKey> {
        self.pinned(yields_to).or_else(|| self.furthest(yields_to))
    }

    fn has_victim(&self, yields_to: u32) -> bool {
        !self.queue.is_empty() || self.last_resort(yields_to).is_some()
    }
}

/// The tenants of one tier.
#[derive(Debug, Default)]
pub(super) struct Shares {
    rows: BTreeMap<TenantId, TenantShare>,
    links: Links,
    /// Number of promote-only blocks of all tenants.
    promote_only: usize,
}

impl Shares {
    /// The tenant that a new block of `tenant` is charged to.
    pub(super) fn charged_tenant(&self, tenant: TenantId) -> TenantId {
        let is_own = self.rows.len() < TENANTS_MAX || self.rows.contains_key(&tenant);
        if is_own { tenant } else { OVERFLOW_TENANT }
    }

    /// Whether there is more than one tenant, so that a victim tenant must be chosen.
    pub(super) fn is_multi_tenant(&self) -> bool {
        self.rows.len() > 1
    }

    /// Whether no tenant has a larger share.
    pub(super) fn has_largest_share(&self, row: TenantId) -> bool {
        let most = self.rows.values().map(|row| row.used).max().unwrap_or(0);
        self.rows.get(&row).map_or(0, |row| row.used) >= most
    }

    pub(super) fn charge(&mut self, row: TenantId, cost: u64) {
        let row = self.rows.entry(row).or_default();
        row.used += cost;
        row.blocks += 1;
    }

    /// The block must be off the tenant's lists.
    pub(super) fn discharge(&mut self, row: TenantId, cost: u64) {
        let Some(kept) = self.rows.get_mut(&row) else { return };
        kept.used = kept.used.saturating_sub(cost);
        kept.blocks -= 1;
        if kept.blocks == 0 {
            self.rows.remove(&row);
        }
    }

    /// Lists an evictable block. Idempotent.
    pub(super) fn insert(&mut self, row: TenantId, order: EvictionOrder, key: BlockKey) {
        let Some(row) = self.rows.get_mut(&row) else { return };
        match order {
            EvictionOrder::Window(near) => {
                row.window.insert(near, key);
            }
            EvictionOrder::Pinned(stamp) => {
                row.pinned.insert(stamp, key);
            }
            EvictionOrder::Policy if !self.links.contains(key) => self.links.push_warm(&mut row.queue, key),
            EvictionOrder::Policy => {}
        }
    }

    /// Lists a promote-only block.
    pub(super) fn insert_promote_only(&mut self, row: TenantId, near: u32, key: BlockKey) {
        if let Some(row) = self.rows.get_mut(&row) {
            self.promote_only += usize::from(row.promote_only.insert(near, key).is_none());
        }
    }

    /// Whether there is a promote-only block.
    pub(super) fn has_promote_only(&self) -> bool {
        self.promote_only > 0
    }

    pub(super) fn remove(&mut self, row: TenantId, order: EvictionOrder, key: BlockKey) {
        let Some(row) = self.rows.get_mut(&row) else { return };
        match order {
            EvictionOrder::Window(near) => {
                row.window.remove(&near);
                self.promote_only -= usize::from(row.promote_only.remove(&near).is_some());
            }
            EvictionOrder::Pinned(stamp) => {
                row.pinned.remove(&stamp);
            }
            EvictionOrder::Policy if self.links.contains(key) => self.links.unlink(&mut row.queue, key),
            EvictionOrder::Policy => {}
        }
    }

    /// Removes all blocks of queued requests, before they are listed at new positions.
    pub(super) fn clear_windows(&mut self) {
        for row in self.rows.values_mut() {
            row.window.clear();
            row.promote_only.clear();
        }
        self.promote_only = 0;
    }

    pub(super) fn used(&self, row: TenantId) -> u64 {
        self.rows.get(&row).map_or(0, |row| row.used)
    }

    /// Whether `taker` may evict blocks of `giver`: itself, or a tenant with a larger share.
    pub(super) fn may_take(&self, taker: TenantId, giver: TenantId) -> bool {
        taker == giver || self.used(giver) > self.used(taker)
    }

    /// The tenant that evicts for `taker`: the largest one with an evictable block, and the taker
    /// itself among equals. `None` if that tenant has no larger share than the taker.
    pub(super) fn victim_tenant(&self, taker: TenantId, claim: SpaceClaim) -> Option<TenantId> {
        let giving = self
            .rows
            .iter()
            .filter(|(tenant, row)| row.has_victim(min_victim_position(**tenant, taker, claim)));
        let (&giver, _) = giving.max_by_key(|(tenant, row)| (row.used, **tenant == taker))?;
        self.may_take(taker, giver).then_some(giver)
    }

    /// The block of `giver` to evict when the policy does not decide.
    pub(super) fn coldest(&self, giver: TenantId, taker: TenantId, claim: SpaceClaim) -> Option<BlockKey> {
        let row = self.rows.get(&giver)?;
        row.queue.coldest().or_else(|| row.last_resort(min_victim_position(giver, taker, claim)))
    }

    /// The block to evict when there is only one tenant and the policy names no victim.
    pub(super) fn last_resort(&self, taker: TenantId, claim: SpaceClaim) -> Option<BlockKey> {
        let (giver, row) = self.rows.first_key_value()?;
        row.last_resort(min_victim_position(*giver, taker, claim))
    }

    /// The tenant's block of a queued request that is furthest from the head of the queue.
    pub(super) fn furthest(&self, row: TenantId, yields_to: u32) -> Option<BlockKey> {
        self.rows.get(&row)?.furthest(yields_to)
    }

    /// Each tenant's block of a queued request nearest to the head of the queue, nearest first.
    pub(super) fn nearest(&self) -> Vec<(u32, BlockKey)> {
        let first = |row: &TenantShare| {
            let firsts = [row.window.first_key_value(), row.promote_only.first_key_value()];
            firsts.into_iter().flatten().map(|(near, key)| (*near, *key)).min()
        };
        let mut nearest: Vec<(u32, BlockKey)> = self.rows.values().filter_map(first).collect();
        nearest.sort_unstable();
        nearest
    }

    /// Numbers of listed blocks of a tenant: policy order, softly pinned, window, promote-only.
    #[cfg(test)]
    pub(super) fn listed(&self, row: TenantId) -> [usize; 4] {
        let of =
            |row: &TenantShare| [row.queue.len(), row.pinned.len(), row.window.len(), row.promote_only.len()];
        self.rows.get(&row).map(of).unwrap_or_default()
    }

    /// Every tenant with its charge.
    #[cfg(test)]
    pub(super) fn rows(&self) -> impl Iterator<Item = (TenantId, u64)> {
        self.rows.iter().map(|(tenant, row)| (*tenant, row.used))
    }
}

/// The first queue position of the giver's blocks that may be evicted.
fn min_victim_position(giver: TenantId, taker: TenantId, claim: SpaceClaim) -> u32 {
    if giver == taker { claim.own_min_position } else { claim.others_min_position }
}
