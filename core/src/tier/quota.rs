//! Per-tenant quotas: lists a limited tenant's evictable blocks, coldest first, and enforces the
//! quota.
//!
//! Only tenants with a quota are listed, so enforcement costs a step per dropped block, and other
//! tenants' blocks cost none. Coldest means longest unused here, whatever the tier's policy
//! prefers. Not here: the source of the quotas (a directive or the configuration).

use std::collections::BTreeMap;

use super::book::Book;
use super::counters::RemovalReason;
use crate::evict::BlockKey;
use crate::id::{TenantId, Tier};
use crate::index::command::DropCause;

/// Evictable blocks of one tenant, by the stamp of their last use.
#[derive(Debug, Default)]
struct TenantBlocks {
    dram: BTreeMap<u64, BlockKey>,
    ssd: BTreeMap<u64, BlockKey>,
    gpu: BTreeMap<u64, BlockKey>,
    /// Pinned softly.
    pinned_dram: BTreeMap<u64, BlockKey>,
    pinned_ssd: BTreeMap<u64, BlockKey>,
    pinned_gpu: BTreeMap<u64, BlockKey>,
}

/// A tier, and whether it selects the softly pinned blocks.
pub(super) type VictimClass = (Tier, bool);

/// Eviction order: the slower tier first, and pinned blocks after all others.
const VICTIM_CLASSES: [VictimClass; 6] = [
    (Tier::Ssd, false),
    (Tier::Dram, false),
    (Tier::Gpu, false),
    (Tier::Ssd, true),
    (Tier::Dram, true),
    (Tier::Gpu, true),
];

impl TenantBlocks {
    fn blocks_mut(&mut self, kind: VictimClass) -> &mut BTreeMap<u64, BlockKey> {
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

/// Blocks dropped for a quota in one call: less than a millisecond of the task that owns the book.
/// The rest above a lowered quota follows in later calls, one every 20 ms.
pub const QUOTA_DROPS_MAX: usize = 1024;

/// Lists of all tenants with a quota.
#[derive(Debug, Default)]
pub(super) struct QuotaIndex(BTreeMap<TenantId, TenantBlocks>);

impl QuotaIndex {
    /// Lists a block, if its tenant has a quota.
    pub(super) fn insert(&mut self, tenant: TenantId, kind: VictimClass, stamp: u64, key: BlockKey) {
        if let Some(row) = self.0.get_mut(&tenant) {
            row.blocks_mut(kind).insert(stamp, key);
        }
    }

    /// All listed blocks: tenant, class, stamp and key.
    #[cfg(test)]
    pub(super) fn listed(&self) -> Vec<(TenantId, VictimClass, u64, BlockKey)> {
        let mut listed = Vec::new();
        for (tenant, TenantBlocks { dram, ssd, gpu, pinned_dram, pinned_ssd, pinned_gpu }) in &self.0 {
            for (kind, row) in
                VICTIM_CLASSES.into_iter().zip([ssd, dram, gpu, pinned_ssd, pinned_dram, pinned_gpu])
            {
                listed.extend(row.iter().map(|(stamp, key)| (*tenant, kind, *stamp, *key)));
            }
        }
        listed
    }

    /// Whether the tenant has a quota.
    pub(super) fn has(&self, tenant: TenantId) -> bool {
        self.0.contains_key(&tenant)
    }

    pub(super) fn remove(&mut self, tenant: TenantId, kind: VictimClass, stamp: u64) {
        if let Some(row) = self.0.get_mut(&tenant) {
            row.blocks_mut(kind).remove(&stamp);
        }
    }
}

impl Book {
    /// Replaces the quotas, in bytes per tenant, and drops excess unheld blocks. Excess held blocks
    /// are dropped when their request ends.
    pub fn set_quotas(&mut self, quotas: impl IntoIterator<Item = (TenantId, u64)>) {
        self.quotas = quotas.into_iter().collect();
        let quotas = &self.quotas;
        self.quota_index.0.retain(|tenant, _| quotas.contains_key(tenant));
        let fresh: Vec<TenantId> =
            quotas.keys().copied().filter(|tenant| !self.quota_index.0.contains_key(tenant)).collect();
        if !fresh.is_empty() {
            self.quota_index.0.extend(fresh.iter().map(|tenant| (*tenant, TenantBlocks::default())));
            self.relist();
        }
        self.review_quotas();
        self.enforce_quotas();
    }

    /// Continues dropping unheld blocks above a quota, up to [`QUOTA_DROPS_MAX`]. Returns the
    /// number of blocks dropped.
    pub fn enforce_quotas(&mut self) -> usize {
        let mut dropped = 0;
        // A block that is about to be marked as pinned may not be dropped.
        if self.pins.has_pending_begins() {
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

    /// Recomputes the set of tenants above their quota, after new blocks were listed.
    pub(super) fn review_quotas(&mut self) {
        let over = self.quotas.keys().copied().filter(|tenant| self.is_over_quota(*tenant));
        self.over_quota = over.collect();
    }

    /// Drops the tenant's unheld blocks above its quota.
    pub(super) fn enforce_quota(&mut self, tenant: TenantId) {
        if self.pins.has_pending_begins() {
            self.over_quota.insert(tenant);
        } else if let Some(&quota) = self.quotas.get(&tenant)
            && self.shrink(tenant, quota, 0, QUOTA_DROPS_MAX) >= QUOTA_DROPS_MAX
        {
            self.over_quota.insert(tenant);
        }
    }

    /// Brings a tenant within `quota` with `coming` more bytes, by dropping its own coldest blocks,
    /// slow tiers first. Returns `false` if too much is held, if it takes more than one call, or
    /// while new pins are being applied.
    pub(super) fn shrink_tenant(&mut self, tenant: TenantId, quota: u64, coming: u64) -> bool {
        if coming > quota {
            return false;
        }
        self.sweep_invalidated(|book| book.tenant_bytes(tenant).saturating_add(coming) <= quota);
        if !self.pins.has_pending_begins() {
            self.shrink(tenant, quota, coming, QUOTA_DROPS_MAX);
        }
        self.tenant_bytes(tenant).saturating_add(coming) <= quota
    }

    /// Drops at most `most` blocks of the tenant so that `coming` more bytes fit into the quota.
    /// Returns the number of blocks dropped.
    fn shrink(&mut self, tenant: TenantId, quota: u64, coming: u64, most: usize) -> usize {
        let mut dropped = 0;
        for kind @ (tier, _) in VICTIM_CLASSES {
            while dropped < most && self.tenant_bytes(tenant).saturating_add(coming) > quota {
                let row = self.quota_index.0.get_mut(&tenant);
                let Some(victim) = row.and_then(|row| row.blocks_mut(kind).values().next().copied()) else {
                    break;
                };
                self.tier_state_mut(tier).stats.dropped_blocks += 1;
                self.count_removal(victim, RemovalReason::Quota);
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
