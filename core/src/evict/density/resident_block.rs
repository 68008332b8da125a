//! Data of a resident block: 20 bytes. Not here: its queue neighbours ([`super::super::queue`]).

use super::super::prefetch_hints::{HasPrefetchHint, PrefetchHint};
use super::classes::{ReuseClass, log_span};
use super::ghosts::GhostHistory;
use crate::id::Timestamp;

/// A resident block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ResidentBlock {
    /// In two halves: 8-byte alignment would add 4 bytes to a row.
    fingerprint: [u32; 2],
    /// In 1.024 ms, modulo 2^32: a wait above 49 days wraps.
    last_use: u32,
    ahead: PrefetchHint,
    pub(super) class: ReuseClass,
    /// Mean logarithm of the times between uses ([`log_span`]).
    pub(super) pace: u8,
    flags: u8,
    /// Turn of its session that inserted it.
    pub(super) turn: u8,
}

/// Bits of the use count, up to [`USES_MAX`].
const USES: u8 = 7;
/// Sessions share the block.
pub(super) const SHARED: u8 = 8;
/// It was the last filled block of the request that last used it.
pub(super) const END: u8 = 16;
/// Its ghost lookup is still deferred ([`super::ghost_queue`]).
pub(super) const PENDING: u8 = 32;
/// Highest use count; decisions use no more than [`PACE_USES`].
const USES_MAX: u8 = 7;
/// Number of intervals averaged into a pace; later ones enter with this weight.
const PACE_USES: u8 = 3;
/// Bits of a microsecond below the unit of [`ResidentBlock::last_use`].
const LAST_BITS: u32 = 10;

impl HasPrefetchHint for ResidentBlock {
    fn prefetch_hint(&mut self) -> &mut PrefetchHint {
        &mut self.ahead
    }
}

impl ResidentBlock {
    /// A newly inserted block; its ghost may add history.
    pub(super) fn arriving(fingerprint: u64) -> Self {
        let fingerprint = [fingerprint as u32, (fingerprint >> 32) as u32];
        let (class, flags) = (ReuseClass::ARRIVING, 1 | PENDING);
        ResidentBlock { fingerprint, class, flags, ..ResidentBlock::default() }
    }

    /// Applies its ghost's history, if any.
    pub(super) fn apply_history(&mut self, memory: Option<GhostHistory>) {
        self.set(PENDING, false);
        if let Some(memory) = memory {
            (self.pace, self.turn, self.flags) = (memory.pace, memory.turn, memory.uses.clamp(1, USES_MAX));
            self.set(SHARED, memory.is_shared);
            self.set(END, memory.is_end);
        }
    }

    /// Its history for a ghost.
    pub(super) fn history(&self) -> GhostHistory {
        GhostHistory {
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

    /// Counts another use after `gap_us`.
    pub(super) fn use_again(&mut self, gap_us: u64) {
        let uses = self.uses();
        let gap = i16::from(log_span(gap_us));
        let pace = i16::from(self.pace);
        let weight = i16::from(uses.clamp(1, PACE_USES));
        self.pace = if uses <= 1 { gap } else { pace + (gap - pace) / weight } as u8;
        self.flags = self.flags & !USES | (uses + 1).min(USES_MAX);
    }

    /// Treats a block that returned without a ghost as used before, at this pace.
    pub(super) fn assume_reused(&mut self, pace: u8) {
        self.pace = pace;
        self.flags = self.flags & !USES | 2;
    }

    pub(super) fn set(&mut self, flag: u8, on: bool) {
        self.flags = if on { self.flags | flag } else { self.flags & !flag };
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Sets the last use.
    pub(super) fn used_at(&mut self, now: Timestamp) {
        self.last_use = (now.0 >> LAST_BITS) as u32;
    }

    pub(super) fn last_use(&self, now: Timestamp) -> Timestamp {
        let units = now.0 >> LAST_BITS;
        let since = (units as u32).wrapping_sub(self.last_use);
        Timestamp(units.saturating_sub(u64::from(since)) << LAST_BITS)
    }

    /// Whether both were last used at the same time, usually by one request.
    pub(super) fn is_used_with(&self, other: &ResidentBlock) -> bool {
        self.last_use == other.last_use
    }
}
