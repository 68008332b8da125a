//! The writer thread of the log: it gathers pending changes of all Raft groups and commits them at
//! once.
//!
//! Group commit: while one frame is synced, appends queue up, and the next frame takes them all, so
//! a thousand appends cost one sync. Queue order is disk order, for votes, appends, truncations and
//! purges alike. On a full disk the thread repeats a batch until there is room (`disk_room.rs`). After
//! any other failure it answers every later request with the same error: a log that lost one write
//! must not take the next one. Not here: reads from memory
//! (`log_store.rs`) and the format of frames (`log/`).

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread;

use openraft::storage::IOFlushed;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::disk_room::DiskRoom;
use super::log::{Change, DiskLog};
use super::{LogId, TypeConfig};

/// Requests queued for the disk, far above the appends that openraft keeps in flight. Senders wait
/// at the limit, which gives back pressure.
const QUEUE_REQUESTS_MAX: usize = 1024;

/// Requests in one frame: bounds memory and time of a single sync.
const BATCH_REQUESTS_MAX: usize = 512;

/// Command bytes after which a frame takes no further request, for the same reason.
const BATCH_BYTES_MAX: u64 = 8 << 20;

/// Receiver of a request's durability.
pub(crate) enum DurableCallback {
    /// openraft, for appended entries.
    Flushed(IOFlushed<TypeConfig>),
    /// A waiting caller.
    Reply(oneshot::Sender<io::Result<()>>),
    /// No receiver: only the order on disk matters.
    Ignored,
}

impl DurableCallback {
    fn complete(self, result: io::Result<()>) {
        match self {
            DurableCallback::Flushed(callback) => callback.io_completed(result),
            // The waiting side may be gone with the router; the write is valid either way.
            DurableCallback::Reply(reply) => drop(reply.send(result)),
            DurableCallback::Ignored => {}
        }
    }
}

struct DiskRequest {
    group: u16,
    change: Change,
    done: DurableCallback,
}

/// Request queue of one Raft group. When the last sender is gone, the thread writes the rest and
/// ends.
#[derive(Clone)]
pub(crate) struct DiskQueue {
    group: u16,
    sender: mpsc::Sender<DiskRequest>,
    committed: Arc<Mutex<CommittedPointers>>,
}

impl DiskQueue {
    /// Starts the thread for this number of groups; returns one queue per group. Join the handle
    /// after dropping every queue, so that the file is closed.
    pub(crate) fn start(
        disk: DiskLog,
        groups: u16,
        room: Arc<DiskRoom>,
    ) -> io::Result<(Vec<DiskQueue>, thread::JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel(QUEUE_REQUESTS_MAX);
        let committed = Arc::<Mutex<CommittedPointers>>::default();
        let pending_pointers = Arc::clone(&committed);
        let thread = thread::Builder::new()
            .name("raft-log".into())
            .spawn(move || run(disk, receiver, &pending_pointers, &room))?;
        let queue = |group| DiskQueue { group, sender: sender.clone(), committed: Arc::clone(&committed) };
        Ok(((0..groups).map(queue).collect(), thread))
    }

    /// Queues a change; `done` is called when it is durable.
    pub(crate) async fn send(&self, change: Change, done: DurableCallback) -> io::Result<()> {
        self.sender.send(DiskRequest { group: self.group, change, done }).await.map_err(|_| gone())
    }

    /// Records the group's committed index. It is written with the next batch without a sync of its
    /// own: losing it only costs a restarted router some catching up.
    pub(crate) fn note_committed(&self, last: Option<LogId>) {
        self.committed.lock().insert(self.group, last);
    }

    /// Queues a change and waits until it is durable.
    pub(crate) async fn send_durable(&self, change: Change) -> io::Result<()> {
        let (reply, durable) = oneshot::channel();
        self.send(change, DurableCallback::Reply(reply)).await?;
        durable.await.map_err(|_| gone())?
    }
}

fn gone() -> io::Error {
    io::Error::other("the raft log thread has ended")
}

/// Committed indexes that wait for a batch, by group.
type CommittedPointers = BTreeMap<u16, Option<LogId>>;

fn run(
    mut disk: DiskLog,
    mut requests: mpsc::Receiver<DiskRequest>,
    pending_pointers: &Mutex<CommittedPointers>,
    room: &DiskRoom,
) {
    let mut failed: Option<(io::ErrorKind, String)> = None;
    while let Some(first) = requests.blocking_recv() {
        // Taken before the batch: the entries it refers to were queued before it was recorded.
        let committed = std::mem::take(&mut *pending_pointers.lock());
        let batch = gather(first, &mut requests);
        let result = match &failed {
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone())),
            None => room.write(|| write(&mut disk, &batch, &committed)),
        };
        if let (Err(error), None) = (&result, &failed) {
            tracing::error!(%error, "the raft log cannot be written, this router stops voting: check the disk, \
                then restart it");
            failed = Some((error.kind(), error.to_string()));
        }
        for request in batch {
            request.done.complete(clone_result(&result));
        }
        if failed.is_none() {
            disk.prepare();
        }
    }
    let committed = std::mem::take(&mut *pending_pointers.lock());
    if !committed.is_empty()
        && failed.is_none()
        && let Err(error) = write(&mut disk, &[], &committed)
    {
        tracing::warn!(%error, "committed indexes were not saved; the next start learns them from the leaders");
    }
}

/// Gathers queued requests up to the limits of a frame.
fn gather(first: DiskRequest, requests: &mut mpsc::Receiver<DiskRequest>) -> Vec<DiskRequest> {
    let mut bytes = first.change.command_bytes();
    let mut batch = vec![first];
    while batch.len() < BATCH_REQUESTS_MAX
        && bytes < BATCH_BYTES_MAX
        && let Ok(request) = requests.try_recv()
    {
        bytes += request.change.command_bytes();
        batch.push(request);
    }
    batch
}

fn write(disk: &mut DiskLog, batch: &[DiskRequest], committed: &CommittedPointers) -> io::Result<()> {
    let pointers: Vec<_> = committed.iter().map(|(group, last)| (*group, Change::Committed(*last))).collect();
    let changes = batch.iter().map(|request| (request.group, &request.change));
    disk.commit(changes.chain(pointers.iter().map(|(group, change)| (*group, change))))
}

fn clone_result(result: &io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    }
}
