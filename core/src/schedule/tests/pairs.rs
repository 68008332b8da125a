//! Pairs: who computes and who goes on, by hand, under constraints, and against trying all.

use proptest::prelude::*;

use super::*;

const PREFILL: Role = Role::Prefill;
const DECODE: Role = Role::Decode;

fn part(role: Role, place: &str) -> Part {
    Part { role, domain: Domain::parse(place).unwrap() }
}

/// Instances 1, 2, …, each with a node of its own, idle.
fn of(parts: &[(Role, &str)]) -> Fleet {
    let mut fleet = fleet(parts.len() as u32);
    for (id, (role, place)) in (1..).zip(parts) {
        fleet.set_part(InstanceId(id), part(*role, place));
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
fn who_computes_hands_over_and_the_way_is_in_the_cost() {
    let fleet = of(&[(PREFILL, ""), (DECODE, "")]);
    let decision = choose(&request(10), &prefix(&[]), &fleet, NOW).unwrap();
    // 100 tokens at 20 us each over the network, 10 + 20 us until the first, and one step of 1 ms for the first token.
    let handover = Handover { instance: InstanceId(2), us: 2_000 + 30 + 1_000, running: 0, others: 0 };
    assert_eq!((decision.instance, decision.handover), (InstanceId(1), Some(handover)));
    assert_eq!(decision.candidates[0].ttft_us(), decision.predicted.ttft_us() + 3_030);
    assert_eq!(decision.candidates[1].filtered, Some(Filtered::Decodes));
    let said: Vec<String> = decision.reasons.iter().map(ToString::to_string).collect();
    assert!(said.iter().any(|why| why.contains("goes on from there 3030 us later")), "{said:?}");
    assert!(said.iter().any(|why| why.contains("left out 1 instances that compute no prompts")), "{said:?}");
}

#[test]
fn where_all_do_both_nothing_is_handed_over() {
    let fleet = of(&[(Role::Both, "a"), (Role::Both, "b")]);
    let decision = choose(&request(10), &prefix(&[]), &fleet, NOW).unwrap();
    assert!(decision.candidates.iter().all(|candidate| candidate.handover.is_none()));
    assert_eq!(decision.candidates[0].delays_us, 0);
}

#[test]
fn what_who_goes_on_has_in_gpu_memory_does_not_move() {
    let fleet = of(&[(PREFILL, ""), (DECODE, ""), (DECODE, "")]);
    let (matched, resident) = (prefix(&[]), [Resident { instance: InstanceId(3), blocks: 9 }]);
    let held = Held { matched: &matched, resident: &resident, coming: &[] };
    let decision = choose(&request(10), held, &fleet, NOW).unwrap();
    let handover = Handover { instance: InstanceId(3), us: 200 + 30 + 1_000, running: 0, others: 1 };
    assert_eq!(decision.handover, Some(handover));
}

#[test]
fn pairs_stand_as_near_as_is_asked_for() {
    let mut fleet =
        of(&[(PREFILL, "z1/r1"), (DECODE, "z1/r2"), (PREFILL, "z2/r3"), (DECODE, "z2/r3"), (DECODE, "")]);
    // The nearer pairs have more to do.
    running(&mut fleet, 4, 200);
    running(&mut fleet, 2, 100);
    assert_eq!(chosen(&fleet, 10).map(|(_, partner)| partner), Ok(Some(5)), "anywhere");
    fleet.limits.pair_within = 1;
    assert_eq!(chosen(&fleet, 10), Ok((1, Some(2))), "in a zone");
    fleet.limits.pair_within = 2;
    assert_eq!(chosen(&fleet, 10), Ok((3, Some(4))), "in a rack");
    fleet.limits.pair_within = 3;
    let rejection = chosen(&fleet, 10).unwrap_err();
    assert_eq!(rejection.reason, RejectReason::NoPair { instances: 5, decode: 3 });
    assert!(rejection.retry_after > Duration::ZERO);
}

#[test]
fn one_that_does_both_is_taken_where_a_pair_would_be_later() {
    // A long queue at the one that computes.
    let mut fleet = of(&[(PREFILL, ""), (DECODE, ""), (Role::Both, "")]);
    assert_eq!(chosen(&fleet, 10), Ok((3, None)), "nothing moves");
    fleet.put_instance(Instance { load: Load::reported(0, 40, 0), ..instance(3) });
    // Its own 41 steps of 10 us are little, and 40 requests that wait 256 times 10 us longer each are much.
    assert_eq!(chosen(&fleet, 10), Ok((1, Some(2))));
    fleet.put_instance(Instance { load: Load::reported(10_000, 0, 0), ..instance(1) });
    assert_eq!(chosen(&fleet, 10), Ok((3, None)));
}

#[test]
fn who_is_silent_or_left_out_does_not_go_on() {
    let mut fleet = of(&[(PREFILL, ""), (DECODE, "")]);
    let asked = request(10);
    let without = [InstanceId(2)];
    let left_out = Eligible { without: &without, ..Eligible::default() };
    let rejection = choose_among(&asked, &prefix(&[]), left_out, &fleet, NOW).unwrap_err();
    assert_eq!(rejection.reason, RejectReason::NoPair { instances: 2, decode: 0 });
    fleet.put_instance(Instance { reported_at: Timestamp(0), ..instance(2) });
    assert!(matches!(chosen(&fleet, 10).unwrap_err().reason, RejectReason::NoPair { .. }));
    let alone = of(&[(DECODE, "")]);
    assert_eq!(chosen(&alone, 10).unwrap_err().reason, RejectReason::NoPair { instances: 1, decode: 1 });
}

#[test]
fn what_runs_somewhere_stays_there() {
    let fleet = of(&[(PREFILL, ""), (DECODE, "")]);
    for id in [1, 2] {
        let among = [InstanceId(id)];
        let there = Eligible { among: Some(&among), runs_there: true, ..Eligible::default() };
        let decision = choose_among(&request(10), &prefix(&[]), there, &fleet, NOW).unwrap();
        assert_eq!((decision.instance.0, decision.handover), (id, None));
    }
}

#[test]
fn those_that_go_on_count_what_was_handed_to_them() {
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
fn places_are_read_or_refused() {
    let domain = |text: &str| Domain::parse(text).unwrap();
    assert_eq!(domain("a/b/c").shared(domain("a/b/d")), 2);
    assert_eq!(domain("a/b").shared(domain("a/b/c")), 2);
    assert_eq!(domain("").shared(domain("")), 0, "nobody knows");
    assert_eq!(domain("b/a").shared(domain("a/b")), 0);
    assert_eq!(Domain::parse("a/b/c/d/e"), Err(DomainError::TooMany(5)));
    assert_eq!(Domain::parse("a//b"), Err(DomainError::Empty(2)));
    for role in Role::ALL {
        assert_eq!((Role::by_name(role.name()), Role::from_number(role as u32)), (Some(role), Some(role)));
    }
    assert_eq!((Role::by_name("Both"), Role::from_number(3)), (None, None));
}

fn roles() -> impl Strategy<Value = Vec<(u32, u8, u32, u64, u64)>> {
    proptest::collection::vec((0..3u32, 0..3u8, 0..300u32, 0..20_000u64, 0..4u64), 1..12)
}

proptest! {
    /// The pair that is chosen costs no more than any other that may be.
    #[test]
    fn no_other_pair_costs_less(all in roles(), within in 0..2u8, blocks in 1..60u32, limit_us in 0..6_000u64) {
        let name = |place: u8| ["", "a", "b"][usize::from(place)];
        let parts: Vec<_> = all.iter().map(|one| (Role::from_number(one.0).unwrap(), name(one.1))).collect();
        let mut fleet = of(&parts);
        fleet.limits.pair_within = within;
        for (id, one) in (1..).zip(&all) {
            let decoding = Decoding { kv_tokens_max: 10_000, kv_tokens: 3_000 * one.4, ..Decoding::default() };
            let load = Load { decoding, ..Load::reported(one.3, one.2, 0) };
            fleet.put_instance(Instance { load, ..instance(id) });
        }
        let asked = RouteRequest { tbt_max_us: limit_us, ..request(blocks) };
        let of = |decision: &Decision| (decision.candidates[0].breaks, decision.candidates[0].cost_us());
        let best = choose(&asked, &prefix(&[]), &fleet, NOW);
        let mut least: Option<(Option<Breaks>, u64)> = None;
        // Each that could compute beside each that could go on, alone in the world.
        for (one, computes) in parts.iter().enumerate().filter(|(_, part)| part.0 != DECODE) {
            let id = |at: usize| InstanceId(at as u32 + 1);
            let pairs: Vec<Option<usize>> = match computes.0 {
                PREFILL => (0..parts.len()).filter(|other| parts[*other].0 != PREFILL).map(Some).collect(),
                _ => vec![None],
            };
            for pair in pairs {
                let mut alone: Vec<_> = [one].into_iter().chain(pair).map(id).collect();
                alone.sort_unstable();
                let among = Eligible { among: Some(&alone), ..Eligible::default() };
                let Ok(decision) = choose_among(&asked, &prefix(&[]), among, &fleet, NOW) else { continue };
                least = least.into_iter().chain([of(&decision)]).min();
            }
        }
        prop_assert_eq!(best.ok().map(|decision| of(&decision)), least);
    }
}
