//! The segment book of one device: which segment is written, what of each is still needed, which one is
//! emptied next. Pure: no I/O, no clock, no chance; nonces are given in.
//!
//! A record has its place at once and its bytes later, as blocks have in the tier book. Space comes back by
//! whole segments: one that nobody needs any more is free, and when few are left the emptiest is drained,
//! its records moved to where is written (`drain`, `room`). Not here: which blocks belong on SSD (`kv_core::tier`), bytes (`engine`).

mod drain;
mod room;
mod scrub;

pub(crate) use drain::{Rescue, RescueEnd};

use std::collections::VecDeque;

use super::format::{Entry, Place, RecordHeader, SegmentHead, footer_pages, record_pages};
use super::shape::Shape;

/// A record of this device; stays the same when the record is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RecordId(pub(crate) u32);

/// A record and its page in a segment; numbers are given out again, so the page tells whether it is still it.
pub(crate) type Member = (RecordId, u32);

/// Whose bytes are to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A block from DRAM. Leaves one whole segment for rescues, so that space can always come back.
    Save,
    /// A record out of a segment that is drained.
    Rescue,
}

/// What recovery says of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing of use in it.
    Empty,
    /// It cannot be read; another one takes its turn.
    Lost,
    /// These records, by its footer (`sealed`) or by reading all of it.
    Records { head: SegmentHead, entries: Vec<Entry>, sealed: bool },
}

impl Found {
    /// The records.
    pub(crate) fn entries(&self) -> &[Entry] {
        match self {
            Found::Records { entries, .. } => entries,
            Found::Empty | Found::Lost => &[],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Its head is on its way or on the medium; the next one to be written.
    Ready,
    Open,
    /// Full, with writes in flight or no footer yet.
    Closing,
    /// Its footer is on its way.
    Sealing,
    Sealed,
    Lost,
}

#[derive(Debug)]
struct Segment {
    state: State,
    nonce: u64,
    next_page: u32,
    live_pages: u32,
    writes: u32,
    reads: u32,
    draining: bool,
    members: Vec<Member>,
    /// Committed records, for the footer.
    table: Vec<(RecordId, Entry)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Vacant,
    Writing,
    Live,
    /// Nobody needs it, but something in flight still refers to it.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    life: Life,
    rescuing: bool,
    segment: u32,
    page: u32,
    frame_bytes: u32,
    owner: u32,
}

/// Where the bytes of a record are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) place: Place,
    pub(crate) frame_bytes: u32,
}

/// What the book has of one record, in bytes: its row, its place among its segment's, and its line of the footer.
pub(crate) const RECORD_BYTES: u64 =
    (size_of::<Record>() + size_of::<Member>() + size_of::<(RecordId, Entry)>()) as u64;

/// The book.
#[derive(Debug)]
pub(crate) struct SegmentBook {
    shape: Shape,
    segments: Vec<Segment>,
    /// Segments there may be: those of the shape, and one for each that is lost.
    limit: u32,
    /// Segments that are in the file.
    grown: u32,
    /// The same, once the file could not grow; segments beyond it are not counted on.
    cap: Option<u32>,
    /// The segment beyond the cap whose growth is tried.
    probe: Option<u32>,
    /// A segment beyond the limit, lent to rescues that had none to go to.
    extra: Option<u32>,
    free: VecDeque<u32>,
    ready: Option<u32>,
    open: Option<u32>,
    /// Segments that wait for their writes and then for a footer.
    closing: Vec<u32>,
    records: Vec<Record>,
    vacant: Vec<RecordId>,
}

impl SegmentBook {
    pub(crate) fn new(shape: Shape) -> SegmentBook {
        SegmentBook {
            shape,
            segments: Vec::new(),
            limit: shape.segments,
            grown: 0,
            cap: None,
            probe: None,
            extra: None,
            free: VecDeque::new(),
            ready: None,
            open: None,
            closing: Vec::new(),
            records: Vec::new(),
            vacant: Vec::new(),
        }
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Records that have a place, whether their bytes are there or not.
    pub(crate) fn records(&self) -> u64 {
        (self.records.len() - self.vacant.len()) as u64
    }

    /// So many records will be taken in: room for all of them at once.
    pub(crate) fn expect_records(&mut self, count: usize) {
        self.records.reserve(count);
    }

    /// Takes in the next segment of a file found at start; gives each of its records a number.
    pub(crate) fn adopt(&mut self, found: &Found) -> Vec<RecordId> {
        let number = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segments.push(Segment::new(State::Free));
        self.grown = number.saturating_add(1);
        let (head, entries, sealed) = match found {
            Found::Empty => {
                self.release(number);
                return Vec::new();
            }
            Found::Lost => {
                self.segment_mut(number).state = State::Lost;
                self.limit += 1;
                return Vec::new();
            }
            Found::Records { head, entries, sealed } => (head, entries, *sealed),
        };
        let pages = self.shape.segment_pages;
        let segment = self.segment_mut(number);
        segment.state = if sealed { State::Sealed } else { State::Closing };
        segment.nonce = head.nonce;
        segment.next_page = pages;
        segment.members.reserve(entries.len());
        let ids: Vec<RecordId> = entries.iter().map(|entry| self.adopt_record(number, entry)).collect();
        if !sealed {
            self.closing.push(number);
            self.segments[number as usize].table =
                std::iter::zip(&ids, entries).map(|(&id, &entry)| (id, entry)).collect();
        }
        self.release_if_empty(number);
        ids
    }

    fn adopt_record(&mut self, segment: u32, entry: &Entry) -> RecordId {
        let frame_bytes = entry.header.traits.bytes;
        let id = self.add_record(Record {
            life: Life::Live,
            rescuing: false,
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

    /// Whose record this is, for [`Self::owner`].
    pub(crate) fn set_owner(&mut self, id: RecordId, owner: u32) {
        self.records[id.0 as usize].owner = owner;
    }

    /// What was given with the record.
    pub(crate) fn owner(&self, id: RecordId) -> u32 {
        self.records[id.0 as usize].owner
    }

    /// Where a record is that may be read.
    pub(crate) fn spot(&self, id: RecordId) -> Option<Spot> {
        let record = self.records.get(id.0 as usize).filter(|record| record.life == Life::Live)?;
        Some(self.spot_of(*record))
    }

    fn spot_of(&self, record: Record) -> Spot {
        let nonce = self.segments[record.segment as usize].nonce;
        let head = SegmentHead { segment: record.segment, nonce };
        Spot { place: Place { head, page: record.page }, frame_bytes: record.frame_bytes }
    }

    /// A place for a frame; `None` while there is none for this purpose.
    pub(crate) fn place(
        &mut self,
        frame_bytes: u32,
        owner: u32,
        purpose: Purpose,
    ) -> Option<(RecordId, Spot)> {
        let pages = record_pages(frame_bytes as usize);
        let needed = u32::from(purpose == Purpose::Save);
        let fits = self.open.is_some_and(|open| self.fits(open, pages));
        let ready = self.ready;
        if !fits {
            if self.empty() < 1 + needed {
                return None;
            }
            let ready = ready?;
            self.close();
            self.ready = None;
            self.open = Some(ready);
            self.segment_mut(ready).state = State::Open;
            if !self.fits(ready, pages) {
                return None;
            }
        } else if self.empty() < needed {
            return None;
        }
        let number = self.open?;
        let segment = self.segment_mut(number);
        let page = segment.next_page;
        segment.next_page += pages;
        segment.live_pages += pages;
        segment.writes += 1;
        let record =
            Record { life: Life::Writing, rescuing: false, segment: number, page, frame_bytes, owner };
        let id = self.add_record(record);
        self.segment_mut(number).members.push((id, page));
        Some((id, self.spot_of(record)))
    }

    /// Whether a record of `pages` and the footer after it fit the segment.
    fn fits(&self, number: u32, pages: u32) -> bool {
        let segment = &self.segments[number as usize];
        let records = u32::try_from(segment.members.len()).unwrap_or(u32::MAX).saturating_add(1);
        let end = u64::from(segment.next_page) + u64::from(pages) + u64::from(footer_pages(records));
        end <= u64::from(self.shape.segment_pages)
    }

    /// A record is on the medium.
    pub(crate) fn committed(&mut self, id: RecordId, header: RecordHeader) {
        let record = self.records[id.0 as usize];
        let segment = self.segment_mut(record.segment);
        segment.writes -= 1;
        if record.life == Life::Writing {
            segment.table.push((id, Entry { header, page: record.page }));
            self.records[id.0 as usize].life = Life::Live;
        } else {
            self.forget(id);
        }
    }

    /// A record could not be written. Nothing more goes into its segment.
    pub(crate) fn failed(&mut self, id: RecordId) {
        let record = self.records[id.0 as usize];
        self.segment_mut(record.segment).writes -= 1;
        if self.open == Some(record.segment) {
            self.close();
        }
        self.forget(id);
    }

    /// Nobody needs the record any more.
    pub(crate) fn free(&mut self, id: RecordId) {
        let Some(record) = self.records.get(id.0 as usize).copied() else { return };
        match record.life {
            Life::Writing => self.records[id.0 as usize].life = Life::Gone,
            Life::Live if record.rescuing => {
                self.records[id.0 as usize].life = Life::Gone;
                self.unlive(record);
            }
            Life::Live => self.forget(id),
            Life::Vacant | Life::Gone => {}
        }
    }

    fn forget(&mut self, id: RecordId) {
        let record = std::mem::replace(&mut self.records[id.0 as usize].life, Life::Vacant);
        debug_assert_ne!(record, Life::Vacant);
        self.vacant.push(id);
        self.unlive(self.records[id.0 as usize]);
    }

    fn unlive(&mut self, record: Record) {
        self.segment_mut(record.segment).live_pages -= record_pages(record.frame_bytes as usize);
        self.release_if_empty(record.segment);
    }

    /// A read of the segment is on its way: it is not written over until [`Self::read_ended`].
    pub(crate) fn read_began(&mut self, segment: u32) {
        self.segment_mut(segment).reads += 1;
    }

    /// A read of the segment ended.
    pub(crate) fn read_ended(&mut self, segment: u32) {
        self.segment_mut(segment).reads -= 1;
        self.release_if_empty(segment);
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.segment_mut(open).state = State::Closing;
            self.closing.push(open);
            self.release_if_empty(open);
        }
    }

    /// A segment that wants its footer now, with what the footer says.
    pub(crate) fn next_seal(&mut self) -> Option<(SegmentHead, Vec<Entry>)> {
        let segments = &self.segments;
        self.closing.retain(|&number| segments[number as usize].state == State::Closing);
        let due = |&number: &u32| segments[number as usize].writes == 0;
        let number = self.closing.swap_remove(self.closing.iter().position(due)?);
        let table = std::mem::take(&mut self.segment_mut(number).table);
        let live = |(id, entry): &(RecordId, Entry)| self.is_at(*id, number, entry.page);
        let entries: Vec<Entry> = table.into_iter().filter(live).map(|(_, entry)| entry).collect();
        let segment = self.segment_mut(number);
        segment.state = State::Sealing;
        Some((SegmentHead { segment: number, nonce: segment.nonce }, entries))
    }

    /// The footer is there; without it the segment is read whole at the next start, which is all.
    pub(crate) fn sealed(&mut self, number: u32) {
        self.segment_mut(number).state = State::Sealed;
        self.release_if_empty(number);
    }

    fn is_at(&self, id: RecordId, segment: u32, page: u32) -> bool {
        let record = self.records[id.0 as usize];
        record.life == Life::Live && (record.segment, record.page) == (segment, page)
    }

    fn release_if_empty(&mut self, number: u32) {
        let segment = &self.segments[number as usize];
        let over = matches!(segment.state, State::Sealed | State::Closing);
        if over && segment.live_pages == 0 && segment.writes == 0 && segment.reads == 0 && !segment.draining {
            self.release(number);
        }
    }

    fn release(&mut self, number: u32) {
        *self.segment_mut(number) = Segment::new(State::Free);
        if self.extra == Some(number) {
            self.extra = None;
        }
        // Beyond a capacity that shrank nothing is written any more.
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
    fn new(state: State) -> Segment {
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
