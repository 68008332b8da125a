//! Generations of weights: they follow each other one by one, and what was announced under the one before is gone at once.

use super::*;

fn set(to: u32) -> Command {
    Command::SetGeneration(Generation(to))
}

fn refused(now: u32, to: u32) -> Applied {
    Applied::Refused(Refusal::Generation { now: Generation(now), to: Generation(to) })
}

#[test]
fn generations_follow_each_other_and_the_one_in_force_may_be_said_again() {
    let mut index = Fixture::with_nodes(1);
    assert_eq!(index.0.generation(), Generation(0));
    assert_eq!(index.0.apply(&set(0)), Applied::Ignored, "it is in force");
    assert_eq!(index.0.apply(&set(2)), refused(0, 2));
    assert_eq!(index.0.apply(&set(1)), Applied::Done);
    assert_eq!(index.0.apply(&set(1)), Applied::Ignored, "a call whose answer was lost is repeated");
    assert_eq!(index.0.apply(&set(0)), refused(1, 0));
    assert_eq!(index.0.apply(&set(u32::MAX)), refused(1, u32::MAX));
    assert_eq!(index.0.apply(&set(2)), Applied::Done);
    assert_eq!(index.0.generation(), Generation(2));
}

#[test]
fn the_last_generation_has_none_after_it() {
    let mut index = Fixture::with_nodes(0);
    index.0.directives.generation = Generation(u32::MAX);
    assert_eq!(index.0.apply(&set(0)), refused(u32::MAX, 0), "it does not begin anew");
    assert_eq!(index.0.apply(&set(u32::MAX)), Applied::Ignored);
}

#[test]
fn a_refusal_names_both_generations() {
    let Applied::Refused(refusal) = Fixture::with_nodes(0).0.apply(&set(7)) else { panic!("not refused") };
    let text = refusal.to_string();
    assert!(text.starts_with("generation-7 does not follow generation-0, which is in force: "), "{text}");
}

#[test]
fn what_was_announced_before_is_gone_at_once_and_late_words_are_refused() {
    let mut index = Fixture::with_nodes(3);
    index.say(1, vec![stored([1, 2, 3], Tier::Dram)]);
    index.say(2, vec![stored([1, 2], Tier::Ssd)]);
    index.0.apply(&fence(3, 1));
    index.0.apply(&set(1));
    assert_eq!((index.reach([1, 2, 3]), index.0.copies()), (0, 0));
    assert!(index.0.nodes().all(|node| !node.live && node.blocks == 0));
    assert!((1..=3).all(|node| index.0.is_over(NodeId(node), Epoch(1))));
    let late = index.announce(1, 1, 2, vec![stored([4], Tier::Dram)]);
    assert_eq!(late, AnnounceOutcome::Fenced, "of the weights before");
    assert_eq!(index.join(1), Applied::Joined(Epoch(2)), "with the identity of its manifest, as always");
    assert_eq!(index.reach([1]), 0);
    index.say(1, vec![stored([1], Tier::Dram)]);
    assert_eq!(index.runs([1, 2]), [(0, 1, vec![(1, Tier::Dram)])]);
}

#[test]
fn what_operators_asked_for_stays() {
    let mut index = Fixture::with_nodes(1);
    index.0.apply(&Command::Pin(pin(1, "ops", [1, 2])));
    index.0.apply(&Command::SetQuota { tenant: TenantId(1), bytes: Some(7) });
    index.0.apply(&set(1));
    assert_eq!((index.0.stats().pins, index.0.stats().quotas, index.0.stats().nodes), (1, 1, 1));
}

#[test]
fn a_change_touches_nodes_and_no_block_and_the_rest_is_swept_behind_it() {
    let blocks = 4_000;
    let mut index = Fixture::with_nodes(2);
    for node in 1..=2 {
        index.say(node, vec![stored(0..blocks, Tier::Dram)]);
    }
    index.0.apply(&set(1));
    let stale = index.0.stale_holds();
    // One command sweeps its slice, and it is no more than any other command sweeps.
    assert!(stale > 2 * blocks - 256, "{stale} of {} are left", 2 * blocks);
    let before = index.0.stale_holds();
    index.0.apply(&set(1));
    let slice = before - index.0.stale_holds();
    assert!(slice > 0 && 2 * blocks - stale <= 2 * slice.max(128), "{slice} in a slice");
    for _ in 0..2 * blocks {
        index.0.apply(&set(1));
    }
    assert_eq!(index.0.stale_holds(), 0);
    assert!(index.0.snapshot().len() < 512, "nothing of it takes room");
}

#[test]
fn a_generation_is_in_digests_and_snapshots() {
    let (mut one, mut other) = (Fixture::with_nodes(0).0, Fixture::with_nodes(0).0);
    one.apply(&set(1));
    assert_ne!(one.digest(), other.digest());
    other.apply(&set(1));
    assert_eq!(one.digest(), other.digest());
    let restored = Index::restore(&one.snapshot(), IndexLimits::default()).unwrap();
    assert_eq!((restored.generation(), restored.digest()), (Generation(1), one.digest()));
}
