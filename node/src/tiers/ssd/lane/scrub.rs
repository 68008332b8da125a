//! Background scrubbing: records are read periodically, so that corruption is found while a block
//! can still be recomputed cheaply, before a request needs it.
//!
//! Not here: the rate on a device (`store`), and verification (`engine`).

use super::{Lane, LaneEvent, PendingJob};
use crate::tiers::ssd::engine::{DeviceJob, ReadFault};

/// Maximum bytes of records being checked, unless one record is larger: they delay a reader that
/// arrives meanwhile.
const CHECKING_BYTES_MAX: u64 = 1 << 20;

/// Scrubbing state of a lane.
#[derive(Debug, Default)]
pub(super) struct ScrubState {
    /// Number of the next record.
    next_record: u32,
    /// The last completed pass.
    completed_pass: Option<u64>,
    open_bytes: u64,
}

impl Lane {
    /// Starts to check the next record, unless the store uses the device or enough checks are
    /// running. Returns the record's length, or `None` if no check started. Each record is checked
    /// once in a pass.
    pub(in crate::tiers::ssd) fn check_next(&mut self, pass: u64) -> Option<u64> {
        let is_asked = self.writes.jobs + self.reads.jobs > 0;
        if is_asked || self.scrub.open_bytes >= CHECKING_BYTES_MAX || self.scrub.completed_pass == Some(pass)
        {
            return None;
        }
        let (found, at) = self.book.next_live_record(self.scrub.next_record);
        self.scrub.next_record = at;
        if at == 0 {
            self.scrub.completed_pass = Some(pass);
        }
        let record = found?;
        let spot = self.book.extent(record)?;
        let (segment, page) = (spot.position.head.segment, spot.position.page);
        let (at, bytes) = (self.book.shape().offset(segment, page), u64::from(spot.frame_bytes));
        self.book.begin_read(segment);
        self.scrub.open_bytes += bytes;
        let pending = PendingJob::Check { segment, member: (record, page), bytes };
        self.send(pending, |job| DeviceJob::Check { job, spot, at });
        Some(bytes)
    }

    /// Ends a check. A record that could not be read may be readable later; one with wrong bytes is
    /// dropped.
    pub(super) fn end_check(&mut self, pending: &PendingJob, fault: Option<ReadFault>) -> Option<LaneEvent> {
        let PendingJob::Check { segment, member, bytes } = *pending else { return None };
        self.scrub.open_bytes -= bytes;
        let is_there = self.book.is_still_there(segment, member);
        self.book.end_read(segment);
        match fault {
            None => Some(LaneEvent::Checked { result: Ok(bytes) }),
            Some(ReadFault::Medium(cause)) => Some(LaneEvent::Checked { result: Err(cause) }),
            Some(fault @ ReadFault::Corrupt(_)) => is_there.then(|| {
                let (record, owner) = (member.0, self.book.owner(member.0));
                self.book.free(record);
                LaneEvent::Lost { record, owner, fault }
            }),
        }
    }
}
