//! Queue windows: blocks that queued requests need are promoted ahead of use and evicted last
//! (CachedAttention, USENIX ATC '24 §3.3).
//!
//! The owner of the queue reports the blocks its requests need, the next request first. Blocks
//! nearest the head are promoted in the background, within [`PREFETCH_SHARE_MAX`] of DRAM: the
//! prefetch window, `C_mem / S_kv` requests. All blocks of the window are evicted after unneeded
//! blocks, furthest from the head first: the eviction window, `(C_mem + C_disk) / S_kv` requests.
//! Counting single blocks replaces the mean `S_kv`.
//!
//! A window is a hint and holds no block. It orders eviction and never refuses space; it expires,
//! is bounded, and ranks below leases, pins and quotas. Not here: the sender of the window.

use hashbrown::HashMap;
use std::time::Duration;

use super::book::Book;
use super::entry::SeededHashBuilder;
use super::order::PolicyEvent;
use super::pressure::SpaceClaim;
use crate::evict::BlockKey;
use crate::id::{BlockHash, Tier, Timestamp};

/// Queued requests considered; a longer queue is cut at its tail.
pub const WINDOW_REQUESTS_MAX: usize = 4096;

/// Blocks of queued requests considered: 32 GiB of 2 MiB blocks. Processing this many takes less
/// than the housekeeping interval of the task that owns the book (`cargo xtask bench window`), so
/// readers never wait longer.
pub const WINDOW_BLOCKS_MAX: usize = 16_384;

/// Lifetime of a window, so that the window of a dead router expires: ten load-report intervals.
pub const WINDOW_SPAN: Duration = Duration::from_secs(2);

/// Maximum number of prefetches in flight: enough to keep a device busy, few enough to bound a
/// reader's delay, and half of the arena slots reserved for loads.
pub const PREFETCHES_MAX: usize = 8;

/// Share of DRAM that prefetching may fill with the window's blocks; the rest is for saves of
/// running requests.
pub const PREFETCH_SHARE_MAX: f64 = 0.9;

/// Number of tenants tried for one prefetch. A tenant that may not take more DRAM does not block
/// the others, and the scan takes microseconds.
const PREFETCH_TENANTS_MAX: usize = 8;

/// Summary of an accepted window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowSummary {
    /// Requests with at least the first block considered.
    pub requests: usize,
    /// Distinct blocks.
    pub blocks: usize,
    /// Blocks readable from memory: DRAM or a GPU.
    pub dram_blocks: usize,
    /// Blocks readable from SSD.
    pub ssd_blocks: usize,
}

/// The blocks of queued requests.
#[derive(Debug)]
pub(super) struct QueueWindow {
    seed: u64,
    ends_at: Timestamp,
    /// Nearest the head of the queue first. A block that two requests need has the position of the
    /// first.
    blocks: Vec<BlockHash>,
    /// Position of each block in [`Self::blocks`].
    positions: HashMap<BlockHash, u32, SeededHashBuilder>,
    /// Cost of the window's blocks assigned to DRAM, held or not.
    pub(super) dram_used: u64,
    /// Blocks with [`Entry::prefetch`](super::entry::Entry) set.
    pub(super) in_flight: usize,
    /// Blocks prefetched since the start.
    prefetched: u64,
}

impl QueueWindow {
    pub(super) fn new(seed: u64) -> QueueWindow {
        let positions = HashMap::with_hasher(SeededHashBuilder { seed });
        let blocks = Vec::new();
        QueueWindow {
            seed,
            ends_at: Timestamp(0),
            blocks,
            positions,
            dram_used: 0,
            in_flight: 0,
            prefetched: 0,
        }
    }

    /// The block's position, if a queued request needs it.
    pub(super) fn queue_position(&self, hash: &BlockHash) -> Option<u32> {
        if self.positions.is_empty() { None } else { self.positions.get(hash).copied() }
    }

    /// Replaces the window, up to its limits. Returns the previous blocks and the number of
    /// requests accepted.
    fn replace<'a>(&mut self, waiting: impl IntoIterator<Item = &'a [BlockHash]>) -> (Vec<BlockHash>, usize) {
        // Reserve as many as before: growing step by step costs as much as filling.
        let about = self.blocks.len();
        let mut places = HashMap::with_capacity_and_hasher(about, SeededHashBuilder { seed: self.seed });
        let (mut blocks, mut requests) = (Vec::with_capacity(about), 0);
        for needed in waiting.into_iter().take(WINDOW_REQUESTS_MAX) {
            let room = WINDOW_BLOCKS_MAX - blocks.len();
            if room == 0 {
                break;
            }
            requests += usize::from(!needed.is_empty());
            for hash in needed.iter().take(room) {
                // Below the limit, so it fits.
                let near = blocks.len() as u32;
                places.entry(*hash).or_insert_with(|| {
                    blocks.push(*hash);
                    near
                });
            }
        }
        self.positions = places;
        (std::mem::replace(&mut self.blocks, blocks), requests)
    }
}

impl Book {
    /// Replaces the window by the blocks that queued requests need: queue order, and prefix order
    /// within a request. Expires after [`WINDOW_SPAN`]; cut at [`WINDOW_REQUESTS_MAX`] and
    /// [`WINDOW_BLOCKS_MAX`].
    pub fn set_window<'a>(
        &mut self,
        waiting: impl IntoIterator<Item = &'a [BlockHash]>,
        now: Timestamp,
    ) -> WindowSummary {
        let (before, requests) = self.window.replace(waiting);
        self.window.ends_at = now.after(WINDOW_SPAN);
        // All positions change, so the orders are rebuilt.
        for tier in Tier::ALL {
            let shelf = self.tier_state_mut(tier);
            shelf.window.clear();
            shelf.shares.clear_windows();
        }
        // From the tail on, so that the head of a prefix becomes the younger one again.
        for hash in before.iter().rev() {
            if !self.window.positions.contains_key(hash) {
                self.leave_window(hash, now);
            }
        }
        let mut taken =
            WindowSummary { requests, blocks: self.window.blocks.len(), ..WindowSummary::default() };
        let blocks = std::mem::take(&mut self.window.blocks);
        for (near, hash) in (0u32..).zip(&blocks) {
            match self.join_window(hash, near) {
                Some(Tier::Ssd) => taken.ssd_blocks += 1,
                Some(_) => taken.dram_blocks += 1,
                None => {}
            }
        }
        self.window.blocks = blocks;
        taken
    }

    /// Ends an expired window. Returns `true` if it was not empty.
    pub fn expire_window(&mut self, now: Timestamp) -> bool {
        // An end later than that of a new window means that the clock was set back.
        let is_over = now >= self.window.ends_at || self.window.ends_at > now.after(WINDOW_SPAN);
        let ends = is_over && !self.window.blocks.is_empty();
        if ends {
            self.set_window([], now);
        }
        ends
    }

    /// Distinct blocks that queued requests need, held here or not.
    #[must_use]
    pub fn window_blocks(&self) -> usize {
        self.window.blocks.len()
    }

    /// Blocks promoted for queued requests since the start.
    #[must_use]
    pub fn prefetched_blocks(&self) -> u64 {
        self.window.prefetched
    }

    /// Sets the block's queue position to `near`. Returns the tier it can be read from.
    fn join_window(&mut self, hash: &BlockHash, near: u32) -> Option<Tier> {
        let key = self.slab.find(hash)?;
        let entry = self.slab.get(key)?;
        if entry.queue_position.is_none() {
            if !entry.held() {
                self.park(key);
            }
            self.adjust_dram_used(key, u64::saturating_add);
        }
        let entry = self.slab.get_mut(key)?;
        entry.queue_position = Some(near);
        let announced = entry.announced;
        self.list(key);
        announced
    }

    /// Removes a block from the window until the next window lists it.
    pub(super) fn remove_from_window(&mut self, hash: &BlockHash, now: Timestamp) {
        self.window.positions.remove(hash);
        self.leave_window(hash, now);
    }

    fn leave_window(&mut self, hash: &BlockHash, now: Timestamp) {
        let Some(key) = self.slab.find(hash) else { return };
        if self.slab.get(key).is_none_or(|entry| entry.queue_position.is_none()) {
            return;
        }
        self.adjust_dram_used(key, u64::saturating_sub);
        // Unlist while the old position is known: a softly pinned block is listed under another key
        // afterwards.
        self.unlist(key);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.queue_position = None;
        }
        self.unpark(key, now);
    }

    /// Adds a block's cost to the window's DRAM usage, or subtracts it.
    fn adjust_dram_used(&mut self, key: BlockKey, how: fn(u64, u64) -> u64) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.assigned_tier == Some(Tier::Dram)) else {
            return;
        };
        let (cost, _) = self.cost(entry, Tier::Dram);
        self.window.dram_used = how(self.window.dram_used, cost);
    }

    /// Starts promoting the nearest blocks of the window from SSD, at most [`PREFETCHES_MAX`] at
    /// once. Call after any change that may free space. Returns the number started.
    pub fn prefetch(&mut self, now: Timestamp) -> usize {
        let mut begun = 0;
        while self.window.in_flight < PREFETCHES_MAX && self.prefetch_one(now) {
            begun += 1;
        }
        begun
    }

    /// Limits the queued demotions, from the SSD's remaining write budget. A prefetch that needs a
    /// demotion beyond it does not start: only awaited loads may drop a block for space.
    pub fn set_demotions_max(&mut self, blocks: usize) {
        self.ssd_writes.set_demotions_max(blocks);
    }

    /// Prefetches the nearest block. If its tenant already has too much DRAM, tries the nearest
    /// block of another tenant.
    fn prefetch_one(&mut self, now: Timestamp) -> bool {
        let is_none = self.tiers.ssd.window.is_empty() && !self.tiers.ssd.shares.has_promote_only();
        if is_none || !self.is_open(Tier::Dram) {
            return false;
        }
        let nearest = self.tiers.ssd.shares.nearest();
        nearest.into_iter().take(PREFETCH_TENANTS_MAX).any(|(near, key)| self.prefetch_block(near, key, now))
    }

    fn prefetch_block(&mut self, near: u32, key: BlockKey, now: Timestamp) -> bool {
        let Some(entry) = self.slab.get(key) else { return false };
        let (cost, _) = self.cost(entry, Tier::Dram);
        let claim = SpaceClaim::prefetch(entry.meta.tenant, near);
        let Some(victim) = self.prefetch_victim(claim, cost, now) else { return false };
        // A victim that cannot be written to SSD would be lost.
        if victim.is_some() && !self.ssd_writes.accepts_for_prefetch(self.actions.demotion_count()) {
            return false;
        }
        // Leave the SSD first: the demoted victim takes this space.
        self.discharge(key);
        if let Some(victim) = victim {
            // A prefetch drops no block, whatever its reuse probability.
            self.demote(victim, false, now);
        }
        self.charge(key, Tier::Dram);
        self.tiers.dram.stats.promoted_blocks += 1;
        self.window.prefetched += 1;
        // If a reader requested it and then released it, its load continues for that reader.
        if let Some(entry) = self.slab.get_mut(key)
            && !entry.copies.dram
            && !entry.awaited
        {
            entry.prefetch = true;
            self.window.in_flight += 1;
        }
        // A prefetch is not a use.
        self.notify_policy(key, PolicyEvent::MovedIn, now);
        self.reconcile(key);
        true
    }

    /// Finds the victim of a prefetch at this queue position and cost. `Some(None)` means that no
    /// victim is needed. `None` means that the prefetch may not start: it would evict a sooner
    /// block or a tenant with no larger share, exceed the window's share, or evict more than one
    /// block.
    fn prefetch_victim(&mut self, claim: SpaceClaim, cost: u64, now: Timestamp) -> Option<Option<BlockKey>> {
        let limits = self.tiers.dram.limits;
        let share = limits.share(PREFETCH_SHARE_MAX);
        let victim = if self.window.dram_used.saturating_add(cost) > share {
            let (_, &furthest) = self.tiers.dram.window.range(claim.own_min_position..).next_back()?;
            let giver = self.slab.get(furthest)?.charged_tenant;
            let taker = self.tiers.dram.shares.charged_tenant(claim.tenant);
            if self.tiers.dram.shares.may_take(taker, giver) {
                Some(furthest)
            } else {
                Some(self.tiers.dram.shares.furthest(taker, claim.own_min_position)?)
            }
        } else if !limits.is_low(self.tiers.dram.used, cost) {
            // Space between the watermarks is for saves of running requests. A block added there
            // without a victim would be evicted with the next batch and loaded again.
            Some(self.victim(Tier::Dram, claim, now)?)
        } else {
            None
        };
        let Some(victim) = victim else { return Some(None) };
        let entry = self.slab.get(victim).filter(|_| self.is_open(Tier::Ssd))?;
        let (freed, _) = self.cost(entry, Tier::Dram);
        let windowed = if entry.queue_position.is_some() { freed } else { 0 };
        let fits = limits.fits(self.tiers.dram.used.saturating_sub(freed), cost)
            && self.window.dram_used.saturating_sub(windowed).saturating_add(cost) <= share;
        fits.then_some(Some(victim))
    }

    /// Ends the prefetch state: the block is in DRAM, will not arrive, or a reader waits for it
    /// now.
    pub(super) fn end_prefetch(&mut self, key: BlockKey) {
        if let Some(entry) = self.slab.get_mut(key)
            && std::mem::take(&mut entry.prefetch)
        {
            self.window.in_flight -= 1;
            self.cancel_queued_prefetch(key);
        }
    }
}
