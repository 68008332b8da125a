//! Transfers under way: how many there may be, which memory they keep, and who is told of their end.
//!
//! One thread asks the card for ends as long as something is under way, and sleeps longer the longer nothing comes. A
//! place goes with its transfer and comes back with its end. A queue pair with a failed transfer is of no more use: its
//! owner ends it, and only then what was still under way is given back. That may take the system a while, so a thread of
//! its own does it. Not here: the card (`rail.rs`), what a transfer is for.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::memory::Place;
use super::rail::{Completion, Direction, Queue, Rail, Transfer};
use super::{RdmaNumbers, RdmaTuning};

/// Looks without sleeping after the last end: a transfer of 64 KiB takes some 5 µs on a fast network.
const LOOKS_AWAKE: u32 = 2_000;

/// The first sleep, which then doubles.
const SLEEP_LEAST: Duration = Duration::from_micros(10);

/// The longest sleep: what a transfer of a mebibyte takes on a slow network.
const SLEEP_MOST: Duration = Duration::from_micros(320);

/// Wait after the card could not be asked: it will hardly recover, and what is under way is given up in time anyway.
const POLL_FAILED_PAUSE: Duration = Duration::from_millis(50);

/// Part of all transfers that those to one peer may be: eight that died together hold all until their retries end, and two full
/// queue pairs are more than keep a rail busy.
const PEER_PART: u32 = 8;

/// How long to wait before the next look.
#[derive(Debug, Default)]
pub(super) struct Pace {
    vain: u32,
    sleep: Duration,
}

impl Pace {
    /// The pause after a look that found something, or did not.
    pub(super) fn next(&mut self, found: bool) -> Option<Duration> {
        if found {
            *self = Pace::default();
            return None;
        }
        self.vain = self.vain.saturating_add(1);
        if self.vain < LOOKS_AWAKE {
            return None;
        }
        self.sleep = (self.sleep * 2).clamp(SLEEP_LEAST, SLEEP_MOST);
        Some(self.sleep)
    }
}

/// Why a transfer moved nothing, or nobody knows what.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TransferError {
    #[error("the card says: {}", status_text(*.0))]
    Status(u32),
    #[error("the card took no transfer: {0}")]
    Post(String),
    #[error("an earlier transfer of its queue pair failed")]
    Broken,
}

/// What verbs mean by the numbers that come up.
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
pub(super) struct Line {
    queue: Box<dyn Queue>,
    number: u64,
    is_broken: AtomicBool,
    at_once: Arc<Semaphore>,
    /// Those of all lines to the same peer.
    of_peer: Arc<Semaphore>,
}

impl Line {
    /// Whether a transfer failed.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    pub(super) fn queue(&self) -> &dyn Queue {
        self.queue.as_ref()
    }
}

/// What is needed of memory at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) address: u64,
    pub(super) key: u32,
}

struct Flight {
    direction: Direction,
    line: u64,
    /// The line's own view, so that a failure marks it.
    owner: Arc<Line>,
    place: Place,
    done: oneshot::Sender<(Place, Result<(), TransferError>)>,
    _permits: [OwnedSemaphorePermit; 3],
}

struct Table {
    flights: HashMap<u64, Flight>,
    is_closed: bool,
}

/// What both threads and all users share.
struct Shared {
    rail: Arc<dyn Rail>,
    table: Mutex<Table>,
    begun: Condvar,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    failed: AtomicU64,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whoever waits for these.
    fn deliver(&self, ended: &mut Vec<Completion>) {
        for Completion { id, status } in ended.drain(..) {
            // What nobody knows is of a queue pair that was ended.
            let Some(flight) = self.table().flights.remove(&id) else { continue };
            let bytes = u64::from(flight.place.len_bytes());
            let result = if status == 0 {
                match flight.direction {
                    Direction::Read => self.read_bytes.fetch_add(bytes, Ordering::Relaxed),
                    Direction::Write => self.written_bytes.fetch_add(bytes, Ordering::Relaxed),
                };
                Ok(())
            } else {
                self.failed.fetch_add(1, Ordering::Relaxed);
                flight.owner.is_broken.store(true, Ordering::Release);
                Err(TransferError::Status(status))
            };
            // A card is done with what it tells the end of, however that went.
            let _ = flight.done.send((flight.place, result)); // whoever gave up gets no place
        }
    }

    fn poll_until_closed(&self) {
        let (mut pace, mut ended, mut is_failed) = (Pace::default(), Vec::new(), false);
        loop {
            {
                let mut table = self.table();
                while table.flights.is_empty() && !table.is_closed {
                    table = self.begun.wait(table).unwrap_or_else(PoisonError::into_inner);
                    pace = Pace::default();
                }
                if table.is_closed {
                    return;
                }
            }
            if let Err(cause) = self.rail.poll(&mut ended) {
                if !std::mem::replace(&mut is_failed, true) {
                    tracing::error!(%cause, "the RDMA device tells of no ends any more; restart this process");
                }
                self.break_all();
                std::thread::sleep(POLL_FAILED_PAUSE);
            }
            match pace.next(!ended.is_empty()) {
                None => std::hint::spin_loop(),
                Some(sleep) => std::thread::sleep(sleep),
            }
            self.deliver(&mut ended);
        }
    }

    /// Nothing of what is under way will be told: its owners end their queue pairs.
    fn break_all(&self) {
        let flights = &mut self.table().flights;
        for flight in flights.values_mut() {
            flight.owner.is_broken.store(true, Ordering::Release);
            let (nobody, _) = oneshot::channel();
            drop(std::mem::replace(&mut flight.done, nobody));
        }
        // The places stay until the queue pairs are ended.
    }
}

/// A transfer that began. Gives the place back with what became of it.
pub(super) struct Arriving(oneshot::Receiver<(Place, Result<(), TransferError>)>);

impl Arriving {
    /// Its place, once it ended well.
    pub(super) async fn end(self) -> Result<Place, TransferError> {
        let (place, result) = self.0.await.map_err(|_| TransferError::Broken)?;
        result.map(|()| place)
    }
}

/// What is to end, in this order: queue pairs, then what they could touch.
struct Grave {
    lines: Vec<Arc<Line>>,
    rest: Box<dyn Any + Send>,
}

/// Transfers of one rail.
pub(super) struct Flights {
    shared: Arc<Shared>,
    next: AtomicU64,
    at_once: Arc<Semaphore>,
    in_flight_max: u32,
    queue_in_flight_max: u32,
    graves: mpsc::Sender<Grave>,
    /// All that live.
    lines: Mutex<Vec<Weak<Line>>>,
}

impl Flights {
    /// Starts both threads; they end with this value.
    pub(super) fn start(rail: Arc<dyn Rail>, tuning: &RdmaTuning) -> std::io::Result<Flights> {
        let table = Mutex::new(Table { flights: HashMap::new(), is_closed: false });
        let shared = Arc::new(Shared {
            rail,
            table,
            begun: Condvar::new(),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let polling = Arc::clone(&shared);
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        named("rdma-poll").spawn(move || polling.poll_until_closed())?;
        let (graves, buried) = mpsc::channel::<Grave>();
        let of = Arc::clone(&shared);
        named("rdma-end").spawn(move || buried.iter().for_each(|grave| bury(&of, grave)))?;
        Ok(Flights {
            shared,
            next: AtomicU64::new(1),
            at_once: Arc::new(Semaphore::new(tuning.in_flight_max as usize)),
            in_flight_max: tuning.in_flight_max,
            queue_in_flight_max: tuning.queue_in_flight_max,
            graves,
            lines: Mutex::default(),
        })
    }

    pub(super) fn rail(&self) -> &Arc<dyn Rail> {
        &self.shared.rail
    }

    /// As many transfers as may be under way to one peer.
    pub(super) fn peer(&self) -> Arc<Semaphore> {
        let most = (self.in_flight_max / PEER_PART).max(1);
        Arc::new(Semaphore::new(most as usize))
    }

    /// A line of this queue pair to a [`Flights::peer`].
    pub(super) fn line(&self, queue: Box<dyn Queue>, of_peer: &Arc<Semaphore>) -> Arc<Line> {
        let line = Arc::new(Line {
            queue,
            number: self.next.fetch_add(1, Ordering::Relaxed),
            is_broken: AtomicBool::new(false),
            at_once: Arc::new(Semaphore::new(self.queue_in_flight_max as usize)),
            of_peer: Arc::clone(of_peer),
        });
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|line| line.strong_count() > 0);
        lines.push(Arc::downgrade(&line));
        drop(lines);
        line
    }

    /// Whether a transfer of this line did not end yet.
    pub(super) fn is_under_way(&self, line: &Line) -> bool {
        line.at_once.available_permits() < self.queue_in_flight_max as usize
    }

    /// Returns once all transfers of this line have ended, if no others are begun.
    pub(super) async fn quiet(&self, line: &Line) {
        // Closed never, and what is got goes back.
        let _ = line.at_once.acquire_many(self.queue_in_flight_max).await;
    }

    /// All that live.
    pub(super) fn lines(&self) -> Vec<Arc<Line>> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter_map(Weak::upgrade).collect()
    }

    /// Begins a transfer between the start of `place` and `remote`; waits while too many are under way. What comes back is
    /// to be waited for, or dropped: the transfer goes on either way.
    pub(super) async fn begin(
        &self,
        line: &Arc<Line>,
        direction: Direction,
        (place, local_key): (Place, u32),
        remote: Remote,
    ) -> Result<Arriving, TransferError> {
        let of_line = Arc::clone(&line.at_once).acquire_owned().await.map_err(|_| TransferError::Broken)?;
        // Before the bound of all: a peer that is dead holds no more of that than its part until its retries end.
        let of_peer = Arc::clone(&line.of_peer).acquire_owned().await.map_err(|_| TransferError::Broken)?;
        let of_all = Arc::clone(&self.at_once).acquire_owned().await.map_err(|_| TransferError::Broken)?;
        if line.is_broken() {
            return Err(TransferError::Broken);
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
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
        let (number, owner) = (line.number, Arc::clone(line));
        let flight = Flight { direction, line: number, owner, place, done, _permits };
        // Known before it begins, or its end could come first.
        self.shared.table().flights.insert(id, flight);
        if let Err(cause) = line.queue.post(&transfer) {
            // A card that took nothing touches nothing.
            drop(self.shared.table().flights.remove(&id));
            line.is_broken.store(true, Ordering::Release);
            return Err(TransferError::Post(cause.to_string()));
        }
        self.shared.begun.notify_one();
        Ok(Arriving(arriving))
    }

    /// Ends queue pairs, and then what their transfers could touch: places under way, and `rest`.
    pub(super) fn end(&self, lines: Vec<Arc<Line>>, rest: impl Any + Send) {
        for line in &lines {
            line.is_broken.store(true, Ordering::Release);
        }
        if let Err(mpsc::SendError(grave)) = self.graves.send(Grave { lines, rest: Box::new(rest) }) {
            bury(&self.shared, grave);
        }
    }

    /// What was transferred so far.
    pub(super) fn numbers(&self) -> RdmaNumbers {
        RdmaNumbers {
            read_bytes: self.shared.read_bytes.load(Ordering::Relaxed),
            written_bytes: self.shared.written_bytes.load(Ordering::Relaxed),
            failed: self.shared.failed.load(Ordering::Relaxed),
        }
    }

    #[cfg(test)]
    pub(super) fn under_way(&self) -> usize {
        self.shared.table().flights.len()
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        self.shared.table().is_closed = true;
        self.shared.begun.notify_one();
    }
}

/// Ends the queue pairs. If the system does not say that one is ended, nothing that it could touch is used again.
fn bury(shared: &Shared, grave: Grave) {
    let Grave { lines, rest } = grave;
    let mut is_over = true;
    for line in lines {
        let number = line.number;
        let ended =
            line.queue.end().inspect_err(|cause| tracing::error!(%cause, "a queue pair was not ended"));
        let ended = ended.is_ok();
        is_over &= ended;
        let mut table = shared.table();
        let ids: Vec<u64> =
            table.flights.iter().filter(|(_, f)| f.line == number).map(|(id, _)| *id).collect();
        let left: Vec<Flight> = ids.iter().filter_map(|id| table.flights.remove(id)).collect();
        drop(table);
        if ended { drop(left) } else { left.into_iter().for_each(std::mem::forget) }
    }
    if !is_over {
        tracing::error!(
            "memory that an RDMA device may still touch is kept for good; restart this process soon"
        );
        std::mem::forget(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_sleeps_longer_the_longer_nothing_comes() {
        let mut pace = Pace::default();
        let pauses: Vec<_> = (0..LOOKS_AWAKE + 8).map(|_| pace.next(false)).collect();
        assert!(pauses[..LOOKS_AWAKE as usize - 1].iter().all(Option::is_none), "at first it looks awake");
        let asleep: Vec<u128> = pauses.iter().flatten().map(Duration::as_micros).collect();
        assert_eq!(asleep, [10, 20, 40, 80, 160, 320, 320, 320, 320]);
        assert_eq!(pace.next(true), None);
        assert_eq!(pace.next(false), None, "what came wakes it");
    }
}
