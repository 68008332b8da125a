//! How space comes back: the sealed segment with the least in it is drained, its records moved to where is
//! written.
//!
//! Not here: placing and freeing (the parent module), and the bytes of a record that is moved (`engine`).

use super::{Life, Member, Purpose, Record, RecordId, Segment, SegmentBook, Spot, State};
use crate::tiers::ssd::format::{RecordHeader, footer_pages, record_pages};

/// While at most so many whole segments are empty, one is drained: what is written meanwhile must fit.
const EMPTY_WANTED: u32 = 2;

/// A record on its way out of a segment that is drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rescue {
    pub(crate) record: RecordId,
    /// Stands for it until it has arrived.
    pub(crate) copy: RecordId,
    pub(crate) from: Spot,
    pub(crate) to: Spot,
}

/// How a rescue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RescueEnd {
    /// The record is at its new place.
    Moved(RecordHeader),
    /// It could not be written there.
    NotWritten,
    /// It could not be read.
    NotRead,
}

/// A segment is drained when at least one part in so many of it comes free.
const DRAIN_GAIN_PARTS: u32 = 16;

impl SegmentBook {
    /// Whether space should come back now.
    pub(crate) fn is_short(&self) -> bool {
        self.empty() <= EMPTY_WANTED
    }

    /// Begins to drain the sealed segment with the least in it, and gives its records. `None` when nothing
    /// would be won.
    pub(crate) fn drain(&mut self) -> Option<(u32, Vec<Member>)> {
        let useful = |(_, segment): &(usize, &Segment)| {
            segment.state == State::Sealed && !segment.draining && segment.live_pages > 0
        };
        let (number, segment) =
            self.segments.iter().enumerate().filter(useful).min_by_key(|(_, segment)| segment.live_pages)?;
        let fill = self.shape.segment_pages - 1 - footer_pages(u32::try_from(segment.members.len()).ok()?);
        let number = u32::try_from(number).ok()?;
        // At the end of a segment as much may be free as the largest record takes: to move it all elsewhere wins
        // nothing, and would go on for ever where all of a medium is wanted.
        let least = record_pages(self.shape.frame_bytes_max).max(fill / DRAIN_GAIN_PARTS);
        if fill.saturating_sub(segment.live_pages) < least {
            return None;
        }
        let live = segment.members.iter().filter(|(id, page)| self.is_at(*id, number, *page));
        let records = live.copied().collect();
        self.segment_mut(number).draining = true;
        Some((number, records))
    }

    /// Draining ended; what is left in the segment stays there.
    pub(crate) fn drained(&mut self, number: u32) {
        self.segment_mut(number).draining = false;
        self.release_if_empty(number);
    }

    /// Whether a record is still where it was when its segment began to be drained.
    pub(crate) fn is_left(&self, segment: u32, (id, page): Member) -> bool {
        self.is_at(id, segment, page)
    }

    /// Begins to move a record of a segment that is drained. `None` when there is no room.
    pub(crate) fn rescue(&mut self, id: RecordId) -> Option<Rescue> {
        let from = self.spot(id)?;
        let owner = self.owner(id);
        let (copy, to) = self.place(from.frame_bytes, owner, Purpose::Rescue)?;
        self.records[id.0 as usize].rescuing = true;
        self.read_began(from.place.head.segment);
        Some(Rescue { record: id, copy, from, to })
    }

    /// A rescue ended. `true` when the record could not be read and was still wanted: it is freed.
    pub(crate) fn rescued(&mut self, rescue: Rescue, end: RescueEnd) -> bool {
        let (old, new) = (rescue.record.0 as usize, rescue.copy.0 as usize);
        self.records[old].rescuing = false;
        let is_gone = self.records[old].life == Life::Gone;
        let header = match end {
            RescueEnd::Moved(header) => Some(header),
            RescueEnd::NotWritten | RescueEnd::NotRead => None,
        };
        match end {
            RescueEnd::Moved(header) => self.committed(rescue.copy, header),
            RescueEnd::NotWritten => self.failed(rescue.copy),
            RescueEnd::NotRead => {
                self.segment_mut(rescue.to.place.head.segment).writes -= 1;
                self.forget(rescue.copy);
            }
        }
        if is_gone {
            self.records[old].life = Life::Vacant;
            self.vacant.push(rescue.record);
            if header.is_some() {
                self.forget(rescue.copy);
            }
        } else if header.is_some() {
            let from = self.records[old];
            let to = self.records[new];
            self.records[old] = Record { owner: from.owner, ..to };
            self.records[new].life = Life::Vacant;
            self.vacant.push(rescue.copy);
            let segment = self.segment_mut(to.segment);
            segment.members.iter_mut().filter(|(id, _)| *id == rescue.copy).for_each(|member| {
                if member.1 == to.page {
                    member.0 = rescue.record;
                }
            });
            if let Some(line) = segment.table.iter_mut().rev().find(|(id, _)| *id == rescue.copy) {
                line.0 = rescue.record;
            }
            self.unlive(from);
        }
        let is_lost = end == RescueEnd::NotRead && !is_gone;
        if is_lost {
            self.forget(rescue.record);
        }
        self.read_ended(rescue.from.place.head.segment);
        is_lost
    }
}
