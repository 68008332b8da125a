//! Saves: the answer to an offer, and the bytes as they arrive.

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, LeaseId, Tier};
use kv_core::tier::{Charge, OfferOutcome, Requester, SaveOffer};

use super::cell::WeakStoreQueue;
use super::{Store, StoreRequest};
use crate::arena::SizeClasses;
use crate::tiers::ssd::format;

/// The store's answer to an offer.
#[derive(Debug)]
pub enum OfferPlan {
    /// Too many leases.
    Busy,
    /// The weights changed since admission. No space is reserved.
    GenerationMismatch,
    /// One answer per block.
    Blocks(OfferReservation),
}

/// Answers to an offer. If dropped before use (the saver went away), it aborts the reserved blocks.
#[derive(Debug)]
pub struct OfferReservation {
    answers: Vec<OfferOutcome>,
    has_dram: bool,
    queue: WeakStoreQueue,
}

impl OfferReservation {
    /// Whether all wanted blocks have their space in DRAM.
    #[must_use]
    pub fn has_dram(&self) -> bool {
        self.has_dram
    }

    /// Takes the answers. The caller must commit or abort the wanted blocks.
    #[must_use]
    pub fn into_answers(mut self) -> Vec<OfferOutcome> {
        std::mem::take(&mut self.answers)
    }
}

impl Drop for OfferReservation {
    fn drop(&mut self) {
        let wanted = self.answers.iter().filter_map(|answer| match answer {
            OfferOutcome::Wanted(key) => Some(*key),
            _ => None,
        });
        let keys: Vec<BlockKey> = wanted.collect();
        if let Some(queue) = self.queue.upgrade().filter(|_| !keys.is_empty()) {
            queue.send_or_spawn(StoreRequest::Abort { keys });
        }
    }
}

/// Cost of a block on this node, in bytes: its share of a slab in DRAM, and a record for the
/// largest frame on SSD.
#[derive(Clone, Debug)]
pub(crate) struct SlotSizes {
    classes: SizeClasses,
    /// Cost of the largest frame.
    largest: Charge,
}

/// Saturates above any slot size; frames that large are refused earlier.
fn saturating_u32(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

impl SlotSizes {
    /// For frames of these lengths.
    pub(crate) fn new(frame_bytes: &[usize]) -> SlotSizes {
        let classes = SizeClasses::new(frame_bytes);
        let longest = frame_bytes.iter().copied().max().unwrap_or_default();
        let (dram, ssd) =
            (saturating_u32(classes.share_bytes(longest)), saturating_u32(format::record_bytes(longest)));
        SlotSizes { classes, largest: Charge { frame: saturating_u32(longest), dram, ssd } }
    }

    /// Cost of a frame.
    pub(crate) fn charge(&self, frame_bytes: u32) -> Charge {
        let dram = saturating_u32(self.classes.share_bytes(frame_bytes as usize));
        Charge { frame: frame_bytes, dram, ssd: self.largest.ssd }
    }

    /// Cost of the largest frame.
    pub(crate) fn largest(&self) -> Charge {
        self.largest
    }
}

impl Store {
    pub(super) fn offer(
        &mut self,
        asker: Requester,
        parent: Option<BlockHash>,
        first_offset_blocks: u32,
        hashes: &[BlockHash],
        frame_bytes: u32,
    ) -> OfferPlan {
        let now = self.now();
        let offer = SaveOffer {
            parent,
            first_offset_blocks,
            hashes,
            charge: self.parts.capacities.slots.charge(frame_bytes),
        };
        match self.parts.book.offer(asker, offer, now) {
            Ok(answers) => {
                let is_in_dram = |key| self.parts.book.assigned_tier(key) == Some(Tier::Dram);
                let is_elsewhere =
                    |answer: &OfferOutcome| matches!(answer, OfferOutcome::Wanted(key) if !is_in_dram(*key));
                let has_dram = !answers.iter().any(is_elsewhere);
                OfferPlan::Blocks(OfferReservation { answers, has_dram, queue: self.queue.clone() })
            }
            Err(full) => {
                tracing::debug!(%full, "save answered with Busy");
                OfferPlan::Busy
            }
        }
    }

    pub(super) fn put(&mut self, lease: LeaseId, key: BlockKey, bytes: Bytes) {
        let now = self.now();
        self.parts.metrics.saved(bytes.len());
        // The frame may be shorter than offered.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let charge = self.parts.capacities.slots.charge(length);
        self.store_dram(key, bytes);
        self.parts.book.renew(lease, now);
        self.parts.book.commit(key, charge, now);
    }
}
