//! Empty segments: their number, the next one, a file that cannot grow, and a last destination for
//! relocations.
//!
//! Not here: the records of a segment (the parent module), and choosing the one to drain (`drain`).

use super::{Segment, SegmentBook, SegmentHead, SegmentState, record_pages};

impl SegmentBook {
    /// Whether [`Self::allocate`] would succeed for the largest frame.
    pub(crate) fn has_room(&self) -> bool {
        let fits = self.open.is_some_and(|open| self.fits(open, record_pages(self.shape.frame_bytes_max)));
        self.empty_segments() >= if fits { 1 } else { 2 }
    }

    /// Number of empty segments, including the prepared one.
    pub(super) fn empty_segments(&self) -> u32 {
        let free = u32::try_from(self.free.len()).unwrap_or(u32::MAX);
        let unmade = self.limit().saturating_sub(self.known_segments());
        free.saturating_add(unmade).saturating_add(u32::from(self.prepared.is_some()))
    }

    /// Number of segments that may be used now.
    pub(super) fn limit(&self) -> u32 {
        self.growth_cap.map_or(self.limit, |cap| cap.min(self.limit))
    }

    fn known_segments(&self) -> u32 {
        u32::try_from(self.segments.len()).unwrap_or(u32::MAX)
    }

    /// The head of the next segment to write, if one must be prepared.
    pub(crate) fn prepare_next(&mut self, nonce: impl FnOnce() -> u64) -> Option<SegmentHead> {
        if self.prepared.is_some() {
            return None;
        }
        let number = match self.free.pop_front() {
            Some(number) => number,
            None if self.known_segments() < self.limit() => self.add_segment(),
            None => return None,
        };
        self.prepared = Some(number);
        Some(self.start_segment(number, nonce()))
    }

    fn add_segment(&mut self) -> u32 {
        self.segments.push(Segment::new(SegmentState::Free));
        self.known_segments() - 1
    }

    fn start_segment(&mut self, number: u32, nonce: u64) -> SegmentHead {
        *self.segment_mut(number) = Segment { nonce, ..Segment::new(SegmentState::Prepared) };
        SegmentHead { segment: number, nonce }
    }

    /// The head of a segment is on the medium, and the file has space for it.
    pub(crate) fn mark_opened(&mut self, number: u32) {
        self.file_segments = self.file_segments.max(number.saturating_add(1));
        if self.growth_cap.is_some_and(|cap| number >= cap) {
            self.growth_cap = None;
            for number in 0..self.known_segments().min(self.limit) {
                let is_free = self.segments[number as usize].state == SegmentState::Free;
                if is_free && !self.free.contains(&number) {
                    self.free.push_back(number);
                }
            }
        }
        if self.probe == Some(number) {
            self.probe = None;
            self.release(number);
        }
    }

    /// The head of a segment could not be written: the segment is not used this time.
    pub(crate) fn mark_unopened(&mut self, number: u32) {
        if self.probe == Some(number) {
            self.probe = None;
            self.release(number);
        } else if self.prepared == Some(number) {
            self.prepared = None;
            self.release(number);
        } else if self.open == Some(number) {
            self.close_open_segment();
        }
    }

    /// The medium had no space for this segment. Unless it existed before, only existing segments
    /// are used from now on, and space is reclaimed among them. Returns whether that is so.
    pub(crate) fn mark_full(&mut self, number: u32) -> bool {
        if number < self.file_segments {
            return false;
        }
        self.growth_cap = Some(self.file_segments);
        let (limit, extra) = (self.limit(), self.extra_segment);
        self.free.retain(|&number| number < limit || extra == Some(number));
        true
    }

    /// Whether the file could not grow at the last attempt.
    pub(crate) fn is_capped(&self) -> bool {
        self.growth_cap.is_some()
    }

    /// The head of a segment that tests whether the file can grow again. No record is allocated
    /// there before it succeeds.
    pub(crate) fn probe_growth(&mut self, nonce: impl FnOnce() -> u64) -> Option<SegmentHead> {
        // The file has all its segments: the failed growth was for an extra segment.
        if self.file_segments >= self.limit && self.empty_segments() > 0 {
            self.growth_cap = None;
        }
        if self.growth_cap.is_none() || self.probe.is_some() || self.file_segments >= self.limit {
            return None;
        }
        let number =
            if self.known_segments() == self.file_segments { self.add_segment() } else { self.file_segments };
        // Records allocated there before the medium was full may still be in flight, and will fail.
        if self.segments[number as usize].state != SegmentState::Free {
            return None;
        }
        self.probe = Some(number);
        Some(self.start_segment(number, nonce()))
    }

    /// Whether no operation in flight could empty or add a segment.
    pub(crate) fn is_idle(&self) -> bool {
        let moves = |segment: &Segment| {
            let ends = matches!(segment.state, SegmentState::Closing | SegmentState::Sealing);
            let is_read = segment.state != SegmentState::Free && segment.live_pages == 0 && segment.reads > 0;
            ends || segment.writes > 0 || is_read
        };
        self.probe.is_none() && !self.segments.iter().any(moves)
    }

    /// Whether a relocation without a destination could never get one.
    pub(crate) fn is_stuck(&self) -> bool {
        self.empty_segments() == 0 && self.is_idle()
    }

    /// Adds one segment beyond the limit for a relocation without a destination. A crash, a failed
    /// write or a reduced capacity can lead to this. Only one exists at a time, so the file grows
    /// by at most one segment.
    pub(crate) fn add_extra_segment(&mut self) -> bool {
        if self.extra_segment.is_some() {
            return false;
        }
        // A segment with a failed head is in the table already, though the file may end before it.
        let end = if self.growth_cap.is_none() { self.known_segments() } else { self.file_segments };
        let mut beyond = self.limit()..end;
        let number = match beyond.find(|&number| self.segments[number as usize].state == SegmentState::Free) {
            Some(number) => number,
            None if self.growth_cap.is_none() && self.known_segments() <= self.limit => self.add_segment(),
            None => return false,
        };
        self.extra_segment = Some(number);
        self.free.push_back(number);
        true
    }
}
