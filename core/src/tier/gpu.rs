//! The GPU tier: promotion to it, demotion from it, and the loss of the GPU.
//!
//! A block is promoted when the time between its last two uses is shorter than the time since the
//! last use of the GPU's victim. LIRS (SIGMETRICS '02) selects its resident blocks by the same
//! rule. Blocks that are saved and never used again stay out of the GPU, and a scan or a loop
//! longer than the GPU moves no block.
//!
//! Each promotion demotes at most one block to DRAM, and from there to SSD like any other.
//! Promotions are optional: bounded in number, last in the queue, and never of a block that is held
//! or awaited. Not here: bytes (`moves`) and reads (`fetch`).

use super::book::Book;
use super::counters::RemovalReason;
use super::moves::Action;
use super::order::PolicyEvent;
use super::pressure::SpaceClaim;
use crate::evict::{BlockKey, BlockTraits, Policy};
use crate::id::{Tier, Timestamp};
use crate::index::command::DropCause;

/// Maximum number of promotions to the GPU in flight: enough to keep a link busy, few enough to
/// bound a reader's delay and the extra bytes in DRAM. As many blocks may be leaving the GPU: its
/// memory has that many slots beyond its capacity.
pub const GPU_PROMOTIONS_MAX: usize = 8;

/// Slots of the slab scanned in one call when the GPU is lost: about a millisecond of the task that
/// owns the book if each holds a GPU block.
pub const GPU_LOSS_SLOTS_MAX: usize = 1024;

/// Policy of an absent tier.
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
    /// The request's blocks (tail first) that may be promoted, with the time since their previous
    /// use. Selects from the head on, up to the in-flight limit, and returns them tail first.
    pub(super) fn gpu_candidates(&self, blocks: &[BlockKey], now: Timestamp) -> Vec<(BlockKey, u64)> {
        if !self.is_open(Tier::Gpu) {
            return Vec::new();
        }
        let again = blocks.iter().rev().filter_map(|&key| {
            let entry = self.slab.get(key).filter(|_| self.may_promote_to_gpu(key))?;
            entry.last_use.map(|_| (key, entry.age_us(now)))
        });
        let promotions_left = self.gpu_residency.promotions_left(self.tiers.gpu.stats.blocks);
        let mut again: Vec<_> = again.take(promotions_left).collect();
        again.reverse();
        again
    }

    /// Whether the block is in DRAM, idle, unheld, and not needed by a queued request, which reads
    /// from DRAM.
    fn may_promote_to_gpu(&self, key: BlockKey) -> bool {
        self.slab.get(key).is_some_and(|entry| {
            let is_there =
                entry.assigned_tier == Some(Tier::Dram) && entry.copies.dram && entry.moving.is_none();
            is_there && !entry.held() && entry.queue_position.is_none()
        })
    }

    /// Promotes a block from DRAM to GPU, if there is space or a victim that is worth less.
    /// `gap_us` is the time between its last two uses.
    pub(super) fn promote_to_gpu(&mut self, key: BlockKey, gap_us: u64, now: Timestamp) {
        if !self.may_promote_to_gpu(key) {
            return;
        }
        let Some(entry) = self.slab.get(key) else { return };
        let (tenant, (cost, _)) = (entry.meta.tenant, self.cost(entry, Tier::Gpu));
        let (limits, used) = (self.tiers.gpu.limits, self.tiers.gpu.used);
        let victim = if limits.goal(used, cost).is_none() {
            None
        } else {
            let victim = self.victim(Tier::Gpu, SpaceClaim::gpu_promotion(tenant), now);
            let Some((victim, gives)) = victim.and_then(|key| Some((key, self.slab.get(key)?))) else {
                return;
            };
            let fits = limits.fits(used.saturating_sub(self.cost(gives, Tier::Gpu).0), cost);
            if !fits || gives.age_us(now) <= gap_us {
                return;
            }
            Some(victim)
        };
        // Leave DRAM first: the victim from the GPU takes this space.
        self.discharge(key);
        if let Some(victim) = victim {
            self.demote_from_gpu(victim, RemovalReason::Demoted, now);
        }
        self.charge(key, Tier::Gpu);
        self.tiers.gpu.stats.promoted_blocks += 1;
        self.notify_policy(key, PolicyEvent::MovedIn, now);
        self.reconcile(key);
    }

    /// Demotes a block from GPU to DRAM, to SSD if DRAM has no victim, or drops it if SSD has none
    /// either.
    pub(super) fn demote_from_gpu(&mut self, key: BlockKey, why: RemovalReason, now: Timestamp) {
        if self.drop_if_invalidated(key) {
            return;
        }
        let Some(entry) = self.slab.get(key) else { return };
        let claim = SpaceClaim::demoted(entry.meta.tenant, entry.order());
        let (charge, category, age_us) = (entry.meta.charge, entry.meta.traits.category, entry.age_us(now));
        self.discharge(key);
        let slots = [(Tier::Dram, charge.dram), (Tier::Ssd, charge.ssd)];
        let takes =
            |book: &Book, tier| if tier == Tier::Ssd { book.ssd_accepts() } else { book.is_open(tier) };
        let to =
            slots.into_iter().find(|&(tier, slot)| takes(self, tier) && self.reserve(tier, slot, claim, now));
        let why = if to.is_none() && why == RemovalReason::Demoted { RemovalReason::Dropped } else { why };
        self.tiers.gpu.numbers.record_removal(
            category,
            why,
            (why != RemovalReason::Failed).then_some(age_us),
        );
        let Some((to, _)) = to else {
            self.tiers.gpu.stats.dropped_blocks += 1;
            let cause = if why == RemovalReason::Failed { DropCause::Failed } else { DropCause::Capacity };
            return self.drop_block(key, cause);
        };
        self.tiers.gpu.stats.demoted_blocks += u64::from(why == RemovalReason::Demoted);
        self.charge(key, to);
        // A leased block enters its policy at release.
        if self.slab.get(key).is_some_and(|entry| entry.leases == 0) {
            self.notify_policy(key, PolicyEvent::MovedIn, now);
        }
        self.reconcile(key);
    }

    /// Handles the loss of the GPU and all its bytes. Blocks with other copies, or being read from
    /// the GPU, are assigned to DRAM; the others are dropped. Scans [`GPU_LOSS_SLOTS_MAX`] slots a
    /// call and returns `true` while slots remain.
    ///
    /// Moves in flight end by themselves. Promotions stay disabled until [`Self::set_admitting`],
    /// which must wait for the end of this scan.
    pub fn lose_gpu(&mut self, now: Timestamp) -> bool {
        self.set_admitting(Tier::Gpu, false);
        for place in self.gpu_residency.next_lost_slots(self.slab.slot_count()) {
            self.lose_block(BlockKey(u32::try_from(place).unwrap_or(u32::MAX)), now);
        }
        self.gpu_residency.is_scanning_loss()
    }

    fn lose_block(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key) else { return };
        let (place, moving) = (entry.assigned_tier, entry.moving);
        if place != Some(Tier::Gpu) && !entry.copies.gpu {
            return;
        }
        if place == Some(Tier::Gpu) && (entry.copies.dram || moving == Some(Tier::Dram)) {
            self.demote_from_gpu(key, RemovalReason::Failed, now);
        }
        // Only after `demote_from_gpu` updated the account, which counts missing copies.
        let Some(entry) = self.slab.get_mut(key) else { return };
        let is_there =
            !entry.copies.dram && !entry.copies.ssd && moving.is_none() && entry.assigned_tier.is_some();
        if is_there {
            self.count_removal(key, RemovalReason::Failed);
            // Dropping the block frees its copy.
            return self.drop_block(key, DropCause::Failed);
        }
        if std::mem::take(&mut entry.copies.gpu) {
            let (hash, generation) = (entry.meta.hash, entry.generation);
            self.actions.push_drop(Action::DropGpu { key, hash, generation });
        }
    }
}
