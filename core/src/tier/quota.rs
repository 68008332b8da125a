//! A tenant's own limit: its unheld blocks from the coldest on, and what a quota makes of them.
//!
//! Only tenants with a quota are listed, so that being at the limit costs a step per block that leaves
//! and nothing per block of anybody else. Coldest means longest unused here, whatever the tier's policy
//! prefers. Not here: which tenant has which quota (a directive or the configuration).

use std::collections::BTreeMap;

use super::book::Book;
use super::numbers::Left;
use crate::evict::BlockKey;
use crate::id::{TenantId, Tier};
use crate::index::command::DropCause;

/// Unheld blocks of one tenant, by the stamp of their last use.
#[derive(Debug, Default)]
struct Row {
    dram: BTreeMap<u64, BlockKey>,
    ssd: BTreeMap<u64, BlockKey>,
    gpu: BTreeMap<u64, BlockKey>,
    /// Pinned softly.
    pinned_dram: BTreeMap<u64, BlockKey>,
    pinned_ssd: BTreeMap<u64, BlockKey>,
    pinned_gpu: BTreeMap<u64, BlockKey>,
}

/// A tier, and whether blocks that are pinned softly are meant.
pub(super) type Kind = (Tier, bool);

/// What gives way first: the slower tier, and pinned blocks after all others.
const KINDS: [Kind; 6] = [
    (Tier::Ssd, false),
    (Tier::Dram, false),
    (Tier::Gpu, false),
    (Tier::Ssd, true),
    (Tier::Dram, true),
    (Tier::Gpu, true),
];

impl Row {
    fn of(&mut self, kind: Kind) -> &mut BTreeMap<u64, BlockKey> {
        match kind {
            (Tier::Ssd, false) => &mut self.ssd,
            (Tier::Ssd, true) => &mut self.pinned_ssd,
            (Tier::Dram, false) => &mut self.dram,
            (Tier::Dram, true) => &mut self.pinned_dram,
            (Tier::Gpu, false) => &mut self.gpu,
            (Tier::Gpu, true) => &mut self.pinned_gpu,
        }
    }
}

/// Blocks that one call drops for a quota: less than a millisecond of the task that owns the book. What is left above a
/// quota that was lowered goes in the calls that follow, one every 20 ms.
pub const QUOTA_DROPS_MAX: usize = 1024;

/// The rows of all tenants with a quota.
#[derive(Debug, Default)]
pub(super) struct QuotaRows(BTreeMap<TenantId, Row>);

impl QuotaRows {
    /// Lists a block, if its tenant has a quota.
    pub(super) fn insert(&mut self, tenant: TenantId, kind: Kind, stamp: u64, key: BlockKey) {
        if let Some(row) = self.0.get_mut(&tenant) {
            row.of(kind).insert(stamp, key);
        }
    }

    /// What is listed: whose, in which order, since when, and which block.
    #[cfg(test)]
    pub(super) fn listed(&self) -> Vec<(TenantId, Kind, u64, BlockKey)> {
        let mut listed = Vec::new();
        for (tenant, Row { dram, ssd, gpu, pinned_dram, pinned_ssd, pinned_gpu }) in &self.0 {
            for (kind, row) in KINDS.into_iter().zip([ssd, dram, gpu, pinned_ssd, pinned_dram, pinned_gpu]) {
                listed.extend(row.iter().map(|(stamp, key)| (*tenant, kind, *stamp, *key)));
            }
        }
        listed
    }

    /// Whether the tenant has a quota.
    pub(super) fn has(&self, tenant: TenantId) -> bool {
        self.0.contains_key(&tenant)
    }

    pub(super) fn remove(&mut self, tenant: TenantId, kind: Kind, stamp: u64) {
        if let Some(row) = self.0.get_mut(&tenant) {
            row.of(kind).remove(&stamp);
        }
    }
}

impl Book {
    /// Replaces the quotas, in bytes per tenant, and drops what is over and not held. What is held is
    /// dropped when its request ends.
    pub fn set_quotas(&mut self, quotas: impl IntoIterator<Item = (TenantId, u64)>) {
        self.quotas = quotas.into_iter().collect();
        let quotas = &self.quotas;
        self.quota_rows.0.retain(|tenant, _| quotas.contains_key(tenant));
        let fresh: Vec<TenantId> =
            quotas.keys().copied().filter(|tenant| !self.quota_rows.0.contains_key(tenant)).collect();
        if !fresh.is_empty() {
            self.quota_rows.0.extend(fresh.iter().map(|tenant| (*tenant, Row::default())));
            self.relist();
        }
        self.review_quotas();
        self.enforce_quotas();
    }

    /// Goes on with dropping what is above a quota and not held, [`QUOTA_DROPS_MAX`] blocks of it. Returns how many.
    pub fn enforce_quotas(&mut self) -> usize {
        let mut dropped = 0;
        // What is yet to be marked as pinned may not go.
        if self.pins.is_beginning() {
            return 0;
        }
        while let Some(tenant) = self.over_quota.pop_first() {
            let quota = self.quotas.get(&tenant).copied().unwrap_or(u64::MAX);
            dropped += self.shrink(tenant, quota, 0, QUOTA_DROPS_MAX - dropped);
            if dropped >= QUOTA_DROPS_MAX {
                self.over_quota.insert(tenant);
                break;
            }
        }
        dropped
    }

    pub(super) fn is_over_quota(&self, tenant: TenantId) -> bool {
        self.quotas.get(&tenant).is_some_and(|quota| self.tenant_bytes(tenant) > *quota)
    }

    /// Looks at all tenants again: blocks were listed that were not before.
    pub(super) fn review_quotas(&mut self) {
        let over = self.quotas.keys().copied().filter(|tenant| self.is_over_quota(*tenant));
        self.over_quota = over.collect();
    }

    /// Drops what the tenant holds above its quota and nobody uses.
    pub(super) fn enforce_quota(&mut self, tenant: TenantId) {
        if self.pins.is_beginning() {
            self.over_quota.insert(tenant);
        } else if let Some(&quota) = self.quotas.get(&tenant)
            && self.shrink(tenant, quota, 0, QUOTA_DROPS_MAX) >= QUOTA_DROPS_MAX
        {
            self.over_quota.insert(tenant);
        }
    }

    /// Brings a tenant to `quota` with `coming` bytes more, by dropping its own coldest blocks, slow tiers first.
    /// `false` when too much of it is held, so much is to go that it takes more than one call, or blocks are yet to be
    /// marked as pinned.
    pub(super) fn shrink_tenant(&mut self, tenant: TenantId, quota: u64, coming: u64) -> bool {
        if coming > quota {
            return false;
        }
        self.sweep_void(|book| book.tenant_bytes(tenant).saturating_add(coming) <= quota);
        if !self.pins.is_beginning() {
            self.shrink(tenant, quota, coming, QUOTA_DROPS_MAX);
        }
        self.tenant_bytes(tenant).saturating_add(coming) <= quota
    }

    /// Drops at most `most` blocks of the tenant so that `coming` bytes more are within the quota. Returns how many.
    fn shrink(&mut self, tenant: TenantId, quota: u64, coming: u64, most: usize) -> usize {
        let mut dropped = 0;
        for kind @ (tier, _) in KINDS {
            while dropped < most && self.tenant_bytes(tenant).saturating_add(coming) > quota {
                let row = self.quota_rows.0.get_mut(&tenant);
                let Some(victim) = row.and_then(|row| row.of(kind).values().next().copied()) else { break };
                self.shelf_mut(tier).stats.dropped_blocks += 1;
                self.count_left(victim, Left::Quota);
                self.drop_block(victim, DropCause::Quota);
                dropped += 1;
            }
        }
        dropped
    }

    fn tenant_bytes(&self, tenant: TenantId) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }
}
