//! The segment book alone, against what must hold whatever is asked of it.

use proptest::prelude::*;

use super::super::book::{Found, Member, Purpose, RecordId, Rescue, RescueEnd, SegmentBook};
use super::super::format::{Entry, SegmentHead, record_pages};
use super::*;

/// Blocks, as the tier book keeps them: each takes three pages at most, and a segment holds seven.
const CAPACITY: usize = 24;

/// Length of the largest frame.
const LARGEST: u32 = 12_000;

const SHAPE: Shape = Shape { segment_pages: 24, segments: 8, frame_bytes_max: 12_000 };

fn header_with(bytes: u32) -> RecordHeader {
    let mut header = header(1);
    header.traits.bytes = bytes;
    header
}

/// The book and what is under way with it.
struct World {
    book: SegmentBook,
    writing: Vec<(RecordId, u32)>,
    live: Vec<(RecordId, u32)>,
    rescues: Vec<Rescue>,
    drain: Option<(u32, Vec<Member>)>,
    nonce: u64,
}

impl World {
    /// On a medium where each segment holds so many records, with a footer or without.
    fn new(found: &[(u8, bool)]) -> World {
        let book = SegmentBook::new(SHAPE);
        let (writing, live) = (Vec::new(), Vec::new());
        let mut world = World { book, writing, live, rescues: Vec::new(), drain: None, nonce: 1000 };
        for (number, &(count, sealed)) in (0u32..).zip(found) {
            let head = SegmentHead { segment: number, nonce: u64::from(number) };
            let entry = |nth: u8| Entry { header: header_with(LARGEST), page: 1 + 3 * u32::from(nth) };
            let entries: Vec<Entry> = (0..count).map(entry).collect();
            let found = match count {
                0 => Found::Empty,
                _ => Found::Records { head, entries, sealed },
            };
            world.live.extend(world.book.adopt(&found).into_iter().map(|id| (id, LARGEST)));
        }
        // The capacity holds from the start on; what goes comes from all segments.
        for turn in 0.. {
            if world.live.len() <= CAPACITY {
                break;
            }
            let nth = turn * 7 % world.live.len();
            world.book.free(world.live.swap_remove(nth).0);
        }
        world.tend();
        world
    }

    fn tend(&mut self) {
        self.prepare();
        while let Some((head, entries)) = self.book.next_seal() {
            for entry in &entries {
                let end = entry.page + record_pages(entry.header.traits.bytes as usize);
                assert!(entry.page > 0 && end < SHAPE.segment_pages, "the footer has its place");
            }
            self.book.sealed(head.segment);
        }
        if self.drain.is_none() && self.book.is_short() {
            self.drain = self.book.drain();
        }
        let Some((segment, mut left)) = self.drain.take() else { return };
        while let Some(member) = left.pop() {
            if !self.book.is_left(segment, member) {
                continue;
            }
            if let Some(rescue) = self.book.rescue(member.0) {
                self.rescues.push(rescue);
            } else if !self.rescues.is_empty() || !self.book.is_stuck() {
                left.push(member);
                break;
            } else if self.book.borrow() {
                left.push(member);
            } else {
                self.live.retain(|(id, _)| *id != member.0);
                self.book.free(member.0);
            }
            self.prepare();
        }
        if left.is_empty() && self.rescues.is_empty() {
            self.book.drained(segment);
            self.prepare();
        } else {
            self.drain = Some((segment, left));
        }
    }

    fn prepare(&mut self) {
        self.nonce += 1;
        let nonce = self.nonce;
        if let Some(head) = self.book.prepare(|| nonce) {
            self.book.opened(head.segment);
        }
    }

    fn step(&mut self, kind: u8, number: usize) {
        match kind % 8 {
            0..=2 => {
                let bytes = 1 + u32::try_from(number).unwrap() % 12_000;
                let room = self.book.has_room();
                // The capacity, as the tier book keeps it.
                if self.live.len() + self.writing.len() < CAPACITY {
                    let placed = self.book.place(bytes, 0, Purpose::Save);
                    assert!(placed.is_some() || !room, "room was promised");
                    self.writing.extend(placed.map(|(id, _)| (id, bytes)));
                }
            }
            3 | 4 if !self.writing.is_empty() => {
                let (id, bytes) = self.writing.swap_remove(number % self.writing.len());
                self.book.committed(id, header_with(bytes));
                self.live.push((id, bytes));
            }
            5 if !self.writing.is_empty() && number.is_multiple_of(7) => {
                self.book.failed(self.writing.swap_remove(number % self.writing.len()).0);
            }
            6 if !self.live.is_empty() => {
                self.book.free(self.live.swap_remove(number % self.live.len()).0);
            }
            7 if !self.rescues.is_empty() => {
                let rescue = self.rescues.swap_remove(number % self.rescues.len());
                let end = match number % 9 {
                    0 => RescueEnd::NotRead,
                    1 => RescueEnd::NotWritten,
                    _ => RescueEnd::Moved(header_with(rescue.from.frame_bytes)),
                };
                if self.book.rescued(rescue, end) {
                    self.live.retain(|(id, _)| *id != rescue.record);
                }
            }
            _ => {}
        }
        self.tend();
    }

    /// No two blocks share a page, and each is where its segment's nonce says.
    fn check(&self) {
        let mut pages = std::collections::BTreeSet::new();
        for (id, bytes) in &self.live {
            let spot = self.book.spot(*id).expect("a live block has its place");
            assert_eq!(spot.frame_bytes, *bytes);
            for page in spot.place.page..spot.place.page + record_pages(*bytes as usize) {
                assert!(page > 0 && page < SHAPE.segment_pages);
                assert!(pages.insert((spot.place.head.segment, page)), "two blocks share a page");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_never_share_a_page_and_room_always_comes_back(
        found in prop::collection::vec((0u8..=7, any::<bool>()), 0..=12),
        steps in prop::collection::vec((any::<u8>(), any::<u16>()), 0..800)
    ) {
        let mut world = World::new(&found);
        for (kind, number) in steps {
            world.step(kind, usize::from(number));
            world.check();
        }
        // Everything under way ends well; then there is room again.
        while let Some((id, bytes)) = world.writing.pop() {
            world.book.committed(id, header_with(bytes));
            world.live.push((id, bytes));
        }
        for _ in 0..100 {
            while let Some(rescue) = world.rescues.pop() {
                world.book.rescued(rescue, RescueEnd::Moved(header_with(rescue.from.frame_bytes)));
            }
            world.tend();
        }
        world.check();
        prop_assert!(world.book.has_room(), "no room although little is live");
    }
}

#[test]
fn a_lost_segment_makes_room_for_another() {
    let mut book = SegmentBook::new(SHAPE);
    for number in 0..SHAPE.segments {
        assert!(book.adopt(&if number < 3 { Found::Lost } else { Found::Empty }).is_empty());
    }
    let mut used = std::collections::BTreeSet::new();
    loop {
        used.extend(book.prepare(|| 7).map(|head| head.segment));
        if book.place(12_000, 0, Purpose::Rescue).is_none() {
            break;
        }
    }
    assert_eq!(used.into_iter().collect::<Vec<u32>>(), (3..SHAPE.segments + 3).collect::<Vec<u32>>());
}

/// A start that finds no segment empty, in a file of this many: a crash, or a capacity that shrank.
fn found_full(segments: usize) -> World {
    World::new(&vec![(3, true); segments])
}

fn end_rescues(world: &mut World) {
    for _ in 0..100 {
        while let Some(rescue) = world.rescues.pop() {
            world.book.rescued(rescue, RescueEnd::Moved(header_with(rescue.from.frame_bytes)));
        }
        world.tend();
    }
}

#[test]
fn rescues_find_a_segment_when_a_start_finds_none_empty() {
    for segments in [8, 9, 12] {
        let mut world = found_full(segments);
        end_rescues(&mut world);
        world.check();
        assert!(world.book.has_room(), "no room in a file of {segments} segments");
        let kept = world.live.len();
        assert!(if segments == 8 { kept == CAPACITY } else { kept > CAPACITY / 2 }, "{kept} blocks");
    }
}

#[test]
fn a_rescue_that_fails_into_the_last_segment_is_tried_in_another() {
    let mut world = found_full(8);
    for _ in 0..3 {
        let rescue = world.rescues.pop().expect("the last segment takes rescues");
        world.book.rescued(rescue, RescueEnd::NotWritten);
        world.tend();
        while let Some(rescue) = world.rescues.pop() {
            world.book.rescued(rescue, RescueEnd::NotWritten);
        }
        world.drain.take().into_iter().for_each(|(segment, _)| world.book.drained(segment));
        world.tend();
    }
    end_rescues(&mut world);
    assert!(world.book.has_room());
    assert_eq!(world.live.len(), 24, "nothing had to go for it");
}

#[test]
fn a_medium_without_room_gives_back_what_is_dead_and_grows_when_it_can() {
    let mut book = SegmentBook::new(SHAPE);
    let header = header_with(LARGEST);
    let entries: Vec<Entry> = (0..7).map(|nth| Entry { header, page: 1 + 3 * nth }).collect();
    let found = |segment| {
        let head = SegmentHead { segment, nonce: 1 };
        Found::Records { head, entries: entries.clone(), sealed: true }
    };
    let ids: Vec<RecordId> = (0..3).flat_map(|segment| book.adopt(&found(segment))).collect();
    // The file has three segments, and there is no room for a fourth.
    assert_eq!(book.prepare(|| 2).expect("it may grow").segment, 3);
    let (id, _) = book.place(LARGEST, 0, Purpose::Save).expect("it counts on room");
    assert_eq!(book.prepare(|| 3).expect("it may grow").segment, 4);
    assert!(!book.is_short());
    for segment in [3, 4] {
        assert!(book.full(segment));
        book.unopened(segment);
    }
    book.failed(id);
    assert!(book.is_capped() && book.is_short() && !book.has_room());
    for id in ids {
        book.free(id);
    }
    assert!(book.has_room(), "what is dead is free although the file cannot grow");
    let head = book.probe(|| 5).expect("growth is tried");
    assert_eq!((head.segment, book.probe(|| 6)), (3, None), "one at a time");
    book.unopened(head.segment);
    assert!(book.is_capped());
    let head = book.probe(|| 7).expect("growth is tried again");
    book.opened(head.segment);
    assert!(!book.is_capped());
    let mut used = std::collections::BTreeSet::new();
    loop {
        used.extend(book.prepare(|| 7).map(|head| head.segment));
        if book.place(LARGEST, 0, Purpose::Rescue).is_none() {
            break;
        }
    }
    assert_eq!(used.into_iter().collect::<Vec<u32>>(), (0..SHAPE.segments).collect::<Vec<u32>>());
}

#[test]
fn a_segment_full_of_what_is_wanted_is_not_moved_for_the_page_at_its_end() {
    let mut book = SegmentBook::new(SHAPE);
    let mut full = |number: u32| {
        let head = SegmentHead { segment: number, nonce: u64::from(number) };
        let entries = (0..7).map(|nth| Entry { header: header_with(LARGEST), page: 1 + 3 * nth }).collect();
        book.adopt(&Found::Records { head, entries, sealed: true })
    };
    let records: Vec<Vec<RecordId>> = (0..SHAPE.segments).map(&mut full).collect();
    assert!(book.is_short());
    assert_eq!(book.drain(), None);
    book.free(records[3][2]);
    assert_eq!(book.drain().map(|(segment, left)| (segment, left.len())), Some((3, 6)));
}
