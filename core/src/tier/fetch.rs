//! A reader asks for consecutive blocks: which it gets, from where, and what must be loaded first.

use super::book::Book;
use super::{Asker, LeasesFull};
use crate::evict::BlockKey;
use crate::id::{BlockHash, TenantId, Tier, Timestamp};

/// One block that a fetch reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Its key, valid while the lease holds it.
    pub key: BlockKey,
    /// Where its bytes are now. From SSD or a GPU they are loaded first; completion is [`Book::on_moved`] to DRAM.
    pub tier: Tier,
    /// The lease asks for it for the first time, and did not bring it itself: it is a use of the block. What one request asks for
    /// again, because it reads layer by layer, ahead of its turn or after a node was busy, is the same use.
    pub is_new: bool,
}

/// What a fetch reaches: the leading blocks up to the first one that is not held for its tenant.
pub type Reached = Vec<Reach>;

impl Book {
    /// Leases the leading blocks that are readable and starts loading those that are not in DRAM.
    ///
    /// # Errors
    /// [`LeasesFull`] when the lease is new and the limit is reached.
    pub fn fetch(
        &mut self,
        asker: Asker,
        hashes: &[BlockHash],
        now: Timestamp,
    ) -> Result<Reached, LeasesFull> {
        let found = self.readable_prefix(asker.tenant, hashes);
        self.fetch_found(asker, &found, now)
    }

    /// The tenant's leading blocks that are readable, for [`Self::fetch_found`] before anything else happens. Changes
    /// nothing.
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
        asker: Asker,
        found: &[BlockKey],
        now: Timestamp,
    ) -> Result<Reached, LeasesFull> {
        if found.is_empty() {
            return Ok(Vec::new());
        }
        self.open_lease(asker, now)?;
        // Hold all before any promotion, or loading the first could push out the last.
        let are_new = self.hold_all(asker.lease, found);
        Ok(found.iter().zip(are_new).map(|(&key, is_new)| self.reach(key, is_new, now)).collect())
    }

    /// Bytes of found blocks that a fetch would have to load first. Changes nothing.
    #[must_use]
    pub fn bytes_to_load(&self, found: &[BlockKey]) -> u64 {
        let entries = found.iter().filter_map(|&key| self.slab.get(key));
        entries.filter(|entry| !entry.copies.dram).map(|entry| u64::from(entry.meta.charge.frame)).sum()
    }

    fn reach(&mut self, key: BlockKey, is_new: bool, now: Timestamp) -> Reach {
        if is_new {
            self.count_hit(key, now);
        }
        if self.slab.get(key).is_some_and(|entry| entry.place == Some(Tier::Ssd)) && self.may_come_up(key) {
            self.promote(key, now);
        }
        let Some(entry) = self.slab.get_mut(key) else { return Reach { key, tier: Tier::Ssd, is_new } };
        if entry.copies.dram {
            return Reach { key, tier: Tier::Dram, is_new };
        }
        entry.awaited = true;
        let tier = entry.copies.fastest();
        // It stands behind all that somebody waits for, and now somebody does.
        self.end_prefetch(key);
        self.settle(key);
        Reach { key, tier, is_new }
    }

    /// Whether a block on SSD may take room in DRAM. Where that makes others leave that a slow SSD does not take, it is
    /// read past DRAM instead: its load may be refused, and they would be lost for nothing.
    pub(super) fn may_come_up(&self, key: BlockKey) -> bool {
        let Some(entry) = self.slab.get(key) else { return false };
        let (cost, _) = self.cost(entry, Tier::Dram);
        !self.open(Tier::Ssd) || self.ssd_takes() || self.dram.limits.goal(self.dram.used, cost).is_none()
    }

    fn count_hit(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get(key) else { return };
        let tier = if entry.copies.dram { Tier::Dram } else { entry.copies.fastest() };
        let (category, gap_us) = (entry.meta.traits.category, entry.age_us(now));
        self.shelf_mut(tier).numbers.hit(category, gap_us);
    }

    /// Another tenant's block is as good as not there: who knows its hash has no right to its bytes.
    pub(super) fn readable(&self, tenant: TenantId, hash: &BlockHash) -> Option<BlockKey> {
        let key = self.slab.find(hash)?;
        self.slab.get(key).is_some_and(|entry| !entry.writing && entry.meta.tenant == tenant).then_some(key)
    }

    /// Whose block has this hash, readable or still being written.
    pub(super) fn owner(&self, hash: &BlockHash) -> Option<TenantId> {
        self.slab.find(hash).and_then(|key| self.slab.get(key)).map(|entry| entry.meta.tenant)
    }
}
