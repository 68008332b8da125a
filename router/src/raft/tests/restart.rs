//! A restarted router reads everything that it acknowledged.

use std::ops::RangeInclusive;
use std::path::Path;

use kvfleet_errors_doc::says;
use openraft::storage::{IOFlushed, RaftLogReader, RaftLogStorage, RaftLogStorageExt};
use tempfile::TempDir;

use super::super::log::LogError;
use super::super::log_store::LogStore;
use super::super::{Entry, Payload, Proposal, Vote};
use super::{ROUTER, close, entry, log_id, open, open_all, owner, try_open};

async fn entries(store: &mut LogStore) -> Vec<Entry> {
    store.try_get_log_entries(..).await.unwrap()
}

fn expected(indexes: RangeInclusive<u64>) -> Vec<Entry> {
    indexes.map(entry).collect()
}

#[tokio::test]
async fn an_appended_entry_is_readable_before_it_is_durable() {
    let directory = TempDir::new().unwrap();
    let (mut store, guard) = open(directory.path());
    let mut reader = store.get_log_reader().await;
    for index in 0..200 {
        store.append([entry(index)], IOFlushed::noop()).await.unwrap();
        assert_eq!(reader.try_get_log_entries(index..=index).await.unwrap(), [entry(index)]);
    }
    drop(reader);
    close(store, guard).await;
}

#[tokio::test]
async fn everything_acknowledged_survives() {
    let directory = TempDir::new().unwrap();
    let vote = Vote::new_committed(3, ROUTER);
    let (mut store, guard) = open(directory.path());
    store.save_vote(&vote).await.unwrap();
    store.blocking_append((0..=20).map(entry)).await.unwrap();
    store.truncate_after(Some(log_id(1, 15))).await.unwrap();
    store.purge(log_id(1, 4)).await.unwrap();
    store.save_committed(Some(log_id(1, 12))).await.unwrap();
    close(store, guard).await;

    let (mut store, guard) = open(directory.path());
    assert_eq!(store.read_vote().await.unwrap(), Some(vote));
    assert_eq!(store.read_committed().await.unwrap(), Some(log_id(1, 12)));
    assert_eq!(entries(&mut store).await, expected(5..=15));
    let state = store.get_log_state().await.unwrap();
    assert_eq!(state.last_purged_log_id, Some(log_id(1, 4)));
    assert_eq!(state.last_log_id, Some(log_id(1, 15)));
    store.blocking_append([entry(16)]).await.unwrap();
    close(store, guard).await;
    let (mut store, _guard) = open(directory.path());
    assert_eq!(entries(&mut store).await, expected(5..=16));
}

#[tokio::test]
async fn a_purge_beyond_the_log_leaves_an_empty_log_there() {
    let directory = TempDir::new().unwrap();
    let (mut store, guard) = open(directory.path());
    store.blocking_append((0..=3).map(entry)).await.unwrap();
    store.purge(log_id(1, 90)).await.unwrap();
    close(store, guard).await;
    let (mut store, _guard) = open(directory.path());
    assert_eq!(store.get_log_state().await.unwrap().last_log_id, Some(log_id(1, 90)));
    store.blocking_append([entry(91)]).await.unwrap();
    assert_eq!(entries(&mut store).await, expected(91..=91));
}

#[tokio::test]
async fn one_log_has_one_router_and_one_process() {
    let directory = TempDir::new().unwrap();
    let (store, guard) = open(directory.path());
    assert!(matches!(try_open(directory.path(), ROUTER), Err(LogError::InUse { .. })));
    close(store, guard).await;
    let other = try_open(directory.path(), ROUTER + 1);
    let Err(LogError::OtherRouter { found: ROUTER, wanted, .. }) = other else { panic!("must be refused") };
    assert_eq!(wanted, ROUTER + 1);
}

#[tokio::test]
async fn replication_is_read_in_bounded_bytes() {
    let directory = TempDir::new().unwrap();
    let (mut store, guard) = open(directory.path());
    let large = |index| {
        let proposal = Proposal(vec![1; super::super::log_store::REPLICATION_BYTES_MAX / 2].into());
        Entry { log_id: log_id(1, index), payload: Payload::Normal(proposal) }
    };
    store.blocking_append((0..4).map(large)).await.unwrap();
    let read = store.limited_get_log_entries(0, 4).await.unwrap();
    assert_eq!(read.len(), 1, "two halves and their envelopes are above the limit");
    assert_eq!(store.try_get_log_entries(0..4).await.unwrap().len(), 4);
    close(store, guard).await;
}

#[tokio::test]
async fn groups_share_a_file_and_nothing_else() {
    let directory = TempDir::new().unwrap();
    let three = owner(ROUTER, "test", 2);
    let (mut logs, guard) = open_all(directory.path(), &three).unwrap();
    assert_eq!(logs.len(), 3);
    for (group, log) in (0..).zip(&mut logs) {
        log.save_vote(&Vote::new_committed(group + 1, ROUTER)).await.unwrap();
        log.blocking_append((0..=10 + group).map(entry)).await.unwrap();
    }
    logs[1].truncate_after(Some(log_id(1, 4))).await.unwrap();
    logs[2].purge(log_id(1, 6)).await.unwrap();
    logs[0].save_committed(Some(log_id(1, 9))).await.unwrap();
    logs.clear();
    tokio::task::spawn_blocking(move || guard.join()).await.unwrap();

    let (mut logs, _guard) = open_all(directory.path(), &three).unwrap();
    let kept = [0..=10, 0..=4, 7..=12];
    for ((group, log), kept) in (0..).zip(&mut logs).zip(kept) {
        assert_eq!(entries(log).await, expected(kept), "group {group}");
        assert_eq!(log.read_vote().await.unwrap(), Some(Vote::new_committed(group + 1, ROUTER)));
    }
    assert_eq!(logs[0].read_committed().await.unwrap(), Some(log_id(1, 9)));
    assert_eq!(logs[1].read_committed().await.unwrap(), None);
}

#[tokio::test]
async fn a_log_of_another_cluster_or_of_other_shards_is_refused() {
    let directory = TempDir::new().unwrap();
    let (store, guard) = open(directory.path());
    close(store, guard).await;
    let here = directory.path().display().to_string();
    let refused = |other| {
        let Err(error) = open_all(directory.path(), &other) else { panic!("must be refused") };
        assert!(matches!(error, LogError::OtherCluster { .. }), "{error}");
        error
    };
    says("a Raft log of another cluster", &refused(owner(ROUTER, "other", 1)), &[&here]);
    says("a Raft log of other shards", &refused(owner(ROUTER, "test", 4)), &[&here]);
}

/// A log with every third append stored out of line.
async fn with_large_commands(directory: &Path, last: u64) -> Vec<Entry> {
    let (mut store, guard) = open(directory);
    store.save_vote(&Vote::new_committed(1, ROUTER)).await.unwrap();
    let entries: Vec<Entry> =
        (0..=last).map(|index| if index % 3 == 0 { large(index) } else { entry(index) }).collect();
    for some in entries.chunks(4) {
        store.blocking_append(some.to_vec()).await.unwrap();
    }
    close(store, guard).await;
    entries
}

fn large(index: u64) -> Entry {
    let command = vec![index as u8; 70_000];
    Entry { log_id: log_id(1, index), payload: Payload::Normal(Proposal(command.into())) }
}

#[tokio::test]
async fn large_commands_survive_beside_their_records() {
    let directory = TempDir::new().unwrap();
    let entries = with_large_commands(directory.path(), 19).await;
    let (mut store, guard) = open(directory.path());
    assert_eq!(store.try_get_log_entries(0..).await.unwrap(), entries);
    // Purges and truncations free space; the rest survives the next start.
    store.truncate_after(Some(log_id(1, 14))).await.unwrap();
    store.purge(log_id(1, 5)).await.unwrap();
    store.blocking_append((15..30).map(large)).await.unwrap();
    close(store, guard).await;
    let (mut store, guard) = open(directory.path());
    let left: Vec<Entry> = entries[6..15].iter().cloned().chain((15..30).map(large)).collect();
    assert_eq!(store.try_get_log_entries(0..).await.unwrap(), left);
    close(store, guard).await;
}
