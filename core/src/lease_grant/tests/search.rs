//! Exhaustive breadth-first search over all orders of the events of a grant. Either the invariants
//! hold in every reachable state, or the result is a shortest trace to a violation.
//!
//! States are identified by a 128-bit hash of their contents. Ids of grants and operations are
//! renumbered after each step, since only their order matters. So the number of states is finite,
//! and the search covers executions of every length. Not here: the possible events (`world`).

use std::collections::BTreeMap;
use std::hash::Hasher;

use xxhash_rust::xxh3::xxh3_128;

use super::world::{DriverRules, GrantWorld, SearchBounds, WorldEvent};

/// Number of states beyond which a search is no longer exhaustive within the time of a test.
const STATES_MAX: usize = 500_000;

/// Two clients that share a slot, each with at most one block and one message each way. After the
/// death of a node they share no state, so `ONE` covers that.
const TWO: SearchBounds = SearchBounds {
    slots: 1,
    clients: 2,
    queue: 1,
    operations: 1,
    grants: 1,
    node_dies: false,
    by_nic: false,
    epochs: 0,
};

/// One client with two blocks, two operations and two messages each way.
const ONE: SearchBounds = SearchBounds {
    slots: 2,
    clients: 1,
    queue: 2,
    operations: 2,
    grants: 2,
    node_dies: true,
    by_nic: false,
    epochs: 0,
};

/// The same two clients with reads by their RDMA NICs. An epoch change concerns each client alone,
/// so `ONE_NIC` covers it.
const TWO_NICS: SearchBounds = SearchBounds { by_nic: true, ..TWO };

/// One client with an RDMA NIC, two blocks and two operations, while the node gets another epoch.
const ONE_NIC: SearchBounds = SearchBounds { queue: 1, node_dies: false, by_nic: true, epochs: 1, ..ONE };

/// Records the bytes that a value feeds to its hasher.
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

fn identity(world: &GrantWorld) -> u128 {
    world.identity(|feed| {
        let mut recorder = Recorder::default();
        feed(&mut recorder);
        xxh3_128(&recorder.0)
    })
}

/// The trace to a state, and the violation there.
struct Violation {
    trace: Vec<WorldEvent>,
    violation: &'static str,
}

/// The number of states, or the first violation.
fn search(rules: DriverRules, bounds: SearchBounds) -> Result<usize, Violation> {
    let first = GrantWorld::new(bounds);
    let start = identity(&first);
    let mut seen: BTreeMap<u128, Option<(u128, WorldEvent)>> = BTreeMap::from([(start, None)]);
    let mut layer = vec![(start, first)];
    while !layer.is_empty() {
        let mut next_layer = Vec::new();
        for (id, world) in &layer {
            let broken = world.check_invariants().and_then(|()| world.clone().drain(rules));
            if let Err(what) = broken {
                return Err(Violation { trace: trace(&seen, *id), violation: what });
            }
            for action in world.events(rules, bounds) {
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

fn trace(seen: &BTreeMap<u128, Option<(u128, WorldEvent)>>, last: u128) -> Vec<WorldEvent> {
    let mut story: Vec<WorldEvent> =
        std::iter::successors(seen[&last], |(from, _)| seen[from]).map(|(_, action)| action).collect();
    story.reverse();
    story
}

fn assert_holds(bounds: SearchBounds) {
    match search(DriverRules::Correct, bounds) {
        Ok(states) => eprintln!("{states} states of {bounds:?}"),
        Err(Violation { trace: story, violation: what }) => panic!("{what}, after {story:#?}"),
    }
}

#[test]
fn no_event_order_breaks_a_read_or_leaks_a_grant() {
    [ONE, TWO].into_iter().for_each(assert_holds);
}

/// Same, if the node itself ends grants: at the end of an epoch, a lease or a connection.
#[test]
fn no_event_order_breaks_a_nic_read_or_delivers_a_late_one() {
    [ONE_NIC, TWO_NICS].into_iter().for_each(assert_holds);
}

/// A search that misses known violations would prove little.
#[test]
fn broken_rules_are_refuted() {
    let reads_another = "a client reads another block than the one it asked for";
    let card_reads_another = "a NIC reads another block than the granted one";
    let late = "bytes read after the end of their epoch are delivered";
    let expected = [
        (DriverRules::FreeAtRelease, ONE, reads_another),
        (DriverRules::FreeAtCancel, ONE, reads_another),
        (DriverRules::ReturnBeforeReadEnds, ONE, reads_another),
        (DriverRules::CloseBeforeReadEnds, ONE, reads_another),
        (DriverRules::FreeAtClose, ONE, reads_another),
        (DriverRules::ReleaseAtOnce, ONE, "the book has no lease for granted blocks"),
        (DriverRules::ReuseIds, ONE, "a valid descriptor is rejected"),
        (DriverRules::KeepUnwantedGrants, ONE, "a client without readers does not return a grant"),
        (DriverRules::FreeAtRelease, ONE_NIC, card_reads_another),
        (DriverRules::FreeAtCancel, ONE_NIC, card_reads_another),
        (DriverRules::ReturnBeforeReadEnds, ONE_NIC, card_reads_another),
        // Reads over its queue pair are still possible.
        (DriverRules::FreeAtClose, ONE_NIC, card_reads_another),
        (DriverRules::CheckEpochBeforeRead, ONE_NIC, late),
        (DriverRules::DelayEpochWord, ONE_NIC, late),
    ];
    for (rules, bounds, expected) in expected {
        let Err(Violation { trace: story, violation: what }) = search(rules, bounds) else {
            panic!("{rules:?} is not refuted")
        };
        eprintln!("{rules:?}: {what}, after {story:?}");
        assert_eq!(what, expected, "{rules:?} after {story:#?}");
    }
}
