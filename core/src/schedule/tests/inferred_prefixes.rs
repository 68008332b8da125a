//! A prompt sent as text counts as resident where it was sent, for as long as that is likely.

use super::*;

/// Hashes of blocks of ten tokens with a common prefix of `alike` blocks.
fn hashes(alike: u64, salt: u64, blocks: u64) -> Vec<BlockHash> {
    let of = |nth: u64| if nth < alike { nth } else { salt * 1_000_000 + nth };
    (0..blocks).map(|nth| BlockHash::from_words(0, of(nth) + 1)).collect()
}

fn asked(hashes: &[BlockHash], id: u64) -> RouteRequest {
    RouteRequest { request: RequestId(id), ..request(hashes.len() as u32) }
}

/// Looks up, decides and records like a router. Returns the instance and the blocks assumed
/// resident there.
fn send(
    guessed: &mut InferredPrefixes,
    fleet: &Fleet,
    (hashes, id): (&[BlockHash], u64),
    room_tokens: u64,
    now: Timestamp,
) -> (u32, u32) {
    let asked = asked(hashes, id);
    let resident = guessed.lookup(&asked, hashes, |_| room_tokens, now);
    let held = PrefixLocations { matched: &PrefixMatch::default(), resident: &resident, in_flight: &[] };
    let decision = choose(&asked, held, fleet, NOW).unwrap();
    guessed.record(&asked, hashes, &decision, room_tokens, now);
    (decision.instance.0, decision.resident_blocks)
}

fn later(seconds: u64) -> Timestamp {
    NOW.after(Duration::from_secs(seconds))
}

#[test]
fn conversation_goes_to_its_previous_instance() {
    let (mut guessed, fleet) = (InferredPrefixes::default(), fleet(4));
    // A checkpoint every 25 blocks of ten tokens.
    let first = send(&mut guessed, &fleet, (&hashes(0, 1, 60), 1), 0, NOW);
    assert_eq!(first.1, 0);
    let again = hashes(0, 1, 90);
    assert_eq!(guessed.lookup(&asked(&again, 2), &again, |_| 0, NOW), [], "it is not computed yet");
    assert_eq!(send(&mut guessed, &fleet, (&again, 2), 0, later(1)), (first.0, 50));
    for id in 3..20 {
        assert_eq!(send(&mut guessed, &fleet, (&again, id), 0, later(id)), (first.0, 75), "{id}");
        let other = hashes(0, id, 90);
        assert_eq!(send(&mut guessed, &fleet, (&other, 100 + id), 0, later(id)).1, 0, "no common prefix");
    }
    let apart = hashes(30, 9_999, 90);
    let shared = hashes(30, 1, 90);
    send(&mut guessed, &fleet, (&shared, 50), 0, later(30));
    assert_eq!(send(&mut guessed, &fleet, (&apart, 51), 0, later(60)).1, 25, "the common prefix");
}

#[test]
fn prefix_expires_on_age_restart_and_eviction() {
    let (fleet, one) = (fleet(1), hashes(0, 1, 50));
    let had = |guessed: &InferredPrefixes, room, at| {
        guessed.lookup(&asked(&one, 9), &one, |_| room, at).first().map_or(0, |resident| resident.blocks)
    };
    let mut guessed = InferredPrefixes::default();
    guessed.set_incarnation(InstanceId(1), 5, NOW);
    send(&mut guessed, &fleet, (&one, 1), 0, NOW);
    let kept_s = fleet::inferred_prefixes::RETENTION.as_secs();
    assert_eq!([1, kept_s - 1, kept_s].map(|after| had(&guessed, 0, later(after))), [50, 50, 0]);
    // Five hundred tokens each.
    for whose in 2..6 {
        send(&mut guessed, &fleet, (&hashes(0, whose, 50), whose), 0, NOW);
    }
    assert_eq!([0, 2_000, 1_999].map(|room| had(&guessed, room, later(1))), [50, 50, 0]);
    guessed.set_incarnation(InstanceId(1), 5, later(2));
    assert_eq!(had(&guessed, 0, later(3)), 50, "the same incarnation");
    guessed.set_incarnation(InstanceId(1), 6, later(4));
    assert_eq!(had(&guessed, 0, later(5)), 0, "a new incarnation");
    send(&mut guessed, &fleet, (&one, 7), 0, later(6));
    assert_eq!(had(&guessed, 0, later(7)), 50);
}

#[test]
fn restart_drops_in_flight_and_evicted_needs_recompute() {
    let (fleet, long) = (fleet(1), hashes(0, 77, 2_000));
    let had = |guessed: &InferredPrefixes, hashes: &[BlockHash], room, at| {
        guessed.lookup(&asked(hashes, 9), hashes, |_| room, at).first().map_or(0, |resident| resident.blocks)
    };
    let mut guessed = InferredPrefixes::default();
    guessed.set_incarnation(InstanceId(1), 5, NOW);
    // It takes two seconds to compute, and the instance restarts after one.
    send(&mut guessed, &fleet, (&long, 1), 0, later(1));
    guessed.set_incarnation(InstanceId(1), 6, later(2));
    assert_eq!(had(&guessed, &long, 0, later(10)), 0);
    let short = hashes(0, 1, 50);
    send(&mut guessed, &fleet, (&short, 2), 5_000, later(20));
    assert_eq!(had(&guessed, &short, 5_000, later(21)), 50);
    send(&mut guessed, &fleet, (&long, 3), 5_000, later(22));
    assert_eq!(had(&guessed, &short, 5_000, later(30)), 0, "the long one displaced it");
    send(&mut guessed, &fleet, (&short, 4), 5_000, later(30));
    assert_eq!([30, 31].map(|at| had(&guessed, &short, 5_000, later(at))), [0, 50]);
}

#[test]
fn long_conversation_reuses_its_checkpoints() {
    let (mut guessed, fleet) = (InferredPrefixes::default(), fleet(1));
    let conversation = hashes(0, 1, 1_000);
    for nth in 0..200 {
        send(&mut guessed, &fleet, (&conversation, nth), 0, later(nth));
    }
    // Forty checkpoints, each inserted once a minute.
    assert!(guessed.insertions() <= 4 * 40, "{}", guessed.insertions());
    // One request, however long, inserts only a part of the maximum.
    let longest = hashes(0, 2, 200_000);
    send(&mut guessed, &fleet, (&longest, 999), 0, later(200));
    assert!(guessed.insertions() <= 4 * 40 + 4_096, "{}", guessed.insertions());
}
