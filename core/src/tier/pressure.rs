//! Who gives way: making room in a tier, demoting, dropping, promoting from SSD (`lift` has the GPU).
//!
//! Which tenant gives way is in `share`; of its blocks the policy names the victim. Held blocks stand outside its order,
//! and so do those that are pinned softly and those that waiting requests need. A tenant's own limit is in `quota`.

use super::book::{Book, slot_bytes};
use super::entry::{Entry, Order};
use super::numbers::Left;
use super::order::Told;
use super::save::RefusedBy;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{TenantId, Tier, Timestamp};
use crate::index::command::DropCause;

/// The place of every block that is pinned softly among those of waiting requests: behind all of them, and before what
/// neither is.
pub(super) const PINNED_PLACE: u32 = u32::MAX - 1;

/// Who wants room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// Whose block is to come: who has no more in the tier gives it nothing.
    pub(super) tenant: TenantId,
    /// Blocks of the tenant's own waiting requests with a place before this one do not give way to it.
    pub(super) yields_to: u32,
    /// Nor do those of other tenants with a place before this one. Who has more in the tier gives also what it waits for:
    /// a window orders what its own tenant gives, and keeps room from nobody who has less.
    pub(super) others_yield_to: u32,
}

impl Claim {
    /// Of a request under way: all blocks of waiting requests give way to it.
    pub(super) fn running(tenant: TenantId) -> Claim {
        Claim { tenant, yields_to: 0, others_yield_to: 0 }
    }

    /// Of a block that leaves the tier above: what nobody waits for leaves before what its tenant waits for, and that
    /// from the tail on; and before either what nobody pinned.
    pub(super) fn demoted(tenant: TenantId, order: Order) -> Claim {
        let yields_to = match order {
            Order::Window(near) => near,
            Order::Pinned(_) => PINNED_PLACE,
            Order::Policy => u32::MAX,
        };
        Claim { tenant, yields_to, others_yield_to: 0 }
    }

    /// Of a block with this place that nobody asked for yet: only what is needed later gives way, whoever needs it.
    pub(super) fn waiting(tenant: TenantId, near: u32) -> Claim {
        Claim { tenant, yields_to: near, others_yield_to: near }
    }

    /// Of a block that comes up since it was used again: nothing gives way that somebody waits for or pinned.
    pub(super) fn lifted(tenant: TenantId) -> Claim {
        Claim { tenant, yields_to: u32::MAX, others_yield_to: u32::MAX }
    }
}

/// What comes in only if it is worth what leaves for it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Weighed {
    /// A block that a request brings.
    New(BlockTraits),
    /// One that leaves the tier above.
    Down(BlockTraits),
}

/// Blocks that one call for room evicts at most, beyond what it needs itself: between the marks of a large tier may be a
/// hundred thousand, and everybody would wait for them.
pub const EVICTED_BLOCKS_MAX: usize = 1024;

impl Book {
    /// Makes room for a slot of `slot` bytes, evicting by the marks. `false` when too much is held.
    pub(super) fn reserve(&mut self, tier: Tier, slot: u32, claim: Claim, now: Timestamp) -> bool {
        self.make_room(tier, slot, claim, None, now).is_ok()
    }

    /// The same for a block that comes in only if it is worth what leaves for it, where `weighed` is what is known of it:
    /// no more leaves than is worth less, so that a stretch between the marks does not drive out what is worth more.
    pub(super) fn make_room(
        &mut self,
        tier: Tier,
        slot: u32,
        claim: Claim,
        weighed: Option<Weighed>,
        now: Timestamp,
    ) -> Result<(), RefusedBy> {
        let shelf = self.shelf(tier);
        let (limits, cost) = (shelf.limits, shelf.limits.capacity.cost(slot));
        if cost > limits.capacity.amount() {
            return Err(RefusedBy::Full);
        }
        if let Some(goal) = limits.goal(shelf.used, cost) {
            self.sweep_void(|book| book.shelf(tier).used.saturating_add(cost) <= goal);
        }
        // What was void may have been enough.
        if let Some(goal) = limits.goal(self.shelf(tier).used, cost) {
            let mut evicted = 0;
            loop {
                let used = self.shelf(tier).used;
                let is_enough = used.saturating_add(cost) <= goal;
                let is_stretch = evicted >= EVICTED_BLOCKS_MAX && limits.fits(used, cost);
                if is_enough || is_stretch {
                    break;
                }
                let Some(victim) = self.victim(tier, claim, now) else { break };
                // What is wanted goes for a stretch only where it goes to SSD.
                let is_lost = tier == Tier::Dram && self.open(Tier::Ssd) && !self.ssd_takes();
                let is_wanted = self.slab.get(victim).is_some_and(|entry| entry.order() != Order::Policy);
                if is_lost && is_wanted && limits.fits(used, cost) {
                    break;
                }
                if weighed.is_some_and(|weighed| !self.gives_way(tier, victim, claim, weighed, now)) {
                    let is_made = evicted > 0 && limits.fits(used, cost);
                    return if is_made { Ok(()) } else { Err(RefusedBy::Worth) };
                }
                self.evict(tier, victim, now);
                evicted += 1;
            }
        }
        if limits.fits(self.shelf(tier).used, cost) { Ok(()) } else { Err(RefusedBy::Full) }
    }

    /// Whether the policy lets a block go for one that is weighed. It is not asked where more than it decides: of what is pinned or
    /// waited for, and of what another tenant has to give.
    fn gives_way(
        &mut self,
        tier: Tier,
        victim: BlockKey,
        claim: Claim,
        weighed: Weighed,
        now: Timestamp,
    ) -> bool {
        if self.slab.is_void(victim) {
            return true;
        }
        let Some(entry) = self.slab.get(victim) else { return true };
        let (order, share) = (entry.order(), entry.share);
        let shelf = self.shelf_mut(tier);
        let is_own = share == shelf.shares.row(claim.tenant);
        if order != Order::Policy || !is_own {
            return true;
        }
        match weighed {
            Weighed::New(newcomer) => shelf.policy.admits(newcomer, victim, now),
            // Between blocks of one tenant: none leaves for one that is worth less.
            Weighed::Down(mover) => {
                let chance = shelf.policy.prospect(mover, Some(victim), now);
                chance > 0.0 && chance >= self.reuse_min
            }
        }
    }

    fn evict(&mut self, tier: Tier, victim: BlockKey, now: Timestamp) {
        if self.drop_if_void(victim) {
            return;
        }
        let is_above = tier == Tier::Dram && self.open(Tier::Ssd);
        if is_above && self.ssd_takes() {
            self.demote(victim, true, now);
        } else {
            let stats = &mut self.shelf_mut(tier).stats;
            stats.dropped_blocks += 1;
            stats.unwritten_blocks += u64::from(is_above);
            self.count_evicted(victim, Left::Dropped, now);
            self.drop_block(victim, DropCause::Room);
        }
    }

    pub(super) fn count_evicted(&mut self, key: BlockKey, why: Left, now: Timestamp) {
        let Some(entry) = self.slab.get(key) else { return };
        let (Some(tier), category, age_us) = (entry.place, entry.meta.traits.category, entry.age_us(now))
        else {
            return;
        };
        self.shelf_mut(tier).numbers.left(category, why, Some(age_us));
    }

    /// Of the tenant that gives way: the policy's victim, while it has one; then of the blocks that are pinned softly the
    /// longest unused, and then of those that waiting requests need the furthest from the head.
    pub(super) fn victim(&mut self, tier: Tier, claim: Claim, now: Timestamp) -> Option<BlockKey> {
        let slab = &self.slab;
        let spared = |key: BlockKey| slab.get(key).is_none_or(Entry::parked);
        // Field by field: the slab is looked at meanwhile.
        let shelf = match tier {
            Tier::Ssd => &mut self.ssd,
            Tier::Dram => &mut self.dram,
            Tier::Gpu => &mut self.gpu,
        };
        let taker = shelf.shares.row(claim.tenant);
        if !shelf.shares.are_many() {
            let named = shelf.policy.victim(now, &spared);
            return named.or_else(|| shelf.shares.last_resort(taker, claim));
        }
        let giver = shelf.shares.giver(taker, claim)?;
        let named = shelf.policy.victim(now, &spared);
        let of_giver = named.filter(|key| slab.get(*key).is_some_and(|entry| entry.share == giver));
        of_giver.or_else(|| shelf.shares.coldest(giver, taker, claim))
    }

    /// DRAM to SSD; dropped when nothing there may give way, or, where that is weighed, it is not worth being written.
    pub(super) fn demote(&mut self, key: BlockKey, weighs: bool, now: Timestamp) {
        if self.drop_if_void(key) {
            return;
        }
        let Some(entry) = self.slab.get(key) else { return };
        let (order, traits, tenant) = (entry.order(), entry.meta.traits, entry.meta.tenant);
        let claim = Claim::demoted(tenant, order);
        let (slot, category, age_us) = (entry.meta.charge.ssd, traits.category, entry.age_us(now));
        self.discharge(key);
        // What a waiting request needs or somebody pinned is wanted, whatever the policy thinks of it; and while pins are
        // being marked nobody knows who did.
        let is_anybodys = weighs && order == Order::Policy && !self.pins.is_beginning();
        let weighed = is_anybodys.then_some(Weighed::Down(traits));
        let room = if is_anybodys && !self.is_worth_writing(tenant, traits, now) {
            Err(RefusedBy::Worth)
        } else {
            self.make_room(Tier::Ssd, slot, claim, weighed, now)
        };
        self.ssd.stats.turned_away_blocks += u64::from(room == Err(RefusedBy::Worth));
        let fits = room.is_ok();
        let why = if fits { Left::Demoted } else { Left::Dropped };
        self.dram.numbers.left(category, why, Some(age_us));
        if fits {
            self.dram.stats.demoted_blocks += 1;
            self.charge(key, Tier::Ssd);
            self.tell(key, Told::MovedIn, now);
            self.settle(key);
        } else {
            self.dram.stats.dropped_blocks += 1;
            self.drop_block(key, DropCause::Room);
        }
    }

    /// Whether a block is likely enough to be used on SSD, even if nobody had to leave for it. Policies do not tell tenants
    /// apart, so of several only the one that has most there is asked: what it does may not keep out who has less.
    fn is_worth_writing(&mut self, tenant: TenantId, traits: BlockTraits, now: Timestamp) -> bool {
        if self.reuse_min <= 0.0 || !self.ssd.shares.has_most(self.ssd.shares.row(tenant)) {
            return true;
        }
        self.ssd.policy.prospect(traits, None, now) >= self.reuse_min
    }

    /// SSD to DRAM, if something there may give way. The block keeps its place otherwise.
    ///
    /// The caller ranks it: a leased block enters the policy at release.
    pub(super) fn promote(&mut self, key: BlockKey, now: Timestamp) -> bool {
        let Some(meta) = self.meta(key) else { return false };
        let (slot, claim) = (meta.charge.dram, Claim::running(meta.tenant));
        if !self.can_take(slot, claim, now) {
            return false;
        }
        // Leave the SSD first: whoever is demoted for this block takes its room there.
        self.discharge(key);
        if !self.reserve(Tier::Dram, slot, claim, now) {
            // Not reachable while `can_take` is right; the block goes back to where its bytes are.
            self.charge(key, Tier::Ssd);
            self.tell(key, Told::MovedIn, now);
            return false;
        }
        self.charge(key, Tier::Dram);
        self.dram.stats.promoted_blocks += 1;
        self.settle(key);
        true
    }

    /// Whether DRAM has room for the slot, or would after one eviction.
    fn can_take(&mut self, slot: u32, claim: Claim, now: Timestamp) -> bool {
        let (limits, used) = (self.dram.limits, self.dram.used);
        let cost = limits.capacity.cost(slot);
        if !self.open(Tier::Dram) || limits.fits(used, cost) {
            return self.open(Tier::Dram);
        }
        let Some(victim) = self.victim(Tier::Dram, claim, now) else { return false };
        let Some(meta) = self.meta(victim) else { return false };
        let freed = limits.capacity.cost(slot_bytes(&meta, Tier::Dram));
        limits.fits(used.saturating_sub(freed), cost)
    }

    /// Ends a block: out of the accounts, unknown to readers, its copies dropped.
    pub(super) fn drop_block(&mut self, key: BlockKey, cause: DropCause) {
        self.discharge(key);
        let is_void = self.slab.is_void(key);
        let Some(entry) = self.slab.get_mut(key) else { return };
        let meta = entry.meta;
        // What is announced of the hash is a block of other weights, if there is one.
        if let Some(tier) = entry.announced.take().filter(|_| !is_void) {
            self.changes.dropped(meta.hash, tier, cause);
        }
        self.discharge_tenant(meta.tenant, meta.charge.frame);
        self.slab.forget_hash(key);
        self.settle(key);
    }
}
