//! Streams of append calls: their end, their limits, and that both sides release everything. The
//! other side is a fake follower; real ones are in the cluster tests.

#![allow(clippy::unwrap_used)]
use std::sync::atomic::{AtomicU64, Ordering};

use kvfleet_net::tls::Role;
use kvfleet_proto::pb::raft_server::{self, RaftServer};
use openraft::impls::BasicNode;
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::vote::RaftLeaderIdExt;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};

use super::super::network::{Network, Peers};
use super::super::{ClusterIdentity, Entry, LeaderId, LogId, Payload, Proposal, Vote};
use super::*;

const PATIENCE: Duration = Duration::from_millis(20);

fn matched(index: u64) -> Option<LogId> {
    Some(LogId::new(LeaderId::new_committed(3, 1), index))
}

fn answer(outcome: &AppendOutcome) -> Result<pb::RaftFrame, Status> {
    let payload = Bytes::from(rmp_serde::to_vec(outcome).unwrap());
    Ok(pb::RaftFrame { payload, ..pb::RaftFrame::default() })
}

fn call(index: u64) -> AppendCall {
    let (vote, prev_log_id) = (Vote::new_committed(3, 1), matched(index));
    AppendCall { vote, prev_log_id, leader_commit: None, entries: Vec::new() }
}

fn decode(frame: pb::RaftFrame) -> Result<AppendCall, Status> {
    terms::decode_append(&Caller::new(Role::Router(None)), 3, frame)
}

fn frame(index: u64) -> Result<pb::RaftFrame, Status> {
    Ok(append::to_frame(&envelope(), call(index)).unwrap())
}

fn envelope() -> Envelope {
    Envelope { cluster: Arc::new(ClusterIdentity { name: "test".into(), shards: 2 }), group: 1 }
}

/// A state with one unanswered call.
async fn asked() -> StreamState {
    let open = StreamState::new();
    open.frame(&envelope(), call(5)).await.unwrap();
    open
}

/// A follower that answers the first call of a stream, and reads no other.
struct FirstCallFollower;

type FrameReply = Result<tonic::Response<pb::RaftFrame>, Status>;
type SnapshotParts = BoxStream<'static, Result<pb::SnapshotPart, Status>>;

fn not_here<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not here"))
}

#[tonic::async_trait]
impl raft_server::Raft for FirstCallFollower {
    type AppendStreamStream = BoxStream<'static, Result<pb::RaftFrame, Status>>;
    type StateStream = SnapshotParts;

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

    async fn handshake(
        &self,
        _: Request<pb::HandshakeRequest>,
    ) -> Result<tonic::Response<pb::HandshakeReply>, Status> {
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
    async fn state(&self, _: Request<pb::RaftFrame>) -> Result<tonic::Response<SnapshotParts>, Status> {
        not_here()
    }
    async fn append(&self, _: Request<pb::RaftFrame>) -> FrameReply {
        not_here()
    }
    async fn vote(&self, _: Request<pb::RaftFrame>) -> FrameReply {
        not_here()
    }
    async fn pre_vote(&self, _: Request<pb::RaftFrame>) -> FrameReply {
        not_here()
    }
    async fn transfer_leader(&self, _: Request<pb::RaftFrame>) -> FrameReply {
        not_here()
    }
    async fn snapshot(&self, _: Request<Streaming<pb::SnapshotPart>>) -> FrameReply {
        not_here()
    }
}

#[tokio::test]
async fn dropping_the_answers_drops_the_calls() {
    const HANG: Duration = Duration::from_secs(60);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().add_service(RaftServer::new(FirstCallFollower));
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
    // It is kept while it may be of use, waiting for budget.
    tokio::time::sleep(PATIENCE).await;
    assert!(let_go.upgrade().is_some());
    drop(answers);
    let gone = async {
        while let_go.upgrade().is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, gone).await.expect("the calls are dropped");
    serving.abort();
}

/// openraft pauses after a failure before it yields the next call.
#[tokio::test]
async fn an_absent_follower_is_called_no_faster_than_calls_come() {
    let peers = Peers::new(kvfleet_testkit::cluster::identity());
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
async fn an_overdue_answer_ends_the_stream() {
    let mut silent = stream::pending();
    let NextAnswer::Failed(RPCError::Network(error)) =
        next_answer(&mut silent, &asked().await, PATIENCE).await
    else {
        panic!("it must fail");
    };
    assert!(error.to_string().contains("no answer to appended entries for 20ms"), "{error}");
}

#[tokio::test]
async fn an_idle_stream_has_no_timeout() {
    let late = tokio::time::sleep(PATIENCE * 3);
    let mut late = Box::pin(stream::once(async {
        late.await;
        answer(&Ok(matched(7)))
    }));
    let open = StreamState::new();
    let next = next_answer(&mut late, &open, PATIENCE).await;
    assert!(matches!(next, NextAnswer::Answer(Ok(upto)) if upto == matched(7)), "{next:?}");
}

#[tokio::test]
async fn answers_are_decoded_and_release_their_calls() {
    let conflict = StreamAppendError::Conflict(matched(4).unwrap());
    let vote = StreamAppendError::HigherVote(Vote::new(9, 2));
    for outcome in [Ok(None), Ok(matched(4)), Err(conflict), Err(vote)] {
        let open = asked().await;
        let got = next_answer(&mut stream::iter([answer(&outcome)]), &open, PATIENCE).await;
        assert!(matches!(&got, NextAnswer::Answer(got) if *got == outcome), "{got:?}");
        assert!(open.pending.lock().is_empty());
        assert_eq!(open.budget_kib.available_permits(), UNANSWERED_KIB_MAX as usize);
    }
}

#[tokio::test]
async fn unanswered_bytes_are_bounded() {
    let large = |index: u64| {
        let command = Bytes::from(vec![0; (UNANSWERED_KIB_MAX as usize + 1) << 10]);
        let payload = Payload::Normal(Proposal(command));
        let entries = vec![Entry { log_id: matched(index + 1).unwrap(), payload }];
        AppendCall { entries, ..call(index) }
    };
    let (open, envelope) = (StreamState::new(), envelope());
    assert!(open.frame(&envelope, large(5)).await.is_some());
    let mut second = Box::pin(open.frame(&envelope, call(6)));
    assert!(futures_util::poll!(&mut second).is_pending());
    open.record_answer();
    assert!(second.await.is_some());
}

#[tokio::test]
async fn unanswered_calls_are_bounded() {
    let open = Arc::new(StreamState::new());
    let mut frames = Box::pin(frames(stream::iter((0..).map(call)), envelope(), Arc::clone(&open)));
    for _ in 0..UNANSWERED_MAX {
        assert!(frames.next().await.is_some());
    }
    assert!(futures_util::poll!(frames.next()).is_pending());
    open.record_answer();
    assert!(frames.next().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_steady_follower_is_not_overdue() {
    let open = asked().await;
    open.frame(&envelope(), call(6)).await.unwrap();
    tokio::time::advance(PATIENCE + Duration::from_millis(1)).await;
    assert!(open.is_overdue(PATIENCE));
    open.record_answer();
    assert!(!open.is_overdue(PATIENCE));
}

#[tokio::test]
async fn undecodable_answers_and_lost_connections_fail() {
    let garbage = Ok(pb::RaftFrame { payload: vec![1, 2, 3].into(), ..pb::RaftFrame::default() });
    for frame in [garbage, Err(Status::unavailable("gone"))] {
        let got = next_answer(&mut stream::iter([frame]), &asked().await, PATIENCE).await;
        assert!(matches!(got, NextAnswer::Failed(_)), "{got:?}");
    }
    let open = StreamState::new();
    *open.failed.lock() = Some("it does not encode".into());
    let got = next_answer(&mut stream::iter([]), &open, PATIENCE).await;
    assert!(matches!(got, NextAnswer::Failed(_)), "{got:?}");
    assert!(matches!(next_answer(&mut stream::iter([]), &open, PATIENCE).await, NextAnswer::End));
}

#[tokio::test]
async fn calls_before_an_undecodable_frame_are_taken() {
    let garbage = || Ok(pb::RaftFrame { payload: vec![1, 2, 3].into(), ..pb::RaftFrame::default() });
    let (calls, wrong) =
        decode_calls(stream::iter([frame(5), frame(6), garbage(), frame(7), garbage()]), decode);
    let taken: Vec<_> = calls.map(|call| call.prev_log_id).collect().await;
    assert_eq!(taken, [matched(5), matched(6)]);
    let status = wrong.await.unwrap();
    assert!(status.message().starts_with("raft frame does not decode"), "{status}");
    let (calls, wrong) = decode_calls(stream::iter([frame(5)]), decode);
    assert_eq!(calls.count().await, 1);
    wrong.await.expect_err("no error occurred");
}
