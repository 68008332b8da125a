//! The segment book alone: invariants under random operations.

use proptest::prelude::*;

use super::super::book::{
    Member, RecordId, RecoveredSegment, Relocation, RelocationResult, SegmentBook, WritePurpose,
};
use super::super::format::{FooterEntry, SegmentHead, record_pages};
use super::*;

/// Maximum blocks, enforced by the tier book: each takes at most three pages, and a segment holds
/// seven.
const CAPACITY: usize = 24;

/// Length of the largest frame.
const LARGEST: u32 = 12_000;

const SHAPE: SegmentShape = SegmentShape { segment_pages: 24, segments: 8, frame_bytes_max: 12_000 };

fn header_with(bytes: u32) -> RecordHeader {
    let mut header = header(1);
    header.traits.bytes = bytes;
    header
}

/// The book and its operations in progress.
struct BookWorld {
    book: SegmentBook,
    writing: Vec<(RecordId, u32)>,
    live: Vec<(RecordId, u32)>,
    relocations: Vec<Relocation>,
    drain: Option<(u32, Vec<Member>)>,
    nonce: u64,
}

impl BookWorld {
    /// On a medium with these segments, each given as record count and whether it has a footer.
    fn new(found: &[(u8, bool)]) -> BookWorld {
        let book = SegmentBook::new(SHAPE);
        let (writing, live) = (Vec::new(), Vec::new());
        let mut world = BookWorld { book, writing, live, relocations: Vec::new(), drain: None, nonce: 1000 };
        for (number, &(count, sealed)) in (0u32..).zip(found) {
            let head = SegmentHead { segment: number, nonce: u64::from(number) };
            let entry = |nth: u8| FooterEntry { header: header_with(LARGEST), page: 1 + 3 * u32::from(nth) };
            let entries: Vec<FooterEntry> = (0..count).map(entry).collect();
            let found = match count {
                0 => RecoveredSegment::Empty,
                _ => RecoveredSegment::Records { head, entries, sealed },
            };
            world.live.extend(world.book.add_recovered(&found).into_iter().map(|id| (id, LARGEST)));
        }
        // The capacity holds from the start; blocks are freed across all segments.
        for turn in 0.. {
            if world.live.len() <= CAPACITY {
                break;
            }
            let nth = turn * 7 % world.live.len();
            world.book.free(world.live.swap_remove(nth).0);
        }
        world.maintain();
        world
    }

    fn maintain(&mut self) {
        self.prepare();
        while let Some((head, entries)) = self.book.next_seal() {
            for entry in &entries {
                let end = entry.page + record_pages(entry.header.traits.bytes as usize);
                assert!(entry.page > 0 && end < SHAPE.segment_pages, "the footer has its space");
            }
            self.book.mark_sealed(head.segment);
        }
        if self.drain.is_none() && self.book.needs_space() {
            self.drain = self.book.begin_drain();
        }
        let Some((segment, mut left)) = self.drain.take() else { return };
        while let Some(member) = left.pop() {
            if !self.book.is_still_there(segment, member) {
                continue;
            }
            if let Some(rescue) = self.book.begin_relocation(member.0) {
                self.relocations.push(rescue);
            } else if !self.relocations.is_empty() || !self.book.is_stuck() {
                left.push(member);
                break;
            } else if self.book.add_extra_segment() {
                left.push(member);
            } else {
                self.live.retain(|(id, _)| *id != member.0);
                self.book.free(member.0);
            }
            self.prepare();
        }
        if left.is_empty() && self.relocations.is_empty() {
            self.book.end_drain(segment);
            self.prepare();
        } else {
            self.drain = Some((segment, left));
        }
    }

    fn prepare(&mut self) {
        self.nonce += 1;
        let nonce = self.nonce;
        if let Some(head) = self.book.prepare_next(|| nonce) {
            self.book.mark_opened(head.segment);
        }
    }

    fn step(&mut self, kind: u8, number: usize) {
        match kind % 8 {
            0..=2 => {
                let bytes = 1 + u32::try_from(number).unwrap() % 12_000;
                let room = self.book.has_room();
                // The capacity, as enforced by the tier book.
                if self.live.len() + self.writing.len() < CAPACITY {
                    let placed = self.book.allocate(bytes, 0, WritePurpose::Save);
                    assert!(placed.is_some() || !room, "has_room promised space");
                    self.writing.extend(placed.map(|(id, _)| (id, bytes)));
                }
            }
            3 | 4 if !self.writing.is_empty() => {
                let (id, bytes) = self.writing.swap_remove(number % self.writing.len());
                self.book.mark_committed(id, header_with(bytes));
                self.live.push((id, bytes));
            }
            5 if !self.writing.is_empty() && number.is_multiple_of(7) => {
                self.book.mark_failed(self.writing.swap_remove(number % self.writing.len()).0);
            }
            6 if !self.live.is_empty() => {
                self.book.free(self.live.swap_remove(number % self.live.len()).0);
            }
            7 if !self.relocations.is_empty() => {
                let rescue = self.relocations.swap_remove(number % self.relocations.len());
                let end = match number % 9 {
                    0 => RelocationResult::NotRead,
                    1 => RelocationResult::NotWritten,
                    _ => RelocationResult::Moved(header_with(rescue.from.frame_bytes)),
                };
                if self.book.end_relocation(rescue, end) {
                    self.live.retain(|(id, _)| *id != rescue.record);
                }
            }
            _ => {}
        }
        self.maintain();
    }

    /// No two blocks share a page, and each position matches its segment's nonce.
    fn check(&self) {
        let mut pages = std::collections::BTreeSet::new();
        for (id, bytes) in &self.live {
            let spot = self.book.extent(*id).expect("a live block must have a position");
            assert_eq!(spot.frame_bytes, *bytes);
            for page in spot.position.page..spot.position.page + record_pages(*bytes as usize) {
                assert!(page > 0 && page < SHAPE.segment_pages);
                assert!(pages.insert((spot.position.head.segment, page)), "two blocks share a page");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_never_share_a_page_and_space_is_reclaimed(
        found in prop::collection::vec((0u8..=7, any::<bool>()), 0..=12),
        steps in prop::collection::vec((any::<u8>(), any::<u16>()), 0..800)
    ) {
        let mut world = BookWorld::new(&found);
        for (kind, number) in steps {
            world.step(kind, usize::from(number));
            world.check();
        }
        // All operations end successfully; then there is space again.
        while let Some((id, bytes)) = world.writing.pop() {
            world.book.mark_committed(id, header_with(bytes));
            world.live.push((id, bytes));
        }
        for _ in 0..100 {
            while let Some(rescue) = world.relocations.pop() {
                world.book.end_relocation(rescue, RelocationResult::Moved(header_with(rescue.from.frame_bytes)));
            }
            world.maintain();
        }
        world.check();
        prop_assert!(world.book.has_room(), "no space although few blocks are live");
    }
}

#[test]
fn unreadable_segment_is_replaced_by_another() {
    let mut book = SegmentBook::new(SHAPE);
    for number in 0..SHAPE.segments {
        assert!(
            book.add_recovered(&if number < 3 {
                RecoveredSegment::Unreadable
            } else {
                RecoveredSegment::Empty
            })
            .is_empty()
        );
    }
    let mut used = std::collections::BTreeSet::new();
    loop {
        used.extend(book.prepare_next(|| 7).map(|head| head.segment));
        if book.allocate(12_000, 0, WritePurpose::Relocate).is_none() {
            break;
        }
    }
    assert_eq!(used.into_iter().collect::<Vec<u32>>(), (3..SHAPE.segments + 3).collect::<Vec<u32>>());
}

/// A start without an empty segment, in a file of this many: a crash, or a reduced capacity.
fn full_world(segments: usize) -> BookWorld {
    BookWorld::new(&vec![(3, true); segments])
}

fn complete_relocations(world: &mut BookWorld) {
    for _ in 0..100 {
        while let Some(rescue) = world.relocations.pop() {
            world.book.end_relocation(rescue, RelocationResult::Moved(header_with(rescue.from.frame_bytes)));
        }
        world.maintain();
    }
}

#[test]
fn relocations_get_a_segment_if_none_is_empty_at_start() {
    for segments in [8, 9, 12] {
        let mut world = full_world(segments);
        complete_relocations(&mut world);
        world.check();
        assert!(world.book.has_room(), "no space in a file of {segments} segments");
        let kept = world.live.len();
        assert!(if segments == 8 { kept == CAPACITY } else { kept > CAPACITY / 2 }, "{kept} blocks");
    }
}

#[test]
fn failed_relocation_is_retried_in_another_segment() {
    let mut world = full_world(8);
    for _ in 0..3 {
        let rescue = world.relocations.pop().expect("the last segment accepts relocations");
        world.book.end_relocation(rescue, RelocationResult::NotWritten);
        world.maintain();
        while let Some(rescue) = world.relocations.pop() {
            world.book.end_relocation(rescue, RelocationResult::NotWritten);
        }
        world.drain.take().into_iter().for_each(|(segment, _)| world.book.end_drain(segment));
        world.maintain();
    }
    complete_relocations(&mut world);
    assert!(world.book.has_room());
    assert_eq!(world.live.len(), 24, "no block had to be dropped");
}

#[test]
fn full_medium_reuses_dead_segments_and_retries_growth() {
    let mut book = SegmentBook::new(SHAPE);
    let header = header_with(LARGEST);
    let entries: Vec<FooterEntry> = (0..7).map(|nth| FooterEntry { header, page: 1 + 3 * nth }).collect();
    let found = |segment| {
        let head = SegmentHead { segment, nonce: 1 };
        RecoveredSegment::Records { head, entries: entries.clone(), sealed: true }
    };
    let ids: Vec<RecordId> = (0..3).flat_map(|segment| book.add_recovered(&found(segment))).collect();
    // The file has three segments, and no space for a fourth.
    assert_eq!(book.prepare_next(|| 2).expect("the file may grow").segment, 3);
    let (id, _) = book.allocate(LARGEST, 0, WritePurpose::Save).expect("it assumes that the file can grow");
    assert_eq!(book.prepare_next(|| 3).expect("the file may grow").segment, 4);
    assert!(!book.needs_space());
    for segment in [3, 4] {
        assert!(book.mark_full(segment));
        book.mark_unopened(segment);
    }
    book.mark_failed(id);
    assert!(book.is_capped() && book.needs_space() && !book.has_room());
    for id in ids {
        book.free(id);
    }
    assert!(book.has_room(), "dead segments are free although the file cannot grow");
    let head = book.probe_growth(|| 5).expect("growth is tried");
    assert_eq!((head.segment, book.probe_growth(|| 6)), (3, None), "one probe at a time");
    book.mark_unopened(head.segment);
    assert!(book.is_capped());
    let head = book.probe_growth(|| 7).expect("growth is tried again");
    book.mark_opened(head.segment);
    assert!(!book.is_capped());
    let mut used = std::collections::BTreeSet::new();
    loop {
        used.extend(book.prepare_next(|| 7).map(|head| head.segment));
        if book.allocate(LARGEST, 0, WritePurpose::Relocate).is_none() {
            break;
        }
    }
    assert_eq!(used.into_iter().collect::<Vec<u32>>(), (0..SHAPE.segments).collect::<Vec<u32>>());
}

#[test]
fn full_live_segment_is_not_drained() {
    let mut book = SegmentBook::new(SHAPE);
    let mut full = |number: u32| {
        let head = SegmentHead { segment: number, nonce: u64::from(number) };
        let entries =
            (0..7).map(|nth| FooterEntry { header: header_with(LARGEST), page: 1 + 3 * nth }).collect();
        book.add_recovered(&RecoveredSegment::Records { head, entries, sealed: true })
    };
    let records: Vec<Vec<RecordId>> = (0..SHAPE.segments).map(&mut full).collect();
    assert!(book.needs_space());
    assert_eq!(book.begin_drain(), None);
    book.free(records[3][2]);
    assert_eq!(book.begin_drain().map(|(segment, left)| (segment, left.len())), Some((3, 6)));
}
