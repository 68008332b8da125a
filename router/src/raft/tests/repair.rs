//! A repair under load: it holds the log, ends at any rate of entries, and delayed snapshots are
//! made afterwards.

use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{channel, sync_channel};
use std::time::Duration;

use openraft::async_runtime::WatchReceiver;
use openraft::storage::RaftStateMachine;
use tempfile::TempDir;
use tokio::time::timeout;

use super::super::boot;
use super::super::intake::ReceivedSnapshot;
use super::super::state_machine::{StateMachine, apply_batch};
use super::snapshots::{apply, filled};
use super::{Entry, entry};
use crate::config::{RouterConfig, VoterConfig};

/// Timeout that only a hang reaches, on any machine.
const HANG: Duration = Duration::from_secs(60);

/// The state of a machine, as received by another one.
fn state_of(machine: &StateMachine, to: &StateMachine) -> ReceivedSnapshot {
    let built = super::snapshots::stored(machine.build().unwrap());
    let mut incoming = to.intake().begin(built.meta.clone()).unwrap();
    for chunk in built.chunks() {
        incoming.chunk(chunk.unwrap().freeze()).unwrap();
    }
    incoming.finish().unwrap()
}

#[tokio::test]
async fn openraft_gets_no_snapshot_while_a_repair_holds_the_log() {
    let directory = TempDir::new().unwrap();
    let (mut machine, _) = filled(directory.path(), 1_000).await;
    let mut openrafts = machine.clone();
    let kept = machine.hold_log();
    assert!(openrafts.try_create_snapshot_builder(false).await.is_none());
    assert!(openrafts.try_create_snapshot_builder(true).await.is_some(), "openraft may insist");
    drop(kept);
    assert!(machine.try_create_snapshot_builder(false).await.is_some());
}

#[tokio::test]
async fn a_repair_ends_under_a_constant_load() {
    const MORE: u64 = 40;
    const ROUNDS_MAX: u64 = 100;
    let (directory, source) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut machine, last) = filled(directory.path(), 1_000).await;
    let (right, _) = filled(source.path(), 1_000).await;
    let received = state_of(&right, &machine);
    apply(&mut machine, (last + 1..=last + MORE).map(entry)).await;
    let (published, applied) = (machine.published(), machine.published());
    let (comes, come) = channel::<()>();
    let (done, is_done) = sync_channel(0);
    let load = std::thread::spawn(move || {
        while come.recv().is_ok() {
            let next = published.read().applied_index() + 1;
            let more = (next..next + MORE).map(|index| (entry(index), None)).collect();
            apply_batch(&published, more).unwrap();
            done.send(()).ok();
        }
    });
    let rounds = AtomicU64::new(0);
    let parts = Mutex::new((comes, is_done));
    let entries = move |range: RangeInclusive<u64>| -> Vec<Entry> {
        assert!(rounds.fetch_add(1, Ordering::Relaxed) < ROUNDS_MAX, "this does not end");
        let (comes, is_done) = &*parts.lock().unwrap();
        comes.send(()).unwrap();
        // They cannot be applied once the repair pauses all entries.
        is_done.recv_timeout(Duration::from_millis(300)).ok();
        range.map(entry).collect()
    };
    machine.repair(received, &entries, machine.hold_log()).unwrap();
    drop(entries);
    load.join().unwrap();
    assert!(
        applied.read().applied_index() >= last + 3 * MORE,
        "the last entries are applied to the repaired state"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_snapshot_is_requested_again() {
    let directory = TempDir::new().unwrap();
    let voter = VoterConfig { id: 1, address: "127.0.0.1:1".into() };
    let data_dir = directory.path().to_owned();
    let config = RouterConfig { id: 1, voters: vec![voter], data_dir, shards: 1, ..RouterConfig::default() };
    let booted = boot::boot(&config, kvfleet_testkit::cluster::identity()).await.unwrap();
    let all = || booted.groups.all().iter().map(|group| &group.consensus);
    all().for_each(|consensus| consensus.raft().run());
    boot::initialize(&booted.groups, &booted.withheld, &config).await.unwrap();
    let consensus = &booted.groups.control().consensus;
    let metrics = consensus.raft().metrics();
    let applied = async {
        loop {
            let applied = metrics.borrow_watched().last_applied;
            match applied.filter(|_| consensus.is_leader()) {
                Some(applied) => return applied,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    let applied = timeout(HANG, applied).await.unwrap();
    let kept = booted.repairs[0].machine().hold_log();
    let mut comes = Box::pin(consensus.wait_snapshot_covers(applied));
    timeout(Duration::from_millis(200), &mut comes).await.expect_err("it is refused");
    drop(kept);
    assert!(timeout(HANG, comes).await.expect("it is asked for again"));
    for consensus in all() {
        consensus.raft().shutdown().await.unwrap();
    }
}
