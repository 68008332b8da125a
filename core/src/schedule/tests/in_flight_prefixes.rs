//! Concurrent requests with the same prefix.

use super::*;

fn hash(number: u32) -> BlockHash {
    BlockHash::from_words(number.into(), 0)
}

/// Blocks of a prompt: `shared` common ones, then its own.
fn prompt(shared: u32, own: u32, of: u32) -> Vec<BlockHash> {
    (0..shared).map(hash).chain((0..own).map(|nth| hash(1_000 * (of + 1) + nth))).collect()
}

/// Sends it, with the prefixes recorded before.
fn send(
    id: u64,
    hashes: &[BlockHash],
    sent: &mut InFlightPrefixes,
    fleet: &mut Fleet,
    now: Timestamp,
) -> Decision {
    let request = RouteRequest { request: RequestId(id), ..request(hashes.len() as u32) };
    let coming = sent.lookup(&request, hashes, now);
    let held = PrefixLocations { matched: &PrefixMatch::default(), resident: &[], in_flight: &coming };
    let decision = choose(&request, held, fleet, now).unwrap();
    fleet.record(&decision, now);
    sent.record(&request, hashes, &decision, now);
    decision
}

#[test]
fn burst_reuses_in_flight_prefix() {
    for orders in [false, true] {
        let (mut fleet, mut sent) = (fleet(4), InFlightPrefixes::default());
        for instance in fleet.instances().to_vec() {
            fleet.put_instance(Instance { orders_by_deadline: orders, ..instance });
        }
        let first = send(1, &prompt(64, 2, 0), &mut sent, &mut fleet, NOW);
        let second = send(2, &prompt(64, 2, 1), &mut sent, &mut fleet, NOW.after(Duration::from_millis(1)));
        // Waiting for the first takes longer than computing all of it on an idle instance.
        assert_ne!(second.instance, first.instance);
        // A third would wait as long elsewhere: it goes to the instance that will have the prefix.
        let mut computed = 0;
        for id in 3..40 {
            let now = NOW.after(Duration::from_millis(id));
            let decision = send(id, &prompt(64, 2, id as u32), &mut sent, &mut fleet, now);
            computed += decision.recompute_tokens;
            if decision.resident_blocks > 0 {
                assert!(decision.candidates[0].has_in_flight_blocks);
                assert!(decision.reasons.contains(&Reason::InFlight), "{:?}", decision.reasons);
                assert!(
                    decision.priority_deadline > first.priority_deadline
                        || decision.instance != first.instance
                );
                // Blocks of ten tokens have a checkpoint every 25 blocks.
                assert_eq!((decision.resident_blocks, decision.recompute_tokens), (50, 160));
            }
        }
        let all = 37 * 660;
        assert!(computed < all / 3, "{computed} of {all} tokens with order {orders}");
    }
}

#[test]
fn expired_and_excess_prefixes_are_forgotten() {
    let (mut fleet, mut sent) = (fleet(1), InFlightPrefixes::default());
    let hashes = prompt(26, 0, 0);
    let first = send(1, &hashes, &mut sent, &mut fleet, NOW);
    let asked = request(26);
    let of = |sent: &InFlightPrefixes, after_us: u64| {
        sent.lookup(&asked, &hashes, NOW.after(Duration::from_micros(after_us))).len()
    };
    let until_us = first.predicted.ttft_us() + 500_000;
    assert_eq!((of(&sent, until_us), of(&sent, until_us + 1)), (1, 0));
    for id in 2..20_000u64 {
        let hashes: Vec<BlockHash> = (0..120).map(|nth| hash(id as u32 * 1_000 + nth)).collect();
        sent.record(&request(120), &hashes, &first, NOW);
    }
    assert_eq!(of(&sent, 0), 0, "only the newest are remembered");
    // A prompt too short for a checkpoint has no match.
    assert!(sent.lookup(&request(3), &prompt(3, 0, 0), NOW).is_empty());
    assert!(sent.lookup(&request(0), &[], NOW).is_empty());
    let fewer = sent.lookup(&request(500), &prompt(2, 0, 0), NOW);
    assert!(fewer.is_empty(), "more tokens than hashes must not panic");
}

#[test]
fn recomputing_beats_a_long_wait() {
    let mut fleet = fleet(2);
    let request = request(12);
    // The first has a queue of ten seconds before the prefix is ready; the second is idle.
    let busy = *fleet.instance(InstanceId(1)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(100_000, 0, 0), ..busy });
    let coming = [InFlightPrefix { instance: InstanceId(1), blocks: 12, priority_deadline: NOW }];
    let held = PrefixLocations { matched: &PrefixMatch::default(), resident: &[], in_flight: &coming };
    let decision = choose(&request, held, &fleet, NOW).unwrap();
    assert_eq!((decision.instance, decision.resident_blocks), (InstanceId(2), 0));
    // Resident blocks still count if fewer are in flight.
    let resident = [ResidentPrefix { instance: InstanceId(2), blocks: 12 }];
    let coming = [InFlightPrefix {
        instance: InstanceId(2),
        blocks: 8,
        priority_deadline: NOW.after(Duration::from_secs(9)),
    }];
    let held = PrefixLocations { matched: &PrefixMatch::default(), resident: &resident, in_flight: &coming };
    let decision = choose(&request, held, &fleet, NOW).unwrap();
    assert_eq!((decision.resident_blocks, decision.candidates[0].has_in_flight_blocks), (12, false));
}
