//! A disk that is full: an error that says so, nothing acknowledged, nothing half written.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};
use redb::StorageBackend;
use redb::backends::InMemoryBackend;

use super::super::Vote;
use super::super::disk::{Disk, Recovered};
use super::super::log_store::LogStore;
use super::{ROUTER, close, entry};

/// A file that takes no more writes once `full` is set.
#[derive(Debug)]
struct Device {
    bytes: InMemoryBackend,
    full: Arc<AtomicBool>,
}

impl Device {
    fn has_room(&self) -> io::Result<()> {
        if self.full.load(Ordering::SeqCst) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl StorageBackend for Device {
    fn len(&self) -> io::Result<u64> {
        self.bytes.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.bytes.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.has_room()?;
        self.bytes.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.has_room()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.has_room()?;
        self.bytes.write(offset, data)
    }
}

#[tokio::test]
async fn a_full_disk_is_an_error_and_stays_one() {
    let full = Arc::<AtomicBool>::default();
    let directory = tempfile::TempDir::new().unwrap();
    let device = Device { bytes: InMemoryBackend::new(), full: Arc::clone(&full) };
    let (mut stores, guard) =
        LogStore::on(Disk::on(device, directory.path()), vec![Recovered::default()]).unwrap();
    let mut store = stores.swap_remove(0);
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
}
