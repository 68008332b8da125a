//! Pins on a node: blocks that operators want kept, with kind and expiry.
//!
//! A hard pin keeps its blocks unconditionally. A soft pin only orders eviction: its blocks leave
//! after all unpinned, unleased and unneeded blocks, longest unused first (`order`, docs/adr/0029).
//! The strongest of several pins applies. A pin expires on this node's own clock, even if no router
//! is reachable; a later directive cannot revive or extend it. Changes are applied in steps, so
//! that readers do not wait. Not here: authorization of pins (`crate::index`), and holds (`lease`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use super::book::Book;
use super::entry::SeededHashBuilder;
use crate::id::{BlockHash, PinId, Timestamp};
use crate::index::command::PinKind;

/// Blocks of starting or ending pins processed in one call: about a millisecond of the task that
/// owns the book. Called every 20 ms, so all [`crate::index::PINNED_BLOCKS_MAX`] blocks change in
/// about a second.
pub const PIN_STEP_BLOCKS: usize = 4096;

/// Pins that end in one call, even if they have few blocks.
pub const ENDED_PINS_MAX: usize = 1024;

/// Maximum backlog of blocks of starting or ending pins. Above it, `set_pins` processes the excess
/// itself.
const PIN_BACKLOG_BLOCKS: usize = 4 * crate::index::PINNED_BLOCKS_MAX as usize;

/// Number of expired pins remembered, so that a router with a slow clock cannot revive them. Equal
/// to the maximum number of pins.
const EXPIRED_PINS_MAX: usize = crate::index::PINS_MAX as usize;

/// A pin as routers send it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinDirective {
    /// Its number.
    pub pin: PinId,
    /// Strength of the pin.
    pub kind: PinKind,
    /// Its blocks, in prefix order.
    pub blocks: Arc<[BlockHash]>,
    /// Expiry; `None` means no expiry.
    pub end: Option<PinExpiry>,
}

/// Expiry of a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinExpiry {
    /// Unix time in milliseconds, used only to identify the expiry; it is never compared with a
    /// clock of this node.
    pub ends_ms: u64,
    /// Time remaining.
    pub remaining: Duration,
}

#[derive(Debug)]
pub(super) struct ActivePin {
    kind: PinKind,
    blocks: Arc<[BlockHash]>,
    /// Its end in Unix milliseconds, and on this node's clock.
    end: Option<(u64, Timestamp)>,
}

/// A pin's blocks that are still to be updated.
#[derive(Debug)]
struct PinChange {
    kind: PinKind,
    blocks: Arc<[BlockHash]>,
    begins: bool,
    /// Blocks still to do. Processed from the tail, so that the head of a prefix becomes the
    /// younger one.
    remaining: usize,
}

/// Number of pins of each kind on a block.
#[derive(Clone, Copy, Debug, Default)]
struct PinCounts {
    hard: u32,
    soft: u32,
}

impl PinCounts {
    fn kind(self) -> Option<PinKind> {
        match self {
            PinCounts { hard: 1.., .. } => Some(PinKind::Hard),
            PinCounts { soft: 1.., .. } => Some(PinKind::Soft),
            PinCounts { .. } => None,
        }
    }

    fn count_mut(&mut self, kind: PinKind) -> &mut u32 {
        match kind {
            PinKind::Hard => &mut self.hard,
            PinKind::Soft => &mut self.soft,
        }
    }
}

/// All pins in force.
#[derive(Debug)]
pub(super) struct Pins {
    pub(super) active: BTreeMap<PinId, ActivePin>,
    ends: BTreeSet<(Timestamp, PinId)>,
    /// Expiry (Unix milliseconds) of each pin known to have expired, and those pins in the order of
    /// discovery.
    expired: BTreeMap<PinId, u64>,
    expired_order: VecDeque<PinId>,
    marks: HashMap<BlockHash, PinCounts, SeededHashBuilder>,
    steps: VecDeque<PinChange>,
    /// Blocks in all pending changes, and in those that start a pin.
    backlog: usize,
    pending_begins: usize,
}

impl Pins {
    pub(super) fn new(seed: u64) -> Pins {
        let marks = HashMap::with_hasher(SeededHashBuilder { seed });
        let (active, ends, expired, expired_order, steps) = Default::default();
        Pins { active, ends, expired, expired_order, marks, steps, backlog: 0, pending_begins: 0 }
    }

    /// Whether blocks of starting pins are still unmarked; meanwhile no block that a pin may keep
    /// is dropped.
    pub(super) fn has_pending_begins(&self) -> bool {
        self.pending_begins > 0
    }

    /// Strongest pin kind on the block.
    pub(super) fn kind(&self, hash: &BlockHash) -> Option<PinKind> {
        if self.marks.is_empty() { None } else { self.marks.get(hash).and_then(|marks| marks.kind()) }
    }

    /// The active pin for this directive, or `None` if it has expired. An earlier directive for the
    /// same expiry bounds its end.
    fn active_pin(
        &self,
        order: PinDirective,
        before: Option<&ActivePin>,
        now: Timestamp,
    ) -> Option<ActivePin> {
        let PinDirective { pin, kind, blocks, end } = order;
        let Some(PinExpiry { ends_ms, remaining: left }) = end else {
            return Some(ActivePin { kind, blocks, end: None });
        };
        let known = before.and_then(|rule| rule.end).filter(|(known, _)| *known == ends_ms);
        let told = now.after(left);
        let until = known.map_or(told, |(_, until)| until.min(told));
        // A different expiry than the passed one belongs to a renewed pin, whatever clock set it.
        let is_over = until <= now || self.expired.get(&pin) == Some(&ends_ms);
        (!is_over).then_some(ActivePin { kind, blocks, end: Some((ends_ms, until)) })
    }

    fn insert(&mut self, pin: PinId, rule: ActivePin) {
        if let Some((_, until)) = rule.end {
            self.ends.insert((until, pin));
        }
        self.active.insert(pin, rule);
    }

    fn push_change(&mut self, rule: &ActivePin, begins: bool) {
        let left = rule.blocks.len();
        self.backlog += left;
        self.pending_begins += if begins { left } else { 0 };
        self.steps.push_back(PinChange {
            kind: rule.kind,
            blocks: Arc::clone(&rule.blocks),
            begins,
            remaining: left,
        });
    }

    /// Remembers that a pin expired; forgets the oldest entry above the limit.
    fn remember_expired(&mut self, pin: PinId, ends_ms: u64) {
        if self.expired.insert(pin, ends_ms).is_none() {
            self.expired_order.push_back(pin);
        }
        if self.expired_order.len() > EXPIRED_PINS_MAX
            && let Some(oldest) = self.expired_order.pop_front()
        {
            self.expired.remove(&oldest);
        }
    }

    /// Applies the next pending change to the pin counts, and returns its block.
    fn next_block(&mut self) -> Option<BlockHash> {
        loop {
            let step = self.steps.front_mut()?;
            let Some(at) = step.remaining.checked_sub(1) else {
                self.steps.pop_front();
                continue;
            };
            step.remaining = at;
            self.backlog -= 1;
            let (kind, begins) = (step.kind, step.begins);
            self.pending_begins -= usize::from(begins);
            let Some(&hash) = step.blocks.get(at) else { continue };
            let marks = self.marks.entry(hash).or_default();
            let count = marks.count_mut(kind);
            *count = if begins { count.saturating_add(1) } else { count.saturating_sub(1) };
            if marks.kind().is_none() {
                self.marks.remove(&hash);
            }
            return Some(hash);
        }
    }
}

impl Book {
    /// Replaces all pins; for a duplicate number the first counts. Pins also apply to blocks that
    /// arrive later. Only differences cost work: this call processes [`PIN_STEP_BLOCKS`], and
    /// [`Self::expire_pins`] the rest.
    pub fn set_pins(&mut self, orders: impl IntoIterator<Item = PinDirective>, now: Timestamp) {
        let mut before = std::mem::take(&mut self.pins.active);
        self.pins.ends.clear();
        let (mut begun, mut ended) = (Vec::new(), Vec::new());
        for order in orders {
            let (pin, ends_ms) = (order.pin, order.end.map(|end| end.ends_ms));
            if self.pins.active.contains_key(&pin) {
                continue;
            }
            let known = before.remove(&pin);
            let Some(rule) = self.pins.active_pin(order, known.as_ref(), now) else {
                // The pin has expired; a router with a slower clock cannot revive it.
                ends_ms.into_iter().for_each(|ends_ms| self.pins.remember_expired(pin, ends_ms));
                ended.extend(known);
                continue;
            };
            let is_same = |known: &ActivePin| known.kind == rule.kind && known.blocks == rule.blocks;
            if !known.as_ref().is_some_and(is_same) {
                begun.push((rule.kind, Arc::clone(&rule.blocks)));
                ended.extend(known);
            }
            self.pins.insert(pin, rule);
        }
        ended.extend(before.into_values());
        // Start before end: a block that moves from one pin to another stays pinned throughout.
        for (kind, blocks) in begun {
            self.pins.push_change(&ActivePin { kind, blocks, end: None }, true);
        }
        ended.iter().for_each(|rule| self.pins.push_change(rule, false));
        let most = PIN_STEP_BLOCKS.max(self.pins.backlog.saturating_sub(PIN_BACKLOG_BLOCKS));
        self.apply_pin_changes(most, now);
    }

    /// Ends expired pins, up to [`ENDED_PINS_MAX`], and processes up to [`PIN_STEP_BLOCKS`] blocks
    /// of started or ended pins. Returns the number of blocks.
    pub fn expire_pins(&mut self, now: Timestamp) -> usize {
        for _ in 0..ENDED_PINS_MAX {
            let Some(&(until, pin)) = self.pins.ends.first().filter(|(until, _)| *until <= now) else {
                break;
            };
            self.pins.ends.remove(&(until, pin));
            let Some(rule) = self.pins.active.remove(&pin) else { continue };
            self.pins.push_change(&rule, false);
            if let Some((ends_ms, _)) = rule.end {
                self.pins.remember_expired(pin, ends_ms);
            }
        }
        self.apply_pin_changes(PIN_STEP_BLOCKS, now)
    }

    /// Time until the next pin expires; `None` if none has an expiry.
    #[must_use]
    pub fn next_pin_end(&self, now: Timestamp) -> Option<Duration> {
        self.pins.ends.first().map(|(until, _)| until.since(now))
    }

    /// Blocks of started or ended pins that are still to be processed.
    #[must_use]
    pub fn pin_backlog(&self) -> usize {
        self.pins.backlog
    }

    fn apply_pin_changes(&mut self, most: usize, now: Timestamp) -> usize {
        for done in 0..most {
            let Some(hash) = self.pins.next_block() else { return done };
            self.apply_pin(&hash, now);
        }
        most
    }

    /// Updates a block to its current pins.
    fn apply_pin(&mut self, hash: &BlockHash, now: Timestamp) {
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
        if was_held && !entry.held() && self.tenants.is_over(tenant) {
            self.tenants.mark_over(tenant);
        }
        match (before, entry.parked()) {
            (false, true) => self.park(key),
            (true, false) => return self.unpark(key, now),
            _ => {}
        }
        self.list(key);
    }
}
