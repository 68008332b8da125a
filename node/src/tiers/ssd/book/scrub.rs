//! The next record to check in a pass over all records.

use super::{RecordId, RecordState, SegmentBook};

/// Records examined in one call: most are live, and a call must stay short if they are not.
const SCAN_MAX: usize = 64;

impl SegmentBook {
    /// The first readable record from this number on, within one scan, and the number to continue
    /// from: 0 after the last.
    pub(crate) fn next_live_record(&self, from: u32) -> (Option<RecordId>, u32) {
        if from as usize >= self.records.len() {
            return (None, 0);
        }
        for (record, number) in self.records.iter().skip(from as usize).take(SCAN_MAX).zip(from..) {
            if record.state == RecordState::Live && !record.relocating {
                return (Some(RecordId(number)), number + 1);
            }
        }
        (None, from.saturating_add(SCAN_MAX as u32))
    }
}
