//! Recovery from a lost snapshot or log: the router sets files aside, withholds votes, and refuses
//! an unprovable state.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvfleet_errors_doc::says;
use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};
use tempfile::TempDir;

use super::super::Vote;
use super::super::disk_room::DiskRoom;
use super::super::log::LOG_FOLDER;
use super::super::recover::{self, DataLoss, OpenedStores};
use super::super::snapshot_file;
use super::super::withheld_votes::WITHHELD_FILE;
use super::{ROUTER, entry, intake, log_id, owner, replace_folder};
use crate::error::StartError;

/// The group with lost data; the other one is control.
const GROUP: u16 = 1;

/// Last entry of its log.
const LAST: u64 = 30;

fn open_as(directory: &Path, is_alone: bool) -> Result<(OpenedStores, Vec<DataLoss>), StartError> {
    let intakes: Vec<_> = (0..2).map(|group| intake(directory, group)).collect();
    let room = Arc::new(DiskRoom::new(directory));
    recover::open(directory, &owner(ROUTER, "test", 1), &intakes, is_alone, &room)
}

fn open(directory: &Path) -> (OpenedStores, Vec<DataLoss>) {
    open_as(directory, false).unwrap()
}

async fn close(opened: OpenedStores) {
    let OpenedStores { stores, guard, .. } = opened;
    drop(stores);
    tokio::task::spawn_blocking(move || guard.join()).await.unwrap();
}

/// A router with a snapshot at entry 20 of a log that ends at [`LAST`] and begins after `purged`.
async fn router(purged: Option<u64>) -> TempDir {
    let directory = TempDir::new().unwrap();
    let (mut opened, losses) = open(directory.path());
    assert!(losses.is_empty() && !opened.withheld.is_withheld(GROUP));
    for (log, _) in &mut opened.stores {
        log.save_vote(&Vote::new(3, ROUTER)).await.unwrap();
        log.blocking_append((0..=LAST).map(entry)).await.unwrap();
    }
    let (log, machine) = &mut opened.stores[1];
    super::snapshots::apply(machine, (0..=20).map(entry)).await;
    machine.build().unwrap();
    log.save_committed(Some(log_id(1, 25))).await.unwrap();
    if let Some(purged) = purged {
        log.purge(log_id(1, purged)).await.unwrap();
    }
    close(opened).await;
    directory
}

fn snapshot_of(directory: &Path) -> std::path::PathBuf {
    snapshot_file::path_of(directory, GROUP)
}

/// Flips a bit in the middle of the snapshot; returns its contents.
fn damage(directory: &Path) -> Vec<u8> {
    let path = snapshot_of(directory);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() - 30;
    bytes[middle] ^= 2;
    fs::write(&path, &bytes).unwrap();
    bytes
}

/// Asserts that the group is empty with its old vote, and withholds votes until it has the last
/// entry again.
async fn assert_empty_without_a_vote(opened: &mut OpenedStores) {
    let (log, machine) = &mut opened.stores[1];
    let state = log.get_log_state().await.unwrap();
    assert_eq!((state.last_log_id, state.last_purged_log_id), (None, None));
    assert_eq!(log.read_committed().await.unwrap(), None);
    assert_eq!(log.read_vote().await.unwrap(), Some(Vote::new(3, ROUTER)));
    assert_eq!(machine.published().read().applied, None);
    assert!(machine.current().unwrap().is_none());
    assert_eq!(opened.withheld.until(GROUP), Some(log_id(1, LAST)));
    // The other group is unaffected.
    assert!(!opened.withheld.is_withheld(0));
    assert_eq!(opened.stores[0].0.get_log_state().await.unwrap().last_log_id, Some(log_id(1, LAST)));
}

#[tokio::test]
async fn a_damaged_snapshot_is_set_aside_and_the_vote_withheld() {
    let directory = router(Some(10)).await;
    let damaged = damage(directory.path());
    let (mut opened, losses) = open(directory.path());
    let [loss] = losses.as_slice() else { panic!("one loss: {losses:?}") };
    let here = directory.path().display().to_string();
    says("a corrupted snapshot", loss, &[&here]);
    assert!(!snapshot_of(directory.path()).exists());
    assert_eq!(fs::read(directory.path().join("snapshot-1.kvf.set-aside-1")).unwrap(), damaged);
    assert_empty_without_a_vote(&mut opened).await;
    close(opened).await;
    // It stays so over restarts, and ends when the loss is repaired.
    let (mut opened, losses) = open(directory.path());
    assert!(losses.is_empty(), "{losses:?}");
    assert_empty_without_a_vote(&mut opened).await;
    opened.withheld.release(GROUP).unwrap();
    close(opened).await;
    assert!(!open(directory.path()).0.withheld.is_withheld(GROUP));
}

#[tokio::test]
async fn a_missing_snapshot_counts_as_lost() {
    let directory = router(Some(10)).await;
    fs::remove_file(snapshot_of(directory.path())).unwrap();
    let (mut opened, losses) = open(directory.path());
    assert!(matches!(losses.as_slice(), [DataLoss::Snapshot { group: GROUP, .. }]), "{losses:?}");
    assert_empty_without_a_vote(&mut opened).await;
}

#[tokio::test]
async fn a_damaged_snapshot_is_harmless_with_a_complete_log() {
    let directory = router(None).await;
    damage(directory.path());
    // Even for a lone voter, since the log is complete.
    let (mut opened, losses) = open_as(directory.path(), true).unwrap();
    let [loss] = losses.as_slice() else { panic!("one loss: {losses:?}") };
    let here = directory.path().display().to_string();
    says("a corrupted snapshot with a complete log", loss, &[&here]);
    assert!(!opened.withheld.is_withheld(GROUP));
    let (log, machine) = &mut opened.stores[1];
    assert_eq!(log.try_get_log_entries(..).await.unwrap().len() as u64, LAST + 1);
    assert_eq!(machine.published().read().applied, None);
}

#[tokio::test]
async fn an_interrupted_recovery_is_completed() {
    let directory = router(Some(10)).await;
    damage(directory.path());
    let damaged = fs::read(snapshot_of(directory.path())).unwrap();
    let aside = TempDir::new().unwrap();
    let (log, forgotten) = (aside.path().join("log"), aside.path().join("forgotten"));
    replace_folder(&directory.path().join(LOG_FOLDER), &log);
    let (opened, _) = open(directory.path());
    close(opened).await;
    // The vote was withheld, but the log was not reset and the file not set aside.
    fs::write(snapshot_of(directory.path()), &damaged).unwrap();
    replace_folder(&directory.path().join(LOG_FOLDER), &forgotten);
    replace_folder(&log, &directory.path().join(LOG_FOLDER));
    let (mut opened, losses) = open(directory.path());
    assert!(matches!(losses.as_slice(), [DataLoss::Snapshot { group: GROUP, .. }]), "{losses:?}");
    assert_empty_without_a_vote(&mut opened).await;
    close(opened).await;
    // The log was reset too.
    fs::write(snapshot_of(directory.path()), &damaged).unwrap();
    replace_folder(&forgotten, &directory.path().join(LOG_FOLDER));
    let (mut opened, _) = open(directory.path());
    assert_empty_without_a_vote(&mut opened).await;
    assert!(directory.path().join("snapshot-1.kvf.set-aside-3").exists());
}

#[tokio::test]
async fn a_lone_voter_cannot_recover_a_loss() {
    let directory = router(Some(10)).await;
    damage(directory.path());
    let Err(error) = open_as(directory.path(), true) else { panic!("a lost state was opened") };
    let here = directory.path().display().to_string();
    says("a corrupted snapshot of the only voter", &error, &[&here]);
    assert!(snapshot_of(directory.path()).exists(), "the file stays for inspection");
}

#[tokio::test]
async fn a_lost_log_or_loss_record_is_refused() {
    let directory = router(Some(10)).await;
    damage(directory.path());
    close(open(directory.path()).0).await;
    let path = directory.path().join(WITHHELD_FILE);
    let sound = fs::read(&path).unwrap();
    for at in 0..sound.len() {
        let mut flipped = sound.clone();
        flipped[at] ^= 1;
        fs::write(&path, flipped).unwrap();
        let Err(error) = open_as(directory.path(), false) else { panic!("byte {at}") };
        assert!(error.to_string().contains(WITHHELD_FILE), "{error}");
    }
    let directory = router(Some(10)).await;
    fs::remove_dir_all(directory.path().join(LOG_FOLDER)).unwrap();
    let Err(error) = open_as(directory.path(), false) else { panic!("a lost log was taken for a new one") };
    assert!(error.to_string().contains("it is new, but beside it"), "{error}");
}
