//! Append calls as one stream per follower and group: the leader writes calls, and the follower
//! answers each in order.
//!
//! So an entry does not wait for the previous answer. A small entry does not cost an HTTP/2 call of
//! its own with headers, a task and timers. Not here: the encoding of a call (`append.rs`);
//! heartbeats and other traffic between routers, which are separate calls (`network.rs`,
//! `service.rs`); and pauses after failures, which openraft makes.

use std::collections::VecDeque;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt};
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_client::RaftClient;
use openraft::errors::{NetworkError, RPCError};
use openraft::raft::{StreamAppendError, StreamAppendResult};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{CancellationHandle, Request, Status, Streaming};

use super::network::{self, Envelope};
use super::{AppendCall, TypeConfig, append, terms};
use crate::groups::Group;

type AppendRpcError = RPCError<TypeConfig>;
type AppendOutcome = StreamAppendResult<TypeConfig>;

/// Number of overdue checks within the timeout of an answer.
const OVERDUE_CHECKS: u32 = 5;

/// Limit on unanswered calls in kibibytes; the next call waits above it. It keeps the follower's
/// disk busy, and is small enough for every group of a lagging router to hold that much. One call
/// always goes.
const UNANSWERED_KIB_MAX: u32 = 8 << 10;

/// Limit on the number of unanswered calls: half of openraft's own queue. When that is full it
/// stops reading, which would block all other traffic of the connection.
const UNANSWERED_MAX: u32 = 32;

/// State shared by the two halves of a stream at the leader.
#[derive(Debug)]
struct StreamState {
    /// Unanswered calls, oldest first.
    pending: Mutex<VecDeque<PendingCall>>,
    /// Remaining budget in kibibytes.
    budget_kib: Semaphore,
    /// Why sending has stopped.
    failed: Mutex<Option<String>>,
}

/// An unanswered call.
#[derive(Clone, Copy, Debug)]
struct PendingCall {
    /// When it was sent, or when the call before it was answered, if that was later.
    since: Instant,
    kib: u32,
}

impl StreamState {
    fn new() -> Self {
        let budget_kib = Semaphore::new(UNANSWERED_KIB_MAX as usize);
        Self { pending: Mutex::default(), budget_kib, failed: Mutex::default() }
    }

    /// Encodes a call once the budget allows; `None` if it cannot be sent.
    async fn frame(&self, envelope: &Envelope, call: AppendCall) -> Option<pb::RaftFrame> {
        let frame = match append::to_frame(envelope, call) {
            Ok(frame) => frame,
            Err(error) => {
                *self.failed.lock() = Some(error.to_string());
                return None;
            }
        };
        let bytes = frame.payload.len() + frame.commands.iter().map(Bytes::len).sum::<usize>();
        let kib = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX);
        let kib = kib.clamp(UNANSWERED_KIB_MAX / UNANSWERED_MAX, UNANSWERED_KIB_MAX);
        // The semaphore is never closed.
        self.budget_kib.acquire_many(kib).await.ok()?.forget();
        self.pending.lock().push_back(PendingCall { since: Instant::now(), kib });
        Some(frame)
    }

    /// Records the answer to the oldest call; the time of the next one starts now.
    fn record_answer(&self) {
        let mut sent = self.pending.lock();
        let Some(oldest) = sent.pop_front() else { return };
        if let Some(next) = sent.front_mut() {
            next.since = Instant::now();
        }
        self.budget_kib.add_permits(oldest.kib as usize);
    }

    fn is_overdue(&self, patience: Duration) -> bool {
        self.pending.lock().front().is_some_and(|sent| sent.since.elapsed() > patience)
    }
}

/// Cancels a stream for both sides when dropped. Otherwise the follower would keep taking calls
/// while the connection lives.
struct CancelOnDrop(CancellationHandle);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.clone().cancel();
    }
}

/// Sends all calls to a follower; returns its answers in order. Fails if an answer takes longer
/// than `patience`. The first call should be ready; this waits for it without a limit.
///
/// # Errors
/// If the follower is unreachable, refuses this router or does not take the first call.
pub(super) async fn send<S>(
    mut client: RaftClient<Channel>,
    envelope: Envelope,
    calls: S,
    patience: Duration,
) -> Result<BoxStream<'static, Result<AppendOutcome, AppendRpcError>>, AppendRpcError>
where
    S: Stream<Item = AppendCall> + Send + Unpin + 'static,
{
    let open = Arc::new(StreamState::new());
    let mut request = Request::new(frames(calls, envelope, Arc::clone(&open)));
    let ending = CancelOnDrop(request.cancellation_handle());
    let Ok(answers) = tokio::time::timeout(patience, client.append_stream(request)).await else {
        return Err(overdue_error(patience));
    };
    let answers = answers.map_err(|status| network::rpc_error(&status))?.into_inner();
    let answers = stream::unfold(Some((answers, open, ending)), move |state| async move {
        let (mut answers, open, ending) = state?;
        let outcome = match next_answer(&mut answers, &open, patience).await {
            NextAnswer::Answer(outcome) => Ok(outcome),
            NextAnswer::Failed(error) => Err(error),
            NextAnswer::End => return None,
        };
        // openraft takes no item after an error.
        let goes_on = matches!(outcome, Ok(Ok(_)));
        Some((outcome, goes_on.then_some((answers, open, ending))))
    });
    Ok(answers.boxed())
}

/// Encodes all calls, each when the budget allows.
fn frames(
    calls: impl Stream<Item = AppendCall> + Send + Unpin + 'static,
    envelope: Envelope,
    open: Arc<StreamState>,
) -> impl Stream<Item = pb::RaftFrame> + Send + 'static {
    stream::unfold((calls, envelope, open), |(mut calls, envelope, open)| async move {
        let frame = open.frame(&envelope, calls.next().await?).await?;
        Some((frame, (calls, envelope, open)))
    })
}

fn overdue_error(patience: Duration) -> AppendRpcError {
    let why = format!("no answer to appended entries for {patience:?}");
    RPCError::Network(NetworkError::from_string(why))
}

/// Frames received over a connection.
trait FrameStream: Stream<Item = Result<pb::RaftFrame, Status>> {}

impl<S: Stream<Item = Result<pb::RaftFrame, Status>>> FrameStream for S {}

#[derive(Debug)]
enum NextAnswer {
    Answer(AppendOutcome),
    Failed(AppendRpcError),
    End,
}

/// Waits for the next answer while none is overdue; without pending calls, without a limit.
async fn next_answer(
    answers: &mut (impl FrameStream + Unpin),
    open: &StreamState,
    patience: Duration,
) -> NextAnswer {
    loop {
        let Ok(answer) = tokio::time::timeout(patience / OVERDUE_CHECKS, answers.next()).await else {
            if open.is_overdue(patience) {
                return NextAnswer::Failed(overdue_error(patience));
            }
            continue;
        };
        return match answer {
            Some(Ok(frame)) => {
                open.record_answer();
                match rmp_serde::from_slice(&frame.payload) {
                    Ok(outcome) => NextAnswer::Answer(outcome),
                    Err(error) => NextAnswer::Failed(RPCError::Network(NetworkError::new(&error))),
                }
            }
            None => match open.failed.lock().take() {
                Some(why) => NextAnswer::Failed(RPCError::Network(NetworkError::from_string(why))),
                None => NextAnswer::End,
            },
            Some(Err(status)) => NextAnswer::Failed(network::rpc_error(&status)),
        };
    }
}

/// Feeds the first, already decoded call and the rest of the stream to a group's openraft; returns
/// the answers. An undecodable frame ends the stream after the answers to the calls before it;
/// `stop` ends it at once.
pub(super) fn serve(
    group: Arc<Group>,
    caller: Caller,
    first: AppendCall,
    frames: Streaming<pb::RaftFrame>,
    stop: CancellationToken,
) -> BoxStream<'static, Result<pb::RaftFrame, Status>> {
    let decoder = Arc::clone(&group);
    let decode = move |frame| terms::decode_append(&caller, decoder.consensus.term(), frame);
    let (rest, wrong) = decode_calls(frames, decode);
    let calls = stream::once(ready(first)).chain(rest);
    let outcomes = group.consensus.raft().stream_append(calls);
    let answers = outcomes.map(move |outcome| {
        let outcome = outcome.map_err(|fatal| Status::internal(format!("raft: {fatal}")))?;
        // Any answer except "higher vote" means that the caller is this router's leader.
        if !matches!(outcome, Err(StreamAppendError::HigherVote(_))) {
            group.consensus.record_leader_contact();
        }
        let payload = rmp_serde::to_vec(&outcome)
            .map_err(|error| Status::internal(format!("raft answer does not encode: {error}")))?;
        Ok(pb::RaftFrame { payload: Bytes::from(payload), ..pb::RaftFrame::default() })
    });
    let wrong = stream::once(wrong).filter_map(|wrong| ready(wrong.ok().map(Err)));
    answers.chain(wrong).take_until(stop.cancelled_owned()).boxed()
}

/// Decodes calls up to the first bad frame; the receiver gets its error.
fn decode_calls(
    frames: impl FrameStream + Unpin,
    decode: impl Fn(pb::RaftFrame) -> Result<AppendCall, Status>,
) -> (impl Stream<Item = AppendCall>, oneshot::Receiver<Status>) {
    let (wrong, ended) = oneshot::channel();
    let calls = frames.scan(Some(wrong), move |wrong, frame| {
        let call = frame.and_then(&decode);
        let call = call.map_err(|status| {
            // The receiver may be gone already.
            wrong.take().map(|wrong| wrong.send(status))
        });
        ready(call.ok())
    });
    (calls, ended)
}

/// Error for an undecodable frame.
pub(super) fn malformed(error: &dyn std::fmt::Display) -> Status {
    Status::invalid_argument(format!("raft frame does not decode: {error}"))
}

#[cfg(test)]
mod tests;
