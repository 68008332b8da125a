//! The client's end: operations over the lanes to a node, and over the connection below where there is none.
//!
//! What needs no block bytes goes over that connection, and so does everything while the node offers RDMA to others. What a link
//! did not bring goes over another lane, and at last over the connection: a fetch goes on behind the last block that came, a save
//! is offered again once the node gave up the first. A large fetch is divided over several lanes (`stripe.rs`). Not here: lanes and links (`lane.rs`), what an operation says (`fetch.rs`,
//! `save.rs`).

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::frame::Frame;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::fetch::{Fetch, Progress, Stop};
use super::lane::Lanes;
use super::parts::{Parts, skip};
use super::save::Save;
use super::stripe::{Plan, Stripes};
use crate::ask::{self, Asks};
use crate::{BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer, SaveRequest};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// How long stripes behind one that came short may go on, so that their links are of use to others.
const GRACE: Duration = Duration::from_millis(50);

/// Links to one node.
pub(super) struct RdmaPath {
    lanes: Arc<Lanes>,
    /// Bytes of the frame that came last: how large a fetch will be.
    frame_bytes: AtomicU64,
    /// Looks after lanes; ends with the path.
    tending: JoinHandle<()>,
}

impl Drop for RdmaPath {
    fn drop(&mut self) {
        self.tending.abort();
    }
}

impl RdmaPath {
    /// Over these lanes.
    pub(super) fn new(lanes: Lanes) -> RdmaPath {
        let lanes = Arc::new(lanes);
        let tending = tokio::spawn(Arc::clone(&lanes).tend());
        RdmaPath { lanes, frame_bytes: AtomicU64::new(0), tending }
    }

    async fn fetch_all(
        &self,
        request: FetchRequest,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        let size = (request.hashes.len(), self.frame_bytes.load(Ordering::Relaxed));
        let mut sink = |frame: Frame| {
            self.frame_bytes.store(frame.bytes.len() as u64, Ordering::Relaxed);
            sink(frame);
        };
        match Plan::new(size, self.lanes.open(), self.lanes.stripes()) {
            Some(plan) => self.fetch_striped(&request, plan, deadline, &mut sink).await,
            None => self.fetch_until(request, deadline, &mut sink).await,
        }
    }

    /// Fetches over several lanes at once, each of which brings one stripe after the other.
    async fn fetch_striped(
        &self,
        request: &FetchRequest,
        plan: Plan,
        deadline: Instant,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let stripes = Stripes::new(plan, sink);
        let bring = || async {
            while let Some(stripe) = stripes.next().await {
                let mut put = |frame| stripes.put(stripe, frame);
                let answer = self.fetch_until(plan.request(request, stripe), deadline, &mut put).await;
                stripes.end(stripe, answer);
            }
        };
        let mut under_way: Vec<BoxFuture<'_, ()>> =
            (0..plan.at_once).map(|_| Box::pin(bring()) as Pin<Box<_>>).collect();
        let all = std::future::poll_fn(|context| {
            under_way.retain_mut(|bring| bring.as_mut().poll(context).is_pending());
            if under_way.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        });
        let known = async {
            stripes.known().await;
            sleep(GRACE).await;
        };
        tokio::select! {
            () = all => {}
            () = known => {}
        }
        drop(under_way);
        stripes.answer()
    }

    /// Fetches over one link, and what that does not bring over others.
    async fn fetch_until(
        &self,
        mut request: FetchRequest,
        deadline: Instant,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let class = request.class();
        let (mut parts, mut tried, mut may_be_used) = (Parts::default(), Vec::new(), true);
        loop {
            let held = timeout_at(deadline, self.lanes.held((class, deadline), &tried, may_be_used)).await;
            let Ok(held) = held else {
                return parts.end(Ok(FetchAnswer::Miss { reason: MissReason::TooLate }));
            };
            // A link may have been waited for, and the node is to keep nothing longer than anybody waits.
            request.deadline = deadline.saturating_duration_since(Instant::now());
            let Some(mut held) = held else {
                return parts.end(ask::fetch(&self.lanes.tcp, &request, sink).await);
            };
            let mut progress = Progress::default();
            let was_used = held.link.is_used;
            let mut fetch = Fetch { link: &mut held.link, progress: &mut progress, sink };
            let stop = match timeout_at(deadline, fetch.run(&request)).await {
                Ok(Ok(answer)) => {
                    self.lanes.keep(held);
                    return parts.end(Ok(answer));
                }
                Ok(Err(stop)) => stop,
                Err(_) => Stop::Reason(MissReason::TooLate),
            };
            self.lanes.ended(&held, &stop);
            let at = held.at;
            // Its queue pairs end, and the node hears of it, before the rest is asked for.
            drop(held);
            let Progress { answer, delivered } = progress;
            if !stop.is_of_the_link() {
                return parts.end(match (answer, stop) {
                    (Some(answer), stop) => Ok(answer.cut_short(delivered, stop.reason())),
                    (None, Stop::Item(error)) => Err(error.at(self.lanes.tcp.peer())),
                    (None, stop) => Ok(FetchAnswer::Miss { reason: stop.reason() }),
                });
            }
            match answer {
                Some(answer) if delivered >= answer.tiers().len() => return parts.end(Ok(answer)),
                Some(answer) => {
                    parts.add(&answer, delivered);
                    skip(&mut request, delivered);
                    tried.push(at);
                }
                // The node had closed it: that says nothing of its lane.
                None if was_used && may_be_used => may_be_used = false,
                None => tried.push(at),
            }
        }
    }

    async fn save_all(
        &self,
        request: &SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let tcp = &self.lanes.tcp;
        let (peer, stall_timeout) = (tcp.peer(), tcp.stall_timeout());
        let class = request.class();
        let (mut tried, mut may_be_used) = (Vec::new(), true);
        loop {
            // Others may have all links for long, which says nothing of the peer.
            let until = Instant::now() + stall_timeout;
            let held = timeout_at(until, self.lanes.held((class, until), &tried, may_be_used)).await;
            let Ok(Some(mut held)) = held else {
                return ask::save(tcp, request, source).await;
            };
            let was_used = held.link.is_used;
            let mut save = Save { link: &mut held.link, peer, stall_timeout, is_heard: false };
            let ended = save.run(request, source).await;
            match ended {
                Ok(answer) => {
                    self.lanes.keep(held);
                    return Ok(answer);
                }
                // The node had closed it, and stores nothing before its offer is answered.
                Err(PathError::Broken { .. }) if was_used && !save.is_heard => may_be_used = false,
                Err(error) => {
                    let is_given_up = save.link.is_broken() && save.give_up().await;
                    self.lanes.ended(&held, &error);
                    if !is_given_up {
                        return Err(error);
                    }
                    tried.push(held.at);
                }
            }
        }
    }
}

impl Path for RdmaPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(self.fetch_all(request, sink))
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move { self.save_all(&request, source).await })
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        self.lanes.tcp.release(lease)
    }

    fn failure(&self) -> Option<PathError> {
        self.lanes.tcp.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        self.lanes.tcp.ping()
    }
}
