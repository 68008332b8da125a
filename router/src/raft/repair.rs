//! Repair of a diverged replica: it takes the leader's state and reapplies its own later entries.
//!
//! Consensus is unaffected: log, vote and applied index stay, and only the applied state is
//! replaced. Both sides are here, since they share the parts of a group's replica. Not here:
//! detection of a diverged replica (`crate::anti_entropy`), and snapshots for a lagging log
//! (openraft).

use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::Stream;
use kv_core::index::SNAPSHOT_FORMAT;
use kvfleet_proto::pb;
use tokio::sync::Semaphore;
use tokio::time::{Instant, interval, sleep};
use tokio_stream::StreamExt;
use tonic::{Request, Status};

use super::Entry;
use super::intake::ReceivedSnapshot;
use super::log_store::LogStore;
use super::network::{Network, SnapshotHead};
use super::service::{PART_TIMEOUT, check_head, receive};
use super::snapshot_sender;
use super::state_machine::{LogHold, SnapshotData, StateMachine};
use crate::groups::Group;

/// Longest wait until the replica has applied the entries of the received state.
const APPLY_WAIT_MAX: Duration = Duration::from_secs(10);

/// Timeout until the state is received and the replica has caught up with it: twice a snapshot's
/// timeout. The log grows meanwhile.
const REPAIR_TIMEOUT: Duration = Duration::from_millis(2 * super::boot::SNAPSHOT_TIMEOUT_MS);

/// Log bytes in memory at which a repair is given up: four times the snapshot trigger.
const LOG_BYTES_MAX: u64 = 1 << 30;

/// Interval between checks of a repair's limits.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Reads held entries of a log.
pub(super) type HeldEntries = dyn Fn(RangeInclusive<u64>) -> Vec<Entry> + Send + Sync;

/// Reads the bytes of held entries.
type LogBytes = dyn Fn() -> u64 + Send + Sync;

/// Repair of one group's replica on this router.
pub(crate) struct ReplicaRepair {
    machine: StateMachine,
    entries: Box<HeldEntries>,
    /// Bytes of all held entries.
    log_bytes: Box<LogBytes>,
    network: Network,
    is_running: AtomicBool,
}

impl ReplicaRepair {
    pub(crate) fn new(machine: StateMachine, log: &LogStore, network: Network) -> ReplicaRepair {
        let (entries, log_bytes) = (Box::new(log.entries_held()), Box::new(log.bytes_held()));
        ReplicaRepair { machine, entries, log_bytes, network, is_running: AtomicBool::new(false) }
    }

    /// The state machine.
    pub(crate) fn machine(&self) -> &StateMachine {
        &self.machine
    }

    /// Stream of this replica's current state as parts. It becomes this router's snapshot.
    pub(super) async fn stream_state(
        &self,
        group: &Group,
    ) -> Result<impl Stream<Item = Result<pb::SnapshotPart, Status>> + use<>, Status> {
        let slot = self.network.peers.acquire_send_slot().await;
        let slot = slot.ok_or_else(|| Status::unavailable("this router is stopping"))?;
        let machine = self.machine.clone();
        let built = tokio::task::spawn_blocking(move || machine.build()).await;
        let built = built.map_err(io::Error::other).flatten();
        let built = built.map_err(|error| Status::internal(format!("cannot make a snapshot: {error}")))?;
        let SnapshotData::File(stored) = built.snapshot else {
            return Err(Status::internal("a built snapshot is not a file"));
        };
        let vote = group.consensus.vote();
        let head = SnapshotHead { vote, meta: built.meta, format: SNAPSHOT_FORMAT, bytes: stored.bytes };
        let head = rmp_serde::to_vec_named(&head)
            .map_err(|error| Status::internal(format!("a snapshot head does not encode: {error}")))?;
        let parts = snapshot_sender::parts(&self.network.envelope, head, stored);
        Ok(parts.map(move |part| {
            let _until_sent = &slot;
            Ok(part)
        }))
    }

    /// Repairs the replica in the background, unless a repair is running. After a failure it pauses
    /// for as long as the attempt took, since no snapshot was made meanwhile and the log must
    /// shrink; the next request retries.
    pub(super) fn start(self: &Arc<Self>, group: &Arc<Group>, receiving: &Arc<Semaphore>) {
        if self.is_running.swap(true, Ordering::Relaxed) {
            return;
        }
        let (repair, group, receiving) = (Arc::clone(self), Arc::clone(group), Arc::clone(receiving));
        tokio::spawn(async move {
            let number = group.number();
            // The limit on received snapshots applies, so that few indexes exist at once.
            let slot = receiving.acquire().await;
            let begun = Instant::now();
            let repaired = repair.run(&group).await;
            drop(slot);
            match repaired {
                Ok(entry) => tracing::warn!(
                    group = number,
                    entry,
                    "this replica has the leader's state; it answers once a comparison agrees"
                ),
                Err(why) => {
                    group.record_failed_repair();
                    let failed = group.repairs_failed();
                    tracing::error!(
                        group = number,
                        why,
                        failed,
                        "this replica cannot take the leader's state now; it retries"
                    );
                    sleep(begun.elapsed()).await;
                }
            }
            repair.is_running.store(false, Ordering::Relaxed);
        });
    }

    /// Returns the entry at which the leader's state was taken.
    async fn run(self: &Arc<Self>, group: &Group) -> Result<u64, String> {
        // Held before the state is taken: later entries are reapplied.
        let kept = self.machine.hold_log();
        let (received, entry) = with_limits(REPAIR_TIMEOUT, &*self.log_bytes, self.receive(group)).await?;
        self.install(received, kept).await.map_err(|error| error.to_string())?;
        Ok(entry)
    }

    /// Receives the leader's state, and waits until the entry at which it was taken is applied
    /// here.
    async fn receive(&self, group: &Group) -> Result<(ReceivedSnapshot, u64), String> {
        let leader = group.consensus.leader().ok_or("no router leads")?;
        if leader.router == group.consensus.id() {
            return Err("this router leads".into());
        }
        let mut client = self.network.peers.client(leader.router, &leader.address)?;
        let mut request = Request::new(self.network.envelope.frame(Vec::new()));
        request.set_timeout(Duration::from_millis(super::boot::SNAPSHOT_TIMEOUT_MS));
        let failed = |status: Status| format!("router {}: {}", leader.router, status.message());
        let mut stream = client.state(request).await.map_err(failed)?.into_inner();
        let first = stream.message().await.map_err(failed)?.ok_or("it sent no data")?;
        let head = check_head(&first).map_err(failed)?;
        let intake = self.machine.intake();
        let received = receive(&intake, head.meta.clone(), head.bytes, &mut stream, PART_TIMEOUT).await;
        let received = received.map_err(failed)?;
        let entry = head.meta.last_log_id.map_or(0, |last| last.index());
        self.wait_applied(entry).await?;
        Ok((received, entry))
    }

    /// Waits until an entry is applied here.
    async fn wait_applied(&self, entry: u64) -> Result<(), String> {
        let published = self.machine.published();
        let mut changes = published.watch_entries();
        let level = async {
            while published.read().applied_index() < entry {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let level = tokio::time::timeout(APPLY_WAIT_MAX, level).await;
        level.map_err(|_| format!("entry {entry} was not applied within {APPLY_WAIT_MAX:?}"))
    }

    async fn install(self: &Arc<Self>, received: ReceivedSnapshot, kept: LogHold) -> io::Result<()> {
        let repair = Arc::clone(self);
        let taken = move || repair.machine.repair(received, &*repair.entries, kept);
        tokio::task::spawn_blocking(taken).await.map_err(io::Error::other).flatten()
    }
}

/// Result of a step, unless it takes too long or the log grows too large meanwhile.
async fn with_limits<T>(
    longest: Duration,
    log_bytes: &LogBytes,
    step: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let begun = Instant::now();
    let too_much = async {
        let mut look = interval(CHECK_INTERVAL);
        loop {
            look.tick().await;
            if begun.elapsed() >= longest {
                return format!("it took longer than {longest:?}");
            }
            let held = log_bytes();
            if held > LOG_BYTES_MAX {
                return format!("the log grew to {held} bytes meanwhile");
            }
        }
    };
    tokio::select! {
        done = step => done,
        why = too_much => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_step_ends_at_its_time_or_log_limit() {
        let never = || std::future::pending::<Result<(), String>>();
        let little = || LOG_BYTES_MAX;
        assert_eq!(with_limits(REPAIR_TIMEOUT, &little, async { Ok(7) }).await, Ok(7));
        assert_eq!(
            with_limits(Duration::ZERO, &little, never()).await,
            Err("it took longer than 0ns".into())
        );
        let large = with_limits(REPAIR_TIMEOUT, &|| LOG_BYTES_MAX + 1, never()).await;
        assert_eq!(large, Err("the log grew to 1073741825 bytes meanwhile".into()));
    }
}
