//! The paper's policy (ATC '25 §4): evict the block least likely to be used again within its life.
//!
//! Priority is `(reuse probability, −offset)`, compared lexicographically; the lowest leaves first.
//! A probability depends only on the category and the time since last use, and decreases with that
//! time. So one queue per category, ordered by last use, leaves W heads to compare: a victim costs
//! O(W), not O(N). Frequency is deliberately absent. Variants of the probability have their own
//! names ([`NAMES`]). Not here: the curves ([`super::reuse_prob`]) and the comparison of the heads
//! (`heads.rs`).

pub use super::heads::TURNS_DISTINCT_MAX;

use super::heads::{CATEGORIES, CategoryHeads, VictimCandidate, micros};
use super::prefetch_hints::{HasPrefetchHint, PrefetchHint, PrefetchRing};
use super::queue::{Links, Queue};
use super::reuse_prob::{CategoryEstimator, ReuseCurve, WorthModel};
use super::reuse_stats::{CategoryRole, CategorySums, ReuseStats};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::{Category, RequestKind, Timestamp};
use std::cmp::Ordering;
use std::time::Duration;

/// Time between two fits. One minute: the paper finds the curves stable over an hour.
pub const REFIT_EVERY: Duration = Duration::from_secs(60);
/// One use in this many is sampled. Blocks of a request are used together, so neighbours add no
/// information; a request of ordinary length gives a few samples.
pub const SAMPLE_STRIDE: u32 = 8;

/// The variants: name, and the model of worth over time.
pub const NAMES: [(&str, WorthModel); 4] = [
    ("workload", WorthModel::Window),
    ("workload-share", WorthModel::Share),
    ("workload-posterior", WorthModel::Posterior),
    ("workload-aged", WorthModel::Aged),
];

/// Data of a resident block, next to its links.
#[derive(Clone, Copy, Debug, Default)]
struct WorkloadEntry {
    last_use: Timestamp,
    offset_blocks: u32,
    ahead: PrefetchHint,
    category: u16,
}

impl HasPrefetchHint for WorkloadEntry {
    fn prefetch_hint(&mut self) -> &mut PrefetchHint {
        &mut self.ahead
    }
}

/// The blocks of one category, oldest use first, equal uses by falling offset.
#[derive(Clone, Copy, Debug, Default)]
struct CategoryQueue {
    queue: Queue,
    /// Position of the last insertion: the blocks of one request arrive one after the other.
    last_insert: Option<BlockKey>,
    prefetch_ring: PrefetchRing,
}

/// Evicts by reuse probability, then by depth in the prefix.
#[derive(Debug)]
pub struct Workload {
    name: &'static str,
    /// Data of parked blocks stays with their links.
    links: Links<WorkloadEntry>,
    queues: Vec<CategoryQueue>,
    heads: CategoryHeads,
    observed: Vec<CategoryEstimator>,
    /// All categories together: the fallback for a category with too few observations.
    all: Option<CategoryEstimator>,
    len: usize,
    uses: u32,
    clock: Timestamp,
    last_fit: Timestamp,
}

impl Default for Workload {
    fn default() -> Self {
        Self::new()
    }
}

impl Workload {
    /// The paper's policy without blocks, with the assumed curves.
    #[must_use]
    pub fn new() -> Self {
        let [(name, form), ..] = NAMES;
        Self::with_model(name, form)
    }

    /// The variant with this name, if there is one.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        let (name, form) = NAMES.into_iter().find(|(known, _)| *known == name)?;
        Some(Self::with_model(name, form))
    }

    fn with_model(name: &'static str, form: WorthModel) -> Self {
        let of_kind = |kind: RequestKind| {
            (0..TURNS_DISTINCT_MAX).filter_map(move |_| CategoryEstimator::with_assumed_curve(kind))
        };
        let observed: Vec<CategoryEstimator> = RequestKind::ALL.into_iter().flat_map(of_kind).collect();
        let mut heads = CategoryHeads::new(form);
        heads.set_curves(observed.iter().map(CategoryEstimator::curve));
        Workload {
            name,
            links: Links::default(),
            queues: vec![CategoryQueue::default(); CATEGORIES],
            heads,
            observed,
            all: CategoryEstimator::with_assumed_curve(RequestKind::default()),
            len: 0,
            uses: 0,
            clock: Timestamp(0),
            last_fit: Timestamp(0),
        }
    }

    /// The current curve of a category.
    #[must_use]
    pub fn curve(&self, category: Category) -> &ReuseCurve {
        self.observed[queue_index(category)].curve()
    }

    /// Inserts an absent block by last use and offset.
    fn enqueue(&mut self, key: BlockKey, resident: WorkloadEntry) {
        self.links.set_data(key, resident);
        let category = usize::from(resident.category);
        let CategoryQueue { queue, last_insert: finger, prefetch_ring: trail } = &mut self.queues[category];
        match finger.or(queue.warmest()) {
            Some(start) => insert_in_order(&mut self.links, queue, start, key),
            None => self.links.push_warm(queue, key),
        }
        *finger = Some(key);
        trail.record_insert(&mut self.links, key);
        if queue.coldest() == Some(key) {
            self.update_head(category);
        }
        self.len += 1;
    }

    /// Removes a block from its queue.
    fn dequeue(&mut self, key: BlockKey, how: fn(&mut Links<WorkloadEntry>, &mut Queue, BlockKey)) {
        let category = usize::from(self.links.data(key).category);
        let CategoryQueue { queue, last_insert: finger, .. } = &mut self.queues[category];
        if *finger == Some(key) {
            *finger = self.links.colder(key).or(self.links.warmer(key));
        }
        let was_head = queue.coldest() == Some(key);
        how(&mut self.links, queue, key);
        if was_head {
            self.update_head(category);
        }
        self.len -= 1;
    }

    /// Updates the head of a category from its queue.
    fn update_head(&mut self, category: usize) {
        match self.queues[category].queue.coldest() {
            Some(key) => {
                let WorkloadEntry { last_use, offset_blocks, .. } = self.links.data(key);
                self.heads.set(category, last_use, offset_blocks);
                self.queues[category].prefetch_ring.prefetch_next(&self.links, key);
            }
            None => self.heads.clear(category),
        }
    }

    /// Removes a block from its queue or from the parked ones; `None` if it is not resident.
    fn detach(&mut self, key: BlockKey) -> Option<WorkloadEntry> {
        if self.links.contains(key) {
            self.dequeue(key, Links::unlink);
        } else if !self.links.unpark(key) {
            return None;
        }
        Some(self.links.data(key))
    }

    fn fit(&mut self) {
        let Some(all) = &mut self.all else { return };
        let before = *all.curve();
        all.refit(&before);
        let wider = *all.curve();
        self.observed.iter_mut().for_each(|observed| observed.refit(&wider));
        self.heads.set_curves(self.observed.iter().map(CategoryEstimator::curve));
    }

    fn count_use(&mut self, category: Category) {
        self.observed[queue_index(category)].record_use();
        if let Some(all) = &mut self.all {
            all.record_use();
        }
    }

    fn is_sampled(&mut self) -> bool {
        self.uses = self.uses.wrapping_add(1);
        self.uses.is_multiple_of(SAMPLE_STRIDE)
    }

    /// Monotonic time: a queue would lose its order if time went backwards.
    fn advance(&mut self, now: Timestamp) -> Timestamp {
        self.clock = self.clock.max(now);
        self.clock
    }

    /// The coldest unprotected block of a category, and its worth.
    fn evictable_candidate(
        &self,
        category: usize,
        now: f64,
        spared: &dyn Fn(BlockKey) -> bool,
    ) -> Option<(VictimCandidate, BlockKey)> {
        let key = self.links.coldest_evictable(&self.queues[category].queue, spared)?;
        let WorkloadEntry { last_use, offset_blocks, .. } = self.links.data(key);
        Some((self.heads.candidate(category, last_use, offset_blocks, now), key))
    }
}

/// Walks from `start` to the position of `key` and links it there. `start` is the last insertion,
/// so a request in order, from either end, takes one step per block.
fn insert_in_order(links: &mut Links<WorkloadEntry>, queue: &mut Queue, start: BlockKey, key: BlockKey) {
    let leaves_before = |links: &Links<WorkloadEntry>, left: BlockKey, right: BlockKey| {
        let (left, right) = (links.data(left), links.data(right));
        let by_use = left.last_use.cmp(&right.last_use);
        by_use.then(right.offset_blocks.cmp(&left.offset_blocks)) == Ordering::Less
    };
    // Common case: a new request, used later than all queued blocks.
    if let Some(warmest) = queue.warmest()
        && !leaves_before(links, key, warmest)
    {
        return links.push_warm(queue, key);
    }
    let mut at = start;
    if leaves_before(links, key, at) {
        while let Some(colder) = links.colder(at).filter(|&colder| leaves_before(links, key, colder)) {
            at = colder;
        }
        return links.insert_colder_than(queue, key, at);
    }
    while let Some(warmer) = links.warmer(at).filter(|&warmer| !leaves_before(links, key, warmer)) {
        at = warmer;
    }
    links.insert_warmer_than(queue, key, at);
}

/// The role of each category, in queue order.
fn roles() -> impl Iterator<Item = CategoryRole> {
    let of_kind = |kind| (0..TURNS_DISTINCT_MAX).map(move |turn| CategoryRole::Paper(kind, turn as u8));
    RequestKind::ALL.into_iter().flat_map(of_kind)
}

/// Queue index of a category.
fn queue_index(category: Category) -> usize {
    let turn = usize::from(category.conversation_turn).min(TURNS_DISTINCT_MAX - 1);
    category.kind as usize * TURNS_DISTINCT_MAX + turn
}

fn entry(traits: BlockTraits, last_use: Timestamp) -> WorkloadEntry {
    let category = queue_index(traits.category) as u16;
    WorkloadEntry { last_use, offset_blocks: traits.offset_blocks, ahead: PrefetchHint::default(), category }
}

impl Policy for Workload {
    fn name(&self) -> &'static str {
        self.name
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        let now = self.advance(now);
        self.detach(key);
        self.enqueue(key, entry(traits, now));
        self.count_use(traits.category);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        let Some(before) = self.detach(key) else { return };
        let now = self.advance(now);
        let interval_us = now.0 - before.last_use.0;
        let is_sampled = self.is_sampled();
        self.observed[usize::from(before.category)].record_reuse(interval_us, is_sampled);
        if let Some(all) = &mut self.all {
            all.record_reuse(interval_us, is_sampled);
        }
        self.count_use(traits.category);
        self.enqueue(key, entry(traits, now));
    }

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.detach(key).is_some() {
            let now = self.advance(now);
            self.enqueue(key, entry(traits, now));
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.dequeue(key, Links::park);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.detach(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let now = micros(self.clock.max(now));
        let mut worths = [f64::INFINITY; CATEGORIES];
        let worths = self.heads.worths(now, &mut worths);
        let mut chosen: Option<(VictimCandidate, BlockKey)> = None;
        // Blocks behind a head are worth more, so the lowest head decides unless it is protected.
        while let Some(head) = self.heads.lowest(worths) {
            if chosen.as_ref().is_some_and(|(best, _)| !head.leaves_before(best)) {
                break;
            }
            let Some((offer, key)) = self.evictable_candidate(head.category, now, spared) else {
                self.heads.exclude(head.category, worths);
                continue;
            };
            if offer == head {
                return Some(key);
            }
            if chosen.as_ref().is_none_or(|(best, _)| offer.leaves_before(best)) {
                chosen = Some((offer, key));
            }
            self.heads.exclude(head.category, worths);
        }
        chosen.map(|(_, key)| key)
    }

    fn refit(&mut self, now: Timestamp) {
        let now = self.advance(now);
        if now.since(self.last_fit) >= REFIT_EVERY {
            self.last_fit = now;
            self.fit();
        }
    }

    fn reuse_stats(&mut self, _now: Timestamp) -> ReuseStats {
        let mut all = ReuseStats::default();
        for (role, observed) in roles().zip(&self.observed) {
            let sums = observed.sums();
            if sums.uses >= 1.0 {
                all.add(role, &sums);
            }
        }
        all
    }

    fn set_fleet_stats(&mut self, fleet: &ReuseStats, _now: Timestamp) {
        let mut together = CategorySums::default();
        for (role, observed) in roles().zip(&mut self.observed) {
            let sums = fleet.get(role);
            observed.set_fleet_sums(sums);
            together.add(sums.unwrap_or(&CategorySums::default()));
        }
        if let Some(all) = &mut self.all {
            all.set_fleet_sums(Some(&together));
        }
        // The next fit replaces a fitted curve; before the first fit the fleet's is better than the
        // assumed one.
        if self.last_fit == Timestamp(0) {
            self.fit();
        }
    }

    fn len(&self) -> usize {
        self.len + self.links.parked_len()
    }
}

#[cfg(test)]
mod tests;
