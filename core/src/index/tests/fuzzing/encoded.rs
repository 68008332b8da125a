//! Bytes as a log record and as a snapshot: refused with a reason, or decoded exactly.

use xxhash_rust::xxh3::xxh3_64;

use super::super::*;
use super::{FuzzResult, check_structure};

/// Every decodable record must encode to the same bytes.
pub(super) fn codec(data: &[u8]) -> FuzzResult {
    let Ok(command) = Command::decode(data) else { return Ok(()) };
    let again = command.encode();
    if again == data {
        return Ok(());
    }
    Err(format!("{command:?} was decoded from other bytes than its encoding: {again:02x?}"))
}

/// Records of every kind.
pub(super) fn codec_seeds() -> Vec<Vec<u8>> {
    let run = Change::Stored { parent: Some(block(3)), blocks: blocks(4..9), tier: Tier::Dram };
    let changes = vec![Change::Cleared, run, moved([3], Tier::Dram, Tier::Ssd), dropped([4, 5], Tier::Gpu)];
    let runs = [None, Some(block(2)), Some(block(4))].map(|parent| {
        let first = parent.map_or(1, |_| 3);
        Change::Stored { parent, blocks: blocks(first..first + 2), tier: Tier::Dram }
    });
    let runs = runs.to_vec();
    let admit = Command::Admit { record: record(2), epoch: Epoch(3) };
    let all = [
        Command::Join(record(2)),
        admit,
        fence(5, 128),
        leave(0, 1),
        Command::Announce(vec![announcement(300, 2, 1, changes), announcement(1, 1, 1, vec![])]),
        Command::Announce(vec![announcement(1, 2, 1, runs)]),
        Command::Pin(pin(9, "ops", [1, 2])),
        Command::Pin(Pin { kind: PinKind::Soft, ends_ms: Some(1_700_000_000_000), ..pin(9, "ops", [1, 2]) }),
        Command::Unpin { pin: PinId(9), owner: "ops".to_owned(), ends_ms: Some(1_700_000_000_000) },
        Command::SetQuota { tenant: TenantId(1), bytes: Some(1 << 40) },
        Command::SetTtl { group: TtlGroupId(1), ttl_ms: None },
        Command::SetGeneration(Generation(300)),
    ];
    all.iter().map(Command::encode).collect()
}

/// Chunks of a snapshot, each after its length. The first byte selects whether checksums are fixed
/// up.
pub(super) fn snapshot(data: &[u8]) -> FuzzResult {
    let Some((mode, mut rest)) = data.split_first() else { return Ok(()) };
    let mut restore = Restore::new(IndexLimits::default());
    let mut pushed: Vec<Vec<u8>> = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length));
        let Some((chunk, left)) = behind.split_at_checked(length) else { break };
        let mut chunk = chunk.to_vec();
        if mode % 4 > 0 && chunk.len() >= 8 {
            let body = chunk.len() - 8;
            let check = xxh3_64(&chunk[..body]).to_le_bytes();
            chunk[body..].copy_from_slice(&check);
        }
        if restore.push(&chunk).is_err() {
            return Ok(());
        }
        pushed.push(chunk);
        rest = left;
    }
    let Ok(mut index) = restore.finish() else { return Ok(()) };
    let chunks = index.snapshot_chunks();
    if chunks != pushed {
        return Err(format!("the restored index is written as {chunks:02x?}"));
    }
    check_structure(&index);
    check_usable(&mut index)
}

/// An accepted snapshot must be usable: nodes announce and end, and their earlier blocks do not
/// come back.
fn check_usable(index: &mut Index) -> FuzzResult {
    let known: Vec<_> =
        index.nodes().map(|state| (state.record.clone(), state.epoch, state.next_seq)).collect();
    for (record, epoch, seq) in &known {
        let stored = Change::Stored { parent: Some(block(2)), blocks: blocks(3..20), tier: Tier::Dram };
        let changes = vec![stored, dropped([1, 4], Tier::Dram)];
        let one = Announcement { node: record.node, epoch: *epoch, seq: *seq, changes };
        index.apply(&Command::Announce(vec![one]));
    }
    let _ = (index.longest_prefix(&blocks(1..20)), index.digest());
    check_structure(index);
    for _ in 0..3 {
        for (record, ..) in &known {
            index.apply(&Command::Join(record.clone()));
        }
        let stats = index.stats();
        if (stats.blocks, stats.copies) != (0, 0) {
            return Err(format!("after every node joined again the index lists {stats:?}"));
        }
    }
    check_structure(index);
    Ok(())
}

/// Snapshots of an empty index and of one with every kind of state.
pub(super) fn snapshot_seeds() -> Vec<Vec<u8>> {
    let mut index = Index::new(IndexLimits::default());
    let empty = index.clone();
    for node in 1..=4 {
        index.apply(&Command::Join(record(node)));
    }
    // Two pages of one block group; only the second keeps blocks.
    let twins =
        Change::Stored { parent: None, blocks: vec![sibling_block(80), sibling_block(81)], tier: Tier::Dram };
    let changes = vec![
        stored([1, 2, 3], Tier::Dram),
        stored([2], Tier::Ssd),
        stored(20..60, Tier::Gpu),
        stored(80..83, Tier::Gpu),
        twins,
        dropped(80..83, Tier::Gpu),
    ];
    let some = announcement(1, 1, 1, changes);
    let other = announcement(3, 1, 1, vec![stored([3, 4], Tier::Gpu)]);
    index.apply(&Command::Announce(vec![some, other]));
    let small = index.clone();
    let rest = [
        fence(2, 1),
        leave(4, 1),
        Command::Pin(pin(7, "ops", [1, 2])),
        Command::Pin(pin(9, "batch", [])),
        Command::SetQuota { tenant: TenantId(3), bytes: Some(1 << 40) },
        Command::SetQuota { tenant: TenantId(4), bytes: Some(1) },
        Command::SetTtl { group: TtlGroupId(1), ttl_ms: Some(60_000) },
        Command::SetTtl { group: TtlGroupId(2), ttl_ms: Some(60_001) },
        Command::SetGeneration(Generation(1)),
    ];
    for command in &rest {
        index.apply(command);
    }
    let written = |index: &Index| {
        let mut out = vec![1];
        for chunk in index.snapshot_chunks() {
            out.extend_from_slice(&(chunk.len() as u16).to_le_bytes());
            out.extend_from_slice(&chunk);
        }
        out
    };
    [empty, small, index].iter().map(written).collect()
}

/// The bytes in hexadecimal.
pub(super) fn describe(data: &[u8]) -> String {
    format!("{data:02x?}")
}
