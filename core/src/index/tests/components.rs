//! Hybrid models: the blocks that a node needs to resume a prompt.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::random::{BLOCKS, Honesty, intents, request, tight};
use super::reference::ReferenceIndex;
use super::*;

fn component(need: Need, hashes: &[BlockHash]) -> Component<'_> {
    Component { need, hashes }
}

#[test]
fn each_need_has_its_own_rule() {
    // Node 1 holds blocks 0, 1, 2, 5, 6 of eight.
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(0..8, Tier::Dram), dropped([3, 4, 7], Tier::Dram)]);
    let hashes = blocks(0..8);
    let reach = |need| index.0.resumable(&[component(need, &hashes)]);
    let one = |blocks| vec![(NodeId(1), blocks)];
    assert_eq!(reach(Need::Whole), one(3));
    assert_eq!(reach(Need::Window { blocks: 2 }), one(7));
    assert_eq!(reach(Need::Window { blocks: 3 }), one(3), "two blocks do not satisfy a window of three");
    assert_eq!(reach(Need::Window { blocks: 0 }), one(7));
    assert_eq!(
        reach(Need::Window { blocks: 100 }),
        one(3),
        "a window longer than the prompt needs the whole prompt"
    );
    assert_eq!(reach(Need::Last), one(7));
}

#[test]
fn prefix_needs_every_component() {
    let mut index = Fixture::with_nodes(2);
    let (full, state) = (blocks(0..10), blocks(100..110));
    index.announce_next(1, vec![stored(0..10, Tier::Dram), stored([103, 107], Tier::Ssd)]);
    index.announce_next(2, vec![stored(0..6, Tier::Dram), stored([109], Tier::Dram)]);
    let both = [component(Need::Whole, &full), component(Need::Last, &state)];
    assert_eq!(index.0.resumable(&both), [(NodeId(1), 8)], "node 2 has no state within its prefix");
    let shorter = [component(Need::Whole, &full[..5]), component(Need::Last, &state)];
    assert_eq!(index.0.resumable(&shorter), [(NodeId(1), 4)]);
    assert_eq!(index.0.resumable(&[]), []);
    assert_eq!(index.0.resumable(&[component(Need::Whole, &[])]), []);
}

#[test]
fn fenced_nodes_cannot_resume() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(0..4, Tier::Dram)]);
    index.0.apply(&fence(1, 1));
    assert_eq!(index.0.resumable(&[component(Need::Last, &blocks(0..4))]), []);
}

fn need() -> impl Strategy<Value = Need> {
    prop_oneof![Just(Need::Whole), (0..6u32).prop_map(|blocks| Need::Window { blocks }), Just(Need::Last)]
}

/// The rules, written out block by block.
fn serves(need: Need, held: &dyn Fn(usize) -> bool, blocks: usize) -> bool {
    let from = match need {
        Need::Whole => 0,
        Need::Window { blocks: window } => blocks.saturating_sub(window.max(1) as usize),
        Need::Last => blocks - 1,
    };
    (from..blocks).all(held)
}

proptest! {
    /// After any history, each node resumes exactly as far as the rules say.
    #[test]
    fn resumable_matches_the_rules(
        intents in intents(Honesty::Honest),
        prompts in prop::collection::vec((need(), request()), 1..4),
    ) {
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        for intent in intents {
            let command = intent.command(&reference);
            reference.apply(&command);
            index.apply(&command);
        }
        let components: Vec<_> = prompts.iter().map(|(need, hashes)| component(*need, hashes)).collect();
        let most = prompts.iter().map(|(_, hashes)| hashes.len()).min().unwrap();
        let mut expected = BTreeMap::new();
        for (id, node) in &reference.nodes {
            let all_serve = |blocks: &usize| prompts.iter().all(|(need, hashes)| {
                serves(*need, &|block| node.blocks.contains_key(&hashes[block]), *blocks)
            });
            expected.extend((1..=most).rev().find(all_serve).map(|blocks| (NodeId(*id), blocks as u32)));
        }
        prop_assert!(most as u64 <= BLOCKS);
        prop_assert_eq!(index.resumable(&components), expected.into_iter().collect::<Vec<_>>());
    }
}
