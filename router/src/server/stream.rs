//! RouteStream: many questions over one stream that stays open, answered in the order in which answers are ready.
//!
//! No task of its own: the stream of answers takes questions in while it is polled, and is polled while the caller reads. So a caller
//! that reads nothing is asked for nothing more, and what it may have under way is bounded here. A question that is refused
//! ends with a word of its own; only what cannot be read as a question ends the stream, behind the answers under way. Not here: the
//! answers (`route.rs`), each by the rules of a call of its own.

use std::mem::size_of;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use kvfleet_proto::pb;
use kvfleet_proto::pb::route_stream_reply::Answer;
use kvfleet_proto::tls::callers::Caller;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use super::Shared;
use super::route::{self, Besides};

/// Questions of one stream under way. Most are answered as they are read; those that wait do so for what a save caused (a second at
/// most) or for the leader, and a frontend that asks 99 times a second has two hundred of them then. A connection has 200 calls under way.
const QUESTIONS_MAX: usize = 256;

/// Bytes of them: sixteen of the longest prompts. The one above it is let in, so that none is too large for an empty stream.
const BYTES_MAX: usize = 16 << 20;

/// Questions that are taken in before others on this thread have their turn: some milliseconds of choosing.
const TURN_QUESTIONS: u32 = 32;

/// Who answers one question, however it ends.
pub(crate) trait Answering: Clone + Send + Unpin + 'static {
    /// The answer.
    fn answer(
        &self,
        request: pb::RouteRequest,
    ) -> impl Future<Output = Result<pb::RouteReply, Status>> + Send;
}

/// This router, towards one caller.
#[derive(Clone)]
pub(crate) struct Towards {
    shared: Arc<Shared>,
    caller: Arc<Caller>,
}

impl Answering for Towards {
    async fn answer(&self, request: pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        let started = Instant::now();
        let answer = route::route(&self.shared, &self.caller, request, Besides::default()).await;
        self.shared.metrics.routed(route::outcome(&answer), started.elapsed());
        answer
    }
}

/// The answers to one caller's questions.
pub(crate) struct Answers<Q, A> {
    questions: Q,
    answering: A,
    under_way: FuturesUnordered<Pin<Box<dyn Future<Output = Done> + Send>>>,
    bytes: usize,
    /// Taken in since others had their turn.
    taken: u32,
    /// When this stream ends, though the caller goes on.
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Nothing is taken in any more.
    closed: bool,
    /// What the stream ends with once all is answered, unless it ends well.
    broken: Option<Status>,
}

struct Done {
    reply: pb::RouteStreamReply,
    bytes: usize,
}

/// Opens a stream of this caller, who is known by its connection once for all questions.
pub(super) fn open<Q>(shared: &Arc<Shared>, caller: Caller, questions: Q) -> Answers<Q, Towards> {
    let closing = match shared.draining.is_cancelled() {
        // Whoever comes here now has no other router, and is served while there is this one.
        true => shared.stop.clone(),
        false => shared.draining.clone(),
    };
    Answers::new(questions, Towards { shared: Arc::clone(shared), caller: Arc::new(caller) }, closing)
}

impl<Q, A: Answering> Answers<Q, A> {
    fn new(questions: Q, answering: A, closing: CancellationToken) -> Answers<Q, A> {
        Answers {
            questions,
            answering,
            under_way: FuturesUnordered::new(),
            bytes: 0,
            taken: 0,
            closing: Box::pin(closing.cancelled_owned()),
            closed: false,
            broken: None,
        }
    }

    fn has_room(&self) -> bool {
        self.under_way.len() < QUESTIONS_MAX && self.bytes < BYTES_MAX
    }

    fn take(&mut self, request: pb::RouteRequest) {
        let (number, call, bytes) = (request.request, request.call, bytes_of(&request));
        let answering = self.answering.clone();
        self.bytes += bytes;
        self.taken += 1;
        self.under_way.push(Box::pin(async move {
            let answer = match answering.answer(request).await {
                Ok(reply) => Answer::Reply(reply),
                Err(status) => {
                    let (code, message) = (status.code().into(), status.message().to_owned());
                    Answer::Refused(pb::Refused { code, message })
                }
            };
            Done { reply: pb::RouteStreamReply { request: number, call, answer: Some(answer) }, bytes }
        }));
    }
}

impl<Q, A> Stream for Answers<Q, A>
where
    Q: Stream<Item = Result<pb::RouteRequest, Status>> + Unpin,
    A: Answering,
{
    type Item = Result<pb::RouteStreamReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.closed = this.closed || this.closing.as_mut().poll(context).is_ready();
        loop {
            if let Poll::Ready(Some(done)) = this.under_way.poll_next_unpin(context) {
                this.bytes -= done.bytes;
                return Poll::Ready(Some(Ok(done.reply)));
            }
            if this.closed && this.under_way.is_empty() {
                return Poll::Ready(this.broken.take().map(Err));
            }
            if this.closed || !this.has_room() {
                // What is under way wakes this.
                return Poll::Pending;
            }
            if this.taken == TURN_QUESTIONS {
                this.taken = 0;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            match this.questions.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(request))) => this.take(request),
                Poll::Ready(Some(Err(status))) => (this.closed, this.broken) = (true, Some(status)),
                Poll::Ready(None) => this.closed = true,
                Poll::Pending => {
                    this.taken = 0;
                    return Poll::Pending;
                }
            }
        }
    }
}

/// What a question that waits takes of memory, about.
fn bytes_of(request: &pb::RouteRequest) -> usize {
    let among = request.among.as_ref().map_or(0, |among| among.instances.len());
    size_of::<pb::RouteRequest>()
        + request.hashes.len()
        + request.traceparent.len()
        + request.identity.len()
        + request.after.len() * size_of::<pb::Seen>()
        + (among + request.without.len()) * size_of::<u32>()
}

#[cfg(test)]
mod tests;
