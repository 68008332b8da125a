//! Prefetch hints in eviction queues: predicts which blocks will reach the cold end, so that
//! several are prefetched together.
//!
//! In a large tier each row of a queue lies in another memory page, and even a prefetch stalls
//! until the page is translated. Following links finds one row at a time; several translations
//! together take hardly longer than one. So each row names the block inserted [`HINT_DISTANCE`]
//! places later, and after that many evictions as many rows are prefetched. A missing or outdated
//! hint costs time but changes no result. Not here: the order of a queue ([`super::queue`]).

use super::BlockKey;
use super::queue::Links;

/// Places between a block and the one that its row names. Doubling it gains no speed.
const HINT_DISTANCE: usize = 8;

/// The block that a row names; initially none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefetchHint(u32);

impl PrefetchHint {
    const NOBODY: PrefetchHint = PrefetchHint(u32::MAX);
}

impl Default for PrefetchHint {
    fn default() -> Self {
        PrefetchHint::NOBODY
    }
}

/// Per-block data with space for a hint.
pub(super) trait HasPrefetchHint: Copy + Default {
    /// Only [`PrefetchRing`] may write it.
    fn prefetch_hint(&mut self) -> &mut PrefetchHint;
}

/// The latest insertions into a queue, and the evictions since the last prefetch.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefetchRing {
    /// A ring: the next insertion replaces the block that will name it.
    latest: [PrefetchHint; HINT_DISTANCE],
    next: u8,
    evicted: u8,
}

impl Default for PrefetchRing {
    fn default() -> Self {
        PrefetchRing { latest: [PrefetchHint::NOBODY; HINT_DISTANCE], next: 0, evicted: 0 }
    }
}

impl PrefetchRing {
    /// A block was inserted, usually at the warm end.
    pub(super) fn record_insert<T: HasPrefetchHint>(&mut self, links: &mut Links<T>, key: BlockKey) {
        let mut name = |key: u32, ahead| {
            if let Some(about) = links.data_mut(BlockKey(key)) {
                *about.prefetch_hint() = ahead;
            }
        };
        name(key.0, PrefetchHint::NOBODY);
        let place = &mut self.latest[usize::from(self.next) % HINT_DISTANCE];
        name(place.0, PrefetchHint(key.0));
        *place = PrefetchHint(key.0);
        self.next = (self.next + 1) % HINT_DISTANCE as u8;
    }

    /// Prefetches the rows behind `coldest`, the new coldest block.
    pub(super) fn prefetch_next<T: HasPrefetchHint>(&mut self, links: &Links<T>, coldest: BlockKey) {
        self.evicted += 1;
        if usize::from(self.evicted) < HINT_DISTANCE {
            // Fallback for rows without a hint.
            return links.prefetch_second_next(coldest);
        }
        self.evicted = 0;
        hinted_keys(links, coldest).for_each(|key| links.prefetch(key));
    }
}

/// Blocks that the [`HINT_DISTANCE`] coldest rows name; those rows are prefetched already. A row
/// without a hint gives a key that no block has.
fn hinted_keys<T: HasPrefetchHint>(links: &Links<T>, coldest: BlockKey) -> impl Iterator<Item = BlockKey> {
    let leading = std::iter::successors(Some(coldest), |&key| links.warmer(key)).take(HINT_DISTANCE);
    leading.map(|key| BlockKey(links.data(key).prefetch_hint().0))
}

#[cfg(test)]
mod tests {
    use super::super::queue::Queue;
    use super::*;

    impl HasPrefetchHint for PrefetchHint {
        fn prefetch_hint(&mut self) -> &mut PrefetchHint {
            self
        }
    }

    fn push(links: &mut Links<PrefetchHint>, queue: &mut Queue, trail: &mut PrefetchRing, key: u32) {
        links.set_data(BlockKey(key), PrefetchHint(3));
        links.push_warm(queue, BlockKey(key));
        trail.record_insert(links, BlockKey(key));
    }

    #[test]
    fn coldest_rows_name_the_next_coldest() {
        let (mut links, mut queue, mut trail) = (Links::default(), Queue::default(), PrefetchRing::default());
        // 37 and 64 are coprime: the keys are those below 64 in another order.
        let keys: Vec<u32> = (0..64).map(|at| at * 37 % 64).collect();
        keys.iter().for_each(|&key| push(&mut links, &mut queue, &mut trail, key));
        let after = |links: &Links<PrefetchHint>, at: usize| {
            hinted_keys(links, BlockKey(keys[at])).map(|key| key.0).collect::<Vec<_>>()
        };
        for at in 0..=64 - 2 * HINT_DISTANCE {
            assert_eq!(after(&links, at), keys[at + HINT_DISTANCE..at + 2 * HINT_DISTANCE], "at {at}");
        }
        // No block was inserted behind the last ones.
        assert_eq!(after(&links, 64 - HINT_DISTANCE), [u32::MAX; HINT_DISTANCE]);
    }

    #[test]
    fn reinserted_block_names_its_new_successor() {
        let (mut links, mut queue, mut trail) = (Links::default(), Queue::default(), PrefetchRing::default());
        (0..20).for_each(|key| push(&mut links, &mut queue, &mut trail, key));
        links.unlink(&mut queue, BlockKey(0));
        push(&mut links, &mut queue, &mut trail, 0);
        assert_eq!(links.data(BlockKey(0)), PrefetchHint::NOBODY);
        (20..20 + HINT_DISTANCE as u32).for_each(|key| push(&mut links, &mut queue, &mut trail, key));
        assert_eq!(links.data(BlockKey(0)), PrefetchHint(20 + HINT_DISTANCE as u32 - 1));
        // 12 was inserted 8 places before it.
        assert_eq!(links.data(BlockKey(20 - HINT_DISTANCE as u32)), PrefetchHint(0));
    }
}
