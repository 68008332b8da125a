//! Streams of appended entries: what ends them, what waits, and that nothing is kept when one side gives up. The other side
//! is a follower made up here; true ones are in the cluster tests.

#![allow(clippy::unwrap_used)]
use std::sync::atomic::{AtomicU64, Ordering};

use kvfleet_proto::pb::raft_server::{self, RaftServer};
use openraft::impls::BasicNode;
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::vote::RaftLeaderIdExt;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};

use super::super::network::{Network, Peers};
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

/// A follower that answers the first call of a stream, and reads no other.
struct Hesitant;

type Framed = Result<tonic::Response<pb::RaftFrame>, Status>;
type Parts = BoxStream<'static, Result<pb::SnapshotPart, Status>>;

fn not_here<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not here"))
}

#[tonic::async_trait]
impl raft_server::Raft for Hesitant {
    type AppendStreamStream = BoxStream<'static, Result<pb::RaftFrame, Status>>;
    type StateStream = Parts;

    async fn append_stream(
        &self,
        request: Request<Streaming<pb::RaftFrame>>,
    ) -> Result<tonic::Response<Self::AppendStreamStream>, Status> {
        let mut frames = request.into_inner();
        frames.message().await?;
        let answers = stream::iter([answer(&Ok(matched(5)))]).chain(stream::unfold(frames, |frames| async {
            std::future::pending::<()>().await;
            drop(frames);
            None
        }));
        Ok(tonic::Response::new(answers.boxed()))
    }

    async fn hello(&self, _: Request<pb::HelloRequest>) -> Result<tonic::Response<pb::HelloReply>, Status> {
        not_here()
    }
    async fn read_index(
        &self,
        _: Request<pb::RaftFrame>,
    ) -> Result<tonic::Response<pb::ReadIndexReply>, Status> {
        not_here()
    }
    async fn compare(
        &self,
        _: Request<pb::CompareRequest>,
    ) -> Result<tonic::Response<pb::CompareReply>, Status> {
        not_here()
    }
    async fn state(&self, _: Request<pb::RaftFrame>) -> Result<tonic::Response<Parts>, Status> {
        not_here()
    }
    async fn append(&self, _: Request<pb::RaftFrame>) -> Framed {
        not_here()
    }
    async fn vote(&self, _: Request<pb::RaftFrame>) -> Framed {
        not_here()
    }
    async fn pre_vote(&self, _: Request<pb::RaftFrame>) -> Framed {
        not_here()
    }
    async fn transfer_leader(&self, _: Request<pb::RaftFrame>) -> Framed {
        not_here()
    }
    async fn snapshot(&self, _: Request<Streaming<pb::SnapshotPart>>) -> Framed {
        not_here()
    }
}

#[tokio::test]
async fn who_gives_up_on_the_answers_lets_go_of_the_calls() {
    const HANG: Duration = Duration::from_secs(60);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().add_service(RaftServer::new(Hesitant));
    let serving = tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy();
    let held = Arc::new(());
    let let_go = Arc::downgrade(&held);
    let calls = stream::iter((5..).map(move |index| {
        let _held = &held;
        call(index)
    }));
    let mut answers = send(RaftClient::new(channel), envelope(), calls, HANG).await.unwrap();
    let first = answers.next().await.unwrap().unwrap();
    assert_eq!(first, Ok(matched(5)));
    // It is kept for as long as it may be of use, waiting for room.
    tokio::time::sleep(PATIENCE).await;
    assert!(let_go.upgrade().is_some());
    drop(answers);
    let gone = async {
        while let_go.upgrade().is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, gone).await.expect("the calls are let go of");
    serving.abort();
}

/// openraft pauses after a failure when it is asked for a call.
#[tokio::test]
async fn a_follower_that_is_not_there_is_asked_no_faster_than_calls_come() {
    let peers = Peers::new(crate::harness::identity());
    let mut network = Network { peers, envelope: envelope() };
    let mut peer = network.new_client(2, &BasicNode::new("127.0.0.1:1")).await;
    let asked = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&asked);
    let calls = stream::iter(0..3).map(move |index| {
        counted.fetch_add(1, Ordering::SeqCst);
        call(index)
    });
    let option = RPCOption::new(Duration::from_millis(50));
    assert!(peer.stream_append(calls, option).await.is_err());
    assert!(asked.load(Ordering::SeqCst) >= 1);
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
async fn no_more_calls_wait_for_an_answer_than_a_follower_reads() {
    let open = Arc::new(Open::new());
    let mut frames = Box::pin(frames(stream::iter((0..).map(call)), envelope(), Arc::clone(&open)));
    for _ in 0..UNANSWERED_MAX {
        assert!(frames.next().await.is_some());
    }
    assert!(futures_util::poll!(frames.next()).is_pending());
    open.answered();
    assert!(frames.next().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn who_answers_one_call_after_the_other_is_not_overdue() {
    let open = asked().await;
    open.frame(&envelope(), call(6)).await.unwrap();
    tokio::time::advance(PATIENCE + Duration::from_millis(1)).await;
    assert!(open.is_overdue(PATIENCE));
    open.answered();
    assert!(!open.is_overdue(PATIENCE));
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
