//! Block groups: one entry finds eight blocks, and runs that share a group stay separate at a
//! bounded cost.
//!
//! The random histories of `determinism.rs` cover small cases; here are the named cases and the
//! large ones.

use super::*;

const D: Tier = Tier::Dram;

fn after(parent: BlockHash, blocks: Vec<BlockHash>) -> Change {
    Change::Stored { parent: Some(parent), blocks, tier: D }
}

fn stored_alone(block: BlockHash) -> Change {
    Change::Stored { parent: None, blocks: vec![block], tier: D }
}

fn dropped_block(block: BlockHash) -> Change {
    Change::Dropped { blocks: vec![block], tier: D, cause: Default::default() }
}

impl Fixture {
    /// Table entries, pages in use, and runs; checks the structure as well.
    fn counts(&self) -> (u64, u32, u32) {
        self.0.store.check();
        (self.0.store.locations.entries(), self.0.store.pages.used(), self.0.store.runs.number_limit())
    }

    fn is_held(&self, hash: BlockHash) -> bool {
        !self.0.holders_of(hash).is_empty()
    }
}

#[test]
fn eight_blocks_share_one_entry() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored(0..16, D)]);
    assert_eq!(index.counts(), (2, 2, 1));
    // Another node with the same blocks, in several announcements, adds none.
    index.announce_next(2, vec![stored(0..3, D), after(block(2), blocks(3..13))]);
    assert_eq!(index.counts(), (2, 2, 1));
    index.announce_next(1, vec![dropped((0..16).rev(), D)]);
    assert_eq!(index.counts(), (2, 2, 1));
    index.announce_next(2, vec![dropped((8..13).rev(), D)]);
    assert_eq!(index.counts(), (1, 1, 1));
    index.announce_next(2, vec![dropped(0..8, D)]);
    assert_eq!(index.counts(), (0, 0, 0));
}

#[test]
fn run_may_start_inside_a_block_group() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(5..20, D)]);
    assert_eq!(index.counts(), (3, 3, 1));
    assert_eq!(index.runs(5..20), [(0, 15, vec![(1, D)])]);
    // The earlier blocks follow later: the same group in another run, so another page with its own
    // entries.
    index.announce_next(1, vec![stored(0..5, D)]);
    assert_eq!(index.counts(), (3 + 5, 4, 2));
    assert_eq!(index.runs(0..20), [(0, 20, vec![(1, D)])]);
}

#[test]
fn hashes_without_layout_are_all_found() {
    let mut index = Fixture::with_nodes(1);
    let hashes: Vec<BlockHash> = (0..100).map(raw_block).collect();
    index.announce_next(1, vec![Change::Stored { parent: None, blocks: hashes.clone(), tier: D }]);
    let (entries, pages, runs) = index.counts();
    assert!((entries, pages) == (100, 100) && runs > 90, "{entries} entries, {pages} pages, {runs} runs");
    assert_eq!(index.0.longest_prefix(&hashes).union_blocks(), 100);
    // A chain with every second block missing does not follow from block to block either.
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored((0..40).step_by(2), D)]);
    assert_eq!(index.prefix_blocks((0..40).step_by(2)), 20);
    index.0.store.check();
}

#[test]
fn tombstone_page_stays_while_siblings_exist() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(
        1,
        vec![stored(0..8, D), stored_alone(sibling_block(3)), stored_alone(sibling_block(4))],
    );
    assert_eq!(index.counts(), (1 + 2, 3, 3));
    index.announce_next(1, vec![dropped(0..8, D)]);
    assert_eq!(index.counts(), (1 + 2, 3, 3), "the tombstone page belongs to no run");
    assert!(index.is_held(sibling_block(3)) && index.is_held(sibling_block(4)) && !index.is_held(block(3)));
    // The next page of the group reuses it.
    index.announce_next(1, vec![after(block(2), blocks(3..8))]);
    assert_eq!(index.counts(), (1 + 2, 3, 3));
    assert!(index.is_held(block(3)) && index.is_held(sibling_block(3)));
    // It is released with the last of the other pages.
    index.announce_next(1, vec![dropped(3..8, D), dropped_block(sibling_block(3))]);
    assert_eq!(index.counts(), (1 + 1, 2, 3));
    index.announce_next(1, vec![dropped_block(sibling_block(4))]);
    assert_eq!(index.counts(), (0, 0, 0));
}

#[test]
fn block_is_never_listed_twice() {
    // The same block behind another one, with and without a canonical page that has siblings.
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored(0..8, D), after(block(3), vec![sibling_block(4), sibling_block(5)])]);
    let counts = index.counts();
    index.announce_next(2, vec![stored(0..4, D), after(block(3), vec![sibling_block(4), sibling_block(5)])]);
    index.announce_next(
        2,
        vec![after(block(3), blocks(4..8)), stored_alone(sibling_block(5)), stored_alone(block(6))],
    );
    assert_eq!(index.counts(), counts);
    // Block 6 now follows another block, in the other page; it comes back only there.
    index.announce_next(1, vec![dropped([6, 7], D)]);
    index.announce_next(2, vec![dropped([6, 7], D), after(sibling_block(5), vec![block(6)])]);
    index.announce_next(1, vec![after(block(5), vec![block(6)])]);
    index.0.store.check();
    assert_eq!(index.0.holders_of(block(6)).len(), 2);
    assert_eq!(index.0.stats().blocks, 9);
}

#[test]
fn branches_inside_a_group_cost_one_entry_per_block() {
    const PROMPTS: u64 = 100_000;
    const OWN: u64 = 13;
    let mut index = Fixture::with_nodes(1);
    // A system prompt of 21 blocks; each prompt continues with three more in its last group, and
    // ten in others.
    index.announce_next(1, vec![stored(0..21, D)]);
    let prompt = |number: u64| -> Vec<BlockHash> {
        let first = 1_000 + number * OWN;
        let name = |nth: u64| {
            let octet = match nth {
                0..3 => block(16),
                _ => raw_block(first + 3 + ((nth - 3) & !7)),
            };
            raw_block(first + nth).in_chain(7, octet, 21 + nth as usize)
        };
        (0..OWN).map(name).collect()
    };
    for prompts in (0..PROMPTS).collect::<Vec<_>>().chunks(1_000) {
        index.announce_next(1, prompts.iter().map(|number| after(block(20), prompt(*number))).collect());
    }
    let store = &index.0.store;
    // The first prompt continued the run and the page of the system prompt.
    assert_eq!(store.locations.entries(), 3 + PROMPTS * (3 + 2) - 3);
    assert_eq!((u64::from(store.pages.used()), store.locations.overflow()), (3 + PROMPTS * 3 - 1, 0));
    let whole = |number: u64| [blocks(0..21), prompt(number)].concat();
    for number in (0..PROMPTS).step_by(997) {
        assert_eq!(index.0.longest_prefix(&whole(number)).union_blocks(), 34);
    }
    assert_eq!(index.0.longest_prefix(&whole(PROMPTS)).union_blocks(), 21);
    // The system prompt is dropped and all continuations stay; then all are dropped.
    index.announce_next(
        1,
        vec![
            Change::Dropped { blocks: prompt(0), tier: D, cause: Default::default() },
            dropped((0..21).rev(), D),
        ],
    );
    assert!(index.is_held(prompt(7)[0]) && index.is_held(prompt(PROMPTS - 1)[12]));
    for prompts in (0..PROMPTS).collect::<Vec<_>>().chunks(1_000) {
        index.announce_next(
            1,
            prompts.iter().flat_map(|number| prompt(*number)).rev().map(dropped_block).collect(),
        );
    }
    assert_eq!(index.counts(), (0, 0, 0));
}

#[test]
fn many_pages_of_one_group_cost_no_extra_memory() {
    const PAGES: u64 = 100_000;
    // All in one group and at one index, as an attacker could craft them.
    let chosen = |number: u64| raw_block(number).in_chain(7, block(0), 5);
    let spread = |number: u64| raw_block(number << 20 | 5);
    let buckets = |name: &dyn Fn(u64) -> BlockHash| {
        let mut index = Fixture::with_nodes(1);
        for numbers in (0..PAGES).collect::<Vec<_>>().chunks(1_000) {
            index.announce_next(1, numbers.iter().map(|number| stored_alone(name(*number))).collect());
        }
        assert!((0..PAGES).all(|number| index.is_held(name(number))));
        assert!(!index.is_held(name(PAGES)));
        let store = &index.0.store;
        assert_eq!((store.locations.entries(), u64::from(store.pages.used())), (PAGES, PAGES));
        assert_eq!(store.locations.overflow(), 0);
        let buckets = store.locations.buckets();
        for numbers in (0..PAGES).collect::<Vec<_>>().chunks(1_000) {
            index.announce_next(1, numbers.iter().map(|number| dropped_block(name(*number))).collect());
        }
        assert_eq!(index.counts(), (0, 0, 0));
        buckets
    };
    assert!(buckets(&chosen) <= buckets(&spread) * 5 / 4);
}
