//! A full or failing disk: a clear error, no acknowledgement, no partial write.

use std::fs::OpenOptions;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvfleet_errors_doc::says;
use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};

use super::super::Vote;
use super::super::disk_room::DiskRoom;
use super::super::handle::ProposeError;
use super::super::log::{Change, DiskLog};
use super::super::log_store::LogStore;
use super::{ROUTER, close, entry, in_memory, open, open_disk, owner};

/// Waits until a write has found the disk full.
async fn until_full(room: &DiskRoom) {
    let waiting = async {
        while !room.is_missing() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("no write found the disk full");
}

#[tokio::test]
async fn writes_on_a_full_disk_wait_for_room() {
    let directory = tempfile::TempDir::new().unwrap();
    let (disk, recovered) = DiskLog::open(directory.path(), &owner(ROUTER, "test", 1)).unwrap();
    let (left, room) = (disk.writes_left(), Arc::new(DiskRoom::new(directory.path())));
    let (mut stores, guard) = LogStore::open(disk, recovered, Arc::clone(&room)).unwrap();
    let mut store = stores.swap_remove(0);
    stores.clear();
    let vote = Vote::new_committed(1, ROUTER);
    store.save_vote(&vote).await.unwrap();
    store.blocking_append((0..10).map(entry)).await.unwrap();

    left.store(0, Ordering::SeqCst);
    let mut writer = store.clone();
    let appending = tokio::spawn(async move { writer.blocking_append([entry(10)]).await });
    until_full(&room).await;
    assert!(!appending.is_finished(), "acknowledged on a full disk");
    let refusal = ProposeError::NoRoom(room.directory().display().to_string());
    says("a change on a router with a full disk", &refusal, &[&directory.path().display().to_string()]);
    left.store(usize::MAX, Ordering::SeqCst);
    appending.await.unwrap().unwrap();
    assert!(!room.is_missing());

    // A router that stops does not wait.
    left.store(0, Ordering::SeqCst);
    let mut voter = store.clone();
    let voting = tokio::spawn(async move { voter.save_vote(&Vote::new_committed(2, ROUTER)).await });
    until_full(&room).await;
    room.stop();
    let error = voting.await.unwrap().expect_err("not acknowledged");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    assert_eq!(store.read_vote().await.unwrap(), Some(vote), "a vote that is not durable is not given");
    close(store, guard).await;
    let (mut store, guard) = open(directory.path());
    assert_eq!(store.try_get_log_entries(..).await.unwrap(), (0..11).map(entry).collect::<Vec<_>>());
    assert_eq!(store.read_vote().await.unwrap(), Some(vote));
    close(store, guard).await;
}

/// The disk becomes full at each step of a batch, also between two files, and the batch is repeated.
#[test]
fn a_batch_is_repeated_from_any_step() {
    for writes_left in 0..6 {
        let directory = in_memory();
        let (mut disk, _) = open_disk(directory.path()).unwrap();
        let left = disk.writes_left();
        let mut refused = 0;
        for index in 0..120 {
            let append = Change::Append(vec![entry(index)]);
            left.store(writes_left, Ordering::SeqCst);
            let mut committed = disk.commit([(0, &append)].into_iter());
            if let Err(error) = &committed {
                assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
                refused += 1;
                left.store(usize::MAX, Ordering::SeqCst);
                committed = disk.commit([(0, &append)].into_iter());
            }
            left.store(usize::MAX, Ordering::SeqCst);
            committed.unwrap();
            disk.prepare();
        }
        println!("full after {writes_left} writes: {refused} batches were repeated");
        drop(disk);
        let (_, recovered) = open_disk(directory.path()).unwrap();
        assert_eq!(
            recovered[0].entries,
            (0..120).map(entry).collect::<Vec<_>>(),
            "full after {writes_left} writes"
        );
    }
}

/// Room prepared on a device that accepts writes but no syncs, and on a full one.
#[test]
fn a_failed_background_sync_fails_the_next_commit() {
    for (device, is_failure) in [("/dev/null", true), ("/dev/full", false)] {
        let directory = in_memory();
        let (mut disk, _) = open_disk(directory.path()).unwrap();
        let commit = |disk: &mut DiskLog, index| {
            disk.commit([(0, &Change::Append(vec![entry(index)]))].into_iter()).map(|()| disk.last_frame.end)
        };
        // First the file grows to its full size.
        let mut index = 0;
        while commit(&mut disk, index).unwrap() < 32 << 10 {
            disk.prepare();
            index += 1;
        }
        let mut failed = None;
        while failed.is_none() && disk.last_frame.end < 112 << 10 {
            disk.prepare_on(OpenOptions::new().write(true).open(device).unwrap());
            index += 1;
            failed = commit(&mut disk, index).err();
        }
        assert_eq!(failed.is_some(), is_failure, "{device}: {failed:?}");
        if is_failure {
            commit(&mut disk, index).expect_err("it stays failed");
        }
    }
}
