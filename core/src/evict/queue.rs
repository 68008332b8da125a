//! Intrusive queues of blocks: links in one vector indexed by [`BlockKey`], with any number of
//! queues over it.
//!
//! Every operation is O(1) and allocates only for a key above all earlier ones. A block is in at
//! most one queue, or parked: resident, but outside all queues because it is held. A policy's data
//! on a block lies next to its links, so a block costs one cache line. Public for policies outside
//! this crate. Not here: the order of blocks (the policies).

use super::BlockKey;
use kvfleet_cpu::prefetch_whole;

/// No neighbour.
const NONE: u32 = u32::MAX;
/// Not in any queue. Kept in `colder`, so that a resident block costs no further byte.
const ABSENT: u32 = u32::MAX - 1;
/// Resident but in no queue. Stored in `warmer` of a block with `ABSENT` in `colder`.
const PARKED: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug)]
struct QueueLink<T> {
    colder: u32,
    warmer: u32,
    data: T,
}

/// The links of all blocks of one tier, each with its policy's data.
#[derive(Debug)]
pub struct Links<T = ()> {
    links: Vec<QueueLink<T>>,
    parked: usize,
}

impl<T> Default for Links<T> {
    fn default() -> Self {
        Links { links: Vec::new(), parked: 0 }
    }
}

/// One queue, from the cold end (leaves first) to the warm end.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    cold: u32,
    warm: u32,
    len: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { cold: NONE, warm: NONE, len: 0 }
    }
}

impl Queue {
    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no block is in the queue.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The block at the cold end.
    #[must_use]
    pub fn coldest(&self) -> Option<BlockKey> {
        some(self.cold)
    }

    /// The block at the warm end.
    #[must_use]
    pub fn warmest(&self) -> Option<BlockKey> {
        some(self.warm)
    }
}

fn some(raw: u32) -> Option<BlockKey> {
    (raw != NONE).then_some(BlockKey(raw))
}

impl<T: Copy + Default> Links<T> {
    /// Whether the block is in a queue.
    #[must_use]
    pub fn contains(&self, key: BlockKey) -> bool {
        self.links.get(key.0 as usize).is_some_and(|link| link.colder != ABSENT)
    }

    /// Whether the block is parked.
    #[must_use]
    pub fn is_parked(&self, key: BlockKey) -> bool {
        let parked = |link: &QueueLink<T>| link.colder == ABSENT && link.warmer == PARKED;
        self.links.get(key.0 as usize).is_some_and(parked)
    }

    /// Number of parked blocks.
    #[must_use]
    pub fn parked_len(&self) -> usize {
        self.parked
    }

    /// Data of a block that was ever resident; the default for any other.
    #[must_use]
    pub fn data(&self, key: BlockKey) -> T {
        self.links.get(key.0 as usize).map_or_else(T::default, |link| link.data)
    }

    /// Stores data of a block that is or becomes resident.
    pub fn set_data(&mut self, key: BlockKey, about: T) {
        self.ensure_key(key);
        self.links[key.0 as usize].data = about;
    }

    /// The neighbour that leaves right after `key`.
    #[must_use]
    pub fn warmer(&self, key: BlockKey) -> Option<BlockKey> {
        some(self.links[key.0 as usize].warmer)
    }

    /// Mutable data of a block that was ever resident.
    pub fn data_mut(&mut self, key: BlockKey) -> Option<&mut T> {
        self.links.get_mut(key.0 as usize).map(|link| &mut link.data)
    }

    /// Prefetches the second block behind `key`. The first was prefetched one call earlier.
    pub fn prefetch_second_next(&self, key: BlockKey) {
        let behind = |key: BlockKey| self.links.get(key.0 as usize).and_then(|link| some(link.warmer));
        let second = behind(key).and_then(behind).and_then(|key| self.links.get(key.0 as usize));
        second.inspect(|link| prefetch_whole(*link));
    }

    /// Prefetches a block's row, if there is one.
    pub fn prefetch(&self, key: BlockKey) {
        self.links.get(key.0 as usize).inspect(|link| prefetch_whole(*link));
    }

    /// The neighbour that leaves right before `key`.
    #[must_use]
    pub fn colder(&self, key: BlockKey) -> Option<BlockKey> {
        some(self.links[key.0 as usize].colder)
    }

    /// Inserts an absent block at the warm end.
    pub fn push_warm(&mut self, queue: &mut Queue, key: BlockKey) {
        self.link_between(queue, key, queue.warm, NONE);
    }

    /// Inserts an absent block right before `next`, which is in `queue`.
    pub fn insert_colder_than(&mut self, queue: &mut Queue, key: BlockKey, next: BlockKey) {
        self.link_between(queue, key, self.links[next.0 as usize].colder, next.0);
    }

    /// Inserts an absent block right after `previous`, which is in `queue`.
    pub fn insert_warmer_than(&mut self, queue: &mut Queue, key: BlockKey, previous: BlockKey) {
        self.link_between(queue, key, previous.0, self.links[previous.0 as usize].warmer);
    }

    fn ensure_key(&mut self, key: BlockKey) {
        let at = key.0 as usize;
        if at >= self.links.len() {
            self.links.resize(at + 1, QueueLink { colder: ABSENT, warmer: NONE, data: T::default() });
        }
    }

    fn link_between(&mut self, queue: &mut Queue, key: BlockKey, colder: u32, warmer: u32) {
        debug_assert!(!self.contains(key) && !self.is_parked(key), "block {} is resident already", key.0);
        self.ensure_key(key);
        let link = &mut self.links[key.0 as usize];
        (link.colder, link.warmer) = (colder, warmer);
        match some(colder) {
            Some(key_colder) => self.links[key_colder.0 as usize].warmer = key.0,
            None => queue.cold = key.0,
        }
        match some(warmer) {
            Some(key_warmer) => self.links[key_warmer.0 as usize].colder = key.0,
            None => queue.warm = key.0,
        }
        queue.len += 1;
    }

    /// Removes a block from its queue.
    pub fn unlink(&mut self, queue: &mut Queue, key: BlockKey) {
        debug_assert!(self.contains(key), "block {} is in no queue", key.0);
        let link = &mut self.links[key.0 as usize];
        let (colder, warmer) = (link.colder, link.warmer);
        (link.colder, link.warmer) = (ABSENT, NONE);
        match some(colder) {
            Some(key_colder) => self.links[key_colder.0 as usize].warmer = warmer,
            None => queue.cold = warmer,
        }
        match some(warmer) {
            Some(key_warmer) => self.links[key_warmer.0 as usize].colder = colder,
            None => queue.warm = colder,
        }
        queue.len -= 1;
    }

    /// Removes a block from its queue and keeps it resident.
    pub fn park(&mut self, queue: &mut Queue, key: BlockKey) {
        self.unlink(queue, key);
        self.links[key.0 as usize].warmer = PARKED;
        self.parked += 1;
    }

    /// Makes a parked block absent; `false` if it is not parked.
    pub fn unpark(&mut self, key: BlockKey) -> bool {
        let was = self.is_parked(key);
        if was {
            self.links[key.0 as usize].warmer = NONE;
            self.parked -= 1;
        }
        was
    }

    /// The first block from the cold end that `spared` does not protect.
    #[must_use]
    pub fn coldest_evictable(&self, queue: &Queue, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let mut at = queue.coldest();
        while let Some(key) = at {
            if !spared(key) {
                return Some(key);
            }
            at = self.warmer(key);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(links: &Links, queue: &Queue) -> Vec<u32> {
        let forward: Vec<u32> =
            std::iter::successors(queue.coldest(), |&key| links.warmer(key)).map(|key| key.0).collect();
        let mut backward: Vec<u32> =
            std::iter::successors(queue.warmest(), |&key| links.colder(key)).map(|key| key.0).collect();
        backward.reverse();
        assert_eq!(forward, backward);
        assert_eq!(forward.len(), queue.len());
        forward
    }

    #[test]
    fn blocks_keep_the_order_they_were_put_in() {
        let (mut links, mut queue) = (Links::<()>::default(), Queue::default());
        for key in [5, 1, 9] {
            links.push_warm(&mut queue, BlockKey(key));
        }
        links.insert_colder_than(&mut queue, BlockKey(2), BlockKey(5));
        links.insert_warmer_than(&mut queue, BlockKey(3), BlockKey(9));
        links.insert_colder_than(&mut queue, BlockKey(4), BlockKey(9));
        assert_eq!(order(&links, &queue), [2, 5, 1, 4, 9, 3]);
        for (key, left) in [(2, vec![5, 1, 4, 9, 3]), (3, vec![5, 1, 4, 9]), (1, vec![5, 4, 9])] {
            links.unlink(&mut queue, BlockKey(key));
            assert!(!links.contains(BlockKey(key)));
            assert_eq!(order(&links, &queue), left);
        }
    }

    #[test]
    fn two_queues_share_one_vector_of_links() {
        let (mut links, mut even, mut odd) = (Links::<()>::default(), Queue::default(), Queue::default());
        for key in 0..10 {
            links.push_warm(if key % 2 == 0 { &mut even } else { &mut odd }, BlockKey(key));
        }
        assert_eq!(order(&links, &even), [0, 2, 4, 6, 8]);
        assert_eq!(order(&links, &odd), [1, 3, 5, 7, 9]);
    }

    #[test]
    fn empty_or_protected_queue_has_no_victim() {
        let (mut links, mut queue) = (Links::<()>::default(), Queue::default());
        assert_eq!(links.coldest_evictable(&queue, &|_| false), None);
        links.push_warm(&mut queue, BlockKey(0));
        assert_eq!(links.coldest_evictable(&queue, &|_| true), None);
        assert_eq!(links.coldest_evictable(&queue, &|_| false), Some(BlockKey(0)));
    }

    #[test]
    fn parked_block_keeps_its_data() {
        let (mut links, mut queue) = (Links::<u8>::default(), Queue::default());
        for key in 0..3 {
            links.set_data(BlockKey(key), 10 + key as u8);
            links.push_warm(&mut queue, BlockKey(key));
        }
        links.park(&mut queue, BlockKey(1));
        assert_eq!((queue.len(), links.parked_len(), links.data(BlockKey(1))), (2, 1, 11));
        assert!(links.is_parked(BlockKey(1)) && !links.contains(BlockKey(1)));
        assert!(!links.is_parked(BlockKey(0)) && !links.is_parked(BlockKey(99)));
        assert!(links.unpark(BlockKey(1)) && !links.unpark(BlockKey(1)));
        assert_eq!((links.parked_len(), links.data(BlockKey(99))), (0, 0));
        links.push_warm(&mut queue, BlockKey(1));
        assert_eq!(queue.warmest(), Some(BlockKey(1)));
    }
}
