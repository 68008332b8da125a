//! The arena with its memory: slots, readers, the reserve, and compaction. Slab allocation alone is
//! tested in `model`.
#![allow(clippy::unwrap_used)]

use super::*;

mod layouts;
mod model;

fn arena(slots: usize, reserve_slots: usize) -> Arena {
    Arena::new(ArenaShape::equal(128, slots, reserve_slots)).unwrap()
}

#[test]
fn every_slot_is_usable_after_any_lengths() {
    let arena = arena(10, 0);
    // Every length, held for a while: none may cost the largest frame its slot.
    for len in 1..=128 {
        let slots: Vec<SlotMut> = std::iter::from_fn(|| arena.take(len, Purpose::Save)).collect();
        assert_eq!(slots.len(), 10, "frames of {len} bytes");
    }
    let small: Vec<SlotMut> = (1..=9).map(|len| arena.take(len, Purpose::Save).unwrap()).collect();
    assert_eq!(arena.used_bytes(), 9 * SLOT_ALIGN_BYTES);
    assert_eq!(arena.take(128, Purpose::Save).unwrap().len(), 128);
    drop(small);
    assert_eq!(arena.used_bytes(), 0);
}

#[test]
fn has_room_agrees_with_take() {
    let arena = arena(3, 1);
    let mut slots = Vec::new();
    for purpose in [Purpose::Save, Purpose::Save, Purpose::Save, Purpose::Load, Purpose::Load] {
        let room = arena.has_room(purpose);
        let slot = arena.take(100, purpose);
        assert_eq!(room, slot.is_some());
        slots.extend(slot);
    }
    assert_eq!(slots.len(), 3);
    assert!(arena.take(SLOT_ALIGN_BYTES + 1, Purpose::Load).is_none(), "no class is that large");
}

#[test]
#[cfg(not(miri))]
fn excessive_arena_is_refused_at_start() {
    let cause = Arena::new(ArenaShape::equal(1 << 20, 1 << 24, 0)).unwrap_err().to_string();
    assert!(cause.contains("bytes available"), "{cause}");
}

#[test]
#[cfg(not(miri))]
fn memory_is_resident_from_the_start() {
    let bytes = 32 << 20;
    let resident = || {
        // Reserved huge pages are counted separately.
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let rows =
            status.lines().filter(|line| line.starts_with("VmRSS") || line.starts_with("HugetlbPages"));
        let kib = rows.map(|row| row.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap());
        kib.sum::<usize>() << 10
    };
    let before = resident();
    let _arena = Arena::new(ArenaShape::equal(bytes, 1, 0)).unwrap();
    assert!(resident() >= before + bytes * 3 / 4, "only an address range was reserved");
}

#[test]
#[cfg(not(miri))]
fn reader_finds_bytes_at_their_offset() {
    let arena = arena(4, 0);
    let frames: Vec<Bytes> = [b"one", b"two"].map(|text| filled(&arena, text.len(), text[0])).into();
    let reader = arena.reader().unwrap();
    assert!(rustix::fs::fstat(&reader).unwrap().st_size as u64 >= arena.len_bytes());
    for bytes in [&frames[0], &frames[1], &frames[1].slice(2..)] {
        let mut seen = vec![0; bytes.len()];
        let at = arena.offset_of(bytes).unwrap();
        assert_eq!(rustix::io::pread(&reader, &mut seen, at).unwrap(), bytes.len());
        assert_eq!(seen, bytes[..]);
    }
    assert_ne!(arena.offset_of(&frames[0]), arena.offset_of(&frames[1]));
    assert_eq!(arena.offset_of(&Bytes::from(vec![1, 2])), None);
    assert_eq!(arena.offset_of(&Bytes::new()), None);
}

#[test]
fn memory_is_reused_only_after_the_last_reader_is_gone() {
    let arena = arena(1, 0);
    let mut slot = arena.take(3, Purpose::Save).unwrap();
    slot.copy_from_slice(b"abc");
    let first = slot.freeze();
    let second = first.slice(1..);
    drop(first);
    assert!(arena.take(3, Purpose::Save).is_none());
    assert_eq!(&second[..], b"bc");
    drop(second);
    let mut slot = arena.take(3, Purpose::Save).unwrap();
    slot.copy_from_slice(b"xyz");
    assert_eq!(&slot.freeze()[..], b"xyz");
}

#[test]
fn slots_never_overlap() {
    let arena = arena(30, 0);
    let mut slots = Vec::new();
    for round in 0u8..40 {
        let len = usize::from(round) * 7 % 128 + 1;
        if let Some(mut slot) = arena.take(len, Purpose::Save) {
            slot.fill(round);
            slots.push((round, slot.freeze()));
        }
        if round % 3 == 0 && !slots.is_empty() {
            slots.remove(usize::from(round) % slots.len());
        }
    }
    assert!(slots.len() > 5);
    assert!(slots.iter().all(|(round, bytes)| bytes.iter().all(|byte| byte == round)));
}

#[test]
fn saves_leave_the_reserve_and_prefetches_half_of_it() {
    let arena = arena(4, 2);
    let saves: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Save)).collect();
    assert_eq!(saves.len(), 2);
    assert!(!arena.has_room(Purpose::Save));
    let early: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Prefetch)).collect();
    assert_eq!(early.len(), 1, "half of the reserve is for awaited loads");
    let loads: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Load)).collect();
    assert_eq!(loads.len(), 1);
}

#[test]
fn readers_on_other_threads_see_what_was_written() {
    let arena = arena(8, 0);
    let mut slot = arena.take(64, Purpose::Save).unwrap();
    slot.fill(7);
    let bytes = slot.freeze();
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let bytes = bytes.clone();
            std::thread::spawn(move || bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>())
        })
        .collect();
    assert!(readers.into_iter().all(|reader| reader.join().unwrap() == 64 * 7));
}

/// Slots of one and of four pages, in slabs of four.
fn mixed(slabs: usize, reserve_slabs: usize) -> Arena {
    let classes = SizeClasses::new(&[SLOT_ALIGN_BYTES, 4 * SLOT_ALIGN_BYTES]);
    assert_eq!(classes.slab_bytes(), 4 * SLOT_ALIGN_BYTES);
    Arena::new(ArenaShape { classes, slabs, reserve_slabs }).unwrap()
}

fn filled(arena: &Arena, len: usize, fill: u8) -> Bytes {
    let mut slot = arena.take(len, Purpose::Save).unwrap();
    slot.fill(fill);
    slot.freeze()
}

/// Chooses a slab to vacate, as the store does while some owners' bytes are `read`.
fn start_vacating(arena: &Arena, held: &[Option<Bytes>], read: &[u32]) -> Option<Vec<u32>> {
    arena.start_vacating(|owner| held[owner as usize].as_ref().filter(|_| !read.contains(&owner)))
}

/// Compacts one slab. Returns the number of frames moved.
fn compact_one_slab(arena: &Arena, held: &mut [Option<Bytes>], read: &[u32]) -> Option<usize> {
    let owners = start_vacating(arena, held, read)?;
    for owner in &owners {
        let bytes = held[*owner as usize].as_mut().unwrap();
        *bytes = arena.copy_elsewhere(bytes).unwrap();
    }
    Some(owners.len())
}

/// `count` frames of nine bytes, each owned by its number.
fn small_frames(arena: &Arena, count: u8) -> Vec<Option<Bytes>> {
    let held: Vec<Option<Bytes>> = (0..count).map(|number| Some(filled(arena, 9, number))).collect();
    for (owner, bytes) in (0..).zip(held.iter().flatten()) {
        arena.set_owner(bytes, owner);
    }
    held
}

/// Number of free slots of the smaller class.
fn free_small_slots(arena: &Arena) -> usize {
    std::iter::from_fn(|| arena.take(9, Purpose::Save)).collect::<Vec<SlotMut>>().len()
}

#[test]
fn slots_of_several_classes_never_overlap_and_are_whole_pages() {
    let arena = mixed(12, 0);
    let mut slots = Vec::new();
    for round in 0u8..200 {
        let len = if round % 3 == 0 { 3 * SLOT_ALIGN_BYTES + 5 } else { usize::from(round) + 1 };
        if let Some(mut slot) = arena.take(len, Purpose::Load) {
            assert_eq!(slot.as_ptr().addr() % SLOT_ALIGN_BYTES, 0);
            slot.whole_mut().fill(round);
            slots.push((round, slot.freeze()));
        }
        if round % 2 == 0 && slots.len() > 4 {
            slots.remove(usize::from(round) * 7 % slots.len());
        }
    }
    assert!(slots.len() > 10);
    assert!(slots.iter().all(|(round, bytes)| bytes.iter().all(|byte| byte == round)));
}

#[test]
fn scattered_small_frames_do_not_block_large_ones() {
    let arena = mixed(8, 0);
    let mut held: Vec<Option<Bytes>> = (0..32u8).map(|number| Some(filled(&arena, 100, number))).collect();
    for (owner, bytes) in (0..).zip(held.iter().flatten()) {
        arena.set_owner(bytes, owner);
    }
    // One frame of four stays in each slab: three quarters are free, but no large frame fits.
    held.iter_mut().enumerate().filter(|(number, _)| number % 4 != 1).for_each(|(_, bytes)| *bytes = None);
    assert!(arena.take(4 * SLOT_ALIGN_BYTES, Purpose::Load).is_none());
    let mut large = Vec::new();
    while let Some(moved) = compact_one_slab(&arena, &mut held, &[]) {
        assert!(moved > 0);
        large.extend(std::iter::from_fn(|| arena.take(4 * SLOT_ALIGN_BYTES, Purpose::Load)));
    }
    assert_eq!(large.len(), 6, "eight small frames fill two slabs");
    for (number, bytes) in
        held.iter().enumerate().filter_map(|(number, bytes)| Some((number, bytes.as_ref()?)))
    {
        assert_eq!(&bytes[..], [u8::try_from(number).unwrap(); 100], "moved frames are unchanged");
    }
    let numbers = arena.stats();
    assert_eq!((numbers.empty_slabs, numbers.moved_frames, numbers.moved_bytes), (0, 6, 600));
    drop((held, large));
    assert_eq!((arena.used_bytes(), arena.stats().empty_slabs), (0, 8));
}

#[test]
fn slabs_with_readers_keep_providing_slots() {
    let arena = mixed(8, 0);
    let mut held = small_frames(&arena, 32);
    held.iter_mut().enumerate().filter(|(number, _)| number % 4 > 1).for_each(|(_, bytes)| *bytes = None);
    // A slow reader holds one frame of each slab.
    let all: Vec<u32> = (0..32).step_by(4).collect();
    for _ in 0..4 {
        assert_eq!(compact_one_slab(&arena, &mut held, &all), None);
    }
    assert_eq!((free_small_slots(&arena), arena.stats().moved_frames), (16, 0), "compaction loses no slot");
    // The reader releases one slab; it is found within a few calls.
    for done in (0..32).step_by(4) {
        let read: Vec<u32> = all.iter().copied().filter(|number| *number != done).collect();
        let vacated = (0..2).find_map(|_| start_vacating(&arena, &held, &read));
        assert_eq!(vacated, Some(vec![done, done + 1]));
        arena.cancel_vacating();
    }
}

#[test]
fn replaced_frame_holds_its_slab_until_its_reader_is_gone() {
    let arena = mixed(2, 0);
    let mut held = small_frames(&arena, 8);
    let reader = held[0].take().unwrap();
    for number in [1, 2, 4, 5, 6] {
        held[number] = None;
    }
    // The owner number is reused for other bytes.
    held[0] = Some(filled(&arena, 9, 9));
    arena.set_owner(held[0].as_ref().unwrap(), 0);
    // The last frame of the other slab is being read.
    for _ in 0..3 {
        assert_eq!(start_vacating(&arena, &held, &[7]), None);
    }
    drop(reader);
    assert_eq!(start_vacating(&arena, &held, &[7]).map(|owners| owners.contains(&3)), Some(true));
}

#[test]
fn slab_with_a_frame_being_written_is_not_vacated() {
    let arena = mixed(2, 0);
    let mut late = arena.take(9, Purpose::Save).unwrap();
    let mut held = small_frames(&arena, 7);
    for number in [0, 1, 2, 3, 5, 6] {
        held[number] = None;
    }
    // One slab has a frame being written, the other a held one: both look vacatable.
    assert_eq!(start_vacating(&arena, &held, &[4]), None);
    assert_eq!(start_vacating(&arena, &held, &[]), Some(vec![4]), "a frame being written has no owner");
    arena.cancel_vacating();
    late.fill(3);
    held[0] = Some(late.freeze());
    arena.set_owner(held[0].as_ref().unwrap(), 0);
    assert_eq!(start_vacating(&arena, &held, &[4]), Some(vec![0]));
    assert_eq!(&arena.copy_elsewhere(held[0].as_ref().unwrap()).unwrap()[..], [3; 9]);
}

#[test]
fn vacating_is_cancelled_without_slots_or_with_a_reader() {
    let arena = mixed(2, 0);
    let mut held = small_frames(&arena, 8);
    for number in [1, 2, 3, 6, 7] {
        held[number] = None;
    }
    assert_eq!(start_vacating(&arena, &held, &[]), Some(vec![0]));
    // A repeated call continues with the same slab.
    assert_eq!(start_vacating(&arena, &held, &[]), Some(vec![0]));
    let taken: Vec<SlotMut> = std::iter::from_fn(|| arena.take(9, Purpose::Save)).collect();
    assert_eq!(taken.len(), 2, "the slab being vacated provides no slots");
    assert!(arena.copy_elsewhere(held[0].as_ref().unwrap()).is_none());
    arena.cancel_vacating();
    assert_eq!(free_small_slots(&arena), 3, "it provides slots again");
    drop(taken);
    assert_eq!(start_vacating(&arena, &held, &[]), Some(vec![0]));
    assert_eq!(start_vacating(&arena, &held, &[0, 4]), None);
    assert_eq!(free_small_slots(&arena), 5, "a reader arrived");
    assert_eq!(compact_one_slab(&arena, &mut held, &[]), Some(1));
    let large = arena.take(4 * SLOT_ALIGN_BYTES, Purpose::Save).unwrap();
    assert_eq!((start_vacating(&arena, &held, &[]), large.len()), (None, 4 * SLOT_ALIGN_BYTES));
}

#[test]
fn reserve_serves_loads_of_every_class() {
    let classes = SizeClasses::new(&[SLOT_ALIGN_BYTES, 4 * SLOT_ALIGN_BYTES]);
    let shape = ArenaShape::for_tier(classes, 2, 3, 1);
    assert_eq!((shape.slabs, shape.reserve_slabs), (2 + 4 + 2, 4));
    let arena = Arena::new(shape).unwrap();
    let saves: Vec<SlotMut> = std::iter::from_fn(|| arena.take(1, Purpose::Save)).collect();
    assert_eq!(saves.len(), 16, "small frames leave the reserve");
    assert!(!arena.has_room(Purpose::Save) && arena.has_room(Purpose::Load));
    let large: Vec<SlotMut> =
        std::iter::from_fn(|| arena.take(4 * SLOT_ALIGN_BYTES, Purpose::Load)).collect();
    assert_eq!(large.len(), 4);
    drop(saves);
    // A load used the reserve; saves wait until it is restored.
    let small = arena.take(1, Purpose::Load).unwrap();
    assert!(arena.take(1, Purpose::Save).is_none());
    drop((small, large));
    assert!(arena.take(1, Purpose::Save).is_some());
}
