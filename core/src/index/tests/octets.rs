//! Octets: eight blocks are found by one entry, and whatever shares an octet is kept apart, at a bounded cost.
//!
//! Random lives (`determinism.rs`) meet all of this in small; here are the cases by name, and the large ones.

use super::*;

const D: Tier = Tier::Dram;

fn after(parent: BlockHash, blocks: Vec<BlockHash>) -> Change {
    Change::Stored { parent: Some(parent), blocks, tier: D }
}

fn alone(block: BlockHash) -> Change {
    Change::Stored { parent: None, blocks: vec![block], tier: D }
}

fn gone(block: BlockHash) -> Change {
    Change::Dropped { blocks: vec![block], tier: D, cause: Default::default() }
}

impl Fixture {
    /// Entries of the table, pages in use, and runs: what they are when all is well is said beside.
    fn counts(&self) -> (u64, u32, u32) {
        self.0.store.check();
        (self.0.store.places.entries(), self.0.store.pages.used(), self.0.store.runs.used())
    }

    fn is_held(&self, hash: BlockHash) -> bool {
        !self.0.holders_of(hash).is_empty()
    }
}

#[test]
fn eight_blocks_have_one_entry() {
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored(0..16, D)]);
    assert_eq!(index.counts(), (2, 2, 1));
    // Another node with the same blocks, and in pieces, adds none.
    index.say(2, vec![stored(0..3, D), after(block(2), blocks(3..13))]);
    assert_eq!(index.counts(), (2, 2, 1));
    index.say(1, vec![dropped((0..16).rev(), D)]);
    assert_eq!(index.counts(), (2, 2, 1));
    index.say(2, vec![dropped((8..13).rev(), D)]);
    assert_eq!(index.counts(), (1, 1, 1));
    index.say(2, vec![dropped(0..8, D)]);
    assert_eq!(index.counts(), (0, 0, 0));
}

#[test]
fn a_run_may_begin_in_the_middle_of_an_octet_and_goes_on_into_the_next() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored(5..20, D)]);
    assert_eq!(index.counts(), (3, 3, 1));
    assert_eq!(index.runs(5..20), [(0, 15, vec![(1, D)])]);
    // What is before comes later: the same octet, another run, so another page with entries of its own.
    index.say(1, vec![stored(0..5, D)]);
    assert_eq!(index.counts(), (3 + 5, 4, 2));
    assert_eq!(index.runs(0..20), [(0, 20, vec![(1, D)])]);
}

#[test]
fn hashes_of_no_layout_get_runs_of_their_own_and_are_all_found() {
    let mut index = Fixture::with_nodes(1);
    let hashes: Vec<BlockHash> = (0..100).map(loose).collect();
    index.say(1, vec![Change::Stored { parent: None, blocks: hashes.clone(), tier: D }]);
    let (entries, pages, runs) = index.counts();
    assert!((entries, pages) == (100, 100) && runs > 90, "{entries} entries, {pages} pages, {runs} runs");
    assert_eq!(index.0.longest_prefix(&hashes).union_blocks(), 100);
    // Neither does a chain of ours without every second block follow from block to block.
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored((0..40).step_by(2), D)]);
    assert_eq!(index.reach((0..40).step_by(2)), 20);
    index.0.store.check();
}

#[test]
fn an_anchor_without_blocks_stays_while_others_need_it() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored(0..8, D), alone(twin(3)), alone(twin(4))]);
    assert_eq!(index.counts(), (1 + 2, 3, 3));
    index.say(1, vec![dropped(0..8, D)]);
    assert_eq!(index.counts(), (1 + 2, 3, 3), "a page of no run");
    assert!(index.is_held(twin(3)) && index.is_held(twin(4)) && !index.is_held(block(3)));
    // The next page with the octet is made of it.
    index.say(1, vec![after(block(2), blocks(3..8))]);
    assert_eq!(index.counts(), (1 + 2, 3, 3));
    assert!(index.is_held(block(3)) && index.is_held(twin(3)));
    // The last of the others takes it along.
    index.say(1, vec![dropped(3..8, D), gone(twin(3))]);
    assert_eq!(index.counts(), (1 + 1, 2, 3));
    index.say(1, vec![gone(twin(4))]);
    assert_eq!(index.counts(), (0, 0, 0));
}

#[test]
fn a_block_that_is_listed_elsewhere_is_not_listed_twice() {
    // The same block behind another one, with and without an anchor that has others.
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored(0..8, D), after(block(3), vec![twin(4), twin(5)])]);
    let counts = index.counts();
    index.say(2, vec![stored(0..4, D), after(block(3), vec![twin(4), twin(5)])]);
    index.say(2, vec![after(block(3), blocks(4..8)), alone(twin(5)), alone(block(6))]);
    assert_eq!(index.counts(), counts);
    // Block 6 is behind another one now, in the page of the other; and comes back there only.
    index.say(1, vec![dropped([6, 7], D)]);
    index.say(2, vec![dropped([6, 7], D), after(twin(5), vec![block(6)])]);
    index.say(1, vec![after(block(5), vec![block(6)])]);
    index.0.store.check();
    assert_eq!(index.0.holders_of(block(6)).len(), 2);
    assert_eq!(index.0.stats().blocks, 9);
}

#[test]
fn many_prompts_that_go_off_in_the_middle_of_an_octet_cost_an_entry_a_block() {
    const PROMPTS: u64 = 100_000;
    const OWN: u64 = 13;
    let mut index = Fixture::with_nodes(1);
    // A system prompt of 21 blocks; each prompt goes on with three more in its last octet, and ten in others.
    index.say(1, vec![stored(0..21, D)]);
    let prompt = |number: u64| -> Vec<BlockHash> {
        let first = 1_000 + number * OWN;
        let name = |nth: u64| {
            let octet = match nth {
                0..3 => block(16),
                _ => loose(first + 3 + ((nth - 3) & !7)),
            };
            loose(first + nth).in_chain(7, octet, 21 + nth as usize)
        };
        (0..OWN).map(name).collect()
    };
    for prompts in (0..PROMPTS).collect::<Vec<_>>().chunks(1_000) {
        index.say(1, prompts.iter().map(|number| after(block(20), prompt(*number))).collect());
    }
    let store = &index.0.store;
    // The first of them went on in the run of the system prompt, and in its page.
    assert_eq!(store.places.entries(), 3 + PROMPTS * (3 + 2) - 3);
    assert_eq!((u64::from(store.pages.used()), store.places.strays()), (3 + PROMPTS * 3 - 1, 0));
    let whole = |number: u64| [blocks(0..21), prompt(number)].concat();
    for number in (0..PROMPTS).step_by(997) {
        assert_eq!(index.0.longest_prefix(&whole(number)).union_blocks(), 34);
    }
    assert_eq!(index.0.longest_prefix(&whole(PROMPTS)).union_blocks(), 21);
    // The system prompt goes, and all that follows stays; then all goes.
    index.say(
        1,
        vec![
            Change::Dropped { blocks: prompt(0), tier: D, cause: Default::default() },
            dropped((0..21).rev(), D),
        ],
    );
    assert!(index.is_held(prompt(7)[0]) && index.is_held(prompt(PROMPTS - 1)[12]));
    for prompts in (0..PROMPTS).collect::<Vec<_>>().chunks(1_000) {
        index.say(1, prompts.iter().flat_map(|number| prompt(*number)).rev().map(gone).collect());
    }
    assert_eq!(index.counts(), (0, 0, 0));
}

#[test]
fn a_hundred_thousand_pages_of_one_octet_cost_what_other_blocks_cost() {
    const PAGES: u64 = 100_000;
    // All of one octet and one position, as somebody may choose them who makes hashes by other means.
    let chosen = |number: u64| loose(number).in_chain(7, block(0), 5);
    let spread = |number: u64| loose(number << 20 | 5);
    let buckets = |name: &dyn Fn(u64) -> BlockHash| {
        let mut index = Fixture::with_nodes(1);
        for numbers in (0..PAGES).collect::<Vec<_>>().chunks(1_000) {
            index.say(1, numbers.iter().map(|number| alone(name(*number))).collect());
        }
        assert!((0..PAGES).all(|number| index.is_held(name(number))));
        assert!(!index.is_held(name(PAGES)));
        let store = &index.0.store;
        assert_eq!((store.places.entries(), u64::from(store.pages.used())), (PAGES, PAGES));
        assert_eq!(store.places.strays(), 0);
        let buckets = store.places.buckets();
        for numbers in (0..PAGES).collect::<Vec<_>>().chunks(1_000) {
            index.say(1, numbers.iter().map(|number| gone(name(*number))).collect());
        }
        assert_eq!(index.counts(), (0, 0, 0));
        buckets
    };
    assert!(buckets(&chosen) <= buckets(&spread) * 5 / 4);
}
