//! Ties between candidates, and the order of candidates.

use super::*;

fn instance_for(id: u64, matched: &PrefixMatch, fleet: &Fleet) -> u32 {
    chosen(&RouteRequest { request: RequestId(id), ..request(4) }, matched, fleet).instance.0
}

#[test]
fn an_idle_fleet_is_used_evenly() {
    let fleet = fleet(8);
    let mut count = [0u32; 9];
    (0..1_600).for_each(|id| count[instance_for(id, &PrefixMatch::default(), &fleet) as usize] += 1);
    assert!(count[1..].iter().all(|&n| (140..=260).contains(&n)), "{count:?}");
}

#[test]
fn ties_match_known_answers() {
    let fleet = fleet(8);
    let instances: Vec<_> = (0..8).map(|id| instance_for(id, &PrefixMatch::default(), &fleet)).collect();
    // Fixed: routers of one cluster, and of the next release, agree about ties.
    assert_eq!(instances, [2, 7, 4, 6, 1, 5, 4, 8]);
}

#[test]
fn only_equal_best_candidates_share() {
    // 1 and 3 are idle and hold no blocks; 2 holds all; 4 and 5 hold all and equal 2.
    let holders = [(2, Tier::Dram), (4, Tier::Dram), (5, Tier::Dram)];
    let matched = prefix(&[(4, &holders)]);
    let fleet = fleet(5);
    let taken: std::collections::BTreeSet<_> = (0..64).map(|id| instance_for(id, &matched, &fleet)).collect();
    assert_eq!(taken.into_iter().collect::<Vec<_>>(), [2, 4, 5]);
    let decision = chosen(&request(4), &matched, &fleet);
    assert_eq!(decision.reasons[0], Reason::Tie { among: 3 });
    assert_eq!(decision.reasons[0].to_string(), "equal TTFT on 3 instances, spread by request");
}

#[test]
fn candidates_are_sorted_after_the_chosen_one() {
    let holders = [(2, Tier::Dram), (4, Tier::Dram), (5, Tier::Dram)];
    let mut fleet = with_load(fleet(5), 4, Load::reported(1, 0, 0));
    fleet.put_instance(Instance { reported_at: Timestamp(0), ..instance(1) });
    for id in 0..16 {
        let request = RouteRequest { request: RequestId(id), ..request(4) };
        let decision = chosen(&request, &prefix(&[(4, &holders)]), &fleet);
        let order: Vec<_> = decision.candidates.iter().map(|c| c.instance.0).collect();
        assert_eq!(decision.instance.0, order[0]);
        assert!(order == [2, 5, 4, 3, 1] || order == [5, 2, 4, 3, 1], "{order:?}");
        let overlaps: Vec<_> = decision.candidates.iter().map(|c| c.overlap_blocks).collect();
        assert_eq!(overlaps, [4, 4, 4, 0, 0]);
    }
}

#[test]
fn running_requests_decide_between_otherwise_equal_instances() {
    let fleet = with_load(fleet(2), 1, Load::reported(0, 1, 0));
    assert!((0..16).all(|id| instance_for(id, &PrefixMatch::default(), &fleet) == 2));
}
