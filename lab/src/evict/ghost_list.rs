//! Ghost list: fingerprints of recently evicted blocks, for S3-FIFO and ARC.
//!
//! A fingerprint has 32 bits. With ten million entries, one lookup in four hundred takes a new
//! block for a known one; it then enters the other queue, and no data is affected.
//! [`GhostList::trim`] bounds the memory, 18 to 53 bytes a fingerprint. Not here: resident blocks.

use hashbrown::HashMap;
use std::collections::VecDeque;
use std::hash::{BuildHasherDefault, Hasher};

/// Stale entries in the order before it is rebuilt; small, yet rebuilding stays rare.
const STALE_MIN: usize = 64;

/// The stored part of a fingerprint.
pub(super) fn short_fingerprint(fingerprint: u64) -> u32 {
    (fingerprint ^ (fingerprint >> 32)) as u32
}

/// Spreads a possibly small number over 64 bits; deterministic across runs.
#[derive(Debug, Default)]
pub(super) struct FingerprintHasher(u64);

impl Hasher for FingerprintHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(u32::from(byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Fingerprints in order of eviction.
#[derive(Debug, Default)]
pub(super) struct GhostList {
    /// Number of the latest eviction of each fingerprint.
    latest: HashMap<u32, u32, BuildHasherDefault<FingerprintHasher>>,
    /// Evictions, oldest first. Stale if `latest` has another number or none.
    order: VecDeque<(u32, u32)>,
    next: u32,
}

impl GhostList {
    pub(super) fn len(&self) -> usize {
        self.latest.len()
    }

    /// Adds a fingerprint as the latest.
    pub(super) fn push(&mut self, fingerprint: u32) {
        self.next = self.next.wrapping_add(1);
        self.latest.insert(fingerprint, self.next);
        self.order.push_back((fingerprint, self.next));
        if self.order.len() > 2 * self.latest.len() + STALE_MIN {
            let latest = &self.latest;
            self.order.retain(|(fingerprint, number)| latest.get(fingerprint) == Some(number));
        }
    }

    /// Removes a fingerprint; `false` if it was unknown.
    pub(super) fn take(&mut self, fingerprint: u32) -> bool {
        self.latest.remove(&fingerprint).is_some()
    }

    /// Removes the oldest until at most `most` remain.
    pub(super) fn trim(&mut self, most: usize) {
        while self.latest.len() > most
            && let Some((fingerprint, number)) = self.order.pop_front()
        {
            if self.latest.get(&fingerprint) == Some(&number) {
                self.latest.remove(&fingerprint);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_are_trimmed_and_repeats_are_new() {
        let mut departed = GhostList::default();
        [1, 2, 3, 1].into_iter().for_each(|fingerprint| departed.push(fingerprint));
        assert_eq!(departed.len(), 3);
        departed.trim(2);
        assert!(!departed.take(2) && departed.take(1) && departed.take(3));
        assert!(!departed.take(3));
        departed.trim(0);
        assert_eq!(departed.len(), 0);
    }

    #[test]
    fn order_stays_bounded() {
        let mut departed = GhostList::default();
        for round in 0..100_000 {
            departed.push(round % 50);
            departed.take(round % 50);
            departed.trim(50);
        }
        assert!(departed.order.len() <= STALE_MIN + 1 && departed.order.capacity() < 1024);
    }
}
