//! The book: its state, its accounts and its read-only queries.
//!
//! Operations are in the files beside it: `fetch`, `save`, `lease`, `pressure` (eviction) and
//! `moves` (actions and their results).

use std::time::Duration;

use super::changes::{self, ChangeLog, ReadableBlock};
use super::counters::{RemovalReason, TierCounters};
use super::curve::MissCurve;
use super::entry::{Entry, Meta, PinnedBlocks, Slab};
use super::gpu::NoPolicy;
use super::gpu_residency::GpuResidency;
use super::lease_table::LeaseTable;
use super::order::PolicyEvent;
use super::pins::Pins;
use super::queues::ActionQueues;
use super::scans::SlabScans;
use super::ssd_writes::SsdWriteLimits;
use super::tenants::TenantQuotas;
use super::tiers::{TierState, TierStats, Tiers};
use super::ttl::TtlIndex;
use super::watermark::{Capacity, TierLimits};
use super::window::QueueWindow;
use crate::evict::reuse_stats::ReuseStats;
use crate::evict::{BlockKey, Policy};
use crate::id::{BlockHash, TenantId, Tier, Timestamp};
use crate::index::command::Change;

/// Limits of a book.
#[derive(Clone, Debug)]
pub struct BookLimits {
    /// Capacity and watermarks of DRAM.
    pub dram: TierLimits,
    /// Capacity and watermarks of SSD.
    pub ssd: TierLimits,
    /// Time after which an unreleased lease expires.
    pub lease: Duration,
    /// Maximum number of leases held at once. Above it callers receive `Busy`; one caller receives
    /// it as soon as it holds as many as remain free.
    pub leases_max: usize,
    /// Seed of the hash tables, so that no caller can aim at one bucket.
    pub seed: u64,
}

/// A block found on the SSD at start.
pub type RecoveredBlock = Meta;

/// The tier of every block on this node.
pub struct Book {
    pub(super) slab: Slab,
    pub(super) tiers: Tiers,
    pub(super) gpu_residency: GpuResidency,
    pub(super) leases: LeaseTable,
    pub(super) tenants: TenantQuotas,
    pub(super) scans: SlabScans,
    pub(super) pins: Pins,
    pub(super) changes: ChangeLog,
    pub(super) actions: ActionQueues,
    pub(super) window: QueueWindow,
    pub(super) ssd_writes: SsdWriteLimits,
    pub(super) ttls: TtlIndex,
    pub(super) curve: MissCurve,
}

impl Book {
    /// An empty book with one policy instance per tier.
    #[must_use]
    pub fn new(limits: &BookLimits, dram: Box<dyn Policy>, ssd: Box<dyn Policy>) -> Book {
        Book {
            slab: Slab::new(limits.seed),
            tiers: Tiers {
                dram: TierState::new(limits.dram, dram),
                ssd: TierState::new(limits.ssd, ssd),
                gpu: TierState::new(TierLimits::exact(Capacity::Bytes(0)), Box::new(NoPolicy)),
            },
            gpu_residency: GpuResidency::default(),
            leases: LeaseTable::new(limits.lease, limits.leases_max),
            tenants: TenantQuotas::default(),
            scans: SlabScans::default(),
            pins: Pins::new(limits.seed),
            changes: ChangeLog::default(),
            actions: ActionQueues::default(),
            window: QueueWindow::new(limits.seed),
            ssd_writes: SsdWriteLimits::default(),
            ttls: TtlIndex::default(),
            curve: MissCurve::new(limits.seed),
        }
    }

    /// Adds GPU memory above DRAM. At capacity 0 the GPU has no effect.
    #[must_use]
    pub fn with_gpu(mut self, limits: TierLimits, policy: Box<dyn Policy>) -> Book {
        self.tiers.gpu = TierState::new(limits, policy);
        self
    }

    /// Sets the minimum reuse probability (0 to 1) of blocks written to SSD, to limit SSD wear; the
    /// SSD's policy estimates it. At 0, the default, a block is written if it is worth as much as
    /// its victim. With several tenants the limit applies only to the one with the largest share.
    #[must_use]
    pub fn with_ssd_reuse_min(mut self, reuse_min: f64) -> Book {
        self.ssd_writes.set_reuse_min(reuse_min);
        self
    }

    /// Adds a block found on the SSD at start. Returns `None` if it is known already or does not
    /// fit.
    ///
    /// Pass blocks oldest first, each with a later time than the one before. The policy keeps their
    /// order of age and inserts each at its warm end.
    pub fn restore(&mut self, found: RecoveredBlock, now: Timestamp) -> Option<BlockKey> {
        let cost = self.tiers.ssd.limits.capacity.cost(found.charge.ssd);
        if self.slab.find(&found.hash).is_some() || !self.tiers.ssd.limits.fits(self.tiers.ssd.used, cost) {
            return None;
        }
        let key = self.add(found, Tier::Ssd);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.copies.ssd = true;
            entry.announced = Some(Tier::Ssd);
            entry.last_use = Some(now);
        }
        self.notify_policy(key, PolicyEvent::MovedIn, now);
        self.changes.stored(found.parent, found.hash, Tier::Ssd);
        Some(key)
    }

    /// Description of the block; `None` if the key is unknown.
    #[must_use]
    pub fn meta(&self, key: BlockKey) -> Option<Meta> {
        self.slab.get(key).map(|entry| entry.meta)
    }

    /// The tier that the block is charged to; `None` if it is charged to none. Its bytes may not be
    /// there yet.
    #[must_use]
    pub fn assigned_tier(&self, key: BlockKey) -> Option<Tier> {
        self.slab.get(key).and_then(|entry| entry.assigned_tier)
    }

    /// The tier announced to the index, if the block is readable.
    #[must_use]
    pub fn tier_of(&self, hash: &BlockHash) -> Option<Tier> {
        self.slab.find(hash).and_then(|key| self.slab.get(key)).and_then(|entry| entry.announced)
    }

    /// Changes since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.changes.take()
    }

    /// All readable blocks as `Stored` runs, parents first. Discards pending changes.
    pub fn announce_all(&mut self) -> Vec<Change> {
        self.changes.take();
        // After a change of weights no block exists that could be announced.
        if self.slab.is_all_invalidated() {
            return Vec::new();
        }
        let standing = self.slab.iter().filter_map(|(key, entry)| {
            Some(ReadableBlock {
                hash: entry.meta.hash,
                parent: entry.meta.parent,
                offset_blocks: entry.meta.traits.offset_blocks,
                tier: entry.announced.filter(|_| !self.slab.is_invalidated(key))?,
            })
        });
        changes::full_announcement(standing.collect())
    }

    /// At most `count` readable blocks that `wanted` accepts, starting at a slot derived from
    /// `seed`.
    pub fn sample(&self, seed: u64, count: usize, wanted: impl Fn(&BlockHash) -> bool) -> Vec<BlockHash> {
        /// Slots examined for each requested block: most are in use, and some are not wanted.
        const LOOKS: usize = 64;
        let looked_at = self.slab.iter_from(seed).take(count.saturating_mul(LOOKS));
        let readable = looked_at.filter(|entry| self.tier_of(&entry.meta.hash).is_some());
        let hashes = readable.map(|entry| entry.meta.hash);
        hashes.filter(wanted).take(count).collect()
    }

    /// Counts of a tier.
    #[must_use]
    pub fn stats(&self, tier: Tier) -> TierStats {
        self.tier_state(tier).stats
    }

    /// Leases held now.
    #[must_use]
    pub fn lease_count(&self) -> usize {
        self.leases.len()
    }

    /// Resident blocks that pins keep.
    #[must_use]
    pub fn pinned_blocks(&self) -> PinnedBlocks {
        self.slab.pinned()
    }

    /// Bytes per tenant, with the quota if it has one.
    pub fn tenants(&self) -> impl Iterator<Item = (TenantId, u64, Option<u64>)> {
        self.tenants.iter()
    }

    /// Reuse statistics by category, for the fleet. They come from the policy of the lowest tier,
    /// which remembers most evicted blocks.
    #[must_use]
    pub fn reuse_stats(&mut self, now: Timestamp) -> ReuseStats {
        let has_ssd = self.tiers.ssd.limits.capacity.amount() > 0;
        let state = if has_ssd { &mut self.tiers.ssd } else { &mut self.tiers.dram };
        state.policy.reuse_stats(now)
    }

    /// Passes the fleet's reuse statistics to the policies of all tiers.
    pub fn set_fleet_reuse_stats(&mut self, fleet: &ReuseStats, now: Timestamp) {
        for state in self.tiers.all_mut() {
            state.policy.set_fleet_stats(fleet, now);
        }
    }

    /// Runs the background work of the policies; call about once a second.
    pub fn refit(&mut self, now: Timestamp) {
        self.tiers.all_mut().into_iter().for_each(|state| state.policy.refit(now));
        self.curve.fade_until(now);
    }

    /// Counters of a tier.
    #[must_use]
    pub fn counters(&self, tier: Tier) -> &TierCounters {
        &self.tier_state(tier).numbers
    }

    /// Predicted hit rate of all tiers together at other sizes.
    #[must_use]
    pub fn miss_curve(&self) -> &MissCurve {
        &self.curve
    }

    /// Counts a block that leaves its tier for a reason other than its age.
    pub(super) fn count_removal(&mut self, key: BlockKey, why: RemovalReason) {
        let Some(entry) = self.slab.get(key) else { return };
        let (Some(tier), category) = (entry.assigned_tier, entry.meta.traits.category) else { return };
        self.tier_state_mut(tier).numbers.record_removal(category, why, None);
    }

    /// Sets whether a tier accepts new blocks; existing blocks stay readable.
    pub fn set_admitting(&mut self, tier: Tier, admitting: bool) {
        self.tier_state_mut(tier).stats.admitting = admitting;
    }

    /// Limits the blocks queued for SSD. Further blocks evicted from DRAM are dropped, as if there
    /// were no SSD. For a slow SSD, to bound the queueing time.
    pub fn set_ssd_queue_max(&mut self, blocks: usize) {
        self.ssd_writes.set_queue_max(blocks);
    }

    /// Whether blocks evicted from DRAM go to SSD now.
    pub(super) fn ssd_accepts(&self) -> bool {
        self.is_open(Tier::Ssd) && self.ssd_writes.accepts(self.actions.demotion_count())
    }

    /// Changes the capacity of a tier, in its own unit. Excess blocks leave as new ones arrive.
    pub fn set_capacity(&mut self, tier: Tier, amount: u64) {
        let capacity = &mut self.tier_state_mut(tier).limits.capacity;
        *capacity = capacity.with_amount(amount);
    }

    pub(super) fn tier_state(&self, tier: Tier) -> &TierState {
        self.tiers.state(tier)
    }

    pub(super) fn tier_state_mut(&mut self, tier: Tier) -> &mut TierState {
        self.tiers.state_mut(tier)
    }

    /// Whether the tier exists and accepts new blocks.
    pub(super) fn is_open(&self, tier: Tier) -> bool {
        self.tiers.is_open(tier)
    }

    pub(super) fn cost(&self, entry: &Entry, tier: Tier) -> (u64, u64) {
        let slot = slot_bytes(&entry.meta, tier);
        (self.tier_state(tier).limits.capacity.cost(slot), u64::from(slot))
    }

    /// Adds a new block to `tier`, subject to the current pins and window.
    pub(super) fn add(&mut self, meta: Meta, tier: Tier) -> BlockKey {
        let pin = self.pins.kind(&meta.hash);
        let key = self.slab.add(meta, tier, pin);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.queue_position = self.window.queue_position(&meta.hash);
        }
        self.charge(key, tier);
        self.tenants.charge(meta.tenant, meta.charge.frame);
        key
    }

    /// Assigns the block to `tier` and charges it there.
    pub(super) fn charge(&mut self, key: BlockKey, tier: Tier) {
        let Some(entry) = self.slab.get(key) else { return };
        let ((cost, bytes), tenant) = (self.cost(entry, tier), entry.meta.tenant);
        let state = self.tier_state_mut(tier);
        let share = state.shares.charged_tenant(tenant);
        state.shares.charge(share, cost);
        state.used += cost;
        state.stats.used_bytes += bytes;
        state.stats.blocks += 1;
        if let Some(entry) = self.slab.get_mut(key) {
            (entry.assigned_tier, entry.charged_tenant) = (Some(tier), share);
            if tier == Tier::Gpu {
                self.gpu_residency.on_assigned(entry.copies.gpu);
            }
            if tier == Tier::Dram && entry.queue_position.is_some() {
                self.window.dram_used += cost;
            }
        }
    }

    /// Removes the block from its tier's account and policy. Returns the tier it had.
    pub(super) fn discharge(&mut self, key: BlockKey) -> Option<Tier> {
        self.unlist(key);
        let entry = self.slab.get_mut(key)?;
        let tier = entry.assigned_tier.take()?;
        let ranked = std::mem::take(&mut entry.in_policy);
        let (windowed, share) = (entry.queue_position.is_some(), entry.charged_tenant);
        if tier == Tier::Gpu {
            self.gpu_residency.on_unassigned(entry.copies.gpu);
        }
        self.end_prefetch(key);
        let (cost, bytes) = self.slab.get(key).map(|entry| self.cost(entry, tier))?;
        let state = self.tier_state_mut(tier);
        state.shares.discharge(share, cost);
        state.used -= cost;
        state.stats.used_bytes -= bytes;
        state.stats.blocks -= 1;
        if ranked {
            state.policy.remove(key);
        }
        if tier == Tier::Dram && windowed {
            self.window.dram_used -= cost;
        }
        Some(tier)
    }
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Book")
            .field("dram", &self.tiers.dram.stats)
            .field("ssd", &self.tiers.ssd.stats)
            .field("gpu", &self.tiers.gpu.stats)
            .field("leases", &self.leases.len())
            .finish_non_exhaustive()
    }
}

/// Slot size of a block in a tier, in bytes.
pub(super) fn slot_bytes(meta: &Meta, tier: Tier) -> u32 {
    if tier == Tier::Ssd { meta.charge.ssd } else { meta.charge.dram }
}
