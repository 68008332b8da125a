//! Blocks are priced by measurements of their tier over the instance's path, and the decision
//! reports the price.

use std::sync::Arc;

use proptest::prelude::*;

use super::properties::{alone, prefixes, requests};
use super::*;

const DRAM: Tier = Tier::Dram;
const SSD: Tier = Tier::Ssd;

/// 10 µs a token, a tenth of computing it.
const FAST: PathSpeed = PathSpeed { latency_ns: 20_000, bytes_per_s: 100_000_000 };
/// 200 µs a token, twice the time of computing it.
const SLOW: PathSpeed = PathSpeed { latency_ns: 20_000, bytes_per_s: 5_000_000 };

fn speeds(all: &[(LinkPath, Option<Tier>, PathSpeed)]) -> Option<Arc<LinkSpeeds>> {
    let with = |lanes: LinkSpeeds, &(path, tier, lane): &(LinkPath, Option<Tier>, PathSpeed)| {
        lanes.with_speed(LinkKey { path: Some(path), tier }, lane)
    };
    Some(Arc::new(all.iter().fold(LinkSpeeds::default(), with)))
}

/// One instance without a node that takes these paths, and nodes with these measurements.
fn one(taken: &[(NodeId, LinkPath)], nodes: &[Option<Arc<LinkSpeeds>>]) -> Fleet {
    let mut fleet = Fleet::new(ROUND);
    fleet.put_instance(Instance { node: None, ..instance(1) });
    fleet.set_paths(InstanceId(1), taken);
    let live =
        |(node, afar): (u32, &Option<Arc<LinkSpeeds>>)| LiveNode { remote_stats: afar.clone(), ..live(node) };
    fleet.set_nodes((1..).zip(nodes).map(live).collect());
    fleet
}

fn prices(decision: &Decision) -> Vec<String> {
    let priced = decision.reasons.iter().filter(|reason| matches!(reason, Reason::MeasuredPrice { .. }));
    priced.map(ToString::to_string).collect()
}

#[test]
fn fast_tier_over_the_used_path_is_chosen() {
    use LinkPath::{Quic, Tcp};
    // Node 1 has it in DRAM and is slow over TCP; node 2 has it on SSD and is slow over QUIC.
    let nodes = [
        speeds(&[(Tcp, Some(DRAM), SLOW), (Quic, Some(DRAM), FAST)]),
        speeds(&[(Tcp, Some(SSD), FAST), (Quic, Some(SSD), SLOW)]),
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
    // If only the slow one has it, it is computed, and the decision says why.
    let decision = chosen(&request(4), &prefix(&[(4, &[(1, DRAM)])]), &one(&[(NodeId(1), Tcp)], &nodes));
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks), (0, 4));
    assert!(decision.reasons.contains(&Reason::RecomputeCheaper { blocks: 4 }), "{:?}", decision.reasons);
    assert!(prices(&decision)[0].ends_with("over that path: computed instead"), "{decision:?}");
}

#[test]
fn path_falls_back_to_usual_then_none() {
    use LinkPath::{Quic, SharedMemory, Tcp};
    let lanes = [(Tcp, Some(DRAM), SLOW), (Quic, Some(DRAM), FAST), (SharedMemory, Some(DRAM), FAST)];
    let pooled = LinkKey { path: None, tier: Some(DRAM) };
    let middle = PathSpeed { latency_ns: 20_000, bytes_per_s: 50_000_000 };
    let lanes = speeds(&lanes).map(|lanes| Arc::new(lanes.with_speed(pooled, middle)));
    let all = prefix(&[(4, &[(1, DRAM)])]);
    let transfer = |taken: &[(u32, LinkPath)]| {
        let taken: Vec<_> = taken.iter().map(|&(node, path)| (NodeId(node), path)).collect();
        let decision = chosen(&request(4), &all, &one(&taken, &[lanes.clone(), None, None]));
        (decision.fetch_blocks, decision.predicted.transfer_us)
    };
    assert_eq!(transfer(&[]), (4, 20 + 40 * 20), "unknown path");
    assert_eq!(transfer(&[(2, Quic), (3, Quic)]), (4, 420), "as to the other nodes");
    assert_eq!(transfer(&[(2, Tcp), (3, Tcp)]), (0, 0));
    assert_eq!(transfer(&[(1, Quic), (2, Tcp), (3, Tcp)]), (4, 420), "another path than to the other nodes");
    assert_eq!(transfer(&[(2, Tcp), (3, Quic)]), (0, 0), "a tie goes to the later kind");
    assert_eq!(
        transfer(&[(2, SharedMemory), (3, SharedMemory)]),
        (4, 820),
        "shared memory says little about other hosts"
    );
    // Shared memory has no network between, measured or not.
    assert_eq!(transfer(&[(1, SharedMemory), (2, Tcp)]), (4, 420));
}

#[test]
fn own_node_uses_local_measurements() {
    let mut fleet = fleet(1);
    let near = speeds(&[(LinkPath::Quic, Some(SSD), SLOW)]);
    fleet.set_nodes(vec![LiveNode { local_stats: near.clone(), ..live(1) }]);
    let matched = prefix(&[(4, &[(1, SSD)])]);
    let transfer = |fleet: &Fleet| chosen(&request(4), &matched, fleet).predicted.transfer_us;
    assert_eq!(transfer(&fleet), 100 + 40 * 50, "by the profile: the path is unknown");
    fleet.set_paths(InstanceId(1), &[(NodeId(1), LinkPath::Quic)]);
    assert_eq!(transfer(&fleet), 0, "computing is faster");
    fleet.set_nodes(vec![LiveNode { remote_stats: near, ..live(1) }]);
    assert_eq!(transfer(&fleet), 2_100, "remote measurements do not apply to it");
}

#[test]
fn slower_own_node_loses_to_remote_node() {
    use LinkPath::Quic;
    let middle = PathSpeed { latency_ns: 20_000, bytes_per_s: 20_000_000 };
    let both = prefix(&[(4, &[(1, DRAM), (2, DRAM)])]);
    let plan_by = |tier: Option<Tier>, near: Option<PathSpeed>, afar: Option<PathSpeed>| {
        let mut fleet = fleet(1);
        let of = |tier, lane: Option<PathSpeed>| lane.and_then(|lane| speeds(&[(Quic, tier, lane)]));
        let nodes = vec![
            LiveNode { local_stats: of(tier, near), ..live(1) },
            LiveNode { remote_stats: of(Some(DRAM), afar), ..live(2) },
        ];
        fleet.set_nodes(nodes);
        fleet.set_paths(InstanceId(1), &[(NodeId(1), Quic), (NodeId(2), Quic)]);
        let decision = chosen(&request(4), &both, &fleet);
        (sources(&decision), decision.predicted.transfer_us)
    };
    let plan = |near, afar| plan_by(Some(DRAM), near, afar);
    assert_eq!(plan(Some(middle), Some(FAST)), (vec![(2, 0, 4)], 20 + 40 * 10));
    assert_eq!(
        plan(Some(SLOW), Some(FAST)),
        (vec![(2, 0, 4)], 20 + 40 * 10),
        "its own node would lose to computing"
    );
    assert_eq!(plan(Some(SLOW), Some(SLOW)), (vec![], 0), "computing is faster than either");
    assert_eq!(plan(Some(FAST), Some(FAST)), (vec![(1, 0, 4)], 420), "it saves network bandwidth");
    // A similar speed is no reason to switch in either direction.
    let tenths = |tenths: u64| PathSpeed { bytes_per_s: middle.bytes_per_s * tenths / 10, ..middle };
    assert_eq!(plan(Some(middle), Some(tenths(12))).0, [(1, 0, 4)]);
    assert_eq!(plan(Some(middle), Some(tenths(13))).0, [(2, 0, 4)]);
    // Nor is a price that takes the medium from the profile.
    assert_eq!(plan_by(None, Some(middle), Some(FAST)).0, [(1, 0, 4)]);
    // Prices from the profile do not outweigh that.
    assert_eq!(plan(Some(middle), None), (vec![(1, 0, 4)], 20 + 40 * 50));
    assert_eq!(plan(None, Some(FAST)), (vec![(1, 0, 4)], 10 + 40 * 10));
}

#[test]
fn paths_follow_instance_lifetime() {
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

type PathTier = (Option<LinkPath>, Option<Tier>);

fn speed_tables() -> impl Strategy<Value = Option<Arc<LinkSpeeds>>> {
    let path = prop::option::of(prop::sample::select(LinkPath::ALL.to_vec()));
    let tier = prop::option::of(prop::sample::select(Tier::ALL.to_vec()));
    let lane = (0u64..1_000_000, 1_000_000u64..10_000_000_000);
    prop::collection::vec(((path, tier), lane), 0..10).prop_map(|all| {
        let with = |lanes: LinkSpeeds, ((path, tier), (latency_ns, bytes_per_s)): (PathTier, (u64, u64))| {
            lanes.with_speed(LinkKey { path, tier }, PathSpeed { latency_ns, bytes_per_s })
        };
        let lanes = all.into_iter().fold(LinkSpeeds::default(), with);
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

    /// Sharing a planner between instances with the same paths gives each the price it gets alone.
    /// No fetch is planned where computing is faster, and only measured prices are reported.
    #[test]
    fn instances_are_priced_by_their_own_paths(
        request in requests(), matched in prefixes(),
        nodes in prop::collection::vec((speed_tables(), speed_tables()), 8),
        instances in prop::collection::vec((prop::option::of(0u32..8), paths()), 1..8),
    ) {
        let mut fleet = Fleet::new(ROUND);
        for (id, (node, taken)) in (0..).zip(&instances) {
            fleet.put_instance(Instance { id: InstanceId(id), node: node.map(NodeId), ..instance(id) });
            fleet.set_paths(InstanceId(id), taken);
        }
        let live = |(node, (afar, near)): (u32, &(_, _))| LiveNode {
            remote_stats: Option::clone(afar), local_stats: Option::clone(near), ..live(node)
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
            let profile_only =
            matches!(reason, Reason::MeasuredPrice { price, .. } if price.basis == PriceBasis::Profile);
            prop_assert!(!profile_only, "{reason}");
        }
    }
}

#[test]
fn excess_planners_use_the_usual_path() {
    use LinkPath::{Quic, Tcp};
    // 32 nodes hold the prefix; each of 32 instances takes QUIC, which is slow, to another one of
    // them.
    let mut fleet = Fleet::new(ROUND);
    let lanes = speeds(&[(Tcp, Some(DRAM), FAST), (Quic, Some(DRAM), SLOW)]);
    fleet.set_nodes((1..=32).map(|node| LiveNode { remote_stats: lanes.clone(), ..live(node) }).collect());
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
    // The last block is not fetched over a slow path.
    assert_eq!(
        (transfer(1), transfer(8), transfer(9), transfer(31)),
        (with_one_slow, with_one_slow, usual, usual)
    );
}
