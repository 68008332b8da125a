//! RouteStream: many requests over one open stream, answered as soon as each answer is ready.
//!
//! It has no task of its own: polling the answers reads the requests, and the caller's reads drive
//! the polling. So a caller that does not read is not served further, and its requests in flight
//! are bounded. A refused request gets its own error; only an unreadable message ends the stream,
//! after the outstanding answers. Not here: the answers (`route.rs`), under the rules of single
//! calls.

use std::mem::size_of;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use kv_core::id::HASH_BYTES;
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use kvfleet_proto::pb::route_stream_reply::Answer;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use super::ServerState;
use super::route::{self, RouteHints};

/// Requests of one stream in flight. Most are answered at once; the others wait for a save to be
/// visible (a second at most) or for the leader. At 99 requests a second that is two hundred; a
/// connection allows 200 calls.
const REQUESTS_MAX: usize = 256;

/// Limit on their bytes: sixteen of the longest prompts. The request that crosses it is accepted,
/// so that none is too large for an empty stream.
const BYTES_MAX: usize = 16 << 20;

/// Requests read before yielding to other tasks: some milliseconds of decisions.
const YIELD_AFTER_REQUESTS: u32 = 32;

/// Answers one request.
pub(crate) trait RouteHandler: Clone + Send + Unpin + 'static {
    /// Routes the request.
    fn answer(
        &self,
        request: pb::RouteRequest,
    ) -> impl Future<Output = Result<pb::RouteReply, Status>> + Send;
}

/// This router on behalf of one caller.
#[derive(Clone)]
pub(crate) struct CallerRouter {
    shared: Arc<ServerState>,
    caller: Arc<Caller>,
}

impl RouteHandler for CallerRouter {
    async fn answer(&self, request: pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        let started = Instant::now();
        let answer = route::route(&self.shared, &self.caller, request, RouteHints::default()).await;
        self.shared.metrics.record_route(route::outcome(&answer), started.elapsed());
        answer
    }
}

/// The stream of answers to one caller's requests.
pub(crate) struct RouteAnswers<Q, A> {
    requests: Q,
    handler: A,
    in_flight: FuturesUnordered<Pin<Box<dyn Future<Output = FinishedAnswer> + Send>>>,
    bytes: usize,
    /// Requests read since the last yield.
    since_yield: u32,
    /// Resolves when this stream must end although the caller continues.
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    /// No more requests are read.
    closed: bool,
    /// Error that ends the stream after the outstanding answers.
    error: Option<Status>,
}

struct FinishedAnswer {
    reply: pb::RouteStreamReply,
    bytes: usize,
}

/// Opens a stream for this caller; its connection identifies it for all requests.
pub(super) fn open<Q>(
    shared: &Arc<ServerState>,
    caller: Caller,
    questions: Q,
) -> RouteAnswers<Q, CallerRouter> {
    let closing = shared.lifecycle.end_of_streams();
    RouteAnswers::new(
        questions,
        CallerRouter { shared: Arc::clone(shared), caller: Arc::new(caller) },
        closing,
    )
}

impl<Q, A: RouteHandler> RouteAnswers<Q, A> {
    fn new(requests: Q, handler: A, closing: CancellationToken) -> RouteAnswers<Q, A> {
        RouteAnswers {
            requests,
            handler,
            in_flight: FuturesUnordered::new(),
            bytes: 0,
            since_yield: 0,
            closing: Box::pin(closing.cancelled_owned()),
            closed: false,
            error: None,
        }
    }

    fn has_room(&self) -> bool {
        self.in_flight.len() < REQUESTS_MAX && self.bytes < BYTES_MAX
    }

    fn start(&mut self, request: pb::RouteRequest) {
        let (number, call, bytes) = (request.request, request.call, bytes_of(&request));
        let answering = self.handler.clone();
        self.bytes += bytes;
        self.since_yield += 1;
        self.in_flight.push(Box::pin(async move {
            let answer = match answering.answer(request).await {
                Ok(reply) => Answer::Reply(reply),
                Err(status) => {
                    let (code, message) = (status.code().into(), status.message().to_owned());
                    Answer::Refused(pb::Refused { code, message })
                }
            };
            FinishedAnswer {
                reply: pb::RouteStreamReply { request: number, call, answer: Some(answer) },
                bytes,
            }
        }));
    }
}

impl<Q, A> Stream for RouteAnswers<Q, A>
where
    Q: Stream<Item = Result<pb::RouteRequest, Status>> + Unpin,
    A: RouteHandler,
{
    type Item = Result<pb::RouteStreamReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.closed = this.closed || this.closing.as_mut().poll(context).is_ready();
        loop {
            if let Poll::Ready(Some(done)) = this.in_flight.poll_next_unpin(context) {
                this.bytes -= done.bytes;
                return Poll::Ready(Some(Ok(done.reply)));
            }
            if this.closed && this.in_flight.is_empty() {
                return Poll::Ready(this.error.take().map(Err));
            }
            if this.closed || !this.has_room() {
                // A request in flight will wake this task.
                return Poll::Pending;
            }
            if this.since_yield == YIELD_AFTER_REQUESTS {
                this.since_yield = 0;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            match this.requests.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(request))) => this.start(request),
                Poll::Ready(Some(Err(status))) => (this.closed, this.error) = (true, Some(status)),
                Poll::Ready(None) => this.closed = true,
                Poll::Pending => {
                    this.since_yield = 0;
                    return Poll::Pending;
                }
            }
        }
    }
}

/// Approximate memory of a waiting request.
fn bytes_of(request: &pb::RouteRequest) -> usize {
    let among = request.candidates.as_ref().map_or(0, |among| among.instances.len());
    size_of::<pb::RouteRequest>()
        + request.hashes.len()
        + request.tokens.len() * (size_of::<u32>() + HASH_BYTES)
        + request.cache_salt.len()
        + request.adapter.len()
        + request.traceparent.len()
        + request.identity.len()
        + request.after.len() * size_of::<pb::AnnouncePosition>()
        + (among + request.excluded.len()) * size_of::<u32>()
}

#[cfg(test)]
mod tests;
