//! Snapshots on disk: they read back as written, truncated or changed ones are refused, and a crash
//! leaves the last good one.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kv_core::id::{BlockHash, Epoch, IdentityDigest, NodeId, Seq, TenantId, Tier};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use openraft::entry::RaftEntry;
use openraft::storage::RaftStateMachine;
use tempfile::TempDir;

use super::super::snapshot_file::{self, SnapshotFile, SnapshotFileError};
use super::super::state_machine::{SnapshotData, StateMachine};
use super::super::{Entry, Payload, Proposal, Snapshot};
use super::{entry, intake, log_id};

/// The group of the snapshot.
pub(super) const GROUP: u16 = 1;

pub(super) fn open(directory: &Path) -> Result<StateMachine, SnapshotFileError> {
    StateMachine::open(intake(directory, GROUP))
}

pub(super) async fn apply(machine: &mut StateMachine, entries: impl IntoIterator<Item = Entry>) {
    let entries: Vec<_> = entries.into_iter().map(|entry| Ok((entry, None))).collect();
    machine.apply(futures_util::stream::iter(entries)).await.unwrap();
}

fn command(index: u64, command: &Command) -> Entry {
    Entry::new(log_id(1, index), Payload::Normal(Proposal::encode(command)))
}

/// Hashes of one prefix share their first byte.
fn hash(number: u64) -> BlockHash {
    let own = |number: u64| {
        let mixed = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        BlockHash::from_words(mixed, mixed)
    };
    own(number).in_chain(7, own(number & !7), number as usize)
}

/// A machine with this many blocks, in runs of a thousand; returns it with its last entry.
pub(super) async fn filled(directory: &Path, blocks: u64) -> (StateMachine, u64) {
    let mut machine = open(directory).unwrap();
    let record = NodeRecord {
        node: NodeId(1),
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest([1; 16]),
        block_bytes: 1,
    };
    apply(&mut machine, [command(1, &Command::Join(record))]).await;
    let mut last = 1;
    for (seq, first) in (1..).zip((0..blocks).step_by(1_000)) {
        let numbers = first..blocks.min(first + 1_000);
        let stored = Change::Stored { parent: None, blocks: numbers.map(hash).collect(), tier: Tier::Dram };
        let announcement =
            Announcement { node: NodeId(1), epoch: Epoch(1), seq: Seq(seq), changes: vec![stored] };
        last = seq + 1;
        apply(&mut machine, [command(last, &Command::Announce(vec![announcement]))]).await;
    }
    (machine, last)
}

/// Applies a `Cleared` announcement of the node as this entry.
pub(super) async fn clear(machine: &mut StateMachine, index: u64) {
    let next = machine.published().read().index.next_seq(NodeId(1));
    let (epoch, seq) = next.unwrap();
    let changes = vec![Change::Cleared];
    let announcement = Announcement { node: NodeId(1), epoch, seq, changes };
    apply(machine, [command(index, &Command::Announce(vec![announcement]))]).await;
}

pub(super) fn digest(machine: &StateMachine) -> [u8; 16] {
    machine.published().read().index.digest()
}

pub(super) fn stored(snapshot: Snapshot) -> Arc<SnapshotFile> {
    match snapshot.snapshot {
        SnapshotData::File(stored) => stored,
        SnapshotData::Received(_) => panic!("it was made here"),
    }
}

#[tokio::test]
async fn a_snapshot_reads_back_as_written() {
    let directory = TempDir::new().unwrap();
    let (machine, last) = filled(directory.path(), 50_000).await;
    assert!(machine.current().unwrap().is_none());
    let made = machine.build().unwrap();
    assert_eq!(made.meta.last_log_id, Some(log_id(1, last)));
    let again = open(directory.path()).unwrap();
    assert_eq!((digest(&again), again.published().read().applied_index()), (digest(&machine), last));
    assert_eq!(again.current().unwrap().unwrap().meta, made.meta);
    let file = fs::metadata(snapshot_file::path_of(directory.path(), GROUP)).unwrap().len();
    assert!(stored(made).bytes < file && file < 50_000 * 20, "{file}");
}

#[tokio::test]
async fn every_flipped_byte_and_every_cut_of_a_snapshot_is_refused() {
    let directory = TempDir::new().unwrap();
    let (machine, _) = filled(directory.path(), 20).await;
    machine.build().unwrap();
    let path = snapshot_file::path_of(directory.path(), GROUP);
    let sound = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let Err(error) = open(directory.path()) else { panic!("a damaged snapshot was opened") };
        assert!(matches!(error, SnapshotFileError::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("snapshot-1.kvf"), "{error}");
    };
    for at in 0..sound.len() {
        let mut flipped = sound.clone();
        flipped[at] ^= 0x10;
        refused(&flipped);
        refused(&sound[..at]);
    }
    refused(&[&sound[..], b"x"].concat());
    fs::write(&path, &sound).unwrap();
    assert_eq!(digest(&open(directory.path()).unwrap()), digest(&machine));
}

#[tokio::test]
async fn a_crash_at_any_moment_leaves_the_last_good_snapshot() {
    let directory = TempDir::new().unwrap();
    let (mut machine, last) = filled(directory.path(), 5_000).await;
    machine.build().unwrap();
    let good = digest(&machine);
    // The next one is written, but the process ends before the rename: any prefix of it may remain.
    apply(&mut machine, [entry(last + 1)]).await;
    let meta = machine.build().unwrap().meta;
    let path = snapshot_file::path_of(directory.path(), GROUP);
    let next = fs::read(&path).unwrap();
    let elsewhere = TempDir::new().unwrap();
    filled(elsewhere.path(), 5_000).await.0.build().unwrap();
    let kept = snapshot_file::path_of(elsewhere.path(), GROUP);
    for bytes in [0, 1, 30, next.len() / 2, next.len() - 1, next.len()] {
        let left = elsewhere.path().join("snapshot-1.kvf.7.new");
        fs::write(&left, &next[..bytes]).unwrap();
        let other = elsewhere.path().join("somebody-elses.new");
        fs::write(&other, b"stays").unwrap();
        snapshot_file::remove_temporaries(elsewhere.path()).unwrap();
        assert!(!left.exists() && other.exists() && kept.exists());
        assert_eq!(digest(&open(elsewhere.path()).unwrap()), good, "{bytes} bytes were left");
    }
    // After the rename it counts.
    fs::write(&kept, &next).unwrap();
    let opened = open(elsewhere.path()).unwrap();
    assert_eq!((digest(&opened), opened.current().unwrap().unwrap().meta), (digest(&machine), meta));
}

#[tokio::test]
async fn an_unfinished_or_unneeded_snapshot_leaves_no_file() {
    let directory = TempDir::new().unwrap();
    let files = || fs::read_dir(directory.path()).unwrap().count();
    let (mut machine, last) = filled(directory.path(), 5_000).await;
    let old = machine.build().unwrap();
    let source = TempDir::new().unwrap();
    let (older, _) = filled(source.path(), 3_000).await;
    let older = stored(older.build().unwrap());
    {
        let mut incoming = machine.intake().begin(older.meta.clone()).unwrap();
        let chunk = older.chunks().next().unwrap().unwrap();
        incoming.chunk(chunk.freeze()).unwrap();
        assert_eq!(files(), 2);
    }
    assert_eq!(files(), 1);
    // A file that is older than a received one does not replace it.
    apply(&mut machine, [entry(last + 1)]).await;
    let newer = machine.build().unwrap();
    assert!(newer.meta.last_log_id > old.meta.last_log_id && files() == 1);
    let mut incoming = machine.intake().begin(older.meta.clone()).unwrap();
    for chunk in older.chunks() {
        incoming.chunk(chunk.unwrap().freeze()).unwrap();
    }
    let before = machine.current().unwrap().unwrap().meta;
    assert_eq!(machine.keep_file(incoming.finish().unwrap().file).unwrap().meta, before);
    assert_eq!((machine.current().unwrap().unwrap().meta, files()), (newer.meta, 1));
}

#[tokio::test]
async fn a_damaged_snapshot_is_set_aside_and_rebuilt() {
    let directory = TempDir::new().unwrap();
    let (machine, last) = filled(directory.path(), 50_000).await;
    machine.build().unwrap();
    let path = snapshot_file::path_of(directory.path(), GROUP);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let before = stored(machine.current().unwrap().unwrap());
    before.mark_damaged();
    let after = machine.current().unwrap().unwrap();
    assert_eq!(after.meta.last_log_id, Some(log_id(1, last)));
    assert_eq!(digest(&open(directory.path()).unwrap()), digest(&machine));
    assert_eq!(fs::read(directory.path().join("snapshot-1.kvf.set-aside-1")).unwrap(), bytes);
}

#[tokio::test]
async fn an_installed_snapshot_replaces_index_and_file() {
    let source = TempDir::new().unwrap();
    let (from, last) = filled(source.path(), 50_000).await;
    let snapshot = from.build().unwrap();
    let directory = TempDir::new().unwrap();
    let (mut to, _) = filled(directory.path(), 1_000).await;
    let quota = Command::SetQuota { tenant: TenantId(7), bytes: Some(1) };
    apply(&mut to, [command(9, &quota)]).await;
    to.install_snapshot(&snapshot.meta.clone(), snapshot.snapshot).await.unwrap();
    let state = |machine: &StateMachine| (digest(machine), machine.published().read().applied_index());
    assert_eq!((state(&to), state(&to).1), (state(&from), last));
    assert_eq!(state(&open(directory.path()).unwrap()), state(&from));
}
