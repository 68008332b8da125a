//! The paper's policy (ATC '25 §4): evict the block least likely to be used again within its life.
//!
//! Priority is `(reuse probability, −offset)`, compared lexicographically; the lowest leaves first. A
//! probability depends only on the category and the time since last use and falls with the latter, so one
//! queue per category ordered by last use leaves W heads to compare: a victim costs O(W), not O(N).
//! Frequency is deliberately absent. Variants of the probability go by names of their own ([`NAMES`]). Not here:
//! the curves ([`super::reuse_prob`]) and the comparison of the heads (`heads.rs`).

pub use super::heads::TURNS_DISTINCT_MAX;

use super::ahead::{Ahead, NamesAhead, Trail};
use super::heads::{CATEGORIES, Heads, Offer, micros};
use super::queue::{Links, Queue};
use super::reuse_prob::{Form, Observed, ReuseCurve};
use super::statistics::{CategorySums, Role, Statistics};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::{Category, RequestKind, Timestamp};
use std::cmp::Ordering;
use std::time::Duration;

/// Time between two fits. One minute: the paper finds the curves stable over an hour.
pub const REFIT_EVERY: Duration = Duration::from_secs(60);
/// One in this many uses is sampled. The blocks of a request are used together, so neighbours add no
/// information; at 8 a request of ordinary length gives a few samples.
pub const SAMPLE_STRIDE: u32 = 8;

/// The variants by name: what each makes of the time since last use.
pub const NAMES: [(&str, Form); 4] = [
    ("workload", Form::Window),
    ("workload-share", Form::Share),
    ("workload-posterior", Form::Posterior),
    ("workload-aged", Form::Aged),
];

/// What is remembered of a resident block, beside its links.
#[derive(Clone, Copy, Debug, Default)]
struct Resident {
    last_use: Timestamp,
    offset_blocks: u32,
    ahead: Ahead,
    category: u16,
}

impl NamesAhead for Resident {
    fn ahead(&mut self) -> &mut Ahead {
        &mut self.ahead
    }
}

/// The blocks of one category, oldest use first, equal uses by falling offset.
#[derive(Clone, Copy, Debug, Default)]
struct CategoryQueue {
    queue: Queue,
    /// Where the last block was put: the blocks of one request come one after the other.
    finger: Option<BlockKey>,
    trail: Trail,
}

/// Evicts by reuse probability, then by depth in the prefix.
#[derive(Debug)]
pub struct Workload {
    name: &'static str,
    /// What is known of held blocks stays with their links.
    links: Links<Resident>,
    queues: Vec<CategoryQueue>,
    heads: Heads,
    observed: Vec<Observed>,
    /// All categories together: what one that is seen too rarely is taken for.
    all: Option<Observed>,
    len: usize,
    uses: u32,
    clock: Timestamp,
    fitted: Timestamp,
}

impl Default for Workload {
    fn default() -> Self {
        Self::new()
    }
}

impl Workload {
    /// The paper's policy over no block, with the assumed curves.
    #[must_use]
    pub fn new() -> Self {
        let [(name, form), ..] = NAMES;
        Self::of(name, form)
    }

    /// The variant of this name, if there is one.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        let (name, form) = NAMES.into_iter().find(|(known, _)| *known == name)?;
        Some(Self::of(name, form))
    }

    fn of(name: &'static str, form: Form) -> Self {
        let of_kind =
            |kind: RequestKind| (0..TURNS_DISTINCT_MAX).filter_map(move |_| Observed::nothing(kind));
        let observed: Vec<Observed> = RequestKind::ALL.into_iter().flat_map(of_kind).collect();
        let mut heads = Heads::new(form);
        heads.renew_curves(observed.iter().map(Observed::curve));
        Workload {
            name,
            links: Links::default(),
            queues: vec![CategoryQueue::default(); CATEGORIES],
            heads,
            observed,
            all: Observed::nothing(RequestKind::default()),
            len: 0,
            uses: 0,
            clock: Timestamp(0),
            fitted: Timestamp(0),
        }
    }

    /// The curve in force for a category.
    #[must_use]
    pub fn curve(&self, category: Category) -> &ReuseCurve {
        self.observed[position(category)].curve()
    }

    /// Puts an absent block where its last use and offset belong.
    fn enqueue(&mut self, key: BlockKey, resident: Resident) {
        self.links.set_about(key, resident);
        let category = usize::from(resident.category);
        let CategoryQueue { queue, finger, trail } = &mut self.queues[category];
        match finger.or(queue.warmest()) {
            Some(start) => place(&mut self.links, queue, start, key),
            None => self.links.push_warm(queue, key),
        }
        *finger = Some(key);
        trail.came(&mut self.links, key);
        if queue.coldest() == Some(key) {
            self.renew_head(category);
        }
        self.len += 1;
    }

    /// Takes a block out of its queue.
    fn dequeue(&mut self, key: BlockKey, how: fn(&mut Links<Resident>, &mut Queue, BlockKey)) {
        let category = usize::from(self.links.about(key).category);
        let CategoryQueue { queue, finger, .. } = &mut self.queues[category];
        if *finger == Some(key) {
            *finger = self.links.colder(key).or(self.links.warmer(key));
        }
        let was_head = queue.coldest() == Some(key);
        how(&mut self.links, queue, key);
        if was_head {
            self.renew_head(category);
        }
        self.len -= 1;
    }

    /// Repeats the coldest block of a category where heads are compared.
    fn renew_head(&mut self, category: usize) {
        match self.queues[category].queue.coldest() {
            Some(key) => {
                let Resident { last_use, offset_blocks, .. } = self.links.about(key);
                self.heads.set(category, last_use, offset_blocks);
                self.queues[category].trail.leads(&self.links, key);
            }
            None => self.heads.clear(category),
        }
    }

    /// Takes a block out of its queue or from among the parked ones; nothing when it is not resident.
    fn take_out(&mut self, key: BlockKey) -> Option<Resident> {
        if self.links.contains(key) {
            self.dequeue(key, Links::unlink);
        } else if !self.links.unpark(key) {
            return None;
        }
        Some(self.links.about(key))
    }

    fn fit(&mut self) {
        let Some(all) = &mut self.all else { return };
        let before = *all.curve();
        all.refit(&before);
        let wider = *all.curve();
        self.observed.iter_mut().for_each(|observed| observed.refit(&wider));
        self.heads.renew_curves(self.observed.iter().map(Observed::curve));
    }

    fn count_use(&mut self, category: Category) {
        self.observed[position(category)].used();
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

    /// The coldest unspared block of a category, and what it is worth.
    fn unspared(
        &self,
        category: usize,
        now: f64,
        spared: &dyn Fn(BlockKey) -> bool,
    ) -> Option<(Offer, BlockKey)> {
        let key = self.links.coldest_unspared(&self.queues[category].queue, spared)?;
        let Resident { last_use, offset_blocks, .. } = self.links.about(key);
        Some((self.heads.offer(category, last_use, offset_blocks, now), key))
    }
}

/// Walks from `start` to where `key` belongs and links it there. `start` is the place of the block put
/// before, so a request that comes in order, from either end, walks one step per block.
fn place(links: &mut Links<Resident>, queue: &mut Queue, start: BlockKey, key: BlockKey) {
    let leaves_before = |links: &Links<Resident>, left: BlockKey, right: BlockKey| {
        let (left, right) = (links.about(left), links.about(right));
        let by_use = left.last_use.cmp(&right.last_use);
        by_use.then(right.offset_blocks.cmp(&left.offset_blocks)) == Ordering::Less
    };
    // A later use than anything queued is the common case: a new request.
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

/// What the categories are called on every node, in the order of their queues.
fn roles() -> impl Iterator<Item = Role> {
    let of_kind = |kind| (0..TURNS_DISTINCT_MAX).map(move |turn| Role::Paper(kind, turn as u8));
    RequestKind::ALL.into_iter().flat_map(of_kind)
}

/// The queue of a category.
fn position(category: Category) -> usize {
    let turn = usize::from(category.turn).min(TURNS_DISTINCT_MAX - 1);
    category.kind as usize * TURNS_DISTINCT_MAX + turn
}

fn resident(traits: BlockTraits, last_use: Timestamp) -> Resident {
    let category = position(traits.category) as u16;
    Resident { last_use, offset_blocks: traits.offset_blocks, ahead: Ahead::default(), category }
}

impl Policy for Workload {
    fn name(&self) -> &'static str {
        self.name
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
        self.observed[usize::from(before.category)].reused(interval_us, is_sampled);
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
            self.dequeue(key, Links::park);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.take_out(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let now = micros(self.clock.max(now));
        let mut worths = [f64::INFINITY; CATEGORIES];
        let worths = self.heads.worths(now, &mut worths);
        let mut chosen: Option<(Offer, BlockKey)> = None;
        // Blocks behind a head are worth more than it, so the lowest head settles the matter unless it is spared.
        while let Some(head) = self.heads.lowest(worths) {
            if chosen.as_ref().is_some_and(|(best, _)| !head.leaves_before(best)) {
                break;
            }
            let Some((offer, key)) = self.unspared(head.category, now, spared) else {
                self.heads.pass_over(head.category, worths);
                continue;
            };
            if offer == head {
                return Some(key);
            }
            if chosen.as_ref().is_none_or(|(best, _)| offer.leaves_before(best)) {
                chosen = Some((offer, key));
            }
            self.heads.pass_over(head.category, worths);
        }
        chosen.map(|(_, key)| key)
    }

    fn refit(&mut self, now: Timestamp) {
        let now = self.advance(now);
        if now.since(self.fitted) >= REFIT_EVERY {
            self.fitted = now;
            self.fit();
        }
    }

    fn statistics(&mut self, _now: Timestamp) -> Statistics {
        let mut all = Statistics::default();
        for (role, observed) in roles().zip(&self.observed) {
            let sums = observed.sums();
            if sums.uses >= 1.0 {
                all.add(role, &sums);
            }
        }
        all
    }

    fn inform(&mut self, fleet: &Statistics, _now: Timestamp) {
        let mut together = CategorySums::default();
        for (role, observed) in roles().zip(&mut self.observed) {
            let sums = fleet.of(role);
            observed.inform(sums);
            together.add(sums.unwrap_or(&CategorySums::default()));
        }
        if let Some(all) = &mut self.all {
            all.inform(Some(&together));
        }
        // A curve in force is replaced at the next fit; who has made none has no better one.
        if self.fitted == Timestamp(0) {
            self.fit();
        }
    }

    fn len(&self) -> usize {
        self.len + self.links.parked_len()
    }
}

#[cfg(test)]
#[path = "workload_tests.rs"]
mod tests;
