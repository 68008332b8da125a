//! The client's end: links that operations leave to each other, over a path of TLS over TCP.
//!
//! What needs no block bytes goes over that path, and so does everything while the node offers RDMA to others. A link
//! that an operation did not bring to its end goes with it; the next one gets new queue pairs. Not here: what an operation
//! says (`fetch.rs`, `save.rs`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::{Class, LeaseId};
use kvfleet_proto::frame::Frame;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};

use super::fetch::{Fetch, Progress, Stop};
use super::link::{Asked, Link, Local};
use super::save::Save;
use crate::ask::{self, Asks};
use crate::tcp::TcpPath;
use crate::turns::{Place, Places};
use crate::{BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer, SaveRequest};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// How long nobody asks for a link after there was none: asking costs both ends queue pairs.
const WITHOUT: Duration = Duration::from_secs(5);

/// Links to one node.
pub(super) struct RdmaPath {
    tcp: TcpPath,
    local: Arc<Local>,
    at_once: Arc<Places>,
    idle: Arc<Idle>,
    /// Since when a link is asked for, or there was none to be had.
    asked: Mutex<Option<Instant>>,
    is_told: AtomicBool,
    is_failure_told: AtomicBool,
    /// Ends what is idle; ends with the path.
    tending: JoinHandle<()>,
}

impl Drop for RdmaPath {
    fn drop(&mut self) {
        self.tending.abort();
    }
}

/// Links that no operation has.
struct Idle {
    links: Mutex<Vec<(Link, Instant)>>,
    /// The node closes what nobody used for three times as long.
    timeout: Duration,
}

impl Idle {
    fn links(&self) -> MutexGuard<'_, Vec<(Link, Instant)>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The link that was used last, if one can be used again.
    fn take(&self) -> Option<Link> {
        loop {
            let (mut link, since) = self.links().pop()?;
            if since.elapsed() < self.timeout && link.rest() {
                return Some(link);
            }
        }
    }

    /// Ends what nobody used for long, so that others may have its place at the node.
    async fn tend(self: Arc<Idle>) {
        let mut ticks = interval((self.timeout / 2).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let mut links = self.links();
            // Used last is taken first, so the front is the oldest.
            let old = links.iter().take_while(|(_, since)| since.elapsed() >= self.timeout).count();
            let old: Vec<_> = links.drain(..old).collect();
            drop(links);
            drop(old);
        }
    }
}

/// A link that one operation has to itself.
struct Held {
    link: Link,
    _place: Place,
}

impl RdmaPath {
    /// Over this path; `first` is a link that was made to see whether there can be any.
    pub(super) fn new(
        tcp: TcpPath,
        local: Arc<Local>,
        first: Link,
        (links_max, idle_timeout): (usize, Duration),
    ) -> RdmaPath {
        let at_once = Places::new(links_max.max(1));
        let links = Mutex::new(vec![(first, Instant::now())]);
        let idle = Arc::new(Idle { links, timeout: idle_timeout });
        let tending = tokio::spawn(Arc::clone(&idle).tend());
        let asked = Mutex::default();
        let (is_told, is_failure_told) = (AtomicBool::new(false), AtomicBool::new(false));
        RdmaPath { tcp, local, at_once, idle, asked, is_told, is_failure_told, tending }
    }

    /// A link for an operation; nothing when there is none to be had.
    async fn held(&self, class: Class, may_be_used: bool) -> Result<Option<Held>, PathError> {
        let place = self.at_once.take(class).await;
        let link = match self.idle.take().filter(|_| may_be_used) {
            Some(link) => Some(link),
            None => self.attach().await?,
        };
        Ok(link.map(|link| Held { link, _place: place }))
    }

    /// A new link, unless there was none just before, or somebody asks for one: who runs out of time in a network that loses
    /// everything is not to be followed by the next.
    async fn attach(&self) -> Result<Option<Link>, PathError> {
        {
            let mut asked = self.asked();
            if asked.is_some_and(|since| since.elapsed() < WITHOUT) {
                return Ok(None);
            }
            *asked = Some(Instant::now());
        }
        match Link::attach(&self.tcp, &self.local).await? {
            Asked::Made(link) => {
                *self.asked() = None;
                Ok(Some(*link))
            }
            Asked::None(why) => {
                *self.asked() = Some(Instant::now());
                if !self.is_told.swap(true, Ordering::Relaxed) {
                    let peer = self.tcp.peer();
                    tracing::warn!(peer, why, "some blocks go over TCP, as there is no further RDMA link");
                }
                Ok(None)
            }
        }
    }

    fn asked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes back the link of an operation that is over.
    fn keep(&self, mut held: Held) {
        if held.link.rest() {
            self.idle.links().push((held.link, Instant::now()));
        }
        // The place goes last: whoever waits for it finds the link.
    }

    async fn fetch_until(
        &self,
        mut request: FetchRequest,
        deadline: Instant,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let mut may_be_used = true;
        loop {
            let held = timeout_at(deadline, self.held(request.class(), may_be_used)).await;
            let Ok(held) = held else { return Ok(FetchAnswer::Miss { reason: MissReason::TooLate }) };
            // A link may have been waited for, and the node is to keep nothing longer than anybody waits.
            request.deadline = deadline.saturating_duration_since(Instant::now());
            let Some(mut held) = held? else { return ask::fetch(&self.tcp, &request, sink).await };
            let mut progress = Progress::default();
            let was_used = held.link.is_used;
            let mut fetch = Fetch { link: &mut held.link, progress: &mut progress, sink };
            let stop = match timeout_at(deadline, fetch.run(&request)).await {
                Ok(Ok(answer)) => {
                    self.keep(held);
                    return Ok(answer);
                }
                Ok(Err(stop)) => stop,
                Err(_) => Stop::Reason(MissReason::TooLate),
            };
            self.tell(&held.link);
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
        let mut may_be_used = true;
        loop {
            // Others may have all links for long, which says nothing of the peer.
            let held = timeout(stall_timeout, self.held(request.class(), may_be_used)).await;
            let Ok(Some(mut held)) = held.unwrap_or(Ok(None)) else {
                return ask::save(&self.tcp, request, source).await;
            };
            let was_used = held.link.is_used;
            let mut save = Save { link: &mut held.link, peer, stall_timeout, is_heard: false };
            let ended = save.run(request, source).await;
            match ended {
                Ok(answer) => {
                    self.keep(held);
                    return Ok(answer);
                }
                // The node had closed it, and stores nothing before its offer is answered.
                Err(PathError::Broken { .. }) if was_used && !save.is_heard => may_be_used = false,
                Err(error) => {
                    self.tell(&held.link);
                    return Err(error);
                }
            }
        }
    }

    /// Says once that transfers fail: whoever runs the network should know.
    fn tell(&self, link: &Link) {
        if link.is_broken() && !self.is_failure_told.swap(true, Ordering::Relaxed) {
            let (peer, port) = (self.tcp.peer(), self.local.rdma.flights.rail().port());
            let errors = self.local.rdma.numbers().failed;
            tracing::warn!(peer, device = port.device, gid = ?port.gid, errors, "an RDMA transfer failed");
        }
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
            self.fetch_until(request, deadline, sink).await
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
