//! Ghosts: compact records of evicted blocks, to recognise a returning block and its history.
//!
//! Eight bytes a block, in sets of eight; a full set forgets one. There are at most
//! [`PER_RESIDENT`] ghosts for every block ever resident at the same time. Not here: the effect of
//! a return ([`super`]).

use super::classes::ReuseClass;
use super::open_waits::STEP_BITS;
use crate::id::Timestamp;
use kvfleet_cpu::prefetch;
use std::ops::Range;

/// Ghosts per resident block.
pub(super) const PER_RESIDENT: usize = 4;
const WAYS: usize = 8;

/// History of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GhostHistory {
    pub(super) class: ReuseClass,
    /// Uses; up to seven are distinguished.
    pub(super) uses: u8,
    /// Turn of its session; up to seven are distinguished.
    pub(super) turn: u8,
    /// Mean logarithm of the times between uses ([`super::classes::log_span`]).
    pub(super) pace: u8,
    /// Whether sessions share it.
    pub(super) is_shared: bool,
    /// Whether it was the last filled block of the request that last used it.
    pub(super) is_end: bool,
}

/// A ghost's history and its last use.
pub(super) type Ghost = (GhostHistory, Timestamp);

/// Ghosts of evicted blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Ghosts {
    /// Zero is an empty entry. Tag 21 bits, last use 24, class 6, uses 3, pace 5, turn 3, two
    /// flags.
    ghosts: Vec<u64>,
    /// Offset of the first set, so that every set is one cache line.
    first: usize,
    sets: usize,
}

/// Bytes of a cache line, which a set fills.
const LINE: usize = WAYS * size_of::<u64>();

/// Modulus of stored last uses, in steps.
const STEP_MODULUS: u64 = (1 << 24) - 1;

fn tag(fingerprint: u64) -> u64 {
    (fingerprint >> 43).max(1)
}

fn pack(fingerprint: u64, memory: GhostHistory, last_use: Timestamp) -> u64 {
    let last = last_use.0 >> STEP_BITS & STEP_MODULUS;
    let uses = u64::from(memory.uses.clamp(1, 7));
    tag(fingerprint) << 43
        | last << 19
        | u64::from(memory.class.0 & 63) << 13
        | uses << 10
        | u64::from(memory.pace >> 3) << 5
        | u64::from(memory.turn.min(7)) << 2
        | u64::from(memory.is_shared) << 1
        | u64::from(memory.is_end)
}

fn unpack(ghost: u64, now: Timestamp) -> Ghost {
    let memory = GhostHistory {
        class: ReuseClass((ghost >> 13 & 63) as u8),
        uses: ((ghost >> 10 & 7) as u8).max(1),
        // The fast end of the stored octave: among equals a block that came back stays.
        pace: ((ghost >> 5 & 31) << 3) as u8,
        turn: (ghost >> 2 & 7) as u8,
        is_shared: ghost & 2 != 0,
        is_end: ghost & 1 != 0,
    };
    (memory, Timestamp((now.0 >> STEP_BITS).saturating_sub(steps_since(ghost, now)) << STEP_BITS))
}

/// Steps since its last use.
fn steps_since(ghost: u64, now: Timestamp) -> u64 {
    (now.0 >> STEP_BITS).wrapping_sub(ghost >> 19) & STEP_MODULUS
}

/// Way of a full set to forget: in half of the sets the one worth least, in the others the longest
/// unused.
fn way_to_forget(
    set: &[u64; WAYS],
    fingerprint: u64,
    now: Timestamp,
    worth: impl Fn(ReuseClass, Timestamp) -> f32,
) -> usize {
    let is_by_worth = fingerprint >> 40 & 1 == 0;
    // Worth, then time since last use, then way, as one number: worth is not negative, so its bits
    // sort like it.
    let order = |(way, &ghost): (usize, &u64)| {
        let (memory, last_use) = unpack(ghost, now);
        let worth = if is_by_worth { worth(memory.class, last_use).to_bits() } else { 0 };
        u64::from(worth) << 32 | (STEP_MODULUS - steps_since(ghost, now)) << 3 | way as u64
    };
    set.iter().enumerate().map(order).min().map_or(0, |least| (least % WAYS as u64) as usize)
}

impl Ghosts {
    /// Grows for the ghosts of this many resident blocks. The first time in one step, as cheap as
    /// the allocation; later by a few sets a call. A ghost in a split set is lost, but sets are
    /// split only while the tier fills and few blocks leave.
    fn grow(&mut self, residents: usize) {
        let wanted = (residents * PER_RESIDENT).div_ceil(WAYS);
        if self.sets == 0 {
            self.sets = wanted;
            self.ghosts = vec![0; wanted * WAYS + WAYS - 1];
            self.first = self.ghosts.as_ptr().align_offset(LINE).min(WAYS - 1);
        } else if self.sets < wanted {
            let more = (wanted - self.sets).min(WAYS);
            self.ghosts.resize(self.ghosts.len() + more * WAYS, 0);
            // A reallocation may change the alignment.
            self.realign(self.ghosts.as_ptr().align_offset(LINE).min(WAYS - 1));
            self.sets += more;
        }
    }

    /// Moves the sets to another offset.
    fn realign(&mut self, first: usize) {
        let before = std::mem::replace(&mut self.first, first);
        if first != before {
            self.ghosts.copy_within(before..before + self.sets * WAYS, first);
            let end = first + self.sets * WAYS;
            self.ghosts[..first].fill(0);
            self.ghosts[end..].fill(0);
        }
    }

    /// Position of a fingerprint's set.
    fn set(&self, fingerprint: u64) -> Range<usize> {
        // Linear hashing: any number of sets works.
        let whole = self.sets.next_power_of_two().max(2);
        let at = fingerprint as usize & (whole - 1);
        let at = if at < self.sets { at } else { at & (whole / 2 - 1) };
        let start = self.first + at * WAYS;
        start..start + WAYS
    }

    fn set_mut(&mut self, fingerprint: u64) -> Option<&mut [u64; WAYS]> {
        let set = self.set(fingerprint);
        self.ghosts.get_mut(set)?.as_mut_array()
    }

    /// Prefetches the set of a block.
    pub(super) fn prefetch(&self, fingerprint: u64) {
        if let Some(first) = self.ghosts.get(self.set(fingerprint).start) {
            prefetch(first);
        }
    }

    /// Stores a ghost for a block that leaves, one of `residents`. Returns the ghost that it
    /// replaced.
    pub(super) fn remember(
        &mut self,
        fingerprint: u64,
        (memory, last_use): Ghost,
        residents: usize,
        now: Timestamp,
        worth: impl Fn(ReuseClass, Timestamp) -> f32,
    ) -> Option<Ghost> {
        self.grow(residents);
        let set = self.set_mut(fingerprint)?;
        let (mut same, mut free) = (WAYS, WAYS);
        for (way, &ghost) in set.iter().enumerate().rev() {
            same = if ghost >> 43 == tag(fingerprint) { way } else { same };
            free = if ghost == 0 { way } else { free };
        }
        let place = if same < WAYS { same } else { free };
        let place = if place < WAYS { place } else { way_to_forget(set, fingerprint, now, worth) };
        let before = std::mem::replace(&mut set[place], pack(fingerprint, memory, last_use));
        (before != 0).then(|| unpack(before, now))
    }

    /// The ghost of a block.
    pub(super) fn find(&self, fingerprint: u64, now: Timestamp) -> Option<Ghost> {
        let set = self.ghosts.get(self.set(fingerprint))?;
        set.iter().find(|ghost| **ghost >> 43 == tag(fingerprint)).map(|&ghost| unpack(ghost, now))
    }

    /// Removes and returns the ghost of a returning block.
    pub(super) fn take(&mut self, fingerprint: u64, now: Timestamp) -> Option<Ghost> {
        let slot = self.set_mut(fingerprint)?.iter_mut().find(|ghost| **ghost >> 43 == tag(fingerprint))?;
        Some(unpack(std::mem::take(slot), now))
    }

    /// Maximum number of ghosts at the current size.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.sets * WAYS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(block: u64) -> u64 {
        (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn remember(ghosts: &mut Ghosts, block: u64, residents: usize) -> Option<Ghost> {
        let memory = GhostHistory { class: ReuseClass(block as u8 % 64), uses: 2, ..GhostHistory::default() };
        let now = Timestamp(1 << 40);
        ghosts.remember(fingerprint(block), (memory, now), residents, now, |_, _| 1.0)
    }

    #[test]
    fn sets_survive_realignment() {
        let mut ghosts = Ghosts::default();
        (0..20).for_each(|block| assert_eq!(remember(&mut ghosts, block, 40), None));
        for first in [3, 7, 0, 5, 1] {
            ghosts.realign(first);
            let known = ghosts.ghosts.iter().filter(|ghost| **ghost != 0).count();
            assert_eq!(known, 20, "at {first}");
        }
        for block in 0..20 {
            let known = ghosts.take(fingerprint(block), Timestamp(1 << 40)).map(|(memory, _)| memory.class);
            assert_eq!(known, Some(ReuseClass(block as u8)));
        }
    }

    #[test]
    fn every_set_is_one_cache_line() {
        let mut ghosts = Ghosts::default();
        for residents in 1..200 {
            remember(&mut ghosts, residents as u64, residents);
            let start = ghosts.set(fingerprint(7)).start;
            assert_eq!(ghosts.ghosts[start..].as_ptr() as usize % LINE, 0, "{residents}");
        }
    }
}
