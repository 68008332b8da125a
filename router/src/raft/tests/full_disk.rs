//! A disk that is full: an error that says so, nothing acknowledged, nothing half written.

use std::io;
use std::sync::atomic::Ordering;

use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};

use super::super::Vote;
use super::super::log::Disk;
use super::super::log_store::LogStore;
use super::{ROUTER, close, entry, open, owner};

#[tokio::test]
async fn a_full_disk_is_an_error_and_stays_one() {
    let directory = tempfile::TempDir::new().unwrap();
    let (disk, recovered) = Disk::open(directory.path(), &owner(ROUTER, "test", 1)).unwrap();
    let full = disk.is_full();
    let (mut stores, guard) = LogStore::on(disk, recovered).unwrap();
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
    // Room comes back, but a log that lost one write takes no other: the router must be restarted.
    full.store(false, Ordering::SeqCst);
    store.blocking_append([entry(11)]).await.expect_err("not acknowledged");
    close(store, guard).await;
    let (mut store, guard) = open(directory.path());
    assert_eq!(store.try_get_log_entries(..).await.unwrap(), (0..10).map(entry).collect::<Vec<_>>());
    assert_eq!(store.read_vote().await.unwrap(), Some(vote));
    close(store, guard).await;
}
