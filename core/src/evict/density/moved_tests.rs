//! Blocks that come from another tier: no use of them is counted, their wait goes on, and what is known of their like says
//! whether they are worth coming.

use super::*;
use crate::id::{Category, RequestKind};

const SECOND: u64 = 1_000_000;

fn traits() -> BlockTraits {
    BlockTraits { category: Category::default(), fingerprint: 77 << 43, ..BlockTraits::default() }
}

/// A policy whose block 1 was used at 10 s and left at 20 s.
fn left() -> Density {
    let mut density = Density::new();
    density.insert(BlockKey(1), traits(), Timestamp(10 * SECOND));
    density.settle(BlockKey(1), traits(), Timestamp(10 * SECOND));
    density.remove(BlockKey(1));
    density.advance(Timestamp(20 * SECOND));
    density
}

#[test]
fn coming_up_is_no_use_and_the_use_that_follows_is_one_since_the_one_before() {
    let (mut up, mut used) = (left(), left());
    up.moved_in(BlockKey(2), traits(), Timestamp(30 * SECOND));
    used.insert(BlockKey(2), traits(), Timestamp(30 * SECOND));
    used.catch_up();
    let of = |density: &Density| {
        let resident = density.links.about(BlockKey(2));
        (resident.uses(), resident.last_use(density.clock).0 / SECOND)
    };
    assert_eq!(of(&used), (2, 29), "it came back by a use; times are kept in 131 ms");
    assert_eq!(of(&up), (1, 9));
    assert_eq!(up.len(), 1);
    up.park(BlockKey(2));
    up.access(BlockKey(2), traits(), Timestamp(40 * SECOND));
    up.close_run();
    assert_eq!(up.links.about(BlockKey(2)).uses(), 2);
    assert_eq!(up.victim(Timestamp(50 * SECOND), &|_| false), Some(BlockKey(2)));
}

#[test]
fn a_block_that_nobody_remembers_comes_up_as_one_that_is_new() {
    let mut density = Density::new();
    density.moved_in(BlockKey(3), traits(), Timestamp(SECOND));
    assert_eq!((density.len(), density.links.about(BlockKey(3)).uses()), (1, 1));
}

/// A policy that heard of uses elsewhere for half an hour: text comes back after 10 s, calls of programs never do. The last
/// block of either was used at the second that comes with it.
fn informed() -> (Density, u64) {
    let mut density = Density::new();
    // Ghosts are as many as a tier's size allows.
    for key in 0..1024 {
        density.moved_in(BlockKey(key), of(RequestKind::Agent, 10_000 + u64::from(key)), Timestamp(0));
    }
    for second in 0..2000 {
        let now = Timestamp(second * SECOND);
        for (kind, block) in [(RequestKind::Text, second % 10), (RequestKind::Api, 100 + second)] {
            density.pass(of(kind, block), now);
            density.advance(Timestamp(now.0 + SECOND / 2));
        }
        density.refit(Timestamp(now.0 + SECOND / 2));
    }
    (density, 1999)
}

fn of(kind: RequestKind, block: u64) -> BlockTraits {
    let category = Category { kind, turn: 2 };
    BlockTraits {
        category,
        fingerprint: (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        ..BlockTraits::default()
    }
}

#[test]
fn what_comes_down_is_as_likely_to_be_used_as_its_like_were() {
    let (mut density, end) = informed();
    let now = Timestamp((end + 1) * SECOND);
    let (text, call) = (of(RequestKind::Text, end % 10), of(RequestKind::Api, 100 + end));
    let used = density.prospect(text, None, now);
    let unused = density.prospect(call, None, now);
    assert!(used > 0.9 && unused < 0.3 * used, "{used} and {unused}");
    // So it is once they are here, and neither was used by coming.
    density.moved_in(BlockKey(2000), text, now);
    density.moved_in(BlockKey(2001), call, now);
    let (used, unused) = (density.prospect_of(BlockKey(2000), now), density.prospect_of(BlockKey(2001), now));
    assert!(used > 0.9 && unused < 0.3 * used, "{used} and {unused}");
    assert_eq!(density.links.about(BlockKey(2000)).last_use(density.clock).0 / SECOND, end);
}

#[test]
fn nobody_leaves_for_what_is_worth_less() {
    let (mut density, end) = informed();
    let now = Timestamp((end + 1) * SECOND);
    let (text, call) = (of(RequestKind::Text, end % 10), of(RequestKind::Api, 100 + end));
    density.moved_in(BlockKey(2000), text, now);
    assert_eq!(density.prospect(call, Some(BlockKey(2000)), now), 0.0);
    density.moved_in(BlockKey(2001), call, now);
    assert!(density.prospect(of(RequestKind::Text, 50), Some(BlockKey(2001)), now) > 0.5);
}
