//! Pins on a node: which blocks operators want kept, how firmly, and until when.
//!
//! A hard pin keeps its blocks whatever comes. A soft one orders who leaves and refuses nobody room: its blocks go after
//! all that nobody pinned, leased or waits for, the longest unused first (`order`, docs/adr/0029). Of several pins on a
//! block the firmest counts. A pin with an end is over on this node's own clock, whether a router is reachable or not,
//! and nothing that is told later brings it back or puts its end off. What pins change is worked off in steps, so that
//! no reader waits for a hundred thousand blocks. Not here: who may pin what (`crate::index`), and what is held (`lease`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::book::Book;
use super::entry::Fold;
use crate::id::{BlockHash, PinId, Timestamp};
use crate::index::command::PinKind;

/// Blocks of pins that begin or end in one call: about a millisecond of the task that owns the book. Called every 20 ms,
/// all that may be pinned ([`crate::index::PINNED_BLOCKS_MAX`]) changes in about a second.
pub const PIN_STEP_BLOCKS: usize = 4096;

/// Pins that end in one call, however few blocks they have.
pub const ENDED_PINS_MAX: usize = 1024;

/// Blocks of pins that may wait to begin or end. Above it whoever tells more waits for them.
const PIN_BACKLOG_BLOCKS: usize = 4 * crate::index::PINNED_BLOCKS_MAX as usize;

/// Pins of which is known that they are over, so that a router with a slow clock does not bring them back. As many as
/// there may be at once.
const OVER_MAX: usize = crate::index::PINS_MAX as usize;

/// A pin as the routers tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinOrder {
    /// Its number.
    pub pin: PinId,
    /// How firmly it keeps its blocks.
    pub kind: PinKind,
    /// Its blocks, in prefix order.
    pub blocks: Arc<[BlockHash]>,
    /// When it is over; never without.
    pub end: Option<PinEnd>,
}

/// When a pin is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinEnd {
    /// In milliseconds of Unix time, by which the pin is known again. No clock of this node is compared with it.
    pub ends_ms: u64,
    /// The time that is left.
    pub left: Duration,
}

#[derive(Debug)]
pub(super) struct Rule {
    kind: PinKind,
    blocks: Arc<[BlockHash]>,
    /// Its end in Unix milliseconds, and on this node's clock.
    end: Option<(u64, Timestamp)>,
}

/// A pin's blocks that are yet to be marked.
#[derive(Debug)]
struct Step {
    kind: PinKind,
    blocks: Arc<[BlockHash]>,
    begins: bool,
    /// Marked from the tail on: so that the head of a prefix is the younger one.
    left: usize,
}

/// How many pins of each kind a block has.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    hard: u32,
    soft: u32,
}

impl Marks {
    fn kind(self) -> Option<PinKind> {
        match self {
            Marks { hard: 1.., .. } => Some(PinKind::Hard),
            Marks { soft: 1.., .. } => Some(PinKind::Soft),
            Marks { .. } => None,
        }
    }

    fn of(&mut self, kind: PinKind) -> &mut u32 {
        match kind {
            PinKind::Hard => &mut self.hard,
            PinKind::Soft => &mut self.soft,
        }
    }
}

/// All pins in force.
#[derive(Debug)]
pub(super) struct Pins {
    pub(super) rules: BTreeMap<PinId, Rule>,
    ends: BTreeSet<(Timestamp, PinId)>,
    /// The end of each pin that is known to be over, in Unix milliseconds, and those pins in the order in which they
    /// became known.
    over: BTreeMap<PinId, u64>,
    noted: VecDeque<PinId>,
    marks: HashMap<BlockHash, Marks, Fold>,
    steps: VecDeque<Step>,
    /// Blocks of all steps, and of those that begin.
    backlog: usize,
    beginning: usize,
}

impl Pins {
    pub(super) fn new(seed: u64) -> Pins {
        let marks = HashMap::with_hasher(Fold { seed });
        let (rules, ends, over, noted, steps) = Default::default();
        Pins { rules, ends, over, noted, marks, steps, backlog: 0, beginning: 0 }
    }

    /// Whether blocks of pins that began are yet to be marked: nothing that pins keep may be dropped meanwhile.
    pub(super) fn is_beginning(&self) -> bool {
        self.beginning > 0
    }

    /// How firmly the block is kept.
    pub(super) fn kind(&self, hash: &BlockHash) -> Option<PinKind> {
        if self.marks.is_empty() { None } else { self.marks.get(hash).and_then(|marks| marks.kind()) }
    }

    /// The rule this order makes; nothing when it is over. What was known of the pin before bounds its end.
    fn rule(&self, order: PinOrder, before: Option<&Rule>, now: Timestamp) -> Option<Rule> {
        let PinOrder { pin, kind, blocks, end } = order;
        let Some(PinEnd { ends_ms, left }) = end else { return Some(Rule { kind, blocks, end: None }) };
        let known = before.and_then(|rule| rule.end).filter(|(known, _)| *known == ends_ms);
        let told = now.after(left);
        let until = known.map_or(told, |(_, until)| until.min(told));
        // Another end than the one that passed is that of a pin that was renewed, by whatever clock.
        let is_over = until <= now || self.over.get(&pin) == Some(&ends_ms);
        (!is_over).then_some(Rule { kind, blocks, end: Some((ends_ms, until)) })
    }

    fn enter(&mut self, pin: PinId, rule: Rule) {
        if let Some((_, until)) = rule.end {
            self.ends.insert((until, pin));
        }
        self.rules.insert(pin, rule);
    }

    fn push(&mut self, rule: &Rule, begins: bool) {
        let left = rule.blocks.len();
        self.backlog += left;
        self.beginning += if begins { left } else { 0 };
        self.steps.push_back(Step { kind: rule.kind, blocks: Arc::clone(&rule.blocks), begins, left });
    }

    /// Remembers that a pin is over; of too many the one that has been for longest is forgotten.
    fn note_over(&mut self, pin: PinId, ends_ms: u64) {
        if self.over.insert(pin, ends_ms).is_none() {
            self.noted.push_back(pin);
        }
        if self.noted.len() > OVER_MAX
            && let Some(oldest) = self.noted.pop_front()
        {
            self.over.remove(&oldest);
        }
    }

    /// The next block to be marked anew.
    fn next(&mut self) -> Option<BlockHash> {
        loop {
            let step = self.steps.front_mut()?;
            let Some(at) = step.left.checked_sub(1) else {
                self.steps.pop_front();
                continue;
            };
            step.left = at;
            self.backlog -= 1;
            let (kind, begins) = (step.kind, step.begins);
            self.beginning -= usize::from(begins);
            let Some(&hash) = step.blocks.get(at) else { continue };
            let marks = self.marks.entry(hash).or_default();
            let count = marks.of(kind);
            *count = if begins { count.saturating_add(1) } else { count.saturating_sub(1) };
            if marks.kind().is_none() {
                self.marks.remove(&hash);
            }
            return Some(hash);
        }
    }
}

impl Book {
    /// Replaces the pins; of two with one number the first counts. They hold also for blocks that come later. Only what
    /// differs from before is work, of which this call does [`PIN_STEP_BLOCKS`] and [`Self::expire_pins`] the rest.
    pub fn set_pins(&mut self, orders: impl IntoIterator<Item = PinOrder>, now: Timestamp) {
        let mut before = std::mem::take(&mut self.pins.rules);
        self.pins.ends.clear();
        let (mut begun, mut ended) = (Vec::new(), Vec::new());
        for order in orders {
            let (pin, ends_ms) = (order.pin, order.end.map(|end| end.ends_ms));
            if self.pins.rules.contains_key(&pin) {
                continue;
            }
            let known = before.remove(&pin);
            let Some(rule) = self.pins.rule(order, known.as_ref(), now) else {
                // It is over: whoever tells of it again, by a slower clock, is not heard.
                ends_ms.into_iter().for_each(|ends_ms| self.pins.note_over(pin, ends_ms));
                ended.extend(known);
                continue;
            };
            let is_same = |known: &Rule| known.kind == rule.kind && known.blocks == rule.blocks;
            if !known.as_ref().is_some_and(is_same) {
                begun.push((rule.kind, Arc::clone(&rule.blocks)));
                ended.extend(known);
            }
            self.pins.enter(pin, rule);
        }
        ended.extend(before.into_values());
        // What is kept by another pin from now on is kept without a break.
        for (kind, blocks) in begun {
            self.pins.push(&Rule { kind, blocks, end: None }, true);
        }
        ended.iter().for_each(|rule| self.pins.push(rule, false));
        let most = PIN_STEP_BLOCKS.max(self.pins.backlog.saturating_sub(PIN_BACKLOG_BLOCKS));
        self.mark_pins(most, now);
    }

    /// Ends pins whose time is over, [`ENDED_PINS_MAX`] of them, and marks blocks of pins that began or ended,
    /// [`PIN_STEP_BLOCKS`] of them. Returns how many blocks.
    pub fn expire_pins(&mut self, now: Timestamp) -> usize {
        for _ in 0..ENDED_PINS_MAX {
            let Some(&(until, pin)) = self.pins.ends.first().filter(|(until, _)| *until <= now) else {
                break;
            };
            self.pins.ends.remove(&(until, pin));
            let Some(rule) = self.pins.rules.remove(&pin) else { continue };
            self.pins.push(&rule, false);
            if let Some((ends_ms, _)) = rule.end {
                self.pins.note_over(pin, ends_ms);
            }
        }
        self.mark_pins(PIN_STEP_BLOCKS, now)
    }

    /// Time until the next pin is over, if one has an end.
    #[must_use]
    pub fn next_pin_end(&self, now: Timestamp) -> Option<Duration> {
        self.pins.ends.first().map(|(until, _)| until.since(now))
    }

    /// Blocks of pins that began or ended and are yet to be marked.
    #[must_use]
    pub fn pins_behind(&self) -> usize {
        self.pins.backlog
    }

    fn mark_pins(&mut self, most: usize, now: Timestamp) -> usize {
        for done in 0..most {
            let Some(hash) = self.pins.next() else { return done };
            self.mark_pinned(&hash, now);
        }
        most
    }

    /// Brings a block in line with the pins it has.
    fn mark_pinned(&mut self, hash: &BlockHash, now: Timestamp) {
        let pin = self.pins.kind(hash);
        let Some(key) = self.slab.find(hash) else { return };
        let Some(before) = self.slab.get(key).filter(|entry| entry.pin != pin).map(|entry| entry.parked())
        else {
            return;
        };
        let was_held = self.slab.get(key).is_some_and(|entry| entry.held());
        self.unlist(key);
        self.slab.set_pin(key, pin);
        let Some(entry) = self.slab.get(key) else { return };
        let tenant = entry.meta.tenant;
        if was_held && !entry.held() && self.is_over_quota(tenant) {
            self.over_quota.insert(tenant);
        }
        match (before, entry.parked()) {
            (false, true) => self.park(key),
            (true, false) => return self.unpark(key, now),
            _ => {}
        }
        self.list(key);
    }
}
