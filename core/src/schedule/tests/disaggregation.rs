//! Disaggregated pairs: prefill and decode instance, by hand, under constraints, and against
//! enumeration.

use proptest::prelude::*;

use super::*;

const PREFILL: InstanceRole = InstanceRole::Prefill;
const DECODE: InstanceRole = InstanceRole::Decode;

fn placement(role: InstanceRole, place: &str) -> Placement {
    Placement { role, domain: Domain::parse(place).unwrap() }
}

/// Idle instances 1, 2, …, each with a node of its own.
fn of(parts: &[(InstanceRole, &str)]) -> Fleet {
    let mut fleet = fleet(parts.len() as u32);
    for (id, (role, place)) in (1..).zip(parts) {
        fleet.set_placement(InstanceId(id), placement(*role, place));
    }
    fleet
}

fn running(fleet: &mut Fleet, id: u32, requests: u32) {
    fleet.put_instance(Instance { load: Load::reported(0, requests, 0), ..instance(id) });
}

fn chosen(fleet: &Fleet, blocks: u32) -> Result<(u32, Option<u32>), Rejection> {
    let decision = choose(&request(blocks), &prefix(&[]), fleet, NOW)?;
    Ok((decision.instance.0, decision.handover.map(|handover| handover.instance.0)))
}

#[test]
fn handover_time_is_part_of_the_cost() {
    let fleet = of(&[(PREFILL, ""), (DECODE, "")]);
    let decision = choose(&request(10), &prefix(&[]), &fleet, NOW).unwrap();
    // 100 tokens at 20 us each over the network, 10 + 20 us latency, and one step of 1 ms for the
    // first token.
    let handover =
        Handover { instance: InstanceId(2), handover_us: 2_000 + 30 + 1_000, running: 0, others: 0 };
    assert_eq!((decision.instance, decision.handover), (InstanceId(1), Some(handover)));
    assert_eq!(decision.candidates[0].ttft_us(), decision.predicted.ttft_us() + 3_030);
    assert_eq!(decision.candidates[1].filtered, Some(FilterReason::DecodeOnly));
    let said: Vec<String> = decision.reasons.iter().map(ToString::to_string).collect();
    assert!(said.iter().any(|why| why.contains("it hands over to instance-2 3030 us later")), "{said:?}");
    assert!(said.iter().any(|why| why.contains("left out 1 decode-only instances")), "{said:?}");
}

#[test]
fn no_handover_without_roles() {
    let fleet = of(&[(InstanceRole::Both, "a"), (InstanceRole::Both, "b")]);
    let decision = choose(&request(10), &prefix(&[]), &fleet, NOW).unwrap();
    assert!(decision.candidates.iter().all(|candidate| candidate.handover.is_none()));
    assert_eq!(decision.candidates[0].delay_to_others_us, 0);
}

#[test]
fn resident_blocks_of_the_partner_do_not_move() {
    let fleet = of(&[(PREFILL, ""), (DECODE, ""), (DECODE, "")]);
    let (matched, resident) = (prefix(&[]), [ResidentPrefix { instance: InstanceId(3), blocks: 9 }]);
    let held = PrefixLocations { matched: &matched, resident: &resident, in_flight: &[] };
    let decision = choose(&request(10), held, &fleet, NOW).unwrap();
    let handover = Handover { instance: InstanceId(3), handover_us: 200 + 30 + 1_000, running: 0, others: 1 };
    assert_eq!(decision.handover, Some(handover));
}

#[test]
fn pairs_respect_shared_topology_levels() {
    let mut fleet =
        of(&[(PREFILL, "z1/r1"), (DECODE, "z1/r2"), (PREFILL, "z2/r3"), (DECODE, "z2/r3"), (DECODE, "")]);
    // The closer pairs have more load.
    running(&mut fleet, 4, 200);
    running(&mut fleet, 2, 100);
    assert_eq!(chosen(&fleet, 10).map(|(_, partner)| partner), Ok(Some(5)), "anywhere");
    fleet.limits.pair_shared_levels = 1;
    assert_eq!(chosen(&fleet, 10), Ok((1, Some(2))), "in a zone");
    fleet.limits.pair_shared_levels = 2;
    assert_eq!(chosen(&fleet, 10), Ok((3, Some(4))), "in a rack");
    fleet.limits.pair_shared_levels = 3;
    let rejection = chosen(&fleet, 10).unwrap_err();
    assert_eq!(rejection.reason, RejectReason::NoPair { instances: 5, decode: 3 });
    assert!(rejection.retry_after > Duration::ZERO);
}

#[test]
fn combined_instance_wins_over_slower_pair() {
    // The prefill instance has a long queue.
    let mut fleet = of(&[(PREFILL, ""), (DECODE, ""), (InstanceRole::Both, "")]);
    assert_eq!(chosen(&fleet, 10), Ok((3, None)), "no KV moves");
    fleet.put_instance(Instance { load: Load::reported(0, 40, 0), ..instance(3) });
    // Its own 41 steps of 10 us are little, but 40 requests wait 256 times 10 us longer each.
    assert_eq!(chosen(&fleet, 10), Ok((1, Some(2))));
    fleet.put_instance(Instance { load: Load::reported(10_000, 0, 0), ..instance(1) });
    assert_eq!(chosen(&fleet, 10), Ok((3, None)));
}

#[test]
fn stale_or_excluded_instance_is_no_partner() {
    let mut fleet = of(&[(PREFILL, ""), (DECODE, "")]);
    let asked = request(10);
    let without = [InstanceId(2)];
    let left_out = InstanceFilter { excluded: &without, ..InstanceFilter::default() };
    let rejection = choose_filtered(&asked, &prefix(&[]), left_out, &fleet, NOW).unwrap_err();
    assert_eq!(rejection.reason, RejectReason::NoPair { instances: 2, decode: 0 });
    fleet.put_instance(Instance { reported_at: Timestamp(0), ..instance(2) });
    assert!(matches!(chosen(&fleet, 10).unwrap_err().reason, RejectReason::NoPair { .. }));
    let alone = of(&[(DECODE, "")]);
    assert_eq!(chosen(&alone, 10).unwrap_err().reason, RejectReason::NoPair { instances: 1, decode: 1 });
}

#[test]
fn pinned_request_stays_on_its_instance() {
    let fleet = of(&[(PREFILL, ""), (DECODE, "")]);
    for id in [1, 2] {
        let among = [InstanceId(id)];
        let there = InstanceFilter { candidates: Some(&among), is_pinned: true, ..InstanceFilter::default() };
        let decision = choose_filtered(&request(10), &prefix(&[]), there, &fleet, NOW).unwrap();
        assert_eq!((decision.instance.0, decision.handover), (id, None));
    }
}

#[test]
fn partners_count_handed_over_requests() {
    let mut fleet = of(&[(PREFILL, ""), (DECODE, ""), (DECODE, "")]);
    let mut partners = Vec::new();
    for _ in 0..4 {
        let decision = choose(&request(10), &prefix(&[]), &fleet, NOW).unwrap();
        partners.push(decision.handover.unwrap().instance.0);
        fleet.record(&decision, NOW);
    }
    assert_eq!(partners, [2, 3, 2, 3]);
}

#[test]
fn domains_parse_or_fail() {
    let domain = |text: &str| Domain::parse(text).unwrap();
    assert_eq!(domain("a/b/c").shared_levels(domain("a/b/d")), 2);
    assert_eq!(domain("a/b").shared_levels(domain("a/b/c")), 2);
    assert_eq!(domain("").shared_levels(domain("")), 0, "unset domains share no level");
    assert_eq!(domain("b/a").shared_levels(domain("a/b")), 0);
    assert_eq!(Domain::parse("a/b/c/d/e"), Err(DomainError::TooMany(5)));
    assert_eq!(Domain::parse("a//b"), Err(DomainError::Empty(2)));
    for role in InstanceRole::ALL {
        assert_eq!(
            (InstanceRole::by_name(role.name()), InstanceRole::from_number(role as u32)),
            (Some(role), Some(role))
        );
    }
    assert_eq!((InstanceRole::by_name("Both"), InstanceRole::from_number(3)), (None, None));
}

fn roles() -> impl Strategy<Value = Vec<(u32, u8, u32, u64, u64)>> {
    proptest::collection::vec((0..3u32, 0..3u8, 0..300u32, 0..20_000u64, 0..4u64), 1..12)
}

proptest! {
    /// The chosen pair costs no more than any other allowed pair.
    #[test]
    fn no_other_pair_costs_less(all in roles(), within in 0..2u8, blocks in 1..60u32, limit_us in 0..6_000u64) {
        let name = |place: u8| ["", "a", "b"][usize::from(place)];
        let parts: Vec<_> = all.iter().map(|one| (InstanceRole::from_number(one.0).unwrap(), name(one.1))).collect();
        let mut fleet = of(&parts);
        fleet.limits.pair_shared_levels = within;
        for (id, one) in (1..).zip(&all) {
            let decoding = DecodeReport { kv_tokens_max: 10_000, kv_tokens: 3_000 * one.4, ..DecodeReport::default() };
            let load = Load { decode: decoding, ..Load::reported(one.3, one.2, 0) };
            fleet.put_instance(Instance { load, ..instance(id) });
        }
        let asked = RouteRequest { tbt_max_us: limit_us, ..request(blocks) };
        let of = |decision: &Decision| (decision.candidates[0].broken_limit, decision.candidates[0].cost_us());
        let best = choose(&asked, &prefix(&[]), &fleet, NOW);
        let mut least: Option<(Option<BrokenLimit>, u64)> = None;
        // Each prefill candidate with each decode candidate, alone in the fleet.
        for (one, computes) in parts.iter().enumerate().filter(|(_, part)| part.0 != DECODE) {
            let id = |at: usize| InstanceId(at as u32 + 1);
            let pairs: Vec<Option<usize>> = match computes.0 {
                PREFILL => (0..parts.len()).filter(|other| parts[*other].0 != PREFILL).map(Some).collect(),
                _ => vec![None],
            };
            for pair in pairs {
                let mut alone: Vec<_> = [one].into_iter().chain(pair).map(id).collect();
                alone.sort_unstable();
                let among = InstanceFilter { candidates: Some(&alone), ..InstanceFilter::default() };
                let Ok(decision) = choose_filtered(&asked, &prefix(&[]), among, &fleet, NOW) else { continue };
                least = least.into_iter().chain([of(&decision)]).min();
            }
        }
        prop_assert_eq!(best.ok().map(|decision| of(&decision)), least);
    }
}
