//! Times to live: when a group's block expires, and what takes precedence.

use std::collections::BTreeSet;

use super::*;
use crate::id::{TTL_GROUPS, TtlGroupId};
use crate::index::command::Change;
use crate::tier::ttl::EXPIRED_BLOCKS_MAX;

const SECOND: u64 = 1_000_000;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn present(book: &Book, numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|number| book.tier_of(&hash(*number)).is_some()).collect()
}

#[test]
fn prefix_is_in_one_group_and_every_group_is_reachable() {
    let groups: BTreeSet<TtlGroupId> = (0..=255u8).map(|tag| BlockHash([tag; _]).ttl_group()).collect();
    assert_eq!(groups.len() as u32, TTL_GROUPS);
    assert!(groups.iter().all(|group| group.0 < TTL_GROUPS));
    let deep = BlockHash([9; _]).in_chain(200, BlockHash([7; _]), 12_345);
    assert_eq!(deep.ttl_group(), TtlGroupId(200));
}

#[test]
fn blocks_expire_after_their_ttl_since_last_use() {
    let mut book = blocks(2, 4);
    for number in 1..=4 {
        request(&mut book, &[number], number * SECOND);
    }
    book.take_changes();
    // Blocks 2 and 3, on SSD and in DRAM, have a time to live; 1 and 4 have none.
    book.set_ttls([(hash(2).ttl_group(), seconds(10)), (hash(3).ttl_group(), seconds(10))]);
    assert_eq!(book.ttl_groups(), 2);
    assert_eq!(book.expire_blocks(Timestamp(12 * SECOND - 1)), 0);
    assert_eq!(book.expire_blocks(Timestamp(12 * SECOND)), 1);
    assert_eq!(present(&book, 1..5), [1, 3, 4]);
    request(&mut book, &[3], 12 * SECOND + 1);
    assert_eq!(book.expire_blocks(Timestamp(22 * SECOND)), 0, "used again");
    assert_eq!(book.expire_blocks(Timestamp(22 * SECOND + 1)), 1);
    assert_eq!(present(&book, 1..5), [1, 4]);
    let left = |book: &Book, tier| {
        book.counters(tier)
            .categories()
            .map(|(_, class)| class.removals[RemovalReason::Ttl as usize])
            .sum::<u64>()
    };
    assert_eq!((left(&book, Tier::Dram), left(&book, Tier::Ssd)), (1, 1));
    assert_eq!((book.stats(Tier::Dram).expired_blocks, book.stats(Tier::Ssd).expired_blocks), (1, 1));
    let dropped = book.take_changes().into_iter().filter(|change| matches!(change, Change::Dropped { .. }));
    assert_eq!(dropped.count(), 2, "the index learns of the drops");
    assert_eq!(request(&mut book, &[2], 30 * SECOND), 0, "it can be saved again");
}

#[test]
fn zero_ttl_expires_with_the_request() {
    let mut book = blocks(4, 0);
    book.set_ttls([(hash(1).ttl_group(), Duration::ZERO)]);
    let Some(OfferOutcome::Wanted(key)) = offer(&mut book, 9, &[1], 5).pop() else { panic!("not wanted") };
    book.commit(key, CHARGE, Timestamp(5));
    assert_eq!(book.expire_blocks(Timestamp(100 * SECOND)), 0, "its request is still running");
    book.release(LeaseId(9), Timestamp(100 * SECOND));
    assert_eq!(book.expire_blocks(Timestamp(100 * SECOND)), 1);
    assert_eq!(present(&book, 1..2), [0u64; 0]);
}

#[test]
fn pin_and_window_take_precedence_over_a_ttl() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1], 0);
    request(&mut book, &[2], 0);
    book.set_ttls([(hash(1).ttl_group(), seconds(1)), (hash(2).ttl_group(), seconds(1))]);
    pin(&mut book, &[1], Timestamp(1));
    let waiting = hashes(&[2]);
    book.set_window([waiting.as_slice()], Timestamp(SECOND));
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 0);
    pin(&mut book, &[], Timestamp(2 * SECOND));
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 1, "the end of a pin is not a use");
    assert_eq!(present(&book, 1..3), [2]);
    assert!(book.expire_window(Timestamp(4 * SECOND)));
    assert_eq!(book.expire_blocks(Timestamp(4 * SECOND)), 1);
}

#[test]
fn clock_set_back_never_ages_blocks() {
    let mut book = blocks(4, 0);
    book.set_ttls([(hash(1).ttl_group(), seconds(10)), (hash(2).ttl_group(), seconds(10))]);
    request(&mut book, &[1], 1000 * SECOND);
    assert_eq!(book.expire_blocks(Timestamp(SECOND)), 0);
    request(&mut book, &[2], SECOND);
    assert_eq!(book.expire_blocks(Timestamp(11 * SECOND)), 1, "block 1 does not keep block 2");
    assert_eq!(present(&book, 1..3), [1]);
    assert_eq!(book.expire_blocks(Timestamp(1010 * SECOND)), 1);
}

#[test]
fn ttls_can_be_replaced_removed_and_unbounded() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1], 0);
    book.set_ttls([(hash(1).ttl_group(), Duration::MAX)]);
    assert_eq!(book.expire_blocks(Timestamp(u64::MAX - 1)), 0);
    book.set_ttls([(hash(1).ttl_group(), seconds(10))]);
    book.set_ttls([]);
    assert_eq!((book.expire_blocks(Timestamp(20 * SECOND)), book.ttl_groups()), (0, 0));
    book.set_ttls([(hash(1).ttl_group(), seconds(10)), (TtlGroupId(40_000), seconds(1))]);
    assert_eq!(book.expire_blocks(Timestamp(20 * SECOND)), 1);
}

#[test]
fn expiry_is_bounded_per_call_and_fair_between_groups() {
    let many = EXPIRED_BLOCKS_MAX as u64 + 300;
    let mut book = blocks(2 * many, 0);
    // All but one block are in the group that is processed first.
    let numbers: Vec<u64> = (0..many).map(|number| number << 8).collect();
    request(&mut book, &numbers, 0);
    request(&mut book, &[7], 0);
    assert_ne!(hash(7).ttl_group(), hash(numbers[0]).ttl_group());
    book.set_ttls([(hash(0).ttl_group(), seconds(1)), (hash(7).ttl_group(), seconds(1))]);
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), EXPIRED_BLOCKS_MAX);
    assert!(book.tier_of(&hash(7)).is_some());
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 301);
    let again: Vec<u64> = (0..2 * many).map(|number| number << 8).collect();
    request(&mut book, &again, 3 * SECOND);
    request(&mut book, &[7], 3 * SECOND);
    book.expire_blocks(Timestamp(5 * SECOND));
    book.expire_blocks(Timestamp(5 * SECOND));
    assert!(book.tier_of(&hash(7)).is_none(), "the other group is processed after one call");
}

#[test]
fn recovered_blocks_have_their_full_ttl() {
    let mut book = blocks(0, 4);
    let found = RecoveredBlock {
        hash: hash(1),
        parent: None,
        tenant: TenantId(0),
        traits: BlockTraits::default(),
        charge: CHARGE,
    };
    book.restore(found, Timestamp(3)).unwrap();
    book.set_ttls([(hash(1).ttl_group(), seconds(10))]);
    assert_eq!(book.expire_blocks(Timestamp(10 * SECOND + 2)), 0);
    assert_eq!(book.expire_blocks(Timestamp(10 * SECOND + 3)), 1);
}

#[test]
fn moving_block_is_dropped_when_its_move_ends() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 0);
    offer(&mut book, 2, &[2], 1);
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no demotion") };
    book.set_ttls([(hash(1).ttl_group(), seconds(1))]);
    assert_eq!(book.expire_blocks(Timestamp(2 * SECOND)), 1);
    assert_eq!(book.tier_of(&hash(1)), None);
    book.on_moved(key, Tier::Ssd);
    let mut dropped = Vec::new();
    while let Some(action) = book.next_action(ALL_PERMITS) {
        dropped.push(action);
    }
    assert_eq!(
        dropped,
        [Action::DropDram { key }, Action::DropSsd { key, hash: hash(1), generation: Generation(0) }]
    );
}
