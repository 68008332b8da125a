//! A full or failing disk: a clear error, no acknowledgement, no partial write.

use std::fs::OpenOptions;
use std::io;
use std::sync::atomic::Ordering;

use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};

use super::super::Vote;
use super::super::log::{Change, DiskLog};
use super::super::log_store::LogStore;
use super::{ROUTER, close, entry, in_memory, open, open_disk, owner};

#[tokio::test]
async fn a_full_disk_fails_permanently() {
    let directory = tempfile::TempDir::new().unwrap();
    let (disk, recovered) = DiskLog::open(directory.path(), &owner(ROUTER, "test", 1)).unwrap();
    let full = disk.is_full();
    let (mut stores, guard) = LogStore::open(disk, recovered).unwrap();
    let mut store = stores.swap_remove(0);
    stores.clear();
    let vote = Vote::new_committed(1, ROUTER);
    store.save_vote(&vote).await.unwrap();
    store.blocking_append((0..10).map(entry)).await.unwrap();
    full.store(true, Ordering::SeqCst);
    store.blocking_append([entry(10)]).await.expect_err("not acknowledged");
    let error = store.save_vote(&Vote::new_committed(2, ROUTER)).await.expect_err("not acknowledged");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    assert_eq!(store.read_vote().await.unwrap(), Some(vote), "a vote that is not durable is not given");
    // Room is free again, but a log that lost one write takes no other: the router must be
    // restarted.
    full.store(false, Ordering::SeqCst);
    store.blocking_append([entry(11)]).await.expect_err("not acknowledged");
    close(store, guard).await;
    let (mut store, guard) = open(directory.path());
    assert_eq!(store.try_get_log_entries(..).await.unwrap(), (0..10).map(entry).collect::<Vec<_>>());
    assert_eq!(store.read_vote().await.unwrap(), Some(vote));
    close(store, guard).await;
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
