//! What was sent as text is taken to be where it was sent, for as long as that is likely.

use super::*;

/// Hashes of blocks of ten tokens that begin alike and part behind `alike`.
fn hashes(alike: u64, whose: u64, blocks: u64) -> Vec<BlockHash> {
    let of = |nth: u64| if nth < alike { nth } else { whose * 1_000_000 + nth };
    (0..blocks).map(|nth| BlockHash(u128::from(of(nth) + 1).to_be_bytes())).collect()
}

fn asked(hashes: &[BlockHash], id: u64) -> RouteRequest {
    RouteRequest { request: RequestId(id), ..request(hashes.len() as u32) }
}

/// As a router does it: looks, decides, notes. Where it went and how many blocks it was taken to have there.
fn send(
    guessed: &mut GuessedPrefixes,
    fleet: &Fleet,
    (hashes, id): (&[BlockHash], u64),
    room_tokens: u64,
    now: Timestamp,
) -> (u32, u32) {
    let asked = asked(hashes, id);
    let resident = guessed.of(&asked, hashes, |_| room_tokens, now);
    let held = Held { matched: &PrefixMatch::default(), resident: &resident, coming: &[] };
    let decision = choose(&asked, held, fleet, NOW).unwrap();
    guessed.sent(&asked, hashes, (&decision, room_tokens), now);
    (decision.instance.0, decision.resident_blocks)
}

fn later(seconds: u64) -> Timestamp {
    NOW.after(Duration::from_secs(seconds))
}

#[test]
fn a_conversation_goes_where_its_beginning_was_computed() {
    let (mut guessed, fleet) = (GuessedPrefixes::default(), fleet(4));
    // A place is every 25 blocks of ten tokens.
    let first = send(&mut guessed, &fleet, (&hashes(0, 1, 60), 1), 0, NOW);
    assert_eq!(first.1, 0);
    let again = hashes(0, 1, 90);
    assert_eq!(guessed.of(&asked(&again, 2), &again, |_| 0, NOW), [], "it is not computed yet");
    assert_eq!(send(&mut guessed, &fleet, (&again, 2), 0, later(1)), (first.0, 50));
    for id in 3..20 {
        assert_eq!(send(&mut guessed, &fleet, (&again, id), 0, later(id)), (first.0, 75), "{id}");
        let other = hashes(0, id, 90);
        assert_eq!(send(&mut guessed, &fleet, (&other, 100 + id), 0, later(id)).1, 0, "nothing in common");
    }
    let apart = hashes(30, 9_999, 90);
    let shared = hashes(30, 1, 90);
    send(&mut guessed, &fleet, (&shared, 50), 0, later(30));
    assert_eq!(send(&mut guessed, &fleet, (&apart, 51), 0, later(60)).1, 25, "as far as they are alike");
}

#[test]
fn it_is_gone_after_a_while_after_a_start_and_when_its_room_is_taken() {
    let (fleet, one) = (fleet(1), hashes(0, 1, 50));
    let had = |guessed: &GuessedPrefixes, room, at| {
        guessed.of(&asked(&one, 9), &one, |_| room, at).first().map_or(0, |resident| resident.blocks)
    };
    let mut guessed = GuessedPrefixes::default();
    guessed.lives(InstanceId(1), 5, NOW);
    send(&mut guessed, &fleet, (&one, 1), 0, NOW);
    let kept_s = super::super::guessed::KEPT_FOR.as_secs();
    assert_eq!([1, kept_s - 1, kept_s].map(|after| had(&guessed, 0, later(after))), [50, 50, 0]);
    // Five hundred tokens each.
    for whose in 2..6 {
        send(&mut guessed, &fleet, (&hashes(0, whose, 50), whose), 0, NOW);
    }
    assert_eq!([0, 2_000, 1_999].map(|room| had(&guessed, room, later(1))), [50, 50, 0]);
    guessed.lives(InstanceId(1), 5, later(2));
    assert_eq!(had(&guessed, 0, later(3)), 50, "the same life");
    guessed.lives(InstanceId(1), 6, later(4));
    assert_eq!(had(&guessed, 0, later(5)), 0, "another one");
    send(&mut guessed, &fleet, (&one, 7), 0, later(6));
    assert_eq!(had(&guessed, 0, later(7)), 50);
}

#[test]
fn what_was_under_way_at_a_start_is_gone_and_what_gave_way_is_not_there_before_it_is_computed_anew() {
    let (fleet, long) = (fleet(1), hashes(0, 77, 2_000));
    let had = |guessed: &GuessedPrefixes, hashes: &[BlockHash], room, at| {
        guessed.of(&asked(hashes, 9), hashes, |_| room, at).first().map_or(0, |resident| resident.blocks)
    };
    let mut guessed = GuessedPrefixes::default();
    guessed.lives(InstanceId(1), 5, NOW);
    // Two seconds to compute, and it is started again after one.
    send(&mut guessed, &fleet, (&long, 1), 0, later(1));
    guessed.lives(InstanceId(1), 6, later(2));
    assert_eq!(had(&guessed, &long, 0, later(10)), 0);
    let short = hashes(0, 1, 50);
    send(&mut guessed, &fleet, (&short, 2), 5_000, later(20));
    assert_eq!(had(&guessed, &short, 5_000, later(21)), 50);
    send(&mut guessed, &fleet, (&long, 3), 5_000, later(22));
    assert_eq!(had(&guessed, &short, 5_000, later(30)), 0, "the long one took its room");
    send(&mut guessed, &fleet, (&short, 4), 5_000, later(30));
    assert_eq!([30, 31].map(|at| had(&guessed, &short, 5_000, later(at))), [0, 50]);
}

#[test]
fn a_conversation_that_goes_on_takes_no_more_places_than_it_has() {
    let (mut guessed, fleet) = (GuessedPrefixes::default(), fleet(1));
    let conversation = hashes(0, 1, 1_000);
    for nth in 0..200 {
        send(&mut guessed, &fleet, (&conversation, nth), 0, later(nth));
    }
    // Forty places, and each once a minute.
    assert!(guessed.entered() <= 4 * 40, "{}", guessed.entered());
    // One request, however long, enters a part of what there is room for.
    let longest = hashes(0, 2, 200_000);
    send(&mut guessed, &fleet, (&longest, 999), 0, later(200));
    assert!(guessed.entered() <= 4 * 40 + 4_096, "{}", guessed.entered());
}
