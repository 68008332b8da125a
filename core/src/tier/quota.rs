//! Enforces per-tenant quotas: drops a tenant's evictable blocks, coldest first.
//!
//! Enforcement costs a step per dropped block. Not here: the lists of those blocks (`tenants.rs`),
//! and the source of the quotas (a directive or the configuration).

use super::book::Book;
use super::counters::RemovalReason;
use super::tenants::VICTIM_CLASSES;
use crate::id::TenantId;
use crate::index::command::DropCause;

/// Blocks dropped for a quota in one call: less than a millisecond of the task that owns the book.
/// The rest above a lowered quota follows in later calls, one every 20 ms.
pub const QUOTA_DROPS_MAX: usize = 1024;

impl Book {
    /// Replaces the quotas, in bytes per tenant, and drops excess unheld blocks. Excess held blocks
    /// are dropped when their request ends.
    pub fn set_quotas(&mut self, quotas: impl IntoIterator<Item = (TenantId, u64)>) {
        if self.tenants.set_quotas(quotas) {
            self.relist();
        }
        self.tenants.review();
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
        while let Some(tenant) = self.tenants.pop_over() {
            let quota = self.tenants.quota(tenant).unwrap_or(u64::MAX);
            dropped += self.shrink(tenant, quota, 0, QUOTA_DROPS_MAX - dropped);
            if dropped >= QUOTA_DROPS_MAX {
                self.tenants.mark_over(tenant);
                break;
            }
        }
        dropped
    }

    /// Drops the tenant's unheld blocks above its quota.
    pub(super) fn enforce_quota(&mut self, tenant: TenantId) {
        if self.pins.has_pending_begins() {
            self.tenants.mark_over(tenant);
        } else if let Some(quota) = self.tenants.quota(tenant)
            && self.shrink(tenant, quota, 0, QUOTA_DROPS_MAX) >= QUOTA_DROPS_MAX
        {
            self.tenants.mark_over(tenant);
        }
    }

    /// Brings a tenant within `quota` with `coming` more bytes, by dropping its own coldest blocks,
    /// slow tiers first. Returns `false` if too much is held, if it takes more than one call, or
    /// while new pins are being applied.
    pub(super) fn shrink_tenant(&mut self, tenant: TenantId, quota: u64, coming: u64) -> bool {
        if coming > quota {
            return false;
        }
        self.sweep_invalidated(|book| book.tenants.used(tenant).saturating_add(coming) <= quota);
        if !self.pins.has_pending_begins() {
            self.shrink(tenant, quota, coming, QUOTA_DROPS_MAX);
        }
        self.tenants.used(tenant).saturating_add(coming) <= quota
    }

    /// Drops at most `most` blocks of the tenant so that `coming` more bytes fit into the quota.
    /// Returns the number of blocks dropped.
    fn shrink(&mut self, tenant: TenantId, quota: u64, coming: u64, most: usize) -> usize {
        let mut dropped = 0;
        for kind @ (tier, _) in VICTIM_CLASSES {
            while dropped < most && self.tenants.used(tenant).saturating_add(coming) > quota {
                let Some(victim) = self.tenants.coldest(tenant, kind) else { break };
                self.tier_state_mut(tier).stats.dropped_blocks += 1;
                self.count_removal(victim, RemovalReason::Quota);
                self.drop_block(victim, DropCause::Quota);
                dropped += 1;
            }
        }
        dropped
    }
}
