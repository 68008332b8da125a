//! What is remembered of blocks that left: enough to know one again and what it was like.
//!
//! Eight bytes a block, in sets of eight; of a full set the one longest unused is forgotten. There are never more
//! than [`PER_RESIDENT`] for every block that was ever resident at the same time. Not here: what a return means
//! ([`super`]).

use super::alive::STEP_BITS;
use super::classes::Class;
use crate::id::Timestamp;

/// Blocks remembered per resident block.
pub(super) const PER_RESIDENT: usize = 4;
const WAYS: usize = 8;

/// What is known of a block besides its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) class: Class,
    /// Uses, at most four are told apart.
    pub(super) uses: u8,
    /// Turn of its session, at most seven are told apart.
    pub(super) turn: u8,
    /// Mean logarithm of the times between uses ([`super::classes::log_span`]).
    pub(super) pace: u8,
    /// Whether sessions share it.
    pub(super) is_shared: bool,
    /// Whether it was the last filled block of the request that used it last.
    pub(super) is_end: bool,
}

/// A remembered block: its memory and when it was last used.
pub(super) type Ghost = (Memory, Timestamp);

/// Blocks that left.
#[derive(Clone, Debug, Default)]
pub(super) struct Ghosts {
    /// A ghost is never 0. Tag 22 bits, last use 24, class 6, uses 2, pace 5, turn 3, two flags.
    sets: Vec<[u64; WAYS]>,
}

const LAST_BITS: u32 = 24;

fn tag(fingerprint: u64) -> u64 {
    (fingerprint >> 43).max(1)
}

fn pack(fingerprint: u64, memory: Memory, last_use: Timestamp) -> u64 {
    let last = (last_use.0 >> STEP_BITS) & ((1 << LAST_BITS) - 1);
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
    let memory = Memory {
        class: Class((ghost >> 13 & 63) as u8),
        uses: ((ghost >> 10 & 7) as u8).max(1),
        // The fast end of the octave that was kept: among equals who came back once more stays.
        pace: ((ghost >> 5 & 31) << 3) as u8,
        turn: (ghost >> 2 & 7) as u8,
        is_shared: ghost & 2 != 0,
        is_end: ghost & 1 != 0,
    };
    let step = now.0 >> STEP_BITS;
    let since = step.wrapping_sub(ghost >> 19) & ((1 << LAST_BITS) - 1);
    (memory, Timestamp(step.saturating_sub(since) << STEP_BITS))
}

impl Ghosts {
    /// Makes room for the ghosts of this many resident blocks. At first in one go, which costs no more than asking
    /// for memory; later by a few sets a call. A ghost whose set was split is not found any more: sets are split
    /// while the tier fills, when hardly anything leaves.
    fn grow(&mut self, residents: usize) {
        let wanted = (residents * PER_RESIDENT).div_ceil(WAYS);
        if self.sets.is_empty() {
            self.sets = vec![[0; WAYS]; wanted];
        } else if self.sets.len() < wanted {
            let more = (wanted - self.sets.len()).min(WAYS);
            self.sets.extend(std::iter::repeat_n([0; WAYS], more));
        }
    }

    fn set(&self, fingerprint: u64) -> usize {
        // Linear hashing: the number of sets may be any.
        let whole = self.sets.len().next_power_of_two();
        let at = fingerprint as usize & (whole - 1);
        if at < self.sets.len() { at } else { at & (whole / 2 - 1) }
    }

    /// Remembers a block that leaves, one of `residents`. Gives back what is forgotten for it.
    pub(super) fn remember(
        &mut self,
        fingerprint: u64,
        (memory, last_use): Ghost,
        residents: usize,
        now: Timestamp,
        worth: impl Fn(Class, Timestamp) -> f32,
    ) -> Option<Ghost> {
        self.grow(residents);
        let at = self.set(fingerprint);
        let set = self.sets.get_mut(at)?;
        let same = set.iter().position(|&ghost| ghost >> 43 == tag(fingerprint));
        let place = same.or_else(|| set.iter().position(|&ghost| ghost == 0)).or_else(|| {
            let by_worth = fingerprint >> 40 & 1 == 0;
            let worths = set.map(|ghost| {
                let (memory, last_use) = unpack(ghost, now);
                (if by_worth { worth(memory.class, last_use) } else { 0.0 }, last_use)
            });
            (0..WAYS).min_by(|&left, &right| {
                let order = worths[left].0.total_cmp(&worths[right].0);
                order.then(worths[left].1.cmp(&worths[right].1))
            })
        })?;
        let before = std::mem::replace(&mut set[place], pack(fingerprint, memory, last_use));
        (before != 0).then(|| unpack(before, now))
    }

    /// Takes out what is remembered of a block that comes back.
    pub(super) fn take(&mut self, fingerprint: u64, now: Timestamp) -> Option<Ghost> {
        if self.sets.is_empty() {
            return None;
        }
        let at = self.set(fingerprint);
        let slot = self.sets.get_mut(at)?.iter_mut().find(|ghost| **ghost >> 43 == tag(fingerprint))?;
        Some(unpack(std::mem::take(slot), now))
    }

    /// Blocks there is room to remember.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.sets.len() * WAYS
    }
}
