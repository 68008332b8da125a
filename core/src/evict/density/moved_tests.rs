//! A block that comes up before anybody asks for it: no use of it is counted, and its wait goes on.

use super::*;
use crate::id::Category;

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
