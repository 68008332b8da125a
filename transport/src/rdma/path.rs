//! The client's end: links that operations leave to each other, over a path of TLS over TCP.
//!
//! What needs no block bytes goes over that path, and so does everything while the node offers RDMA to others. A link
//! that an operation did not bring to its end goes with it; the next one gets new queue pairs. Not here: what an operation
//! says (`fetch.rs`, `save.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::frame::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::fetch::{Fetch, Progress, Stop};
use super::link::{Link, Local};
use super::save::Save;
use crate::ask::{self, Asks};
use crate::dial::within;
use crate::tcp::TcpPath;
use crate::{BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer, SaveRequest};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Links to one node.
pub(super) struct RdmaPath {
    tcp: TcpPath,
    local: Arc<Local>,
    at_once: Arc<Semaphore>,
    idle: Mutex<Vec<(Link, Instant)>>,
    /// The node closes what nobody used for three times as long.
    idle_timeout: Duration,
}

/// A link that one operation has to itself.
struct Held {
    link: Link,
    _permit: OwnedSemaphorePermit,
}

impl RdmaPath {
    /// Over this path; `first` is a link that was made to see whether there can be any.
    pub(super) fn new(
        tcp: TcpPath,
        local: Arc<Local>,
        first: Link,
        (links_max, idle_timeout): (usize, Duration),
    ) -> RdmaPath {
        let at_once = Arc::new(Semaphore::new(links_max.max(1)));
        let idle = Mutex::new(vec![(first, Instant::now())]);
        RdmaPath { tcp, local, at_once, idle, idle_timeout }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Link, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A link for an operation; nothing when the node has none to spare.
    async fn held(&self, may_be_used: bool) -> Result<Option<Held>, PathError> {
        let at_once = Arc::clone(&self.at_once).acquire_owned().await;
        let permit = at_once.expect("the semaphore is never closed");
        let link = match self.kept().filter(|_| may_be_used) {
            Some(link) => Some(link),
            None => Link::attach(&self.tcp, &self.local).await?,
        };
        Ok(link.map(|link| Held { link, _permit: permit }))
    }

    /// The link that was used last, if one can be used again.
    fn kept(&self) -> Option<Link> {
        loop {
            let (mut link, since) = self.idle().pop()?;
            if since.elapsed() < self.idle_timeout && link.rest() {
                return Some(link);
            }
        }
    }

    /// Takes back the link of an operation that is over.
    fn keep(&self, mut held: Held) {
        if held.link.rest() {
            self.idle().push((held.link, Instant::now()));
        }
        // The permit goes last: whoever waits for it finds the link.
    }

    async fn fetch_until(
        &self,
        request: &FetchRequest,
        deadline: Instant,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let mut may_be_used = true;
        loop {
            let held = timeout_at(deadline, self.held(may_be_used)).await;
            let Ok(held) = held else { return Ok(FetchAnswer::Miss { reason: MissReason::TooLate }) };
            let Some(mut held) = held? else { return ask::fetch(&self.tcp, request, sink).await };
            let mut progress = Progress::default();
            let was_used = held.link.is_used;
            let mut fetch = Fetch { link: &mut held.link, progress: &mut progress, sink };
            let stop = match timeout_at(deadline, fetch.run(request)).await {
                Ok(Ok(answer)) => {
                    self.keep(held);
                    return Ok(answer);
                }
                Ok(Err(stop)) => stop,
                Err(_) => Stop::Reason(MissReason::TooLate),
            };
            return match (progress.answer, stop) {
                (Some(answer), stop) => Ok(answer.cut_short(progress.delivered, stop.reason())),
                (None, Stop::Reason(reason)) => Ok(FetchAnswer::Miss { reason }),
                // The node had closed it: nothing was answered, so nothing is asked twice.
                (None, Stop::Item(error)) if was_used && error.is_loss() => {
                    may_be_used = false;
                    continue;
                }
                (None, Stop::Item(error)) => Err(error.at(self.tcp.peer())),
                (None, Stop::Transfer(error)) => {
                    Err(PathError::Broken { peer: self.tcp.peer().to_owned(), cause: error.to_string() })
                }
            };
        }
    }

    async fn save_all(
        &self,
        request: &SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let (peer, stall_timeout) = (self.tcp.peer(), self.tcp.stall_timeout());
        let Some(mut held) = within(peer, stall_timeout, self.held(true)).await? else {
            return ask::save(&self.tcp, request, source).await;
        };
        let answer = Save { link: &mut held.link, peer, stall_timeout }.run(request, source).await?;
        self.keep(held);
        Ok(answer)
    }
}

impl Path for RdmaPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
            self.fetch_until(&request, deadline, sink).await
        })
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move { self.save_all(&request, source).await })
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        self.tcp.release(lease)
    }

    fn failure(&self) -> Option<PathError> {
        self.tcp.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        self.tcp.ping()
    }
}
