//! Snapshots: complete, canonical, and refused if damaged or forged.

use proptest::prelude::*;

use super::random::{Honesty, intents, tight};
use super::reference::ReferenceIndex;
use super::*;
use crate::id::DIGEST_BYTES;

/// An index with an example of every kind of state.
fn populated_index() -> Index {
    let mut index = Fixture::with_nodes(0);
    index.0.apply(&Command::SetGeneration(Generation(1)));
    (1..=4).for_each(|node| drop(index.join(node)));
    index.announce_next(1, vec![stored([1, 2, 3], Tier::Dram), stored([2], Tier::Ssd)]);
    index.announce_next(3, vec![stored([3, 4], Tier::Gpu)]);
    // A block group with two pages; only the second keeps blocks.
    let twins =
        Change::Stored { parent: None, blocks: vec![sibling_block(80), sibling_block(81)], tier: Tier::Dram };
    index.announce_next(3, vec![stored(80..83, Tier::Gpu), twins, dropped(80..83, Tier::Gpu)]);
    index.join(2);
    index.announce_next(2, vec![stored([9], Tier::Dram)]);
    index.0.apply(&fence(2, 2));
    index.0.apply(&leave(4, 1));
    index.0.apply(&Command::Pin(pin(7, "ops", [1, 2])));
    index.0.apply(&Command::SetQuota { tenant: TenantId(3), bytes: Some(1 << 40) });
    index.0.apply(&Command::SetTtl { group: TtlGroupId(1), ttl_ms: Some(60_000) });
    index.0
}

fn restore(bytes: &[u8]) -> Result<Index, SnapshotError> {
    Index::restore(bytes, IndexLimits::default())
}

/// Recomputes every checksum, so that only the contents are wrong.
fn with_valid_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut at = 12;
    while at + 4 < bytes.len() {
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let end = (at + 4 + length).min(bytes.len());
        if at + 12 > end {
            break;
        }
        let check = xxhash_rust::xxh3::xxh3_64(&bytes[at + 4..end - 8]);
        bytes[end - 8..end].copy_from_slice(&check.to_le_bytes());
        at = end;
    }
    bytes
}

/// Range of each chunk's body, without the length before it and the checksum behind it.
fn bodies(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut bodies = Vec::new();
    let mut at = 12;
    while at < bytes.len() {
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        bodies.push(at + 4..at + 4 + length - 8);
        at += 4 + length;
    }
    bodies
}

#[test]
fn restored_index_equals_the_original() {
    let index = populated_index();
    let restored = restore(&index.snapshot()).unwrap();
    assert_eq!(restored.snapshot(), index.snapshot());
    assert_eq!(restored.digest(), index.digest());
    assert_eq!(restored.stats(), index.stats());
    assert!(restored.nodes().eq(index.nodes()));
    assert_eq!(restored.generation(), Generation(1));
    let request = blocks([1, 2, 3, 4]);
    assert_eq!(restored.longest_prefix(&request), index.longest_prefix(&request));
    assert_eq!(restored.longest_prefix(&request).union_blocks(), 4);
}

#[test]
fn empty_index_round_trips() {
    let bytes = Index::default().snapshot();
    assert!(bytes.len() < 96, "{}", bytes.len());
    assert_eq!(restore(&bytes).unwrap().snapshot(), bytes);
}

#[test]
fn the_format_is_pinned() {
    // If one of these changes, routers can no longer read their snapshots: raise the format number.
    let bytes = populated_index().snapshot();
    let digest = blake3::hash(&bytes);
    assert_eq!(
        (bytes.len(), digest.to_hex().as_str()),
        (489, "0fd3076c71e66781eec568be1f81c8ae38381d3d9591229fe92b4cbaf4f9543d")
    );
    let index: String = populated_index().digest().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(index, "34d52517cc7559dcf49d0de49ab920e3");
}

#[test]
fn a_block_costs_little_more_than_its_hash() {
    let mut index = Fixture::with_nodes(1);
    let empty = index.0.snapshot().len();
    index.announce_next(1, vec![stored(0..1_000, Tier::Dram)]);
    let more = index.0.snapshot().len() - empty;
    // Five bytes of each hash are stored once per block group. Runs are short in tests: 24 blocks,
    // with their end, three pages, births and one extent.
    assert!(more <= 1_000 * DIGEST_BYTES + 125 * 5 + 1_000 / 24 * 24 + 64, "{more}");
}

#[test]
fn truncation_is_distinguished_from_damage() {
    let bytes = populated_index().snapshot();
    let bodies = bodies(&bytes);
    for end in 12..bytes.len() {
        let error = restore(&bytes[..end]).unwrap_err();
        let whole = bodies.iter().filter(|body| body.end + 8 <= end).count();
        assert_eq!(error, SnapshotError::Incomplete { got: whole as u64 });
    }
    let last = bodies.last().unwrap().start - 4;
    let error = restore(&[&bytes[..], &bytes[last..]].concat()).unwrap_err();
    assert!(error.to_string().contains("chunk number"), "a chunk after the end: {error}");
}

#[test]
fn every_flipped_bit_is_noticed() {
    let bytes = populated_index().snapshot();
    let bodies = bodies(&bytes);
    for place in 8..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            let error = restore(&damaged).unwrap_err();
            let in_chunk = bodies.iter().position(|body| (body.start..body.end + 8).contains(&place));
            let expected = match (place, in_chunk) {
                (..12, _) => matches!(error, SnapshotError::Format { .. }),
                (_, Some(chunk)) => error == SnapshotError::Corrupt { chunk: chunk as u64 },
                // A length byte: the chunk boundary is wrong.
                (_, None) => {
                    matches!(error, SnapshotError::Corrupt { .. } | SnapshotError::Incomplete { .. })
                }
            };
            assert!(expected, "byte {place} bit {bit}: {error}");
        }
    }
}

#[test]
fn errors_name_the_remedy() {
    let bytes = populated_index().snapshot();
    let mut older = bytes.clone();
    older[8] = 7;
    let text = restore(&older).unwrap_err().to_string();
    assert_eq!(text, "snapshot format 7 is unknown, this release reads 9: use the release that wrote it");
    let text = restore(&bytes[..bytes.len() - 1]).unwrap_err().to_string();
    assert_eq!(text, "snapshot is incomplete: it ends after 3 chunks without an end chunk");
    let mut damaged = bytes;
    damaged[30] ^= 1;
    let text = restore(&damaged).unwrap_err().to_string();
    let wanted = "snapshot is damaged: the checksum of chunk 0 does not match";
    assert_eq!(text, wanted);
}

#[test]
fn invalid_contents_with_valid_checksums_are_refused() {
    // One run of one block, the second of its group. Bytes: end 2; page 0 (canonical: 2 * 0 + 1,
    // plus 1); predecessor (run, offset, birth); birth; head bits; fork; one extent (slot 1,
    // incarnation 0, from 1, one block, tiers); one entry point at 1; the group; the hash.
    let mut index = Fixture::with_nodes(2);
    index.announce_next(2, vec![stored([1], Tier::Dram)]);
    let bytes = index.0.snapshot();
    let runs = bodies(&bytes)[1].clone();
    let refused = |place: usize, value: u8| {
        let mut forged = bytes.clone();
        assert_ne!(forged[runs.start + place], value);
        forged[runs.start + place] = value;
        restore(&with_valid_checksums(forged)).unwrap_err().to_string()
    };
    // Kind, chunk number, first run; then the run.
    let run = [2, 2, 0, 0, 0, 0, 0, 2, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 2, 1, 1, 7];
    assert_eq!(bytes[runs.start..runs.start + 25], [&[2, 1, 0][..], &run].concat());
    assert!(refused(0, 5).contains("chunk kind at byte 0 is 5"));
    assert!(refused(1, 2).contains("chunk number at byte 1 is 2"));
    assert!(refused(2, 1).contains("run at byte 2 is 1"));
    assert!(refused(3, 25).contains("end of a run at byte"), "longer than any run");
    assert!(refused(3, 3).contains("run at byte"), "the end has no holder");
    assert!(refused(4, 0).contains("run at byte"), "a held block without a page");
    assert!(refused(4, 1).contains("octets at byte"), "the group has no canonical page");
    assert!(refused(12, 2).contains("run at byte"), "it starts where it ends");
    assert!(refused(12, 0).contains("ends at byte"), "a second hash is missing");
    assert!(refused(16, 0).contains("run at byte"), "the end has no holder");
    assert!(refused(17, 2).contains("holder at byte"), "there are two slots");
    assert!(refused(18, 1).contains("holder at byte"), "a future incarnation");
    assert!(refused(19, 0).contains("run at byte"), "an extent before the start");
    assert!(refused(19, 2).contains("run at byte"), "an extent past the end");
    assert!(refused(20, 0).contains("run at byte"), "an empty extent");
    assert!(refused(21, 0).contains("tiers at byte"));
    assert!(refused(21, 8).contains("tiers at byte"));
    assert!(refused(21, 1).contains("state with another digest"), "another tier");
    assert!(refused(22, 2).contains("ends at byte"), "an entry point is read from the last hash's bytes");
    assert!(refused(23, 2).contains("run at byte"), "an entry point past the end");
    assert!(refused(24, 0).contains("state with another digest"), "another root");
    assert!(
        refused(25, bytes[runs.start + 25] | 1).contains("octet at byte"),
        "a block group must have no index"
    );
    assert!(refused(29, 0xEE).contains("state with another digest"), "another hash");
}

#[test]
fn predecessor_before_a_first_block_is_ignored() {
    // One run of one block; it names as its predecessor the first position of its own group, which
    // holds no block.
    for nth in [1, 2] {
        let mut index = Fixture::with_nodes(1);
        index.announce_next(1, vec![stored([nth], Tier::Dram)]);
        let mut bytes = index.0.snapshot();
        let before = bodies(&bytes)[1].start + 5;
        // The run, the offset, and its birth, which equals that of the run itself.
        assert_eq!(bytes[before..before + 7], [0, 0, 0, 0, 0, 2, 0]);
        bytes[before + 3] = 2;
        let index = restore(&with_valid_checksums(bytes)).unwrap();
        assert_eq!(index.store.runs.predecessor(index.store.runs.get(0)), None);
        assert_eq!(index.longest_prefix(&blocks([nth, nth])).union_blocks(), 2);
    }
}

#[test]
fn unreachable_listed_block_is_refused() {
    // A run with two blocks without holders in its middle, on both sides of a page boundary. Entry
    // points: its start, and the block behind the gap.
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(0..12, Tier::Dram), dropped([7, 8], Tier::Dram)]);
    let bytes = index.0.snapshot();
    let runs = bodies(&bytes)[1].clone();
    let heads = (runs.start..runs.end).find(|at| bytes[*at..*at + 3] == [2, 0, 9]).unwrap();
    let with = |heads_said: &[u8]| {
        let mut forged = bytes.clone();
        forged.splice(heads..heads + 3, heads_said.iter().copied());
        forged[runs.start - 4] -= 3 - heads_said.len() as u8;
        restore(&with_valid_checksums(forged))
    };
    assert_eq!(with(&[2, 0, 9]).unwrap().snapshot(), bytes);
    for said in [&[1, 0][..], &[1, 9], &[0]] {
        let error = with(said).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("run at byte"), "{said:?}: {error}");
    }
    assert!(with(&[2, 0, 10]).is_err(), "another block as entry point");
}

#[test]
fn births_are_even() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    index.0.store.runs.last_birth += 1;
    let error = restore(&index.0.snapshot()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("births at byte"), "{error}");
}

#[test]
fn tombstone_page_must_have_siblings() {
    let bytes = populated_index().snapshot();
    let stubs = bodies(&bytes)[2].clone();
    // Kind, chunk number, page, block group.
    assert_eq!((stubs.len(), bytes[stubs.start]), (8, 4));
    let refused = |place: usize, value: u8| {
        let mut forged = bytes.clone();
        assert_ne!(forged[stubs.start + place], value);
        forged[stubs.start + place] = value;
        restore(&with_valid_checksums(forged)).unwrap_err().to_string()
    };
    assert!(refused(2, 0).contains("page at byte 2 is 0"), "a page of a run");
    let mut beyond = bytes.clone();
    beyond.splice(stubs.start + 2..stubs.start + 3, [0x80, 0x80, 0x80, 0x10]);
    beyond[stubs.start - 4] += 3;
    let error = restore(&with_valid_checksums(beyond)).unwrap_err().to_string();
    assert!(error.contains("page at byte 2 is 33554432"), "a page number beyond all pages: {error}");
    assert!(refused(3, 8).contains("octets at byte"), "a group that no other page has");
    assert!(refused(4, bytes[stubs.start + 4] | 7).contains("octet at byte"));
    // Without it: the chunk and its length are cut out, and the end takes its number.
    let mut without = bytes.clone();
    without.drain(stubs.start - 4..stubs.end + 8);
    let end = bodies(&without)[2].start;
    without[end + 1] -= 1;
    let error = restore(&with_valid_checksums(without)).unwrap_err().to_string();
    assert!(error.contains("octets at byte"), "{error}");
    // The same tombstone page twice.
    let mut twice = bytes.clone();
    let stub = bytes[stubs.start + 2..stubs.end].to_vec();
    twice.splice(stubs.end..stubs.end, stub);
    twice[stubs.start - 4] += 6;
    let error = restore(&with_valid_checksums(twice)).unwrap_err().to_string();
    assert!(error.contains("page at byte"), "{error}");
}

#[test]
fn a_fenced_node_cannot_hold_a_block() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    let live = index.0.snapshot();
    index.0.nodes.state_mut(0).unwrap().live = false;
    let fenced = index.0.snapshot();
    let error = restore(&fenced).unwrap_err().to_string();
    assert!(error.contains("holder at byte"), "{error}");
    assert!(restore(&live).is_ok());
}

#[test]
fn a_page_or_a_block_cannot_be_in_two_runs() {
    let mut index = Fixture::with_nodes(1);
    let twin = Change::Stored { parent: None, blocks: vec![sibling_block(1)], tier: Tier::Dram };
    index.announce_next(1, vec![stored([1], Tier::Dram), twin]);
    let bytes = index.0.snapshot();
    let runs = bodies(&bytes)[1].clone();
    let run_bytes = (runs.len() - 3) / 2;
    let (first, second) = (runs.start + 3, runs.start + 3 + run_bytes);
    let mut page_twice = bytes.clone();
    page_twice[second + 1] = page_twice[first + 1];
    let error = restore(&with_valid_checksums(page_twice)).unwrap_err().to_string();
    assert!(error.contains("run at byte"), "{error}");
    let mut block_twice = bytes;
    block_twice.copy_within(second - 16..second, second + run_bytes - 16);
    let error = restore(&with_valid_checksums(block_twice)).unwrap_err().to_string();
    assert!(error.contains("octets at byte"), "{error}");
}

#[test]
fn snapshot_excludes_later_commands() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored(0..200, Tier::Dram)]);
    let before = index.0.snapshot();
    let mut cursor = index.0.prepare_snapshot();
    index.0.begin_snapshot(&cursor);
    index.announce_next(2, vec![stored(100..300, Tier::Ssd)]);
    index.announce_next(1, vec![dropped(0..150, Tier::Dram), Change::Cleared]);
    index.join(2);
    let mut restore = Restore::new(IndexLimits::default());
    restore.push(&cursor.header()).unwrap();
    while !cursor.is_fully_read() {
        let chunk = index.0.snapshot_chunk(&mut cursor).unwrap();
        chunk.map(|chunk| restore.push(&chunk)).transpose().unwrap();
    }
    restore.push(&cursor.end()).unwrap();
    let restored = restore.finish().unwrap();
    assert_eq!(restored.snapshot(), before);
    assert_ne!(index.0.snapshot(), before);
}

#[test]
fn large_snapshots_have_bounded_chunks() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(0..60_000, Tier::Dram)]);
    let sizes: Vec<usize> = index.0.snapshot_chunks().iter().map(Vec::len).collect();
    assert!(sizes.len() > 4, "{sizes:?}");
    assert!(sizes.iter().all(|bytes| *bytes < SNAPSHOT_CHUNK_BYTES + 1_024), "{sizes:?}");
    let mut restore = Restore::new(IndexLimits::default());
    for chunk in index.0.snapshot_chunks().iter().take(3) {
        restore.push(chunk).unwrap();
    }
    assert_eq!(restore.finish().unwrap_err(), SnapshotError::Incomplete { got: 3 });
}

#[test]
fn snapshot_above_the_limits_is_restored() {
    let bytes = populated_index().snapshot();
    let none = IndexLimits { nodes_max: 0, copies_max: 0, pins_max: 0, ..IndexLimits::default() };
    let mut index = Index::restore(&bytes, none).unwrap();
    assert_eq!(index.snapshot(), bytes);
    assert!(matches!(index.apply(&Command::Join(record(9))), Applied::Refused(_)));
}

#[test]
fn maximum_numbers_do_not_panic() {
    // Epoch and sequence number at u64::MAX, as a forged snapshot may contain them.
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
    /// The state after any history is restored from its snapshot, byte-equal.
    #[test]
    fn any_state_round_trips(intents in intents(Honesty::Liars)) {
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        for intent in intents {
            let command = intent.command(&reference);
            reference.apply(&command);
            index.apply(&command);
        }
        let bytes = index.snapshot();
        let restored = Index::restore(&bytes, tight()).unwrap();
        restored.store.check();
        prop_assert_eq!(restored.snapshot(), bytes);
        prop_assert_eq!(restored.stats(), reference.stats());
        prop_assert_eq!(restored.stale_copies(), index.stale_copies());
    }

    /// Forged contents with valid checksums are refused, or are the exact snapshot of the state
    /// they restore.
    #[test]
    fn forged_contents_are_refused_or_exact(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = populated_index().snapshot();
        let bodies = bodies(&bytes);
        let places: Vec<usize> = bodies.into_iter().flatten().collect();
        for (place, value) in changes {
            bytes[*place.get(&places)] = value;
        }
        let bytes = with_valid_checksums(bytes);
        if let Ok(index) = restore(&bytes) {
            prop_assert_eq!(index.snapshot(), bytes);
        }
    }

    /// Arbitrary bytes are refused without a panic.
    #[test]
    fn any_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 52..300)) {
        prop_assert!(restore(&bytes).is_err());
        bytes[..8].copy_from_slice(b"kvfindex");
        bytes[8..12].copy_from_slice(&2u32.to_le_bytes());
        let length = bytes.len() as u32 - 16;
        bytes[12..16].copy_from_slice(&length.to_le_bytes());
        bytes[16] = 1;
        bytes[17] = 0;
        prop_assert!(restore(&with_valid_checksums(bytes)).is_err());
    }
}
