//! Size and number of a device's segments for a capacity. Numbers only.
//!
//! Not here: the content of segments (`book`).

use kv_core::tier::Capacity;

use super::format::{PAGE_BYTES, SEGMENTS_AT, footer_pages, record_bytes, record_pages};

/// Segments beyond the capacity: one being written, the next one, one for relocations, and one that
/// a reader still uses.
pub const RESERVE_SEGMENTS: u64 = 4;

/// Divisor of the additional space for dead bytes: with it the emptiest segment is empty enough to
/// be worth draining.
pub const SLACK_DIVISOR: u64 = 8;

/// Largest segment in pages, unless records are larger: a start reads one footer per segment, and
/// after a crash one segment in full.
const SEGMENT_PAGES_WANTED: u64 = (64 << 20) / PAGE_BYTES as u64;

/// Smallest segment in pages: below it heads and footers would take a large part of the disk.
const SEGMENT_PAGES_MIN: u64 = 16;

/// Minimum records per segment.
const RECORDS_MIN: u64 = 4;

/// Number of segments for a small capacity.
const SEGMENTS_WANTED: u64 = 32;

/// Dimensions of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentShape {
    /// Pages of a segment.
    pub segment_pages: u32,
    /// Maximum number of segments.
    pub segments: u32,
    /// Length of the largest frame in bytes.
    pub frame_bytes_max: usize,
}

impl SegmentShape {
    /// The shape for a capacity plus `staging` records in transit. `segment_pages` is the segment
    /// size of an existing file.
    #[must_use]
    pub fn new(
        capacity: Capacity,
        frame_bytes_max: usize,
        staging: u64,
        segment_pages: Option<u32>,
    ) -> SegmentShape {
        let record = u64::from(record_pages(frame_bytes_max));
        let cost = u32::try_from(record_bytes(frame_bytes_max)).unwrap_or(u32::MAX);
        let records = capacity.amount() / capacity.cost(cost) + staging;
        let least =
            (RECORDS_MIN * record + 1 + footer(RECORDS_MIN)).next_power_of_two().max(SEGMENT_PAGES_MIN);
        let wanted = (records * record / SEGMENTS_WANTED).next_power_of_two();
        let pages = wanted.min(SEGMENT_PAGES_WANTED).max(least);
        let pages = segment_pages.map_or(pages, u64::from);
        // Each record takes at most its pages and a footer entry, and one may not fit at the end.
        let filled = pages.saturating_sub(1 + footer(pages / record)).saturating_sub(record - 1).max(1);
        let needed = (records * record).div_ceil(filled);
        let segments = needed + needed / SLACK_DIVISOR + RESERVE_SEGMENTS;
        let whole = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        SegmentShape { segment_pages: whole(pages), segments: whole(segments), frame_bytes_max }
    }

    /// Whether four of the largest records fit a segment. With fewer a large part of each segment
    /// would be unused, and the file would outgrow its capacity.
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

    /// Offset of a segment's page in the file.
    #[must_use]
    pub fn offset(&self, segment: u32, page: u32) -> u64 {
        SEGMENTS_AT + u64::from(segment) * self.segment_bytes() + u64::from(page) * PAGE_BYTES as u64
    }

    /// Maximum length of the file, in bytes: capacity, staging, slack and reserve segments. An
    /// extra segment for relocations after a crash or an error is not included.
    #[must_use]
    pub fn bytes_max(&self) -> u64 {
        self.offset(self.segments, 0)
    }
}

fn footer(records: u64) -> u64 {
    u64::from(footer_pages(u32::try_from(records).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::ssd::Depth;

    /// Staging records of one device, and of one of seven.
    fn stagings(frame_bytes: usize) -> [u64; 4] {
        let (deep, flat) = (Depth::scaled_for(frame_bytes), Depth::base());
        [deep.staging_records(1), deep.staging_records(7), flat.staging_records(1), flat.staging_records(7)]
    }

    #[test]
    fn segments_hold_the_capacity_and_a_bounded_reserve() {
        for (blocks, frame) in
            [(1u64, 100usize), (16, 6000), (20_000, 65_700), (100_000, 1 << 20), (3, 60 << 20)]
        {
            for staging in stagings(frame) {
                let shape = SegmentShape::new(Capacity::Blocks(blocks), frame, staging, None);
                assert!(shape.fits(), "{shape:?}");
                let record = u64::from(record_pages(frame));
                let pages = u64::from(shape.segment_pages);
                let each = (pages - 1 - footer(pages / record)) / record;
                let spare = u64::from(shape.segments) - RESERVE_SEGMENTS;
                assert!(each * spare >= blocks + staging, "{shape:?}");
                let bytes = (blocks + staging) * record * PAGE_BYTES as u64;
                // At most one record's space is unused at the end of each segment, and a segment
                // holds at least four.
                let reserve = bytes / 2 + (RESERVE_SEGMENTS + 2) * shape.segment_bytes() + SEGMENTS_AT;
                assert!(shape.bytes_max() <= bytes + reserve, "{shape:?} for {bytes}");
            }
        }
    }

    #[test]
    fn kept_file_does_not_outgrow_capacity_with_larger_records() {
        let capacity = Capacity::Blocks(10_000);
        let pages = SegmentShape::new(capacity, 60_000, stagings(60_000)[0], None).segment_pages;
        for frame in (60_000..30_000_000).step_by(50_000) {
            for staging in stagings(frame) {
                let shape = SegmentShape::new(capacity, frame, staging, Some(pages));
                let bytes = (10_000 + staging) * record_bytes(frame) as u64;
                let reserve = bytes + (RESERVE_SEGMENTS + 2) * shape.segment_bytes();
                assert!(!shape.fits() || shape.bytes_max() <= bytes + reserve, "{shape:?} for {bytes}");
            }
        }
    }

    #[test]
    fn large_tiers_have_large_segments() {
        let shape = SegmentShape::new(Capacity::Bytes(1 << 40), 1 << 20, stagings(1 << 20)[0], None);
        assert_eq!(shape.segment_bytes(), 64 << 20);
        assert!(shape.bytes_max() < (1 << 40) * 115 / 100, "{}", shape.bytes_max());
    }
}
