//! Repair of a replica that differs: it takes the leader's state and applies what it had applied beyond it again.
//!
//! Consensus knows nothing of this: log, vote and what is applied stay as they are, and only what applying came to is
//! replaced. Both sides are here, because they share what a group's replica is made of. Not here: who finds out
//! that a replica differs (`crate::truth`), and snapshots for a log that lags (openraft).

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
use super::intake::Received;
use super::log_store::LogStore;
use super::network::{Network, SnapshotHead};
use super::sending;
use super::service::{PART_MAX, check_head, receive};
use super::state_machine::{LogKept, SnapshotData, StateMachine};
use crate::groups::Group;

/// Longest a repair waits until the replica has applied what the state it received has.
const LEVEL_MAX: Duration = Duration::from_secs(10);

/// Longest until the state is here and the replica level with it: twice what a whole snapshot may take. The log grows
/// meanwhile.
const REPAIR_MAX: Duration = Duration::from_millis(2 * super::boot::SNAPSHOT_TIMEOUT_MS);

/// Bytes of a group's log in memory at which a repair is given up: four times what calls for a snapshot.
const LOG_BYTES_MAX: u64 = 1 << 30;

/// How often a repair is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Entries of a log that are still held.
pub(super) type Entries = dyn Fn(RangeInclusive<u64>) -> Vec<Entry> + Send + Sync;

/// Bytes of the entries of a log that are held.
type LogBytes = dyn Fn() -> u64 + Send + Sync;

/// What the replica of one group on this router is made of.
pub(crate) struct Repair {
    machine: StateMachine,
    entries: Box<Entries>,
    /// Bytes of all entries that are held.
    log_bytes: Box<LogBytes>,
    network: Network,
    is_running: AtomicBool,
}

impl Repair {
    pub(crate) fn new(machine: StateMachine, log: &LogStore, network: Network) -> Repair {
        let (entries, log_bytes) = (Box::new(log.entries_held()), Box::new(log.bytes_held()));
        Repair { machine, entries, log_bytes, network, is_running: AtomicBool::new(false) }
    }

    /// The state machine.
    pub(crate) fn machine(&self) -> &StateMachine {
        &self.machine
    }

    /// The state of this replica as it is now, as a stream of parts. It is this router's snapshot from then on.
    pub(super) async fn state(
        &self,
        group: &Group,
    ) -> Result<impl Stream<Item = Result<pb::SnapshotPart, Status>> + use<>, Status> {
        let turn = self.network.peers.sending_turn().await;
        let turn = turn.ok_or_else(|| Status::unavailable("this router stops"))?;
        let machine = self.machine.clone();
        let built = tokio::task::spawn_blocking(move || machine.build()).await;
        let built = built.map_err(io::Error::other).flatten();
        let built = built.map_err(|error| Status::internal(format!("no snapshot can be made: {error}")))?;
        let SnapshotData::Stored(stored) = built.snapshot else {
            return Err(Status::internal("a snapshot that was made is not a file"));
        };
        let vote = group.consensus.vote();
        let head = SnapshotHead { vote, meta: built.meta, format: SNAPSHOT_FORMAT, bytes: stored.bytes };
        let head = rmp_serde::to_vec_named(&head)
            .map_err(|error| Status::internal(format!("a snapshot head does not encode: {error}")))?;
        let parts = sending::parts(&self.network.envelope, head, stored);
        Ok(parts.map(move |part| {
            let _until_sent = &turn;
            Ok(part)
        }))
    }

    /// Repairs the replica in the background, unless that is under way. Who failed is told again, and tries again after
    /// as long a pause as the try took: no snapshot was made meanwhile, and the log must become short again.
    pub(super) fn start(self: &Arc<Self>, group: &Arc<Group>, receiving: &Arc<Semaphore>) {
        if self.is_running.swap(true, Ordering::Relaxed) {
            return;
        }
        let (repair, group, receiving) = (Arc::clone(self), Arc::clone(group), Arc::clone(receiving));
        tokio::spawn(async move {
            let number = group.number();
            // As many indexes at once as snapshots that come in.
            let turn = receiving.acquire().await;
            let begun = Instant::now();
            let repaired = repair.run(&group).await;
            drop(turn);
            match repaired {
                Ok(entry) => tracing::warn!(
                    group = number,
                    entry,
                    "this replica has the leader's state; it answers once a comparison agrees"
                ),
                Err(why) => {
                    group.repair_failed();
                    let failed = group.repairs_failed();
                    tracing::error!(
                        group = number,
                        why,
                        failed,
                        "this replica cannot take the leader's state now; it is tried again"
                    );
                    sleep(begun.elapsed()).await;
                }
            }
            repair.is_running.store(false, Ordering::Relaxed);
        });
    }

    /// Gives the entry at which the leader's state was taken.
    async fn run(self: &Arc<Self>, group: &Group) -> Result<u64, String> {
        // From before the state is taken on: what is applied beyond it is applied again.
        let kept = self.machine.keep_log();
        let (received, entry) = within(REPAIR_MAX, &*self.log_bytes, self.receive(group)).await?;
        self.take(received, kept).await.map_err(|error| error.to_string())?;
        Ok(entry)
    }

    /// Takes in the leader's state, and waits until the entry is applied here at which it was taken.
    async fn receive(&self, group: &Group) -> Result<(Received, u64), String> {
        let leader = group.consensus.leader().ok_or("no router leads")?;
        if leader.router == group.consensus.id() {
            return Err("this router leads".into());
        }
        let mut client = self.network.peers.client(&leader.address)?;
        let mut request = Request::new(self.network.envelope.frame(Vec::new()));
        request.set_timeout(Duration::from_millis(super::boot::SNAPSHOT_TIMEOUT_MS));
        let failed = |status: Status| format!("router {}: {}", leader.router, status.message());
        let mut stream = client.state(request).await.map_err(failed)?.into_inner();
        let first = stream.message().await.map_err(failed)?.ok_or("it sent nothing")?;
        let head = check_head(&first).map_err(failed)?;
        let intake = self.machine.intake();
        let received = receive(&intake, head.meta.clone(), head.bytes, &mut stream, PART_MAX).await;
        let received = received.map_err(failed)?;
        let entry = head.meta.last_log_id.map_or(0, |last| last.index());
        self.applied(entry).await?;
        Ok((received, entry))
    }

    /// Waits until an entry is applied here.
    async fn applied(&self, entry: u64) -> Result<(), String> {
        let published = self.machine.published();
        let mut changes = published.changes();
        let level = async {
            while published.read().applied_index() < entry {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let level = tokio::time::timeout(LEVEL_MAX, level).await;
        level.map_err(|_| format!("entry {entry} was not applied within {LEVEL_MAX:?}"))
    }

    async fn take(self: &Arc<Self>, received: Received, kept: LogKept) -> io::Result<()> {
        let repair = Arc::clone(self);
        let taken = move || repair.machine.repair(received, &*repair.entries, kept);
        tokio::task::spawn_blocking(taken).await.map_err(io::Error::other).flatten()
    }
}

/// What a step of a repair comes to, unless it takes too long, or the log grows too large meanwhile.
async fn within<T>(
    longest: Duration,
    log_bytes: &LogBytes,
    step: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let begun = Instant::now();
    let too_much = async {
        let mut look = interval(LOOK_EVERY);
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
    async fn a_step_ends_with_its_time_or_with_the_room_for_the_log() {
        let never = || std::future::pending::<Result<(), String>>();
        let little = || LOG_BYTES_MAX;
        assert_eq!(within(REPAIR_MAX, &little, async { Ok(7) }).await, Ok(7));
        assert_eq!(within(Duration::ZERO, &little, never()).await, Err("it took longer than 0ns".into()));
        let large = within(REPAIR_MAX, &|| LOG_BYTES_MAX + 1, never()).await;
        assert_eq!(large, Err("the log grew to 1073741825 bytes meanwhile".into()));
    }
}
