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
    guessed.sent(&asked, hashes, &decision, now);
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
