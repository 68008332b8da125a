//! A save: what is wanted of an offer, and the bytes as they come.

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, LeaseId, Tier};
use kv_core::tier::{Asker, Charge, Offer, Offered};

use super::desk::WeakQueue;
use super::{Ask, Store};
use crate::arena::SizeClasses;
use crate::tiers::ssd::format;

/// The task's answer to an offer.
#[derive(Debug)]
pub enum OfferPlan {
    /// Too many leases.
    Busy,
    /// Other weights are in force than those it was let in for. Nothing is reserved.
    OtherWeights,
    /// One answer per block.
    Blocks(Reserved),
}

/// Answers to an offer. Dropped unheard (the saver went away), it gives the reserved room back.
#[derive(Debug)]
pub struct Reserved {
    answers: Vec<Offered>,
    has_dram: bool,
    queue: WeakQueue,
}

impl Reserved {
    /// Whether the room of all wanted blocks is in DRAM.
    #[must_use]
    pub fn has_dram(&self) -> bool {
        self.has_dram
    }

    /// The answers; whoever takes them ends what is wanted.
    #[must_use]
    pub fn into_answers(mut self) -> Vec<Offered> {
        std::mem::take(&mut self.answers)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let wanted = self.answers.iter().filter_map(|answer| match answer {
            Offered::Wanted(key) => Some(*key),
            _ => None,
        });
        let keys: Vec<BlockKey> = wanted.collect();
        if let Some(queue) = self.queue.upgrade().filter(|_| !keys.is_empty()) {
            queue.tell_later(Ask::Abort { keys });
        }
    }
}

/// What blocks cost on this node, in bytes: in DRAM their share of a slab, on SSD a record for the largest frame.
#[derive(Clone, Debug)]
pub(crate) struct SlotSizes {
    classes: SizeClasses,
    /// Of the largest frame.
    largest: Charge,
}

/// More than any slot has; what is so large is refused before.
fn whole(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

impl SlotSizes {
    /// For frames of these lengths.
    pub(crate) fn new(frame_bytes: &[usize]) -> SlotSizes {
        let classes = SizeClasses::new(frame_bytes);
        let longest = frame_bytes.iter().copied().max().unwrap_or_default();
        let (dram, ssd) = (whole(classes.share_bytes(longest)), whole(format::record_bytes(longest)));
        SlotSizes { classes, largest: Charge { frame: whole(longest), dram, ssd } }
    }

    /// What a frame costs.
    pub(crate) fn charge(&self, frame_bytes: u32) -> Charge {
        let dram = whole(self.classes.share_bytes(frame_bytes as usize));
        Charge { frame: frame_bytes, dram, ssd: self.largest.ssd }
    }

    /// What the largest frame costs.
    pub(crate) fn largest(&self) -> Charge {
        self.largest
    }
}

impl Store {
    pub(super) fn offer(
        &mut self,
        asker: Asker,
        parent: Option<BlockHash>,
        first_offset_blocks: u32,
        hashes: &[BlockHash],
        frame_bytes: u32,
    ) -> OfferPlan {
        let now = self.now();
        let offer = Offer {
            parent,
            first_offset_blocks,
            hashes,
            charge: self.parts.capacities.slots.charge(frame_bytes),
        };
        match self.parts.book.offer(asker, offer, now) {
            Ok(answers) => {
                let is_elsewhere = |answer: &Offered| matches!(answer, Offered::Wanted(key) if self.parts.book.place(*key) != Some(Tier::Dram));
                let has_dram = !answers.iter().any(is_elsewhere);
                OfferPlan::Blocks(Reserved { answers, has_dram, queue: self.queue.clone() })
            }
            Err(full) => {
                tracing::debug!(%full, "save told to come again");
                OfferPlan::Busy
            }
        }
    }

    pub(super) fn put(&mut self, lease: LeaseId, key: BlockKey, bytes: Bytes) {
        let now = self.now();
        self.parts.metrics.saved(bytes.len());
        // The frame may be shorter than the offer said.
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let charge = self.parts.capacities.slots.charge(length);
        self.keep(key, bytes);
        self.parts.book.renew(lease, now);
        self.parts.book.commit(key, charge, now);
    }
}
