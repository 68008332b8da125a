//! What was counted where a request was sent, and is taken back where it runs elsewhere.

use super::*;

fn hashes(blocks: u64) -> Vec<BlockHash> {
    (1..=blocks).map(|nth| BlockHash(u128::from(nth).to_be_bytes())).collect()
}

fn after_ms(ms: u64) -> Timestamp {
    NOW.after(Duration::from_millis(ms))
}

fn decided(fleet: &Fleet, id: u64, now: Timestamp) -> Decision {
    let request = RouteRequest { request: RequestId(id), ..request(60) };
    choose(&request, &PrefixMatch::default(), fleet, now).unwrap()
}

fn load(fleet: &Fleet, instance: InstanceId) -> Load {
    fleet.instance(instance).unwrap().load
}

#[test]
fn what_was_counted_between_two_reports_is_as_if_it_had_not_been_sent() {
    let mut fleet = fleet(2);
    let first = decided(&fleet, 1, NOW);
    fleet.record(&first, NOW);
    let before = load(&fleet, first.instance);
    // One behind it, which stays, and one before it by its turn.
    let second = Decision { turn: after_ms(90_000), ..first.clone() };
    for moved in [second, Decision { turn: Timestamp(0), ..first.clone() }] {
        let mut other = fleet.clone();
        other.record(&moved, NOW);
        assert_ne!(load(&other, first.instance), before);
        other.take_back(&Counted::of(&moved, NOW), NOW);
        assert_eq!(load(&other, first.instance), before, "{:?}", moved.turn);
    }
    fleet.take_back(&Counted::of(&first, NOW), NOW);
    assert_eq!(decided(&fleet, 2, NOW).candidates.iter().map(|one| one.predicted.queue_us).sum::<u64>(), 0);
    // Twice is not less than nothing.
    fleet.take_back(&Counted::of(&first, NOW), NOW);
    let left = load(&fleet, first.instance);
    assert_eq!((left.routed, left.routed_tokens), (0, 0));
}

#[test]
fn what_a_report_told_since_is_as_it_says() {
    let mut fleet = fleet(1);
    let decision = decided(&fleet, 1, NOW);
    fleet.record(&decision, NOW);
    let reported_at = after_ms(1);
    fleet.put_instance(Instance { load: Load::reported(900, 1, 2), reported_at, ..instance(1) });
    fleet.take_back(&Counted::of(&decision, NOW), after_ms(2));
    let load = load(&fleet, InstanceId(1));
    assert_eq!((load.queue_tokens, load.routed, load.waiting), (900, 0, 2));
    // One that left meanwhile is no matter.
    fleet.remove_instance(InstanceId(1));
    fleet.take_back(&Counted::of(&decision, NOW), NOW);
    fleet.record_moved(&decision, NOW);
    assert_eq!(fleet.instances(), []);
}

#[test]
fn it_counts_where_it_runs_and_once_among_prompts_in_general() {
    let mut fleet = fleet(2);
    let decision = decided(&fleet, 1, NOW);
    fleet.record(&decision, NOW);
    let other = InstanceId(3 - decision.instance.0);
    let among = Eligible { among: Some(&[other]), runs_there: true, ..Eligible::default() };
    let request = RouteRequest { request: RequestId(1), ..request(60) };
    fleet.take_back(&Counted::of(&decision, NOW), NOW);
    let there = choose_among(&request, &PrefixMatch::default(), among, &fleet, NOW).unwrap();
    let lengthening = |fleet: &Fleet| fleet.passing().lengthening_us(1_000_000, 1_000);
    let before = lengthening(&fleet);
    fleet.record_moved(&there, NOW);
    assert_eq!(lengthening(&fleet), before);
    let routed = |instance| load(&fleet, instance).routed_tokens;
    assert_eq!((routed(decision.instance), routed(other)), (0, 600));
}

#[test]
fn a_partner_has_one_less_and_another_one_more() {
    let mut fleet = fleet(3);
    let handover = |instance| Some(Handover { instance: InstanceId(instance), us: 5, running: 0, others: 0 });
    let pair = Decision { handover: handover(3), instance: InstanceId(1), ..decided(&fleet, 1, NOW) };
    fleet.record(&pair, NOW);
    assert_eq!(load(&fleet, InstanceId(3)).routed, 1);
    fleet.take_back(&Counted::of(&pair, NOW), NOW);
    fleet.record_moved(&Decision { handover: handover(2), ..pair }, NOW);
    assert_eq!([1, 2, 3].map(|nth| load(&fleet, InstanceId(nth)).routed), [1, 1, 0]);
}

#[test]
fn a_prefix_that_one_alone_was_to_bring_does_not_come() {
    let (fleet, hashes, request) = (fleet(1), hashes(60), request(60));
    let decision = decided(&fleet, 1, NOW);
    let coming = |sent: &SentPrefixes| sent.of(&request, &hashes, NOW).len();
    let mut sent = SentPrefixes::default();
    sent.sent(&request, &hashes, &decision, NOW);
    let mut two = sent.clone();
    sent.take_back(&request, &hashes, &Counted::of(&decision, NOW));
    assert_eq!(coming(&sent), 0);
    // Another one behind it brings it as well.
    let behind = Decision { turn: after_ms(50), ..decision.clone() };
    two.sent(&request, &hashes, &behind, after_ms(3));
    two.take_back(&request, &hashes, &Counted::of(&behind, after_ms(3)));
    assert_eq!(coming(&two), 1, "the first does");
    two.sent(&request, &hashes, &behind, after_ms(3));
    two.take_back(&request, &hashes, &Counted::of(&decision, NOW));
    assert_eq!(coming(&two), 1, "the second does");
}

#[test]
fn what_was_sent_as_text_is_guessed_to_be_there_no_more_unless_it_was_before() {
    let (fleet, hashes, request) = (fleet(1), hashes(60), request(60));
    let decision = decided(&fleet, 1, NOW);
    let had = |guessed: &GuessedPrefixes| guessed.of(&request, &hashes, |_| 0, after_ms(60_000)).len();
    let mut guessed = GuessedPrefixes::default();
    guessed.sent(&request, &hashes, (&decision, 0), NOW);
    assert_eq!(had(&guessed), 1);
    let mut again = guessed.clone();
    guessed.take_back(&request, &hashes, &Counted::of(&decision, NOW));
    assert_eq!(had(&guessed), 0);
    again.sent(&request, &hashes, (&decision, 0), after_ms(30_000));
    again.take_back(&request, &hashes, &Counted::of(&decision, after_ms(30_000)));
    assert_eq!(had(&again), 1);
}
