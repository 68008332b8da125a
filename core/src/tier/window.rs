//! Scheduler windows: blocks that waiting requests need are promoted before they are asked for, and are the last to go
//! (CachedAttention, USENIX ATC '24 §3.3).
//!
//! Whoever knows the queue says which blocks its requests need, the next request's first. Of these the nearest that
//! fit into DRAM ([`PREFETCH_SHARE_MAX`] of it) are promoted in the background: the prefetch window, `C_mem / S_kv`
//! requests. All of them give way after everything that nobody waits for, and the one nearest the queue's tail first:
//! the eviction window, `(C_mem + C_disk) / S_kv` requests. Counting blocks one by one stands in for the mean `S_kv`.
//!
//! A window is a hint and holds nothing: it orders who goes first and never refuses room, ends by itself, is bounded in
//! number, and stands behind leases, pins and quotas. Not here: who sends it.

use hashbrown::HashMap;
use std::time::Duration;

use super::book::Book;
use super::entry::Fold;
use super::order::Told;
use super::pressure::Claim;
use crate::evict::BlockKey;
use crate::id::{BlockHash, Tier, Timestamp};

/// Waiting requests that are looked at; a longer queue is cut at its tail.
pub const WINDOW_REQUESTS_MAX: usize = 4096;

/// Blocks of waiting requests that are looked at: 32 GiB of 2 MiB blocks. With so many the task that owns the book is busy
/// for less than its housekeeping interval (`cargo xtask bench window`), so that readers never wait longer for it.
pub const WINDOW_BLOCKS_MAX: usize = 16_384;

/// A window that is not replaced ends after this, so that a router that died holds nothing: ten of the intervals at
/// which instances report their load.
pub const WINDOW_SPAN: Duration = Duration::from_secs(2);

/// Blocks on their way to DRAM for waiting requests at once: enough to keep a device busy, few for a reader to stand
/// behind, and half of the slots that a node's arena keeps for loads.
pub const PREFETCHES_MAX: usize = 8;

/// Share of DRAM that blocks of waiting requests may fill by prefetching; the rest is for what running requests save.
pub const PREFETCH_SHARE_MAX: f64 = 0.9;

/// Tenants whose nearest block is tried at once: so that one that may not have more room does not keep the others
/// waiting, and looking costs some microseconds.
const PREFETCH_TENANTS_MAX: usize = 8;

/// What was taken of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowTaken {
    /// Requests of which at least the first block counts.
    pub requests: usize,
    /// Different blocks.
    pub blocks: usize,
    /// Of these the ones readable from memory: DRAM or a GPU.
    pub dram_blocks: usize,
    /// Of these the ones readable from SSD.
    pub ssd_blocks: usize,
}

/// The blocks of waiting requests.
#[derive(Debug)]
pub(super) struct Window {
    seed: u64,
    until: Timestamp,
    /// Nearest the head of the queue first; a block that two requests need stands with the first.
    blocks: Vec<BlockHash>,
    /// The place of each among [`Self::blocks`].
    places: HashMap<BlockHash, u32, Fold>,
    /// Cost of those with their place in DRAM, held or not.
    pub(super) dram_used: u64,
    /// Blocks with [`Entry::prefetch`](super::entry::Entry).
    pub(super) under_way: usize,
    /// Blocks prefetched since the start.
    prefetched: u64,
}

impl Window {
    pub(super) fn new(seed: u64) -> Window {
        let places = HashMap::with_hasher(Fold { seed });
        let blocks = Vec::new();
        Window { seed, until: Timestamp(0), blocks, places, dram_used: 0, under_way: 0, prefetched: 0 }
    }

    /// The block's place, if a waiting request needs it.
    pub(super) fn near(&self, hash: &BlockHash) -> Option<u32> {
        if self.places.is_empty() { None } else { self.places.get(hash).copied() }
    }

    /// Takes over a queue up to its limits; answers the blocks of the one before, and how many requests were taken.
    fn replace<'a>(&mut self, waiting: impl IntoIterator<Item = &'a [BlockHash]>) -> (Vec<BlockHash>, usize) {
        // About as many as before: growing step by step costs as much as filling.
        let about = self.blocks.len();
        let mut places = HashMap::with_capacity_and_hasher(about, Fold { seed: self.seed });
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
        self.places = places;
        (std::mem::replace(&mut self.blocks, blocks), requests)
    }
}

impl Book {
    /// Which blocks the waiting requests need, in the order of the queue and each in prefix order. Replaces what was
    /// said before, ends after [`WINDOW_SPAN`], and is cut at [`WINDOW_REQUESTS_MAX`] and [`WINDOW_BLOCKS_MAX`].
    pub fn set_window<'a>(
        &mut self,
        waiting: impl IntoIterator<Item = &'a [BlockHash]>,
        now: Timestamp,
    ) -> WindowTaken {
        let (before, requests) = self.window.replace(waiting);
        self.window.until = now.after(WINDOW_SPAN);
        // All places change, so the orders are made anew.
        for tier in Tier::ALL {
            let shelf = self.shelf_mut(tier);
            shelf.window.clear();
            shelf.shares.clear_windows();
        }
        // From the tail on, so that the head of a prefix is the younger one again.
        for hash in before.iter().rev() {
            if !self.window.places.contains_key(hash) {
                self.leave_window(hash, now);
            }
        }
        let mut taken = WindowTaken { requests, blocks: self.window.blocks.len(), ..WindowTaken::default() };
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

    /// Ends a window whose time is over; `true` if it was not empty.
    pub fn expire_window(&mut self, now: Timestamp) -> bool {
        // One that ends later than one begun now is of a clock that was set back.
        let is_over = now >= self.window.until || self.window.until > now.after(WINDOW_SPAN);
        let ends = is_over && !self.window.blocks.is_empty();
        if ends {
            self.set_window([], now);
        }
        ends
    }

    /// Different blocks that waiting requests need, held here or not.
    #[must_use]
    pub fn window_blocks(&self) -> usize {
        self.window.blocks.len()
    }

    /// Blocks promoted since the start because a waiting request needed them.
    #[must_use]
    pub fn prefetched_blocks(&self) -> u64 {
        self.window.prefetched
    }

    /// The block's place among the waiting ones is `near` from now on; answers the tier it can be read from.
    fn join_window(&mut self, hash: &BlockHash, near: u32) -> Option<Tier> {
        let key = self.slab.find(hash)?;
        let entry = self.slab.get(key)?;
        if entry.near.is_none() {
            if !entry.held() {
                self.park(key);
            }
            self.weigh(key, u64::saturating_add);
        }
        let entry = self.slab.get_mut(key)?;
        entry.near = Some(near);
        let announced = entry.announced;
        self.list(key);
        announced
    }

    /// The block is as if no waiting request needed it, until the next window says that one does.
    pub(super) fn unwant(&mut self, hash: &BlockHash, now: Timestamp) {
        self.window.places.remove(hash);
        self.leave_window(hash, now);
    }

    fn leave_window(&mut self, hash: &BlockHash, now: Timestamp) {
        let Some(key) = self.slab.find(hash) else { return };
        if self.slab.get(key).is_none_or(|entry| entry.near.is_none()) {
            return;
        }
        self.weigh(key, u64::saturating_sub);
        // While the place it is listed under is known: a softly pinned one is listed under another from now on.
        self.unlist(key);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.near = None;
        }
        self.unpark(key, now);
    }

    /// Adds a block to what the window has in DRAM, or takes it off.
    fn weigh(&mut self, key: BlockKey, how: fn(u64, u64) -> u64) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.place == Some(Tier::Dram)) else { return };
        let (cost, _) = self.cost(entry, Tier::Dram);
        self.window.dram_used = how(self.window.dram_used, cost);
    }

    /// Begins to promote the nearest blocks of waiting requests that are on SSD, at most [`PREFETCHES_MAX`] at once.
    /// Call it after anything that may have made room. Returns how many were begun.
    pub fn prefetch(&mut self, now: Timestamp) -> usize {
        let mut begun = 0;
        while self.window.under_way < PREFETCHES_MAX && self.prefetch_one(now) {
            begun += 1;
        }
        begun
    }

    /// So many blocks can be written to SSD before its budget is spent. A prefetch that needs another one to leave DRAM
    /// does not begin beyond that: whoever asks for room may have a block dropped for it, and a wish may not.
    pub fn set_demotions(&mut self, blocks: usize) {
        self.demotions = blocks;
    }

    /// The nearest block of all, or of another tenant if the nearest one's tenant has too much in DRAM already.
    fn prefetch_one(&mut self, now: Timestamp) -> bool {
        let is_none = self.ssd.window.is_empty() && !self.ssd.shares.has_wanted();
        if is_none || !self.open(Tier::Dram) {
            return false;
        }
        let nearest = self.ssd.shares.nearest();
        nearest.into_iter().take(PREFETCH_TENANTS_MAX).any(|(near, key)| self.prefetch_block(near, key, now))
    }

    fn prefetch_block(&mut self, near: u32, key: BlockKey, now: Timestamp) -> bool {
        let Some(entry) = self.slab.get(key) else { return false };
        let (cost, _) = self.cost(entry, Tier::Dram);
        let claim = Claim::waiting(entry.meta.tenant, near);
        let Some(victim) = self.room_for(claim, cost, now) else { return false };
        // One that could not be written to SSD would be gone.
        if victim.is_some() && self.demotes.len() >= self.demotions.min(self.ssd_room) {
            return false;
        }
        // Leave the SSD first: whoever is demoted for this block takes its room there.
        self.discharge(key);
        if let Some(victim) = victim {
            // A wish drops nothing, worth writing or not.
            self.demote(victim, false, now);
        }
        self.charge(key, Tier::Dram);
        self.dram.stats.promoted_blocks += 1;
        self.window.prefetched += 1;
        // One that a reader asked for and let go of is loaded for that reader still.
        if let Some(entry) = self.slab.get_mut(key)
            && !entry.copies.dram
            && !entry.awaited
        {
            entry.prefetch = true;
            self.window.under_way += 1;
        }
        // A block that comes up before it is asked for was not used.
        self.tell(key, Told::MovedIn, now);
        self.settle(key);
        true
    }

    /// Who must go for a block with this place and cost: perhaps nobody. Nothing if it may not come: its room would be
    /// that of a nearer one or of a tenant with no more, or above the window's share, or more than one would have to go.
    fn room_for(&mut self, claim: Claim, cost: u64, now: Timestamp) -> Option<Option<BlockKey>> {
        let limits = self.dram.limits;
        let share = limits.share(PREFETCH_SHARE_MAX);
        let victim = if self.window.dram_used.saturating_add(cost) > share {
            let (_, &furthest) = self.dram.window.range(claim.yields_to..).next_back()?;
            let giver = self.slab.get(furthest)?.share;
            let taker = self.dram.shares.row(claim.tenant);
            if self.dram.shares.may_take(taker, giver) {
                Some(furthest)
            } else {
                Some(self.dram.shares.furthest(taker, claim.yields_to)?)
            }
        } else if !limits.is_low(self.dram.used, cost) {
            // Between the marks is room for what running requests save. What came in there without a victim would go
            // with the next stretch that is freed, and come back.
            Some(self.victim(Tier::Dram, claim, now)?)
        } else {
            None
        };
        let Some(victim) = victim else { return Some(None) };
        let entry = self.slab.get(victim).filter(|_| self.open(Tier::Ssd))?;
        let (freed, _) = self.cost(entry, Tier::Dram);
        let windowed = if entry.near.is_some() { freed } else { 0 };
        let fits = limits.fits(self.dram.used.saturating_sub(freed), cost)
            && self.window.dram_used.saturating_sub(windowed).saturating_add(cost) <= share;
        fits.then_some(Some(victim))
    }

    /// The block is in DRAM, will not come, or somebody waits for it now.
    pub(super) fn end_prefetch(&mut self, key: BlockKey) {
        if let Some(entry) = self.slab.get_mut(key)
            && std::mem::take(&mut entry.prefetch)
        {
            self.window.under_way -= 1;
            self.leave_prefetches(key);
        }
    }
}
