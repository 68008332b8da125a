//! Records are read again from time to time, though nobody asks: what rots is noticed while its block can still
//! be computed again cheaply, and not by the request that needs it.
//!
//! Not here: how much of it a device takes (`store`), and what is read (`engine`).

use super::{Ended, Lane, Pending};
use crate::tiers::ssd::engine::{Job, ReadFault};

/// Bytes of records being checked at once: what a reader who comes meanwhile has before it in the device, unless
/// one record is larger.
const CHECKING_BYTES_MAX: u64 = 1 << 20;

/// What the lane remembers of it.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    /// The number of the record to go on from.
    at: u32,
    /// The last pass in which all records were looked at.
    done: Option<u64>,
    open_bytes: u64,
}

impl Lane {
    /// Begins to check the next record, unless somebody waits for this device or enough is being checked. Says how
    /// long the record is; nothing when there is none to be checked now. All records are looked at once in a pass.
    pub(in crate::tiers::ssd) fn check_next(&mut self, pass: u64) -> Option<u64> {
        let is_asked = self.saving.jobs + self.reading.jobs > 0;
        if is_asked || self.scrub.open_bytes >= CHECKING_BYTES_MAX || self.scrub.done == Some(pass) {
            return None;
        }
        let (found, at) = self.book.live_from(self.scrub.at);
        self.scrub.at = at;
        if at == 0 {
            self.scrub.done = Some(pass);
        }
        let record = found?;
        let spot = self.book.spot(record)?;
        let (segment, page) = (spot.place.head.segment, spot.place.page);
        let (at, bytes) = (self.book.shape().at(segment, page), u64::from(spot.frame_bytes));
        self.book.read_began(segment);
        self.scrub.open_bytes += bytes;
        let pending = Pending::Check { segment, member: (record, page), bytes };
        self.send(pending, |job| Job::Check { job, spot, at });
        Some(bytes)
    }

    /// The end of a check. A record that cannot be read may be read another time, by whoever wants it; one whose
    /// bytes are wrong is gone.
    pub(super) fn checked(&mut self, pending: &Pending, fault: Option<ReadFault>) -> Option<Ended> {
        let Pending::Check { segment, member, bytes } = *pending else { return None };
        self.scrub.open_bytes -= bytes;
        let is_there = self.book.is_left(segment, member);
        self.book.read_ended(segment);
        match fault {
            None => Some(Ended::Checked { result: Ok(bytes) }),
            Some(ReadFault::Medium(cause)) => Some(Ended::Checked { result: Err(cause) }),
            Some(fault @ ReadFault::Corrupt(_)) => is_there.then(|| {
                let (record, owner) = (member.0, self.book.owner(member.0));
                self.book.free(record);
                Ended::Lost { record, owner, fault }
            }),
        }
    }
}
