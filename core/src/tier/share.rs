//! Fair shares of a tier: when room is short, the tenant with most of it gives way (max-min with equal shares; the
//! isolation that FairRide, NSDI '16, asks of a shared cache).
//!
//! A block is charged to the tenant that saved it, and hashes are keyed per tenant, so nobody rides on a block that
//! another pays for. A tenant takes room of one that has more, or its own: so flooding a tier wins nothing from anybody
//! who has less, and what all want is split evenly by itself. Among one tenant's blocks the tier's policy decides where
//! it can, and else the longest unused goes. Not here: limits that hold also when there is room (`quota`).

use std::collections::BTreeMap;

use super::entry::Order;
use super::pressure::{Claim, PINNED_PLACE};
use crate::evict::BlockKey;
use crate::evict::queue::{Links, Queue};
use crate::id::TenantId;

/// Tenants told apart in a tier; those that come when there are so many share one row. A decision looks at each of them, and
/// at none while there is one: so many that a platform's teams fit, and few enough that looking is a matter of microseconds.
pub const TENANTS_MAX: usize = 256;

/// The row of all tenants beyond [`TENANTS_MAX`].
const OTHERS: TenantId = TenantId(u32::MAX);

/// What one tenant has in a tier.
#[derive(Debug, Default)]
struct Row {
    /// Held or not, in the capacity's unit.
    used: u64,
    /// As many blocks that is.
    blocks: u64,
    /// What may leave, in the order of last uses.
    queue: Queue,
    /// What may leave when nothing of these does: blocks that are pinned softly, the longest unused first.
    pinned: BTreeMap<u64, BlockKey>,
    /// What may leave when nothing else of the tenant does: blocks that waiting requests need, the next one's first.
    window: BTreeMap<u32, BlockKey>,
    /// Blocks that waiting requests need and that may not leave at all, since they are pinned; but they may come up.
    wanted: BTreeMap<u32, BlockKey>,
}

impl Row {
    fn furthest(&self, yields_to: u32) -> Option<BlockKey> {
        self.window.range(yields_to..).next_back().map(|(_, key)| *key)
    }

    fn pinned(&self, yields_to: u32) -> Option<BlockKey> {
        self.pinned.first_key_value().filter(|_| yields_to <= PINNED_PLACE).map(|(_, key)| *key)
    }

    /// What leaves when nothing that is in the policy's order does.
    fn last_resort(&self, yields_to: u32) -> Option<BlockKey> {
        self.pinned(yields_to).or_else(|| self.furthest(yields_to))
    }

    fn gives(&self, yields_to: u32) -> bool {
        self.queue.len() > 0 || self.last_resort(yields_to).is_some()
    }
}

/// The tenants of one tier.
#[derive(Debug, Default)]
pub(super) struct Shares {
    rows: BTreeMap<TenantId, Row>,
    links: Links,
    /// Blocks of all rows that waiting requests need and that may not leave.
    wanted: usize,
}

impl Shares {
    /// The row that a block of the tenant is charged to if it comes now.
    pub(super) fn row(&self, tenant: TenantId) -> TenantId {
        let is_own = self.rows.len() < TENANTS_MAX || self.rows.contains_key(&tenant);
        if is_own { tenant } else { OTHERS }
    }

    /// Whether there is more than one tenant, so that who gives way is a question.
    pub(super) fn are_many(&self) -> bool {
        self.rows.len() > 1
    }

    /// Whether nobody has more than this one.
    pub(super) fn has_most(&self, row: TenantId) -> bool {
        let most = self.rows.values().map(|row| row.used).max().unwrap_or(0);
        self.rows.get(&row).map_or(0, |row| row.used) >= most
    }

    pub(super) fn charge(&mut self, row: TenantId, cost: u64) {
        let row = self.rows.entry(row).or_default();
        row.used += cost;
        row.blocks += 1;
    }

    /// The block must be off its row's lists.
    pub(super) fn discharge(&mut self, row: TenantId, cost: u64) {
        let Some(kept) = self.rows.get_mut(&row) else { return };
        kept.used = kept.used.saturating_sub(cost);
        kept.blocks -= 1;
        if kept.blocks == 0 {
            self.rows.remove(&row);
        }
    }

    /// Lists a block that may leave, once.
    pub(super) fn insert(&mut self, row: TenantId, order: Order, key: BlockKey) {
        let Some(row) = self.rows.get_mut(&row) else { return };
        match order {
            Order::Window(near) => {
                row.window.insert(near, key);
            }
            Order::Pinned(stamp) => {
                row.pinned.insert(stamp, key);
            }
            Order::Policy if !self.links.contains(key) => self.links.push_warm(&mut row.queue, key),
            Order::Policy => {}
        }
    }

    /// Lists a block that waits and may not leave.
    pub(super) fn want(&mut self, row: TenantId, near: u32, key: BlockKey) {
        if let Some(row) = self.rows.get_mut(&row) {
            self.wanted += usize::from(row.wanted.insert(near, key).is_none());
        }
    }

    /// Whether a waiting request needs a block that may not leave.
    pub(super) fn has_wanted(&self) -> bool {
        self.wanted > 0
    }

    pub(super) fn remove(&mut self, row: TenantId, order: Order, key: BlockKey) {
        let Some(row) = self.rows.get_mut(&row) else { return };
        match order {
            Order::Window(near) => {
                row.window.remove(&near);
                self.wanted -= usize::from(row.wanted.remove(&near).is_some());
            }
            Order::Pinned(stamp) => {
                row.pinned.remove(&stamp);
            }
            Order::Policy if self.links.contains(key) => self.links.unlink(&mut row.queue, key),
            Order::Policy => {}
        }
    }

    /// Takes every block of waiting requests off; they are listed again at other places.
    pub(super) fn clear_windows(&mut self) {
        for row in self.rows.values_mut() {
            row.window.clear();
            row.wanted.clear();
        }
        self.wanted = 0;
    }

    pub(super) fn used(&self, row: TenantId) -> u64 {
        self.rows.get(&row).map_or(0, |row| row.used)
    }

    /// Whether `taker` may have room of `giver`: of itself, and of who has more.
    pub(super) fn may_take(&self, taker: TenantId, giver: TenantId) -> bool {
        taker == giver || self.used(giver) > self.used(taker)
    }

    /// Who gives way to `taker`, the row of the claim: whoever has most of those that have something to give, and the
    /// taker itself among equals. Nothing when that would be somebody who has no more than the taker.
    pub(super) fn giver(&self, taker: TenantId, claim: Claim) -> Option<TenantId> {
        let giving = self.rows.iter().filter(|(tenant, row)| row.gives(yields_to(**tenant, taker, claim)));
        let (&giver, _) = giving.max_by_key(|(tenant, row)| (row.used, **tenant == taker))?;
        self.may_take(taker, giver).then_some(giver)
    }

    /// The block of `giver` that leaves when the policy has no say.
    pub(super) fn coldest(&self, giver: TenantId, taker: TenantId, claim: Claim) -> Option<BlockKey> {
        let row = self.rows.get(&giver)?;
        row.queue.coldest().or_else(|| row.last_resort(yields_to(giver, taker, claim)))
    }

    /// What leaves of the only tenant there is, when the policy has nothing to name.
    pub(super) fn last_resort(&self, taker: TenantId, claim: Claim) -> Option<BlockKey> {
        let (giver, row) = self.rows.first_key_value()?;
        row.last_resort(yields_to(*giver, taker, claim))
    }

    /// The tenant's block of a waiting request that is furthest from the head of the queue.
    pub(super) fn furthest(&self, row: TenantId, yields_to: u32) -> Option<BlockKey> {
        self.rows.get(&row)?.furthest(yields_to)
    }

    /// Each tenant's block of a waiting request that is nearest the head of the queue, the nearest first.
    pub(super) fn nearest(&self) -> Vec<(u32, BlockKey)> {
        let first = |row: &Row| {
            let firsts = [row.window.first_key_value(), row.wanted.first_key_value()];
            firsts.into_iter().flatten().map(|(near, key)| (*near, *key)).min()
        };
        let mut nearest: Vec<(u32, BlockKey)> = self.rows.values().filter_map(first).collect();
        nearest.sort_unstable();
        nearest
    }

    /// Blocks listed in a row, for tests: in the policy's order, pinned softly, waited for, and of those pinned.
    #[cfg(test)]
    pub(super) fn listed(&self, row: TenantId) -> [usize; 4] {
        let of = |row: &Row| [row.queue.len(), row.pinned.len(), row.window.len(), row.wanted.len()];
        self.rows.get(&row).map(of).unwrap_or_default()
    }

    /// Every row with what is charged to it.
    #[cfg(test)]
    pub(super) fn rows(&self) -> impl Iterator<Item = (TenantId, u64)> {
        self.rows.iter().map(|(tenant, row)| (*tenant, row.used))
    }
}

/// The first place among the blocks of the giver's waiting requests that gives way.
fn yields_to(giver: TenantId, taker: TenantId, claim: Claim) -> u32 {
    if giver == taker { claim.yields_to } else { claim.others_yield_to }
}
