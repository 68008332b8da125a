//! The segment book alone, against what must hold whatever is asked of it.

use proptest::prelude::*;

use super::super::book::{Found, Member, Purpose, RecordId, Rescue, RescueEnd, SegmentBook};
use super::super::format::record_pages;
use super::*;

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
    fn new() -> World {
        let book = SegmentBook::new(SHAPE);
        World { book, writing: Vec::new(), live: Vec::new(), rescues: Vec::new(), drain: None, nonce: 0 }
    }

    fn tend(&mut self) {
        self.nonce += 1;
        let nonce = self.nonce;
        let _ = self.book.prepare(|| nonce);
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
        let Some((segment, left)) = &mut self.drain else { return };
        while let Some(member) = left.pop() {
            if self.book.is_left(*segment, member) {
                self.rescues.push(self.book.rescue(member.0).expect("a rescue always has room"));
            }
            self.nonce += 1;
            let nonce = self.nonce;
            let _ = self.book.prepare(|| nonce);
        }
        if self.rescues.is_empty() {
            self.book.drained(*segment);
            self.drain = None;
            let _ = self.book.prepare(|| nonce);
        }
    }

    fn step(&mut self, kind: u8, number: usize) {
        match kind % 8 {
            0..=2 => {
                let bytes = 1 + u32::try_from(number).unwrap() % 12_000;
                let room = self.book.has_room();
                // The capacity, as the tier book keeps it.
                if self.live.len() + self.writing.len() < 24 {
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
        steps in prop::collection::vec((any::<u8>(), any::<u16>()), 1..800)
    ) {
        let mut world = World::new();
        world.tend();
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
        assert!(book.adopt(if number < 3 { Found::Lost } else { Found::Empty }).is_empty());
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
