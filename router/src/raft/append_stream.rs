//! Appended entries as one stream for each follower and group: the leader writes call after call, the follower
//! answers each in turn.
//!
//! So an entry does not wait until the last one was answered, and a small one does not pay for a call of its own: a
//! call over HTTP/2 costs its headers, a task and some timers at either end, several times what there is to say.
//! Not here: what a call looks like (`append.rs`), heartbeats and everything else between routers, which are calls of
//! their own (`network.rs`, `service.rs`), and pauses after failures, which openraft makes.

use std::collections::VecDeque;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt};
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_client::RaftClient;
use openraft::errors::{NetworkError, RPCError};
use openraft::raft::{AppendEntriesRequest, StreamAppendError, StreamAppendResult};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{CancellationHandle, Request, Status, Streaming};

use super::network::{self, Envelope};
use super::{TypeConfig, append};
use crate::groups::Group;

type RpcError = RPCError<TypeConfig>;
type Call = AppendEntriesRequest<TypeConfig>;
type Outcome = StreamAppendResult<TypeConfig>;

/// How often the leader looks whether an answer is overdue, in the time that it has.
const LOOKS: u32 = 5;

/// Kibibytes of calls that a follower has not answered, above which the next one waits: enough to keep its disk at
/// work, little enough for every group of a router that lags to hold as much. One call always goes.
const UNANSWERED_KIB_MAX: u32 = 8 << 10;

/// Calls that a follower has not answered, at most: half of what openraft takes there before it reads no further, and
/// then all else on the connection would wait for that.
const UNANSWERED_MAX: u32 = 32;

/// What the two halves of a stream tell each other at the leader.
#[derive(Debug)]
struct Open {
    /// Each call that is not answered, oldest first.
    sent: Mutex<VecDeque<Sent>>,
    /// Kibibytes that may still be sent.
    room: Semaphore,
    /// Why no further call was sent.
    failed: Mutex<Option<String>>,
}

/// A call under way.
#[derive(Clone, Copy, Debug)]
struct Sent {
    /// When it was sent, or when the one before it was answered.
    since: Instant,
    kib: u32,
}

impl Open {
    fn new() -> Self {
        let room = Semaphore::new(UNANSWERED_KIB_MAX as usize);
        Self { sent: Mutex::default(), room, failed: Mutex::default() }
    }

    /// The message around a call, once there is room for it; none when nothing more can be sent.
    async fn frame(&self, envelope: &Envelope, call: Call) -> Option<pb::RaftFrame> {
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
        // It is never closed.
        self.room.acquire_many(kib).await.ok()?.forget();
        self.sent.lock().push_back(Sent { since: Instant::now(), kib });
        Some(frame)
    }

    /// Notes that the oldest call was answered. The next one has had its turn from now on.
    fn answered(&self) {
        let mut sent = self.sent.lock();
        let Some(oldest) = sent.pop_front() else { return };
        if let Some(next) = sent.front_mut() {
            next.since = Instant::now();
        }
        self.room.add_permits(oldest.kib as usize);
    }

    fn is_overdue(&self, patience: Duration) -> bool {
        self.sent.lock().front().is_some_and(|sent| sent.since.elapsed() > patience)
    }
}

/// Ends a stream for both sides when it is dropped. Without, calls would still be taken, and kept, for as long as the
/// connection lives.
struct Ending(CancellationHandle);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.clone().cancel();
    }
}

/// Sends all calls to a follower; gives its answers, in their order. Ends with an error when there is no answer for as
/// long as `patience`. The first call is there already, or this waits for it without any limit.
///
/// # Errors
/// When the follower is not there, refuses this router or does not take the first call.
pub(super) async fn send<S>(
    mut client: RaftClient<Channel>,
    envelope: Envelope,
    calls: S,
    patience: Duration,
) -> Result<BoxStream<'static, Result<Outcome, RpcError>>, RpcError>
where
    S: Stream<Item = Call> + Send + Unpin + 'static,
{
    let open = Arc::new(Open::new());
    let mut request = Request::new(frames(calls, envelope, Arc::clone(&open)));
    let ending = Ending(request.cancellation_handle());
    let Ok(answers) = tokio::time::timeout(patience, client.append_stream(request)).await else {
        return Err(overdue(patience));
    };
    let answers = answers.map_err(|status| network::failed(&status))?.into_inner();
    let answers = stream::unfold(Some((answers, open, ending)), move |state| async move {
        let (mut answers, open, ending) = state?;
        let outcome = match next(&mut answers, &open, patience).await {
            Next::Answer(outcome) => Ok(outcome),
            Next::Failed(error) => Err(error),
            Next::End => return None,
        };
        // openraft takes nothing after an error.
        let goes_on = matches!(outcome, Ok(Ok(_)));
        Some((outcome, goes_on.then_some((answers, open, ending))))
    });
    Ok(answers.boxed())
}

/// The messages around all calls, each when there is room for it.
fn frames(
    calls: impl Stream<Item = Call> + Send + Unpin + 'static,
    envelope: Envelope,
    open: Arc<Open>,
) -> impl Stream<Item = pb::RaftFrame> + Send + 'static {
    stream::unfold((calls, envelope, open), |(mut calls, envelope, open)| async move {
        let frame = open.frame(&envelope, calls.next().await?).await?;
        Some((frame, (calls, envelope, open)))
    })
}

fn overdue(patience: Duration) -> RpcError {
    let why = format!("no answer to appended entries for {patience:?}");
    RPCError::Network(NetworkError::from_string(why))
}

/// What comes over a connection.
trait Frames: Stream<Item = Result<pb::RaftFrame, Status>> {}

impl<S: Stream<Item = Result<pb::RaftFrame, Status>>> Frames for S {}

#[derive(Debug)]
enum Next {
    Answer(Outcome),
    Failed(RpcError),
    End,
}

/// Waits for an answer as long as none is overdue; while nothing was asked, for as long as it takes.
async fn next(answers: &mut (impl Frames + Unpin), open: &Open, patience: Duration) -> Next {
    loop {
        let Ok(answer) = tokio::time::timeout(patience / LOOKS, answers.next()).await else {
            if open.is_overdue(patience) {
                return Next::Failed(overdue(patience));
            }
            continue;
        };
        return match answer {
            Some(Ok(frame)) => {
                open.answered();
                match rmp_serde::from_slice(&frame.payload) {
                    Ok(outcome) => Next::Answer(outcome),
                    Err(error) => Next::Failed(RPCError::Network(NetworkError::new(&error))),
                }
            }
            None => match open.failed.lock().take() {
                Some(why) => Next::Failed(RPCError::Network(NetworkError::from_string(why))),
                None => Next::End,
            },
            Some(Err(status)) => Next::Failed(network::failed(&status)),
        };
    }
}

/// Hands all calls to a group's openraft, of which the first was taken out of its frame already; gives the answers. A
/// frame that does not decode ends the stream, after the answers to those before it; `stop` ends it at once.
pub(super) fn take(
    group: Arc<Group>,
    first: Call,
    frames: Streaming<pb::RaftFrame>,
    stop: CancellationToken,
) -> BoxStream<'static, Result<pb::RaftFrame, Status>> {
    let (rest, wrong) = decoded(frames);
    let calls = stream::once(ready(first)).chain(rest);
    let outcomes = group.consensus.raft().stream_append(calls);
    let answers = outcomes.map(move |outcome| {
        let outcome = outcome.map_err(|fatal| Status::internal(format!("raft: {fatal}")))?;
        // Any answer but "your term is over" means that the caller is this router's leader.
        if !matches!(outcome, Err(StreamAppendError::HigherVote(_))) {
            group.consensus.heard();
        }
        let payload = rmp_serde::to_vec(&outcome)
            .map_err(|error| Status::internal(format!("raft answer does not encode: {error}")))?;
        Ok(pb::RaftFrame { payload: Bytes::from(payload), ..pb::RaftFrame::default() })
    });
    let wrong = stream::once(wrong).filter_map(|wrong| ready(wrong.ok().map(Err)));
    answers.chain(wrong).take_until(stop.cancelled_owned()).boxed()
}

/// The calls in these frames, up to the first that cannot be taken; what was wrong with that one.
fn decoded(frames: impl Frames + Unpin) -> (impl Stream<Item = Call>, oneshot::Receiver<Status>) {
    let (wrong, ended) = oneshot::channel();
    let calls = frames.scan(Some(wrong), |wrong, frame| {
        let call = frame.and_then(|frame| append::from_frame(frame).map_err(|error| malformed(&error)));
        let call = call.map_err(|status| {
            // Nobody listens any more when the answers' side is gone.
            wrong.take().map(|wrong| wrong.send(status))
        });
        ready(call.ok())
    });
    (calls, ended)
}

/// What a frame is refused with.
pub(super) fn malformed(error: &dyn std::fmt::Display) -> Status {
    Status::invalid_argument(format!("raft frame does not decode: {error}"))
}

#[cfg(test)]
#[path = "append_stream_tests.rs"]
mod tests;
