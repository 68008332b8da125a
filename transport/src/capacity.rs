//! The capacity of a node: work in flight over all its servers. Also the traffic counters of each
//! server, or of each kind of a client's paths.
//!
//! A node that listens on several paths gives one [`Capacity`] to all of them: the limits are the
//! node's, not those of a path. Not here: refusals (`serve.rs`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::id::TrafficClass;
use kv_core::traffic_class::ClassMinima;

use crate::in_flight::{ClassCounts, InFlightPool};
use crate::quic::SAVES_AT_ONCE_MAX;

/// Frame size that servers assume until they know better, in bytes.
pub(crate) const FRAME_BYTES_ESTIMATE: u64 = 64 << 10;

/// Minimum share of each class in the bytes of answers: half of it is for fetches.
const FETCH_PARTS: ClassMinima = [8, 0, 2, 2];

/// Minimum share of each class in saves. The last one is for classes of later releases.
const SAVE_PARTS: ClassMinima = [0, 8, 2, 2];

/// Limits of work in flight, shared by all servers of a node. Clones share the state.
#[derive(Clone)]
pub struct Capacity {
    pools: Arc<CapacityPools>,
}

impl std::fmt::Debug for Capacity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Room(..)")
    }
}

/// The separate pools of a capacity.
pub(crate) struct CapacityPools {
    pub(crate) saves: InFlightPool,
    pub(crate) fetches: InFlightPool,
    pub(crate) arriving: InFlightPool,
    pub(crate) layered: LayeredSavePool,
    /// Largest known frame in bytes; grows when a longer one is sent.
    pub(crate) largest_frame: AtomicU64,
}

impl Capacity {
    /// A capacity of this many bytes for answers in flight, and for arriving saves. An answer's
    /// size is estimated in advance by the longest frame of the node: give the real length, or the
    /// first answers may exceed the limit.
    #[must_use]
    pub fn new(
        fetch_bytes_in_flight_max: u64,
        save_bytes_in_flight_max: u64,
        frame_bytes_max: u64,
    ) -> Capacity {
        let shares = CapacityPools {
            saves: InFlightPool::new(SAVES_AT_ONCE_MAX as u64, SAVE_PARTS),
            fetches: InFlightPool::new(fetch_bytes_in_flight_max, FETCH_PARTS),
            arriving: InFlightPool::new(save_bytes_in_flight_max, SAVE_PARTS),
            layered: LayeredSavePool::new(SAVES_AT_ONCE_MAX / 2, save_bytes_in_flight_max / 2),
            largest_frame: AtomicU64::new(frame_bytes_max),
        };
        Capacity { pools: Arc::new(shares) }
    }

    /// Counts of each class, in the order of [`TrafficClass::ALL`].
    #[must_use]
    pub fn class_counts(&self) -> [ClassCounts; TrafficClass::ALL.len()] {
        TrafficClass::ALL.map(|class| {
            let [fetches, places, saves] =
                [&self.pools.fetches, &self.pools.saves, &self.pools.arriving].map(|kind| kind.counts(class));
            ClassCounts {
                admitted: fetches.admitted + saves.admitted,
                // A save without a slot did not ask for bytes.
                refused: fetches.refused + places.refused + saves.refused,
                in_flight_bytes: fetches.in_flight_bytes.saturating_add(saves.in_flight_bytes),
            }
        })
    }

    pub(crate) fn pools(&self) -> &CapacityPools {
        &self.pools
    }
}

/// The part of a capacity that layer-wise saves may hold. They last as long as a computation, so
/// others keep the rest.
pub(crate) struct LayeredSavePool {
    /// Available slots and bytes.
    available: Mutex<(usize, u64)>,
}

impl LayeredSavePool {
    fn new(places: usize, bytes: u64) -> LayeredSavePool {
        LayeredSavePool { available: Mutex::new((places, bytes)) }
    }

    fn available(&self) -> MutexGuard<'_, (usize, u64)> {
        self.available.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a part for a save of this many bytes; `None` if it is not available.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<LayeredSaveReservation<'_>> {
        let mut left = self.available();
        let next = (left.0.checked_sub(1)?, left.1.checked_sub(bytes)?);
        *left = next;
        Some(LayeredSaveReservation { pool: self, bytes })
    }
}

/// The reservation of one layer-wise save, until dropped.
pub(crate) struct LayeredSaveReservation<'a> {
    pool: &'a LayeredSavePool,
    bytes: u64,
}

impl Drop for LayeredSaveReservation<'_> {
    fn drop(&mut self) {
        let mut left = self.pool.available();
        *left = (left.0 + 1, left.1 + self.bytes);
    }
}

/// Encoded bytes of frames transferred by one end since its start. Clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct TrafficCounters {
    counts: Arc<ByteCounts>,
}

#[derive(Debug, Default)]
struct ByteCounts {
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

impl TrafficCounters {
    /// Bytes of blocks sent, with fetches or saves, as far as the path accepted them.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.counts.sent_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of blocks received, with saves or fetches, kept or not.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.counts.received_bytes.load(Ordering::Relaxed)
    }

    /// For a path or server: counts bytes sent.
    pub fn sent(&self, bytes: usize) {
        self.counts.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// For a path or server: counts bytes received.
    pub fn received(&self, bytes: usize) {
        self.counts.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layered_saves_get_half_of_the_capacity() {
        let room = Capacity::new(1, 100, 1);
        let layered = &room.pools().layered;
        let held = layered.reserve(50);
        assert!(held.is_some() && layered.reserve(1).is_none(), "half of the bytes");
        drop(held);
        let held: Vec<_> = std::iter::from_fn(|| layered.reserve(1)).collect();
        assert_eq!(held.len(), SAVES_AT_ONCE_MAX / 2, "half of the places");
        drop(held);
        assert!(layered.reserve(50).is_some() && layered.reserve(51).is_none());
    }
}
