//! What a device holds at start: sealed segments by their footers, many at once, two or three small reads each; a
//! segment that was being written is read whole, one at a time, and what of it is not complete is left out.
//!
//! A segment that the medium cannot read is counted and not used again before the next start. Payloads of
//! sealed segments are not read here; they are verified when they are served. Not here: files (`files`).

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use kv_core::id::IdentityDigest;
use kvfleet_proto::frame::{Frame, Need, parse_header};
use parking_lot::Mutex;

use super::book::Found;
use super::buffer::PageBuffer;
use super::device::{Device, read_all};
use super::engine::SsdFaults;
use super::format::{
    Entry, FooterEnd, PAGE_BYTES, Place, RecordHeader, SegmentHead, TRAILER_BYTES, footer_pages, record_pages,
};
use super::shape::Shape;

/// Bytes that are read at once from a segment without a footer; a bad sector costs as much.
const READ_BYTES: usize = 256 << 10;

/// Threads that read at once: a start with many small footers waits for each of them about as long as for one.
const READERS_MAX: u32 = 16;

/// Segments that are worth a thread.
const SEGMENTS_PER_READER: u32 = 8;

/// What was skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Skipped {
    /// Records whose bytes are wrong, or whose frame is longer than any of this node, and segments of which
    /// nothing can be said.
    pub(super) damaged: u64,
    /// Writes that a crash cut short; nobody was told of them.
    pub(super) torn: u64,
}

/// Where and how segments are read, for all readers of a device.
pub(super) struct Recovery<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) shape: Shape,
    /// That of generation 0.
    pub(super) identity: IdentityDigest,
    pub(super) faults: &'a SsdFaults,
    /// For the log.
    pub(super) name: String,
    /// Whether what was written before this start is on the medium, once it was asked. Who holds it reads a segment
    /// whole: one at a time, since each takes memory of its size.
    pub(super) flushed: Mutex<Option<Result<(), String>>>,
}

impl Recovery<'_> {
    /// Segments that the device is long enough for.
    fn segments(&self) -> io::Result<u32> {
        let bytes = self.device.bytes()?.saturating_sub(self.shape.at(0, 0));
        Ok(u32::try_from(bytes / self.shape.segment_bytes()).unwrap_or(u32::MAX))
    }

    /// What all segments hold, in their order, and what was skipped.
    pub(super) fn all(&self) -> io::Result<(Vec<Found>, Skipped)> {
        let count = self.segments()?;
        let next = AtomicU32::new(0);
        let read = || {
            let (mut reader, mut found) = (Reader { from: self, skipped: Skipped::default() }, Vec::new());
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return (found, reader.skipped);
                }
                found.push((number, reader.segment(number)));
            }
        };
        let readers = (count / SEGMENTS_PER_READER).clamp(1, READERS_MAX);
        let parts = std::thread::scope(|scope| {
            // With fewer threads than are wanted, if the system gives no more, a start takes longer.
            let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, read);
            let others: Vec<_> = (1..readers).map_while(|at| spawn(at).ok()).collect();
            let own = read();
            let ends = others.into_iter().map(std::thread::ScopedJoinHandle::join);
            std::iter::once(Ok(own)).chain(ends).collect::<Result<Vec<_>, _>>()
        })
        .map_err(|_| io::Error::other("reading the segments ended with a panic"))?;
        let (mut all, mut skipped) = (Vec::with_capacity(count as usize), Skipped::default());
        for (found, part) in parts {
            all.extend(found);
            skipped.damaged += part.damaged;
            skipped.torn += part.torn;
        }
        all.sort_unstable_by_key(|(number, _)| *number);
        Ok((all.into_iter().map(|(_, found)| found).collect(), skipped))
    }
}

/// One thread that reads segments.
struct Reader<'a> {
    from: &'a Recovery<'a>,
    skipped: Skipped,
}

impl Reader<'_> {
    /// What one segment holds.
    fn segment(&mut self, number: u32) -> Found {
        let pages = self.from.faults.scan(number).and_then(|()| {
            let mut pages = PageBuffer::new(2 * PAGE_BYTES);
            let (first, last) = pages.split_at_mut(PAGE_BYTES);
            read_all(self.from.device, first, self.from.shape.at(number, 0))?;
            read_all(self.from.device, last, self.from.shape.at(number, self.from.shape.segment_pages - 1))?;
            Ok(pages)
        });
        let pages = match pages {
            Ok(pages) => pages,
            Err(cause) => {
                // Writing to it might fail too, or worse, seem to work.
                self.damaged(number, &cause.to_string());
                return Found::Lost;
            }
        };
        let head = SegmentHead::read(&pages, number);
        let end = FooterEnd::read(&pages, number, self.from.shape.segment_pages);
        match (head, end) {
            (Ok(Some(head)), Some(end)) if end.head == head => self.sealed(end, &pages),
            // A head that rotted: the footer says as much, unless it is of an earlier use.
            (Err(_) | Ok(None), Some(end)) => match self.sealed(end, &pages) {
                Found::Records { entries, .. } if !self.is_of_use(end.head, &entries) => self.half(end.head),
                found => found,
            },
            (Ok(Some(head)), _) => self.half(head),
            (Ok(None), None) => Found::Empty,
            (Err(reason), None) => {
                self.damaged(number, reason);
                Found::Empty
            }
        }
    }

    /// By the footer, of which `ends` has the last page behind the head of the segment.
    fn sealed(&mut self, end: FooterEnd, ends: &[u8]) -> Found {
        let footer = footer_pages(end.records);
        let first = self.from.shape.segment_pages - footer;
        let entries = if footer == 1 {
            end.entries(&ends[PAGE_BYTES..])
        } else {
            let mut pages = PageBuffer::new(footer as usize * PAGE_BYTES);
            let read = read_all(self.from.device, &mut pages, self.from.shape.at(end.head.segment, first));
            read.ok().and_then(|()| end.entries(&pages))
        };
        let Some(mut entries) = entries else { return self.half(end.head) };
        let known = entries.len();
        let longest = self.from.shape.frame_bytes_max;
        entries.retain(|entry| {
            let bytes = entry.header.traits.bytes as usize;
            bytes <= longest && entry.page > 0 && entry.page.saturating_add(record_pages(bytes)) <= first
        });
        if known > entries.len() {
            let count = (known - entries.len()) as u64;
            self.skipped.damaged += count;
            tracing::warn!(
                file = self.from.name,
                segment = end.head.segment,
                count,
                "blocks skipped: their frames are longer than any of this node"
            );
        }
        Found::Records { head: end.head, entries, sealed: true }
    }

    /// Whether the first record of a footer is there: what is written later begins by overwriting it.
    fn is_of_use(&self, head: SegmentHead, entries: &[Entry]) -> bool {
        let Some(first) = entries.iter().min_by_key(|entry| entry.page) else { return false };
        let pages = record_pages(first.header.traits.bytes as usize);
        let mut page = PageBuffer::new(PAGE_BYTES);
        let at = self.from.shape.at(head.segment, first.page + pages - 1);
        let place = Place { head, page: first.page };
        read_all(self.from.device, &mut page, at).is_ok()
            && RecordHeader::read(&page[PAGE_BYTES - TRAILER_BYTES..], place) == Ok(first.header)
    }

    /// A segment without a footer.
    fn half(&mut self, head: SegmentHead) -> Found {
        // A process that died may have written what it never flushed; whoever hears of it relies on it.
        // Asked once: a device that failed to flush may say later that there is nothing left to be flushed.
        let mut flushed = self.from.flushed.lock();
        let flushed =
            flushed.get_or_insert_with(|| self.from.device.sync().map_err(|cause| cause.to_string()));
        if let Err(cause) = flushed.clone() {
            self.damaged(head.segment, &cause);
            return Found::Lost;
        }
        let (bytes, is_whole) = self.read_whole(head.segment);
        let (mut page, mut entries) = (1, Vec::new());
        while page < self.from.shape.segment_pages {
            match self.record(&bytes, Place { head, page }) {
                Some(entry) => {
                    page += record_pages(entry.header.traits.bytes as usize);
                    entries.push(entry);
                }
                None => page += 1,
            }
        }
        tracing::info!(
            file = self.from.name,
            segment = head.segment,
            blocks = entries.len(),
            "a segment without a footer was read whole"
        );
        match entries.is_empty() {
            true if is_whole => Found::Empty,
            true => Found::Lost,
            false => Found::Records { head, entries, sealed: false },
        }
    }

    /// All of a segment, with zeros for what cannot be read, and whether all could.
    fn read_whole(&mut self, segment: u32) -> (Bytes, bool) {
        let mut buffer = PageBuffer::new(self.from.shape.segment_pages as usize * PAGE_BYTES);
        let at = self.from.shape.at(segment, 0);
        let mut is_whole = true;
        for (piece, number) in buffer.chunks_mut(READ_BYTES).zip(0u64..) {
            if let Err(cause) = read_all(self.from.device, piece, at + number * READ_BYTES as u64) {
                piece.fill(0);
                is_whole = false;
                self.damaged(segment, &cause.to_string());
            }
        }
        (Bytes::from_owner(buffer), is_whole)
    }

    /// The record that begins at `place`, if one does and all of it is there.
    fn record(&mut self, segment: &Bytes, place: Place) -> Option<Entry> {
        let start = place.page as usize * PAGE_BYTES;
        let Ok(Need::Frame(frame_bytes)) = parse_header(segment.get(start..)?) else { return None };
        let end = start + record_pages(frame_bytes) as usize * PAGE_BYTES;
        let trailer = segment.get(..end).and_then(|bytes| bytes.get(end - TRAILER_BYTES..))?;
        let Ok(header) = RecordHeader::read(trailer, place) else {
            self.skipped.torn += 1;
            return None;
        };
        if header.traits.bytes as usize != frame_bytes || frame_bytes > self.from.shape.frame_bytes_max {
            self.skipped.damaged += 1;
            return None;
        }
        let frame = Frame::parse(segment.slice(start..start + frame_bytes)).ok()?;
        if frame.verify(self.from.identity.of_generation(header.generation), header.hash).is_err() {
            self.skipped.torn += 1;
            return None;
        }
        Some(Entry { header, page: place.page })
    }

    fn damaged(&mut self, segment: u32, reason: &str) {
        self.skipped.damaged += 1;
        tracing::warn!(
            file = self.from.name,
            segment,
            reason,
            "damaged segment skipped, its blocks are computed again when asked for"
        );
    }
}
