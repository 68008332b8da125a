//! The book: its state, its accounts and its read-only queries.
//!
//! Operations are in the files beside it: `fetch`, `save`, `lease`, `pressure` (eviction) and
//! `moves` (actions and their results).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::changes::{self, ChangeLog, ReadableBlock};
use super::counters::{RemovalReason, TierCounters};
use super::curve::MissCurve;
use super::entry::{Entry, Meta, PinnedBlocks, Slab};
use super::gpu::NoPolicy;
use super::invalidation::SweepBudget;
use super::lease::Lease;
use super::moves::Action;
use super::order::PolicyEvent;
use super::pins::Pins;
use super::quota::QuotaIndex;
use super::share::Shares;
use super::ttl::TtlIndex;
use super::watermark::{Capacity, TierLimits};
use super::window::QueueWindow;
use crate::evict::reuse_stats::ReuseStats;
use crate::evict::{BlockKey, Policy};
use crate::id::{BlockHash, CallerId, LeaseId, TenantId, Tier, Timestamp};
use crate::index::command::Change;

/// Half-life of a use in the miss curve: as long as the paper finds reuse stable (ATC '25 §3).
const CURVE_HALF_LIFE: Duration = Duration::from_secs(3600);

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

/// Account and policy of one tier.
pub(super) struct TierState {
    pub(super) limits: TierLimits,
    pub(super) policy: Box<dyn Policy>,
    /// In the capacity's unit.
    pub(super) used: u64,
    /// Evictable blocks that queued requests need, by queue position.
    pub(super) window: BTreeMap<u32, BlockKey>,
    pub(super) shares: Shares,
    pub(super) stats: TierStats,
    pub(super) numbers: TierCounters,
}

impl TierState {
    fn new(limits: TierLimits, policy: Box<dyn Policy>) -> TierState {
        let stats = TierStats { admitting: true, ..TierStats::default() };
        let (window, shares, numbers) = Default::default();
        TierState { limits, policy, used: 0, window, shares, stats, numbers }
    }
}

/// Counts of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks assigned to this tier.
    pub blocks: u64,
    /// Their slots, in bytes.
    pub used_bytes: u64,
    /// Blocks demoted to a slower tier since the start.
    pub demoted_blocks: u64,
    /// Blocks promoted from a slower tier since the start.
    pub promoted_blocks: u64,
    /// Blocks dropped by pressure since the start.
    pub dropped_blocks: u64,
    /// Blocks rejected because the blocks they would displace are worth more. On SSD this includes
    /// blocks evicted from DRAM that are unlikely to be used again.
    pub not_admitted_blocks: u64,
    /// Blocks evicted from DRAM and not written to SSD, because the SSD's write queue was full
    /// ([`Book::set_ssd_queue_max`]).
    pub unwritten_blocks: u64,
    /// Blocks dropped since the start because their group's time to live expired.
    pub expired_blocks: u64,
    /// Blocks dropped since the start because they were computed with earlier weights.
    pub invalidated_blocks: u64,
    /// Whether the tier accepts new blocks.
    pub admitting: bool,
}

/// A block found on the SSD at start.
pub type RecoveredBlock = Meta;

/// The tier of every block on this node.
pub struct Book {
    pub(super) slab: Slab,
    pub(super) dram: TierState,
    pub(super) ssd: TierState,
    /// Capacity 0 unless there is a GPU.
    pub(super) gpu: TierState,
    /// Blocks assigned to the GPU before their bytes arrive there.
    pub(super) gpu_pending: usize,
    /// Blocks with bytes on the GPU, whatever their tier, until their `DropGpu` is handed out.
    pub(super) gpu_copies: usize,
    /// Cursor of the scan for blocks of a lost GPU.
    pub(super) gpu_loss_cursor: Option<usize>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) deadlines: BTreeSet<(Timestamp, LeaseId)>,
    /// Number of leases of each caller; callers without a lease are absent.
    pub(super) callers: BTreeMap<CallerId, usize>,
    pub(super) lease_span: Duration,
    pub(super) leases_max: usize,
    /// Rejected blocks that all leases remember.
    pub(super) rejected_blocks: usize,
    pub(super) tenants: BTreeMap<TenantId, u64>,
    pub(super) quotas: BTreeMap<TenantId, u64>,
    pub(super) quota_index: QuotaIndex,
    /// Tenants above their quota with more to drop than one call drops.
    pub(super) over_quota: BTreeSet<TenantId>,
    /// Cursor in the slab and remaining slots of the scan for new quotas and times to live.
    pub(super) listing_cursor: Option<(usize, usize)>,
    /// Cursor and end of the scan for blocks of earlier weights.
    pub(super) invalidation_cursor: Option<(usize, usize)>,
    pub(super) sweep_budget: SweepBudget,
    pub(super) stamp: u64,
    pub(super) pins: Pins,
    pub(super) changes: ChangeLog,
    pub(super) drops: VecDeque<Action>,
    pub(super) promotes: VecDeque<BlockKey>,
    pub(super) demotes: VecDeque<BlockKey>,
    pub(super) prefetches: VecDeque<BlockKey>,
    pub(super) gpu_reads: VecDeque<BlockKey>,
    pub(super) gpu_read_backs: VecDeque<BlockKey>,
    pub(super) gpu_promotions: VecDeque<BlockKey>,
    pub(super) window: QueueWindow,
    /// Demotions that may be queued or started before a prefetch adds one.
    pub(super) demotions_max: usize,
    /// Maximum number of blocks queued for SSD.
    pub(super) ssd_queue_max: usize,
    /// Minimum reuse probability for a write to SSD.
    pub(super) reuse_min: f64,
    pub(super) ttls: TtlIndex,
    pub(super) curve: MissCurve,
    curve_faded_at: Timestamp,
}

impl Book {
    /// An empty book with one policy instance per tier.
    #[must_use]
    pub fn new(limits: &BookLimits, dram: Box<dyn Policy>, ssd: Box<dyn Policy>) -> Book {
        Book {
            slab: Slab::new(limits.seed),
            dram: TierState::new(limits.dram, dram),
            ssd: TierState::new(limits.ssd, ssd),
            gpu: TierState::new(TierLimits::exact(Capacity::Bytes(0)), Box::new(NoPolicy)),
            gpu_pending: 0,
            gpu_copies: 0,
            gpu_loss_cursor: None,
            leases: BTreeMap::new(),
            callers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            lease_span: limits.lease,
            leases_max: limits.leases_max,
            rejected_blocks: 0,
            tenants: BTreeMap::new(),
            quotas: BTreeMap::new(),
            quota_index: QuotaIndex::default(),
            over_quota: BTreeSet::new(),
            listing_cursor: None,
            invalidation_cursor: None,
            sweep_budget: SweepBudget::default(),
            stamp: 0,
            pins: Pins::new(limits.seed),
            changes: ChangeLog::default(),
            drops: VecDeque::new(),
            promotes: VecDeque::new(),
            demotes: VecDeque::new(),
            prefetches: VecDeque::new(),
            gpu_reads: VecDeque::new(),
            gpu_read_backs: VecDeque::new(),
            gpu_promotions: VecDeque::new(),
            window: QueueWindow::new(limits.seed),
            demotions_max: usize::MAX,
            ssd_queue_max: usize::MAX,
            reuse_min: 0.0,
            ttls: TtlIndex::default(),
            curve: MissCurve::new(limits.seed),
            curve_faded_at: Timestamp(0),
        }
    }

    /// Adds GPU memory above DRAM. At capacity 0 the GPU has no effect.
    #[must_use]
    pub fn with_gpu(mut self, limits: TierLimits, policy: Box<dyn Policy>) -> Book {
        self.gpu = TierState::new(limits, policy);
        self
    }

    /// Sets the minimum reuse probability (0 to 1) of blocks written to SSD, to limit SSD wear; the
    /// SSD's policy estimates it. At 0, the default, a block is written if it is worth as much as
    /// its victim. With several tenants the limit applies only to the one with the largest share.
    #[must_use]
    pub fn with_ssd_reuse_min(mut self, reuse_min: f64) -> Book {
        self.reuse_min = reuse_min;
        self
    }

    /// Adds a block found on the SSD at start. Returns `None` if it is known already or does not
    /// fit.
    ///
    /// Pass blocks oldest first, each with a later time than the one before. The policy keeps their
    /// order of age and inserts each at its warm end.
    pub fn restore(&mut self, found: RecoveredBlock, now: Timestamp) -> Option<BlockKey> {
        let cost = self.ssd.limits.capacity.cost(found.charge.ssd);
        if self.slab.find(&found.hash).is_some() || !self.ssd.limits.fits(self.ssd.used, cost) {
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
        self.tenants.iter().map(|(&tenant, &bytes)| (tenant, bytes, self.quotas.get(&tenant).copied()))
    }

    /// Reuse statistics by category, for the fleet. They come from the policy of the lowest tier,
    /// which remembers most evicted blocks.
    #[must_use]
    pub fn reuse_stats(&mut self, now: Timestamp) -> ReuseStats {
        let has_ssd = self.ssd.limits.capacity.amount() > 0;
        let state = if has_ssd { &mut self.ssd } else { &mut self.dram };
        state.policy.reuse_stats(now)
    }

    /// Passes the fleet's reuse statistics to the policies of all tiers.
    pub fn set_fleet_reuse_stats(&mut self, fleet: &ReuseStats, now: Timestamp) {
        for shelf in [&mut self.dram, &mut self.ssd, &mut self.gpu] {
            shelf.policy.set_fleet_stats(fleet, now);
        }
    }

    /// Runs the background work of the policies; call about once a second.
    pub fn refit(&mut self, now: Timestamp) {
        self.dram.policy.refit(now);
        self.ssd.policy.refit(now);
        self.gpu.policy.refit(now);
        let span = now.since(self.curve_faded_at);
        self.curve_faded_at = self.curve_faded_at.max(now);
        self.curve.fade((-span.as_secs_f64() / CURVE_HALF_LIFE.as_secs_f64()).exp2());
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
        self.ssd_queue_max = blocks;
    }

    /// Whether blocks evicted from DRAM go to SSD now.
    pub(super) fn ssd_accepts(&self) -> bool {
        self.is_open(Tier::Ssd) && self.demotes.len() < self.ssd_queue_max
    }

    /// Changes the capacity of a tier, in its own unit. Excess blocks leave as new ones arrive.
    pub fn set_capacity(&mut self, tier: Tier, amount: u64) {
        let capacity = &mut self.tier_state_mut(tier).limits.capacity;
        *capacity = capacity.with_amount(amount);
    }

    pub(super) fn tier_state(&self, tier: Tier) -> &TierState {
        match tier {
            Tier::Ssd => &self.ssd,
            Tier::Dram => &self.dram,
            Tier::Gpu => &self.gpu,
        }
    }

    pub(super) fn tier_state_mut(&mut self, tier: Tier) -> &mut TierState {
        match tier {
            Tier::Ssd => &mut self.ssd,
            Tier::Dram => &mut self.dram,
            Tier::Gpu => &mut self.gpu,
        }
    }

    pub(super) fn exists(&self, tier: Tier) -> bool {
        self.tier_state(tier).limits.capacity.amount() > 0
    }

    /// Whether the tier exists and accepts new blocks.
    pub(super) fn is_open(&self, tier: Tier) -> bool {
        self.tier_state(tier).stats.admitting && self.exists(tier)
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
        self.charge_tenant(meta.tenant, meta.charge.frame);
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
            self.gpu_pending += usize::from(tier == Tier::Gpu && !entry.copies.gpu);
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
        self.gpu_pending -= usize::from(tier == Tier::Gpu && !entry.copies.gpu);
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

    pub(super) fn charge_tenant(&mut self, tenant: TenantId, bytes: u32) {
        *self.tenants.entry(tenant).or_default() += u64::from(bytes);
    }

    pub(super) fn discharge_tenant(&mut self, tenant: TenantId, bytes: u32) {
        if let Some(used) = self.tenants.get_mut(&tenant) {
            *used -= u64::from(bytes);
            if *used == 0 {
                self.tenants.remove(&tenant);
            }
        }
    }
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Book")
            .field("dram", &self.dram.stats)
            .field("ssd", &self.ssd.stats)
            .field("gpu", &self.gpu.stats)
            .field("leases", &self.leases.len())
            .finish_non_exhaustive()
    }
}

/// Slot size of a block in a tier, in bytes.
pub(super) fn slot_bytes(meta: &Meta, tier: Tier) -> u32 {
    if tier == Tier::Ssd { meta.charge.ssd } else { meta.charge.dram }
}
