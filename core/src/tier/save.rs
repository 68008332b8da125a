//! New blocks come in: what is wanted of an offer, and the end of each write.

use super::book::Book;
use super::entry::Meta;
use super::lease::Passed;
use super::pressure::{Claim, Weighed};
use super::{Asker, Charge, LeasesFull};
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, Tier, Timestamp};

/// Answer for one offered block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// Room is reserved under this key; end it with [`Book::commit`] or [`Book::abort`]. Run the drops
    /// of [`Book::next_action`] before keeping bytes under it: the key may have been another block's.
    Wanted(BlockKey),
    /// It is here for this tenant, or another save of the tenant is writing it: no bytes needed.
    Present,
    /// It cannot be taken.
    Refused(RefusedBy),
}

/// Why an offered block is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusedBy {
    /// The tenant's quota, and nothing of the tenant may leave.
    Quota,
    /// Every block that could give way is held or of a tenant that has no more, or no tier admits new blocks; or another
    /// tenant has a block of this hash.
    Full,
    /// What would have to leave is worth more, as far as the policy can tell. There is no tier below to take either.
    Worth,
}

/// Consecutive blocks of a prefix, offered in one save.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Hash before the first one.
    pub parent: Option<BlockHash>,
    /// Offset of the first one, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks, in prefix order.
    pub hashes: &'a [BlockHash],
    /// What each of them costs at most.
    pub charge: Charge,
}

impl Book {
    /// Leases what is present, reserves room for the rest.
    ///
    /// # Errors
    /// [`LeasesFull`] when the lease is new and the limit is reached.
    pub fn offer(
        &mut self,
        asker: Asker,
        offer: Offer<'_>,
        now: Timestamp,
    ) -> Result<Vec<Offered>, LeasesFull> {
        self.open_lease(asker, now)?;
        // Present blocks are held first: making room for an early block must not drop a later one.
        let present: Vec<_> =
            offer.hashes.iter().filter_map(|hash| self.readable(asker.tenant, hash)).collect();
        self.hold_found(asker.lease, &present);
        // Nor behind what was refused in an earlier offer of the same lease.
        let is_behind = offer.parent.is_some_and(|parent| self.was_passed_last(asker, &parent));
        let (mut parent, mut refused) = (offer.parent, is_behind.then_some(RefusedBy::Worth));
        let mut answers = Vec::with_capacity(offer.hashes.len());
        for (&hash, position) in offer.hashes.iter().zip(0u32..) {
            let offset_blocks = offer.first_offset_blocks.saturating_add(position);
            let traits = BlockTraits {
                category: asker.category,
                offset_blocks,
                bytes: offer.charge.frame,
                // Only whole blocks are saved.
                is_partial: false,
                fingerprint: hash.fingerprint(),
            };
            let meta = Meta { hash, parent, tenant: asker.tenant, traits, charge: offer.charge };
            answers.push(self.offer_block(asker, meta, &mut refused, now));
            parent = Some(hash);
        }
        Ok(answers)
    }

    fn offer_block(
        &mut self,
        asker: Asker,
        meta: Meta,
        refused: &mut Option<RefusedBy>,
        now: Timestamp,
    ) -> Offered {
        match self.owner(&meta.hash) {
            Some(owner) if owner == meta.tenant => return Offered::Present,
            // There is one block of a hash, and nobody is told of another tenant's. What comes behind it could not be
            // reached, wanted or not.
            Some(_) => {
                *refused = Some(RefusedBy::Full);
                return Offered::Refused(RefusedBy::Full);
            }
            None => {}
        }
        // What stood in the way of one block of an offer stands in the way of the later ones, which cost
        // the same: an offer only ever takes room. Nor are they worth more, for who asks for them asks for the first;
        // unless somebody wants just them.
        let tier = match *refused {
            Some(RefusedBy::Worth) if self.is_wanted(&meta.hash) => self.admissible(meta, now),
            Some(by) => Err(by),
            None => self.admissible(meta, now),
        };
        let tier = match tier {
            Ok(tier) => tier,
            Err(by) => {
                *refused = Some(by);
                if by == RefusedBy::Worth {
                    self.dram.stats.turned_away_blocks += 1;
                    let passed = Passed { hash: meta.hash, tenant: meta.tenant, traits: meta.traits };
                    self.pass(asker.lease, passed);
                }
                return Offered::Refused(by);
            }
        };
        let key = self.add(meta, tier);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.writing = true;
            entry.writer = Some(asker.lease);
        }
        self.hold(asker.lease, key);
        Offered::Wanted(key)
    }

    /// Room for a new block: in DRAM, or on SSD when nothing in DRAM may give way.
    fn admit(&mut self, meta: Meta, now: Timestamp) -> Result<Tier, RefusedBy> {
        let (claim, charge) = (Claim::running(meta.tenant), meta.charge);
        let mut refused = RefusedBy::Full;
        for (tier, slot) in [(Tier::Dram, charge.dram), (Tier::Ssd, charge.ssd)] {
            if self.open(tier) {
                match self.make_room(tier, slot, claim, self.weighed(meta), now) {
                    Ok(()) => return Ok(tier),
                    Err(by) => refused = by,
                }
            }
        }
        Err(refused)
    }

    /// What a new block is weighed by against what would leave for it. Not with an SSD below that takes it; nor is
    /// one weighed that somebody wants.
    fn weighed(&self, meta: Meta) -> Option<Weighed> {
        (!self.is_wanted(&meta.hash) && !self.ssd_takes()).then_some(Weighed::New(meta.traits))
    }

    /// It is pinned, or a request waits for it.
    fn is_wanted(&self, hash: &BlockHash) -> bool {
        self.pins.kind(hash).is_some() || self.window.near(hash).is_some()
    }

    fn admissible(&mut self, meta: Meta, now: Timestamp) -> Result<Tier, RefusedBy> {
        if let Some(&quota) = self.quotas.get(&meta.tenant)
            && !self.shrink_tenant(meta.tenant, quota, u64::from(meta.charge.frame))
        {
            return Err(RefusedBy::Quota);
        }
        self.admit(meta, now)
    }

    /// The bytes of a wanted block are in DRAM and verified: from now on it is readable. `charge` is what
    /// it really costs, at most what was offered; the difference is free again.
    ///
    /// Of a block that was offered under earlier weights nothing is kept: its bytes are dropped at once.
    pub fn commit(&mut self, key: BlockKey, charge: Charge, now: Timestamp) {
        let is_void = self.slab.is_void(key);
        if is_void {
            self.unhold(key);
        }
        let Some(entry) = self.slab.get_mut(key) else { return };
        if !std::mem::take(&mut entry.writing) {
            return;
        }
        entry.writer = None;
        if is_void {
            entry.copies.dram = true;
            return self.drop_void(key);
        }
        self.recharge(key, charge);
        let Some(entry) = self.slab.get_mut(key) else { return };
        entry.copies.dram = true;
        entry.announced = Some(Tier::Dram);
        let (meta, leases) = (entry.meta, entry.leases);
        self.changes.stored(meta.parent, meta.hash, Tier::Dram);
        // A leased block enters its policy at release, tail before head.
        if leases == 0 {
            self.rank(key, now);
        }
        self.settle(key);
        if leases == 0 {
            self.enforce_quota(meta.tenant);
        }
    }

    fn recharge(&mut self, key: BlockKey, charge: Charge) {
        let Some(entry) = self.slab.get(key) else { return };
        let (tenant, place, offered) = (entry.meta.tenant, entry.place, entry.meta.charge);
        debug_assert!(
            charge.frame <= offered.frame && charge.dram <= offered.dram && charge.ssd <= offered.ssd,
            "{charge:?} is more than {offered:?}"
        );
        self.discharge(key);
        self.discharge_tenant(tenant, offered.frame);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.meta.charge = charge;
            entry.meta.traits.bytes = charge.frame;
        }
        self.charge_tenant(tenant, charge.frame);
        if let Some(tier) = place {
            self.charge(key, tier);
        }
    }

    /// The bytes of a wanted block did not come, or were wrong.
    pub fn abort(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.writing) else { return };
        let meta = entry.meta;
        self.unhold(key);
        self.discharge(key);
        self.discharge_tenant(meta.tenant, meta.charge.frame);
        self.slab.remove(key);
    }
}
