//! The client's end: operations over the rail pairs to a node, and over TCP when none is usable.
//!
//! Messages without block bytes always use TCP, and so does everything if no link is available. A
//! fetch that a link did not complete continues over another rail pair, and finally over TCP, after
//! the last block that arrived. A save is offered again once the node has aborted the first. A
//! large fetch reads over all rail pairs at once. Not here: rail pairs and links (`rail_pair.rs`),
//! the messages of an operation (`fetch.rs`, `save.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::{LeaseId, TrafficClass};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::pick::PathKind;
use kvfleet_transport::{
    BoxFuture, FetchAnswer, FetchRequest, LayerRequest, MissReason, Path, PathError, SaveAnswer, SaveRequest,
    SliceSink,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::answer_parts::{AnswerParts, skip_blocks};
use super::fetch::{FetchOperation, FetchSink, FetchStop};
use super::layers::SliceFetch;
use super::rail_pair::{RailPairs, SecondaryLinks};
use super::save::SaveOperation;

/// Longest deadline of a fetch; a longer one has no use and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// The RDMA path to one node.
pub(super) struct RdmaPath {
    rail_pairs: Arc<RailPairs>,
    /// Whether the node sent whole frames over the connection although slices were requested.
    sends_frames: AtomicBool,
    /// The task that maintains the rail pairs; it ends with the path.
    maintenance: JoinHandle<()>,
}

impl Drop for RdmaPath {
    fn drop(&mut self) {
        self.maintenance.abort();
    }
}

impl RdmaPath {
    /// A path over these rail pairs.
    pub(super) fn new(lanes: RailPairs) -> RdmaPath {
        let rail_pairs = Arc::new(lanes);
        let maintenance = tokio::spawn(Arc::clone(&rail_pairs).maintain());
        RdmaPath { rail_pairs, sends_frames: AtomicBool::new(false), maintenance }
    }

    async fn fetch_all(
        &self,
        request: FetchRequest,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        self.fetch_until(request, deadline, &mut FetchSink::Frames(sink, 0)).await
    }

    async fn fetch_slices(
        &self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &mut dyn SliceSink,
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        let mut slices = SliceFetch::new(sink, asked);
        let answer = self.fetch_until(request, deadline, &mut FetchSink::Slices(&mut slices)).await?;
        if let Some(comes_whole) = slices.sends_frames() {
            self.sends_frames.store(comes_whole, Ordering::Relaxed);
        }
        if let Some(good) = slices.is_corrupt().then(|| slices.complete_blocks()) {
            return Ok(answer.cut_short(good, MissReason::Corrupt));
        }
        Ok(if slices.has_partial_blocks() { without_retry(answer) } else { answer })
    }

    /// Fetches over TCP.
    async fn fetch_over_tcp(
        &self,
        request: FetchRequest,
        taker: &mut FetchSink<'_, '_>,
    ) -> Result<FetchAnswer, PathError> {
        let tcp = &self.rail_pairs.tcp;
        if let FetchSink::Slices(slices) = taker {
            let asked = slices.asked().clone();
            if let Some(sink) = slices.unused_sink() {
                return tcp.fetch_layers(request, asked, sink).await;
            }
        }
        let mut nth = 0;
        let mut put = |frame| {
            taker.put_frame(nth, frame);
            nth += 1;
        };
        let answer = tcp.fetch(request, &mut put).await?;
        Ok(answer.cut_short(taker.delivered_blocks(), taker.miss_reason(MissReason::Corrupt)))
    }

    /// Fetches over one link, and over others for the blocks that it did not bring.
    async fn fetch_until(
        &self,
        request: FetchRequest,
        deadline: Instant,
        taker: &mut FetchSink<'_, '_>,
    ) -> Result<FetchAnswer, PathError> {
        let class = request.class();
        let mut rest = FetchRemainder::new(request);
        loop {
            let held = self.rail_pairs.acquire(class, deadline, &rest.tried, rest.allows_used_link);
            let Ok(held) = timeout_at(deadline, held).await else {
                return rest.answers.finish(Ok(FetchAnswer::Miss { reason: MissReason::TooLate }));
            };
            // Waiting for a link takes time, and the node must keep no block longer than the caller
            // waits.
            rest.request.deadline = deadline.saturating_duration_since(Instant::now());
            let Some(mut held) = held else {
                if rest.answers.is_empty() {
                    rest.request.progress.set_kind(PathKind::Tcp);
                }
                return rest.answers.finish(self.fetch_over_tcp(rest.request, taker).await);
            };
            let (mut answer, was_used) = (None, held.link.was_used);
            // Background operations take no helper links; those are for urgent fetches.
            let mut besides = SecondaryLinks::new(
                &self.rail_pairs,
                held.at,
                &rest.excluded_helpers,
                class == TrafficClass::Fetch,
            );
            let mut fetch = FetchOperation {
                link: &mut held.link,
                helpers: &mut besides,
                answer: &mut answer,
                sink: taker,
                blocks_received: 0,
            };
            let stop = match timeout_at(deadline, fetch.run(&rest.request)).await {
                Ok(Ok(answer)) => {
                    drop(besides);
                    self.rail_pairs.release(held);
                    return rest.answers.finish(Ok(answer));
                }
                Ok(Err(stop)) => stop,
                Err(_) => FetchStop::Reason(MissReason::TooLate),
            };
            let broken = besides.record_failures(&stop);
            // Then the failure is not that of the fetch's own rail pair, and the next attempt
            // excludes the helpers.
            rest.is_helper_failure = !broken.is_empty() && !held.link.is_broken();
            rest.excluded_helpers.extend(broken);
            self.rail_pairs.record_end(&held, &stop);
            let at = held.at;
            drop(besides);
            // Its queue pairs are destroyed, and the node is told, before the remaining blocks are
            // requested.
            drop(held);
            let end = match answer {
                Some(answer) => rest.after_partial_answer(answer, &stop, taker, at),
                None => rest.after_no_answer(stop, at, was_used, self.rail_pairs.tcp.peer()),
            };
            if let Some(end) = end {
                return rest.answers.finish(end);
            }
        }
    }

    async fn save_all(
        &self,
        request: SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let tcp = &self.rail_pairs.tcp;
        let (peer, stall_timeout) = (tcp.peer(), tcp.stall_timeout());
        let class = request.class();
        let (mut tried, mut may_be_used) = (Vec::new(), true);
        loop {
            // Other operations may hold all links for long, which is no failure of the peer.
            let until = Instant::now() + stall_timeout;
            let held = timeout_at(until, self.rail_pairs.acquire(class, until, &tried, may_be_used)).await;
            let Ok(Some(mut held)) = held else {
                return tcp.save(request, source).await;
            };
            let was_used = held.link.was_used;
            let mut save = SaveOperation { link: &mut held.link, peer, stall_timeout, is_answered: false };
            let ended = save.run(&request, source).await;
            match ended {
                Ok(answer) => {
                    self.rail_pairs.release(held);
                    return Ok(answer);
                }
                // The node had closed the link, and it stores no block before its offer is
                // answered.
                Err(PathError::Broken { .. }) if was_used && !save.is_answered => may_be_used = false,
                Err(error) => {
                    let is_given_up = save.link.is_broken() && save.abort().await;
                    self.rail_pairs.record_end(&held, &error);
                    if !is_given_up {
                        return Err(error);
                    }
                    tried.push(held.at);
                }
            }
        }
    }
}

/// Slices of blocks behind the complete ones were already delivered, and a retry would deliver them
/// twice. So a busy answer after a broken link counts as a lost node.
fn without_retry(answer: FetchAnswer) -> FetchAnswer {
    let reason = MissReason::NodeLost;
    match answer {
        FetchAnswer::Busy { .. } | FetchAnswer::Miss { reason: MissReason::Busy } => {
            FetchAnswer::Miss { reason }
        }
        FetchAnswer::Partial { tiers, reason: MissReason::Busy } => FetchAnswer::Partial { tiers, reason },
        other => other,
    }
}

/// The remaining part of a fetch, and the result of the attempts so far.
struct FetchRemainder {
    request: FetchRequest,
    answers: AnswerParts,
    /// Rail pairs that failed to deliver.
    tried: Vec<usize>,
    /// Whether the next attempt may use a link that an earlier operation used.
    allows_used_link: bool,
    /// Rail pairs with helper links that broke. Every attempt adds new ones, so that the attempts
    /// come to an end.
    excluded_helpers: Vec<usize>,
    /// Only helper links broke in the last attempt.
    is_helper_failure: bool,
}

impl FetchRemainder {
    fn new(request: FetchRequest) -> FetchRemainder {
        FetchRemainder {
            request,
            answers: AnswerParts::default(),
            tried: Vec::new(),
            allows_used_link: true,
            excluded_helpers: Vec::new(),
            is_helper_failure: false,
        }
    }

    /// Handles a link that failed after this answer of the node. `Some` ends the fetch.
    fn after_partial_answer(
        &mut self,
        answer: FetchAnswer,
        stop: &FetchStop,
        taker: &mut FetchSink<'_, '_>,
        at: usize,
    ) -> Option<Result<FetchAnswer, PathError>> {
        let delivered = taker.delivered_blocks();
        if !stop.is_link_failure() {
            return Some(Ok(answer.cut_short(delivered, taker.miss_reason(stop.reason()))));
        }
        if delivered >= answer.tiers().len() {
            return Some(Ok(answer));
        }
        self.answers.add_part(&answer, delivered);
        skip_blocks(&mut self.request, delivered);
        taker.advance();
        if !self.is_helper_failure {
            self.tried.push(at);
        }
        // Blocks behind a corrupt block are useless.
        let of_use = taker.usable_blocks()?;
        self.request.hashes.truncate(of_use);
        (of_use == 0).then_some(Ok(FetchAnswer::Miss { reason: MissReason::Corrupt }))
    }

    /// Handles a link that failed before the node answered. `Some` ends the fetch.
    fn after_no_answer(
        &mut self,
        stop: FetchStop,
        at: usize,
        was_used: bool,
        peer: &str,
    ) -> Option<Result<FetchAnswer, PathError>> {
        if !stop.is_link_failure() {
            return Some(match stop {
                FetchStop::Item(error) => Err(error.at(peer)),
                stop => Ok(FetchAnswer::Miss { reason: stop.reason() }),
            });
        }
        if was_used && self.allows_used_link {
            // The node had closed the link, which is no failure of its rail pair.
            self.allows_used_link = false;
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
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(self.fetch_slices(request, asked, sink))
    }

    fn fetches_slices(&self) -> bool {
        !self.sends_frames.load(Ordering::Relaxed)
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(self.save_all(request, source))
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        self.rail_pairs.tcp.release(lease)
    }

    fn failure(&self) -> Option<PathError> {
        self.rail_pairs.tcp.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        self.rail_pairs.tcp.ping()
    }
}
