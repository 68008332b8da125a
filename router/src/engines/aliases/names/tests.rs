//! The table of names against a map of the standard library, by chance and where tags are equal.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: EngineHash,
    value: u64,
}

impl Named for Entry {
    fn name(&self) -> EngineHash {
        self.name
    }
}

fn name(number: u64) -> EngineHash {
    EngineHash::of_number(number)
}

/// Puts an entry in under a tag of the caller's choice.
fn put(names: &mut Names<Entry>, number: u64, value: u64, tag: Tag) -> Result<Slot, Slot> {
    names.insert(Entry { name: name(number), value }, tag)
}

/// Every bucket is where a search from its home comes to it, and there are as many as there are entries.
fn check(names: &Names<Entry>) {
    let taken = names.buckets.iter().enumerate().filter(|(_, bucket)| bucket.slot != Slot::NONE);
    let mut count = 0;
    for (at, bucket) in taken {
        let found = names.bucket_of(bucket.tag, |slot| slot == bucket.slot);
        assert_eq!(found, Ok((at, bucket.slot)), "an entry that is not found");
        assert!(names.get(bucket.slot).is_some(), "a bucket of nothing");
        count += 1;
    }
    assert_eq!((count, names.iter().count()), (names.len(), names.len()));
    assert!(4 * names.len() <= 3 * names.buckets.len(), "too full to say soon that a name is not there");
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u64),
    Remove(u64),
    Expect(Vec<u64>),
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = 0..300u64;
    let one = prop_oneof![
        60 => number.clone().prop_map(Step::Insert),
        40 => number.clone().prop_map(Step::Remove),
        5 => prop::collection::vec(number, 0..TOGETHER).prop_map(Step::Expect),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(one, 1..1_500)
}

proptest! {
    #[test]
    fn it_is_as_a_map_of_the_standard_library(steps in steps()) {
        let (mut names, mut map) = (Names::default(), HashMap::new());
        for (value, step) in (0..).zip(steps) {
            match step {
                Step::Insert(number) => {
                    let tag = names.tag(name(number));
                    let put = put(&mut names, number, value, tag);
                    match map.get(&number) {
                        Some((slot, _)) => prop_assert_eq!(put, Err(*slot)),
                        None => { map.insert(number, (put.unwrap(), value)); }
                    }
                }
                Step::Remove(number) => {
                    let found = names.find(name(number));
                    let value = found.and_then(|slot| names.get(slot)).map(|entry| entry.value);
                    prop_assert_eq!(value, map.remove(&number).map(|(_, value)| value));
                    if let Some(slot) = found {
                        names.remove(slot);
                        prop_assert_eq!(names.get(slot), None);
                        names.remove(slot); // which is not there: nothing becomes of it
                    }
                }
                Step::Expect(numbers) => {
                    let wanted: Vec<_> = numbers.into_iter().map(name).collect();
                    let mut tags = Vec::new();
                    names.expect(&wanted, &mut tags);
                    let expected: Vec<_> = wanted.iter().map(|name| names.tag(*name)).collect();
                    prop_assert_eq!(tags, expected);
                }
                Step::Clear => { names.clear(); map.clear(); }
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

    /// Few tags, at both ends of the table, so that searches run from one end into the other.
    #[test]
    fn equal_tags_and_neighbours_stay_apart(steps in prop::collection::vec((0..120u64, any::<bool>()), 1..600)) {
        let tag = |number: u64| Tag([u32::MAX, u32::MAX - 1, 0, 1, 1 << 26, u32::MAX << 26][number as usize % 6]);
        let (mut names, mut map) = (Names::default(), HashMap::new());
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
fn places_that_became_free_are_taken_again_in_their_order() {
    let mut names = Names::default();
    let mut insert = |number: u64| {
        let tag = names.tag(name(number));
        put(&mut names, number, number, tag).unwrap()
    };
    let slots: Vec<Slot> = (0..1_000).map(&mut insert).collect();
    assert!(slots.iter().map(|slot| slot.0).eq(0..1_000), "side by side");
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
fn memory_is_that_of_the_most_that_there_were() {
    let mut names = Names::default();
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
