//! Tests of blocks moved in from another tier: no use is counted, their wait continues, and their
//! class predicts their reuse.

use super::*;
use crate::id::{Category, RequestKind};

const SECOND: u64 = 1_000_000;

fn traits() -> BlockTraits {
    BlockTraits { category: Category::default(), fingerprint: 77 << 43, ..BlockTraits::default() }
}

/// A policy with a block 1 that was used at 10 s and left at 20 s.
fn evicted_policy() -> Density {
    let mut density = Density::new();
    density.insert(BlockKey(1), traits(), Timestamp(10 * SECOND));
    density.settle(BlockKey(1), traits(), Timestamp(10 * SECOND));
    density.remove(BlockKey(1));
    density.advance(Timestamp(20 * SECOND));
    density
}

#[test]
fn move_in_is_no_use() {
    let (mut up, mut used) = (evicted_policy(), evicted_policy());
    up.insert_moved(BlockKey(2), traits(), Timestamp(30 * SECOND));
    used.insert(BlockKey(2), traits(), Timestamp(30 * SECOND));
    used.run_deferred();
    let of = |density: &Density| {
        let resident = density.links.data(BlockKey(2));
        (resident.uses(), resident.last_use(density.clock).0 / SECOND)
    };
    assert_eq!(of(&used), (2, 29), "it returned by a use; times have steps of 131 ms");
    assert_eq!(of(&up), (1, 9));
    assert_eq!(up.len(), 1);
    up.park(BlockKey(2));
    up.access(BlockKey(2), traits(), Timestamp(40 * SECOND));
    up.finish_request();
    assert_eq!(up.links.data(BlockKey(2)).uses(), 2);
    assert_eq!(up.victim(Timestamp(50 * SECOND), &|_| false), Some(BlockKey(2)));
}

#[test]
fn unknown_block_moves_in_as_new() {
    let mut density = Density::new();
    density.insert_moved(BlockKey(3), traits(), Timestamp(SECOND));
    assert_eq!((density.len(), density.links.data(BlockKey(3)).uses()), (1, 1));
}

/// A policy that observed uses elsewhere for half an hour: text returns after 10 s, API calls never
/// do. Also returns the second of the last use of either.
fn trained_policy() -> (Density, u64) {
    let mut density = Density::new();
    // The tier's size bounds the number of ghosts.
    for key in 0..1024 {
        density.insert_moved(
            BlockKey(key),
            traits_of(RequestKind::Agent, 10_000 + u64::from(key)),
            Timestamp(0),
        );
    }
    for second in 0..2000 {
        let now = Timestamp(second * SECOND);
        for (kind, block) in [(RequestKind::Text, second % 10), (RequestKind::Api, 100 + second)] {
            density.note_absent(traits_of(kind, block), now);
            density.advance(Timestamp(now.0 + SECOND / 2));
        }
        density.refit(Timestamp(now.0 + SECOND / 2));
    }
    (density, 1999)
}

fn traits_of(kind: RequestKind, block: u64) -> BlockTraits {
    let category = Category { kind, conversation_turn: 2 };
    BlockTraits {
        category,
        fingerprint: (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        ..BlockTraits::default()
    }
}

#[test]
fn moved_block_has_the_reuse_chance_of_its_class() {
    let (mut density, end) = trained_policy();
    let now = Timestamp((end + 1) * SECOND);
    let (text, call) = (traits_of(RequestKind::Text, end % 10), traits_of(RequestKind::Api, 100 + end));
    let used = density.reuse_prob_if_moved_in(text, None, now);
    let unused = density.reuse_prob_if_moved_in(call, None, now);
    assert!(used > 0.9 && unused < 0.3 * used, "{used} and {unused}");
    // The same once they are resident; moving in was no use.
    density.insert_moved(BlockKey(2000), text, now);
    density.insert_moved(BlockKey(2001), call, now);
    let (used, unused) =
        (density.reuse_prob_if_kept(BlockKey(2000), now), density.reuse_prob_if_kept(BlockKey(2001), now));
    assert!(used > 0.9 && unused < 0.3 * used, "{used} and {unused}");
    assert_eq!(density.links.data(BlockKey(2000)).last_use(density.clock).0 / SECOND, end);
}

#[test]
fn no_block_leaves_for_a_less_valuable_one() {
    let (mut density, end) = trained_policy();
    let now = Timestamp((end + 1) * SECOND);
    let (text, call) = (traits_of(RequestKind::Text, end % 10), traits_of(RequestKind::Api, 100 + end));
    density.insert_moved(BlockKey(2000), text, now);
    assert_eq!(density.reuse_prob_if_moved_in(call, Some(BlockKey(2000)), now), 0.0);
    density.insert_moved(BlockKey(2001), call, now);
    assert!(
        density.reuse_prob_if_moved_in(traits_of(RequestKind::Text, 50), Some(BlockKey(2001)), now) > 0.5
    );
}
