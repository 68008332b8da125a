//! Blocks are priced by what was measured of their tier over the path that the instance takes, and a decision says so.

use std::sync::Arc;

use proptest::prelude::*;

use super::properties::{alone, prefixes, requests};
use super::*;

const DRAM: Tier = Tier::Dram;
const SSD: Tier = Tier::Ssd;

/// 10 µs a token, less than a tenth of computing it.
const FAST: Lane = Lane { latency_ns: 20_000, bytes_per_s: 100_000_000 };
/// 200 µs a token, twice the time of computing it.
const SLOW: Lane = Lane { latency_ns: 20_000, bytes_per_s: 5_000_000 };

fn measured(all: &[(LinkPath, Option<Tier>, Lane)]) -> Option<Arc<LinkLanes>> {
    let with = |lanes: LinkLanes, &(path, tier, lane): &(LinkPath, Option<Tier>, Lane)| {
        lanes.with(LinkKey { path: Some(path), tier }, lane)
    };
    Some(Arc::new(all.iter().fold(LinkLanes::default(), with)))
}

/// One instance without a node, that takes these paths, and nodes of which this was measured.
fn one(taken: &[(NodeId, LinkPath)], nodes: &[Option<Arc<LinkLanes>>]) -> Fleet {
    let mut fleet = Fleet::new(ROUND);
    fleet.put_instance(Instance { node: None, ..instance(1) });
    fleet.set_paths(InstanceId(1), taken);
    let live = |(node, afar): (u32, &Option<Arc<LinkLanes>>)| LiveNode { afar: afar.clone(), ..live(node) };
    fleet.set_nodes((1..).zip(nodes).map(live).collect());
    fleet
}

fn prices(decision: &Decision) -> Vec<String> {
    let priced = decision.reasons.iter().filter(|reason| matches!(reason, Reason::Priced { .. }));
    priced.map(ToString::to_string).collect()
}

#[test]
fn a_slow_tier_over_the_path_that_is_taken_is_not_chosen_against_a_fast_one() {
    use LinkPath::{Quic, Tcp};
    // Node 1 has it in DRAM and is slow over TCP; node 2 has it on SSD and is slow over QUIC.
    let nodes = [
        measured(&[(Tcp, Some(DRAM), SLOW), (Quic, Some(DRAM), FAST)]),
        measured(&[(Tcp, Some(SSD), FAST), (Quic, Some(SSD), SLOW)]),
    ];
    let both = prefix(&[(4, &[(1, DRAM), (2, SSD)])]);
    let by = |path| chosen(&request(4), &both, &one(&[(NodeId(1), path), (NodeId(2), path)], &nodes));
    let decision = by(Tcp);
    assert_eq!((sources(&decision), decision.predicted.transfer_us), (vec![(2, 0, 4)], 20 + 40 * 10));
    let expected = [
        "ssd of node-2 over tcp at 100000000 B/s after 20 us, as measured of that tier over that path: taken",
        "dram of node-1 over tcp at 5000000 B/s after 20 us, as measured of that tier over that path: passed over",
    ];
    assert_eq!(prices(&decision), expected);
    let decision = by(Quic);
    assert_eq!((sources(&decision), decision.predicted.transfer_us), (vec![(1, 0, 4)], 20 + 40 * 10));
    assert!(prices(&decision)[1].starts_with("ssd of node-2 over quic at 5000000 B/s"), "{decision:?}");
    // Where only the slow one has it, it is computed, and the decision says why.
    let decision = chosen(&request(4), &prefix(&[(4, &[(1, DRAM)])]), &one(&[(NodeId(1), Tcp)], &nodes));
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks), (0, 4));
    assert!(decision.reasons.contains(&Reason::RecomputeCheaper { blocks: 4 }), "{:?}", decision.reasons);
    assert!(prices(&decision)[0].ends_with("over that path: computed instead"), "{decision:?}");
}

#[test]
fn a_path_is_that_to_the_node_else_the_usual_one_else_none_counts() {
    use LinkPath::{Quic, SharedMemory, Tcp};
    let lanes = [(Tcp, Some(DRAM), SLOW), (Quic, Some(DRAM), FAST), (SharedMemory, Some(DRAM), FAST)];
    let pooled = LinkKey { path: None, tier: Some(DRAM) };
    let middle = Lane { latency_ns: 20_000, bytes_per_s: 50_000_000 };
    let lanes = measured(&lanes).map(|lanes| Arc::new(lanes.with(pooled, middle)));
    let all = prefix(&[(4, &[(1, DRAM)])]);
    let transfer = |taken: &[(u32, LinkPath)]| {
        let taken: Vec<_> = taken.iter().map(|&(node, path)| (NodeId(node), path)).collect();
        let decision = chosen(&request(4), &all, &one(&taken, &[lanes.clone(), None, None]));
        (decision.fetch_blocks, decision.predicted.transfer_us)
    };
    assert_eq!(transfer(&[]), (4, 20 + 40 * 20), "of nobody is told which it takes");
    assert_eq!(transfer(&[(2, Quic), (3, Quic)]), (4, 420), "as to the others");
    assert_eq!(transfer(&[(2, Tcp), (3, Tcp)]), (0, 0));
    assert_eq!(transfer(&[(1, Quic), (2, Tcp), (3, Tcp)]), (4, 420), "another one than to the others");
    assert_eq!(transfer(&[(2, Tcp), (3, Quic)]), (0, 0), "of equally many the later kind");
    assert_eq!(transfer(&[(2, SharedMemory), (3, SharedMemory)]), (4, 820), "says nothing of other hosts");
    // By memory of the host there is no network between, measured or not.
    assert_eq!(transfer(&[(1, SharedMemory), (2, Tcp)]), (4, 420));
}

#[test]
fn the_own_node_is_priced_by_what_those_measured_whose_own_it_is() {
    let mut fleet = fleet(1);
    let near = measured(&[(LinkPath::Quic, Some(SSD), SLOW)]);
    fleet.set_nodes(vec![LiveNode { near: near.clone(), ..live(1) }]);
    let matched = prefix(&[(4, &[(1, SSD)])]);
    let transfer = |fleet: &Fleet| chosen(&request(4), &matched, fleet).predicted.transfer_us;
    assert_eq!(transfer(&fleet), 100 + 40 * 50, "by the profile: nobody knows which path it takes");
    fleet.set_paths(InstanceId(1), &[(NodeId(1), LinkPath::Quic)]);
    assert_eq!(transfer(&fleet), 0, "computed sooner");
    fleet.set_nodes(vec![LiveNode { afar: near, ..live(1) }]);
    assert_eq!(transfer(&fleet), 2_100, "what others measured says nothing of it");
}

#[test]
fn the_own_node_is_passed_over_where_it_was_measured_to_be_slower_than_another() {
    use LinkPath::Quic;
    let middle = Lane { latency_ns: 20_000, bytes_per_s: 20_000_000 };
    let both = prefix(&[(4, &[(1, DRAM), (2, DRAM)])]);
    let plan_by = |tier: Option<Tier>, near: Option<Lane>, afar: Option<Lane>| {
        let mut fleet = fleet(1);
        let of = |tier, lane: Option<Lane>| lane.and_then(|lane| measured(&[(Quic, tier, lane)]));
        let nodes = vec![
            LiveNode { near: of(tier, near), ..live(1) },
            LiveNode { afar: of(Some(DRAM), afar), ..live(2) },
        ];
        fleet.set_nodes(nodes);
        fleet.set_paths(InstanceId(1), &[(NodeId(1), Quic), (NodeId(2), Quic)]);
        let decision = chosen(&request(4), &both, &fleet);
        (sources(&decision), decision.predicted.transfer_us)
    };
    let plan = |near, afar| plan_by(Some(DRAM), near, afar);
    assert_eq!(plan(Some(middle), Some(FAST)), (vec![(2, 0, 4)], 20 + 40 * 10));
    assert_eq!(plan(Some(SLOW), Some(FAST)), (vec![(2, 0, 4)], 20 + 40 * 10), "it would have been computed");
    assert_eq!(plan(Some(SLOW), Some(SLOW)), (vec![], 0), "computed sooner than either");
    assert_eq!(plan(Some(FAST), Some(FAST)), (vec![(1, 0, 4)], 420), "it spares the network");
    // About as fast as the other is no reason to leave, one way or the other.
    let tenths = |tenths: u64| Lane { bytes_per_s: middle.bytes_per_s * tenths / 10, ..middle };
    assert_eq!(plan(Some(middle), Some(tenths(12))).0, [(1, 0, 4)]);
    assert_eq!(plan(Some(middle), Some(tenths(13))).0, [(2, 0, 4)]);
    // Nor is a price of which the medium is the profile's.
    assert_eq!(plan_by(None, Some(middle), Some(FAST)).0, [(1, 0, 4)]);
    // What the profile says of either does not outweigh that.
    assert_eq!(plan(Some(middle), None), (vec![(1, 0, 4)], 20 + 40 * 50));
    assert_eq!(plan(None, Some(FAST)), (vec![(1, 0, 4)], 10 + 40 * 10));
}

#[test]
fn paths_end_with_their_instance_and_are_replaced_whole() {
    let mut fleet = fleet(3);
    fleet.set_paths(InstanceId(2), &[(NodeId(1), LinkPath::Tcp)]);
    fleet.put_instance(Instance { node: None, ..instance(2) });
    let usual = |fleet: &Fleet| -> Vec<_> {
        fleet.instances_with_paths().map(|(instance, paths)| (instance.id.0, paths.usual)).collect()
    };
    let expected = [(1, None), (2, Some(LinkPath::Tcp)), (3, None)];
    assert_eq!(usual(&fleet), expected, "a report changes no path");
    fleet.remove_instance(InstanceId(1));
    assert_eq!(usual(&fleet), expected[1..]);
    fleet.put_instance(instance(1));
    assert_eq!(usual(&fleet), expected);
    fleet.set_paths(InstanceId(9), &[(NodeId(1), LinkPath::Tcp)]);
    fleet.set_paths(InstanceId(2), &[]);
    assert_eq!(usual(&fleet), [(1, None), (2, None), (3, None)]);
}

type Key = (Option<LinkPath>, Option<Tier>);

fn tables() -> impl Strategy<Value = Option<Arc<LinkLanes>>> {
    let path = prop::option::of(prop::sample::select(LinkPath::ALL.to_vec()));
    let tier = prop::option::of(prop::sample::select(Tier::ALL.to_vec()));
    let lane = (0u64..1_000_000, 1_000_000u64..10_000_000_000);
    prop::collection::vec(((path, tier), lane), 0..10).prop_map(|all| {
        let with = |lanes: LinkLanes, ((path, tier), (latency_ns, bytes_per_s)): (Key, (u64, u64))| {
            lanes.with(LinkKey { path, tier }, Lane { latency_ns, bytes_per_s })
        };
        let lanes = all.into_iter().fold(LinkLanes::default(), with);
        (!lanes.is_empty()).then(|| Arc::new(lanes))
    })
}

fn paths() -> impl Strategy<Value = Vec<(NodeId, LinkPath)>> {
    let path = prop::sample::select(LinkPath::ALL.to_vec());
    prop::collection::btree_map(0u32..8, path, 0..8)
        .prop_map(|all| all.into_iter().map(|(node, path)| (NodeId(node), path)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// What is shared by instances that take the same paths is what each is priced at alone; nobody's fetch is planned where
    /// computing is sooner, and reasons say measured prices only.
    #[test]
    fn each_instance_is_priced_by_its_own_paths(
        request in requests(), matched in prefixes(),
        nodes in prop::collection::vec((tables(), tables()), 8),
        instances in prop::collection::vec((prop::option::of(0u32..8), paths()), 1..8),
    ) {
        let mut fleet = Fleet::new(ROUND);
        for (id, (node, taken)) in (0..).zip(&instances) {
            fleet.put_instance(Instance { id: InstanceId(id), node: node.map(NodeId), ..instance(id) });
            fleet.set_paths(InstanceId(id), taken);
        }
        let live = |(node, (afar, near)): (u32, &(_, _))| LiveNode {
            afar: Option::clone(afar), near: Option::clone(near), ..live(node)
        };
        fleet.set_nodes((0..).zip(&nodes).map(live).collect());
        let Ok(together) = choose(&request, &matched, &fleet, NOW) else { return Ok(()) };
        let nothing = choose(&request, &PrefixMatch::default(), &fleet, NOW).unwrap();
        prop_assert!(together.predicted.ttft_us() <= nothing.predicted.ttft_us());
        for (id, (_, taken)) in (0..).zip(&instances) {
            let mut one = alone(&fleet, *fleet.instance(InstanceId(id)).unwrap());
            one.set_paths(InstanceId(id), taken);
            let decision = choose(&request, &matched, &one, NOW).unwrap();
            let candidate = together.candidates.iter().find(|candidate| candidate.instance == InstanceId(id));
            prop_assert_eq!(&decision.candidates[0], candidate.unwrap());
        }
        for reason in &together.reasons {
            let profile_only = matches!(reason, Reason::Priced { price, .. } if price.measure == Measure::Profile);
            prop_assert!(!profile_only, "{reason}");
        }
    }
}

#[test]
fn planners_are_bounded_and_those_beyond_are_priced_by_their_usual_path() {
    use LinkPath::{Quic, Tcp};
    // 32 nodes hold the prefix; each of 32 instances takes QUIC to another one of them, over which it is slow.
    let mut fleet = Fleet::new(ROUND);
    let lanes = measured(&[(Tcp, Some(DRAM), FAST), (Quic, Some(DRAM), SLOW)]);
    fleet.set_nodes((1..=32).map(|node| LiveNode { afar: lanes.clone(), ..live(node) }).collect());
    for id in 1..=32 {
        fleet.put_instance(Instance { id: InstanceId(id), node: None, ..instance(id) });
        let taken = (1..=32).map(|node| (NodeId(node), if node == id { Quic } else { Tcp }));
        fleet.set_paths(InstanceId(id), &taken.collect::<Vec<_>>());
    }
    let runs: Vec<_> = (1..=32).map(|node| (1, vec![(node, DRAM)])).collect();
    let runs: Vec<_> = runs.iter().map(|(len, at)| (*len, at.as_slice())).collect();
    let decision = chosen(&request(32), &prefix(&runs), &fleet);
    let transfer = |id| {
        let candidate = decision.candidates.iter().find(|candidate| candidate.instance == InstanceId(id));
        candidate.unwrap().predicted.transfer_us
    };
    let (usual, with_one_slow) = (32 * (20 + 100), 31 * (20 + 100) + (20 + 2_000));
    // The last block of all is not fetched where its way is slow.
    assert_eq!(
        (transfer(1), transfer(8), transfer(9), transfer(31)),
        (with_one_slow, with_one_slow, usual, usual)
    );
}
