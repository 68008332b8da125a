//! The name table against a standard map, with random steps and with equal tags.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
struct TestEntry {
    name: EngineHash,
    value: u64,
}

impl NamedEntry for TestEntry {
    fn name(&self) -> EngineHash {
        self.name
    }
}

fn name(number: u64) -> EngineHash {
    EngineHash::from_u64(number)
}

/// Inserts an entry with a chosen tag.
fn put(names: &mut NameTable<TestEntry>, number: u64, value: u64, tag: Tag) -> Result<Slot, Slot> {
    names.insert(TestEntry { name: name(number), value }, tag)
}

/// Checks that a search finds every bucket and that buckets and entries match.
fn check(names: &NameTable<TestEntry>) {
    let taken = names.buckets.iter().enumerate().filter(|(_, bucket)| bucket.slot != Slot::NONE);
    let mut count = 0;
    for (at, bucket) in taken {
        let found = names.bucket_of(bucket.tag, |slot| slot == bucket.slot);
        assert_eq!(found, Ok((at, bucket.slot)), "an entry cannot be found");
        assert!(names.get(bucket.slot).is_some(), "a bucket without an entry");
        count += 1;
    }
    assert_eq!((count, names.iter().count()), (names.len(), names.len()));
    assert!(4 * names.len() <= 3 * names.buckets.len(), "too full for a fast failed lookup");
}

#[derive(Clone, Debug)]
enum TableStep {
    Insert(u64),
    Remove(u64),
    Expect(Vec<u64>),
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<TableStep>> {
    let number = 0..300u64;
    let one = prop_oneof![
        60 => number.clone().prop_map(TableStep::Insert),
        40 => number.clone().prop_map(TableStep::Remove),
        5 => prop::collection::vec(number, 0..LOOKUP_BATCH).prop_map(TableStep::Expect),
        1 => Just(TableStep::Clear),
    ];
    prop::collection::vec(one, 1..1_500)
}

proptest! {
    #[test]
    fn the_table_equals_a_standard_map(steps in steps()) {
        let (mut names, mut map) = (NameTable::default(), HashMap::new());
        for (value, step) in (0..).zip(steps) {
            match step {
                TableStep::Insert(number) => {
                    let tag = names.tag(name(number));
                    let put = put(&mut names, number, value, tag);
                    match map.get(&number) {
                        Some((slot, _)) => prop_assert_eq!(put, Err(*slot)),
                        None => { map.insert(number, (put.unwrap(), value)); }
                    }
                }
                TableStep::Remove(number) => {
                    let found = names.find(name(number));
                    let value = found.and_then(|slot| names.get(slot)).map(|entry| entry.value);
                    prop_assert_eq!(value, map.remove(&number).map(|(_, value)| value));
                    if let Some(slot) = found {
                        names.remove(slot);
                        prop_assert_eq!(names.get(slot), None);
                        names.remove(slot); // an unknown slot has no effect
                    }
                }
                TableStep::Expect(numbers) => {
                    let wanted: Vec<_> = numbers.into_iter().map(name).collect();
                    let mut tags = Vec::new();
                    names.prefetch_names(&wanted, &mut tags);
                    let expected: Vec<_> = wanted.iter().map(|name| names.tag(*name)).collect();
                    prop_assert_eq!(tags, expected);
                }
                TableStep::Clear => { names.clear(); map.clear(); }
            }
            prop_assert_eq!(names.len(), map.len());
        }
        check(&names);
        for number in 0..300 {
            prop_assert_eq!(names.find(name(number)), map.get(&number).map(|(slot, _)| *slot));
        }
        let mut all: Vec<_> = names.iter().map(|(slot, entry)| (entry.name, slot.0, entry.value)).collect();
        let mut expected: Vec<_> = map.iter().map(|(number, (slot, value))| (name(*number), slot.0, *value)).collect();
        all.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(all, expected);
    }

    /// Few tags, at both ends of the table, so that searches wrap around.
    #[test]
    fn equal_tags_and_neighbours_are_separate(steps in prop::collection::vec((0..120u64, any::<bool>()), 1..600)) {
        let tag = |number: u64| Tag([u32::MAX, u32::MAX - 1, 0, 1, 1 << 26, u32::MAX << 26][number as usize % 6]);
        let (mut names, mut map) = (NameTable::default(), HashMap::new());
        for (number, is_insert) in steps {
            let found = names.find_tagged(name(number), tag(number));
            prop_assert_eq!(found, map.get(&number).copied());
            if is_insert {
                match (found, put(&mut names, number, number, tag(number))) {
                    (None, Ok(slot)) => { map.insert(number, slot); }
                    (found, put) => prop_assert_eq!(found, put.err()),
                }
            } else if let Some(slot) = map.remove(&number) {
                prop_assert_eq!(names.get(slot).unwrap().value, number);
                names.remove_tagged(slot, tag(number));
                prop_assert_eq!(names.get(slot), None);
            }
            check(&names);
        }
    }
}

#[test]
fn free_slots_are_reused_in_order() {
    let mut names = NameTable::default();
    let mut insert = |number: u64| {
        let tag = names.tag(name(number));
        put(&mut names, number, number, tag).unwrap()
    };
    let slots: Vec<Slot> = (0..1_000).map(&mut insert).collect();
    assert!(slots.iter().map(|slot| slot.0).eq(0..1_000), "adjacent");
    for slot in &slots[500..700] {
        names.remove(*slot);
    }
    let mut insert = |number: u64| {
        let tag = names.tag(name(number));
        put(&mut names, number, number, tag).unwrap()
    };
    let again: Vec<Slot> = (1_000..1_200).map(&mut insert).collect();
    assert_eq!(again, slots[500..700]);
    assert_eq!(insert(2_000), Slot(1_000));
}

#[test]
fn memory_follows_the_peak_size() {
    let mut names = NameTable::default();
    let mut kept = VecDeque::new();
    for number in 0..100_000u64 {
        let tag = names.tag(name(number));
        kept.push_back(put(&mut names, number, number, tag).unwrap());
        if kept.len() > 5_000 {
            names.remove(kept.pop_front().unwrap());
        }
    }
    assert_eq!(names.pages.len(), 5_001usize.div_ceil(PAGE_ENTRIES));
    assert_eq!(names.buckets.len(), 8_192, "eight bytes each, at most twice and two thirds of the entries");
    names.clear();
    assert!(names.pages.is_empty() && names.buckets.is_empty() && names.find(name(99_999)).is_none());
}
