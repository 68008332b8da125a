//! What a node has under way at once, over all its servers; and what each server, or each kind of a client's paths, carried.
//!
//! A node that listens on several paths gives one [`Room`] to all of them: its bounds are the node's, not those of a
//! path. Not here: who is refused when there is no room (`serve.rs`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::classes::Parts;
use kv_core::id::Class;

use crate::in_flight::{ClassNumbers, InFlight};
use crate::quic::SAVES_AT_ONCE_MAX;

/// Frame size that servers assume before the first frame was sent, in bytes, where nobody says how long frames are.
pub(crate) const FRAME_BYTES_GUESS: u64 = 64 << 10;

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
    pub(crate) layered: Layered,
    /// Largest frame there may be, as far as is known, in bytes: a longer one that was sent counts from then on.
    pub(crate) largest_frame: AtomicU64,
}

impl Room {
    /// Room as servers have it that share none.
    #[cfg(all(test, feature = "rdma"))]
    pub(crate) fn usual() -> Room {
        use crate::quic::{FETCH_BYTES_IN_FLIGHT_MAX, SAVE_BYTES_IN_FLIGHT_MAX};
        Room::new(FETCH_BYTES_IN_FLIGHT_MAX, SAVE_BYTES_IN_FLIGHT_MAX, FRAME_BYTES_GUESS)
    }

    /// Room for so many bytes of answers under way, and of saves that arrive. An answer is reckoned before it is known, by the
    /// length of the longest frame of the node: give the real one, or the first answers may be more than the room.
    #[must_use]
    pub fn new(fetch_bytes_in_flight_max: u64, save_bytes_in_flight_max: u64, frame_bytes_max: u64) -> Room {
        let shares = Shares {
            saves: InFlight::new(SAVES_AT_ONCE_MAX as u64, OF_SAVES),
            fetches: InFlight::new(fetch_bytes_in_flight_max, OF_FETCHES),
            arriving: InFlight::new(save_bytes_in_flight_max, OF_SAVES),
            layered: Layered::new(SAVES_AT_ONCE_MAX / 2, save_bytes_in_flight_max / 2),
            largest_frame: AtomicU64::new(frame_bytes_max),
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

/// What saves that come by layer may hold of a room: they last as long as somebody computes, and others shall come through beside
/// them.
pub(crate) struct Layered {
    /// Places and bytes that are left.
    left: Mutex<(usize, u64)>,
}

impl Layered {
    fn new(places: usize, bytes: u64) -> Layered {
        Layered { left: Mutex::new((places, bytes)) }
    }

    fn left(&self) -> MutexGuard<'_, (usize, u64)> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A part for a save that fills so many bytes while it arrives; nothing when others have it.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<LayeredPart<'_>> {
        let mut left = self.left();
        let next = (left.0.checked_sub(1)?, left.1.checked_sub(bytes)?);
        *left = next;
        Some(LayeredPart { of: self, bytes })
    }
}

/// What one save that comes by layer holds, until it is dropped.
pub(crate) struct LayeredPart<'a> {
    of: &'a Layered,
    bytes: u64,
}

impl Drop for LayeredPart<'_> {
    fn drop(&mut self) {
        let mut left = self.of.left();
        *left = (left.0 + 1, left.1 + self.bytes);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saves_by_layer_have_half_and_give_it_back() {
        let room = Room::new(1, 100, 1);
        let layered = &room.shares().layered;
        let held = layered.reserve(50);
        assert!(held.is_some() && layered.reserve(1).is_none(), "half of the bytes");
        drop(held);
        let held: Vec<_> = std::iter::from_fn(|| layered.reserve(1)).collect();
        assert_eq!(held.len(), SAVES_AT_ONCE_MAX / 2, "half of the places");
        drop(held);
        assert!(layered.reserve(50).is_some() && layered.reserve(51).is_none());
    }
}
