//! Eviction: making room in a tier, demoting, dropping, and promoting from SSD (`gpu` has the GPU).
//!
//! `share` selects the tenant; the policy names the victim among its blocks. Held, softly pinned
//! and needed blocks are outside the policy's order. A tenant's own limit is in `quota`.

use super::book::{Book, slot_bytes};
use super::counters::RemovalReason;
use super::entry::{Entry, EvictionOrder};
use super::order::PolicyEvent;
use super::save::RefusalReason;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{TenantId, Tier, Timestamp};
use crate::index::command::DropCause;

/// Queue position of every softly pinned block: after all needed blocks, before blocks that are
/// neither.
pub(super) const PINNED_POSITION: u32 = u32::MAX - 1;

/// A claim for space, with its rights to evict.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceClaim {
    /// Tenant of the incoming block; a tenant with no larger share gives it no space.
    pub(super) tenant: TenantId,
    /// The tenant's own needed blocks before this queue position may not be evicted.
    pub(super) own_min_position: u32,
    /// Needed blocks of other tenants before this position may not be evicted. A tenant with a
    /// larger share also gives up needed blocks: a window only orders its own tenant's evictions.
    pub(super) others_min_position: u32,
}

impl SpaceClaim {
    /// Claim of a running request: all needed blocks may be evicted.
    pub(super) fn running(tenant: TenantId) -> SpaceClaim {
        SpaceClaim { tenant, own_min_position: 0, others_min_position: 0 }
    }

    /// Claim of a block demoted from the tier above. Unneeded blocks are evicted before the
    /// tenant's needed blocks (from the tail on), and unpinned blocks before either.
    pub(super) fn demoted(tenant: TenantId, order: EvictionOrder) -> SpaceClaim {
        let own_min_position = match order {
            EvictionOrder::Window(near) => near,
            EvictionOrder::Pinned(_) => PINNED_POSITION,
            EvictionOrder::Policy => u32::MAX,
        };
        SpaceClaim { tenant, own_min_position, others_min_position: 0 }
    }

    /// Claim of a prefetch at this position: only blocks needed later may be evicted, whatever
    /// their tenant.
    pub(super) fn prefetch(tenant: TenantId, near: u32) -> SpaceClaim {
        SpaceClaim { tenant, own_min_position: near, others_min_position: near }
    }

    /// Claim of a promotion to the GPU: no needed or pinned block may be evicted.
    pub(super) fn gpu_promotion(tenant: TenantId) -> SpaceClaim {
        SpaceClaim { tenant, own_min_position: u32::MAX, others_min_position: u32::MAX }
    }
}

/// A block that enters only if it is worth its victim.
#[derive(Clone, Copy, Debug)]
pub(super) enum AdmissionCandidate {
    /// A new block of a request.
    New(BlockTraits),
    /// A block demoted from the tier above.
    Demoted(BlockTraits),
}

/// Blocks that one call evicts at most beyond its own need. The range between the watermarks of a
/// large tier may hold a hundred thousand blocks, and every reader would wait for them.
pub const EVICTED_BLOCKS_MAX: usize = 1024;

impl Book {
    /// Makes room for a slot of `slot` bytes, evicting by the watermarks. Returns `false` if too
    /// much is held.
    pub(super) fn reserve(&mut self, tier: Tier, slot: u32, claim: SpaceClaim, now: Timestamp) -> bool {
        self.make_room(tier, slot, claim, None, now).is_ok()
    }

    /// Like [`Self::reserve`], but a `weighed` block enters only if it is worth its victims. Only
    /// blocks worth less are evicted, so the range between the watermarks does not cost better
    /// blocks.
    pub(super) fn make_room(
        &mut self,
        tier: Tier,
        slot: u32,
        claim: SpaceClaim,
        weighed: Option<AdmissionCandidate>,
        now: Timestamp,
    ) -> Result<(), RefusalReason> {
        let state = self.tier_state(tier);
        let (limits, cost) = (state.limits, state.limits.capacity.cost(slot));
        if cost > limits.capacity.amount() {
            return Err(RefusalReason::Full);
        }
        if let Some(goal) = limits.goal(state.used, cost) {
            self.sweep_invalidated(|book| book.tier_state(tier).used.saturating_add(cost) <= goal);
        }
        // The sweep may have freed enough.
        if let Some(goal) = limits.goal(self.tier_state(tier).used, cost) {
            let mut evicted = 0;
            loop {
                let used = self.tier_state(tier).used;
                let is_enough = used.saturating_add(cost) <= goal;
                let is_batch_done = evicted >= EVICTED_BLOCKS_MAX && limits.fits(used, cost);
                if is_enough || is_batch_done {
                    break;
                }
                let Some(victim) = self.victim(tier, claim, now) else { break };
                // Beyond the own need, a needed block is evicted only if SSD accepts it.
                let is_lost = tier == Tier::Dram && self.is_open(Tier::Ssd) && !self.ssd_accepts();
                let is_wanted =
                    self.slab.get(victim).is_some_and(|entry| entry.order() != EvictionOrder::Policy);
                if is_lost && is_wanted && limits.fits(used, cost) {
                    break;
                }
                if weighed.is_some_and(|weighed| !self.may_evict_for(tier, victim, claim, weighed, now)) {
                    let is_made = evicted > 0 && limits.fits(used, cost);
                    return if is_made { Ok(()) } else { Err(RefusalReason::LowValue) };
                }
                self.evict(tier, victim, now);
                evicted += 1;
            }
        }
        if limits.fits(self.tier_state(tier).used, cost) { Ok(()) } else { Err(RefusalReason::Full) }
    }

    /// Whether the policy prefers the candidate to the victim. The policy is not asked about pinned
    /// or needed victims, or victims of another tenant; those may always go.
    fn may_evict_for(
        &mut self,
        tier: Tier,
        victim: BlockKey,
        claim: SpaceClaim,
        weighed: AdmissionCandidate,
        now: Timestamp,
    ) -> bool {
        if self.slab.is_invalidated(victim) {
            return true;
        }
        let Some(entry) = self.slab.get(victim) else { return true };
        let (order, share) = (entry.order(), entry.charged_tenant);
        let state = self.tier_state_mut(tier);
        let is_own = share == state.shares.charged_tenant(claim.tenant);
        if order != EvictionOrder::Policy || !is_own {
            return true;
        }
        match weighed {
            AdmissionCandidate::New(newcomer) => state.policy.admits(newcomer, victim, now),
            // Between blocks of one tenant: a block is not evicted for one that is worth less.
            AdmissionCandidate::Demoted(mover) => {
                let chance = state.policy.reuse_prob_if_moved_in(mover, Some(victim), now);
                chance > 0.0 && chance >= self.ssd_writes.reuse_min()
            }
        }
    }

    fn evict(&mut self, tier: Tier, victim: BlockKey, now: Timestamp) {
        if self.drop_if_invalidated(victim) {
            return;
        }
        let is_above = tier == Tier::Dram && self.is_open(Tier::Ssd);
        if is_above && self.ssd_accepts() {
            self.demote(victim, true, now);
        } else {
            let stats = &mut self.tier_state_mut(tier).stats;
            stats.dropped_blocks += 1;
            stats.unwritten_blocks += u64::from(is_above);
            self.count_evicted(victim, RemovalReason::Dropped, now);
            self.drop_block(victim, DropCause::Capacity);
        }
    }

    pub(super) fn count_evicted(&mut self, key: BlockKey, why: RemovalReason, now: Timestamp) {
        let Some(entry) = self.slab.get(key) else { return };
        let (Some(tier), category, age_us) =
            (entry.assigned_tier, entry.meta.traits.category, entry.age_us(now))
        else {
            return;
        };
        self.tier_state_mut(tier).numbers.record_removal(category, why, Some(age_us));
    }

    /// The next victim, of the tenant that must evict: the policy's victim; then the longest unused
    /// softly pinned block; then the needed block furthest from the head.
    pub(super) fn victim(&mut self, tier: Tier, claim: SpaceClaim, now: Timestamp) -> Option<BlockKey> {
        let slab = &self.slab;
        let spared = |key: BlockKey| slab.get(key).is_none_or(Entry::parked);
        let state = self.tiers.state_mut(tier);
        let taker = state.shares.charged_tenant(claim.tenant);
        if !state.shares.is_multi_tenant() {
            let named = state.policy.victim(now, &spared);
            return named.or_else(|| state.shares.last_resort(taker, claim));
        }
        let giver = state.shares.victim_tenant(taker, claim)?;
        let named = state.policy.victim(now, &spared);
        let of_giver = named.filter(|key| slab.get(*key).is_some_and(|entry| entry.charged_tenant == giver));
        of_giver.or_else(|| state.shares.coldest(giver, taker, claim))
    }

    /// Demotes a block from DRAM to SSD. Drops it if SSD has no victim, or if `weighs` is set and
    /// it is not worth the write.
    pub(super) fn demote(&mut self, key: BlockKey, weighs: bool, now: Timestamp) {
        if self.drop_if_invalidated(key) {
            return;
        }
        let Some(entry) = self.slab.get(key) else { return };
        let (order, traits, tenant) = (entry.order(), entry.meta.traits, entry.meta.tenant);
        let claim = SpaceClaim::demoted(tenant, order);
        let (slot, category, age_us) = (entry.meta.charge.ssd, traits.category, entry.age_us(now));
        self.discharge(key);
        // A needed or pinned block is always worth writing. While pins are being applied, any block
        // may be pinned.
        let is_unprotected = weighs && order == EvictionOrder::Policy && !self.pins.has_pending_begins();
        let weighed = is_unprotected.then_some(AdmissionCandidate::Demoted(traits));
        let room = if is_unprotected && !self.is_worth_writing(tenant, traits, now) {
            Err(RefusalReason::LowValue)
        } else {
            self.make_room(Tier::Ssd, slot, claim, weighed, now)
        };
        self.tiers.ssd.stats.not_admitted_blocks += u64::from(room == Err(RefusalReason::LowValue));
        let fits = room.is_ok();
        let why = if fits { RemovalReason::Demoted } else { RemovalReason::Dropped };
        self.tiers.dram.numbers.record_removal(category, why, Some(age_us));
        if fits {
            self.tiers.dram.stats.demoted_blocks += 1;
            self.charge(key, Tier::Ssd);
            self.notify_policy(key, PolicyEvent::MovedIn, now);
            self.reconcile(key);
        } else {
            self.tiers.dram.stats.dropped_blocks += 1;
            self.drop_block(key, DropCause::Capacity);
        }
    }

    /// Whether a block is likely enough to be used on SSD, even if it has no victim. Policies do
    /// not distinguish tenants, so with several tenants only the largest one is judged: its
    /// behaviour must not keep out smaller ones.
    fn is_worth_writing(&mut self, tenant: TenantId, traits: BlockTraits, now: Timestamp) -> bool {
        if self.ssd_writes.reuse_min() <= 0.0
            || !self.tiers.ssd.shares.has_largest_share(self.tiers.ssd.shares.charged_tenant(tenant))
        {
            return true;
        }
        self.tiers.ssd.policy.reuse_prob_if_moved_in(traits, None, now) >= self.ssd_writes.reuse_min()
    }

    /// Promotes a block from SSD to DRAM if there is space or a victim. Otherwise the block keeps
    /// its tier.
    ///
    /// The caller ranks it: a leased block enters the policy at release.
    pub(super) fn promote(&mut self, key: BlockKey, now: Timestamp) -> bool {
        let Some(meta) = self.meta(key) else { return false };
        let (slot, claim) = (meta.charge.dram, SpaceClaim::running(meta.tenant));
        if !self.dram_can_fit(slot, claim, now) {
            return false;
        }
        // Leave the SSD first: the demoted victim takes this space.
        self.discharge(key);
        if !self.reserve(Tier::Dram, slot, claim, now) {
            // Unreachable while `dram_can_fit` is right; the block returns to the tier of its
            // bytes.
            self.charge(key, Tier::Ssd);
            self.notify_policy(key, PolicyEvent::MovedIn, now);
            return false;
        }
        self.charge(key, Tier::Dram);
        self.tiers.dram.stats.promoted_blocks += 1;
        self.reconcile(key);
        true
    }

    /// Whether DRAM has space for the slot, or would after one eviction.
    fn dram_can_fit(&mut self, slot: u32, claim: SpaceClaim, now: Timestamp) -> bool {
        let (limits, used) = (self.tiers.dram.limits, self.tiers.dram.used);
        let cost = limits.capacity.cost(slot);
        if !self.is_open(Tier::Dram) || limits.fits(used, cost) {
            return self.is_open(Tier::Dram);
        }
        let Some(victim) = self.victim(Tier::Dram, claim, now) else { return false };
        let Some(meta) = self.meta(victim) else { return false };
        let freed = limits.capacity.cost(slot_bytes(&meta, Tier::Dram));
        limits.fits(used.saturating_sub(freed), cost)
    }

    /// Ends a block: removes it from the accounts and the hash table, and drops its copies.
    pub(super) fn drop_block(&mut self, key: BlockKey, cause: DropCause) {
        self.discharge(key);
        let is_void = self.slab.is_invalidated(key);
        let Some(entry) = self.slab.get_mut(key) else { return };
        let meta = entry.meta;
        // An announced block with this hash belongs to other weights.
        if let Some(tier) = entry.announced.take().filter(|_| !is_void) {
            self.changes.dropped(meta.hash, tier, cause);
        }
        self.tenants.discharge(meta.tenant, meta.charge.frame);
        self.slab.forget_hash(key);
        self.reconcile(key);
    }
}
