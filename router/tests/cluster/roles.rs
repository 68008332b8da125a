//! Rights of roles: one stolen certificate neither changes the cluster nor speaks for another
//! process.
//!
//! Not here: every call with every role (`cli/tests/command/access.rs`), and tenants.

use kv_core::id::{HASH_BYTES, InstanceId, NodeId, RouterId};
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;
use kvfleet_testkit::cluster::{Cluster, heartbeat, join_request};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

fn node(number: u32) -> Role {
    Role::Node(Some(NodeId(number)))
}

fn instance(number: u32) -> Role {
    Role::Instance(Some(InstanceId(number)))
}

fn router(number: u64) -> Role {
    Role::Router(Some(RouterId(number)))
}

/// No position in the log.
const NONE: Option<((u64, u64), u64)> = None;

fn refused<T>(call: &str, answer: Result<T, Status>) {
    let status = answer.err().unwrap_or_else(|| panic!("{call} was answered"));
    assert_eq!(status.code(), Code::PermissionDenied, "{call}: {status}");
}

fn report(number: u32) -> pb::ReportRequest {
    pb::ReportRequest {
        instance: number,
        address: "i:1".into(),
        sequence: 1,
        started_us: 1,
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_changes_no_control_state() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let pin = pb::PinRequest { pin: 1, owner: "o".into(), blocks: vec![7; HASH_BYTES], ..Default::default() };
    cluster.client(1).pin(pin.clone()).await.unwrap();
    let before = cluster.status(1).await.unwrap();
    for role in [instance(1), Role::Instance(None), node(1), Role::Frontend, router(1)] {
        let mut client = cluster.client_as(1, role);
        refused("pin", client.pin(pb::PinRequest { pin: 2, ..pin.clone() }).await);
        refused("unpin", client.unpin(pb::UnpinRequest { pin: 1, owner: "o".into() }).await);
        let quota = pb::SetQuotaRequest { tenant: 0, bytes: 1, clear: false };
        refused("set_quota", client.set_quota(quota).await);
        let ttl = pb::SetTtlRequest { group: 1, ttl_ms: 1, clear: false };
        refused("set_ttl", client.set_ttl(ttl).await);
        let generation = pb::SetGenerationRequest { generation: 1 };
        refused("set_generation", client.set_generation(generation).await);
        let change = pb::ChangeMemberRequest { router: 1, change: 3, ..Default::default() };
        refused("change_member", client.change_member(change).await);
        refused("transfer_lead", client.transfer_lead(pb::TransferLeadRequest { group: 0, to: 1 }).await);
    }
    let after = cluster.status(1).await.unwrap();
    assert_eq!((after.pins, after.generation, after.digest), (1, 0, before.digest));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_reports_for_itself_only() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let mut client = cluster.client_as(1, instance(1));
    // A report from the far future would silence the other instance.
    let silencing = pb::ReportRequest { started_us: u64::MAX, ..report(2) };
    refused("report", client.report(silencing).await);
    let residency = pb::ResidencyRequest { instance: 2, ..Default::default() };
    refused("report_residency", client.report_residency(residency).await);
    let admit = pb::AdmitDecodeRequest { instance: 2, ..Default::default() };
    refused("admit_decode", client.admit_decode(admit).await);
    client.report(report(1)).await.unwrap();
    let known = cluster.status(1).await.unwrap().instances;
    assert_eq!(known.iter().map(|known| known.instance).collect::<Vec<_>>(), [1]);
    refused("report", cluster.client_as(1, node(1)).report(report(1)).await);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_speaks_for_itself_only() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let victim = cluster.node(2).await;
    let mut client = cluster.client_as(1, node(1));
    refused("join", client.join(join_request(2)).await);
    let (words, stream) = tokio::sync::mpsc::channel(1);
    words.send(heartbeat(2, victim.epoch, 0)).await.unwrap();
    refused("announce", client.announce(ReceiverStream::new(stream)).await);
    let leave = pb::LeaveRequest { node: 2, epoch: victim.epoch };
    refused("leave", client.leave(leave).await);
    let drain = pb::DrainRequest { node: 2, epoch: victim.epoch, ..Default::default() };
    refused("drain", client.drain(drain).await);
    refused("join", cluster.client_as(1, instance(2)).join(join_request(2)).await);
    client.join(join_request(1)).await.unwrap();
    let nodes = cluster.status(1).await.unwrap().nodes;
    let seen: Vec<_> = nodes.iter().map(|node| (node.node, node.live)).collect();
    assert_eq!(seen, [(1, true), (2, true)]);
    // An administrator may remove a node.
    assert!(cluster.client_as(1, Role::Admin).leave(leave).await.unwrap().into_inner().changed);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_votes_for_itself_only() {
    let cluster = Cluster::start(3, |_| {}).await;
    let leader = cluster.leader().await;
    let before = cluster.status(leader).await.unwrap();
    let follower = cluster.follower().await;
    let vote = |router: u64| rmp_serde::to_vec(&(((before.term + 1, router), false), NONE, false)).unwrap();
    let frame = |payload: Vec<u8>| pb::RaftFrame {
        payload: payload.into(),
        cluster: cluster.configs[0].cluster.clone(),
        shards: 1,
        ..pb::RaftFrame::default()
    };
    let append = || {
        let vote = ((before.term + 1, leader), true);
        rmp_serde::to_vec(&(vote, NONE, NONE, Vec::<()>::new())).unwrap()
    };
    for role in [router(follower), node(1), Role::Admin] {
        let mut raft = cluster.raft_as(follower, role);
        refused("vote", raft.vote(frame(vote(leader))).await);
        refused("pre_vote", raft.pre_vote(frame(vote(leader))).await);
        refused("append", raft.append(frame(append())).await);
        let frames = tokio_stream::iter([frame(append())]);
        refused("append_stream", raft.append_stream(frames).await);
        let transfer = rmp_serde::to_vec(&(((before.term + 1, leader), true), follower, NONE)).unwrap();
        refused("transfer_leader", raft.transfer_leader(frame(transfer)).await);
        let compare = pb::CompareRequest {
            cluster: cluster.configs[0].cluster.clone(),
            shards: 1,
            verdict: pb::Verdict::Wrong.into(),
            ..Default::default()
        };
        refused("compare", raft.compare(compare).await);
    }
    let after = cluster.status(leader).await.unwrap();
    assert_eq!((after.leader, after.term), (before.leader, before.term));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_follow_no_server_that_is_no_router() {
    // The second router's address is served by a process with a node's certificate.
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let identity = cluster.certificates().identity(&node(2));
    let asked = FakeRaft::default();
    let served =
        tonic::transport::Server::builder().add_service(pb::raft_server::RaftServer::new(asked.clone()));
    let incoming = kvfleet_net::tls::listen::incoming(listener, &identity);
    tokio::spawn(served.serve_with_incoming(incoming));
    let add = pb::ChangeMemberRequest { router: 2, address, change: 1, ..Default::default() };
    let status = cluster.client(1).change_member(add).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert_eq!(asked.calls.load(std::sync::atomic::Ordering::Relaxed), 0, "no call reached it");
    cluster.shutdown().await;
}

/// A Raft service that says that it is router 2.
#[derive(Clone, Default)]
struct FakeRaft {
    calls: std::sync::Arc<std::sync::atomic::AtomicU64>,
}

type Parts = tokio_stream::Empty<Result<pb::SnapshotPart, Status>>;
type Frames = tokio_stream::Empty<Result<pb::RaftFrame, Status>>;
type Answer<T> = Result<tonic::Response<T>, Status>;

impl FakeRaft {
    fn refuse<T>(&self) -> Answer<T> {
        self.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Err(Status::unimplemented("this fake answers handshakes only"))
    }
}

#[tonic::async_trait]
impl pb::raft_server::Raft for FakeRaft {
    type AppendStreamStream = Frames;
    type StateStream = Parts;

    async fn handshake(&self, _: tonic::Request<pb::HandshakeRequest>) -> Answer<pb::HandshakeReply> {
        self.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let reply = pb::HandshakeReply { cluster: "kvfleet".into(), shards: 1, router: 2 };
        Ok(tonic::Response::new(reply))
    }

    async fn read_index(&self, _: tonic::Request<pb::RaftFrame>) -> Answer<pb::ReadIndexReply> {
        self.refuse()
    }

    async fn append(&self, _: tonic::Request<pb::RaftFrame>) -> Answer<pb::RaftFrame> {
        self.refuse()
    }

    async fn append_stream(&self, _: tonic::Request<tonic::Streaming<pb::RaftFrame>>) -> Answer<Frames> {
        self.refuse()
    }

    async fn vote(&self, _: tonic::Request<pb::RaftFrame>) -> Answer<pb::RaftFrame> {
        self.refuse()
    }

    async fn pre_vote(&self, _: tonic::Request<pb::RaftFrame>) -> Answer<pb::RaftFrame> {
        self.refuse()
    }

    async fn transfer_leader(&self, _: tonic::Request<pb::RaftFrame>) -> Answer<pb::RaftFrame> {
        self.refuse()
    }

    async fn snapshot(&self, _: tonic::Request<tonic::Streaming<pb::SnapshotPart>>) -> Answer<pb::RaftFrame> {
        self.refuse()
    }

    async fn compare(&self, _: tonic::Request<pb::CompareRequest>) -> Answer<pb::CompareReply> {
        self.refuse()
    }

    async fn state(&self, _: tonic::Request<pb::RaftFrame>) -> Answer<Parts> {
        self.refuse()
    }
}
