//! The paper's policy (ATC '25 §4): evict the block least likely to be used again within its life.
//!
//! Priority is `(reuse probability, −offset)`, compared lexicographically; the lowest leaves first. A
//! probability depends only on the category and the time since last use and falls with the latter, so one
//! queue per category ordered by last use leaves W heads to compare: a victim costs O(W), not O(N).
//! Frequency is deliberately absent. Not here: the curves ([`super::reuse_prob`]).

use super::queue::{Links, Parked, Queue};
use super::reuse_prob::{Observed, ReuseCurve};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::{Category, RequestKind, Timestamp};
use std::cmp::Ordering;
use std::time::Duration;

/// Turns with a curve of their own; later ones share the last. Turn 5 is the P90 of trace A, and the chance
/// of a next turn is level after the first.
pub const TURNS_DISTINCT_MAX: usize = 8;
/// Time between two fits. One minute: the paper finds the curves stable over an hour.
pub const REFIT_EVERY: Duration = Duration::from_secs(60);
/// One in this many uses is sampled. The blocks of a request are used together, so neighbours add no
/// information; at 8 a request of ordinary length gives a few samples.
pub const SAMPLE_STRIDE: u32 = 8;

/// What is remembered of a resident block.
#[derive(Clone, Copy, Debug, Default)]
struct Resident {
    last_use: Timestamp,
    offset_blocks: u32,
    category: u16,
}

/// The blocks of one category, oldest use first, equal uses by falling offset.
#[derive(Clone, Debug)]
struct CategoryQueue {
    queue: Queue,
    /// Where the last block was put: the blocks of one request come one after the other.
    finger: Option<BlockKey>,
    /// The coldest block, repeated here so that comparing heads reads no block.
    head: Head,
    observed: Observed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Head {
    last_use: Timestamp,
    offset_blocks: u32,
}

/// Evicts by reuse probability, then by depth in the prefix.
#[derive(Debug)]
pub struct Workload {
    links: Links,
    blocks: Vec<Resident>,
    categories: Vec<CategoryQueue>,
    /// All categories together: what one that is seen too rarely is taken for.
    all: Option<Observed>,
    /// Held blocks; what is known of them stays in `blocks`.
    parked: Parked,
    len: usize,
    uses: u32,
    clock: Timestamp,
    fitted: Timestamp,
}

/// A block on its way out: what a victim is chosen by.
#[derive(Clone, Copy)]
struct Offer {
    ln_reuse_prob: f64,
    head: Head,
    category: usize,
}

impl Offer {
    /// Whether `self` leaves before `other`. Ties beyond the paper's order go to the longer unused block,
    /// then to the lower category, so that equal histories give equal victims.
    fn leaves_before(&self, other: &Offer) -> bool {
        let order = self.ln_reuse_prob.total_cmp(&other.ln_reuse_prob);
        let order = order.then(other.head.offset_blocks.cmp(&self.head.offset_blocks));
        let order = order.then(self.head.last_use.cmp(&other.head.last_use));
        order.then(self.category.cmp(&other.category)) == Ordering::Less
    }
}

impl Default for Workload {
    fn default() -> Self {
        Self::new()
    }
}

impl Workload {
    /// A policy over no block, with the assumed curves.
    #[must_use]
    pub fn new() -> Self {
        let fresh = |kind| {
            let observed = Observed::nothing(kind)?;
            Some(CategoryQueue { queue: Queue::default(), finger: None, head: Head::default(), observed })
        };
        let of_kind = |kind: RequestKind| (0..TURNS_DISTINCT_MAX).filter_map(move |_| fresh(kind));
        Workload {
            links: Links::default(),
            blocks: Vec::new(),
            categories: RequestKind::ALL.into_iter().flat_map(of_kind).collect(),
            all: Observed::nothing(RequestKind::default()),
            parked: Parked::default(),
            len: 0,
            uses: 0,
            clock: Timestamp(0),
            fitted: Timestamp(0),
        }
    }

    /// The curve in force for a category.
    #[must_use]
    pub fn curve(&self, category: Category) -> &ReuseCurve {
        self.categories[position(category)].observed.curve()
    }

    /// Puts an absent block where its last use and offset belong.
    fn enqueue(&mut self, key: BlockKey, resident: Resident) {
        let at = key.0 as usize;
        if at >= self.blocks.len() {
            self.blocks.resize(at + 1, Resident::default());
        }
        self.blocks[at] = resident;
        let category = &mut self.categories[usize::from(resident.category)];
        let start = category.finger.or(category.queue.warmest());
        match start {
            Some(start) => {
                place(&mut self.links, &self.blocks, &mut category.queue, start, key);
            }
            None => self.links.push_warm(&mut category.queue, key),
        }
        category.finger = Some(key);
        category.renew_head(&self.blocks);
        self.len += 1;
    }

    /// Takes a resident block out of its queue and gives what was known of it.
    fn dequeue(&mut self, key: BlockKey) -> Resident {
        let resident = self.blocks[key.0 as usize];
        let category = &mut self.categories[usize::from(resident.category)];
        if category.finger == Some(key) {
            category.finger = self.links.colder(key).or(self.links.warmer(key));
        }
        self.links.unlink(&mut category.queue, key);
        category.renew_head(&self.blocks);
        self.len -= 1;
        resident
    }

    /// Takes a block out of its queue or from among the parked ones; nothing when it is not resident.
    fn take_out(&mut self, key: BlockKey) -> Option<Resident> {
        if self.parked.take(key) {
            return Some(self.blocks[key.0 as usize]);
        }
        self.links.contains(key).then(|| self.dequeue(key))
    }

    fn count_use(&mut self, category: Category) {
        self.categories[position(category)].observed.used();
        if let Some(all) = &mut self.all {
            all.used();
        }
    }

    fn is_sampled(&mut self) -> bool {
        self.uses = self.uses.wrapping_add(1);
        self.uses.is_multiple_of(SAMPLE_STRIDE)
    }

    /// Time as this policy counts it: never backwards, or a queue would lose its order.
    fn advance(&mut self, now: Timestamp) -> Timestamp {
        self.clock = self.clock.max(now);
        self.clock
    }

    fn offer(&self, position: usize, now: Timestamp, head: Head) -> Offer {
        let idle_us = now.0.saturating_sub(head.last_use.0);
        let ln_reuse_prob = self.categories[position].observed.curve().ln_reuse_prob(idle_us);
        Offer { ln_reuse_prob, head, category: position }
    }

    /// The coldest unspared block of a category.
    fn unspared(&self, position: usize, spared: &dyn Fn(BlockKey) -> bool) -> Option<(BlockKey, Head)> {
        let key = self.links.coldest_unspared(&self.categories[position].queue, spared)?;
        Some((key, self.blocks[key.0 as usize].as_head()))
    }
}

impl Resident {
    fn as_head(&self) -> Head {
        Head { last_use: self.last_use, offset_blocks: self.offset_blocks }
    }
}

impl CategoryQueue {
    fn renew_head(&mut self, blocks: &[Resident]) {
        if let Some(key) = self.queue.coldest() {
            self.head = blocks[key.0 as usize].as_head();
        }
    }
}

/// Walks from `start` to where `key` belongs and links it there. `start` is the place of the block put
/// before, so a request that comes in order, from either end, walks one step per block.
fn place(links: &mut Links, blocks: &[Resident], queue: &mut Queue, start: BlockKey, key: BlockKey) {
    let leaves_before = |left: BlockKey, right: BlockKey| {
        let (left, right) = (&blocks[left.0 as usize], &blocks[right.0 as usize]);
        let by_use = left.last_use.cmp(&right.last_use);
        by_use.then(right.offset_blocks.cmp(&left.offset_blocks)) == Ordering::Less
    };
    // A later use than anything queued is the common case: a new request.
    if let Some(warmest) = queue.warmest()
        && !leaves_before(key, warmest)
    {
        return links.push_warm(queue, key);
    }
    let mut at = start;
    if leaves_before(key, at) {
        while let Some(colder) = links.colder(at).filter(|&colder| leaves_before(key, colder)) {
            at = colder;
        }
        return links.insert_colder_than(queue, key, at);
    }
    while let Some(warmer) = links.warmer(at).filter(|&warmer| !leaves_before(key, warmer)) {
        at = warmer;
    }
    links.insert_warmer_than(queue, key, at);
}

/// The queue of a category.
fn position(category: Category) -> usize {
    let turn = usize::from(category.turn).min(TURNS_DISTINCT_MAX - 1);
    category.kind as usize * TURNS_DISTINCT_MAX + turn
}

fn resident(traits: BlockTraits, last_use: Timestamp) -> Resident {
    let category = position(traits.category) as u16;
    Resident { last_use, offset_blocks: traits.offset_blocks, category }
}

impl Policy for Workload {
    fn name(&self) -> &'static str {
        "workload"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        let now = self.advance(now);
        self.take_out(key);
        self.enqueue(key, resident(traits, now));
        self.count_use(traits.category);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        let Some(before) = self.take_out(key) else { return };
        let now = self.advance(now);
        let interval_us = now.0 - before.last_use.0;
        let is_sampled = self.is_sampled();
        self.categories[usize::from(before.category)].observed.reused(interval_us, is_sampled);
        if let Some(all) = &mut self.all {
            all.reused(interval_us, is_sampled);
        }
        self.count_use(traits.category);
        self.enqueue(key, resident(traits, now));
    }

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.take_out(key).is_some() {
            let now = self.advance(now);
            self.enqueue(key, resident(traits, now));
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.dequeue(key);
            self.parked.insert(key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.take_out(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let now = self.clock.max(now);
        let mut chosen: Option<(Offer, BlockKey)> = None;
        for position in 0..self.categories.len() {
            let category = &self.categories[position];
            if category.queue.len() == 0 {
                continue;
            }
            let leaves = |offer: &Offer| chosen.as_ref().is_none_or(|(best, _)| offer.leaves_before(best));
            // Blocks behind the head are worth more than it: a head that stays settles its category.
            if !leaves(&self.offer(position, now, category.head)) {
                continue;
            }
            let Some((key, head)) = self.unspared(position, spared) else { continue };
            let offer = self.offer(position, now, head);
            if leaves(&offer) {
                chosen = Some((offer, key));
            }
        }
        chosen.map(|(_, key)| key)
    }

    fn refit(&mut self, now: Timestamp) {
        let now = self.advance(now);
        if now.since(self.fitted) >= REFIT_EVERY {
            self.fitted = now;
            let Some(all) = &mut self.all else { return };
            let before = *all.curve();
            all.refit(&before);
            let wider = *all.curve();
            self.categories.iter_mut().for_each(|category| category.observed.refit(&wider));
        }
    }

    fn len(&self) -> usize {
        self.len + self.parked.len()
    }
}

#[cfg(test)]
#[path = "workload_tests.rs"]
mod tests;
