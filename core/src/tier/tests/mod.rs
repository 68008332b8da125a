//! Tests of the book: situations by hand, random operations against invariants, and an exact
//! comparison with a reference LRU.
#![allow(clippy::unwrap_used)]

mod admission;
mod exact_lru;
mod gpu;
mod invalidation;
mod invariants;
mod pins;
mod shares;
mod situations;
mod slow_ssd;
mod ssd_policy;
mod steps;
mod tenants;
mod ttls;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;
use crate::evict::{BlockTraits, Policy};
use crate::id::{BlockHash, CallerId, Generation, PinId, Tier, Timestamp};
use crate::index::command::PinKind;

/// A minimal LRU policy.
#[derive(Default)]
pub(super) struct PlainLru {
    clock: u64,
    order: BTreeMap<u64, BlockKey>,
    stamps: BTreeMap<BlockKey, u64>,
    parked: BTreeSet<BlockKey>,
}

impl Policy for PlainLru {
    fn name(&self) -> &'static str {
        "plain-lru"
    }

    fn insert(&mut self, key: BlockKey, _: BlockTraits, _: Timestamp) {
        self.clock += 1;
        assert!(self.stamps.insert(key, self.clock).is_none(), "{key:?} inserted twice");
        self.order.insert(self.clock, key);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.remove(key);
        self.insert(key, traits, now);
    }

    fn park(&mut self, key: BlockKey) {
        if let Some(stamp) = self.stamps.remove(&key) {
            self.order.remove(&stamp);
            self.parked.insert(key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if self.parked.remove(&key) {
            return;
        }
        let stamp = self.stamps.remove(&key).expect("removed an unknown key");
        self.order.remove(&stamp);
    }

    fn victim(&mut self, _: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let coldest = self.order.values().copied().next()?;
        assert!(
            !spared(coldest),
            "a held block is in the eviction order, which every victim search must step over"
        );
        Some(coldest)
    }

    fn len(&self) -> usize {
        self.order.len() + self.parked.len()
    }
}

pub(super) const CHARGE: Charge = Charge { frame: 100, dram: 128, ssd: 4096 };

pub(super) fn book(dram: TierLimits, ssd: TierLimits) -> Book {
    let limits = BookLimits { dram, ssd, lease: Duration::from_secs(10), leases_max: 64, seed: 1 };
    Book::new(&limits, Box::<PlainLru>::default(), Box::<PlainLru>::default())
}

pub(super) fn blocks(dram: u64, ssd: u64) -> Book {
    book(TierLimits::exact(Capacity::Blocks(dram)), TierLimits::exact(Capacity::Blocks(ssd)))
}

/// Like [`blocks`], with a GPU of this capacity.
pub(super) fn blocks_with_gpu(gpu: u64, dram: u64, ssd: u64) -> Book {
    blocks(dram, ssd).with_gpu(TierLimits::exact(Capacity::Blocks(gpu)), Box::<PlainLru>::default())
}

pub(super) fn hash(number: u64) -> BlockHash {
    BlockHash::from_words(number, number)
}

pub(super) fn requester(lease: u64) -> Requester {
    // Each lease has its own caller.
    let caller = CallerId(lease);
    Requester { lease: LeaseId(lease), caller, tenant: TenantId(0), category: Category::default() }
}

pub(super) const ALL_PERMITS: MovePermits = MovePermits {
    dram: true,
    ssd: true,
    prefetch: true,
    gpu_read: true,
    gpu_read_back: true,
    gpu_promote: true,
};

/// Runs every action to its end, like a disk without delay.
pub(super) fn drain(book: &mut Book) {
    while let Some(action) = book.next_action(ALL_PERMITS) {
        match action {
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::Promote { key, .. } | Action::ReadBackFromGpu { key, .. } => {
                book.on_moved(key, Tier::Dram);
            }
            Action::PromoteToGpu { key, .. } => book.on_moved(key, Tier::Gpu),
            Action::DropDram { .. } | Action::DropSsd { .. } | Action::DropGpu { .. } => {}
        }
    }
}

pub(super) fn hashes(numbers: &[u64]) -> Vec<BlockHash> {
    numbers.iter().map(|&number| hash(number)).collect()
}

/// A pin on these blocks, without expiry.
pub(super) fn pin_directive(number: u64, kind: PinKind, numbers: &[u64]) -> PinDirective {
    PinDirective { pin: PinId(number), kind, blocks: hashes(numbers).into(), end: None }
}

/// Sets a hard pin on these blocks as the only pin.
pub(super) fn pin(book: &mut Book, numbers: &[u64], now: Timestamp) {
    book.set_pins([pin_directive(1, PinKind::Hard, numbers)], now);
}

pub(super) fn offer(book: &mut Book, lease: u64, numbers: &[u64], now: u64) -> Vec<OfferOutcome> {
    let all = hashes(numbers);
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    book.offer(requester(lease), offer, Timestamp(now)).unwrap()
}

/// One whole request: fetches the leading hits, saves the rest, releases. Returns the hits.
pub(super) fn request(book: &mut Book, numbers: &[u64], now: u64) -> usize {
    let all = hashes(numbers);
    let hits = book.fetch(requester(now), &all, Timestamp(now)).unwrap().len();
    drain(book);
    if hits < all.len() {
        let parent = hits.checked_sub(1).map(|last| all[last]);
        let offer = SaveOffer {
            parent,
            first_offset_blocks: u32::try_from(hits).unwrap(),
            hashes: &all[hits..],
            charge: CHARGE,
        };
        let offered = book.offer(requester(now), offer, Timestamp(now)).unwrap();
        drain(book);
        for answer in offered {
            if let OfferOutcome::Wanted(key) = answer {
                book.commit(key, CHARGE, Timestamp(now));
                drain(book);
            }
        }
    }
    book.release(LeaseId(now), Timestamp(now));
    drain(book);
    hits
}
