//! Which record is looked at next when all are to be looked at in turn.

use super::{Life, RecordId, SegmentBook};

/// Records looked at in one call: most are in use, and a call must not take long where they are not.
const LOOKS_MAX: usize = 64;

impl SegmentBook {
    /// The first record from this number on that may be read, if one of those looked at may be, and the number to go on
    /// from: 0 after the last.
    pub(crate) fn live_from(&self, from: u32) -> (Option<RecordId>, u32) {
        if from as usize >= self.records.len() {
            return (None, 0);
        }
        for (record, number) in self.records.iter().skip(from as usize).take(LOOKS_MAX).zip(from..) {
            if record.life == Life::Live && !record.rescuing {
                return (Some(RecordId(number)), number + 1);
            }
        }
        (None, from.saturating_add(LOOKS_MAX as u32))
    }
}
