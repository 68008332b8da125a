//! What left nodes lately, as the applied log says: who dropped which block, why and when.
//!
//! A table of one size: a block that meets another's place takes it, so the older ones are forgotten first where it matters. A hint for people and
//! counters, and nothing else. Not here: what is held (`kv_core::index`).

use std::time::Duration;

use kv_core::id::{BlockHash, NodeId, Timestamp};
use kv_core::index::command::{AnnounceOutcome, Announcement, Change, DropCause};

/// Places of one shard's table: a quarter of a million blocks, in six megabytes once any of them left.
const PLACES: usize = 1 << 18;

#[derive(Clone, Copy)]
struct Place {
    /// The part of the hash that does not say the place.
    mark: u64,
    at: Timestamp,
    node: NodeId,
    cause: DropCause,
}

/// Blocks that one announcement of a batch drops.
pub(crate) struct Drops {
    nth: usize,
    node: NodeId,
    cause: DropCause,
    blocks: Vec<BlockHash>,
}

/// Blocks that left.
#[derive(Default)]
pub(crate) struct Departed {
    /// Made with the first.
    places: Vec<Option<Place>>,
}

impl Departed {
    /// What announcements drop: of which of them, whose, and why.
    pub(crate) fn of(batch: &[Announcement]) -> Vec<Drops> {
        let mut all = Vec::new();
        for (nth, Announcement { node, changes, .. }) in batch.iter().enumerate() {
            for change in changes {
                if let Change::Dropped { blocks, cause, .. } = change {
                    all.push(Drops { nth, node: *node, cause: *cause, blocks: blocks.clone() });
                }
            }
        }
        all
    }

    /// Notes those of announcements that were applied.
    pub(crate) fn note(&mut self, dropped: &[Drops], outcomes: &[AnnounceOutcome], now: Timestamp) {
        let is_applied =
            |drops: &&Drops| matches!(outcomes.get(drops.nth), Some(AnnounceOutcome::Applied { .. }));
        for Drops { node, cause, blocks, .. } in dropped.iter().filter(is_applied) {
            blocks.iter().for_each(|block| self.put(*block, *node, *cause, now));
        }
    }

    fn put(&mut self, block: BlockHash, node: NodeId, cause: DropCause, at: Timestamp) {
        if self.places.is_empty() {
            self.places = vec![None; PLACES];
        }
        let (place, mark) = place_of(block);
        self.places[place] = Some(Place { mark, at, node, cause });
    }

    /// Who dropped a block last, why, and how long ago.
    pub(crate) fn get(&self, block: BlockHash, now: Timestamp) -> Option<(NodeId, DropCause, Duration)> {
        let (place, mark) = place_of(block);
        let known = self.places.get(place).copied().flatten().filter(|known| known.mark == mark)?;
        Some((known.node, known.cause, now.since(known.at)))
    }
}

fn place_of(block: BlockHash) -> (usize, u64) {
    let half = |from: usize| u64::from_le_bytes(std::array::from_fn(|at| block.0[from + at]));
    // Hashes are spread already; it costs nothing not to count on it.
    let mixed = (half(0) ^ half(8).rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as usize % PLACES, half(0) ^ half(8).rotate_left(17))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::{Epoch, Seq, Tier};

    fn block(number: u64) -> BlockHash {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        BlockHash(bytes)
    }

    fn dropped(node: u32, numbers: std::ops::Range<u64>, cause: DropCause) -> Announcement {
        let blocks = numbers.map(block).collect();
        let changes = vec![Change::Dropped { blocks, tier: Tier::Dram, cause }];
        Announcement { node: NodeId(node), epoch: Epoch(1), seq: Seq(1), changes }
    }

    fn note(departed: &mut Departed, batch: &[Announcement], at: Timestamp) {
        let outcomes = vec![AnnounceOutcome::Applied { next: Seq(2), unlisted: 0 }; batch.len()];
        departed.note(&Departed::of(batch), &outcomes, at);
    }

    #[test]
    fn the_last_one_that_dropped_a_block_is_told() {
        let mut departed = Departed::default();
        assert_eq!(departed.get(block(1), Timestamp(5)), None);
        note(
            &mut departed,
            &[dropped(1, 0..4, DropCause::Room), dropped(2, 1..2, DropCause::Ttl)],
            Timestamp(1_000_000),
        );
        let at = Timestamp(3_000_000);
        assert_eq!(departed.get(block(0), at), Some((NodeId(1), DropCause::Room, Duration::from_secs(2))));
        assert_eq!(departed.get(block(1), at), Some((NodeId(2), DropCause::Ttl, Duration::from_secs(2))));
        assert_eq!(departed.get(block(4), at), None);
    }

    #[test]
    fn memory_is_bounded_and_another_block_is_not_taken_for_one_that_left() {
        let mut departed = Departed::default();
        note(&mut departed, &[dropped(1, 0..1 << 20, DropCause::Room)], Timestamp(1));
        assert_eq!(departed.places.len(), PLACES);
        let known = |numbers: std::ops::Range<u64>| {
            numbers.filter(|number| departed.get(block(*number), Timestamp(1)).is_some()).count()
        };
        assert_eq!(known(1 << 21..1 << 22), 0);
        assert!(known(0..1 << 20) > PLACES / 2);
    }
}
