//! What a lane does for itself: heads before segments are written, footers after, rescues out of segments that are
//! emptied, so that there is room.
//!
//! Not here: which segment is emptied (`book`), and how jobs end (the parent module).

use std::io;

use bytes::Bytes;

use super::{Drain, Lane, Pending};
use crate::tiers::ssd::book::{Rescue, Spot};
use crate::tiers::ssd::engine::{Job, Outcome, ReadFault};
use crate::tiers::ssd::format::{SegmentHead, footer, footer_pages};

/// Rescues in flight: each is a record that is read and written again.
pub(in crate::tiers::ssd) const RESCUES_MAX: usize = 8;

/// Rescues in flight while a reader waits for the device and there is room to write: what his read finds before it. Without
/// room, saves wait for rescues, and readers for neither.
pub(in crate::tiers::ssd) const RESCUES_BESIDE_READERS_MAX: usize = 2;

/// Records of a device of which is asked at once whether they are worth being moved: some tenth of a millisecond.
const ASKED_MAX: usize = 256;

impl Lane {
    /// Makes the medium follow the book: heads, footers, rescues.
    pub(super) fn tend(&mut self) {
        if self.stopped.is_some() {
            return;
        }
        self.prepare();
        while let Some((head, entries)) = self.book.next_seal() {
            let shape = self.book.shape();
            let pages = footer_pages(u32::try_from(entries.len()).unwrap_or(u32::MAX));
            let at = shape.at(head.segment, shape.segment_pages - pages);
            let footer = Bytes::from(footer(head, &entries));
            self.send(Pending::Seal { segment: head.segment }, |job| Job::Seal { job, at, footer });
        }
        while self.drain_on() {}
        self.tell_if_full();
    }

    fn prepare(&mut self) {
        let nonce = &mut self.nonce;
        if let Some(head) = self.book.prepare(|| next_nonce(nonce)) {
            self.send_head(head);
            self.probe();
        }
    }

    /// While the file could not grow, that is tried again with each segment that is written.
    pub(super) fn probe(&mut self) {
        let nonce = &mut self.nonce;
        if let Some(head) = self.book.probe(|| next_nonce(nonce)) {
            self.send_head(head);
        }
    }

    fn send_head(&mut self, head: SegmentHead) {
        let shape = self.book.shape();
        let (at, grow_to) = (shape.at(head.segment, 0), shape.at(head.segment + 1, 0));
        self.send(Pending::Head { segment: head.segment }, |job| Job::Head { job, head, at, grow_to });
    }

    /// Goes on with emptying a segment. `true` when one became empty and another may be due.
    fn drain_on(&mut self) -> bool {
        if self.drain.is_none() && self.book.is_short() {
            self.drain = self.book.drain().map(Drain::new);
        }
        let Some(mut drain) = self.drain.take() else { return false };
        let open_max = if drain.is_answered { self.rescues_max() } else { 1 };
        while drain.open < open_max
            && let Some(member) = drain.left.pop()
        {
            if !self.book.is_left(drain.segment, member) {
                continue;
            }
            if let Some(rescue) = self.book.rescue(member.0) {
                drain.open += 1;
                self.send_rescue(rescue);
                self.prepare();
                continue;
            }
            drain.left.push(member);
            if drain.open > 0 || !self.book.is_stuck() {
                break;
            }
            if self.book.borrow() {
                self.prepare();
            } else {
                self.give_up(&mut drain);
            }
        }
        let is_over = drain.left.is_empty() && drain.open == 0;
        if is_over {
            self.book.drained(drain.segment);
            self.prepare();
        } else {
            self.drain = Some(drain);
        }
        is_over
    }

    /// Whose records are to be moved out of a segment that is being emptied, each once and those that are next first:
    /// for somebody to free what is not worth being written again. Until [`Self::go_on`] one is moved after the other.
    pub(in crate::tiers::ssd) fn next_to_move(&mut self) -> Vec<u32> {
        let Some(drain) = self.drain.as_mut() else { return Vec::new() };
        let to = drain.unasked.min(drain.left.len());
        drain.unasked = to.saturating_sub(ASKED_MAX);
        let asked = drain.left[drain.unasked..to].iter();
        let left = asked.filter(|member| self.book.is_left(drain.segment, **member));
        left.map(|(id, _)| self.book.owner(*id)).collect()
    }

    /// What was let go of is free.
    pub(in crate::tiers::ssd) fn go_on(&mut self) {
        if let Some(drain) =
            self.drain.as_mut().filter(|drain| !drain.is_answered && drain.unasked < drain.left.len())
        {
            drain.is_answered = true;
            self.tend();
        }
    }

    /// Rescues that may be in flight now.
    pub(in crate::tiers::ssd) fn rescues_max(&self) -> usize {
        let reader_waits = self.reading.jobs > 0 && self.book.has_room();
        if reader_waits { RESCUES_BESIDE_READERS_MAX } else { RESCUES_MAX }
    }

    /// Rescues in flight, for tests.
    #[cfg(test)]
    pub(in crate::tiers::ssd) fn rescues(&self) -> usize {
        self.drain.as_ref().map_or(0, |drain| drain.open)
    }

    fn send_rescue(&mut self, rescue: Rescue) {
        let shape = self.book.shape();
        let at = |spot: Spot| shape.at(spot.place.head.segment, spot.place.page);
        let (from, to, from_at, to_at) = (rescue.from, rescue.to, at(rescue.from), at(rescue.to));
        self.send(Pending::Rescue(rescue), |job| Job::Rescue { job, from, from_at, to, to_at });
    }

    /// What is left in the segment with the least in it goes, since no segment is left to move it to.
    fn give_up(&mut self, drain: &mut Drain) {
        tracing::warn!(
            segment = drain.segment,
            blocks = drain.left.len(),
            "blocks on SSD are dropped: no room is left to move them to"
        );
        for member in std::mem::take(&mut drain.left) {
            drain.open += 1;
            let cause = io::Error::new(io::ErrorKind::StorageFull, "no room was left to keep it");
            let pending = Pending::GiveUp { segment: drain.segment, member };
            self.tell(pending, Outcome::Got(Err(ReadFault::Medium(cause))));
        }
    }

    /// Whoever waits for room on a medium that is full of what is wanted would wait for long.
    fn tell_if_full(&mut self) {
        let is_full = self.book.is_capped()
            && self.drain.is_none()
            && !self.is_told_full
            && !self.book.has_room()
            && self.book.is_idle();
        if is_full {
            self.is_told_full = true;
            self.tell(Pending::Full, Outcome::Put(Err(io::ErrorKind::StorageFull.into())));
        }
    }
}

/// The next of a sequence that differs from start to start (splitmix64).
fn next_nonce(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
