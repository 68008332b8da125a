//! The stream to one router on which route calls travel: opened with the first call, kept open, and
//! reopened after it ends.
//!
//! A number ties each call to its answer, and an abandoned call leaves no state behind. When the
//! stream ends, unanswered calls fail like calls to an unreachable router, so another router is
//! asked. Not here: choosing the router, and retries (`retry.rs`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::HASH_BYTES;
use kvfleet_proto::pb;
use kvfleet_proto::pb::route_stream_reply::Answer;
use kvfleet_proto::pb::router_client::RouterClient;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::retry::{ANSWER_TIMEOUT, is_retryable_elsewhere};

/// Calls that wait to be sent. A router accepts 256 of a stream; further ones wait here within
/// their own timeout.
const UNSENT_MAX: usize = 256;

/// Maximum bytes of hashes for a call on the stream: the longest prompt that routers accept. A
/// longer call could end the stream for all others.
const HASHES_BYTES_MAX: usize = 65_536 * HASH_BYTES;

/// Maximum number of saves to wait for, for a call on the stream.
const AFTER_MAX: usize = 4_096;

/// How long unary calls are used for a router without streams; it may be upgraded by then.
const UNARY_PERIOD: Duration = Duration::from_secs(60);

/// A router's position in the list, and the shared position of the router that is asked first.
#[derive(Clone, Debug)]
pub(crate) struct RouterSlot {
    pub(crate) sticky: Arc<AtomicUsize>,
    pub(crate) position: usize,
    pub(crate) count: usize,
}

impl RouterSlot {
    /// Makes the next router the first one, if this one was.
    fn prefer_next(&self) {
        let next = (self.position + 1) % self.count;
        // An error means that another router is already first.
        let _ = self.sticky.compare_exchange(self.position, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Error of a call over the stream.
#[derive(Clone, Debug)]
pub(crate) enum StreamError {
    /// The call does not fit the stream, or the router has no streams: use a unary call.
    UseUnary,
    /// The status that a unary call would have returned.
    Failed(Status),
}

type RouteResult = Result<pb::RouteReply, StreamError>;

/// Route calls to one router over a stream.
pub(crate) struct RouteStream {
    client: RouterClient<Channel>,
    slot: RouterSlot,
    open: Mutex<Option<OpenStream>>,
    /// Calls made so far over all streams, so that a late answer never matches another call.
    calls: AtomicU64,
}

impl RouteStream {
    pub(crate) fn new(client: RouterClient<Channel>, slot: RouterSlot) -> RouteStream {
        RouteStream { client, slot, open: Mutex::default(), calls: AtomicU64::default() }
    }

    /// Sends a call and waits as long as a unary call would.
    pub(crate) async fn call(&self, message: &pb::RouteRequest) -> RouteResult {
        if message.hashes.len() > HASHES_BYTES_MAX || message.after.len() > AFTER_MAX {
            return Err(StreamError::UseUnary);
        }
        let RegisteredCall { requests: written, guard: waits, mut answer, answers_before: heard } =
            self.register()?;
        let message = pb::RouteRequest { call: waits.call, ..message.clone() };
        let asking = async {
            tokio::select! {
                biased;
                ended = &mut answer => ended,
                // If the channel is closed, the stream is about to end and fails all pending calls.
                _ = written.send(message) => (&mut answer).await,
            }
        };
        match timeout(ANSWER_TIMEOUT, asking).await {
            Ok(answered) => answered.unwrap_or_else(|_| Err(StreamError::Failed(stream_dropped()))),
            Err(_) => {
                let late = Status::deadline_exceeded(format!("no answer within {ANSWER_TIMEOUT:?}"));
                // No answer arrived since this call was sent, so the other pending calls fail too.
                waits.pending.end_if_silent_since(heard, &late);
                Err(StreamError::Failed(late))
            }
        }
    }

    /// Registers a call on the open stream, or on a new one.
    fn register(&self) -> Result<RegisteredCall, StreamError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut open = lock(&self.open);
        let entered = match &*open {
            Some(open) if !open.pending.needs_reopen() => open.register(call),
            _ => open.insert(OpenStream::begin(self.client.clone(), self.slot.clone())).register(call),
        };
        drop(open);
        entered
    }

    /// Calls that wait for an answer.
    #[cfg(test)]
    pub(crate) fn pending_calls(&self) -> usize {
        lock(&self.open).as_ref().map_or(0, |open| lock(&open.pending.inner).calls.len())
    }
}

/// A registered call.
struct RegisteredCall {
    requests: mpsc::Sender<pb::RouteRequest>,
    guard: CallGuard,
    answer: oneshot::Receiver<RouteResult>,
    /// Answers received on the stream before this call.
    answers_before: u64,
}

/// Removes the call from the table when the caller stops waiting.
struct CallGuard {
    pending: Arc<PendingCalls>,
    call: u64,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        lock(&self.pending.inner).calls.remove(&self.call);
    }
}

/// One stream. Dropping it aborts its task.
struct OpenStream {
    requests: mpsc::Sender<pb::RouteRequest>,
    pending: Arc<PendingCalls>,
    task: AbortHandle,
}

impl OpenStream {
    fn begin(client: RouterClient<Channel>, place: RouterSlot) -> OpenStream {
        let (requests, words) = mpsc::channel(UNSENT_MAX);
        let pending = Arc::new(PendingCalls { inner: Mutex::default(), slot: place });
        let ending = EndGuard(Arc::clone(&pending));
        let task = tokio::spawn(run_stream(client, words, ending)).abort_handle();
        OpenStream { requests, pending, task }
    }

    fn register(&self, call: u64) -> Result<RegisteredCall, StreamError> {
        let mut inner = lock(&self.pending.inner);
        if let Some(ended) = &inner.ended {
            return Err(ended.why.clone());
        }
        let (send, answer) = oneshot::channel();
        inner.calls.insert(call, send);
        let heard = inner.answers;
        drop(inner);
        let waits = CallGuard { pending: Arc::clone(&self.pending), call };
        Ok(RegisteredCall { requests: self.requests.clone(), guard: waits, answer, answers_before: heard })
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Calls that wait for answers of one stream.
struct PendingCalls {
    inner: Mutex<CallTable>,
    slot: RouterSlot,
}

#[derive(Default)]
struct CallTable {
    calls: HashMap<u64, oneshot::Sender<RouteResult>>,
    answers: u64,
    ended: Option<StreamEnd>,
}

struct StreamEnd {
    why: StreamError,
    at: Instant,
}

impl PendingCalls {
    /// Delivers an answer to its caller, if the caller still waits.
    fn deliver(&self, reply: pb::RouteStreamReply) {
        let answer = match reply.answer {
            Some(Answer::Reply(reply)) => Ok(reply),
            Some(Answer::Refused(pb::Refused { code, message })) => {
                Err(StreamError::Failed(Status::new(Code::from_i32(code), message)))
            }
            None => Ok(pb::RouteReply::default()),
        };
        let mut inner = lock(&self.inner);
        inner.answers += 1;
        let asked = inner.calls.remove(&reply.call);
        drop(inner);
        if let Some(asked) = asked {
            // The caller may have given up just now.
            let _ = asked.send(answer);
        }
    }

    /// Ends the stream for all pending calls, unless it has ended.
    fn end(&self, why: &StreamError) {
        self.end_in(lock(&self.inner), why);
    }

    fn end_if_silent_since(&self, heard: u64, late: &Status) {
        let inner = lock(&self.inner);
        if inner.answers == heard {
            self.end_in(inner, &StreamError::Failed(late.clone()));
        }
    }

    fn end_in(&self, mut inner: MutexGuard<'_, CallTable>, why: &StreamError) {
        if inner.ended.is_some() {
            return;
        }
        inner.ended = Some(StreamEnd { why: why.clone(), at: Instant::now() });
        let left = std::mem::take(&mut inner.calls);
        drop(inner);
        if matches!(why, StreamError::Failed(_)) {
            self.slot.prefer_next();
        }
        for asked in left.into_values() {
            // The caller may have given up just now.
            let _ = asked.send(Err(why.clone()));
        }
    }

    fn needs_reopen(&self) -> bool {
        lock(&self.inner).ended.as_ref().is_some_and(|ended| match ended.why {
            StreamError::UseUnary => ended.at.elapsed() >= UNARY_PERIOD,
            StreamError::Failed(_) => true,
        })
    }
}

/// Ends all pending calls when the stream's task ends for any reason.
struct EndGuard(Arc<PendingCalls>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.end(&StreamError::Failed(stream_dropped()));
    }
}

/// Opens the stream and delivers answers until it ends.
async fn run_stream(
    mut client: RouterClient<Channel>,
    mut requests: mpsc::Receiver<pb::RouteRequest>,
    guard: EndGuard,
) {
    let words = futures_util::stream::poll_fn(move |context| requests.poll_recv(context));
    // No deadline: it would limit the whole stream.
    let why = match client.route_stream(Request::new(words)).await {
        Ok(replies) => StreamError::Failed(read_replies(replies.into_inner(), &guard.0).await),
        // A router of an earlier release: it lacks the method for members, or does not allow it to
        // tenants.
        Err(status) if matches!(status.code(), Code::Unimplemented | Code::PermissionDenied) => {
            StreamError::UseUnary
        }
        Err(status) => StreamError::Failed(retryable_status(status)),
    };
    guard.0.end(&why);
}

/// Returns the status with which the stream ended.
async fn read_replies(mut replies: Streaming<pb::RouteStreamReply>, waiting: &PendingCalls) -> Status {
    loop {
        match replies.message().await {
            Ok(Some(reply)) => waiting.deliver(reply),
            Ok(None) => return Status::unavailable("the router ended the route stream"),
            Err(status) => return retryable_status(status),
        }
    }
}

/// The end of a stream is no verdict on its calls, so they may be retried.
fn retryable_status(status: Status) -> Status {
    if is_retryable_elsewhere(status.code()) {
        return status;
    }
    Status::unavailable(format!("the route stream ended: {}", status.message()))
}

fn stream_dropped() -> Status {
    Status::unavailable("the route stream was dropped")
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
