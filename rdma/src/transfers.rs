//! Transfers in flight: their limits, the memory that they hold, and delivery of their completions.
//!
//! One thread polls the card while transfers are in flight, and sleeps longer the longer no
//! completion comes. A buffer moves into its transfer and returns with the completion. A queue pair
//! with a failed transfer is unusable, and so is one whose card neither completes nor fails its
//! transfers. Its owner destroys it, and only then the buffers of its
//! remaining transfers are released. That may take the system a while, so a separate thread does
//! it. Not here: the card (`rail.rs`), the purpose of a transfer.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::memory::PooledBuffer;
use super::rail::{Completion, Direction, QueuePair, Rail, Transfer};
use super::{RdmaStats, RdmaTuning};

/// Polls without sleep after the last completion: a transfer of 64 KiB takes about 5 µs on a fast
/// network.
const SPIN_POLLS: u32 = 2_000;

/// First sleep; each further sleep doubles.
const SLEEP_MIN: Duration = Duration::from_micros(10);

/// Longest sleep: the duration of a 1 MiB transfer on a slow network.
const SLEEP_MAX: Duration = Duration::from_micros(320);

/// Pause after a failed poll. The card hardly recovers, and the transfers in flight time out
/// anyway.
const POLL_ERROR_PAUSE: Duration = Duration::from_millis(50);

/// Time between two searches for queue pairs without completions.
const SILENCE_CHECK: Duration = Duration::from_millis(100);

/// Divisor that gives one peer's share of all transfers. Eight dead peers together hold all of them
/// until their retries end, and two full queue pairs already keep a rail busy.
const PEER_LIMIT_DIVISOR: u32 = 8;

/// Adaptive pause between polls.
#[derive(Debug, Default)]
pub(super) struct PollBackoff {
    empty_polls: u32,
    sleep: Duration,
}

impl PollBackoff {
    /// The pause after a poll that found a completion or not; `None` means poll again at once.
    pub(super) fn next_pause(&mut self, found: bool) -> Option<Duration> {
        if found {
            *self = PollBackoff::default();
            return None;
        }
        self.empty_polls = self.empty_polls.saturating_add(1);
        if self.empty_polls < SPIN_POLLS {
            return None;
        }
        self.sleep = (self.sleep * 2).clamp(SLEEP_MIN, SLEEP_MAX);
        Some(self.sleep)
    }
}

/// Why a transfer failed. How many bytes it moved is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TransferError {
    #[error("the card reports: {}", status_text(*.0))]
    Status(u32),
    #[error("the card refused the transfer: {0}")]
    Post(String),
    #[error("an earlier transfer of its queue pair failed")]
    Broken,
}

/// Meaning of the verbs status codes that occur.
fn status_text(status: u32) -> String {
    let meaning = match status {
        4 => "local protection error",
        5 => "flushed with its queue pair",
        9 => "remote invalid request",
        10 => "remote access error: the peer does not allow it (any more)",
        11 => "remote operation error",
        12 => "the peer does not answer",
        13 => "the peer is not ready",
        _ => "failed",
    };
    format!("{meaning} (status {status})")
}

/// A queue pair, shared by its owner and its transfers.
pub(super) struct QpHandle {
    queue: Box<dyn QueuePair>,
    id: u64,
    is_broken: AtomicBool,
    /// When the last transfer was submitted or completed.
    last_progress: Mutex<Instant>,
    in_flight_limit: Arc<Semaphore>,
    /// Limits the transfers of all queue pairs to the same peer.
    peer_limit: Arc<Semaphore>,
}

impl QpHandle {
    /// Whether a transfer failed.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    fn record_progress(&self) {
        *self.last_progress.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn is_silent(&self, now: Instant, timeout: Duration) -> bool {
        let last = *self.last_progress.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(last) >= timeout
    }

    pub(super) fn queue(&self) -> &dyn QueuePair {
        self.queue.as_ref()
    }
}

/// Address and key of memory at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteAddress {
    pub(super) address: u64,
    pub(super) key: u32,
}

struct InFlightTransfer {
    direction: Direction,
    qp_id: u64,
    /// The queue pair, so that a failure marks it as broken.
    qp: Arc<QpHandle>,
    buffer: PooledBuffer,
    done: oneshot::Sender<(PooledBuffer, Result<(), TransferError>)>,
    _permits: [OwnedSemaphorePermit; 3],
}

struct TransferTable {
    transfers: HashMap<u64, InFlightTransfer>,
    is_closed: bool,
}

/// State shared by both threads and all users.
struct EngineState {
    rail: Arc<dyn Rail>,
    /// See [`super::COMPLETION_TIMEOUT`].
    completion_timeout: Duration,
    table: Mutex<TransferTable>,
    submitted: Condvar,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    failed: AtomicU64,
}

impl EngineState {
    fn lock_table(&self) -> MutexGuard<'_, TransferTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers completions to their waiters.
    fn complete(&self, ended: &mut Vec<Completion>) {
        for Completion { id, status } in ended.drain(..) {
            // An unknown transfer belongs to a queue pair that was destroyed.
            let Some(flight) = self.lock_table().transfers.remove(&id) else { continue };
            flight.qp.record_progress();
            let bytes = u64::from(flight.buffer.len_bytes());
            let result = if status == 0 {
                match flight.direction {
                    Direction::Read => self.read_bytes.fetch_add(bytes, Ordering::Relaxed),
                    Direction::Write => self.written_bytes.fetch_add(bytes, Ordering::Relaxed),
                };
                Ok(())
            } else {
                self.failed.fetch_add(1, Ordering::Relaxed);
                flight.qp.is_broken.store(true, Ordering::Release);
                Err(TransferError::Status(status))
            };
            // A card no longer touches the memory of a completed transfer, whether it succeeded or
            // failed.
            let _ = flight.done.send((flight.buffer, result)); // if the receiver is gone, the buffer is dropped
        }
    }

    fn poll_until_closed(&self) {
        let (mut pace, mut ended, mut is_failed) = (PollBackoff::default(), Vec::new(), false);
        let mut checked_at = Instant::now();
        loop {
            {
                let mut table = self.lock_table();
                while table.transfers.is_empty() && !table.is_closed {
                    table = self.submitted.wait(table).unwrap_or_else(PoisonError::into_inner);
                    pace = PollBackoff::default();
                }
                if table.is_closed {
                    return;
                }
            }
            if let Err(cause) = self.rail.poll(&mut ended) {
                if !std::mem::replace(&mut is_failed, true) {
                    tracing::error!(%cause, "cannot poll the RDMA device any more; restart this process");
                }
                self.fail(|_| true);
                std::thread::sleep(POLL_ERROR_PAUSE);
            }
            match pace.next_pause(!ended.is_empty()) {
                None => std::hint::spin_loop(),
                Some(sleep) => std::thread::sleep(sleep),
            }
            self.complete(&mut ended);
            let now = Instant::now();
            if now.saturating_duration_since(checked_at) >= SILENCE_CHECK {
                checked_at = now;
                self.fail(|qp| qp.is_silent(now, self.completion_timeout));
            }
        }
    }

    /// No further completion will come from these queue pairs: their owners must destroy them.
    fn fail(&self, is_failed: impl Fn(&QpHandle) -> bool) {
        let flights = &mut self.lock_table().transfers;
        for flight in flights.values_mut().filter(|flight| is_failed(&flight.qp)) {
            if !flight.qp.is_broken.swap(true, Ordering::AcqRel) {
                tracing::warn!(
                    "an RDMA device neither completes nor fails its transfers: their connection is \
                     replaced; if this repeats, check the device and its driver"
                );
            }
            let (nobody, _) = oneshot::channel();
            drop(std::mem::replace(&mut flight.done, nobody));
        }
        // The buffers stay until the queue pairs are destroyed.
    }
}

/// A started transfer. Returns its buffer with the result.
pub(super) struct PendingTransfer(oneshot::Receiver<(PooledBuffer, Result<(), TransferError>)>);

impl PendingTransfer {
    /// The buffer after a successful transfer.
    pub(super) async fn wait(self) -> Result<PooledBuffer, TransferError> {
        let (place, result) = self.0.await.map_err(|_| TransferError::Broken)?;
        result.map(|()| place)
    }
}

/// Queue pairs to destroy, and then the memory that they could touch, in this order.
struct Teardown {
    queue_pairs: Vec<Arc<QpHandle>>,
    resources: Box<dyn Any + Send>,
}

/// Runs the transfers of one rail.
pub(super) struct TransferEngine {
    state: Arc<EngineState>,
    next_id: AtomicU64,
    in_flight_limit: Arc<Semaphore>,
    in_flight_max: u32,
    queue_in_flight_max: u32,
    teardowns: mpsc::Sender<Teardown>,
    /// All live queue pairs.
    queue_pairs: Mutex<Vec<Weak<QpHandle>>>,
}

impl TransferEngine {
    /// Starts both threads; they stop when this value is dropped.
    pub(super) fn start(rail: Arc<dyn Rail>, tuning: &RdmaTuning) -> std::io::Result<TransferEngine> {
        let table = Mutex::new(TransferTable { transfers: HashMap::new(), is_closed: false });
        let shared = Arc::new(EngineState {
            rail,
            completion_timeout: tuning.completion_timeout,
            table,
            submitted: Condvar::new(),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let polling = Arc::clone(&shared);
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        named("rdma-poll").spawn(move || polling.poll_until_closed())?;
        let (graves, buried) = mpsc::channel::<Teardown>();
        let of = Arc::clone(&shared);
        named("rdma-end").spawn(move || buried.iter().for_each(|grave| run_teardown(&of, grave)))?;
        Ok(TransferEngine {
            state: shared,
            next_id: AtomicU64::new(1),
            in_flight_limit: Arc::new(Semaphore::new(tuning.in_flight_max as usize)),
            in_flight_max: tuning.in_flight_max,
            queue_in_flight_max: tuning.queue_in_flight_max,
            teardowns: graves,
            queue_pairs: Mutex::default(),
        })
    }

    pub(super) fn rail(&self) -> &Arc<dyn Rail> {
        &self.state.rail
    }

    /// A new limit for the transfers in flight to one peer.
    pub(super) fn peer_limit(&self) -> Arc<Semaphore> {
        let most = (self.in_flight_max / PEER_LIMIT_DIVISOR).max(1);
        Arc::new(Semaphore::new(most as usize))
    }

    /// Registers a queue pair to a peer; `peer_limit` comes from [`TransferEngine::peer_limit`].
    pub(super) fn register_queue_pair(
        &self,
        queue: Box<dyn QueuePair>,
        of_peer: &Arc<Semaphore>,
    ) -> Arc<QpHandle> {
        let line = Arc::new(QpHandle {
            queue,
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            is_broken: AtomicBool::new(false),
            last_progress: Mutex::new(Instant::now()),
            in_flight_limit: Arc::new(Semaphore::new(self.queue_in_flight_max as usize)),
            peer_limit: Arc::clone(of_peer),
        });
        let mut lines = self.queue_pairs.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|line| line.strong_count() > 0);
        lines.push(Arc::downgrade(&line));
        drop(lines);
        line
    }

    /// Whether this queue pair has a transfer in flight.
    pub(super) fn has_in_flight(&self, line: &QpHandle) -> bool {
        line.in_flight_limit.available_permits() < self.queue_in_flight_max as usize
    }

    /// Returns once all transfers of this queue pair have ended, if no others are started.
    pub(super) async fn wait_idle(&self, line: &QpHandle) {
        // The semaphore is never closed, and the permits are released at once.
        let _ = line.in_flight_limit.acquire_many(self.queue_in_flight_max).await;
    }

    /// All live queue pairs.
    pub(super) fn queue_pairs(&self) -> Vec<Arc<QpHandle>> {
        let lines = self.queue_pairs.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter_map(Weak::upgrade).collect()
    }

    /// Starts a transfer between the start of `place` and `remote`; waits while too many are in
    /// flight. The caller waits for the result or drops it; the transfer goes on either way.
    pub(super) async fn submit(
        &self,
        line: &Arc<QpHandle>,
        direction: Direction,
        place: PooledBuffer,
        local_key: u32,
        remote: RemoteAddress,
    ) -> Result<PendingTransfer, TransferError> {
        let of_line =
            Arc::clone(&line.in_flight_limit).acquire_owned().await.map_err(|_| TransferError::Broken)?;
        // Acquired before the overall limit, so that a dead peer holds only its share of that until
        // its retries end.
        let of_peer =
            Arc::clone(&line.peer_limit).acquire_owned().await.map_err(|_| TransferError::Broken)?;
        let of_all =
            Arc::clone(&self.in_flight_limit).acquire_owned().await.map_err(|_| TransferError::Broken)?;
        if line.is_broken() {
            return Err(TransferError::Broken);
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let transfer = Transfer {
            id,
            direction,
            local_address: place.address(),
            local_key,
            remote_address: remote.address,
            remote_key: remote.key,
            len: place.len_bytes(),
        };
        let (done, arriving) = oneshot::channel();
        let _permits = [of_line, of_peer, of_all];
        let (number, owner) = (line.id, Arc::clone(line));
        let flight = InFlightTransfer { direction, qp_id: number, qp: owner, buffer: place, done, _permits };
        line.record_progress();
        // Inserted before the post, because the completion could arrive first.
        self.state.lock_table().transfers.insert(id, flight);
        if let Err(cause) = line.queue.post(&transfer) {
            // A card that refused the transfer does not touch its memory.
            drop(self.state.lock_table().transfers.remove(&id));
            line.is_broken.store(true, Ordering::Release);
            return Err(TransferError::Post(cause.to_string()));
        }
        self.state.submitted.notify_one();
        Ok(PendingTransfer(arriving))
    }

    /// Destroys queue pairs, and then releases the memory that their transfers could touch: buffers
    /// in flight, and `rest`.
    pub(super) fn tear_down(&self, lines: Vec<Arc<QpHandle>>, rest: impl Any + Send) {
        for line in &lines {
            line.is_broken.store(true, Ordering::Release);
        }
        if let Err(mpsc::SendError(grave)) =
            self.teardowns.send(Teardown { queue_pairs: lines, resources: Box::new(rest) })
        {
            run_teardown(&self.state, grave);
        }
    }

    /// Transfer counters so far.
    pub(super) fn stats(&self) -> RdmaStats {
        RdmaStats {
            read_bytes: self.state.read_bytes.load(Ordering::Relaxed),
            written_bytes: self.state.written_bytes.load(Ordering::Relaxed),
            failed: self.state.failed.load(Ordering::Relaxed),
        }
    }

    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        self.state.lock_table().transfers.len()
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.state.lock_table().is_closed = true;
        self.state.submitted.notify_one();
    }
}

/// Destroys the queue pairs. If the system does not confirm that, the memory that they could touch
/// is leaked and never reused.
fn run_teardown(shared: &EngineState, grave: Teardown) {
    let Teardown { queue_pairs: lines, resources: rest } = grave;
    let mut is_over = true;
    for line in lines {
        let number = line.id;
        let ended = line
            .queue
            .destroy()
            .inspect_err(|cause| tracing::error!(%cause, "a queue pair could not be destroyed"));
        let ended = ended.is_ok();
        is_over &= ended;
        let mut table = shared.lock_table();
        let ids: Vec<u64> =
            table.transfers.iter().filter(|(_, f)| f.qp_id == number).map(|(id, _)| *id).collect();
        let left: Vec<InFlightTransfer> = ids.iter().filter_map(|id| table.transfers.remove(id)).collect();
        drop(table);
        if ended { drop(left) } else { left.into_iter().for_each(std::mem::forget) }
    }
    if !is_over {
        tracing::error!(
            "memory that an RDMA device may still touch is never reused; restart this process soon"
        );
        std::mem::forget(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_poll_pause_grows_while_no_transfer_completes() {
        let mut pace = PollBackoff::default();
        let pauses: Vec<_> = (0..SPIN_POLLS + 8).map(|_| pace.next_pause(false)).collect();
        assert!(
            pauses[..SPIN_POLLS as usize - 1].iter().all(Option::is_none),
            "the first polls must not sleep"
        );
        let asleep: Vec<u128> = pauses.iter().flatten().map(Duration::as_micros).collect();
        assert_eq!(asleep, [10, 20, 40, 80, 160, 320, 320, 320, 320]);
        assert_eq!(pace.next_pause(true), None);
        assert_eq!(pace.next_pause(false), None, "a completion must end the sleep");
    }
}
