//! Waits for room on a full disk, so that a router continues by itself.
//!
//! A write that finds the disk full is repeated until there is room. Meanwhile the router's proposals
//! end with an error after a while. Other errors of the disk are final: their data may be lost. Not
//! here: the writes (`disk_thread.rs`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Pause between two attempts. Short, since votes wait for it too.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// How long a proposal waits on a full disk before it fails. Others may still make it durable.
const PROPOSAL_WAIT: Duration = Duration::from_secs(3);

/// Whether the disk is only full: no unknown data was written.
pub(super) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Room on the disk of the log.
#[derive(Debug)]
pub(crate) struct DiskRoom {
    directory: PathBuf,
    is_missing: AtomicBool,
    is_stopping: AtomicBool,
}

impl DiskRoom {
    /// Room in this directory.
    pub(crate) fn new(directory: &Path) -> DiskRoom {
        DiskRoom {
            directory: directory.to_owned(),
            is_missing: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
        }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether a write waits for room.
    pub(crate) fn is_missing(&self) -> bool {
        self.is_missing.load(Ordering::Relaxed)
    }

    /// Fails a write that waits, and each later one that finds no room.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Repeats a write while the disk is full, until [`Self::stop`]. Blocking.
    ///
    /// # Errors
    /// The last error of the write.
    pub(super) fn write<T>(&self, mut write: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        loop {
            let result = write();
            let is_missing = result.as_ref().is_err_and(is_full);
            let was_missing = self.is_missing.swap(is_missing, Ordering::Relaxed);
            let directory = self.directory.display();
            match &result {
                Err(error) if is_missing && !was_missing => {
                    tracing::error!(%error, %directory, "the disk is full: this router waits for room");
                }
                Ok(_) if was_missing => tracing::info!(%directory, "there is room on the disk again"),
                _ => {}
            }
            if !is_missing || self.is_stopping.load(Ordering::Relaxed) {
                return result;
            }
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// Returns once a proposal that began now has waited too long on a full disk.
    pub(super) async fn missing_for_a_proposal(&self) {
        tokio::time::sleep(PROPOSAL_WAIT).await;
        while !self.is_missing() {
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn full() -> io::Error {
        io::ErrorKind::StorageFull.into()
    }

    #[test]
    fn a_write_is_repeated_only_while_the_disk_is_full() {
        let room = DiskRoom::new(Path::new("data"));
        let mut attempts = 0;
        let written = room.write(|| {
            attempts += 1;
            match attempts {
                1 => Err(full()),
                2 => {
                    assert!(room.is_missing());
                    Err(full())
                }
                number => Ok(number),
            }
        });
        assert_eq!((written.unwrap(), room.is_missing()), (3, false));
        let mut attempts = 0;
        let failed = room.write(|| {
            attempts += 1;
            Err::<(), _>(io::Error::other("sync failed"))
        });
        assert!(failed.is_err() && attempts == 1 && !room.is_missing());
        room.stop();
        assert_eq!(room.write(|| Err::<(), _>(full())).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[tokio::test(start_paused = true)]
    async fn a_proposal_waits_a_while_for_room() {
        let room = DiskRoom::new(Path::new("data"));
        let waiting = tokio::time::timeout(2 * PROPOSAL_WAIT, room.missing_for_a_proposal());
        assert!(waiting.await.is_err(), "there is room");
        room.is_missing.store(true, Ordering::Relaxed);
        let begun = tokio::time::Instant::now();
        room.missing_for_a_proposal().await;
        assert_eq!(begun.elapsed(), PROPOSAL_WAIT);
    }
}
