//! Maintenance of a lane: segment heads before use, footers after it, and relocations out of
//! drained segments to reclaim space.
//!
//! Not here: choosing the segment (`book`), and ends of jobs (the parent module).

use std::io;

use bytes::Bytes;

use super::{Lane, PendingJob, SegmentDrain};
use crate::tiers::ssd::book::{RecordExtent, Relocation};
use crate::tiers::ssd::engine::{DeviceJob, JobOutcome, ReadFault};
use crate::tiers::ssd::format::{SegmentHead, footer, footer_pages};

/// Maximum relocations in flight: each reads and rewrites a record.
pub(in crate::tiers::ssd) const RELOCATIONS_MAX: usize = 8;

/// The same while a reader waits for the device and there is space to write, because they delay the
/// read. Without space, saves wait for relocations, but readers wait for neither.
pub(in crate::tiers::ssd) const RELOCATIONS_WHILE_READERS_WAIT_MAX: usize = 2;

/// Records of a device offered for release at once: about a tenth of a millisecond.
const OFFERED_MAX: usize = 256;

impl Lane {
    /// Makes the medium follow the book: heads, footers, relocations.
    pub(super) fn maintain(&mut self) {
        if self.stopped.is_some() {
            return;
        }
        self.prepare_next();
        while let Some((head, entries)) = self.book.next_seal() {
            let shape = self.book.shape();
            let pages = footer_pages(u32::try_from(entries.len()).unwrap_or(u32::MAX));
            let at = shape.offset(head.segment, shape.segment_pages - pages);
            let footer = Bytes::from(footer(head, &entries));
            self.send(PendingJob::Seal { segment: head.segment }, |job| DeviceJob::Seal { job, at, footer });
        }
        while self.continue_drain() {}
        self.report_if_full();
    }

    fn prepare_next(&mut self) {
        let nonce = &mut self.nonce;
        if let Some(head) = self.book.prepare_next(|| next_nonce(nonce)) {
            self.send_head(head);
            self.probe_growth();
        }
    }

    /// After failed growth, probes again with each segment that is opened.
    pub(super) fn probe_growth(&mut self) {
        let nonce = &mut self.nonce;
        if let Some(head) = self.book.probe_growth(|| next_nonce(nonce)) {
            self.send_head(head);
        }
    }

    fn send_head(&mut self, head: SegmentHead) {
        let shape = self.book.shape();
        let (at, grow_to) = (shape.offset(head.segment, 0), shape.offset(head.segment + 1, 0));
        self.send(PendingJob::Head { segment: head.segment }, |job| DeviceJob::Head {
            job,
            head,
            at,
            grow_to,
        });
    }

    /// Continues to drain a segment. `true` if one became empty and another may be due.
    fn continue_drain(&mut self) -> bool {
        if self.drain.is_none() && self.book.needs_space() {
            self.drain =
                self.book.begin_drain().map(|(segment, remaining)| SegmentDrain::new(segment, remaining));
        }
        let Some(mut drain) = self.drain.take() else { return false };
        let open_max = if drain.is_offer_answered { self.relocations_max() } else { 1 };
        while drain.open < open_max
            && let Some(member) = drain.remaining.pop()
        {
            if !self.book.is_still_there(drain.segment, member) {
                continue;
            }
            if let Some(rescue) = self.book.begin_relocation(member.0) {
                drain.open += 1;
                self.send_relocation(rescue);
                self.prepare_next();
                continue;
            }
            drain.remaining.push(member);
            if drain.open > 0 || !self.book.is_stuck() {
                break;
            }
            if self.book.add_extra_segment() {
                self.prepare_next();
            } else {
                self.drop_remaining(&mut drain);
            }
        }
        let is_over = drain.remaining.is_empty() && drain.open == 0;
        if is_over {
            self.book.end_drain(drain.segment);
            self.prepare_next();
        } else {
            self.drain = Some(drain);
        }
        is_over
    }

    /// Owners of the records to relocate next, each once and in order, so that the caller can free
    /// those not worth rewriting. Until [`Self::relocate_offered`] only one is relocated at a time.
    pub(in crate::tiers::ssd) fn next_to_relocate(&mut self) -> Vec<u32> {
        let Some(drain) = self.drain.as_mut() else { return Vec::new() };
        let to = drain.unoffered.min(drain.remaining.len());
        drain.unoffered = to.saturating_sub(OFFERED_MAX);
        let asked = drain.remaining[drain.unoffered..to].iter();
        let left = asked.filter(|member| self.book.is_still_there(drain.segment, **member));
        left.map(|(id, _)| self.book.owner(*id)).collect()
    }

    /// Relocates the offered records that were not freed.
    pub(in crate::tiers::ssd) fn relocate_offered(&mut self) {
        if let Some(drain) = self
            .drain
            .as_mut()
            .filter(|drain| !drain.is_offer_answered && drain.unoffered < drain.remaining.len())
        {
            drain.is_offer_answered = true;
            self.maintain();
        }
    }

    /// Maximum relocations in flight now.
    pub(in crate::tiers::ssd) fn relocations_max(&self) -> usize {
        let reader_waits = self.reads.jobs > 0 && self.book.has_room();
        if reader_waits { RELOCATIONS_WHILE_READERS_WAIT_MAX } else { RELOCATIONS_MAX }
    }

    /// Relocations in flight, for tests.
    #[cfg(test)]
    pub(in crate::tiers::ssd) fn relocations(&self) -> usize {
        self.drain.as_ref().map_or(0, |drain| drain.open)
    }

    fn send_relocation(&mut self, rescue: Relocation) {
        let shape = self.book.shape();
        let at = |spot: RecordExtent| shape.offset(spot.position.head.segment, spot.position.page);
        let (from, to, from_at, to_at) = (rescue.from, rescue.to, at(rescue.from), at(rescue.to));
        self.send(PendingJob::Relocate(rescue), |job| DeviceJob::Relocate { job, from, from_at, to, to_at });
    }

    /// Drops the remaining records of the emptiest segment, since no segment is left to relocate
    /// them to.
    fn drop_remaining(&mut self, drain: &mut SegmentDrain) {
        tracing::warn!(
            segment = drain.segment,
            blocks = drain.remaining.len(),
            "blocks on SSD are dropped: no space is left to relocate them"
        );
        for member in std::mem::take(&mut drain.remaining) {
            drain.open += 1;
            let cause = io::Error::new(io::ErrorKind::StorageFull, "no space was left to keep it");
            let pending = PendingJob::DropRecord { segment: drain.segment, member };
            self.report(pending, JobOutcome::Read(Err(ReadFault::Medium(cause))));
        }
    }

    /// Reports a medium full of live records, because a caller that waits for space would wait
    /// long.
    fn report_if_full(&mut self) {
        let is_full = self.book.is_capped()
            && self.drain.is_none()
            && !self.is_full_reported
            && !self.book.has_room()
            && self.book.is_idle();
        if is_full {
            self.is_full_reported = true;
            self.report(PendingJob::ReportFull, JobOutcome::Written(Err(io::ErrorKind::StorageFull.into())));
        }
    }
}

/// The next value of a sequence that differs between starts (splitmix64).
fn next_nonce(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
