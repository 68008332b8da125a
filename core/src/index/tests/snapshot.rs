//! Snapshots: whole, canonical, and refused when they are not.

use proptest::prelude::*;

use super::random::{intents, tight};
use super::reference::Reference;
use super::*;

/// An index with something of everything.
fn rich() -> Index {
    let mut index = Fixture::with_nodes(4);
    index.say(1, vec![stored([1, 2, 3], Tier::Dram), stored([2], Tier::Ssd)]);
    index.say(3, vec![stored([3, 4], Tier::Gpu)]);
    index.join(2);
    index.say(2, vec![stored([9], Tier::Dram)]);
    index.0.apply(&fence(2, 2));
    index.0.apply(&leave(4, 1));
    index.0.apply(&Command::Pin(pin(7, "ops", [1, 2])));
    index.0.apply(&Command::SetQuota { tenant: TenantId(3), bytes: Some(1 << 40) });
    index.0.apply(&Command::SetTtl { group: GroupId(1), ttl_ms: Some(60_000) });
    index.0
}

fn restore(bytes: &[u8]) -> Result<Index, SnapshotError> {
    Index::restore(bytes, IndexLimits::default())
}

/// The bytes with a right length and digest again, so that only the contents are wrong.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - 32);
    let body = bytes.len() as u64 - 20;
    bytes[12..20].copy_from_slice(&body.to_le_bytes());
    let digest = blake3::hash(&bytes);
    bytes.extend_from_slice(digest.as_bytes());
    bytes
}

#[test]
fn what_is_restored_is_what_was() {
    let index = rich();
    let restored = restore(&index.snapshot()).unwrap();
    assert_eq!(restored.snapshot(), index.snapshot());
    assert_eq!(restored.digest(), index.digest());
    assert_eq!(restored.stats(), index.stats());
    assert!(restored.nodes().eq(index.nodes()));
    let request = blocks([1, 2, 3, 4]);
    assert_eq!(restored.longest_prefix(&request), index.longest_prefix(&request));
    assert_eq!(restored.longest_prefix(&request).union_blocks(), 4);
}

#[test]
fn an_empty_index_is_small_and_comes_back() {
    let bytes = Index::default().snapshot();
    assert!(bytes.len() < 64, "{}", bytes.len());
    assert_eq!(restore(&bytes).unwrap().snapshot(), bytes);
}

#[test]
fn the_format_is_pinned() {
    // If one of these changes, routers can no longer read their snapshots: take a new format number.
    let bytes = rich().snapshot();
    let digest = blake3::hash(&bytes);
    assert_eq!(
        (bytes.len(), digest.to_hex().as_str()),
        (351, "8496ba705e31c609876c6753a98af8ffcd955730f12bd384a4f02f05e2e4b346")
    );
    let index: String = rich().digest().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(index, "9f5f24dfc46a406e7c6fcd54bc79a1a2");
}

#[test]
fn a_block_with_one_holder_costs_nineteen_bytes() {
    let mut index = Fixture::with_nodes(1);
    let empty = index.0.snapshot().len();
    index.say(1, vec![stored(0..1_000, Tier::Dram)]);
    let more = index.0.snapshot().len() - empty;
    assert!(more <= 1_000 * 19 + 8, "{more}");
}

#[test]
fn every_cut_is_told_apart_from_damage() {
    let bytes = rich().snapshot();
    assert_eq!(restore(&[]).unwrap_err(), SnapshotError::NotASnapshot);
    for end in 1..bytes.len() {
        let error = restore(&bytes[..end]).unwrap_err();
        assert!(matches!(error, SnapshotError::Torn { .. }), "{end}: {error}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(restore(&longer).unwrap_err(), SnapshotError::Torn { .. }));
}

#[test]
fn every_flipped_bit_is_noticed() {
    let bytes = rich().snapshot();
    for place in 0..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            let error = restore(&damaged).unwrap_err();
            let expected = match place {
                0..8 => matches!(error, SnapshotError::NotASnapshot),
                8..12 => matches!(error, SnapshotError::Format { .. }),
                12..20 => matches!(error, SnapshotError::Torn { .. }),
                _ => error == SnapshotError::Corrupt,
            };
            assert!(expected, "byte {place} bit {bit}: {error}");
        }
    }
}

#[test]
fn errors_say_what_to_do() {
    let bytes = rich().snapshot();
    let mut newer = bytes.clone();
    newer[8] = 2;
    let text = restore(&newer).unwrap_err().to_string();
    assert_eq!(text, "snapshot format 2 is not known here, only 1: use the release that wrote it");
    let text = restore(&bytes[..bytes.len() - 1]).unwrap_err().to_string();
    let (got, expected) = (bytes.len() - 1, bytes.len());
    let wanted =
        format!("snapshot has {got} bytes instead of {expected}: it was cut off or something was appended");
    assert_eq!(text, wanted);
    let mut damaged = bytes;
    damaged[30] ^= 1;
    let text = restore(&damaged).unwrap_err().to_string();
    assert_eq!(text, "snapshot is damaged: its digest does not match; take it from another router");
    let text = restore(b"something else").unwrap_err().to_string();
    assert_eq!(text, "not an index snapshot: it does not start with \"kvfindex\"");
}

#[test]
fn contents_that_make_no_sense_are_refused_even_under_a_right_digest() {
    // One block, one holder, at the end of the body: hash, 1, place, tiers.
    let mut index = Fixture::with_nodes(2);
    index.say(2, vec![stored([1], Tier::Dram)]);
    let bytes = index.0.snapshot();
    let end = bytes.len() - 32;
    let invalid = |place: usize, value: u8| {
        let mut forged = bytes.clone();
        assert_ne!(forged[place], value);
        forged[place] = value;
        match restore(&sealed(forged)) {
            Err(SnapshotError::Invalid(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert!(invalid(end - 1, 0).starts_with("tiers at byte"));
    assert!(invalid(end - 1, 8).starts_with("tiers at byte"));
    assert!(invalid(end - 2, 2).starts_with("holder at byte"), "there are two nodes");
    assert!(invalid(end - 3, 0).starts_with("holders at byte"));
    assert!(invalid(end - 3, 2).starts_with("ends at byte"));
    assert!(invalid(end - 20, 2).starts_with("ends at byte"), "two blocks");
    assert!(invalid(end - 20, 0).contains("more bytes follow"), "no block");
}

#[test]
fn a_fenced_node_cannot_hold_a_block() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored([1], Tier::Dram)]);
    let live = index.0.snapshot();
    index.0.apply(&fence(1, 1));
    let fenced = index.0.snapshot();
    let place = (0..live.len()).find(|&place| place >= 20 && live[place] != fenced[place]).unwrap();
    let mut forged = live;
    assert_eq!((forged[place], fenced[place]), (1, 0), "this is the live flag");
    forged[place] = 0;
    let error = restore(&sealed(forged)).unwrap_err().to_string();
    assert!(error.contains("holder at byte"), "{error}");
}

#[test]
fn order_is_part_of_the_format() {
    // Two blocks swapped, under a right digest.
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored([1, 2], Tier::Dram)]);
    let mut bytes = index.0.snapshot();
    let end = bytes.len() - 32;
    let (first, second) = (end - 38..end - 19, end - 19..end);
    let swapped = [bytes[second].to_vec(), bytes[first].to_vec()].concat();
    bytes[end - 38..end].copy_from_slice(&swapped);
    let error = restore(&sealed(bytes)).unwrap_err().to_string();
    assert!(error.contains("block at byte"), "{error}");
}

#[test]
fn a_snapshot_above_newer_limits_is_kept() {
    let bytes = rich().snapshot();
    let none = IndexLimits { nodes_max: 0, copies_max: 0, pins_max: 0, ..IndexLimits::default() };
    let mut index = Index::restore(&bytes, none).unwrap();
    assert_eq!(index.snapshot(), bytes);
    assert!(matches!(index.apply(&Command::Join(record(9))), Applied::Refused(_)));
}

#[test]
fn numbers_at_their_end_do_not_panic() {
    // Epoch and sequence number u64::MAX, as a forged snapshot may bring them.
    let mut index = Fixture::with_nodes(1);
    index.0.nodes.state_mut(0).unwrap().epoch = Epoch(u64::MAX);
    index.0.nodes.state_mut(0).unwrap().next_seq = Seq(u64::MAX);
    let mut index = restore(&index.0.snapshot()).unwrap();
    let last = Command::Announce(vec![announcement(1, u64::MAX, u64::MAX, vec![])]);
    let gap = AnnounceOutcome::Gap { expected: Seq(u64::MAX) };
    assert_eq!(index.apply(&last), Applied::Announced(vec![gap]));
    assert_eq!(index.apply(&Command::Join(record(1))), Applied::Joined(Epoch(u64::MAX)));
}

proptest! {
    /// Whatever a life leads to comes back from its snapshot, to the byte.
    #[test]
    fn any_state_comes_back(intents in intents()) {
        let mut reference = Reference::new(tight());
        let mut index = Index::new(tight());
        for intent in intents {
            let command = intent.command(&reference);
            reference.apply(&command);
            index.apply(&command);
        }
        let bytes = index.snapshot();
        let restored = Index::restore(&bytes, tight()).unwrap();
        prop_assert_eq!(restored.snapshot(), bytes);
        prop_assert_eq!(restored.stats(), reference.stats());
        prop_assert_eq!(restored.stale_holds(), 0);
    }

    /// Forged contents under a right digest are refused or are the snapshot of the state they lead to.
    #[test]
    fn forged_contents_are_refused_or_canonical(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = rich().snapshot();
        for (place, value) in changes {
            let body = 20 + place.index(bytes.len() - 52);
            bytes[body] = value;
        }
        let bytes = sealed(bytes);
        if let Ok(index) = restore(&bytes) {
            prop_assert_eq!(index.snapshot(), bytes);
        }
    }

    /// Any bytes whatever are refused without a panic.
    #[test]
    fn any_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 52..300)) {
        prop_assert!(restore(&bytes).is_err());
        bytes[..8].copy_from_slice(b"kvfindex");
        bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
        let bytes = sealed(bytes);
        if let Ok(index) = restore(&bytes) {
            prop_assert_eq!(index.snapshot(), bytes);
        }
    }
}
