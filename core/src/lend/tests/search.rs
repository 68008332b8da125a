//! Every order in which a loan can begin, be read and end, breadth first: what comes out is that the rules hold in every state
//! there is, or the shortest story of how they break.
//!
//! States are told apart by 128 bits of a hash of all they are. Numbers of loans and operations are made small again
//! after each step (their order is all that counts), so that the states are finitely many and the search has
//! seen executions of every length. Not here: what can happen (`world`).

use std::collections::BTreeMap;
use std::hash::Hasher;

use xxhash_rust::xxh3::xxh3_128;

use super::world::{Action, Bounds, Rules, World};

/// States beyond which a search is not exhaustive any more in the time a test may take.
const STATES_MAX: usize = 500_000;

/// Two clients that share a slot, each with one block at most and one message each way. A node that dies leaves them nothing
/// to share: that is for one client to see.
const TWO: Bounds = Bounds {
    slots: 1,
    clients: 2,
    queue: 1,
    operations: 1,
    loans: 1,
    node_dies: false,
    by_card: false,
    epochs: 0,
};

/// One client with two blocks, two operations and two messages each way.
const ONE: Bounds = Bounds {
    slots: 2,
    clients: 1,
    queue: 2,
    operations: 2,
    loans: 2,
    node_dies: true,
    by_card: false,
    epochs: 0,
};

/// The same two whose cards read for them. An epoch that ends concerns each of them alone: that is for one client to see.
const TWO_CARDS: Bounds = Bounds { by_card: true, ..TWO };

/// One client with a card, two blocks and two operations, while the node is given another epoch.
const ONE_CARD: Bounds = Bounds { queue: 1, node_dies: false, by_card: true, epochs: 1, ..ONE };

/// Keeps what a value feeds to its hasher.
#[derive(Default)]
pub(super) struct Recorder(Vec<u8>);

impl Hasher for Recorder {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(&self) -> u64 {
        0
    }
}

fn identity(world: &World) -> u128 {
    world.identity(|feed| {
        let mut recorder = Recorder::default();
        feed(&mut recorder);
        xxh3_128(&recorder.0)
    })
}

/// How a state was reached, and what is wrong with it.
struct Broken {
    story: Vec<Action>,
    what: &'static str,
}

/// How many states there are, or what is wrong with one of them.
fn search(rules: Rules, bounds: Bounds) -> Result<usize, Broken> {
    let first = World::new(bounds);
    let start = identity(&first);
    let mut seen: BTreeMap<u128, Option<(u128, Action)>> = BTreeMap::from([(start, None)]);
    let mut layer = vec![(start, first)];
    while !layer.is_empty() {
        let mut next_layer = Vec::new();
        for (id, world) in &layer {
            let broken = world.judge().and_then(|()| world.clone().drain(rules));
            if let Err(what) = broken {
                return Err(Broken { story: story(&seen, *id), what });
            }
            for action in world.actions(rules, bounds) {
                let mut next = world.clone();
                next.apply(action, rules);
                next.renumber(action);
                let next_id = identity(&next);
                seen.entry(next_id).or_insert_with(|| {
                    next_layer.push((next_id, next));
                    Some((*id, action))
                });
            }
        }
        assert!(seen.len() <= STATES_MAX, "{} states and no end of {bounds:?}", seen.len());
        layer = next_layer;
    }
    Ok(seen.len())
}

fn story(seen: &BTreeMap<u128, Option<(u128, Action)>>, last: u128) -> Vec<Action> {
    let mut story: Vec<Action> =
        std::iter::successors(seen[&last], |(from, _)| seen[from]).map(|(_, action)| action).collect();
    story.reverse();
    story
}

fn holds_in(bounds: Bounds) {
    match search(Rules::Kept, bounds) {
        Ok(states) => eprintln!("{states} states of {bounds:?}"),
        Err(Broken { story, what }) => panic!("{what}, after {story:#?}"),
    }
}

#[test]
fn no_order_of_events_shows_a_reader_another_block_or_keeps_a_loan() {
    [ONE, TWO].into_iter().for_each(holds_in);
}

/// The same where the node ends loans: by the end of an epoch, of a lease or of a connection.
#[test]
fn no_order_of_events_has_a_card_read_another_block_or_what_it_saw_too_late_count() {
    [ONE_CARD, TWO_CARDS].into_iter().for_each(holds_in);
}

/// A search that finds nothing wrong where something is would show nothing above.
#[test]
fn rules_that_are_broken_are_refuted() {
    let reads_another = "a client reads another block than the one it asked for";
    let card_reads_another = "a card reads another block than the one that was lent";
    let late = "what was read behind the end of its epoch is handed on";
    let expected = [
        (Rules::FreeAtRelease, ONE, reads_another),
        (Rules::FreeAtCancel, ONE, reads_another),
        (Rules::ReturnBeforeTheReadEnds, ONE, reads_another),
        (Rules::EndBeforeTheReaderStopped, ONE, reads_another),
        (Rules::FreeAtClose, ONE, reads_another),
        (Rules::ReleaseAtOnce, ONE, "the book has no lease of what is lent"),
        (Rules::NumbersAgain, ONE, "the row of a node that keeps to the rules is refused"),
        (Rules::KeepUnwanted, ONE, "a loan is not given back by a client that reads nothing any more"),
        (Rules::FreeAtRelease, ONE_CARD, card_reads_another),
        (Rules::FreeAtCancel, ONE_CARD, card_reads_another),
        (Rules::ReturnBeforeTheReadEnds, ONE_CARD, card_reads_another),
        // Its queue pair may still be read over.
        (Rules::FreeAtClose, ONE_CARD, card_reads_another),
        (Rules::VouchBeforeTheReadEnds, ONE_CARD, late),
        (Rules::ShowAtTheNextAnswer, ONE_CARD, late),
    ];
    for (rules, bounds, expected) in expected {
        let Err(Broken { story, what }) = search(rules, bounds) else { panic!("{rules:?} is not refuted") };
        eprintln!("{rules:?}: {what}, after {story:?}");
        assert_eq!(what, expected, "{rules:?} after {story:#?}");
    }
}
