//! What is kept of a resident block: 20 bytes. Not here: its neighbours in its queue ([`super::super::queue`]).

use super::super::ahead::{Ahead, NamesAhead};
use super::classes::{Class, log_span};
use super::ghosts::Memory;
use crate::id::Timestamp;

/// A resident block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Resident {
    /// Both halves: a row of 8 bytes' alignment would be 4 bytes longer.
    fingerprint: [u32; 2],
    /// In 1.024 ms, modulo 2^32: a wait of 49 days is taken for a short one.
    last_use: u32,
    ahead: Ahead,
    pub(super) class: Class,
    /// Mean logarithm of the times between uses ([`log_span`]).
    pub(super) pace: u8,
    flags: u8,
    /// Turn of its session that brought it.
    pub(super) turn: u8,
}

/// Uses, at most [`USES_MAX`] are told apart.
const USES: u8 = 7;
/// Sessions share the block.
pub(super) const SHARED: u8 = 8;
/// It was the last filled block of the request that used it last.
pub(super) const END: u8 = 16;
/// It is not known yet whether it is remembered ([`super::pending`]).
pub(super) const PENDING: u8 = 32;
/// Most uses that are told apart; no use of more than [`PACE_USES`] is made.
const USES_MAX: u8 = 7;
/// Times between uses a pace is the mean of; later ones enter with this weight.
const PACE_USES: u8 = 3;
/// Bits of a microsecond below the unit of [`Resident::last_use`].
const LAST_BITS: u32 = 10;

impl NamesAhead for Resident {
    fn ahead(&mut self) -> &mut Ahead {
        &mut self.ahead
    }
}

impl Resident {
    /// A block that comes in, of which more may be remembered.
    pub(super) fn arriving(fingerprint: u64) -> Self {
        let fingerprint = [fingerprint as u32, (fingerprint >> 32) as u32];
        let (class, flags) = (Class::ARRIVING, 1 | PENDING);
        Resident { fingerprint, class, flags, ..Resident::default() }
    }

    /// What is remembered of it, if anything is.
    pub(super) fn recall(&mut self, memory: Option<Memory>) {
        self.set(PENDING, false);
        if let Some(memory) = memory {
            (self.pace, self.turn, self.flags) = (memory.pace, memory.turn, memory.uses.clamp(1, USES_MAX));
            self.set(SHARED, memory.is_shared);
            self.set(END, memory.is_end);
        }
    }

    /// What is worth remembering of it.
    pub(super) fn memory(&self) -> Memory {
        Memory {
            class: self.class,
            uses: self.uses(),
            turn: self.turn,
            pace: self.pace,
            is_shared: self.has(SHARED),
            is_end: self.has(END),
        }
    }

    pub(super) fn fingerprint(&self) -> u64 {
        u64::from(self.fingerprint[1]) << 32 | u64::from(self.fingerprint[0])
    }

    pub(super) fn uses(&self) -> u8 {
        self.flags & USES
    }

    /// Another use after `gap_us`.
    pub(super) fn use_again(&mut self, gap_us: u64) {
        let uses = self.uses();
        let gap = i16::from(log_span(gap_us));
        let pace = i16::from(self.pace);
        let weight = i16::from(uses.clamp(1, PACE_USES));
        self.pace = if uses <= 1 { gap } else { pace + (gap - pace) / weight } as u8;
        self.flags = self.flags & !USES | (uses + 1).min(USES_MAX);
    }

    /// A block that came back unknown is taken for one that was used before, at this pace.
    pub(super) fn assume(&mut self, pace: u8) {
        self.pace = pace;
        self.flags = self.flags & !USES | 2;
    }

    pub(super) fn set(&mut self, flag: u8, on: bool) {
        self.flags = if on { self.flags | flag } else { self.flags & !flag };
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Used now.
    pub(super) fn used_at(&mut self, now: Timestamp) {
        self.last_use = (now.0 >> LAST_BITS) as u32;
    }

    pub(super) fn last_use(&self, now: Timestamp) -> Timestamp {
        let units = now.0 >> LAST_BITS;
        let since = (units as u32).wrapping_sub(self.last_use);
        Timestamp(units.saturating_sub(u64::from(since)) << LAST_BITS)
    }

    /// Whether both were used last at the same time: by one request, as a rule.
    pub(super) fn is_used_with(&self, other: &Resident) -> bool {
        self.last_use == other.last_use
    }
}
