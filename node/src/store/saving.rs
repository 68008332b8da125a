//! A save: what is wanted of an offer, and the bytes as they come.

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, LeaseId};
use kv_core::tier::{Asker, Charge, Offer, Offered};
use tokio::sync::mpsc;

use super::{Ask, Store, tell_later};
use crate::arena;
use crate::tiers::ssd::format;

/// The task's answer to an offer.
#[derive(Debug)]
pub enum OfferPlan {
    /// Too many leases.
    Busy,
    /// One answer per block.
    Blocks(Reserved),
}

/// Answers to an offer. Dropped unheard (the saver went away), it gives the reserved room back.
#[derive(Debug)]
pub struct Reserved {
    answers: Vec<Offered>,
    asks: mpsc::WeakSender<Ask>,
}

impl Reserved {
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
        if let Some(asks) = self.asks.upgrade().filter(|_| !keys.is_empty()) {
            tell_later(&asks, Ask::Abort { keys });
        }
    }
}

/// Slots of this node, in bytes. Every block takes one, whatever its length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSizes {
    pub(crate) dram: u32,
    pub(crate) ssd: u32,
}

impl SlotSizes {
    /// For frames of up to `frame_bytes_max`.
    pub(crate) fn new(frame_bytes_max: usize) -> SlotSizes {
        let whole = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        SlotSizes {
            dram: whole(arena::slot_bytes(frame_bytes_max)),
            ssd: whole(format::record_bytes(frame_bytes_max)),
        }
    }

    /// What a frame costs.
    pub(crate) fn charge(self, frame_bytes: u32) -> Charge {
        Charge { frame: frame_bytes, dram: self.dram, ssd: self.ssd }
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
            Ok(answers) => OfferPlan::Blocks(Reserved { answers, asks: self.asks.clone() }),
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
        self.row(key).dram = Some(bytes);
        self.parts.book.renew(lease, now);
        self.parts.book.commit(key, charge, now);
    }
}
