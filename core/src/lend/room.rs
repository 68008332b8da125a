//! Places in a tray: which bytes of it are in use. First fit, since a tray has few places and they live short.
//!
//! Not here: the tray's memory, and who may write where.

use std::collections::BTreeMap;

/// The places of one part of a tray.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    bytes: u64,
    align: u64,
    /// Beginning and end of each place.
    taken: BTreeMap<u64, u64>,
}

impl Room {
    /// So many bytes, in places that begin at multiples of `align` (at least one).
    #[must_use]
    pub fn new(bytes: u64, align: u64) -> Room {
        Room { bytes, align: align.max(1), taken: BTreeMap::new() }
    }

    /// The first place that has `len` bytes; nothing when there is none. An empty place takes one byte.
    pub fn take(&mut self, len: u32) -> Option<u64> {
        self.take_within(len, self.bytes)
    }

    /// The same among the first bytes of the part: what is behind these is left to others.
    pub fn take_within(&mut self, len: u32, bytes: u64) -> Option<u64> {
        let len = u64::from(len).max(1);
        let mut at = 0_u64;
        for (&start, &end) in &self.taken {
            if at.checked_add(len)? <= start {
                break;
            }
            at = end.checked_next_multiple_of(self.align)?;
        }
        let end = at.checked_add(len).filter(|end| *end <= self.bytes.min(bytes))?;
        self.taken.insert(at, end);
        Some(at)
    }

    /// The place that begins there is free again; `false` when there was none.
    pub fn give_back(&mut self, at: u64) -> bool {
        self.taken.remove(&at).is_some()
    }

    /// Places in use.
    #[must_use]
    pub fn places(&self) -> usize {
        self.taken.len()
    }
}
