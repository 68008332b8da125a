//! Fingerprints of blocks that left lately: what S3-FIFO and ARC know of blocks that come back.
//!
//! A fingerprint is kept in 32 bits. At ten million of them a block that was never here is taken for one in
//! one look of four hundred; it then stands in the other queue for a while, and no byte is wrong. Memory is
//! bounded by [`Departed::trim`], 18 to 53 bytes a fingerprint. Not here: blocks that are resident.

use hashbrown::HashMap;
use std::collections::VecDeque;
use std::hash::{BuildHasherDefault, Hasher};

/// Stale places in the order beyond which it is rebuilt; small, and so that rebuilding is rare.
const STALE_MIN: usize = 64;

/// The part of a fingerprint that is kept.
pub(super) fn shortened(fingerprint: u64) -> u32 {
    (fingerprint ^ (fingerprint >> 32)) as u32
}

/// Spreads a number that may be small over 64 bits; equal for equal numbers on every run.
#[derive(Debug, Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
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

/// Fingerprints in the order the blocks left.
#[derive(Debug, Default)]
pub(super) struct Departed {
    /// Number of the departure that counts.
    latest: HashMap<u32, u32, BuildHasherDefault<Spread>>,
    /// Departures, oldest first. Stale when `latest` has another number, or none.
    order: VecDeque<(u32, u32)>,
    next: u32,
}

impl Departed {
    pub(super) fn len(&self) -> usize {
        self.latest.len()
    }

    /// Notes a departure as the latest.
    pub(super) fn push(&mut self, fingerprint: u32) {
        self.next = self.next.wrapping_add(1);
        self.latest.insert(fingerprint, self.next);
        self.order.push_back((fingerprint, self.next));
        if self.order.len() > 2 * self.latest.len() + STALE_MIN {
            let latest = &self.latest;
            self.order.retain(|(fingerprint, number)| latest.get(fingerprint) == Some(number));
        }
    }

    /// Forgets a departure; `false` when it was not known.
    pub(super) fn take(&mut self, fingerprint: u32) -> bool {
        self.latest.remove(&fingerprint).is_some()
    }

    /// Forgets the oldest until at most `most` are left.
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
    fn the_oldest_are_forgotten_and_one_that_left_again_is_new() {
        let mut departed = Departed::default();
        [1, 2, 3, 1].into_iter().for_each(|fingerprint| departed.push(fingerprint));
        assert_eq!(departed.len(), 3);
        departed.trim(2);
        assert!(!departed.take(2) && departed.take(1) && departed.take(3));
        assert!(!departed.take(3));
        departed.trim(0);
        assert_eq!(departed.len(), 0);
    }

    #[test]
    fn the_order_stays_bounded_when_all_come_back() {
        let mut departed = Departed::default();
        for round in 0..100_000 {
            departed.push(round % 50);
            departed.take(round % 50);
            departed.trim(50);
        }
        assert!(departed.order.len() <= STALE_MIN + 1 && departed.order.capacity() < 1024);
    }
}
