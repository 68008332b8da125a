//! Times to live: when a block of a group leaves, and what goes before that.

use std::collections::BTreeSet;

use super::*;
use crate::id::{GROUPS, GroupId};
use crate::index::command::Change;
use crate::tier::ttl::EXPIRED_BLOCKS_MAX;

const SECOND: u64 = 1_000_000;

fn after(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn present(book: &Book, numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|number| book.tier_of(&hash(*number)).is_some()).collect()
}

#[test]
fn a_prefix_is_in_one_group_whole_and_every_group_is_there() {
    let groups: BTreeSet<GroupId> = (0..=255u8).map(|tag| BlockHash([tag; 16]).group()).collect();
    assert_eq!(groups.len() as u32, GROUPS);
    assert!(groups.iter().all(|group| group.0 < GROUPS));
    let deep = BlockHash([9; 16]).in_chain(200, BlockHash([7; 16]), 12_345);
    assert_eq!(deep.group(), GroupId(200));
}

#[test]
fn blocks_leave_when_their_time_since_the_last_use_is_over_and_others_stay() {
    let mut book = blocks(2, 4);
    for number in 1..=4 {
        request(&mut book, &[number], number * SECOND);
    }
    book.take_changes();
    // 2 and 3 are on SSD and in DRAM; 1 and 4 have no time to live.
    book.set_ttls([(hash(2).group(), after(10)), (hash(3).group(), after(10))]);
    assert_eq!(book.ttl_groups(), 2);
    assert_eq!(book.expire_blocks(Timestamp(12 * SECOND - 1)), 0);
    assert_eq!(book.expire_blocks(Timestamp(12 * SECOND)), 1);
    assert_eq!(present(&book, 1..5), [1, 3, 4]);
    request(&mut book, &[3], 12 * SECOND + 1);
    assert_eq!(book.expire_blocks(Timestamp(22 * SECOND)), 0, "used again");
    assert_eq!(book.expire_blocks(Timestamp(22 * SECOND + 1)), 1);
    assert_eq!(present(&book, 1..5), [1, 4]);
    let left = |book: &Book, tier| {
        book.numbers(tier).classes().map(|(_, class)| class.left[Left::Ttl as usize]).sum::<u64>()
    };
    assert_eq!((left(&book, Tier::Dram), left(&book, Tier::Ssd)), (1, 1));
    assert_eq!((book.stats(Tier::Dram).expired_blocks, book.stats(Tier::Ssd).expired_blocks), (1, 1));
    let dropped = book.take_changes().into_iter().filter(|change| matches!(change, Change::Dropped { .. }));
    assert_eq!(dropped.count(), 2, "the routers hear of it");
    assert_eq!(request(&mut book, &[2], 30 * SECOND), 0, "it can come again");
}

#[test]
fn a_time_of_zero_ends_with_the_request() {
    let mut book = blocks(4, 0);
    book.set_ttls([(hash(1).group(), Duration::ZERO)]);
    let Some(Offered::Wanted(key)) = offer(&mut book, 9, &[1], 5).pop() else { panic!("not wanted") };
    book.commit(key, CHARGE, Timestamp(5));
    assert_eq!(book.expire_blocks(Timestamp(100 * SECOND)), 0, "its request runs");
    book.release(LeaseId(9), Timestamp(100 * SECOND));
    assert_eq!(book.expire_blocks(Timestamp(100 * SECOND)), 1);
    assert_eq!(present(&book, 1..2), [0u64; 0]);
}

#[test]
fn a_pin_and_a_window_go_before_a_time_to_live() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1], 0);
    request(&mut book, &[2], 0);
    book.set_ttls([(hash(1).group(), after(1)), (hash(2).group(), after(1))]);
    pin(&mut book, &[1], Timestamp(1));
    let waiting = hashes(&[2]);
    book.set_window([waiting.as_slice()], Timestamp(SECOND));
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 0);
    pin(&mut book, &[], Timestamp(2 * SECOND));
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 1, "the end of a pin is no use");
    assert_eq!(present(&book, 1..3), [2]);
    assert!(book.expire_window(Timestamp(4 * SECOND)));
    assert_eq!(book.expire_blocks(Timestamp(4 * SECOND)), 1);
}

#[test]
fn a_clock_that_was_set_back_makes_blocks_younger_and_never_older() {
    let mut book = blocks(4, 0);
    book.set_ttls([(hash(1).group(), after(10)), (hash(2).group(), after(10))]);
    request(&mut book, &[1], 1000 * SECOND);
    assert_eq!(book.expire_blocks(Timestamp(SECOND)), 0);
    request(&mut book, &[2], SECOND);
    assert_eq!(book.expire_blocks(Timestamp(11 * SECOND)), 1, "2 is not kept by 1");
    assert_eq!(present(&book, 1..3), [1]);
    assert_eq!(book.expire_blocks(Timestamp(1010 * SECOND)), 1);
}

#[test]
fn times_are_replaced_lifted_and_as_long_as_they_like() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1], 0);
    book.set_ttls([(hash(1).group(), Duration::MAX)]);
    assert_eq!(book.expire_blocks(Timestamp(u64::MAX - 1)), 0);
    book.set_ttls([(hash(1).group(), after(10))]);
    book.set_ttls([]);
    assert_eq!((book.expire_blocks(Timestamp(20 * SECOND)), book.ttl_groups()), (0, 0));
    book.set_ttls([(hash(1).group(), after(10)), (GroupId(40_000), after(1))]);
    assert_eq!(book.expire_blocks(Timestamp(20 * SECOND)), 1);
}

#[test]
fn one_call_drops_a_bounded_number_and_no_group_keeps_the_others_waiting() {
    let many = EXPIRED_BLOCKS_MAX as u64 + 300;
    let mut book = blocks(2 * many, 0);
    // All but one of one group, the first one looked at.
    let numbers: Vec<u64> = (0..many).map(|number| number << 8).collect();
    request(&mut book, &numbers, 0);
    request(&mut book, &[7], 0);
    assert_ne!(hash(7).group(), hash(numbers[0]).group());
    book.set_ttls([(hash(0).group(), after(1)), (hash(7).group(), after(1))]);
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), EXPIRED_BLOCKS_MAX);
    assert!(book.tier_of(&hash(7)).is_some());
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 301);
    let again: Vec<u64> = (0..2 * many).map(|number| number << 8).collect();
    request(&mut book, &again, 3 * SECOND);
    request(&mut book, &[7], 3 * SECOND);
    book.expire_blocks(Timestamp(5 * SECOND));
    book.expire_blocks(Timestamp(5 * SECOND));
    assert!(book.tier_of(&hash(7)).is_none(), "its turn came after one call");
}

#[test]
fn what_was_found_at_start_has_its_whole_time() {
    let mut book = blocks(0, 4);
    let found = Found {
        hash: hash(1),
        parent: None,
        tenant: TenantId(0),
        traits: BlockTraits::default(),
        charge: CHARGE,
    };
    book.restore(found, Timestamp(3)).unwrap();
    book.set_ttls([(hash(1).group(), after(10))]);
    assert_eq!(book.expire_blocks(Timestamp(10 * SECOND + 2)), 0);
    assert_eq!(book.expire_blocks(Timestamp(10 * SECOND + 3)), 1);
}

#[test]
fn a_block_that_is_moving_leaves_when_its_move_ends() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 0);
    offer(&mut book, 2, &[2], 1);
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_ROOM) else { panic!("no demotion") };
    book.set_ttls([(hash(1).group(), after(1))]);
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 1);
    assert_eq!(book.tier_of(&hash(1)), None);
    book.on_moved(key, Tier::Ssd);
    let mut dropped = Vec::new();
    while let Some(action) = book.next_action(ALL_ROOM) {
        dropped.push(action);
    }
    assert_eq!(
        dropped,
        [Action::DropDram { key }, Action::DropSsd { key, hash: hash(1), generation: Generation(0) }]
    );
}
