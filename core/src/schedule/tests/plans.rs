//! Sources and predictions of plans: one line per case.

use super::*;

const DRAM: Tier = Tier::Dram;
const SSD: Tier = Tier::Ssd;
const GPU: Tier = Tier::Gpu;

struct PlanCase {
    name: &'static str,
    blocks: u32,
    runs: &'static [(u32, &'static [(u32, Tier)])],
    /// Expected instance, sources, and (queue, transfer, prefill) in µs.
    instance: u32,
    sources: &'static [(u32, u32, u32)],
    predicted: (u64, u64, u64),
}

/// A fleet of three instances; 2 and 3 have 30 tokens (3,000 µs) queued, so instance 1 is chosen by
/// default.
fn fleet_of_three() -> Fleet {
    let busy = Load::reported(30, 0, 0);
    with_load(with_load(fleet(3), 2, busy), 3, busy)
}

const CASES: &[PlanCase] = &[
    PlanCase {
        name: "nothing held",
        blocks: 4,
        runs: &[],
        instance: 1,
        sources: &[],
        predicted: (0, 0, 5_000),
    },
    PlanCase {
        // 40 tokens at 10 µs + 10; the step remains.
        name: "all in own DRAM",
        blocks: 4,
        runs: &[(4, &[(1, DRAM)])],
        instance: 1,
        sources: &[(1, 0, 4)],
        predicted: (0, 410, 1_000),
    },
    PlanCase {
        // Over the network the narrower path counts, latencies add up: 30 + 40 x 20.
        name: "all on another node, its instance is busy: copy the prefix",
        blocks: 4,
        runs: &[(4, &[(2, DRAM)])],
        instance: 1,
        sources: &[(2, 0, 4)],
        predicted: (0, 830, 1_000),
    },
    PlanCase {
        // Fetching 20 blocks from another node costs 4,030; waiting at their node 3,000 + 2,010.
        name: "a longer transfer still beats the queue",
        blocks: 20,
        runs: &[(20, &[(2, DRAM)])],
        instance: 1,
        sources: &[(2, 0, 20)],
        predicted: (0, 4_030, 1_000),
    },
    PlanCase {
        // Fetching costs 8,030; at their node 3,000 + 4,010.
        name: "the queue beats a transfer that is long enough",
        blocks: 40,
        runs: &[(40, &[(2, DRAM)])],
        instance: 2,
        sources: &[(2, 0, 40)],
        predicted: (0, 4_010, 1_000),
    },
    PlanCase {
        name: "the rest is computed",
        blocks: 6,
        runs: &[(2, &[(1, DRAM)])],
        instance: 1,
        sources: &[(1, 0, 2)],
        predicted: (0, 210, 5_000),
    },
    PlanCase {
        // Own SSD: 100 + 40 x 50; another node's DRAM would be 830.
        name: "own node first, although another is faster",
        blocks: 4,
        runs: &[(4, &[(1, SSD), (2, DRAM)])],
        instance: 1,
        sources: &[(1, 0, 4)],
        predicted: (0, 2_100, 1_000),
    },
    PlanCase {
        name: "of two others the faster tier",
        blocks: 4,
        runs: &[(4, &[(2, SSD), (3, DRAM)])],
        instance: 1,
        sources: &[(3, 0, 4)],
        predicted: (0, 830, 1_000),
    },
    PlanCase {
        // A node copies it to DRAM first: 5 + 10 and the slower of 1 and 10 a token. The GPU alone
        // would be 45.
        name: "all on the own node's GPU",
        blocks: 4,
        runs: &[(4, &[(1, GPU)])],
        instance: 1,
        sources: &[(1, 0, 4)],
        predicted: (0, 415, 1_000),
    },
    PlanCase {
        // 5 + 30 + 40 x 20 and 30 + 40 x 20: blocks in DRAM need no copy there.
        name: "of two others the one that has it in DRAM, not the one that has it on a GPU",
        blocks: 4,
        runs: &[(4, &[(2, GPU), (3, DRAM)])],
        instance: 1,
        sources: &[(3, 0, 4)],
        predicted: (0, 830, 1_000),
    },
    PlanCase {
        name: "a GPU before an SSD",
        blocks: 4,
        runs: &[(4, &[(2, SSD), (3, GPU)])],
        instance: 1,
        sources: &[(3, 0, 4)],
        predicted: (0, 835, 1_000),
    },
    PlanCase {
        name: "own head, foreign tail",
        blocks: 4,
        runs: &[(2, &[(1, DRAM), (2, DRAM)]), (2, &[(2, DRAM)])],
        instance: 1,
        sources: &[(1, 0, 2), (2, 2, 2)],
        predicted: (0, 210 + 430, 1_000),
    },
    PlanCase {
        // One source over two runs: its latency once.
        name: "runs of one holder are one source",
        blocks: 4,
        runs: &[(2, &[(2, DRAM)]), (2, &[(2, DRAM), (3, SSD)])],
        instance: 1,
        sources: &[(2, 0, 4)],
        predicted: (0, 830, 1_000),
    },
    PlanCase {
        name: "the same node in two tiers is two sources",
        blocks: 4,
        runs: &[(2, &[(1, DRAM)]), (2, &[(1, SSD)])],
        instance: 1,
        sources: &[(1, 0, 2), (1, 2, 2)],
        predicted: (0, 210 + 1_100, 1_000),
    },
    PlanCase {
        name: "blocks behind the request's last one are not asked for",
        blocks: 3,
        runs: &[(8, &[(1, DRAM)])],
        instance: 1,
        sources: &[(1, 0, 3)],
        predicted: (0, 310, 1_000),
    },
];

#[test]
fn plans_match_the_table() {
    for case in CASES {
        let decision = chosen(&request(case.blocks), &prefix(case.runs), &fleet_of_three());
        let predicted = decision.predicted;
        assert_eq!(decision.instance, InstanceId(case.instance), "{}", case.name);
        assert_eq!(sources(&decision), case.sources, "{}", case.name);
        let parts = (predicted.queue_us, predicted.transfer_us, predicted.prefill_us);
        assert_eq!(parts, case.predicted, "{}", case.name);
        let fetched: u32 = case.sources.iter().map(|s| s.2).sum();
        assert_eq!(decision.fetch_blocks, fetched, "{}", case.name);
        assert_eq!(decision.recompute_blocks, case.blocks - fetched, "{}", case.name);
        assert_eq!(decision.recompute_tokens, (case.blocks - fetched) * BLOCK_TOKENS, "{}", case.name);
    }
}

/// One instance with a node, and a remote node 2 with a link of `bytes_per_s`.
fn slow_link(bytes_per_s: u64) -> Fleet {
    let mut fleet = fleet(1);
    let link = Some(PathSpeed { latency_ns: 20_000, bytes_per_s });
    fleet.set_nodes(vec![live(1), LiveNode { remote_stats: link_speeds(link, [None; 3]), ..live(2) }]);
    fleet
}

#[test]
fn slow_tail_is_recomputed() {
    let matched = prefix(&[(2, &[(1, DRAM)]), (2, &[(2, DRAM)])]);
    // 5 MB/s is 200 µs a token, twice the time to compute it.
    let decision = chosen(&request(4), &matched, &slow_link(5_000_000));
    assert_eq!(sources(&decision), [(1, 0, 2)]);
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks), (2, 2));
    assert!(decision.reasons.contains(&Reason::RecomputeCheaper { blocks: 2 }), "{:?}", decision.reasons);
    // 20 MB/s is 50 µs a token: fetching is faster.
    let decision = chosen(&request(4), &matched, &slow_link(20_000_000));
    assert_eq!(sources(&decision), [(1, 0, 2), (2, 2, 2)]);
}

#[test]
fn prices_fall_back_from_tier_to_node_to_profile() {
    let way = |latency_ns, bytes_per_s| Some(PathSpeed { latency_ns, bytes_per_s });
    // DRAM is fast, SSD slow: 5 MB/s is 200 µs a token, twice the time to compute it.
    let (slow, fast) = (way(20_000, 5_000_000), way(20_000, 100_000_000));
    let transfer = |tier: Tier, link, tiers| {
        let mut fleet = fleet(1);
        fleet.set_nodes(vec![live(1), LiveNode { remote_stats: link_speeds(link, tiers), ..live(2) }]);
        let decision = chosen(&request(4), &prefix(&[(4, &[(2, tier)])]), &fleet);
        (decision.fetch_blocks, decision.predicted.transfer_us)
    };
    let measured = [slow, fast, None];
    assert_eq!(transfer(SSD, None, measured), (0, 0), "computing is faster");
    assert_eq!(transfer(DRAM, None, measured), (4, 20 + 40 * 10));
    assert_eq!(transfer(DRAM, way(1_000_000, 1), measured), (4, 420), "the link is included already");
    // An unmeasured tier is the profile's, over the measured link if no slow SSD is in it.
    assert_eq!(transfer(DRAM, slow, [None; 3]), (0, 0));
    assert_eq!(transfer(DRAM, slow, [slow, None, None]), transfer(DRAM, None, [None; 3]));
    assert_eq!(transfer(DRAM, None, [slow, None, None]), transfer(DRAM, None, [None; 3]));
    assert_eq!(transfer(GPU, slow, measured), transfer(GPU, fast, [None; 3]), "at the speed of its DRAM");
    assert_eq!(
        transfer(SSD, slow, [None, slow, fast]),
        transfer(SSD, fast, [None; 3]),
        "at the best measured speed"
    );
    // Of two nodes the one with the faster tier is chosen, whatever the tiers are.
    let mut two = fleet_with_nodes([[fast, None, None], [None, slow, None]]);
    two.put_instance(Instance { node: None, ..instance(1) });
    let decision = chosen(&request(4), &prefix(&[(4, &[(1, SSD), (2, DRAM)])]), &two);
    assert_eq!(sources(&decision), [(1, 0, 4)]);
}

fn fleet_with_nodes(tiers: [[Option<PathSpeed>; 3]; 2]) -> Fleet {
    let mut fleet = fleet(1);
    fleet.set_nodes(
        (1..)
            .zip(tiers)
            .map(|(node, tiers)| LiveNode { remote_stats: link_speeds(None, tiers), ..live(node) })
            .collect(),
    );
    fleet
}

#[test]
fn slow_middle_run_is_fetched_for_later_runs() {
    // A middle run of 1 block costs 30 + 10 x 200 = 2,030 and saves 1,000. Eight own blocks after
    // it save 8,000.
    let matched = prefix(&[(1, &[(2, DRAM)]), (8, &[(1, DRAM)])]);
    let decision = chosen(&request(9), &matched, &slow_link(5_000_000));
    assert_eq!(sources(&decision), [(2, 0, 1), (1, 1, 8)]);
    // With one own block after it, it does not pay: no block is fetched.
    let matched = prefix(&[(1, &[(2, DRAM)]), (1, &[(1, DRAM)])]);
    let decision = chosen(&request(2), &matched, &slow_link(5_000_000));
    assert_eq!(sources(&decision), []);
    assert_eq!(decision.predicted.ttft_us(), 3_000);
}

#[test]
fn zero_bandwidth_link_is_never_used() {
    let decision = chosen(&request(4), &prefix(&[(4, &[(2, DRAM)])]), &slow_link(0));
    assert_eq!(sources(&decision), []);
    assert_eq!(decision.recompute_tokens, 40);
}

#[test]
fn equal_time_prefers_fetching() {
    let mut fleet = fleet(1);
    // A token costs the same either way, and the path has no latency.
    fleet.profile.dram = PathSpeed { latency_ns: 0, bytes_per_s: 10_000_000 };
    let decision = chosen(&request(4), &prefix(&[(4, &[(1, DRAM)])]), &fleet);
    assert_eq!(decision.fetch_blocks, 4);
    assert_eq!(decision.predicted.ttft_us(), 4_000 + 1_000);
}

#[test]
fn partial_block_moves_its_tokens_only() {
    let request = RouteRequest { input_tokens: 33, ..request(4) };
    let decision = chosen(&request, &prefix(&[(4, &[(1, DRAM)])]), &fleet(1));
    assert_eq!(decision.predicted.transfer_us, 10 + 330);
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks, decision.recompute_tokens), (4, 0, 0));
}

#[test]
fn tokens_after_the_last_block_are_computed() {
    let request = RouteRequest { input_tokens: 55, ..request(4) };
    let decision = chosen(&request, &prefix(&[(4, &[(1, DRAM)])]), &fleet(1));
    assert_eq!(decision.recompute_tokens, 15);
    assert_eq!(decision.predicted.prefill_us, 1_000 + 1_500);
}

#[test]
fn empty_prompt_costs_one_step() {
    let decision = chosen(&request(0), &PrefixMatch::default(), &fleet(2));
    assert_eq!(decision.predicted.ttft_us(), 1_000);
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks), (0, 0));
}

#[test]
fn instance_without_a_node_fetches_remotely() {
    let mut fleet = fleet(1);
    fleet.put_instance(Instance { node: None, ..instance(1) });
    let decision = chosen(&request(4), &prefix(&[(4, &[(1, DRAM)])]), &fleet);
    assert_eq!(sources(&decision), [(1, 0, 4)]);
    assert_eq!(decision.predicted.transfer_us, 830);
    assert!(decision.reasons.contains(&Reason::RemoteFetch { blocks: 4 }));
    assert_eq!(decision.candidates[0].overlap_blocks, 0);
}

#[test]
fn dead_holders_end_the_prefix() {
    let matched = prefix(&[(2, &[(1, DRAM)]), (2, &[(2, DRAM)]), (2, &[(1, DRAM)])]);
    let mut one = fleet(1);
    let decision = chosen(&request(6), &matched, &one);
    assert_eq!(sources(&decision), [(1, 0, 2)], "node 2 is not listed");
    assert!(decision.reasons.contains(&Reason::HolderLost { blocks: 4 }), "{:?}", decision.reasons);
    one.set_nodes(vec![live(1), LiveNode { epoch: Epoch(2), ..live(2) }]);
    assert_eq!(sources(&chosen(&request(6), &matched, &one)), [(1, 0, 2)], "node 2 has restarted");
    one.set_nodes(vec![live(1), live(2)]);
    assert_eq!(sources(&chosen(&request(6), &matched, &one)), [(1, 0, 2), (2, 2, 2), (1, 4, 2)]);
}

#[test]
fn gaps_and_repeats_end_the_prefix() {
    let held = |start_blocks, len_blocks| HolderRun {
        start_blocks,
        len_blocks,
        holders: std::iter::once(holder(1, DRAM)).collect(),
    };
    for (runs, fetch_blocks) in [
        (vec![held(1, 3)], 0),
        (vec![held(0, 2), held(3, 1)], 2),
        (vec![held(0, 2), held(0, 2), held(2, 2)], 2),
        (vec![held(0, 0), held(0, 4)], 0),
        (vec![held(0, u32::MAX), held(u32::MAX, u32::MAX)], 4),
    ] {
        let decision = chosen(&request(4), &PrefixMatch { runs: runs.clone() }, &fleet(1));
        assert_eq!(decision.fetch_blocks, fetch_blocks, "{runs:?}");
    }
}

#[test]
fn equal_holders_are_spread_by_request() {
    let mut fleet = fleet(9);
    for n in 2..=9 {
        fleet.remove_instance(InstanceId(n));
    }
    let everyone: Vec<_> = (2..=9).map(|n| (n, DRAM)).collect();
    let matched = prefix(&[(4, &everyone)]);
    let serves = |id| {
        let decision = chosen(&RouteRequest { request: RequestId(id), ..request(4) }, &matched, &fleet);
        decision.sources[0].node.0
    };
    let mut count = [0u32; 10];
    (0..800).for_each(|id| count[serves(id) as usize] += 1);
    assert_eq!(count[..2], [0, 0]);
    assert!(count[2..].iter().all(|&n| (60..=140).contains(&n)), "{count:?}");
}

#[test]
fn saves_go_to_own_node_then_ring_then_none() {
    let mut fleet = fleet(1);
    let matched = PrefixMatch::default();
    let save_to = |fleet: &Fleet| chosen(&request(4), &matched, fleet).save_to;
    assert_eq!(save_to(&fleet), Some(holder(1, DRAM)));
    fleet.set_nodes(vec![live(2)]);
    assert_eq!(save_to(&fleet), Some(holder(2, DRAM)), "own node is dead");
    assert!(chosen(&request(4), &matched, &fleet).reasons.contains(&Reason::SaveOnRing { node: NodeId(2) }));
    fleet.set_nodes(vec![LiveNode { weight: 0, ..live(1) }, live(2)]);
    assert_eq!(save_to(&fleet), Some(holder(2, DRAM)), "own node accepts no blocks");
    fleet.set_nodes(Vec::new());
    assert_eq!(save_to(&fleet), None);
    assert!(chosen(&request(4), &matched, &fleet).reasons.contains(&Reason::NoSaveTarget));
}

#[test]
fn ring_keeps_a_prefix_together_until_overload() {
    let mut fleet = fleet(1);
    fleet.put_instance(Instance { node: None, ..instance(1) });
    let with = |fleet: &mut Fleet, full: Option<NodeId>| {
        let mut nodes: Vec<_> = (1..=4).map(|n| LiveNode { blocks: 100, ..live(n) }).collect();
        nodes.iter_mut().filter(|n| Some(n.node) == full).for_each(|n| n.blocks = 1_000);
        fleet.set_nodes(nodes);
        chosen(&request(4), &PrefixMatch::default(), fleet).save_to.unwrap().node
    };
    let home = with(&mut fleet, None);
    assert_eq!(with(&mut fleet, None), home);
    assert_ne!(with(&mut fleet, Some(home)), home);
}

#[test]
fn decision_reasons_are_readable() {
    let matched = prefix(&[(2, &[(1, DRAM)]), (2, &[(2, DRAM)])]);
    let said = |matched: &PrefixMatch| -> Vec<_> {
        chosen(&request(4), matched, &fleet_of_three()).reasons.iter().map(Reason::to_string).collect()
    };
    let by_ttft = "least predicted TTFT of 3 instances, next best 3000 us later";
    assert_eq!(said(&PrefixMatch::default()), [by_ttft, "no live node holds the first block"]);
    // At the others the transfer hides a part of the wait, which still counts as a delay to later
    // requests.
    let expected = [
        "least cost of 3 instances (TTFT, delay to others, slow start, stale reports), next best 3000 us more",
        "own node holds the first 2 blocks to fetch",
        "2 blocks come from other nodes",
    ];
    assert_eq!(said(&matched), expected);
}

#[test]
fn transfer_uses_the_reported_block_size() {
    // By the profile a block of ten tokens has 10,000 bytes: 10 µs and 100 µs a block from own
    // DRAM, against 1,000 µs to compute it.
    let planned = |block_bytes: u64| {
        let mut fleet = fleet(1);
        fleet.set_nodes(vec![LiveNode { block_bytes, ..live(1) }]);
        let decision = choose(&request(4), &prefix(&[(4, &[(1, Tier::Dram)])]), &fleet, NOW).unwrap();
        (decision.fetch_blocks, decision.uncorrected.transfer_us)
    };
    assert_eq!(planned(0), (4, 410));
    assert_eq!(planned(10_000), (4, 410));
    assert_eq!(planned(20_000), (4, 810));
    // Ten times as many bytes take as long as computing, and are fetched; more are not.
    assert_eq!(planned(99_000), (4, 3_970));
    assert_eq!(planned(110_000), (0, 0));
}
