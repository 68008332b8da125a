//! What a node has under way at once, over all its servers; and what each server, or each kind of a client's paths, carried.
//!
//! A node that listens on several paths gives one [`Room`] to all of them: its bounds are the node's, not those of a
//! path. Not here: who is refused when there is no room (`serve.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::classes::Parts;
use kv_core::id::Class;

use crate::in_flight::{ClassNumbers, InFlight};
use crate::quic::SAVES_AT_ONCE_MAX;

/// Frame size assumed before the first frame was sent, in bytes.
const FRAME_BYTES_GUESS: u64 = 64 << 10;

/// What each class has at least of the bytes of answers: half of it is for those who wait.
const OF_FETCHES: Parts = [8, 0, 2, 2];

/// What each class has at least of saves. The last one is for classes that only a later release knows.
const OF_SAVES: Parts = [0, 8, 2, 2];

/// Bounds of what is under way, shared by the servers that it is given to. Clones are the same room.
#[derive(Clone)]
pub struct Room {
    shares: Arc<Shares>,
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Room(..)")
    }
}

/// The parts of a room, by what they bound.
pub(crate) struct Shares {
    pub(crate) saves: InFlight,
    pub(crate) fetches: InFlight,
    pub(crate) arriving: InFlight,
    /// Largest frame that was sent so far, in bytes.
    pub(crate) largest_frame: AtomicU64,
}

impl Room {
    /// Room as servers have it that share none.
    #[cfg(all(test, feature = "rdma"))]
    pub(crate) fn usual() -> Room {
        Room::new(crate::quic::FETCH_BYTES_IN_FLIGHT_MAX, crate::quic::SAVE_BYTES_IN_FLIGHT_MAX)
    }

    /// Room for so many bytes of answers under way, and of saves that arrive.
    #[must_use]
    pub fn new(fetch_bytes_in_flight_max: u64, save_bytes_in_flight_max: u64) -> Room {
        let shares = Shares {
            saves: InFlight::new(SAVES_AT_ONCE_MAX as u64, OF_SAVES),
            fetches: InFlight::new(fetch_bytes_in_flight_max, OF_FETCHES),
            arriving: InFlight::new(save_bytes_in_flight_max, OF_SAVES),
            largest_frame: AtomicU64::new(FRAME_BYTES_GUESS),
        };
        Room { shares: Arc::new(shares) }
    }

    /// What became of the operations of each class, in the order of [`Class::ALL`].
    #[must_use]
    pub fn numbers(&self) -> [ClassNumbers; Class::ALL.len()] {
        Class::ALL.map(|class| {
            let [fetches, places, saves] = [&self.shares.fetches, &self.shares.saves, &self.shares.arriving]
                .map(|kind| kind.numbers(class));
            ClassNumbers {
                let_in: fetches.let_in + saves.let_in,
                // What found no place among the saves at once did not ask for bytes.
                refused: fetches.refused + places.refused + saves.refused,
                under_way_bytes: fetches.under_way_bytes.saturating_add(saves.under_way_bytes),
            }
        })
    }

    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }
}

/// Encoded bytes of frames that one end carried since it began. Clones count the same.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

impl Carried {
    /// Bytes of blocks that were sent, as far as the path took them: to readers, or with saves.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.counts.sent_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of blocks that came, kept or not: with saves, or with fetches.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.counts.received_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.counts.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.counts.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
