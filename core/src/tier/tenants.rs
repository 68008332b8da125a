//! Bytes, quotas and evictable blocks of each tenant.
//!
//! Only tenants with a quota have their blocks listed, so other tenants' blocks cost no step.
//! Coldest means longest unused here, whatever the tier's policy prefers. Not here: what is dropped
//! for a quota (`quota.rs`), and shares under pressure (`share.rs`).

use std::collections::{BTreeMap, BTreeSet};

use crate::evict::BlockKey;
use crate::id::{TenantId, Tier};

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
pub(super) const VICTIM_CLASSES: [VictimClass; 6] = [
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

/// Accounts of all tenants.
#[derive(Debug, Default)]
pub(super) struct TenantQuotas {
    /// Bytes of each tenant with any.
    used: BTreeMap<TenantId, u64>,
    quotas: BTreeMap<TenantId, u64>,
    /// Evictable blocks of each tenant with a quota.
    listed: BTreeMap<TenantId, TenantBlocks>,
    /// Tenants above their quota with more to drop than one call drops.
    over_quota: BTreeSet<TenantId>,
}

impl TenantQuotas {
    pub(super) fn charge(&mut self, tenant: TenantId, bytes: u32) {
        *self.used.entry(tenant).or_default() += u64::from(bytes);
    }

    pub(super) fn discharge(&mut self, tenant: TenantId, bytes: u32) {
        if let Some(used) = self.used.get_mut(&tenant) {
            *used -= u64::from(bytes);
            if *used == 0 {
                self.used.remove(&tenant);
            }
        }
    }

    /// Bytes of the tenant.
    pub(super) fn used(&self, tenant: TenantId) -> u64 {
        self.used.get(&tenant).copied().unwrap_or(0)
    }

    pub(super) fn quota(&self, tenant: TenantId) -> Option<u64> {
        self.quotas.get(&tenant).copied()
    }

    /// Bytes per tenant, with the quota if it has one.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TenantId, u64, Option<u64>)> {
        self.used.iter().map(|(&tenant, &bytes)| (tenant, bytes, self.quota(tenant)))
    }

    /// Replaces the quotas. Returns whether a tenant is newly limited, so that its blocks must be
    /// listed.
    pub(super) fn set_quotas(&mut self, quotas: impl IntoIterator<Item = (TenantId, u64)>) -> bool {
        self.quotas = quotas.into_iter().collect();
        let quotas = &self.quotas;
        self.listed.retain(|tenant, _| quotas.contains_key(tenant));
        let limited_before = self.listed.len();
        for tenant in quotas.keys() {
            self.listed.entry(*tenant).or_default();
        }
        self.listed.len() > limited_before
    }

    /// Whether the tenant has more bytes than its quota.
    pub(super) fn is_over(&self, tenant: TenantId) -> bool {
        self.quota(tenant).is_some_and(|quota| self.used(tenant) > quota)
    }

    /// Recomputes the set of tenants above their quota, after new blocks were listed.
    pub(super) fn review(&mut self) {
        let over = self.quotas.keys().copied().filter(|tenant| self.is_over(*tenant));
        self.over_quota = over.collect();
    }

    /// Remembers that the tenant has blocks to drop.
    pub(super) fn mark_over(&mut self, tenant: TenantId) {
        self.over_quota.insert(tenant);
    }

    /// Takes the first tenant that has blocks to drop.
    pub(super) fn pop_over(&mut self) -> Option<TenantId> {
        self.over_quota.pop_first()
    }

    /// Lists a block, if its tenant has a quota.
    pub(super) fn list(&mut self, tenant: TenantId, kind: VictimClass, stamp: u64, key: BlockKey) {
        if let Some(row) = self.listed.get_mut(&tenant) {
            row.blocks_mut(kind).insert(stamp, key);
        }
    }

    pub(super) fn unlist(&mut self, tenant: TenantId, kind: VictimClass, stamp: u64) {
        if let Some(row) = self.listed.get_mut(&tenant) {
            row.blocks_mut(kind).remove(&stamp);
        }
    }

    /// Whether the tenant has a quota.
    pub(super) fn is_limited(&self, tenant: TenantId) -> bool {
        self.listed.contains_key(&tenant)
    }

    /// The longest unused evictable block of a limited tenant in a class.
    pub(super) fn coldest(&mut self, tenant: TenantId, kind: VictimClass) -> Option<BlockKey> {
        let row = self.listed.get_mut(&tenant)?;
        row.blocks_mut(kind).values().next().copied()
    }

    /// All listed blocks: tenant, class, stamp and key.
    #[cfg(test)]
    pub(super) fn listed(&self) -> Vec<(TenantId, VictimClass, u64, BlockKey)> {
        let mut listed = Vec::new();
        for (tenant, TenantBlocks { dram, ssd, gpu, pinned_dram, pinned_ssd, pinned_gpu }) in &self.listed {
            for (kind, row) in
                VICTIM_CLASSES.into_iter().zip([ssd, dram, gpu, pinned_ssd, pinned_dram, pinned_gpu])
            {
                listed.extend(row.iter().map(|(stamp, key)| (*tenant, kind, *stamp, *key)));
            }
        }
        listed
    }
}
