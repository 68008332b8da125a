//! Requests that begin alike and come at once.

use super::*;

fn hash(number: u32) -> BlockHash {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockHash(bytes)
}

/// Blocks of a prompt: so many that all have, and then its own.
fn prompt(shared: u32, own: u32, of: u32) -> Vec<BlockHash> {
    (0..shared).map(hash).chain((0..own).map(|nth| hash(1_000 * (of + 1) + nth))).collect()
}

/// Sends it, with what is known of those before.
fn send(
    id: u64,
    hashes: &[BlockHash],
    sent: &mut SentPrefixes,
    fleet: &mut Fleet,
    now: Timestamp,
) -> Decision {
    let request = RouteRequest { request: RequestId(id), ..request(hashes.len() as u32) };
    let coming = sent.of(&request, hashes, now);
    let held = Held { matched: &PrefixMatch::default(), resident: &[], coming: &coming };
    let decision = choose(&request, held, fleet, now).unwrap();
    fleet.record(&decision, now);
    sent.sent(&request, hashes, &decision, now);
    decision
}

#[test]
fn the_second_of_a_burst_finds_what_the_first_computes() {
    for orders in [false, true] {
        let (mut fleet, mut sent) = (fleet(4), SentPrefixes::default());
        for instance in fleet.instances().to_vec() {
            fleet.put_instance(Instance { orders, ..instance });
        }
        let first = send(1, &prompt(64, 2, 0), &mut sent, &mut fleet, NOW);
        let second = send(2, &prompt(64, 2, 1), &mut sent, &mut fleet, NOW.after(Duration::from_millis(1)));
        // To wait for the first takes longer than to compute all of it elsewhere, where nobody waits.
        assert_ne!(second.instance, first.instance);
        // A third would wait as long elsewhere: it goes where the prefix will be.
        let mut computed = 0;
        for id in 3..40 {
            let now = NOW.after(Duration::from_millis(id));
            let decision = send(id, &prompt(64, 2, id as u32), &mut sent, &mut fleet, now);
            computed += decision.recompute_tokens;
            if decision.resident_blocks > 0 {
                assert!(decision.candidates[0].is_coming);
                assert!(decision.reasons.contains(&Reason::Coming), "{:?}", decision.reasons);
                assert!(decision.turn > first.turn || decision.instance != first.instance);
                // Blocks of ten tokens are compared each 25 blocks.
                assert_eq!((decision.resident_blocks, decision.recompute_tokens), (50, 160));
            }
        }
        let all = 37 * 660;
        assert!(computed < all / 3, "{computed} of {all} tokens with order {orders}");
    }
}

#[test]
fn what_word_must_have_come_of_is_forgotten_and_so_is_what_is_too_much() {
    let (mut fleet, mut sent) = (fleet(1), SentPrefixes::default());
    let hashes = prompt(26, 0, 0);
    let first = send(1, &hashes, &mut sent, &mut fleet, NOW);
    let asked = request(26);
    let of = |sent: &SentPrefixes, after_us: u64| {
        sent.of(&asked, &hashes, NOW.after(Duration::from_micros(after_us))).len()
    };
    let until_us = first.predicted.ttft_us() + 500_000;
    assert_eq!((of(&sent, until_us), of(&sent, until_us + 1)), (1, 0));
    for id in 2..20_000u64 {
        let hashes: Vec<BlockHash> = (0..120).map(|nth| hash(id as u32 * 1_000 + nth)).collect();
        sent.sent(&request(120), &hashes, &first, NOW);
    }
    assert_eq!(of(&sent, 0), 0, "the newest are remembered");
    // A prompt too short for a place has nothing to look for.
    assert!(sent.of(&request(3), &prompt(3, 0, 0), NOW).is_empty());
    assert!(sent.of(&request(0), &[], NOW).is_empty());
    let fewer = sent.of(&request(500), &prompt(2, 0, 0), NOW);
    assert!(fewer.is_empty(), "more tokens than hashes are no reason to fall");
}

#[test]
fn to_compute_again_beats_a_long_wait() {
    let mut fleet = fleet(2);
    let request = request(12);
    // The first has a queue of ten seconds before the prefix is there; the second is idle.
    let busy = *fleet.instance(InstanceId(1)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(100_000, 0, 0), ..busy });
    let coming = [Coming { instance: InstanceId(1), blocks: 12, turn: NOW }];
    let held = Held { matched: &PrefixMatch::default(), resident: &[], coming: &coming };
    let decision = choose(&request, held, &fleet, NOW).unwrap();
    assert_eq!((decision.instance, decision.resident_blocks), (InstanceId(2), 0));
    // What it has already is no less for what is to come.
    let resident = [Resident { instance: InstanceId(2), blocks: 12 }];
    let coming = [Coming { instance: InstanceId(2), blocks: 8, turn: NOW.after(Duration::from_secs(9)) }];
    let held = Held { matched: &PrefixMatch::default(), resident: &resident, coming: &coming };
    let decision = choose(&request, held, &fleet, NOW).unwrap();
    assert_eq!((decision.resident_blocks, decision.candidates[0].is_coming), (12, false));
}
