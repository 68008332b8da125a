//! Fetch: leases a leading run of blocks and starts the loads it needs.

use super::book::Book;
use super::{LeasesFull, Requester};
use crate::evict::BlockKey;
use crate::id::{BlockHash, TenantId, Tier, Timestamp};

/// One block that a fetch leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchHit {
    /// Its key, valid while the lease holds it.
    pub key: BlockKey,
    /// Tier of its bytes now. Bytes on SSD or a GPU are loaded first; [`Book::on_moved`] to DRAM
    /// completes the load.
    pub tier: Tier,
    /// Whether this is the lease's first request for the block, and the lease did not save it. Only
    /// then it counts as a use: a repeated request by layer, ahead of time or after `Busy` is the
    /// same use.
    pub is_first_use: bool,
}

/// Leased blocks of a fetch: the leading blocks up to the first that its tenant does not hold.
pub type FetchHits = Vec<FetchHit>;

impl Book {
    /// Leases the readable leading blocks and starts loading those that are not in DRAM.
    ///
    /// # Errors
    /// [`LeasesFull`] when the lease is new and the limit is reached.
    pub fn fetch(
        &mut self,
        asker: Requester,
        hashes: &[BlockHash],
        now: Timestamp,
    ) -> Result<FetchHits, LeasesFull> {
        let found = self.readable_prefix(asker.tenant, hashes);
        self.fetch_found(asker, &found, now)
    }

    /// The tenant's readable leading blocks. Read-only. Pass the result to [`Self::fetch_found`]
    /// before any other change.
    #[must_use]
    pub fn readable_prefix(&self, tenant: TenantId, hashes: &[BlockHash]) -> Vec<BlockKey> {
        hashes.iter().map_while(|hash| self.readable(tenant, hash)).collect()
    }

    /// [`Self::fetch`] of blocks that were just found for the same tenant.
    ///
    /// # Errors
    /// [`LeasesFull`] when the lease is new and the limit is reached.
    pub fn fetch_found(
        &mut self,
        asker: Requester,
        found: &[BlockKey],
        now: Timestamp,
    ) -> Result<FetchHits, LeasesFull> {
        if found.is_empty() {
            return Ok(Vec::new());
        }
        self.leases.open(asker, now)?;
        // Hold all before any promotion: loading the first could evict the last.
        let are_new = self.hold_all(asker.lease, found);
        Ok(found.iter().zip(are_new).map(|(&key, is_new)| self.start_load(key, is_new, now)).collect())
    }

    /// Bytes that a fetch of these blocks would have to load first. Read-only.
    #[must_use]
    pub fn bytes_to_load(&self, found: &[BlockKey]) -> u64 {
        let entries = found.iter().filter_map(|&key| self.slab.get(key));
        entries.filter(|entry| !entry.copies.dram).map(|entry| u64::from(entry.meta.charge.frame)).sum()
    }

    fn start_load(&mut self, key: BlockKey, is_new: bool, now: Timestamp) -> FetchHit {
        if is_new {
            self.count_hit(key, now);
        }
        if self.slab.get(key).is_some_and(|entry| entry.assigned_tier == Some(Tier::Ssd))
            && self.may_promote(key)
        {
            self.promote(key, now);
        }
        let Some(entry) = self.slab.get_mut(key) else {
            return FetchHit { key, tier: Tier::Ssd, is_first_use: is_new };
        };
        if entry.copies.dram {
            return FetchHit { key, tier: Tier::Dram, is_first_use: is_new };
        }
        entry.awaited = true;
        let tier = entry.copies.fastest();
        // The block queues behind all awaited loads, and is now awaited itself.
        self.end_prefetch(key);
        self.reconcile(key);
        FetchHit { key, tier, is_first_use: is_new }
    }

    /// Whether a block on SSD may take space in DRAM. A promotion may evict blocks that a slow SSD
    /// does not accept; such a block is loaded past DRAM instead. Its load may be refused, and the
    /// victims would be lost in vain.
    pub(super) fn may_promote(&self, key: BlockKey) -> bool {
        let Some(entry) = self.slab.get(key) else { return false };
        let (cost, _) = self.cost(entry, Tier::Dram);
        !self.is_open(Tier::Ssd)
            || self.ssd_accepts()
            || self.tiers.dram.limits.goal(self.tiers.dram.used, cost).is_none()
    }

    fn count_hit(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get(key) else { return };
        let tier = if entry.copies.dram { Tier::Dram } else { entry.copies.fastest() };
        let (category, gap_us) = (entry.meta.traits.category, entry.age_us(now));
        self.tier_state_mut(tier).numbers.record_hit(category, gap_us);
    }

    /// A block of another tenant counts as absent: knowing its hash gives no right to its bytes.
    pub(super) fn readable(&self, tenant: TenantId, hash: &BlockHash) -> Option<BlockKey> {
        let key = self.slab.find(hash)?;
        self.slab.get(key).is_some_and(|entry| !entry.writing && entry.meta.tenant == tenant).then_some(key)
    }

    /// Tenant of the block with this hash, readable or still being written.
    pub(super) fn owner_tenant(&self, hash: &BlockHash) -> Option<TenantId> {
        self.slab.find(hash).and_then(|key| self.slab.get(key)).map(|entry| entry.meta.tenant)
    }
}
