//! Load recorded where a request was sent is retracted if it runs elsewhere.

use super::*;

fn hashes(blocks: u64) -> Vec<BlockHash> {
    (1..=blocks).map(|nth| BlockHash::from_words(0, nth)).collect()
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
fn retract_undoes_record_between_reports() {
    let mut fleet = fleet(2);
    let first = decided(&fleet, 1, NOW);
    fleet.record(&first, NOW);
    let before = load(&fleet, first.instance);
    // One behind it, which stays, and one with an earlier deadline.
    let second = Decision { priority_deadline: after_ms(90_000), ..first.clone() };
    for moved in [second, Decision { priority_deadline: Timestamp(0), ..first.clone() }] {
        let mut other = fleet.clone();
        other.record(&moved, NOW);
        assert_ne!(load(&other, first.instance), before);
        other.retract(&RouteRecord::of(&moved, NOW), NOW);
        assert_eq!(load(&other, first.instance), before, "{:?}", moved.priority_deadline);
    }
    fleet.retract(&RouteRecord::of(&first, NOW), NOW);
    assert_eq!(decided(&fleet, 2, NOW).candidates.iter().map(|one| one.predicted.queue_us).sum::<u64>(), 0);
    // Retracting twice saturates at zero.
    fleet.retract(&RouteRecord::of(&first, NOW), NOW);
    let left = load(&fleet, first.instance);
    assert_eq!((left.routed, left.routed_tokens), (0, 0));
}

#[test]
fn retract_keeps_newer_reports() {
    let mut fleet = fleet(1);
    let decision = decided(&fleet, 1, NOW);
    fleet.record(&decision, NOW);
    let reported_at = after_ms(1);
    fleet.put_instance(Instance { load: Load::reported(900, 1, 2), reported_at, ..instance(1) });
    fleet.retract(&RouteRecord::of(&decision, NOW), after_ms(2));
    let load = load(&fleet, InstanceId(1));
    assert_eq!((load.queue_tokens, load.routed, load.waiting), (900, 0, 2));
    // An instance that left meanwhile is ignored.
    fleet.remove_instance(InstanceId(1));
    fleet.retract(&RouteRecord::of(&decision, NOW), NOW);
    fleet.record_reassigned(&decision, NOW);
    assert_eq!(fleet.instances(), []);
}

#[test]
fn reassigned_request_counts_once_in_statistics() {
    let mut fleet = fleet(2);
    let decision = decided(&fleet, 1, NOW);
    fleet.record(&decision, NOW);
    let other = InstanceId(3 - decision.instance.0);
    let among = InstanceFilter { candidates: Some(&[other]), is_pinned: true, ..InstanceFilter::default() };
    let request = RouteRequest { request: RequestId(1), ..request(60) };
    fleet.retract(&RouteRecord::of(&decision, NOW), NOW);
    let there = choose_filtered(&request, &PrefixMatch::default(), among, &fleet, NOW).unwrap();
    let lengthening = |fleet: &Fleet| fleet.overtaking().expected_delay_us(1_000_000, 1_000);
    let before = lengthening(&fleet);
    fleet.record_reassigned(&there, NOW);
    assert_eq!(lengthening(&fleet), before);
    let routed = |instance| load(&fleet, instance).routed_tokens;
    assert_eq!((routed(decision.instance), routed(other)), (0, 600));
}

#[test]
fn retract_moves_load_between_partners() {
    let mut fleet = fleet(3);
    let handover =
        |instance| Some(Handover { instance: InstanceId(instance), handover_us: 5, running: 0, others: 0 });
    let pair = Decision { handover: handover(3), instance: InstanceId(1), ..decided(&fleet, 1, NOW) };
    fleet.record(&pair, NOW);
    assert_eq!(load(&fleet, InstanceId(3)).routed, 1);
    fleet.retract(&RouteRecord::of(&pair, NOW), NOW);
    fleet.record_reassigned(&Decision { handover: handover(2), ..pair }, NOW);
    assert_eq!([1, 2, 3].map(|nth| load(&fleet, InstanceId(nth)).routed), [1, 1, 0]);
}

#[test]
fn retract_removes_sole_in_flight_prefix() {
    let (fleet, hashes, request) = (fleet(1), hashes(60), request(60));
    let decision = decided(&fleet, 1, NOW);
    let coming = |sent: &InFlightPrefixes| sent.lookup(&request, &hashes, NOW).len();
    let mut sent = InFlightPrefixes::default();
    sent.record(&request, &hashes, &decision, NOW);
    let mut two = sent.clone();
    sent.retract(&request, &hashes, &RouteRecord::of(&decision, NOW));
    assert_eq!(coming(&sent), 0);
    // Another request behind it brings the prefix too.
    let behind = Decision { priority_deadline: after_ms(50), ..decision.clone() };
    two.record(&request, &hashes, &behind, after_ms(3));
    two.retract(&request, &hashes, &RouteRecord::of(&behind, after_ms(3)));
    assert_eq!(coming(&two), 1, "the first does");
    two.record(&request, &hashes, &behind, after_ms(3));
    two.retract(&request, &hashes, &RouteRecord::of(&decision, NOW));
    assert_eq!(coming(&two), 1, "the second does");
}

#[test]
fn retract_removes_new_inferred_prefix() {
    let (fleet, hashes, request) = (fleet(1), hashes(60), request(60));
    let decision = decided(&fleet, 1, NOW);
    let had = |guessed: &InferredPrefixes| guessed.lookup(&request, &hashes, |_| 0, after_ms(60_000)).len();
    let mut guessed = InferredPrefixes::default();
    guessed.record(&request, &hashes, &decision, 0, NOW);
    assert_eq!(had(&guessed), 1);
    let mut again = guessed.clone();
    guessed.retract(&request, &hashes, &RouteRecord::of(&decision, NOW));
    assert_eq!(had(&guessed), 0);
    again.record(&request, &hashes, &decision, 0, after_ms(30_000));
    again.retract(&request, &hashes, &RouteRecord::of(&decision, after_ms(30_000)));
    assert_eq!(had(&again), 1);
}
