//! Save: the answer to an offer of new blocks, and the end of each write.

use super::book::Book;
use super::entry::Meta;
use super::lease_table::RejectedBlock;
use super::pressure::{AdmissionCandidate, SpaceClaim};
use super::{Charge, LeasesFull, Requester};
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, Tier, Timestamp};

/// Answer for one offered block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfferOutcome {
    /// Space is reserved under this key; end it with [`Book::commit`] or [`Book::abort`]. Run the
    /// drops of [`Book::next_action`] before storing bytes under it: the key may have belonged to
    /// another block.
    Wanted(BlockKey),
    /// The block is present for this tenant, or another save of the tenant is writing it: no bytes
    /// needed.
    Present,
    /// The block is refused.
    Refused(RefusalReason),
}

/// Why an offered block is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalReason {
    /// The tenant's quota is reached, and no block of the tenant may be evicted.
    Quota,
    /// Every possible victim is held or belongs to a tenant with no larger share; or no tier admits
    /// new blocks; or another tenant has a block with this hash.
    Full,
    /// The policy values the victim more, and there is no lower tier to take it.
    LowValue,
}

/// Consecutive blocks of a prefix, offered in one save.
#[derive(Clone, Copy, Debug)]
pub struct SaveOffer<'a> {
    /// Hash before the first one.
    pub parent: Option<BlockHash>,
    /// Offset of the first one, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks, in prefix order.
    pub hashes: &'a [BlockHash],
    /// Maximum cost of each block.
    pub charge: Charge,
}

impl Book {
    /// Leases the blocks that are present and reserves space for the others.
    ///
    /// # Errors
    /// [`LeasesFull`] when the lease is new and the limit is reached.
    pub fn offer(
        &mut self,
        asker: Requester,
        offer: SaveOffer<'_>,
        now: Timestamp,
    ) -> Result<Vec<OfferOutcome>, LeasesFull> {
        self.leases.open(asker, now)?;
        // Hold present blocks first: making room for an early block must not drop a later one.
        let present: Vec<_> =
            offer.hashes.iter().filter_map(|hash| self.readable(asker.tenant, hash)).collect();
        self.hold_found(asker.lease, &present);
        // Also refuse blocks that follow a refused block of an earlier offer by the same lease.
        let is_behind = offer.parent.is_some_and(|parent| self.was_last_rejected(asker, &parent));
        let (mut parent, mut refused) = (offer.parent, is_behind.then_some(RefusalReason::LowValue));
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
        asker: Requester,
        meta: Meta,
        refused: &mut Option<RefusalReason>,
        now: Timestamp,
    ) -> OfferOutcome {
        match self.owner_tenant(&meta.hash) {
            Some(owner) if owner == meta.tenant => return OfferOutcome::Present,
            // A hash has one block, and another tenant's block stays hidden. Blocks after it could
            // not be reached.
            Some(_) => {
                *refused = Some(RefusalReason::Full);
                return OfferOutcome::Refused(RefusalReason::Full);
            }
            None => {}
        }
        // An obstacle for one block of an offer also stops the later ones: they cost the same, and
        // an offer only takes space. They are not worth more either, because a fetch starts at the
        // first block, unless they are pinned or needed themselves.
        let tier = match *refused {
            Some(RefusalReason::LowValue) if self.is_pinned_or_queued(&meta.hash) => {
                self.admit_within_quota(meta, now)
            }
            Some(by) => Err(by),
            None => self.admit_within_quota(meta, now),
        };
        let tier = match tier {
            Ok(tier) => tier,
            Err(by) => {
                *refused = Some(by);
                if by == RefusalReason::LowValue {
                    self.tiers.dram.stats.not_admitted_blocks += 1;
                    let passed = RejectedBlock { hash: meta.hash, tenant: meta.tenant, traits: meta.traits };
                    self.leases.note_rejected(asker.lease, passed);
                }
                return OfferOutcome::Refused(by);
            }
        };
        let key = self.add(meta, tier);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.writing = true;
            entry.writer = Some(asker.lease);
        }
        self.hold(asker.lease, key);
        OfferOutcome::Wanted(key)
    }

    /// Makes room for a new block in DRAM, or on SSD if DRAM has no victim.
    fn admit(&mut self, meta: Meta, now: Timestamp) -> Result<Tier, RefusalReason> {
        let (claim, charge) = (SpaceClaim::running(meta.tenant), meta.charge);
        let mut refused = RefusalReason::Full;
        for (tier, slot) in [(Tier::Dram, charge.dram), (Tier::Ssd, charge.ssd)] {
            if self.is_open(tier) {
                match self.make_room(tier, slot, claim, self.admission_candidate(meta), now) {
                    Ok(()) => return Ok(tier),
                    Err(by) => refused = by,
                }
            }
        }
        Err(refused)
    }

    /// Candidate for the comparison with its victim. `None` skips the comparison: an SSD below
    /// accepts the victim, or the block is pinned or needed by a queued request.
    fn admission_candidate(&self, meta: Meta) -> Option<AdmissionCandidate> {
        (!self.is_pinned_or_queued(&meta.hash) && !self.ssd_accepts())
            .then_some(AdmissionCandidate::New(meta.traits))
    }

    /// Whether the block is pinned or a queued request needs it.
    fn is_pinned_or_queued(&self, hash: &BlockHash) -> bool {
        self.pins.kind(hash).is_some() || self.window.queue_position(hash).is_some()
    }

    fn admit_within_quota(&mut self, meta: Meta, now: Timestamp) -> Result<Tier, RefusalReason> {
        if let Some(quota) = self.tenants.quota(meta.tenant)
            && !self.shrink_tenant(meta.tenant, quota, u64::from(meta.charge.frame))
        {
            return Err(RefusalReason::Quota);
        }
        self.admit(meta, now)
    }

    /// Ends a write: the block's bytes are in DRAM and verified, so it becomes readable. `charge`
    /// is the real cost, at most the offered one; the difference is freed.
    ///
    /// A block offered under earlier weights is not kept: its bytes are dropped at once.
    pub fn commit(&mut self, key: BlockKey, charge: Charge, now: Timestamp) {
        let is_void = self.slab.is_invalidated(key);
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
            return self.drop_invalidated(key);
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
        self.reconcile(key);
        if leases == 0 {
            self.enforce_quota(meta.tenant);
        }
    }

    fn recharge(&mut self, key: BlockKey, charge: Charge) {
        let Some(entry) = self.slab.get(key) else { return };
        let (tenant, place, offered) = (entry.meta.tenant, entry.assigned_tier, entry.meta.charge);
        debug_assert!(
            charge.frame <= offered.frame && charge.dram <= offered.dram && charge.ssd <= offered.ssd,
            "committed {charge:?} exceeds the offered {offered:?}"
        );
        self.discharge(key);
        self.tenants.discharge(tenant, offered.frame);
        if let Some(entry) = self.slab.get_mut(key) {
            entry.meta.charge = charge;
            entry.meta.traits.bytes = charge.frame;
        }
        self.tenants.charge(tenant, charge.frame);
        if let Some(tier) = place {
            self.charge(key, tier);
        }
    }

    /// Ends a write of bytes that did not arrive or were wrong.
    pub fn abort(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key).filter(|entry| entry.writing) else { return };
        let meta = entry.meta;
        self.unhold(key);
        self.discharge(key);
        self.tenants.discharge(meta.tenant, meta.charge.frame);
        self.slab.remove(key);
    }
}
