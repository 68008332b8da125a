//! Properties of every request, prefix and fleet.

use proptest::prelude::*;

use super::*;

fn tiers() -> impl Strategy<Value = Tier> {
    prop::sample::select(&Tier::ALL[..])
}

/// Holders on nodes 0..8 in epochs 1 and 2: some are dead, some have an older epoch.
pub(super) fn prefixes() -> impl Strategy<Value = PrefixMatch> {
    let holder = (0u32..8, 1u64..3, tiers()).prop_map(|(node, epoch, tier)| Holder {
        node: NodeId(node),
        epoch: Epoch(epoch),
        tier,
    });
    let holders = prop::collection::vec(holder, 1..5);
    prop::collection::vec((1u32..40, holders), 0..6).prop_map(|runs| {
        let mut start_blocks = 0;
        let mut all = Vec::new();
        for (len_blocks, mut holders) in runs {
            holders.sort_unstable();
            holders.dedup_by_key(|holder| holder.node);
            all.push(HolderRun { start_blocks, len_blocks, holders: holders.into_iter().collect() });
            start_blocks += len_blocks;
        }
        PrefixMatch { runs: all }
    })
}

fn loads() -> impl Strategy<Value = Load> {
    (0u64..5_000_000, 0u32..300, 0u32..50, 0u64..100_000, 0u32..20).prop_map(
        |(queue_tokens, running, waiting, routed_tokens, routed)| Load {
            queue_tokens: if queue_tokens % 3 == 0 { 0 } else { queue_tokens },
            running,
            waiting,
            routed_tokens,
            routed,
            ..Load::default()
        },
    )
}

fn instances() -> impl Strategy<Value = Vec<Instance>> {
    let instance = (0u32..12, prop::option::of(0u32..8), loads(), 0u64..12_000_000);
    prop::collection::vec(instance, 0..12).prop_map(|all| {
        let made = |(id, node, load, reported_at): (u32, Option<u32>, Load, u64)| Instance {
            id: InstanceId(id),
            node: node.map(NodeId),
            can_fetch: true,
            orders_by_deadline: id % 2 == 0,
            load,
            // Two in three are fresh.
            reported_at: if reported_at % 3 == 0 { Timestamp(reported_at) } else { NOW },
            // A slow start is weighed against other instances, so it would differ for an instance
            // alone.
            joined_at: None,
        };
        all.into_iter().map(made).collect()
    })
}

fn nodes() -> impl Strategy<Value = Vec<LiveNode>> {
    let link = prop::option::of((0u64..1_000_000, 1_000_000u64..10_000_000_000));
    let tiers = [link.clone(), link.clone(), link.clone()];
    let node = (0u32..8, 1u64..3, 0u32..3, 0u64..1_000, link, tiers);
    prop::collection::vec(node, 0..8).prop_map(|all| {
        let lane = |(latency_ns, bytes_per_s)| PathSpeed { latency_ns, bytes_per_s };
        type OptionalSpeed = Option<(u64, u64)>;
        let made = |(node, epoch, weight, blocks, link, tiers): (
            u32,
            u64,
            u32,
            u64,
            OptionalSpeed,
            [OptionalSpeed; 3],
        )| LiveNode {
            node: NodeId(node),
            epoch: Epoch(epoch),
            weight,
            blocks,
            block_bytes: blocks * 1_000,
            remote_stats: link_speeds(link.map(lane), tiers.map(|tier| tier.map(lane))),
            local_stats: None,
        };
        all.into_iter().map(made).collect()
    })
}

pub(super) fn fleets() -> impl Strategy<Value = Fleet> {
    let profile = prop::sample::select(PROFILES);
    (profile, instances(), nodes()).prop_map(|(profile, instances, nodes)| {
        let mut fleet = Fleet::new(profile);
        instances.into_iter().for_each(|instance| fleet.put_instance(instance));
        fleet.set_nodes(nodes);
        fleet
    })
}

pub(super) fn requests() -> impl Strategy<Value = RouteRequest> {
    (any::<u64>(), 0u32..260, prop::sample::select(&[1u32, 16, 512][..]), 0u32..600).prop_map(
        |(id, blocks, block_tokens, missing)| RouteRequest {
            request: RequestId(id),
            block_tokens,
            input_tokens: (blocks * block_tokens).saturating_sub(missing % block_tokens),
            ..request(blocks)
        },
    )
}

/// A fleet of one instance, to get its cost.
pub(super) fn alone(fleet: &Fleet, instance: Instance) -> Fleet {
    let mut one = Fleet::new(fleet.profile);
    one.set_nodes(fleet.nodes().to_vec());
    one.put_instance(instance);
    one
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn chosen_instance_has_the_least_cost(request in requests(), matched in prefixes(), fleet in fleets()) {
        let answer = choose(&request, &matched, &fleet, NOW);
        let open = |one: &&Instance| choose(&request, &matched, &alone(&fleet, **one), NOW).is_ok();
        let Ok(decision) = answer else {
            prop_assert_eq!(fleet.instances().iter().find(open), None, "rejected although one may be chosen");
            return Ok(());
        };
        for &one in fleet.instances() {
            if let Ok(other) = choose(&request, &matched, &alone(&fleet, one), NOW) {
                let [cost_us, other_us] = [&decision, &other].map(|one| one.candidates[0].cost_us());
                prop_assert!(cost_us <= other_us, "{:?}", one.id);
                if one.id == decision.instance {
                    prop_assert_eq!(&decision.sources, &other.sources);
                    prop_assert_eq!(decision.predicted, other.predicted);
                }
            }
        }
    }

    #[test]
    fn choice_is_deterministic(request in requests(), matched in prefixes(), fleet in fleets()) {
        let first = choose(&request, &matched, &fleet, NOW);
        prop_assert_eq!(first, choose(&request, &matched, &fleet, NOW));
    }

    #[test]
    fn sources_are_contiguous_held_and_live(request in requests(), matched in prefixes(), fleet in fleets()) {
        let Ok(decision) = choose(&request, &matched, &fleet, NOW) else { return Ok(()) };
        let mut next = 0;
        for source in &decision.sources {
            prop_assert_eq!(source.start_blocks, next);
            prop_assert!(source.len_blocks > 0);
            next += source.len_blocks;
            let live = fleet.live(source.node);
            prop_assert!(live.is_some_and(|live| live.epoch == source.epoch), "dead source {:?}", source);
            let holder = Holder { node: source.node, epoch: source.epoch, tier: source.tier };
            let overlaps = |run: &&HolderRun| {
                run.start_blocks < next && run.start_blocks + run.len_blocks > source.start_blocks
            };
            for run in matched.runs.iter().filter(overlaps) {
                prop_assert!(run.holders.contains(&holder), "{:?} does not hold {:?}", holder, run);
            }
        }
        prop_assert_eq!(next, decision.fetch_blocks);
        prop_assert_eq!(decision.fetch_blocks + decision.recompute_blocks, request.blocks);
        let fetched = (decision.fetch_blocks * request.block_tokens).min(request.input_tokens);
        prop_assert_eq!(decision.recompute_tokens, request.input_tokens - fetched);
    }

    #[test]
    fn fetching_is_never_predicted_slower_than_computing(
        request in requests(), matched in prefixes(), fleet in fleets(),
    ) {
        let Ok(decision) = choose(&request, &matched, &fleet, NOW) else { return Ok(()) };
        let bare = choose(&request, &PrefixMatch::default(), &fleet, NOW).unwrap();
        let computed = bare.candidates.iter().find(|c| c.instance == decision.instance).unwrap();
        prop_assert!(decision.predicted.ttft_us() <= computed.predicted.ttft_us());
    }

    #[test]
    fn more_copies_are_never_slower(request in requests(), matched in prefixes(), fleet in fleets()) {
        let Ok(decision) = choose(&request, &matched, &fleet, NOW) else { return Ok(()) };
        let fewer = PrefixMatch { runs: matched.runs[..matched.runs.len() / 2].to_vec() };
        let without = choose(&request, &fewer, &fleet, NOW).unwrap();
        prop_assert!(decision.predicted.ttft_us() <= without.predicted.ttft_us());
    }

    #[test]
    fn saves_go_to_live_nodes_that_take_blocks(request in requests(), fleet in fleets()) {
        let Ok(decision) = choose(&request, &PrefixMatch::default(), &fleet, NOW) else { return Ok(()) };
        let takes = |live: &&LiveNode| live.weight > 0;
        match decision.save_to {
            Some(to) => {
                let live = fleet.live(to.node).filter(takes);
                prop_assert_eq!(live.map(|live| live.epoch), Some(to.epoch));
            }
            None => prop_assert!(!fleet.nodes().iter().any(|live| live.weight > 0)),
        }
    }

    #[test]
    fn every_instance_is_listed_once(request in requests(), matched in prefixes(), fleet in fleets()) {
        let Ok(decision) = choose(&request, &matched, &fleet, NOW) else { return Ok(()) };
        let mut told: Vec<_> = decision.candidates.iter().map(|c| c.instance).collect();
        prop_assert_eq!(told[0], decision.instance);
        told.sort_unstable();
        prop_assert_eq!(told, fleet.instances().iter().map(|i| i.id).collect::<Vec<_>>());
    }
}
