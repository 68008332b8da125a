//! Generations of weights advance one by one; each advance ends all earlier announcements at once.

use super::*;

fn set(to: u32) -> Command {
    Command::SetGeneration(Generation(to))
}

fn refused(now: u32, to: u32) -> Applied {
    Applied::Refused(Refusal::Generation { now: Generation(now), to: Generation(to) })
}

#[test]
fn generations_advance_by_one_and_may_be_repeated() {
    let mut index = Fixture::with_nodes(1);
    assert_eq!(index.0.generation(), Generation(0));
    assert_eq!(index.0.apply(&set(0)), Applied::Ignored, "it is the generation in force");
    assert_eq!(index.0.apply(&set(2)), refused(0, 2));
    assert_eq!(index.0.apply(&set(1)), Applied::Done);
    assert_eq!(index.0.apply(&set(1)), Applied::Ignored, "a repeated call must change no state");
    assert_eq!(index.0.apply(&set(0)), refused(1, 0));
    assert_eq!(index.0.apply(&set(u32::MAX)), refused(1, u32::MAX));
    assert_eq!(index.0.apply(&set(2)), Applied::Done);
    assert_eq!(index.0.generation(), Generation(2));
}

#[test]
fn last_generation_does_not_wrap() {
    let mut index = Fixture::with_nodes(0);
    index.0.directives.generation = Generation(u32::MAX);
    assert_eq!(index.0.apply(&set(0)), refused(u32::MAX, 0), "generations must not wrap around");
    assert_eq!(index.0.apply(&set(u32::MAX)), Applied::Ignored);
}

#[test]
fn a_refusal_names_both_generations() {
    let Applied::Refused(refusal) = Fixture::with_nodes(0).0.apply(&set(7)) else { panic!("not refused") };
    let text = refusal.to_string();
    assert!(
        text.starts_with("generation-7 does not follow generation-0, the generation in force: "),
        "{text}"
    );
}

#[test]
fn new_generation_ends_all_epochs() {
    let mut index = Fixture::with_nodes(3);
    index.announce_next(1, vec![stored([1, 2, 3], Tier::Dram)]);
    index.announce_next(2, vec![stored([1, 2], Tier::Ssd)]);
    index.0.apply(&fence(3, 1));
    index.0.apply(&set(1));
    assert_eq!((index.prefix_blocks([1, 2, 3]), index.0.copies()), (0, 0));
    assert!(index.0.nodes().all(|node| !node.live && node.blocks == 0));
    assert!((1..=3).all(|node| index.0.is_epoch_over(NodeId(node), Epoch(1))));
    let late = index.announce(1, 1, 2, vec![stored([4], Tier::Dram)]);
    assert_eq!(late, AnnounceOutcome::Fenced, "announced under the earlier weights");
    assert_eq!(
        index.join(1),
        Applied::Joined(Epoch(2)),
        "a join carries the identity of the manifest, as always"
    );
    assert_eq!(index.prefix_blocks([1]), 0);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    assert_eq!(index.runs([1, 2]), [(0, 1, vec![(1, Tier::Dram)])]);
}

#[test]
fn operator_settings_survive_a_generation() {
    let mut index = Fixture::with_nodes(1);
    index.0.apply(&Command::Pin(pin(1, "ops", [1, 2])));
    index.0.apply(&Command::SetQuota { tenant: TenantId(1), bytes: Some(7) });
    index.0.apply(&set(1));
    assert_eq!((index.0.stats().pins, index.0.stats().quotas, index.0.stats().nodes), (1, 1, 1));
}

#[test]
fn generation_change_leaves_blocks_to_the_sweep() {
    let blocks = 4_000;
    let mut index = Fixture::with_nodes(2);
    for node in 1..=2 {
        index.announce_next(node, vec![stored(0..blocks, Tier::Dram)]);
    }
    index.0.apply(&set(1));
    let stale = index.0.stale_copies();
    // One command sweeps one slice, no more than any other command.
    assert!(stale > 2 * blocks - 256, "{stale} of {} remain", 2 * blocks);
    let before = index.0.stale_copies();
    index.0.apply(&set(1));
    let slice = before - index.0.stale_copies();
    assert!(slice > 0 && 2 * blocks - stale <= 2 * slice.max(128), "{slice} blocks in a slice");
    for _ in 0..2 * blocks {
        index.0.apply(&set(1));
    }
    assert_eq!(index.0.stale_copies(), 0);
    assert!(index.0.snapshot().len() < 512, "swept blocks must take no space");
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
