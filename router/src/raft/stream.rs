//! Appended entries as one stream for each follower and group: the leader writes call after call, the follower
//! answers each in turn.
//!
//! So an entry does not wait until the last one was answered, and a small one does not pay for a call of its own: a
//! call over HTTP/2 costs its headers, a task and some timers at either end, several times what there is to say.
//! Not here: what a call looks like (`append.rs`), heartbeats and everything else between routers, which are calls of
//! their own (`network.rs`, `service.rs`).

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
use tonic::transport::Channel;
use tonic::{Status, Streaming};

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
    at: Instant,
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
        let kib = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).min(UNANSWERED_KIB_MAX);
        // It is never closed.
        self.room.acquire_many(kib).await.ok()?.forget();
        self.sent.lock().push_back(Sent { at: Instant::now(), kib });
        Some(frame)
    }

    /// Notes that the oldest call was answered.
    fn answered(&self) {
        if let Some(sent) = self.sent.lock().pop_front() {
            self.room.add_permits(sent.kib as usize);
        }
    }

    fn is_overdue(&self, patience: Duration) -> bool {
        self.sent.lock().front().is_some_and(|sent| sent.at.elapsed() > patience)
    }
}

/// Sends all calls to a follower; gives its answers, in their order. Ends with an error when one of them takes
/// longer than `patience`.
///
/// # Errors
/// When the follower is not there or refuses this router.
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
    let state = (calls, envelope, Arc::clone(&open));
    let frames = stream::unfold(state, |(mut calls, envelope, open)| async move {
        let frame = open.frame(&envelope, calls.next().await?).await?;
        Some((frame, (calls, envelope, open)))
    });
    let answers = client.append_stream(frames).await.map_err(|status| network::failed(&status))?.into_inner();
    let answers = stream::unfold(Some((answers, open)), move |state| async move {
        let (mut answers, open) = state?;
        let outcome = match next(&mut answers, &open, patience).await {
            Next::Answer(outcome) => Ok(outcome),
            Next::Failed(error) => Err(error),
            Next::End => return None,
        };
        // openraft takes nothing after an error.
        let goes_on = matches!(outcome, Ok(Ok(_)));
        Some((outcome, goes_on.then_some((answers, open))))
    });
    Ok(answers.boxed())
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
                let why = format!("no answer to appended entries for {patience:?}");
                return Next::Failed(RPCError::Network(NetworkError::from_string(why)));
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
/// frame that does not decode ends the stream, after the answers to those before it.
pub(super) fn take(
    group: Arc<Group>,
    first: Call,
    frames: Streaming<pb::RaftFrame>,
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
    answers.chain(wrong).boxed()
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
mod tests {
    #![allow(clippy::unwrap_used)]
    use openraft::vote::RaftLeaderIdExt;

    use super::super::{Cluster, Entry, LeaderId, LogId, Payload, Proposal, Vote};
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(20);

    fn matched(index: u64) -> Option<LogId> {
        Some(LogId::new(LeaderId::new_committed(3, 1), index))
    }

    fn answer(outcome: &Outcome) -> Result<pb::RaftFrame, Status> {
        let payload = Bytes::from(rmp_serde::to_vec(outcome).unwrap());
        Ok(pb::RaftFrame { payload, ..pb::RaftFrame::default() })
    }

    fn call(index: u64) -> Call {
        let (vote, prev_log_id) = (Vote::new_committed(3, 1), matched(index));
        AppendEntriesRequest { vote, prev_log_id, leader_commit: None, entries: Vec::new() }
    }

    fn frame(index: u64) -> Result<pb::RaftFrame, Status> {
        Ok(append::to_frame(&envelope(), call(index)).unwrap())
    }

    fn envelope() -> Envelope {
        Envelope { cluster: Arc::new(Cluster { name: "test".into(), shards: 2 }), group: 1 }
    }

    /// A call that was sent now and is not answered.
    async fn asked() -> Open {
        let open = Open::new();
        open.frame(&envelope(), call(5)).await.unwrap();
        open
    }

    #[tokio::test]
    async fn an_answer_that_is_overdue_ends_the_stream() {
        let mut silent = stream::pending();
        let Next::Failed(RPCError::Network(error)) = next(&mut silent, &asked().await, PATIENCE).await else {
            panic!("it must fail");
        };
        assert!(error.to_string().contains("no answer to appended entries for 20ms"), "{error}");
    }

    #[tokio::test]
    async fn who_asked_nothing_waits_for_as_long_as_it_takes() {
        let late = tokio::time::sleep(PATIENCE * 3);
        let mut late = Box::pin(stream::once(async {
            late.await;
            answer(&Ok(matched(7)))
        }));
        let open = Open::new();
        let next = next(&mut late, &open, PATIENCE).await;
        assert!(matches!(next, Next::Answer(Ok(upto)) if upto == matched(7)), "{next:?}");
    }

    #[tokio::test]
    async fn answers_are_told_apart_and_free_what_was_asked() {
        let conflict = StreamAppendError::Conflict(matched(4).unwrap());
        let vote = StreamAppendError::HigherVote(Vote::new(9, 2));
        for outcome in [Ok(None), Ok(matched(4)), Err(conflict), Err(vote)] {
            let open = asked().await;
            let got = next(&mut stream::iter([answer(&outcome)]), &open, PATIENCE).await;
            assert!(matches!(&got, Next::Answer(got) if *got == outcome), "{got:?}");
            assert!(open.sent.lock().is_empty());
            assert_eq!(open.room.available_permits(), UNANSWERED_KIB_MAX as usize);
        }
    }

    #[tokio::test]
    async fn a_call_waits_while_too_much_is_not_answered_but_the_largest_goes_alone() {
        let large = |index: u64| {
            let command = Bytes::from(vec![0; (UNANSWERED_KIB_MAX as usize + 1) << 10]);
            let payload = Payload::Normal(Proposal(command));
            let entries = vec![Entry { log_id: matched(index + 1).unwrap(), payload }];
            AppendEntriesRequest { entries, ..call(index) }
        };
        let (open, envelope) = (Open::new(), envelope());
        assert!(open.frame(&envelope, large(5)).await.is_some());
        let mut second = Box::pin(open.frame(&envelope, call(6)));
        assert!(futures_util::poll!(&mut second).is_pending());
        open.answered();
        assert!(second.await.is_some());
    }

    #[tokio::test]
    async fn an_answer_that_does_not_decode_and_a_lost_connection_are_failures() {
        let garbage = Ok(pb::RaftFrame { payload: vec![1, 2, 3].into(), ..pb::RaftFrame::default() });
        for frame in [garbage, Err(Status::unavailable("gone"))] {
            let got = next(&mut stream::iter([frame]), &asked().await, PATIENCE).await;
            assert!(matches!(got, Next::Failed(_)), "{got:?}");
        }
        let open = Open::new();
        *open.failed.lock() = Some("it does not encode".into());
        let got = next(&mut stream::iter([]), &open, PATIENCE).await;
        assert!(matches!(got, Next::Failed(_)), "{got:?}");
        assert!(matches!(next(&mut stream::iter([]), &open, PATIENCE).await, Next::End));
    }

    #[tokio::test]
    async fn calls_before_a_frame_that_does_not_decode_are_taken() {
        let garbage = || Ok(pb::RaftFrame { payload: vec![1, 2, 3].into(), ..pb::RaftFrame::default() });
        let (calls, wrong) = decoded(stream::iter([frame(5), frame(6), garbage(), frame(7), garbage()]));
        let taken: Vec<_> = calls.map(|call| call.prev_log_id).collect().await;
        assert_eq!(taken, [matched(5), matched(6)]);
        let status = wrong.await.unwrap();
        assert!(status.message().starts_with("raft frame does not decode"), "{status}");
        let (calls, wrong) = decoded(stream::iter([frame(5)]));
        assert_eq!(calls.count().await, 1);
        wrong.await.expect_err("nothing was wrong");
    }
}
