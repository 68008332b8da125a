//! Recovery of a device at start. Sealed segments are read from their footers, many at once, with
//! two or three small reads each. Unsealed segments are read whole, one at a time, and incomplete
//! records are skipped.
//!
//! An unreadable segment is counted and not used until the next start. Payloads of sealed segments
//! are not read here; they are verified when served. Not here: files (`files`).

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use kv_core::id::IdentityDigest;
use kvfleet_proto::frame::{BytesNeeded, Frame, parse_header};
use parking_lot::Mutex;

use super::book::RecoveredSegment;
use super::buffer::PageBuffer;
use super::device::{BlockDevice, read_all};
use super::engine::SsdFaults;
use super::format::{
    FooterEntry, FooterTrailer, PAGE_BYTES, RecordHeader, RecordPosition, SegmentHead, TRAILER_BYTES,
    footer_pages, record_pages,
};
use super::shape::SegmentShape;

/// Bytes per read of an unsealed segment; a bad sector loses as much.
const READ_BYTES: usize = 256 << 10;

/// Maximum reader threads: with many small footers, each read is dominated by latency.
const READERS_MAX: u32 = 16;

/// Segments that justify another thread.
const SEGMENTS_PER_READER: u32 = 8;

/// Counts of skipped records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SkippedRecords {
    /// Damaged records, records longer than this node's largest frame, and unidentifiable segments.
    pub(super) damaged: u64,
    /// Writes cut short by a crash; they were never announced.
    pub(super) torn: u64,
}

/// Parameters of a recovery, shared by all readers of a device.
pub(super) struct DeviceRecovery<'a> {
    pub(super) device: &'a dyn BlockDevice,
    pub(super) shape: SegmentShape,
    /// Identity of generation 0.
    pub(super) identity: IdentityDigest,
    pub(super) faults: &'a SsdFaults,
    /// Name for the log.
    pub(super) name: String,
    /// Result of the flush of earlier writes, once requested. Holding the lock also serialises full
    /// segment reads, since each needs memory of its size.
    pub(super) flushed: Mutex<Option<Result<(), String>>>,
}

impl DeviceRecovery<'_> {
    /// Number of segments within the device's length.
    fn segments(&self) -> io::Result<u32> {
        let bytes = self.device.bytes()?.saturating_sub(self.shape.offset(0, 0));
        Ok(u32::try_from(bytes / self.shape.segment_bytes()).unwrap_or(u32::MAX))
    }

    /// The content of all segments in order, and the skip counts.
    pub(super) fn read_segments(&self) -> io::Result<(Vec<RecoveredSegment>, SkippedRecords)> {
        let count = self.segments()?;
        let next = AtomicU32::new(0);
        let read = || {
            let (mut reader, mut found) =
                (SegmentReader { recovery: self, skipped: SkippedRecords::default() }, Vec::new());
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return (found, reader.skipped);
                }
                found.push((number, reader.read_segment(number)));
            }
        };
        let readers = (count / SEGMENTS_PER_READER).clamp(1, READERS_MAX);
        let parts = std::thread::scope(|scope| {
            // If the system gives fewer threads, the start only takes longer.
            let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, read);
            let others: Vec<_> = (1..readers).map_while(|at| spawn(at).ok()).collect();
            let own = read();
            let ends = others.into_iter().map(std::thread::ScopedJoinHandle::join);
            std::iter::once(Ok(own)).chain(ends).collect::<Result<Vec<_>, _>>()
        })
        .map_err(|_| io::Error::other("a segment reader thread panicked"))?;
        let (mut all, mut skipped) = (Vec::with_capacity(count as usize), SkippedRecords::default());
        for (found, part) in parts {
            all.extend(found);
            skipped.damaged += part.damaged;
            skipped.torn += part.torn;
        }
        all.sort_unstable_by_key(|(number, _)| *number);
        Ok((all.into_iter().map(|(_, found)| found).collect(), skipped))
    }
}

/// A thread that reads segments.
struct SegmentReader<'a> {
    recovery: &'a DeviceRecovery<'a>,
    skipped: SkippedRecords,
}

impl SegmentReader<'_> {
    /// Reads one segment.
    fn read_segment(&mut self, number: u32) -> RecoveredSegment {
        let pages = self.recovery.faults.scan(number).and_then(|()| {
            let mut pages = PageBuffer::new(2 * PAGE_BYTES);
            let (first, last) = pages.split_at_mut(PAGE_BYTES);
            read_all(self.recovery.device, first, self.recovery.shape.offset(number, 0))?;
            read_all(
                self.recovery.device,
                last,
                self.recovery.shape.offset(number, self.recovery.shape.segment_pages - 1),
            )?;
            Ok(pages)
        });
        let pages = match pages {
            Ok(pages) => pages,
            Err(cause) => {
                // Writing to it might fail too, or appear to work.
                self.count_damage(number, &cause.to_string());
                return RecoveredSegment::Unreadable;
            }
        };
        let head = SegmentHead::read(&pages, number);
        let end = FooterTrailer::read(&pages, number, self.recovery.shape.segment_pages);
        match (head, end) {
            (Ok(Some(head)), Some(end)) if end.head == head => self.read_sealed(end, &pages),
            // The head is damaged: the footer replaces it, unless it is of an earlier use.
            (Err(_) | Ok(None), Some(end)) => match self.read_sealed(end, &pages) {
                RecoveredSegment::Records { entries, .. } if !self.is_current_footer(end.head, &entries) => {
                    self.read_unsealed(end.head)
                }
                found => found,
            },
            (Ok(Some(head)), _) => self.read_unsealed(head),
            (Ok(None), None) => RecoveredSegment::Empty,
            (Err(reason), None) => {
                self.count_damage(number, reason);
                RecoveredSegment::Empty
            }
        }
    }

    /// Reads a segment by its footer; `ends` has the segment's first and last page.
    fn read_sealed(&mut self, end: FooterTrailer, ends: &[u8]) -> RecoveredSegment {
        let footer = footer_pages(end.records);
        let first = self.recovery.shape.segment_pages - footer;
        let entries = if footer == 1 {
            end.entries(&ends[PAGE_BYTES..])
        } else {
            let mut pages = PageBuffer::new(footer as usize * PAGE_BYTES);
            let read = read_all(
                self.recovery.device,
                &mut pages,
                self.recovery.shape.offset(end.head.segment, first),
            );
            read.ok().and_then(|()| end.entries(&pages))
        };
        let Some(mut entries) = entries else { return self.read_unsealed(end.head) };
        let known = entries.len();
        let longest = self.recovery.shape.frame_bytes_max;
        entries.retain(|entry| {
            let bytes = entry.header.traits.bytes as usize;
            bytes <= longest && entry.page > 0 && entry.page.saturating_add(record_pages(bytes)) <= first
        });
        if known > entries.len() {
            let count = (known - entries.len()) as u64;
            self.skipped.damaged += count;
            tracing::warn!(
                file = self.recovery.name,
                segment = end.head.segment,
                count,
                "blocks skipped: their frames are longer than this node's largest"
            );
        }
        RecoveredSegment::Records { head: end.head, entries, sealed: true }
    }

    /// Whether the first record of a footer still exists: a later use would have overwritten it
    /// first.
    fn is_current_footer(&self, head: SegmentHead, entries: &[FooterEntry]) -> bool {
        let Some(first) = entries.iter().min_by_key(|entry| entry.page) else { return false };
        let pages = record_pages(first.header.traits.bytes as usize);
        let mut page = PageBuffer::new(PAGE_BYTES);
        let at = self.recovery.shape.offset(head.segment, first.page + pages - 1);
        let place = RecordPosition { head, page: first.page };
        read_all(self.recovery.device, &mut page, at).is_ok()
            && RecordHeader::read(&page[PAGE_BYTES - TRAILER_BYTES..], place) == Ok(first.header)
    }

    /// Reads a segment without a footer.
    fn read_unsealed(&mut self, head: SegmentHead) -> RecoveredSegment {
        // A dead process may have written data without a flush; flush before the blocks are
        // announced. Flush only once: after a failed flush a device may later report success
        // although data was lost.
        let mut flushed = self.recovery.flushed.lock();
        let flushed =
            flushed.get_or_insert_with(|| self.recovery.device.sync().map_err(|cause| cause.to_string()));
        if let Err(cause) = flushed.clone() {
            self.count_damage(head.segment, &cause);
            return RecoveredSegment::Unreadable;
        }
        let (bytes, is_whole) = self.read_whole(head.segment);
        let (mut page, mut entries) = (1, Vec::new());
        while page < self.recovery.shape.segment_pages {
            match self.parse_record(&bytes, RecordPosition { head, page }) {
                Some(entry) => {
                    page += record_pages(entry.header.traits.bytes as usize);
                    entries.push(entry);
                }
                None => page += 1,
            }
        }
        tracing::info!(
            file = self.recovery.name,
            segment = head.segment,
            blocks = entries.len(),
            "read a segment without a footer in full"
        );
        match entries.is_empty() {
            true if is_whole => RecoveredSegment::Empty,
            true => RecoveredSegment::Unreadable,
            false => RecoveredSegment::Records { head, entries, sealed: false },
        }
    }

    /// Reads a whole segment, with zeros for unreadable parts, and whether all was readable.
    fn read_whole(&mut self, segment: u32) -> (Bytes, bool) {
        let mut buffer = PageBuffer::new(self.recovery.shape.segment_pages as usize * PAGE_BYTES);
        let at = self.recovery.shape.offset(segment, 0);
        let mut is_whole = true;
        for (piece, number) in buffer.chunks_mut(READ_BYTES).zip(0u64..) {
            if let Err(cause) = read_all(self.recovery.device, piece, at + number * READ_BYTES as u64) {
                piece.fill(0);
                is_whole = false;
                self.count_damage(segment, &cause.to_string());
            }
        }
        (Bytes::from_owner(buffer), is_whole)
    }

    /// The record that begins at `position`, if it is complete and valid.
    fn parse_record(&mut self, segment: &Bytes, place: RecordPosition) -> Option<FooterEntry> {
        let start = place.page as usize * PAGE_BYTES;
        let Ok(BytesNeeded::Frame(frame_bytes)) = parse_header(segment.get(start..)?) else { return None };
        let end = start + record_pages(frame_bytes) as usize * PAGE_BYTES;
        let trailer = segment.get(..end).and_then(|bytes| bytes.get(end - TRAILER_BYTES..))?;
        let Ok(header) = RecordHeader::read(trailer, place) else {
            self.skipped.torn += 1;
            return None;
        };
        if header.traits.bytes as usize != frame_bytes || frame_bytes > self.recovery.shape.frame_bytes_max {
            self.skipped.damaged += 1;
            return None;
        }
        let frame = Frame::parse(segment.slice(start..start + frame_bytes)).ok()?;
        if frame.verify(self.recovery.identity.with_generation(header.generation), header.hash).is_err() {
            self.skipped.torn += 1;
            return None;
        }
        Some(FooterEntry { header, page: place.page })
    }

    fn count_damage(&mut self, segment: u32, reason: &str) {
        self.skipped.damaged += 1;
        tracing::warn!(
            file = self.recovery.name,
            segment,
            reason,
            "damaged segment skipped, its blocks are recomputed when requested"
        );
    }
}
