//! Blocks in an instance's GPU memory cost no transfer, and all others are planned after them.

use proptest::prelude::*;

use super::properties::{alone, fleets, prefixes, requests};
use super::*;

fn resident(all: &[(u32, u32)]) -> Vec<ResidentPrefix> {
    all.iter().map(|&(instance, blocks)| ResidentPrefix { instance: InstanceId(instance), blocks }).collect()
}

fn decided(request: &RouteRequest, matched: &PrefixMatch, at: &[(u32, u32)], fleet: &Fleet) -> Decision {
    choose(request, PrefixLocations { matched, resident: &resident(at), in_flight: &[] }, fleet, NOW).unwrap()
}

#[test]
fn instance_with_resident_prefix_moves_no_block() {
    let (nodes, fleet) = (prefix(&[(4, &[(1, Tier::Dram)])]), fleet(3));
    let decision = decided(&request(4), &nodes, &[(3, 4)], &fleet);
    assert_eq!((decision.instance, decision.resident_blocks), (InstanceId(3), 4));
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks, decision.recompute_tokens), (0, 0, 0));
    assert_eq!(sources(&decision), []);
    // A full hit costs one step; instance 1 would read 410 us from its own node.
    assert_eq!(
        decision.predicted,
        Prediction {
            queue_us: 0,
            transfer_us: 0,
            prefill_us: 1_000,
            overtaking_us: 0,
            tbt_us: 1_010,
            prompt: PromptWork { context_tokens: 40, new_tokens: 0 },
            ..Prediction::default()
        }
    );
    assert_eq!(decision.candidates[1].predicted.ttft_us(), 1_410);
    let why: Vec<_> = decision.reasons.iter().map(ToString::to_string).collect();
    assert!(why.contains(&"the first 4 blocks are in its GPU memory".to_owned()), "{why:?}");
    assert!(!decision.reasons.contains(&Reason::NothingCached), "{why:?}");
}

#[test]
fn rest_is_fetched_from_first_non_resident_block() {
    // Blocks 0 to 2 at node 1, 3 to 5 at node 2; instance 1 has 2 of them resident.
    let nodes = prefix(&[(3, &[(1, Tier::Dram)]), (3, &[(2, Tier::Dram)])]);
    let one = alone(&fleet(2), instance(1));
    let decision = decided(&request(8), &nodes, &[(1, 2)], &one);
    assert_eq!(sources(&decision), [(1, 2, 1), (2, 3, 3)]);
    assert_eq!((decision.resident_blocks, decision.fetch_blocks, decision.recompute_blocks), (2, 4, 2));
    // Own DRAM 10 + 10 x 10, then node 2 over the network 30 + 30 x 20.
    assert_eq!(
        decision.predicted,
        Prediction {
            queue_us: 0,
            transfer_us: 740,
            prefill_us: 3_000,
            overtaking_us: 0,
            tbt_us: 1_010,
            prompt: PromptWork { context_tokens: 60, new_tokens: 20 },
            ..Prediction::default()
        }
    );
    assert_eq!(decision.candidates[0].overlap_blocks, 1);
}

#[test]
fn queue_can_outweigh_resident_blocks() {
    let fleet = with_load(fleet(2), 2, Load::reported(1_000, 0, 0));
    let decision = decided(&request(4), &PrefixMatch::default(), &[(2, 4)], &fleet);
    assert_eq!((decision.instance, decision.resident_blocks), (InstanceId(1), 0));
    assert_eq!(decision.candidates[1].resident_blocks, 4);
}

#[test]
fn resident_blocks_are_capped_at_the_request() {
    let decision = decided(&request(4), &PrefixMatch::default(), &[(1, 9)], &fleet(1));
    assert_eq!((decision.resident_blocks, decision.recompute_blocks), (4, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn resident_blocks_never_slow_a_consistent_plan(
        request in requests(), matched in prefixes(), fleet in fleets(),
        at in prop::collection::btree_map(0u32..12, 1u32..300, 0..6),
    ) {
        let Ok(bare) = choose(&request, &matched, &fleet, NOW) else { return Ok(()) };
        let resident = resident(&at.into_iter().collect::<Vec<_>>());
        let locations = PrefixLocations { matched: &matched, resident: &resident, in_flight: &[] };
        let decision = choose(&request, locations, &fleet, NOW).unwrap();
        prop_assert!(decision.candidates[0].cost_us() <= bare.candidates[0].cost_us());
        let mut next = decision.resident_blocks;
        for source in &decision.sources {
            prop_assert_eq!(source.start_blocks, next);
            prop_assert!(source.len_blocks > 0);
            next += source.len_blocks;
        }
        prop_assert_eq!(next, decision.resident_blocks + decision.fetch_blocks);
        prop_assert_eq!(next + decision.recompute_blocks, request.blocks);
        let there = (next * request.block_tokens).min(request.input_tokens);
        prop_assert_eq!(decision.recompute_tokens, request.input_tokens - there);
        for candidate in decision.candidates.iter().filter(|candidate| candidate.filtered.is_none()) {
            let own = resident.iter().find(|one| one.instance == candidate.instance);
            prop_assert_eq!(candidate.resident_blocks, own.map_or(0, |one| one.blocks.min(request.blocks)));
        }
    }

    /// Pricing many instances in one pass gives each the price that it gets alone, with only the
    /// runs after its own blocks.
    #[test]
    fn instances_are_priced_after_their_resident_blocks(
        request in requests(), matched in prefixes(), fleet in fleets(),
        at in prop::collection::btree_map(0u32..12, 1u32..300, 0..6),
    ) {
        let resident = resident(&at.into_iter().collect::<Vec<_>>());
        let locations = PrefixLocations { matched: &matched, resident: &resident, in_flight: &[] };
        let Ok(together) = choose(&request, locations, &fleet, NOW) else {
            return Ok(());
        };
        for one in &resident {
            let Some(instance) = fleet.instance(one.instance) else { continue };
            let Some(candidate) = together.candidates.iter().find(|candidate| candidate.instance == one.instance) else {
                continue;
            };
            let runs = matched.runs.iter().filter_map(|run| without_first_blocks(run, one.blocks)).collect();
            let behind = PrefixMatch { runs };
            let held = PrefixLocations { matched: &behind, resident: std::slice::from_ref(one), in_flight: &[] };
            if let Ok(decision) = choose(&request, held, &alone(&fleet, *instance), NOW) {
                prop_assert_eq!(&decision.candidates[0], candidate);
            }
        }
    }
}

/// The part of a run after this many blocks.
fn without_first_blocks(run: &HolderRun, blocks: u32) -> Option<HolderRun> {
    let start_blocks = run.start_blocks.max(blocks);
    let len_blocks = run.end_blocks().checked_sub(start_blocks).filter(|len_blocks| *len_blocks > 0)?;
    Some(HolderRun { start_blocks, len_blocks, holders: run.holders.clone() })
}
