//! A snapshot on a stuck disk: entries continue, the file has the state of its start, and after a
//! replacement the index is written from its beginning.
//!
//! The disk is a pipe in place of the file: it accepts as much as is read, and cannot be synced.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use openraft::storage::RaftStateMachine;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;
use tokio::time::timeout;

use super::super::Snapshot;
use super::super::snapshot_build::SnapshotBuild;
use super::super::snapshot_file;
use super::super::state_machine::StateMachine;
use super::snapshots::{GROUP, apply, clear, digest, filled, open, stored};
use super::{entry, log_id};

/// Timeout that only a hang reaches, on any machine.
const HANG: Duration = Duration::from_secs(60);

/// More than a pipe holds.
const BLOCKS: u64 = 50_000;

/// Makes the next file a pipe; returns its end.
fn stuck(directory: &Path, number: u64) -> io::Result<File> {
    let path = directory.join(format!("snapshot-{GROUP}.kvf.{number}.new"));
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // Both ends, so that opening it does not block.
    File::options().read(true).write(true).open(path)
}

/// Starts a snapshot and waits for its first bytes; returns those.
fn making(machine: &StateMachine, pipe: &mut File) -> (JoinHandle<io::Result<Snapshot>>, Vec<u8>) {
    let machine = machine.clone();
    let making = std::thread::spawn(move || machine.build());
    let mut some = vec![0; 100];
    pipe.read_exact(&mut some).unwrap();
    (making, some)
}

/// Reads the rest of a pipe until its writers are gone.
fn drain(directory: &Path, number: u64, pipe: File) -> JoinHandle<Vec<u8>> {
    let path = directory.join(format!("snapshot-{GROUP}.kvf.{number}.new"));
    let mut reading = File::open(path).unwrap();
    drop(pipe);
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        reading.read_to_end(&mut rest).unwrap();
        rest
    })
}

async fn apply_soon(machine: &mut StateMachine, indexes: std::ops::RangeInclusive<u64>) {
    timeout(HANG, apply(machine, indexes.map(entry))).await.expect("entries wait for the disk");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_continue_during_a_stuck_snapshot() {
    let directory = TempDir::new().unwrap();
    let (mut machine, last) = filled(directory.path(), BLOCKS).await;
    let before = digest(&machine);
    let mut pipe = stuck(directory.path(), 0).unwrap();
    let (making, some) = making(&machine, &mut pipe);
    // The sweep after it changes all runs.
    timeout(HANG, clear(&mut machine, last + 1)).await.expect("an entry waits for the disk");
    apply_soon(&mut machine, last + 2..=last + 61).await;
    assert_eq!(machine.published().read().index.stale_copies(), 0);
    assert!(!making.is_finished() && machine.published().read().index.is_snapshotting());
    let rest = drain(directory.path(), 0, pipe);
    making.join().unwrap().expect_err("a pipe cannot be synced");
    assert!(!machine.published().read().index.is_snapshotting(), "after an error, too");
    let elsewhere = TempDir::new().unwrap();
    let file = [some, rest.join().unwrap()].concat();
    fs::write(snapshot_file::path_of(elsewhere.path(), GROUP), file).unwrap();
    let written = open(elsewhere.path()).unwrap();
    assert_eq!((digest(&written), written.published().read().applied_index()), (before, last));
    assert_ne!(digest(&machine), before);
    // The retry writes the current state.
    assert_eq!(machine.build().unwrap().meta.last_log_id, Some(log_id(1, last + 61)));
    assert_eq!(digest(&open(directory.path()).unwrap()), digest(&machine));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_index_restarts_the_snapshot() {
    let (directory, source) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut machine, _) = filled(directory.path(), BLOCKS).await;
    let (from, last) = filled(source.path(), 2 * BLOCKS).await;
    let newer = from.build().unwrap();
    let mut pipe = stuck(directory.path(), 0).unwrap();
    let (making, _) = making(&machine, &mut pipe);
    machine.install_snapshot(&newer.meta.clone(), newer.snapshot).await.unwrap();
    apply_soon(&mut machine, last + 1..=last + 1).await;
    let rest = drain(directory.path(), 0, pipe);
    let made = making.join().unwrap().unwrap();
    assert_eq!(made.meta.last_log_id, Some(log_id(1, last + 1)));
    assert!(
        rest.join().unwrap().len() < stored(made).bytes as usize / 2,
        "the first file ends where it was stuck"
    );
    assert!(!machine.published().read().index.is_snapshotting());
    assert_eq!(digest(&open(directory.path()).unwrap()), digest(&machine));
}

#[tokio::test]
async fn an_abandoned_snapshot_keeps_no_images() {
    let directory = TempDir::new().unwrap();
    let (machine, last) = filled(directory.path(), 1_000).await;
    let published = machine.published();
    let (build, meta, ()) = SnapshotBuild::begin(&published, |_| ());
    assert_eq!(meta.last_log_id, Some(log_id(1, last)));
    assert!(published.read().index.is_snapshotting());
    drop(build);
    assert!(!published.read().index.is_snapshotting());
}
