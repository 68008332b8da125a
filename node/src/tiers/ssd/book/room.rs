//! Whole segments that are empty: how many there are, which is next, what follows when the file cannot grow,
//! and where the last rescue goes when none is left.
//!
//! Not here: what is in a segment (the parent module), and which one is emptied (`drain`).

use super::{Segment, SegmentBook, SegmentHead, State, record_pages};

impl SegmentBook {
    /// Whether [`Self::place`] would find room for the largest frame.
    pub(crate) fn has_room(&self) -> bool {
        let fits = self.open.is_some_and(|open| self.fits(open, record_pages(self.shape.frame_bytes_max)));
        self.empty() >= if fits { 1 } else { 2 }
    }

    /// Whole segments that are empty, the ready one among them.
    pub(super) fn empty(&self) -> u32 {
        let free = u32::try_from(self.free.len()).unwrap_or(u32::MAX);
        let unmade = self.limit().saturating_sub(self.made());
        free.saturating_add(unmade).saturating_add(u32::from(self.ready.is_some()))
    }

    /// Segments that may be used now.
    pub(super) fn limit(&self) -> u32 {
        self.cap.map_or(self.limit, |cap| cap.min(self.limit))
    }

    fn made(&self) -> u32 {
        u32::try_from(self.segments.len()).unwrap_or(u32::MAX)
    }

    /// The head of the segment that is written next, when one must be prepared.
    pub(crate) fn prepare(&mut self, nonce: impl FnOnce() -> u64) -> Option<SegmentHead> {
        if self.ready.is_some() {
            return None;
        }
        let number = match self.free.pop_front() {
            Some(number) => number,
            None if self.made() < self.limit() => self.make(),
            None => return None,
        };
        self.ready = Some(number);
        Some(self.begin(number, nonce()))
    }

    fn make(&mut self) -> u32 {
        self.segments.push(Segment::new(State::Free));
        self.made() - 1
    }

    fn begin(&mut self, number: u32, nonce: u64) -> SegmentHead {
        *self.segment_mut(number) = Segment { nonce, ..Segment::new(State::Ready) };
        SegmentHead { segment: number, nonce }
    }

    /// The head of a segment is on the medium, and so is its room.
    pub(crate) fn opened(&mut self, number: u32) {
        self.grown = self.grown.max(number.saturating_add(1));
        if self.cap.is_some_and(|cap| number >= cap) {
            self.cap = None;
            for number in 0..self.made().min(self.limit) {
                let is_free = self.segments[number as usize].state == State::Free;
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

    /// The head of a segment could not be written: it is not used this time.
    pub(crate) fn unopened(&mut self, number: u32) {
        if self.probe == Some(number) {
            self.probe = None;
            self.release(number);
        } else if self.ready == Some(number) {
            self.ready = None;
            self.release(number);
        } else if self.open == Some(number) {
            self.close();
        }
    }

    /// The medium had no room for the segment with this number. Unless it was there before, only what is
    /// there is counted on from now on, and space comes back from within. Gives whether that is so.
    pub(crate) fn full(&mut self, number: u32) -> bool {
        if number < self.grown {
            return false;
        }
        self.cap = Some(self.grown);
        let (limit, extra) = (self.limit(), self.extra);
        self.free.retain(|&number| number < limit || extra == Some(number));
        true
    }

    /// Whether the file could not grow when it was last tried.
    pub(crate) fn is_capped(&self) -> bool {
        self.cap.is_some()
    }

    /// The head of a segment that tries whether the file can grow again. Nothing is placed there before.
    pub(crate) fn probe(&mut self, nonce: impl FnOnce() -> u64) -> Option<SegmentHead> {
        // All there may be is in the file: what could not grow was a segment that was lent.
        if self.grown >= self.limit && self.empty() > 0 {
            self.cap = None;
        }
        if self.cap.is_none() || self.probe.is_some() || self.grown >= self.limit {
            return None;
        }
        let number = if self.made() == self.grown { self.make() } else { self.grown };
        // What was placed there before the medium was full may still be on its way to its failure.
        if self.segments[number as usize].state != State::Free {
            return None;
        }
        self.probe = Some(number);
        Some(self.begin(number, nonce()))
    }

    /// Whether nothing is under way that could empty a segment or make one.
    pub(crate) fn is_idle(&self) -> bool {
        let moves = |segment: &Segment| {
            let ends = matches!(segment.state, State::Closing | State::Sealing);
            let is_read = segment.state != State::Free && segment.live_pages == 0 && segment.reads > 0;
            ends || segment.writes > 0 || is_read
        };
        self.probe.is_none() && !self.segments.iter().any(moves)
    }

    /// Whether a rescue that found no place would never find one.
    pub(crate) fn is_stuck(&self) -> bool {
        self.empty() == 0 && self.is_idle()
    }

    /// Lends one segment beyond the limit to a rescue that has none to go to. A crash, a failed write or a
    /// smaller capacity can leave things so. It is one at a time, and the file grows by one at most.
    pub(crate) fn borrow(&mut self) -> bool {
        if self.extra.is_some() {
            return false;
        }
        // One whose head failed before is made already, though the file may end before it.
        let end = if self.cap.is_none() { self.made() } else { self.grown };
        let mut beyond = self.limit()..end;
        let number = match beyond.find(|&number| self.segments[number as usize].state == State::Free) {
            Some(number) => number,
            None if self.cap.is_none() && self.made() <= self.limit => self.make(),
            None => return false,
        };
        self.extra = Some(number);
        self.free.push_back(number);
        true
    }
}
