//! The book itself: its state, its accounts, and what may be read from it.
//!
//! The situations are beside it: `fetch`, `save`, `lease`, `pressure` (who gives way) and `moves`
//! (actions out, results in).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::changes::{self, ChangeLog, Standing};
use super::curve::MissCurve;
use super::entry::{Entry, Meta, PinnedBlocks, Slab};
use super::lease::Lease;
use super::lift::NoPolicy;
use super::moves::Action;
use super::numbers::{Left, TierNumbers};
use super::order::Told;
use super::pins::Pins;
use super::quota::QuotaRows;
use super::share::Shares;
use super::ttl::TtlRows;
use super::void::VoidLooks;
use super::watermark::{Capacity, TierLimits};
use super::window::Window;
use crate::evict::statistics::Statistics;
use crate::evict::{BlockKey, Policy};
use crate::id::{BlockHash, CallerId, LeaseId, TenantId, Tier, Timestamp};
use crate::index::command::Change;

/// Time after which a use counts half in the curve of misses: as long as the paper finds reuse stable (ATC '25 §3).
const CURVE_HALF_LIFE: Duration = Duration::from_secs(3600);

/// What bounds a book.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Size and marks of DRAM.
    pub dram: TierLimits,
    /// Size and marks of SSD.
    pub ssd: TierLimits,
    /// Time after which an unreleased lease ends by itself.
    pub lease: Duration,
    /// Leases held at once; above it callers are told `Busy`, and one that has as many as are left before.
    pub leases_max: usize,
    /// Seeds the hash table, so that no caller can aim at one bucket.
    pub seed: u64,
}

/// Account and policy of one tier.
pub(super) struct Shelf {
    pub(super) limits: TierLimits,
    pub(super) policy: Box<dyn Policy>,
    /// In the capacity's unit.
    pub(super) used: u64,
    /// Blocks that waiting requests need and nothing holds, the next one's first.
    pub(super) window: BTreeMap<u32, BlockKey>,
    pub(super) shares: Shares,
    pub(super) stats: TierStats,
    pub(super) numbers: TierNumbers,
}

impl Shelf {
    fn new(limits: TierLimits, policy: Box<dyn Policy>) -> Shelf {
        let stats = TierStats { admitting: true, ..TierStats::default() };
        let (window, shares, numbers) = Default::default();
        Shelf { limits, policy, used: 0, window, shares, stats, numbers }
    }
}

/// Counts of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks that have their place here.
    pub blocks: u64,
    /// Their slots, in bytes.
    pub used_bytes: u64,
    /// Blocks that left for a slower tier since the start.
    pub demoted_blocks: u64,
    /// Blocks that came from a slower tier since the start.
    pub promoted_blocks: u64,
    /// Blocks dropped by pressure since the start.
    pub dropped_blocks: u64,
    /// Blocks that did not come in, since what would have had to leave is worth more: new ones, and on SSD also those that
    /// left DRAM and are unlikely to be used.
    pub turned_away_blocks: u64,
    /// Blocks that left DRAM and did not go to SSD, since that is slow and had enough to do ([`Book::set_ssd_room`]).
    pub unwritten_blocks: u64,
    /// Blocks dropped since the start because their group's time to live was over.
    pub expired_blocks: u64,
    /// Blocks dropped since the start because they were computed with earlier weights.
    pub void_blocks: u64,
    /// Whether new blocks may come in.
    pub admitting: bool,
}

/// A block found on the SSD at start.
pub type Found = Meta;

/// What is where on this node.
pub struct Book {
    pub(super) slab: Slab,
    pub(super) dram: Shelf,
    pub(super) ssd: Shelf,
    /// Of no size unless there is a GPU.
    pub(super) gpu: Shelf,
    /// Blocks with their place on the GPU whose bytes are not there yet.
    pub(super) lifting: usize,
    /// Blocks with bytes on the GPU, wherever they have their place; until they are told to go.
    pub(super) on_gpu: usize,
    /// How far the search has come for what a lost GPU had.
    pub(super) losing: Option<usize>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) deadlines: BTreeSet<(Timestamp, LeaseId)>,
    /// How many leases each caller has that has some.
    pub(super) callers: BTreeMap<CallerId, usize>,
    pub(super) lease_span: Duration,
    pub(super) leases_max: usize,
    /// Blocks that leases note they were not let in with.
    pub(super) passed_blocks: usize,
    pub(super) tenants: BTreeMap<TenantId, u64>,
    pub(super) quotas: BTreeMap<TenantId, u64>,
    pub(super) quota_rows: QuotaRows,
    /// Tenants above their quota with more to drop than one call does.
    pub(super) over_quota: BTreeSet<TenantId>,
    /// Where in the slab listing for new quotas and times to live goes on, and how many places are left of its round.
    pub(super) listing: Option<(usize, usize)>,
    /// Where in the slab the search for blocks of earlier weights goes on, and where it ends.
    pub(super) voiding: Option<(usize, usize)>,
    pub(super) void_looks: VoidLooks,
    pub(super) stamp: u64,
    pub(super) pins: Pins,
    pub(super) changes: ChangeLog,
    pub(super) drops: VecDeque<Action>,
    pub(super) promotes: VecDeque<BlockKey>,
    pub(super) demotes: VecDeque<BlockKey>,
    pub(super) prefetches: VecDeque<BlockKey>,
    pub(super) reads: VecDeque<BlockKey>,
    pub(super) lowers: VecDeque<BlockKey>,
    pub(super) lifts: VecDeque<BlockKey>,
    pub(super) window: Window,
    /// Demotions that may wait or begin before a prefetch adds one.
    pub(super) demotions: usize,
    /// Blocks more that may wait for their way to SSD.
    pub(super) ssd_room: usize,
    /// What leaves DRAM is written to SSD if it is as likely as this to be used there.
    pub(super) reuse_min: f64,
    pub(super) ttls: TtlRows,
    pub(super) curve: MissCurve,
    faded: Timestamp,
}

impl Book {
    /// An empty book with one policy instance per tier.
    #[must_use]
    pub fn new(limits: &Limits, dram: Box<dyn Policy>, ssd: Box<dyn Policy>) -> Book {
        Book {
            slab: Slab::new(limits.seed),
            dram: Shelf::new(limits.dram, dram),
            ssd: Shelf::new(limits.ssd, ssd),
            gpu: Shelf::new(TierLimits::exact(Capacity::Bytes(0)), Box::new(NoPolicy)),
            lifting: 0,
            on_gpu: 0,
            losing: None,
            leases: BTreeMap::new(),
            callers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            lease_span: limits.lease,
            leases_max: limits.leases_max,
            passed_blocks: 0,
            tenants: BTreeMap::new(),
            quotas: BTreeMap::new(),
            quota_rows: QuotaRows::default(),
            over_quota: BTreeSet::new(),
            listing: None,
            voiding: None,
            void_looks: VoidLooks::default(),
            stamp: 0,
            pins: Pins::new(limits.seed),
            changes: ChangeLog::default(),
            drops: VecDeque::new(),
            promotes: VecDeque::new(),
            demotes: VecDeque::new(),
            prefetches: VecDeque::new(),
            reads: VecDeque::new(),
            lowers: VecDeque::new(),
            lifts: VecDeque::new(),
            window: Window::new(limits.seed),
            demotions: usize::MAX,
            ssd_room: usize::MAX,
            reuse_min: 0.0,
            ttls: TtlRows::default(),
            curve: MissCurve::new(limits.seed),
            faded: Timestamp(0),
        }
    }

    /// The same book with the memory of a GPU above DRAM. While that has no room, nothing is different from without.
    #[must_use]
    pub fn with_gpu(mut self, limits: TierLimits, policy: Box<dyn Policy>) -> Book {
        self.gpu = Shelf::new(limits, policy);
        self
    }

    /// The same book, which writes to SSD only what is at least this likely (0 to 1) to be used before it leaves, as far as the
    /// policy there can tell: an SSD lives as long as it is not written to. At 0, which is so unless it is said, everything is
    /// that is worth as much as what leaves for it. Of several tenants only of the one that has most there it is asked.
    #[must_use]
    pub fn with_ssd_reuse_min(mut self, chance: f64) -> Book {
        self.reuse_min = chance;
        self
    }

    /// Takes in a block found on the SSD at start. `None` when it is known already or does not fit.
    ///
    /// Blocks come oldest first, each with a later time than the one before: the policy keeps their order
    /// of age and takes each in at its warm end.
    pub fn restore(&mut self, found: Found, now: Timestamp) -> Option<BlockKey> {
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
        self.tell(key, Told::MovedIn, now);
        self.changes.stored(found.parent, found.hash, Tier::Ssd);
        Some(key)
    }

    /// The block's description while the book knows the key.
    #[must_use]
    pub fn meta(&self, key: BlockKey) -> Option<Meta> {
        self.slab.get(key).map(|entry| entry.meta)
    }

    /// The tier on whose account the block is, while it is on any. Its bytes may not be there yet.
    #[must_use]
    pub fn place(&self, key: BlockKey) -> Option<Tier> {
        self.slab.get(key).and_then(|entry| entry.place)
    }

    /// The tier the index knows for this block, if it is readable.
    #[must_use]
    pub fn tier_of(&self, hash: &BlockHash) -> Option<Tier> {
        self.slab.find(hash).and_then(|key| self.slab.get(key)).and_then(|entry| entry.announced)
    }

    /// Changes since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.changes.take()
    }

    /// Everything readable as `Stored` runs, parents first; pending changes are void after it.
    pub fn announce_all(&mut self) -> Vec<Change> {
        self.changes.take();
        // With other weights nothing is there yet that could be told.
        if self.slab.is_all_void() {
            return Vec::new();
        }
        let standing = self.slab.iter().filter_map(|(key, entry)| {
            Some(Standing {
                hash: entry.meta.hash,
                parent: entry.meta.parent,
                offset_blocks: entry.meta.traits.offset_blocks,
                tier: entry.announced.filter(|_| !self.slab.is_void(key))?,
            })
        });
        changes::full(standing.collect())
    }

    /// At most `count` readable blocks that `wanted` takes, from a place that `seed` chooses.
    pub fn sample(&self, seed: u64, count: usize, wanted: impl Fn(&BlockHash) -> bool) -> Vec<BlockHash> {
        /// Places looked at for each block that is asked for: most are in use, and some are not wanted.
        const LOOKS: usize = 64;
        let looked_at = self.slab.from(seed).take(count.saturating_mul(LOOKS));
        let readable = looked_at.filter(|entry| self.tier_of(&entry.meta.hash).is_some());
        let hashes = readable.map(|entry| entry.meta.hash);
        hashes.filter(wanted).take(count).collect()
    }

    /// Counts of a tier.
    #[must_use]
    pub fn stats(&self, tier: Tier) -> TierStats {
        self.shelf(tier).stats
    }

    /// Leases held now.
    #[must_use]
    pub fn lease_count(&self) -> usize {
        self.leases.len()
    }

    /// Resident blocks that directives keep.
    #[must_use]
    pub fn pinned_blocks(&self) -> PinnedBlocks {
        self.slab.pinned()
    }

    /// Bytes per tenant, with the quota where there is one.
    pub fn tenants(&self) -> impl Iterator<Item = (TenantId, u64, Option<u64>)> {
        self.tenants.iter().map(|(&tenant, &bytes)| (tenant, bytes, self.quotas.get(&tenant).copied()))
    }

    /// What was seen of each category of blocks, for the fleet: by the policy of the lowest tier there is, which remembers
    /// most of what left.
    #[must_use]
    pub fn statistics(&mut self, now: Timestamp) -> Statistics {
        let has_ssd = self.ssd.limits.capacity.amount() > 0;
        let shelf = if has_ssd { &mut self.ssd } else { &mut self.dram };
        shelf.policy.statistics(now)
    }

    /// Tells the policies of all tiers what the whole fleet saw.
    pub fn inform(&mut self, fleet: &Statistics, now: Timestamp) {
        for shelf in [&mut self.dram, &mut self.ssd, &mut self.gpu] {
            shelf.policy.inform(fleet, now);
        }
    }

    /// Background work of the policies; about once a second.
    pub fn refit(&mut self, now: Timestamp) {
        self.dram.policy.refit(now);
        self.ssd.policy.refit(now);
        self.gpu.policy.refit(now);
        let span = now.since(self.faded);
        self.faded = self.faded.max(now);
        self.curve.fade((-span.as_secs_f64() / CURVE_HALF_LIFE.as_secs_f64()).exp2());
    }

    /// What happened to the blocks of a tier.
    #[must_use]
    pub fn numbers(&self, tier: Tier) -> &TierNumbers {
        &self.shelf(tier).numbers
    }

    /// What all tiers together would hit if they had another size.
    #[must_use]
    pub fn curve(&self) -> &MissCurve {
        &self.curve
    }

    /// Counts a block that leaves its place for another reason than its age.
    pub(super) fn count_left(&mut self, key: BlockKey, why: Left) {
        let Some(entry) = self.slab.get(key) else { return };
        let (Some(tier), category) = (entry.place, entry.meta.traits.category) else { return };
        self.shelf_mut(tier).numbers.left(category, why, None);
    }

    /// Lets new blocks into a tier, or stops it; what is there stays readable.
    pub fn set_admitting(&mut self, tier: Tier, admitting: bool) {
        self.shelf_mut(tier).stats.admitting = admitting;
    }

    /// So many blocks may wait for their way to SSD from now on: what leaves DRAM beyond that goes, as if there were no SSD.
    /// For one that is slow, where they would wait for long.
    pub fn set_ssd_room(&mut self, blocks: usize) {
        self.ssd_room = blocks;
    }

    /// Whether what leaves DRAM goes to SSD now.
    pub(super) fn ssd_takes(&self) -> bool {
        self.open(Tier::Ssd) && self.demotes.len() < self.ssd_room
    }

    /// A tier has another size from now on, in the unit it has. What no longer fits leaves as others come.
    pub fn set_capacity(&mut self, tier: Tier, amount: u64) {
        let capacity = &mut self.shelf_mut(tier).limits.capacity;
        *capacity = capacity.with_amount(amount);
    }

    pub(super) fn shelf(&self, tier: Tier) -> &Shelf {
        match tier {
            Tier::Ssd => &self.ssd,
            Tier::Dram => &self.dram,
            Tier::Gpu => &self.gpu,
        }
    }

    pub(super) fn shelf_mut(&mut self, tier: Tier) -> &mut Shelf {
        match tier {
            Tier::Ssd => &mut self.ssd,
            Tier::Dram => &mut self.dram,
            Tier::Gpu => &mut self.gpu,
        }
    }

    pub(super) fn exists(&self, tier: Tier) -> bool {
        self.shelf(tier).limits.capacity.amount() > 0
    }

    /// Whether the tier exists and takes new blocks.
    pub(super) fn open(&self, tier: Tier) -> bool {
        self.shelf(tier).stats.admitting && self.exists(tier)
    }

    pub(super) fn cost(&self, entry: &Entry, tier: Tier) -> (u64, u64) {
        let slot = slot_bytes(&entry.meta, tier);
        (self.shelf(tier).limits.capacity.cost(slot), u64::from(slot))
    }

    /// A new block with its place in `tier`, under the pins and the window there are.
    pub(super) fn add(&mut self, meta: Meta, tier: Tier) -> BlockKey {
        let pin = self.pins.kind(&meta.hash);
        let key = self.slab.add(meta, tier, pin);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.near = self.window.near(&meta.hash);
        }
        self.charge(key, tier);
        self.charge_tenant(meta.tenant, meta.charge.frame);
        key
    }

    /// Gives the block its place in `tier` and charges it there.
    pub(super) fn charge(&mut self, key: BlockKey, tier: Tier) {
        let Some(entry) = self.slab.get(key) else { return };
        let ((cost, bytes), tenant) = (self.cost(entry, tier), entry.meta.tenant);
        let shelf = self.shelf_mut(tier);
        let share = shelf.shares.row(tenant);
        shelf.shares.charge(share, cost);
        shelf.used += cost;
        shelf.stats.used_bytes += bytes;
        shelf.stats.blocks += 1;
        if let Some(entry) = self.slab.get_mut(key) {
            (entry.place, entry.share) = (Some(tier), share);
            self.lifting += usize::from(tier == Tier::Gpu && !entry.copies.gpu);
            if tier == Tier::Dram && entry.near.is_some() {
                self.window.dram_used += cost;
            }
        }
    }

    /// Takes the block out of its place: account and policy. Returns the tier it had.
    pub(super) fn discharge(&mut self, key: BlockKey) -> Option<Tier> {
        self.unlist(key);
        let entry = self.slab.get_mut(key)?;
        let tier = entry.place.take()?;
        let ranked = std::mem::take(&mut entry.ranked);
        let (windowed, share) = (entry.near.is_some(), entry.share);
        self.lifting -= usize::from(tier == Tier::Gpu && !entry.copies.gpu);
        self.end_prefetch(key);
        let (cost, bytes) = self.slab.get(key).map(|entry| self.cost(entry, tier))?;
        let shelf = self.shelf_mut(tier);
        shelf.shares.discharge(share, cost);
        shelf.used -= cost;
        shelf.stats.used_bytes -= bytes;
        shelf.stats.blocks -= 1;
        if ranked {
            shelf.policy.remove(key);
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

/// Slot a block takes in a tier, in bytes.
pub(super) fn slot_bytes(meta: &Meta, tier: Tier) -> u32 {
    if tier == Tier::Ssd { meta.charge.ssd } else { meta.charge.dram }
}
