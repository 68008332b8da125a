//! How a device is cut: size and number of segments for a capacity. Numbers only.
//!
//! Not here: what is in the segments (`book`).

use kv_core::tier::Capacity;

use super::format::{PAGE_BYTES, SEGMENTS_AT, footer_pages, record_bytes, record_pages};

/// Segments beyond what the capacity fills: one being written, the one after it, one to rescue into, and
/// one that a reader still holds.
pub const SEGMENTS_IN_HAND: u64 = 4;

/// One part in so many of the room comes on top, for bytes that nobody needs any more: the emptiest segment
/// is then empty enough to be worth its rescue.
pub const SLACK_PARTS: u64 = 8;

/// Largest segment unless records are larger still: one footer for it is read at start, and one segment is
/// what a crash makes a start read whole.
const SEGMENT_PAGES_WANTED: u64 = (64 << 20) / PAGE_BYTES as u64;

/// Smallest segment: below it heads and footers would be a good part of the disk.
const SEGMENT_PAGES_MIN: u64 = 16;

/// Records that a segment holds at least.
const RECORDS_MIN: u64 = 4;

/// Segments that a capacity is cut into when it is small.
const SEGMENTS_WANTED: u64 = 32;

/// How one device is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Pages of a segment.
    pub segment_pages: u32,
    /// Segments that may be used.
    pub segments: u32,
    /// Length of the largest frame in bytes.
    pub frame_bytes_max: usize,
}

impl Shape {
    /// For a capacity, and so many records beyond it that are between two places. `segment_pages` are those of a file that
    /// is there already.
    #[must_use]
    pub fn new(
        capacity: Capacity,
        frame_bytes_max: usize,
        staging: u64,
        segment_pages: Option<u32>,
    ) -> Shape {
        let record = u64::from(record_pages(frame_bytes_max));
        let cost = u32::try_from(record_bytes(frame_bytes_max)).unwrap_or(u32::MAX);
        let records = capacity.amount() / capacity.cost(cost) + staging;
        let least =
            (RECORDS_MIN * record + 1 + footer(RECORDS_MIN)).next_power_of_two().max(SEGMENT_PAGES_MIN);
        let wanted = (records * record / SEGMENTS_WANTED).next_power_of_two();
        let pages = wanted.min(SEGMENT_PAGES_WANTED).max(least);
        let pages = segment_pages.map_or(pages, u64::from);
        // Each record takes at most its pages and a line of the footer, and one may not fit at the end.
        let filled = pages.saturating_sub(1 + footer(pages / record)).saturating_sub(record - 1).max(1);
        let needed = (records * record).div_ceil(filled);
        let segments = needed + needed / SLACK_PARTS + SEGMENTS_IN_HAND;
        let whole = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        Shape { segment_pages: whole(pages), segments: whole(segments), frame_bytes_max }
    }

    /// Whether four of the largest records fit a segment. With fewer a good part of each would stay unused,
    /// and the file would outgrow its capacity.
    #[must_use]
    pub fn fits(&self) -> bool {
        let record = u64::from(record_pages(self.frame_bytes_max));
        RECORDS_MIN * record + 1 + footer(RECORDS_MIN) <= u64::from(self.segment_pages)
    }

    /// Size of a segment in bytes.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.segment_pages) * PAGE_BYTES as u64
    }

    /// Where a page of a segment lies in the file.
    #[must_use]
    pub fn at(&self, segment: u32, page: u32) -> u64 {
        SEGMENTS_AT + u64::from(segment) * self.segment_bytes() + u64::from(page) * PAGE_BYTES as u64
    }

    /// Most that the file takes, in bytes: capacity, staging, slack and segments in hand. A segment lent to
    /// rescues after a crash or an error comes on top.
    #[must_use]
    pub fn bytes_max(&self) -> u64 {
        self.at(self.segments, 0)
    }
}

fn footer(records: u64) -> u64 {
    u64::from(footer_pages(u32::try_from(records).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::ssd::Depth;

    /// Of one device, and of one of seven.
    fn stagings(frame_bytes: usize) -> [u64; 4] {
        let (deep, flat) = (Depth::deep(frame_bytes), Depth::flat());
        [deep.staging_records(1), deep.staging_records(7), flat.staging_records(1), flat.staging_records(7)]
    }

    #[test]
    fn segments_hold_the_capacity_and_a_named_reserve() {
        for (blocks, frame) in
            [(1u64, 100usize), (16, 6000), (20_000, 65_700), (100_000, 1 << 20), (3, 60 << 20)]
        {
            for staging in stagings(frame) {
                let shape = Shape::new(Capacity::Blocks(blocks), frame, staging, None);
                assert!(shape.fits(), "{shape:?}");
                let record = u64::from(record_pages(frame));
                let pages = u64::from(shape.segment_pages);
                let each = (pages - 1 - footer(pages / record)) / record;
                let spare = u64::from(shape.segments) - SEGMENTS_IN_HAND;
                assert!(each * spare >= blocks + staging, "{shape:?}");
                let bytes = (blocks + staging) * record * PAGE_BYTES as u64;
                // At most a record of each segment stays unused at its end, and there are at least four.
                let reserve = bytes / 2 + (SEGMENTS_IN_HAND + 2) * shape.segment_bytes() + SEGMENTS_AT;
                assert!(shape.bytes_max() <= bytes + reserve, "{shape:?} for {bytes}");
            }
        }
    }

    #[test]
    fn a_file_that_is_kept_for_larger_records_does_not_outgrow_the_capacity() {
        let capacity = Capacity::Blocks(10_000);
        let pages = Shape::new(capacity, 60_000, stagings(60_000)[0], None).segment_pages;
        for frame in (60_000..30_000_000).step_by(50_000) {
            for staging in stagings(frame) {
                let shape = Shape::new(capacity, frame, staging, Some(pages));
                let bytes = (10_000 + staging) * record_bytes(frame) as u64;
                let reserve = bytes + (SEGMENTS_IN_HAND + 2) * shape.segment_bytes();
                assert!(!shape.fits() || shape.bytes_max() <= bytes + reserve, "{shape:?} for {bytes}");
            }
        }
    }

    #[test]
    fn large_tiers_have_large_segments() {
        let shape = Shape::new(Capacity::Bytes(1 << 40), 1 << 20, stagings(1 << 20)[0], None);
        assert_eq!(shape.segment_bytes(), 64 << 20);
        assert!(shape.bytes_max() < (1 << 40) * 115 / 100, "{}", shape.bytes_max());
    }
}
