//! The GPU's shelf: what comes up to it, what leaves it, and what is left when the GPU is gone.
//!
//! A block comes up when it was used again and the time between its two uses is shorter than the time for which the GPU's
//! victim has not been used: the rule by which LIRS (SIGMETRICS '02) tells the blocks that stay from those that pass. What
//! is saved and never used again never gets there, and a scan or a loop longer than the GPU moves nothing.
//! One block leaves for one that comes, to DRAM, and from there to SSD as any other. Lifts are wishes: bounded in number,
//! last in line, none of a block that somebody holds or waits for. Not here: bytes (`moves`), and reading (`fetch`).

use super::book::Book;
use super::moves::Action;
use super::numbers::Left;
use super::order::Told;
use super::pressure::Claim;
use crate::evict::{BlockKey, BlockTraits, Policy};
use crate::id::{Tier, Timestamp};
use crate::index::command::DropCause;

/// Blocks on their way up to the GPU at once: enough to keep a link busy, few for a reader to stand behind, and few whose
/// bytes lie in DRAM beside those that have their place there. As many may wait to leave the GPU: its memory has slots for
/// that many more blocks than have their place there.
pub const LIFTS_MAX: usize = 8;

/// Places of the slab that are looked at in one call when the GPU is lost: about a millisecond of the task that owns the
/// book, if each of them was there.
pub const LOST_PLACES_MAX: usize = 1024;

/// The policy of a tier that is not there.
pub(super) struct NoPolicy;

impl Policy for NoPolicy {
    fn name(&self) -> &'static str {
        "none"
    }

    fn insert(&mut self, _: BlockKey, _: BlockTraits, _: Timestamp) {}

    fn access(&mut self, _: BlockKey, _: BlockTraits, _: Timestamp) {}

    fn remove(&mut self, _: BlockKey) {}

    fn victim(&mut self, _: Timestamp, _: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        None
    }

    fn len(&self) -> usize {
        0
    }
}

impl Book {
    /// Of the blocks that a request used, tail first, those that may come up, with the time since their use before: from
    /// the head on, as many as may be under way, and tail first again.
    pub(super) fn used_again(&self, blocks: &[BlockKey], now: Timestamp) -> Vec<(BlockKey, u64)> {
        if !self.open(Tier::Gpu) {
            return Vec::new();
        }
        let again = blocks.iter().rev().filter_map(|&key| {
            let entry = self.slab.get(key).filter(|_| self.is_liftable(key))?;
            entry.last_use.map(|_| (key, entry.age_us(now)))
        });
        // Each of them adds one to either at most: a victim leaves for it.
        let room = LIFTS_MAX.saturating_sub(self.lifting.max(self.leaving()));
        let mut again: Vec<_> = again.take(room).collect();
        again.reverse();
        again
    }

    /// Blocks that have left the GPU but for their bytes.
    pub(super) fn leaving(&self) -> usize {
        let there = usize::try_from(self.gpu.stats.blocks).unwrap_or(usize::MAX).saturating_sub(self.lifting);
        self.on_gpu.saturating_sub(there)
    }

    /// In DRAM, at rest, and nobody's: not held, and not needed by a waiting request, which reads from DRAM.
    fn is_liftable(&self, key: BlockKey) -> bool {
        self.slab.get(key).is_some_and(|entry| {
            let is_there = entry.place == Some(Tier::Dram) && entry.copies.dram && entry.moving.is_none();
            is_there && !entry.held() && entry.near.is_none()
        })
    }

    /// DRAM to GPU, if there is room or a block that is worth less. `gap_us` is the time between its last two uses.
    pub(super) fn lift(&mut self, key: BlockKey, gap_us: u64, now: Timestamp) {
        if !self.is_liftable(key) {
            return;
        }
        let Some(entry) = self.slab.get(key) else { return };
        let (tenant, (cost, _)) = (entry.meta.tenant, self.cost(entry, Tier::Gpu));
        let (limits, used) = (self.gpu.limits, self.gpu.used);
        let victim = if limits.goal(used, cost).is_none() {
            None
        } else {
            let victim = self.victim(Tier::Gpu, Claim::lifted(tenant), now);
            let Some((victim, gives)) = victim.and_then(|key| Some((key, self.slab.get(key)?))) else {
                return;
            };
            let fits = limits.fits(used.saturating_sub(self.cost(gives, Tier::Gpu).0), cost);
            if !fits || gives.age_us(now) <= gap_us {
                return;
            }
            Some(victim)
        };
        // Leave DRAM first: what leaves the GPU takes its room there.
        self.discharge(key);
        if let Some(victim) = victim {
            self.lower(victim, Left::Demoted, now);
        }
        self.charge(key, Tier::Gpu);
        self.gpu.stats.promoted_blocks += 1;
        self.tell(key, Told::MovedIn, now);
        self.settle(key);
    }

    /// GPU to DRAM; to SSD when nothing in DRAM may give way, and dropped when nothing there may either.
    pub(super) fn lower(&mut self, key: BlockKey, why: Left, now: Timestamp) {
        if self.drop_if_void(key) {
            return;
        }
        let Some(entry) = self.slab.get(key) else { return };
        let claim = Claim::demoted(entry.meta.tenant, entry.order());
        let (charge, category, age_us) = (entry.meta.charge, entry.meta.traits.category, entry.age_us(now));
        self.discharge(key);
        let slots = [(Tier::Dram, charge.dram), (Tier::Ssd, charge.ssd)];
        let takes = |book: &Book, tier| if tier == Tier::Ssd { book.ssd_takes() } else { book.open(tier) };
        let to =
            slots.into_iter().find(|&(tier, slot)| takes(self, tier) && self.reserve(tier, slot, claim, now));
        let why = if to.is_none() && why == Left::Demoted { Left::Dropped } else { why };
        self.gpu.numbers.left(category, why, (why != Left::Failed).then_some(age_us));
        let Some((to, _)) = to else {
            self.gpu.stats.dropped_blocks += 1;
            let cause = if why == Left::Failed { DropCause::Failed } else { DropCause::Room };
            return self.drop_block(key, cause);
        };
        self.gpu.stats.demoted_blocks += u64::from(why == Left::Demoted);
        self.charge(key, to);
        // A leased block enters its policy at release.
        if self.slab.get(key).is_some_and(|entry| entry.leases == 0) {
            self.tell(key, Told::MovedIn, now);
        }
        self.settle(key);
    }

    /// The GPU is gone, and with it all bytes that were there. What was only there is dropped; what is in DRAM still, or
    /// is being read from the GPU, has its place in DRAM again. Works off [`LOST_PLACES_MAX`] places of blocks; `true`
    /// while there is more, and the next call goes on. Moves that are under way end by themselves. Nothing comes up
    /// until [`Self::set_admitting`], for which the end of this must be waited for.
    pub fn lose_gpu(&mut self, now: Timestamp) -> bool {
        self.set_admitting(Tier::Gpu, false);
        let from = self.losing.unwrap_or(0);
        let end = self.slab.places().min(from.saturating_add(LOST_PLACES_MAX));
        for place in from..end {
            self.lose_block(BlockKey(u32::try_from(place).unwrap_or(u32::MAX)), now);
        }
        self.losing = (end < self.slab.places()).then_some(end);
        self.losing.is_some()
    }

    fn lose_block(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key) else { return };
        let (place, moving) = (entry.place, entry.moving);
        if place != Some(Tier::Gpu) && !entry.copies.gpu {
            return;
        }
        if place == Some(Tier::Gpu) && (entry.copies.dram || moving == Some(Tier::Dram)) {
            self.lower(key, Left::Failed, now);
        }
        // Not before it is out of the account, which counts what is not there yet.
        let Some(entry) = self.slab.get_mut(key) else { return };
        let is_there = !entry.copies.dram && !entry.copies.ssd && moving.is_none() && entry.place.is_some();
        if is_there {
            self.count_left(key, Left::Failed);
            // Its copy goes with the block.
            return self.drop_block(key, DropCause::Failed);
        }
        if std::mem::take(&mut entry.copies.gpu) {
            let (hash, generation) = (entry.meta.hash, entry.generation);
            self.drops.push_back(Action::DropGpu { key, hash, generation });
        }
    }
}
