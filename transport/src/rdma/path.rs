//! The client's end: operations over the lanes to a node, and over the connection below where there is none.
//!
//! What needs no block bytes goes over that connection, and so does everything while the node offers RDMA to others. What a link
//! did not bring goes over another lane, and at last over the connection: a fetch goes on behind the last block that came, a save
//! is offered again once the node gave up the first. A large fetch reads over all lanes at once. Not here: lanes and links (`lane.rs`),
//! what an operation says (`fetch.rs`, `save.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::{Class, LeaseId};
use kvfleet_proto::frame::Frame;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::fetch::{Fetch, Stop, Taker};
use super::lane::{Besides, Lanes};
use super::layers::Slices;
use super::parts::{Parts, skip};
use super::save::Save;
use crate::ask::{self, Asks};
use crate::pick::PathKind;
use crate::{
    AskedLayers, BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer, SaveRequest,
    SliceSink,
};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Links to one node.
pub(super) struct RdmaPath {
    lanes: Arc<Lanes>,
    /// The node sent frames over the connection where slices were to be read.
    sends_frames: AtomicBool,
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
        RdmaPath { lanes, sends_frames: AtomicBool::new(false), tending }
    }

    async fn fetch_all(
        &self,
        request: FetchRequest,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        self.fetch_until(request, deadline, &mut Taker::Frames(sink, 0)).await
    }

    async fn fetch_slices(
        &self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &mut dyn SliceSink,
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        let mut slices = Slices::new(sink, asked);
        let answer = self.fetch_until(request, deadline, &mut Taker::Slices(&mut slices)).await?;
        if let Some(comes_whole) = slices.comes_whole() {
            self.sends_frames.store(comes_whole, Ordering::Relaxed);
        }
        if let Some(good) = slices.is_spoilt().then(|| slices.whole()) {
            return Ok(answer.cut_short(good, MissReason::Corrupt));
        }
        Ok(if slices.is_half_done() { not_again(answer) } else { answer })
    }

    /// Over the connection below.
    async fn fetch_below(
        &self,
        request: &FetchRequest,
        taker: &mut Taker<'_, '_>,
    ) -> Result<FetchAnswer, PathError> {
        if let Taker::Slices(slices) = taker {
            let asked = slices.asked().clone();
            if let Some(sink) = slices.untouched() {
                return ask::fetch_layers(&self.lanes.tcp, request, asked, sink).await;
            }
        }
        let mut nth = 0;
        let mut put = |frame| {
            taker.frame(nth, frame);
            nth += 1;
        };
        let answer = ask::fetch(&self.lanes.tcp, request, &mut put).await?;
        Ok(answer.cut_short(taker.delivered(), taker.reason(MissReason::Corrupt)))
    }

    /// Asks over one link, and over others for what it does not bring.
    async fn fetch_until(
        &self,
        request: FetchRequest,
        deadline: Instant,
        taker: &mut Taker<'_, '_>,
    ) -> Result<FetchAnswer, PathError> {
        let class = request.class();
        let mut rest = Rest::of(request);
        loop {
            let held = self.lanes.held((class, deadline), &rest.tried, rest.may_be_used);
            let Ok(held) = timeout_at(deadline, held).await else {
                return rest.parts.end(Ok(FetchAnswer::Miss { reason: MissReason::TooLate }));
            };
            // A link may have been waited for, and the node is to keep nothing longer than anybody waits.
            rest.request.deadline = deadline.saturating_duration_since(Instant::now());
            let Some(mut held) = held else {
                if rest.parts.is_empty() {
                    rest.request.progress.goes_over(PathKind::Tcp);
                }
                return rest.parts.end(self.fetch_below(&rest.request, taker).await);
            };
            let (mut answer, was_used) = (None, held.link.is_used);
            // Whoever waits for nothing leaves other lanes to those who do.
            let mut besides = Besides::new(&self.lanes, held.at, &rest.left_out, class == Class::Fetch);
            let mut fetch =
                Fetch { link: &mut held.link, besides: &mut besides, answer: &mut answer, taker, named: 0 };
            let stop = match timeout_at(deadline, fetch.run(&rest.request)).await {
                Ok(Ok(answer)) => {
                    drop(besides);
                    self.lanes.keep(held);
                    return rest.parts.end(Ok(answer));
                }
                Ok(Err(stop)) => stop,
                Err(_) => Stop::Reason(MissReason::TooLate),
            };
            let broken = besides.ended(&stop);
            // Then the link that was asked says nothing against its lane, and the next attempt is without those.
            rest.is_of_others = !broken.is_empty() && !held.link.is_broken();
            rest.left_out.extend(broken);
            self.lanes.ended(&held, &stop);
            let at = held.at;
            drop(besides);
            // Its queue pairs end, and the node hears of it, before the rest is asked for.
            drop(held);
            let end = match answer {
                Some(answer) => rest.cut(answer, &stop, taker, at),
                None => rest.unanswered(stop, (at, was_used), self.lanes.tcp.peer()),
            };
            if let Some(end) = end {
                return rest.parts.end(end);
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

/// Slices of blocks behind those that came whole are there already, so whoever is told to come again would be given them twice: what a
/// busy node did not bring behind a link that broke is lost with that.
fn not_again(answer: FetchAnswer) -> FetchAnswer {
    let reason = MissReason::NodeLost;
    match answer {
        FetchAnswer::Busy { .. } | FetchAnswer::Miss { reason: MissReason::Busy } => {
            FetchAnswer::Miss { reason }
        }
        FetchAnswer::Partial { tiers, reason: MissReason::Busy } => FetchAnswer::Partial { tiers, reason },
        other => other,
    }
}

/// What a fetch is still to bring, and what became of asking so far.
struct Rest {
    request: FetchRequest,
    parts: Parts,
    /// Lanes that did not bring what they were asked.
    tried: Vec<usize>,
    /// Whether a link may be asked that an operation used before.
    may_be_used: bool,
    /// Lanes whose links broke while they only helped. Each that is added is one that was not, so that attempts come to an end.
    left_out: Vec<usize>,
    /// Only such links broke in the attempt that is over.
    is_of_others: bool,
}

impl Rest {
    fn of(request: FetchRequest) -> Rest {
        Rest {
            request,
            parts: Parts::default(),
            tried: Vec::new(),
            may_be_used: true,
            left_out: Vec::new(),
            is_of_others: false,
        }
    }

    /// A link was cut off behind this answer of the node: how that ends the fetch, if it does.
    fn cut(
        &mut self,
        answer: FetchAnswer,
        stop: &Stop,
        taker: &mut Taker<'_, '_>,
        at: usize,
    ) -> Option<Result<FetchAnswer, PathError>> {
        let delivered = taker.delivered();
        if !stop.is_of_the_link() {
            return Some(Ok(answer.cut_short(delivered, taker.reason(stop.reason()))));
        }
        if delivered >= answer.tiers().len() {
            return Some(Ok(answer));
        }
        self.parts.add(&answer, delivered);
        skip(&mut self.request, delivered);
        taker.go_on();
        if !self.is_of_others {
            self.tried.push(at);
        }
        // What lies behind a wrong block is of no use.
        let of_use = taker.of_use()?;
        self.request.hashes.truncate(of_use);
        (of_use == 0).then_some(Ok(FetchAnswer::Miss { reason: MissReason::Corrupt }))
    }

    /// The same of a link over which nothing was answered.
    fn unanswered(
        &mut self,
        stop: Stop,
        (at, was_used): (usize, bool),
        peer: &str,
    ) -> Option<Result<FetchAnswer, PathError>> {
        if !stop.is_of_the_link() {
            return Some(match stop {
                Stop::Item(error) => Err(error.at(peer)),
                stop => Ok(FetchAnswer::Miss { reason: stop.reason() }),
            });
        }
        if was_used && self.may_be_used {
            // The node had closed it: that says nothing of its lane.
            self.may_be_used = false;
        } else {
            self.tried.push(at);
        }
        None
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

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(self.fetch_slices(request, asked, sink))
    }

    fn moves_slices(&self) -> bool {
        !self.sends_frames.load(Ordering::Relaxed)
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
