//! The default policy: evicts the block with the fewest expected hits for the space and time it
//! takes.
//!
//! Blocks are judged in classes (`classes`), those of a request together (`request_uses`). Each
//! class learns its reuse hazard by age (`hazard`) from every use and every wait (`open_waits`),
//! also of evicted blocks (`ghosts`). A table then gives `max over T of E[hits in (a, a+T]] /
//! E[block-seconds in (a, a+T]]`. One queue per class in LRU order leaves two candidates per class:
//! the longest unused block, and, if value first rises with age, the newest. See ADR 0023. Not
//! here: the size of a tier.

mod candidates;
mod classes;
mod ghost_queue;
mod ghosts;
mod hazard;
mod open_waits;
mod request_uses;
mod resident_block;

use super::bands;
use super::prefetch_hints::PrefetchRing;
use super::queue::{Links, Queue};
use super::reuse_stats::ReuseStats;
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;
use candidates::{ClassCandidate, ClassCandidates};
use classes::{CLASSES, ReuseClass, ReuseClasses};
use ghost_queue::{GhostQueue, GhostWork};
use ghosts::Ghosts;
use hazard::{ClassTables, Evidence};
use open_waits::OpenWaits;
use request_uses::RequestUses;
use resident_block::{PENDING, ResidentBlock};
use std::time::Duration;

/// Longest time between two fits; early fits follow each other sooner, from one second on.
pub const REFIT_EVERY: Duration = Duration::from_secs(60);
/// Time constant of the exponential decay of observations. Half an hour: reuse times are stable
/// over an hour (ATC '25), and a class needs some hundred requests.
pub const DECAY_TIME: Duration = Duration::from_secs(1800);

/// Bounds of the horizon for a reuse if no block has to leave: data written to flash should be used
/// within a day.
const HORIZON_MIN: Duration = Duration::from_secs(3600);
const HORIZON_MAX: Duration = Duration::from_secs(86_400);

/// Evicts by expected hits per block and second.
#[derive(Debug)]
pub struct Density {
    /// Data of a block lies next to its links: a block is one row of memory.
    links: Links<ResidentBlock>,
    queues: [Queue; CLASSES],
    prefetch_rings: [PrefetchRing; CLASSES],
    candidates: ClassCandidates,
    /// Per class the tail of the request that last used one of its blocks, if known.
    newest_tails: [Option<BlockKey>; CLASSES],
    tables: Box<ClassTables>,
    /// Classes with a value that rises at some age.
    value_rises: [bool; CLASSES],
    queued: usize,
    classes: ReuseClasses,
    open_waits: OpenWaits,
    evidence: Evidence,
    ghosts: Ghosts,
    ghost_queue: GhostQueue,
    request: RequestUses,
    clock: Timestamp,
    last_fit: Timestamp,
    started: Option<Timestamp>,
}

impl Default for Density {
    fn default() -> Self {
        Self::new()
    }
}

impl Density {
    /// An empty policy without observations: partly filled tails leave first, then the longest
    /// unused.
    #[must_use]
    pub fn new() -> Self {
        let mut density = Density {
            links: Links::default(),
            queues: [Queue::default(); CLASSES],
            prefetch_rings: [PrefetchRing::default(); CLASSES],
            candidates: ClassCandidates::default(),
            newest_tails: [None; CLASSES],
            tables: Box::new(ClassTables::new()),
            value_rises: [false; CLASSES],
            queued: 0,
            classes: ReuseClasses::default(),
            open_waits: OpenWaits::new(),
            evidence: Evidence::new(),
            ghosts: Ghosts::default(),
            ghost_queue: GhostQueue::default(),
            request: RequestUses::default(),
            clock: Timestamp(0),
            last_fit: Timestamp(0),
            started: None,
        };
        density.fit();
        density
    }

    /// Advances the monotonic clock and accounts for all time up to it.
    fn advance(&mut self, now: Timestamp) {
        self.clock = self.clock.max(now);
        self.started.get_or_insert(self.clock);
        if self.open_waits.is_behind(self.clock) {
            self.run_deferred();
            self.open_waits.advance(self.clock, &mut self.evidence);
        }
    }

    /// Inserts an absent block at the warm end of its class and begins its wait.
    fn enqueue(&mut self, key: BlockKey, mut resident: ResidentBlock) {
        resident.used_at(self.clock);
        self.open_waits.begin(resident.class);
        self.enqueue_waiting(key, resident);
    }

    /// Like [`Density::enqueue`], for a block with a wait in progress.
    fn enqueue_waiting(&mut self, key: BlockKey, resident: ResidentBlock) {
        let class = resident.class.index();
        self.links.set_data(key, resident);
        self.links.push_warm(&mut self.queues[class], key);
        self.prefetch_rings[class].record_insert(&mut self.links, key);
        if self.queues[class].len() == 1 {
            self.update_coldest(class);
        }
        self.queued += 1;
    }

    /// Removes a block from its queue or from the parked ones; `None` if it is not resident. Its
    /// wait continues.
    fn detach(&mut self, key: BlockKey) -> Option<ResidentBlock> {
        if !self.is_resident(key) {
            return None;
        }
        if self.links.data(key).has(PENDING) {
            self.run_deferred();
        }
        let resident = self.links.data(key);
        if self.links.unpark(key) {
            return Some(resident);
        }
        self.unqueue(key, resident.class.index(), Links::unlink);
        Some(resident)
    }

    /// Removes a block from its queue with `leave`, and updates the candidates.
    fn unqueue(
        &mut self,
        key: BlockKey,
        class: usize,
        leave: fn(&mut Links<ResidentBlock>, &mut Queue, BlockKey),
    ) {
        let was_coldest = self.queues[class].coldest() == Some(key);
        if self.newest_tails[class] == Some(key) {
            // The next block of the same request, or unknown until needed.
            let next = self.links.warmer(key).filter(|&next| self.share_last_use(key, next));
            self.newest_tails[class] = next;
            if next.is_none() {
                self.candidates.invalidate_newest(class);
            }
        }
        leave(&mut self.links, &mut self.queues[class], key);
        if was_coldest {
            self.update_coldest(class);
        }
        self.queued -= 1;
    }

    fn share_last_use(&self, left: BlockKey, right: BlockKey) -> bool {
        self.links.data(left).is_used_with(&self.links.data(right))
    }

    fn is_resident(&self, key: BlockKey) -> bool {
        self.links.contains(key) || self.links.is_parked(key)
    }

    fn update_coldest(&mut self, class: usize) {
        let offer = match self.queues[class].coldest() {
            Some(key) => {
                self.prefetch_rings[class].prefetch_next(&self.links, key);
                self.appraise(class, key)
            }
            None => ClassCandidate::NONE,
        };
        self.candidates.set_coldest(class, offer);
    }

    /// A request begins to use blocks of a class, at this block.
    fn set_newest_tail(&mut self, class: usize, tail: BlockKey) {
        self.newest_tails[class] = Some(tail);
        self.candidates.invalidate_newest(class);
    }

    /// Updates the newest-end candidate of a class. If the tail is unknown because the previous
    /// request's blocks left, walks over the blocks of the latest request.
    fn update_newest(&mut self, class: usize) {
        let mut offer = ClassCandidate::NONE;
        if self.value_rises[class] {
            let tail = self.newest_tails[class].or_else(|| {
                let steps = std::iter::successors(self.queues[class].warmest(), |&key| {
                    self.links.colder(key).filter(|&colder| self.share_last_use(key, colder))
                });
                steps.last()
            });
            self.newest_tails[class] = tail;
            offer = tail.map_or(ClassCandidate::NONE, |key| self.appraise(class, key));
        }
        self.candidates.set_newest(class, offer);
    }

    /// Updates all expired candidates.
    fn update_expired(&mut self) {
        while let Some((is_fresh, class)) = self.candidates.next_expired(self.clock) {
            match is_fresh {
                false => self.update_coldest(class),
                true => self.update_newest(class),
            }
        }
    }

    /// Current value of a block of a class.
    fn appraise(&self, class: usize, key: BlockKey) -> ClassCandidate {
        let last_use = self.links.data(key).last_use(self.clock);
        let band = bands::band(self.clock.0.saturating_sub(last_use.0));
        let until = Timestamp(last_use.0.saturating_add(bands::start_us(band + 1)));
        ClassCandidate { value: self.tables.values[class][band], last_use, expires: until }
    }

    /// The block of a candidate: the first unprotected one from the coldest on, or of the latest
    /// request.
    fn evictable_candidate(
        &self,
        is_fresh: bool,
        class: usize,
        spared: &dyn Fn(BlockKey) -> bool,
    ) -> Option<(BlockKey, ClassCandidate)> {
        if is_fresh {
            let steps = std::iter::successors(self.newest_tails[class], |&key| self.links.warmer(key));
            let key = { steps }.find(|&key| !spared(key))?;
            return Some((key, self.appraise(class, key)));
        }
        let key = self.links.coldest_evictable(&self.queues[class], spared)?;
        Some((key, self.appraise(class, key)))
    }

    /// Probability of a use of a block before its value falls below `least`. Looks ahead no further
    /// than the policy has observed so far.
    fn reuse_chance(&self, class: ReuseClass, last_use: Timestamp, least: f32) -> f64 {
        let seen = self.clock.since(self.started.unwrap_or(self.clock));
        let ahead = seen.clamp(HORIZON_MIN, HORIZON_MAX).as_micros() as u64;
        let age_us = self.clock.0.saturating_sub(last_use.0);
        self.tables.chance(class, age_us, age_us.saturating_add(ahead), least)
    }

    /// Class of a block without a ghost: by its kind and turn, if stated.
    fn default_class(traits: BlockTraits) -> ReuseClass {
        match traits.category.conversation_turn {
            _ if traits.is_partial => ReuseClass::PARTIAL,
            0 => ReuseClass::ARRIVING,
            turn => ReuseClasses::coarse(traits.category.kind, turn),
        }
    }

    fn fit(&mut self) {
        self.evidence.fit(&self.classes, &mut self.tables);
        for class in 0..CLASSES {
            let rises = self.tables.values[class].windows(2).any(|pair| pair[0] < pair[1]);
            self.value_rises[class] = rises && class != ReuseClass::ARRIVING.index();
            self.update_coldest(class);
            self.update_newest(class);
        }
    }
}

impl Policy for Density {
    fn name(&self) -> &'static str {
        "density"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.finish_request();
        if now > self.clock {
            self.defer(GhostWork::Cluster);
        }
        self.advance(now);
        self.remove(key);
        let fingerprint = traits.fingerprint;
        self.defer(GhostWork::Take { key, fingerprint });
        let resident = ResidentBlock::arriving(fingerprint);
        self.enqueue(key, resident);
    }

    fn insert_moved(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.finish_request();
        self.advance(now);
        self.remove(key);
        // Moves are rare enough to wait for the ghost.
        self.run_deferred();
        let known = self.ghosts.take(traits.fingerprint, self.clock);
        let mut resident = ResidentBlock::arriving(traits.fingerprint);
        resident.apply_history(known.map(|(memory, _)| memory));
        let Some((memory, last_use)) = known else {
            resident.class = Self::default_class(traits);
            return self.enqueue(key, resident);
        };
        resident.class = memory.class;
        resident.used_at(last_use);
        self.enqueue_waiting(key, resident);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.is_resident(key) {
            self.record_use(key, traits, now, false);
        }
    }

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.is_resident(key) {
            self.record_use(key, traits, now, true);
        }
    }

    fn park(&mut self, key: BlockKey) {
        // Another request holds a block that the running request just used: its uses continue.
        if self.request.park_last(key) {
            return;
        }
        self.finish_request();
        if self.links.contains(key) {
            let class = self.links.data(key).class.index();
            self.unqueue(key, class, Links::park);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.finish_request();
        let residents = self.len();
        let Some(resident) = self.detach(key) else { return };
        let last_use = resident.last_use(self.clock);
        self.defer(if resident.class == ReuseClass::PARTIAL {
            GhostWork::Forget { class: resident.class, last_use }
        } else {
            let (fingerprint, memory) = (resident.fingerprint(), resident.history());
            GhostWork::Remember { fingerprint, memory, last_use, residents }
        });
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.finish_request();
        self.advance(now);
        if self.candidates.has_expired(self.clock) {
            self.update_expired();
        }
        let (is_fresh, class) = self.candidates.least()?;
        let first = if is_fresh { self.newest_tails[class] } else { self.queues[class].coldest() };
        if let Some(key) = first.filter(|&key| !spared(key)) {
            return Some(key);
        }
        // The block behind a protected one may be worth more than another class's candidate.
        let mut offers = self.candidates.clone();
        let mut named = [[None; CLASSES]; 2];
        loop {
            let place = offers.least()?;
            let name = &mut named[usize::from(place.0)][place.1];
            if name.is_some() {
                return *name;
            }
            let found = self.evictable_candidate(place.0, place.1, spared);
            *name = found.map(|(key, _)| key);
            offers.set(place, found.map_or(ClassCandidate::NONE, |(_, offer)| offer));
        }
    }

    fn admits(&mut self, newcomer: BlockTraits, victim: BlockKey, now: Timestamp) -> bool {
        self.finish_request();
        self.advance(now);
        let room = self.appraise(self.links.data(victim).class.index(), victim).value;
        let is_worth_it = |class: ReuseClass| self.tables.values[class.index()][0] >= room;
        // The session is known only when the request ends; until then kind and turn decide.
        let class = Self::default_class(newcomer);
        if newcomer.is_partial || is_worth_it(class) {
            return is_worth_it(class);
        }
        // A returning block may be worth more. Looked up only for blocks that would be rejected,
        // because the lookup is the slowest step; deferred work may concern it.
        self.ghosts.prefetch(newcomer.fingerprint);
        self.run_deferred();
        let known = self.ghosts.find(newcomer.fingerprint, self.clock);
        known.is_some_and(|(memory, _)| self.tables.values[memory.class.index()][0] >= room)
    }

    fn note_absent(&mut self, traits: BlockTraits, now: Timestamp) {
        self.record_absent(traits, now);
    }

    fn reuse_prob_if_moved_in(
        &mut self,
        mover: BlockTraits,
        victim: Option<BlockKey>,
        now: Timestamp,
    ) -> f64 {
        self.finish_request();
        self.advance(now);
        self.run_deferred();
        let least =
            victim.map_or(0.0, |victim| self.appraise(self.links.data(victim).class.index(), victim).value);
        let known = self.ghosts.find(mover.fingerprint, self.clock);
        let (class, last_use) = known.map_or_else(
            || (Self::default_class(mover), self.clock),
            |(memory, last_use)| (memory.class, last_use),
        );
        self.reuse_chance(class, last_use, least)
    }

    fn reuse_prob_if_kept(&mut self, resident: BlockKey, now: Timestamp) -> f64 {
        self.finish_request();
        self.advance(now);
        if !self.is_resident(resident) {
            return 1.0;
        }
        self.update_expired();
        let least = self.candidates.least_value();
        let resident = self.links.data(resident);
        self.reuse_chance(resident.class, resident.last_use(self.clock), least)
    }

    fn refit(&mut self, now: Timestamp) {
        self.finish_request();
        self.run_deferred();
        self.advance(now);
        let since = self.clock.since(self.last_fit);
        let seen = self.clock.since(self.started.unwrap_or(self.clock));
        if since >= (seen / 4).clamp(Duration::from_secs(1), REFIT_EVERY) {
            self.last_fit = self.clock;
            self.fit();
            self.evidence.decay((-since.as_secs_f64() / DECAY_TIME.as_secs_f64()).exp());
        }
    }

    fn reuse_stats(&mut self, now: Timestamp) -> ReuseStats {
        self.finish_request();
        self.run_deferred();
        self.advance(now);
        self.evidence.reuse_stats(&self.classes)
    }

    fn set_fleet_stats(&mut self, fleet: &ReuseStats, now: Timestamp) {
        self.finish_request();
        self.run_deferred();
        self.advance(now);
        self.evidence.set_fleet_stats(fleet);
        self.fit();
    }

    fn len(&self) -> usize {
        self.queued + self.links.parked_len()
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod moved_tests;
