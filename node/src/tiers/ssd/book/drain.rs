//! Space reclamation: the emptiest sealed segment is drained by relocating its records to the open
//! segment.
//!
//! Not here: allocating and freeing (the parent module), and the bytes of a relocated record
//! (`engine`).

use super::{
    Member, Record, RecordExtent, RecordId, RecordState, Segment, SegmentBook, SegmentState, WritePurpose,
};
use crate::tiers::ssd::format::{RecordHeader, footer_pages, record_pages};

/// A segment is drained while at most this many whole segments are empty: new writes must fit
/// meanwhile.
const EMPTY_SEGMENTS_MIN: u32 = 2;

/// A record being relocated out of a drained segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Relocation {
    pub(crate) record: RecordId,
    /// The new record, until the relocation ends.
    pub(crate) replacement: RecordId,
    pub(crate) from: RecordExtent,
    pub(crate) to: RecordExtent,
}

/// Result of a relocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RelocationResult {
    /// The record is written at its new position.
    Moved(RecordHeader),
    /// It could not be written.
    NotWritten,
    /// It could not be read.
    NotRead,
}

/// A segment is drained only if at least this fraction (one divided by it) of its pages becomes
/// free.
const DRAIN_GAIN_DIVISOR: u32 = 16;

impl SegmentBook {
    /// Whether space should be reclaimed now.
    pub(crate) fn needs_space(&self) -> bool {
        self.empty_segments() <= EMPTY_SEGMENTS_MIN
    }

    /// Begins to drain the emptiest sealed segment, and returns its records. `None` if it would
    /// gain no space.
    pub(crate) fn begin_drain(&mut self) -> Option<(u32, Vec<Member>)> {
        let useful = |(_, segment): &(usize, &Segment)| {
            segment.state == SegmentState::Sealed && !segment.draining && segment.live_pages > 0
        };
        let (number, segment) =
            self.segments.iter().enumerate().filter(useful).min_by_key(|(_, segment)| segment.live_pages)?;
        let fill = self.shape.segment_pages - 1 - footer_pages(u32::try_from(segment.members.len()).ok()?);
        let number = u32::try_from(number).ok()?;
        // Up to one largest record may be unused at the end of a segment. Relocating everything for
        // that gains no space, and would repeat forever on a medium full of live records.
        let least = record_pages(self.shape.frame_bytes_max).max(fill / DRAIN_GAIN_DIVISOR);
        if fill.saturating_sub(segment.live_pages) < least {
            return None;
        }
        let live = segment.members.iter().filter(|(id, page)| self.is_at(*id, number, *page));
        let records = live.copied().collect();
        self.segment_mut(number).draining = true;
        Some((number, records))
    }

    /// Ends a drain; remaining records stay in the segment.
    pub(crate) fn end_drain(&mut self, number: u32) {
        self.segment_mut(number).draining = false;
        self.release_if_empty(number);
    }

    /// Whether a record is still where it was when its segment began to be drained.
    pub(crate) fn is_still_there(&self, segment: u32, (id, page): Member) -> bool {
        self.is_at(id, segment, page)
    }

    /// Begins to relocate a record of a drained segment. `None` if there is no space.
    pub(crate) fn begin_relocation(&mut self, id: RecordId) -> Option<Relocation> {
        let from = self.extent(id)?;
        let owner = self.owner(id);
        let (copy, to) = self.allocate(from.frame_bytes, owner, WritePurpose::Relocate)?;
        self.records[id.0 as usize].relocating = true;
        self.begin_read(from.position.head.segment);
        Some(Relocation { record: id, replacement: copy, from, to })
    }

    /// Ends a relocation. `true` if the record could not be read and was still live: it is freed.
    pub(crate) fn end_relocation(&mut self, rescue: Relocation, end: RelocationResult) -> bool {
        let (old, new) = (rescue.record.0 as usize, rescue.replacement.0 as usize);
        self.records[old].relocating = false;
        let is_gone = self.records[old].state == RecordState::Freed;
        let header = match end {
            RelocationResult::Moved(header) => Some(header),
            RelocationResult::NotWritten | RelocationResult::NotRead => None,
        };
        match end {
            RelocationResult::Moved(header) => self.mark_committed(rescue.replacement, header),
            RelocationResult::NotWritten => self.mark_failed(rescue.replacement),
            RelocationResult::NotRead => {
                self.segment_mut(rescue.to.position.head.segment).writes -= 1;
                self.remove_record(rescue.replacement);
            }
        }
        if is_gone {
            self.records[old].state = RecordState::Vacant;
            self.vacant.push(rescue.record);
            if header.is_some() {
                self.remove_record(rescue.replacement);
            }
        } else if header.is_some() {
            let from = self.records[old];
            let to = self.records[new];
            self.records[old] = Record { owner: from.owner, ..to };
            self.records[new].state = RecordState::Vacant;
            self.vacant.push(rescue.replacement);
            let segment = self.segment_mut(to.segment);
            segment.members.iter_mut().filter(|(id, _)| *id == rescue.replacement).for_each(|member| {
                if member.1 == to.page {
                    member.0 = rescue.record;
                }
            });
            if let Some(line) = segment.table.iter_mut().rev().find(|(id, _)| *id == rescue.replacement) {
                line.0 = rescue.record;
            }
            self.subtract_live_pages(from);
        }
        let is_lost = end == RelocationResult::NotRead && !is_gone;
        if is_lost {
            self.remove_record(rescue.record);
        }
        self.end_read(rescue.from.position.head.segment);
        is_lost
    }
}
