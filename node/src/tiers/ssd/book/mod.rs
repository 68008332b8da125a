//! The segment book of one device: the open segment, the live records of each segment, and the next
//! one to drain. Pure: no I/O, no clock, no randomness; nonces are arguments.
//!
//! A record has its position at once and its bytes later, like blocks in the tier book. Space is
//! reclaimed in whole segments: one without live records is free. When few are free, the emptiest
//! is drained, and its records are relocated to the open segment (`drain`, `free_space`). Not here:
//! which blocks belong on SSD (`kv_core::tier`), and bytes (`engine`).

mod drain;
mod free_space;
mod scrub;

pub(crate) use drain::{Relocation, RelocationResult};

use std::collections::VecDeque;

use super::format::{FooterEntry, RecordHeader, RecordPosition, SegmentHead, footer_pages, record_pages};
use super::shape::SegmentShape;

/// A record of this device; stays the same when the record is relocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RecordId(pub(crate) u32);

/// A record and its page in a segment. Record numbers are reused, so the page tells whether it is
/// still the same record.
pub(crate) type Member = (RecordId, u32);

/// Purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WritePurpose {
    /// A block from DRAM. It leaves one whole segment for relocations, so that space can always be
    /// reclaimed.
    Save,
    /// A record of a segment that is drained.
    Relocate,
}

/// State of a segment as found by recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RecoveredSegment {
    /// It has no usable record.
    Empty,
    /// It cannot be read; another segment replaces it.
    Unreadable,
    /// Its records, from its footer (`sealed`) or from a full read.
    Records { head: SegmentHead, entries: Vec<FooterEntry>, sealed: bool },
}

impl RecoveredSegment {
    /// The records.
    pub(crate) fn entries(&self) -> &[FooterEntry] {
        match self {
            RecoveredSegment::Records { entries, .. } => entries,
            RecoveredSegment::Empty | RecoveredSegment::Unreadable => &[],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentState {
    Free,
    /// Its head is in flight or written; the next one to be opened.
    Prepared,
    Open,
    /// Full, with writes in flight or without a footer yet.
    Closing,
    /// Its footer is in flight.
    Sealing,
    Sealed,
    Unreadable,
}

#[derive(Debug)]
struct Segment {
    state: SegmentState,
    nonce: u64,
    next_page: u32,
    live_pages: u32,
    writes: u32,
    reads: u32,
    draining: bool,
    members: Vec<Member>,
    /// Committed records, for the footer.
    table: Vec<(RecordId, FooterEntry)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordState {
    Vacant,
    Writing,
    Live,
    /// Freed by its owner, but still referenced by an operation in flight.
    Freed,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    state: RecordState,
    relocating: bool,
    segment: u32,
    page: u32,
    frame_bytes: u32,
    owner: u32,
}

/// Location and length of a record's frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordExtent {
    pub(crate) position: RecordPosition,
    pub(crate) frame_bytes: u32,
}

/// Memory of the book for one record, in bytes: its row, its membership in a segment, and its
/// footer line.
pub(crate) const RECORD_BYTES: u64 =
    (size_of::<Record>() + size_of::<Member>() + size_of::<(RecordId, FooterEntry)>()) as u64;

/// The book.
#[derive(Debug)]
pub(crate) struct SegmentBook {
    shape: SegmentShape,
    segments: Vec<Segment>,
    /// Maximum number of segments: those of the shape, plus one for each unreadable one.
    limit: u32,
    /// Number of segments that the file has space for.
    file_segments: u32,
    /// The same, once the file could not grow; segments beyond it are not used.
    growth_cap: Option<u32>,
    /// The segment beyond the cap that is used to probe growth.
    probe: Option<u32>,
    /// An additional segment beyond the limit for relocations that had no other destination.
    extra_segment: Option<u32>,
    free: VecDeque<u32>,
    prepared: Option<u32>,
    open: Option<u32>,
    /// Segments that wait for their writes, then for a footer.
    closing: Vec<u32>,
    records: Vec<Record>,
    vacant: Vec<RecordId>,
}

impl SegmentBook {
    pub(crate) fn new(shape: SegmentShape) -> SegmentBook {
        SegmentBook {
            shape,
            segments: Vec::new(),
            limit: shape.segments,
            file_segments: 0,
            growth_cap: None,
            probe: None,
            extra_segment: None,
            free: VecDeque::new(),
            prepared: None,
            open: None,
            closing: Vec::new(),
            records: Vec::new(),
            vacant: Vec::new(),
        }
    }

    pub(crate) fn shape(&self) -> SegmentShape {
        self.shape
    }

    /// Records with a position, whether written or not.
    pub(crate) fn records(&self) -> u64 {
        (self.records.len() - self.vacant.len()) as u64
    }

    /// Reserves memory for this many recovered records.
    pub(crate) fn reserve_records(&mut self, count: usize) {
        self.records.reserve(count);
    }

    /// Adds the next segment of a recovered file; returns a number for each of its records.
    pub(crate) fn add_recovered(&mut self, found: &RecoveredSegment) -> Vec<RecordId> {
        let number = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segments.push(Segment::new(SegmentState::Free));
        self.file_segments = number.saturating_add(1);
        let (head, entries, sealed) = match found {
            RecoveredSegment::Empty => {
                self.release(number);
                return Vec::new();
            }
            RecoveredSegment::Unreadable => {
                self.segment_mut(number).state = SegmentState::Unreadable;
                self.limit += 1;
                return Vec::new();
            }
            RecoveredSegment::Records { head, entries, sealed } => (head, entries, *sealed),
        };
        let pages = self.shape.segment_pages;
        let segment = self.segment_mut(number);
        segment.state = if sealed { SegmentState::Sealed } else { SegmentState::Closing };
        segment.nonce = head.nonce;
        segment.next_page = pages;
        segment.members.reserve(entries.len());
        let ids: Vec<RecordId> =
            entries.iter().map(|entry| self.add_recovered_record(number, entry)).collect();
        if !sealed {
            self.closing.push(number);
            self.segments[number as usize].table =
                std::iter::zip(&ids, entries).map(|(&id, &entry)| (id, entry)).collect();
        }
        self.release_if_empty(number);
        ids
    }

    fn add_recovered_record(&mut self, segment: u32, entry: &FooterEntry) -> RecordId {
        let frame_bytes = entry.header.traits.bytes;
        let id = self.add_record(Record {
            state: RecordState::Live,
            relocating: false,
            segment,
            page: entry.page,
            frame_bytes,
            owner: u32::MAX,
        });
        let found = self.segment_mut(segment);
        found.live_pages += record_pages(frame_bytes as usize);
        found.members.push((id, entry.page));
        id
    }

    /// Sets the owner of a record, returned by [`Self::owner`].
    pub(crate) fn set_owner(&mut self, id: RecordId, owner: u32) {
        self.records[id.0 as usize].owner = owner;
    }

    /// The owner given with the record.
    pub(crate) fn owner(&self, id: RecordId) -> u32 {
        self.records[id.0 as usize].owner
    }

    /// Location of a readable record.
    pub(crate) fn extent(&self, id: RecordId) -> Option<RecordExtent> {
        let record = self.records.get(id.0 as usize).filter(|record| record.state == RecordState::Live)?;
        Some(self.extent_of(*record))
    }

    fn extent_of(&self, record: Record) -> RecordExtent {
        let nonce = self.segments[record.segment as usize].nonce;
        let head = SegmentHead { segment: record.segment, nonce };
        RecordExtent { position: RecordPosition { head, page: record.page }, frame_bytes: record.frame_bytes }
    }

    /// Allocates space for a frame; `None` while there is none for this purpose.
    pub(crate) fn allocate(
        &mut self,
        frame_bytes: u32,
        owner: u32,
        purpose: WritePurpose,
    ) -> Option<(RecordId, RecordExtent)> {
        let pages = record_pages(frame_bytes as usize);
        let needed = u32::from(purpose == WritePurpose::Save);
        let fits = self.open.is_some_and(|open| self.fits(open, pages));
        let ready = self.prepared;
        if !fits {
            if self.empty_segments() < 1 + needed {
                return None;
            }
            let ready = ready?;
            self.close_open_segment();
            self.prepared = None;
            self.open = Some(ready);
            self.segment_mut(ready).state = SegmentState::Open;
            if !self.fits(ready, pages) {
                return None;
            }
        } else if self.empty_segments() < needed {
            return None;
        }
        let number = self.open?;
        let segment = self.segment_mut(number);
        let page = segment.next_page;
        segment.next_page += pages;
        segment.live_pages += pages;
        segment.writes += 1;
        let record = Record {
            state: RecordState::Writing,
            relocating: false,
            segment: number,
            page,
            frame_bytes,
            owner,
        };
        let id = self.add_record(record);
        self.segment_mut(number).members.push((id, page));
        Some((id, self.extent_of(record)))
    }

    /// Whether a record of `pages` and the footer after it fit the segment.
    fn fits(&self, number: u32, pages: u32) -> bool {
        let segment = &self.segments[number as usize];
        let records = u32::try_from(segment.members.len()).unwrap_or(u32::MAX).saturating_add(1);
        let end = u64::from(segment.next_page) + u64::from(pages) + u64::from(footer_pages(records));
        end <= u64::from(self.shape.segment_pages)
    }

    /// Records that a record is on the medium.
    pub(crate) fn mark_committed(&mut self, id: RecordId, header: RecordHeader) {
        let record = self.records[id.0 as usize];
        let segment = self.segment_mut(record.segment);
        segment.writes -= 1;
        if record.state == RecordState::Writing {
            segment.table.push((id, FooterEntry { header, page: record.page }));
            self.records[id.0 as usize].state = RecordState::Live;
        } else {
            self.remove_record(id);
        }
    }

    /// Records that a record could not be written. Its segment accepts no further record.
    pub(crate) fn mark_failed(&mut self, id: RecordId) {
        let record = self.records[id.0 as usize];
        self.segment_mut(record.segment).writes -= 1;
        if self.open == Some(record.segment) {
            self.close_open_segment();
        }
        self.remove_record(id);
    }

    /// Frees a record.
    pub(crate) fn free(&mut self, id: RecordId) {
        let Some(record) = self.records.get(id.0 as usize).copied() else { return };
        match record.state {
            RecordState::Writing => self.records[id.0 as usize].state = RecordState::Freed,
            RecordState::Live if record.relocating => {
                self.records[id.0 as usize].state = RecordState::Freed;
                self.subtract_live_pages(record);
            }
            RecordState::Live => self.remove_record(id),
            RecordState::Vacant | RecordState::Freed => {}
        }
    }

    fn remove_record(&mut self, id: RecordId) {
        let record = std::mem::replace(&mut self.records[id.0 as usize].state, RecordState::Vacant);
        debug_assert_ne!(record, RecordState::Vacant);
        self.vacant.push(id);
        self.subtract_live_pages(self.records[id.0 as usize]);
    }

    fn subtract_live_pages(&mut self, record: Record) {
        self.segment_mut(record.segment).live_pages -= record_pages(record.frame_bytes as usize);
        self.release_if_empty(record.segment);
    }

    /// A read of the segment is in flight: it is not reused until [`Self::end_read`].
    pub(crate) fn begin_read(&mut self, segment: u32) {
        self.segment_mut(segment).reads += 1;
    }

    /// A read of the segment ended.
    pub(crate) fn end_read(&mut self, segment: u32) {
        self.segment_mut(segment).reads -= 1;
        self.release_if_empty(segment);
    }

    fn close_open_segment(&mut self) {
        if let Some(open) = self.open.take() {
            self.segment_mut(open).state = SegmentState::Closing;
            self.closing.push(open);
            self.release_if_empty(open);
        }
    }

    /// A segment that is ready for its footer, with the footer's entries.
    pub(crate) fn next_seal(&mut self) -> Option<(SegmentHead, Vec<FooterEntry>)> {
        let segments = &self.segments;
        self.closing.retain(|&number| segments[number as usize].state == SegmentState::Closing);
        let due = |&number: &u32| segments[number as usize].writes == 0;
        let number = self.closing.swap_remove(self.closing.iter().position(due)?);
        let table = std::mem::take(&mut self.segment_mut(number).table);
        let live = |(id, entry): &(RecordId, FooterEntry)| self.is_at(*id, number, entry.page);
        let entries: Vec<FooterEntry> = table.into_iter().filter(live).map(|(_, entry)| entry).collect();
        let segment = self.segment_mut(number);
        segment.state = SegmentState::Sealing;
        Some((SegmentHead { segment: number, nonce: segment.nonce }, entries))
    }

    /// The footer is written, or failed; without it the next start reads the whole segment.
    pub(crate) fn mark_sealed(&mut self, number: u32) {
        self.segment_mut(number).state = SegmentState::Sealed;
        self.release_if_empty(number);
    }

    fn is_at(&self, id: RecordId, segment: u32, page: u32) -> bool {
        let record = self.records[id.0 as usize];
        record.state == RecordState::Live && (record.segment, record.page) == (segment, page)
    }

    fn release_if_empty(&mut self, number: u32) {
        let segment = &self.segments[number as usize];
        let over = matches!(segment.state, SegmentState::Sealed | SegmentState::Closing);
        if over && segment.live_pages == 0 && segment.writes == 0 && segment.reads == 0 && !segment.draining {
            self.release(number);
        }
    }

    fn release(&mut self, number: u32) {
        *self.segment_mut(number) = Segment::new(SegmentState::Free);
        if self.extra_segment == Some(number) {
            self.extra_segment = None;
        }
        // Segments beyond a reduced capacity are not reused.
        if number < self.limit() {
            self.free.push_back(number);
        }
    }

    fn add_record(&mut self, record: Record) -> RecordId {
        match self.vacant.pop() {
            Some(id) => {
                self.records[id.0 as usize] = record;
                id
            }
            None => {
                self.records.push(record);
                RecordId(u32::try_from(self.records.len() - 1).unwrap_or(u32::MAX))
            }
        }
    }

    fn segment_mut(&mut self, number: u32) -> &mut Segment {
        &mut self.segments[number as usize]
    }
}

impl Segment {
    fn new(state: SegmentState) -> Segment {
        Segment {
            state,
            nonce: 0,
            next_page: 1,
            live_pages: 0,
            writes: 0,
            reads: 0,
            draining: false,
            members: Vec::new(),
            table: Vec::new(),
        }
    }
}
