//! The one thread that writes the log: it gathers what waits, of all Raft groups, and commits it at once.
//!
//! Group commit: while one frame is being synced, appends pile up in the channel; the next
//! frame takes them all, so a thousand appends cost one sync. Order in the channel is order on
//! disk, for votes, appends, truncations and purges alike. After a failed commit the thread answers
//! every later request with the same error: a log that lost one write must not take the next one.
//! Not here: what is readable from memory (`log_store.rs`) and how frames look (`log/`).

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread;

use openraft::storage::IOFlushed;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::log::{Change, Disk};
use super::{LogId, TypeConfig};

/// Requests waiting for the disk. openraft sends one append per group of entries, so this is far above
/// what it keeps in flight; above it the sender waits, which is the back pressure we want.
const QUEUE_REQUESTS_MAX: usize = 1024;

/// Requests in one frame: bounds the memory and the time of a single sync.
const BATCH_REQUESTS_MAX: usize = 512;

/// Bytes of commands after which a frame takes no further request, for the same reason.
const BATCH_BYTES_MAX: u64 = 8 << 20;

/// Who is told when a request is durable.
pub(crate) enum Done {
    /// openraft, for appended entries.
    Flushed(IOFlushed<TypeConfig>),
    /// A caller that waits.
    Reply(oneshot::Sender<io::Result<()>>),
    /// Nobody: order on disk is all that matters.
    Nobody,
}

impl Done {
    fn complete(self, result: io::Result<()>) {
        match self {
            Done::Flushed(callback) => callback.io_completed(result),
            // The waiting side may have gone away with the router; the write stands either way.
            Done::Reply(reply) => drop(reply.send(result)),
            Done::Nobody => {}
        }
    }
}

struct Request {
    group: u16,
    change: Change,
    done: Done,
}

/// Where the requests of one Raft group go. When the last sender is gone the thread writes what waits and
/// ends.
#[derive(Clone)]
pub(crate) struct DiskQueue {
    group: u16,
    sender: mpsc::Sender<Request>,
    committed: Arc<Mutex<Committed>>,
}

impl DiskQueue {
    /// Starts the thread for so many groups; the queues come by group. Join the handle after dropping every
    /// queue, to know the file is closed.
    pub(crate) fn start(disk: Disk, groups: u16) -> io::Result<(Vec<DiskQueue>, thread::JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel(QUEUE_REQUESTS_MAX);
        let committed = Arc::<Mutex<Committed>>::default();
        let noted = Arc::clone(&committed);
        let thread =
            thread::Builder::new().name("raft-log".into()).spawn(move || run(disk, receiver, &noted))?;
        let queue = |group| DiskQueue { group, sender: sender.clone(), committed: Arc::clone(&committed) };
        Ok(((0..groups).map(queue).collect(), thread))
    }

    /// Puts a change in line; `done` hears when it is durable.
    pub(crate) async fn send(&self, change: Change, done: Done) -> io::Result<()> {
        self.sender.send(Request { group: self.group, change, done }).await.map_err(|_| gone())
    }

    /// Notes up to where the group is committed. It needs no sync and wakes nobody: it rides with the next batch, since
    /// losing it costs a restarted router a moment of catching up and nothing else.
    pub(crate) fn note_committed(&self, last: Option<LogId>) {
        self.committed.lock().insert(self.group, last);
    }

    /// Puts a change in line and waits until it is durable.
    pub(crate) async fn send_durable(&self, change: Change) -> io::Result<()> {
        let (reply, durable) = oneshot::channel();
        self.send(change, Done::Reply(reply)).await?;
        durable.await.map_err(|_| gone())?
    }
}

fn gone() -> io::Error {
    io::Error::other("the raft log thread has ended")
}

/// Committed pointers that wait for a batch, by group.
type Committed = BTreeMap<u16, Option<LogId>>;

fn run(mut disk: Disk, mut requests: mpsc::Receiver<Request>, noted: &Mutex<Committed>) {
    let mut failed: Option<(io::ErrorKind, String)> = None;
    while let Some(first) = requests.blocking_recv() {
        // Taken before the batch: the entries it is about were put in line before it was noted.
        let committed = std::mem::take(&mut *noted.lock());
        let batch = gather(first, &mut requests);
        let result = match &failed {
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone())),
            None => write(&mut disk, &batch, committed),
        };
        if let (Err(error), None) = (&result, &failed) {
            tracing::error!(%error, "the raft log cannot be written, this router stops voting: make room, then restart it");
            failed = Some((error.kind(), error.to_string()));
        }
        for request in batch {
            request.done.complete(copy(&result));
        }
        if failed.is_none() {
            disk.prepare();
        }
    }
    let committed = std::mem::take(&mut *noted.lock());
    if !committed.is_empty()
        && failed.is_none()
        && let Err(error) = write(&mut disk, &[], committed)
    {
        tracing::warn!(%error, "committed pointers were not saved; the next start learns them from the leaders");
    }
}

/// Takes what waits.
fn gather(first: Request, requests: &mut mpsc::Receiver<Request>) -> Vec<Request> {
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

fn write(disk: &mut Disk, batch: &[Request], committed: Committed) -> io::Result<()> {
    let pointers: Vec<_> =
        committed.into_iter().map(|(group, last)| (group, Change::Committed(last))).collect();
    let changes = batch.iter().map(|request| (request.group, &request.change));
    disk.commit(changes.chain(pointers.iter().map(|(group, change)| (*group, change))))
}

fn copy(result: &io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    }
}
