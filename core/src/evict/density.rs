//! Our own policy: evict the block that gives the fewest hits for the room and the time it takes.
//!
//! Blocks are judged in classes (`classes`), a request's together (`run`). Of each class is learned how likely a
//! use is at an age (`hazard`), from every use and every wait for one (`alive`), also of blocks that left
//! (`ghosts`); from that a table of `max over T of E[hits in (a, a+T]] / E[block-seconds in (a, a+T]]`. One queue
//! a class in the order of last use leaves two blocks a class to look up: the longest unused, and, where a value
//! rises with age first, the newest. Not here: how large a tier should be.

mod alive;
mod classes;
mod ghosts;
mod hazard;
mod offers;
mod pending;
mod resident;
mod run;

use super::ahead::Trail;
use super::bands;
use super::queue::{Links, Queue};
use super::statistics::Statistics;
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;
use alive::Alive;
use classes::{CLASSES, Class, Classes};
use ghosts::Ghosts;
use hazard::{Evidence, Tables};
use offers::{Offer, Offers};
use pending::{Pending, Work};
use resident::{PENDING, Resident};
use run::Run;
use std::time::Duration;

/// Longest time between two fits; while little was seen they follow each other sooner, from one second on.
pub const REFIT_EVERY: Duration = Duration::from_secs(60);
/// What was seen this long ago counts 1/e of what is seen now. Half an hour: reuse times are stable over an hour
/// (ATC '25), and a class needs some hundred requests to be known.
pub const MEMORY: Duration = Duration::from_secs(1800);

/// How far ahead a use is looked for at least and at most, where nobody has to leave: what is written to flash is used within a
/// day or was not worth it.
const AHEAD_MIN: Duration = Duration::from_secs(3600);
const AHEAD_MAX: Duration = Duration::from_secs(86_400);

/// Evicts by expected hits per block and second.
#[derive(Debug)]
pub struct Density {
    /// What is known of a block lies beside its links: a block is one row of memory.
    links: Links<Resident>,
    queues: [Queue; CLASSES],
    trails: [Trail; CLASSES],
    offers: Offers,
    /// Per class the tail of the request that used any of it last, as far as it is known.
    freshest: [Option<BlockKey>; CLASSES],
    tables: Box<Tables>,
    /// Classes whose value rises at some age.
    rises: [bool; CLASSES],
    queued: usize,
    classes: Classes,
    alive: Alive,
    evidence: Evidence,
    ghosts: Ghosts,
    pending: Pending,
    run: Run,
    clock: Timestamp,
    fitted: Timestamp,
    began: Option<Timestamp>,
}

impl Default for Density {
    fn default() -> Self {
        Self::new()
    }
}

impl Density {
    /// A policy over no block that knows nothing yet: partly filled tails leave first, then the longest unused.
    #[must_use]
    pub fn new() -> Self {
        let mut density = Density {
            links: Links::default(),
            queues: [Queue::default(); CLASSES],
            trails: [Trail::default(); CLASSES],
            offers: Offers::default(),
            freshest: [None; CLASSES],
            tables: Box::new(Tables::new()),
            rises: [false; CLASSES],
            queued: 0,
            classes: Classes::default(),
            alive: Alive::new(),
            evidence: Evidence::new(),
            ghosts: Ghosts::default(),
            pending: Pending::default(),
            run: Run::default(),
            clock: Timestamp(0),
            fitted: Timestamp(0),
            began: None,
        };
        density.fit();
        density
    }

    /// Time as this policy counts it: never backwards. Everything up to it is counted.
    fn advance(&mut self, now: Timestamp) {
        self.clock = self.clock.max(now);
        self.began.get_or_insert(self.clock);
        if self.alive.is_behind(self.clock) {
            self.catch_up();
            self.alive.advance(self.clock, &mut self.evidence);
        }
    }

    /// Puts an absent block at the warm end of its class. Its wait begins.
    fn enqueue(&mut self, key: BlockKey, mut resident: Resident) {
        resident.used_at(self.clock);
        self.alive.begin(resident.class);
        self.place(key, resident);
    }

    /// The same of a block whose wait goes on.
    fn place(&mut self, key: BlockKey, resident: Resident) {
        let class = resident.class.at();
        self.links.set_about(key, resident);
        self.links.push_warm(&mut self.queues[class], key);
        self.trails[class].came(&mut self.links, key);
        if self.queues[class].len() == 1 {
            self.renew_coldest(class);
        }
        self.queued += 1;
    }

    /// Takes a block out of its queue or from among the parked ones; nothing when it is not resident. Its wait
    /// goes on.
    fn take_out(&mut self, key: BlockKey) -> Option<Resident> {
        if !self.is_resident(key) {
            return None;
        }
        if self.links.about(key).has(PENDING) {
            self.catch_up();
        }
        let resident = self.links.about(key);
        if self.links.unpark(key) {
            return Some(resident);
        }
        self.unqueue(key, resident.class.at(), Links::unlink);
        Some(resident)
    }

    /// Takes a block out of its queue, by `leave`, and what depends on it with it.
    fn unqueue(
        &mut self,
        key: BlockKey,
        class: usize,
        leave: fn(&mut Links<Resident>, &mut Queue, BlockKey),
    ) {
        let was_coldest = self.queues[class].coldest() == Some(key);
        if self.freshest[class] == Some(key) {
            // The next block of the same request, or else found when it is asked for.
            let next = self.links.warmer(key).filter(|&next| self.are_used_together(key, next));
            self.freshest[class] = next;
            if next.is_none() {
                self.offers.forget_freshest(class);
            }
        }
        leave(&mut self.links, &mut self.queues[class], key);
        if was_coldest {
            self.renew_coldest(class);
        }
        self.queued -= 1;
    }

    fn are_used_together(&self, left: BlockKey, right: BlockKey) -> bool {
        self.links.about(left).is_used_with(&self.links.about(right))
    }

    fn is_resident(&self, key: BlockKey) -> bool {
        self.links.contains(key) || self.links.is_parked(key)
    }

    fn renew_coldest(&mut self, class: usize) {
        let offer = match self.queues[class].coldest() {
            Some(key) => {
                self.trails[class].leads(&self.links, key);
                self.appraise(class, key)
            }
            None => Offer::NONE,
        };
        self.offers.set_coldest(class, offer);
    }

    /// A request begins to use blocks of a class, from this one on.
    fn set_freshest(&mut self, class: usize, tail: BlockKey) {
        self.freshest[class] = Some(tail);
        self.offers.forget_freshest(class);
    }

    /// Offers the tail of the request that used any block of the class last. Where it is not known any more, since all
    /// blocks of the one before left, it is a walk over the blocks of that request.
    fn renew_freshest(&mut self, class: usize) {
        let mut offer = Offer::NONE;
        if self.rises[class] {
            let tail = self.freshest[class].or_else(|| {
                let steps = std::iter::successors(self.queues[class].warmest(), |&key| {
                    self.links.colder(key).filter(|&colder| self.are_used_together(key, colder))
                });
                steps.last()
            });
            self.freshest[class] = tail;
            offer = tail.map_or(Offer::NONE, |key| self.appraise(class, key));
        }
        self.offers.set_freshest(class, offer);
    }

    /// Renews all offers that are no longer true.
    fn renew_due(&mut self) {
        while let Some((is_fresh, class)) = self.offers.next_due(self.clock) {
            match is_fresh {
                false => self.renew_coldest(class),
                true => self.renew_freshest(class),
            }
        }
    }

    /// What a block of a class is worth now.
    fn appraise(&self, class: usize, key: BlockKey) -> Offer {
        let last_use = self.links.about(key).last_use(self.clock);
        let band = bands::band(self.clock.0.saturating_sub(last_use.0));
        let until = Timestamp(last_use.0.saturating_add(bands::start_us(band + 1)));
        Offer { value: self.tables.values[class][band], last_use, until }
    }

    /// The block an offer stands for: the first unspared one from the coldest on, or of the last request.
    fn behind(
        &self,
        (is_fresh, class): (bool, usize),
        spared: &dyn Fn(BlockKey) -> bool,
    ) -> Option<(BlockKey, Offer)> {
        if is_fresh {
            let steps = std::iter::successors(self.freshest[class], |&key| self.links.warmer(key));
            let key = { steps }.find(|&key| !spared(key))?;
            return Some((key, self.appraise(class, key)));
        }
        let key = self.links.coldest_unspared(&self.queues[class], spared)?;
        Some((key, self.appraise(class, key)))
    }

    /// Chance of a use of a block from now on until it is worth less than `least`: as far ahead as this policy has looked on
    /// by now, for of what lies beyond it knows nothing.
    fn chance(&self, class: Class, last_use: Timestamp, least: f32) -> f64 {
        let seen = self.clock.since(self.began.unwrap_or(self.clock));
        let ahead = seen.clamp(AHEAD_MIN, AHEAD_MAX).as_micros() as u64;
        let age_us = self.clock.0.saturating_sub(last_use.0);
        self.tables.chance(class, age_us, age_us.saturating_add(ahead), least)
    }

    /// What a block is worth as of which nothing is remembered: what its kind and turn are, if they are stated.
    fn class_of_unknown(traits: BlockTraits) -> Class {
        match traits.category.turn {
            _ if traits.is_partial => Class::PARTIAL,
            0 => Class::ARRIVING,
            turn => Classes::coarse(traits.category.kind, turn),
        }
    }

    fn fit(&mut self) {
        self.evidence.fit(&self.classes, &mut self.tables);
        for class in 0..CLASSES {
            let rises = self.tables.values[class].windows(2).any(|pair| pair[0] < pair[1]);
            self.rises[class] = rises && class != Class::ARRIVING.at();
            self.renew_coldest(class);
            self.renew_freshest(class);
        }
    }
}

impl Policy for Density {
    fn name(&self) -> &'static str {
        "density"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.close_run();
        if now > self.clock {
            self.put_off(Work::Cluster);
        }
        self.advance(now);
        self.remove(key);
        let fingerprint = traits.fingerprint;
        self.put_off(Work::Take { key, fingerprint });
        let resident = Resident::arriving(fingerprint);
        self.enqueue(key, resident);
    }

    fn moved_in(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.close_run();
        self.advance(now);
        self.remove(key);
        // Who comes up is seldom enough for its ghost to be waited for.
        self.catch_up();
        let known = self.ghosts.take(traits.fingerprint, self.clock);
        let mut resident = Resident::arriving(traits.fingerprint);
        resident.recall(known.map(|(memory, _)| memory));
        let Some((memory, last_use)) = known else {
            resident.class = Self::class_of_unknown(traits);
            return self.enqueue(key, resident);
        };
        resident.class = memory.class;
        resident.used_at(last_use);
        self.place(key, resident);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.is_resident(key) {
            self.touch(key, traits, now, false);
        }
    }

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.is_resident(key) {
            self.touch(key, traits, now, true);
        }
    }

    fn park(&mut self, key: BlockKey) {
        // Somebody else holds what the running request just used: its run goes on.
        if self.run.park_last(key) {
            return;
        }
        self.close_run();
        if self.links.contains(key) {
            let class = self.links.about(key).class.at();
            self.unqueue(key, class, Links::park);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.close_run();
        let residents = self.len();
        let Some(resident) = self.take_out(key) else { return };
        let last_use = resident.last_use(self.clock);
        self.put_off(if resident.class == Class::PARTIAL {
            Work::Forget { class: resident.class, last_use }
        } else {
            let (fingerprint, memory) = (resident.fingerprint(), resident.memory());
            Work::Remember { fingerprint, memory, last_use, residents }
        });
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.close_run();
        self.advance(now);
        if self.offers.is_any_due(self.clock) {
            self.renew_due();
        }
        let (is_fresh, class) = self.offers.least()?;
        let first = if is_fresh { self.freshest[class] } else { self.queues[class].coldest() };
        if let Some(key) = first.filter(|&key| !spared(key)) {
            return Some(key);
        }
        // What stands behind a spared block may be worth more than what another class offers.
        let mut offers = self.offers.clone();
        let mut named = [[None; CLASSES]; 2];
        loop {
            let place = offers.least()?;
            let name = &mut named[usize::from(place.0)][place.1];
            if name.is_some() {
                return *name;
            }
            let found = self.behind(place, spared);
            *name = found.map(|(key, _)| key);
            offers.set(place, found.map_or(Offer::NONE, |(_, offer)| offer));
        }
    }

    fn admits(&mut self, newcomer: BlockTraits, victim: BlockKey, now: Timestamp) -> bool {
        self.close_run();
        self.advance(now);
        let room = self.appraise(self.links.about(victim).class.at(), victim).value;
        let is_worth_it = |class: Class| self.tables.values[class.at()][0] >= room;
        // Who brings it is known when its request has ended; until then it is worth what its kind and turn are.
        let class = Self::class_of_unknown(newcomer);
        if newcomer.is_partial || is_worth_it(class) {
            return is_worth_it(class);
        }
        // One that was here may be worth more. Looked up for those alone that would be turned away, for it takes longer
        // than all else; what is put off may be about it.
        self.ghosts.prefetch(newcomer.fingerprint);
        self.catch_up();
        let known = self.ghosts.find(newcomer.fingerprint, self.clock);
        known.is_some_and(|(memory, _)| self.tables.values[memory.class.at()][0] >= room)
    }

    fn pass(&mut self, traits: BlockTraits, now: Timestamp) {
        self.touch_passed(traits, now);
    }

    fn prospect(&mut self, mover: BlockTraits, victim: Option<BlockKey>, now: Timestamp) -> f64 {
        self.close_run();
        self.advance(now);
        self.catch_up();
        let least =
            victim.map_or(0.0, |victim| self.appraise(self.links.about(victim).class.at(), victim).value);
        let known = self.ghosts.find(mover.fingerprint, self.clock);
        let (class, last_use) = known.map_or_else(
            || (Self::class_of_unknown(mover), self.clock),
            |(memory, last_use)| (memory.class, last_use),
        );
        self.chance(class, last_use, least)
    }

    fn prospect_of(&mut self, resident: BlockKey, now: Timestamp) -> f64 {
        self.close_run();
        self.advance(now);
        if !self.is_resident(resident) {
            return 1.0;
        }
        self.renew_due();
        let least = self.offers.least_value();
        let resident = self.links.about(resident);
        self.chance(resident.class, resident.last_use(self.clock), least)
    }

    fn refit(&mut self, now: Timestamp) {
        self.close_run();
        self.catch_up();
        self.advance(now);
        let since = self.clock.since(self.fitted);
        let seen = self.clock.since(self.began.unwrap_or(self.clock));
        if since >= (seen / 4).clamp(Duration::from_secs(1), REFIT_EVERY) {
            self.fitted = self.clock;
            self.fit();
            self.evidence.fade((-since.as_secs_f64() / MEMORY.as_secs_f64()).exp());
        }
    }

    fn statistics(&mut self, now: Timestamp) -> Statistics {
        self.close_run();
        self.catch_up();
        self.advance(now);
        self.evidence.statistics(&self.classes)
    }

    fn inform(&mut self, fleet: &Statistics, now: Timestamp) {
        self.close_run();
        self.catch_up();
        self.advance(now);
        self.evidence.inform(fleet);
        self.fit();
    }

    fn len(&self) -> usize {
        self.queued + self.links.parked_len()
    }
}

#[cfg(test)]
#[path = "density/tests.rs"]
mod tests;

#[cfg(test)]
#[path = "density/moved_tests.rs"]
mod moved_tests;
