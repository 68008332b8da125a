//! Fixture of the node's tests: a certificate authority, a recording router, and a client.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kv_core::content;
use kv_core::id::{
    BlockHash, Category, Epoch, HASH_BYTES, IdentityDigest, LeaseId, RequestId, TenantId, Tier,
};
use kv_core::index::command::Change;
use kvfleet_net::certificates::{Authority, CertificateFiles};
use kvfleet_net::tls::listen::incoming;
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::convert;
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::pb::router_server::{Router, RouterServer};
use kvfleet_proto::pb::{self, announce_reply, announce_request};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{
    Dialer, FetchAnswer, FetchRequest, Path, RequestContext, SaveAnswer, SaveDone, SaveRequest,
};
use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

#[allow(unused_imports)] // not used by every test
pub(crate) use kvfleet_errors_doc::log::Log;

/// Payload of a test block in bytes.
pub const BLOCK_BYTES: usize = 6000;

/// A directory with the files of one cluster.
pub struct TestCluster {
    pub dir: tempfile::TempDir,
    /// Of an instance, which fetches and saves.
    pub identity: Identity,
    /// Of another node.
    pub node: Identity,
    pub router: Identity,
    pub admin: Identity,
    /// Only for tenant 3.
    pub tenant: Identity,
}

impl TestCluster {
    pub fn new() -> TestCluster {
        let dir = tempfile::tempdir().unwrap();
        let issue = |role: Role| files(dir.path(), &role).load().unwrap();
        let [identity, node, router, admin] =
            [Role::Instance(None), Role::Node(None), Role::Router(None), Role::Admin].map(issue);
        let tenant = issue(Role::tenant(TenantId(3)));
        TestCluster { dir, identity, node, router, admin, tenant }
    }

    pub fn config(&self, routers: &[String]) -> NodeConfig {
        // Without a number, because tests change the node's.
        let files = files(self.dir.path(), &Role::Node(None));
        NodeConfig {
            id: 3,
            routers: routers.to_vec(),
            data_dir: self.dir.path().join("ssd"),
            dram_blocks: Some(64),
            ssd_blocks: Some(0),
            block_bytes: BLOCK_BYTES as u64,
            policy: "lru".to_owned(),
            watermark_high: 1.0,
            watermark_low: 1.0,
            tls: TlsSection { ca: files.ca, cert: files.cert, key: files.key },
            ..NodeConfig::default()
        }
    }

    pub async fn dial(&self, address: SocketAddr) -> Arc<dyn Path> {
        dial_as(&self.identity, address).await
    }

    /// A control client of an administrator.
    pub async fn control(&self, address: SocketAddr) -> NodeControlClient<Channel> {
        control_as(&self.admin, address).await
    }
}

/// A path to a node with this identity.
pub async fn dial_as(identity: &Identity, address: SocketAddr) -> Arc<dyn Path> {
    QuicDialer::new(identity, QuicConfig::default()).dial(address.to_string()).await.unwrap()
}

/// A node's control client with this identity.
pub async fn control_as(identity: &Identity, address: SocketAddr) -> NodeControlClient<Channel> {
    {
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
        let channel = endpoint.tls_config(identity.client_tls()).unwrap().connect().await.unwrap();
        NodeControlClient::new(channel)
    }
}

/// A node's status.
pub async fn status(world: &TestCluster, node: &Node) -> pb::NodeStatusReply {
    let mut control = world.control(node.control_addr()).await;
    control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner()
}

/// The certificate files of a role.
pub fn files(dir: &FilePath, role: &Role) -> TlsFiles {
    let CertificateFiles { ca, cert, key } = Authority::open(dir).unwrap().issue(role).unwrap();
    TlsFiles { ca, cert, key }
}

pub async fn start(config: &NodeConfig) -> Node {
    Node::start(config.clone(), &Registry::new()).await.unwrap()
}

/// Starts as soon as an earlier node of the same directory is gone.
pub async fn start_again(config: &NodeConfig) -> Node {
    eventually("the SSD directory is free", async || Node::start(config.clone(), &Registry::new()).await.ok())
        .await
}

pub fn our_identity() -> IdentityDigest {
    NodeConfig::default().identity.manifest().digest()
}

pub fn hash(number: u64) -> BlockHash {
    BlockHash::from_words(number, number)
}

pub fn hashes(numbers: std::ops::Range<u64>) -> Vec<BlockHash> {
    numbers.map(hash).collect()
}

pub fn frame(hash: BlockHash) -> Frame {
    let mut payload = vec![0u8; BLOCK_BYTES];
    content::fill(hash, &mut payload);
    let half = u32::try_from(BLOCK_BYTES / 2).unwrap();
    seal(our_identity(), hash, KeyForm::Rotated, &[half, half], &payload).unwrap()
}

pub fn asker(lease: u64) -> RequestContext {
    RequestContext {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(0),
        category: Category::default(),
        identity: our_identity(),
        traceparent: String::new(),
        class: None,
    }
}

pub fn fetch_request(lease: u64, epoch: Epoch, hashes: &[BlockHash]) -> FetchRequest {
    FetchRequest {
        context: asker(lease),
        epoch,
        first_offset_blocks: 0,
        hashes: hashes.to_vec(),
        deadline: Duration::from_secs(20),
        progress: kvfleet_transport::Progress::default(),
    }
}

/// Fetches; every received frame must be whole and right.
pub async fn fetch(path: &dyn Path, lease: u64, epoch: u64, hashes: &[BlockHash]) -> (FetchAnswer, usize) {
    let mut frames = Vec::new();
    let request = fetch_request(lease, Epoch(epoch), hashes);
    let answer = path.fetch(request, &mut |frame| frames.push(frame)).await.unwrap();
    for (frame, hash) in frames.iter().zip(hashes) {
        frame.verify(our_identity(), *hash).unwrap();
        assert!(content::matches(*hash, &frame.payload()), "wrong bytes for {hash}");
    }
    (answer, frames.len())
}

pub fn save_request(lease: u64, first: u64, hashes: &[BlockHash]) -> SaveRequest {
    SaveRequest {
        context: asker(lease),
        parent: first.checked_sub(1).map(hash),
        first_offset_blocks: u32::try_from(first).unwrap(),
        hashes: hashes.to_vec(),
        frame_bytes: frame(hash(0)).bytes.len() as u64,
    }
}

/// Saves blocks `numbers` under `lease` and releases it.
pub async fn save(path: &dyn Path, lease: u64, numbers: std::ops::Range<u64>) -> SaveDone {
    let all = hashes(numbers.clone());
    let request = save_request(lease, numbers.start, &all);
    let answer = path.save(request, &|position| frame(all[position])).await.unwrap();
    path.release(LeaseId(lease)).await.unwrap();
    match answer {
        SaveAnswer::Done(done) => done,
        other => panic!("{other:?}"),
    }
}

/// Retries until the test returns a value; panics after a minute. The pauses only spare the
/// machine.
pub async fn eventually<T>(what: &str, mut test: impl AsyncFnMut() -> Option<T>) -> T {
    let tries = async {
        loop {
            if let Some(value) = test().await {
                break value;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), tries).await.unwrap_or_else(|_| panic!("never: {what}"))
}

/// State and behaviour of a recording router.
#[derive(Default)]
pub struct FakeRouterState {
    pub joins: Vec<pb::JoinRequest>,
    pub epoch: u64,
    /// Weights generation sent with joins.
    pub generation: u32,
    pub next: u64,
    pub blocks: BTreeMap<BlockHash, Tier>,
    pub heartbeats: u64,
    /// Message of refused joins.
    pub refusal: Option<String>,
    /// Leader address sent in answer to joins and streams.
    pub leader_elsewhere: Option<String>,
    /// The epoch that a node left.
    pub left: Option<u64>,
    /// Reply to an offered run of this many blocks.
    pub drain_reply: Option<fn(u32) -> pb::DrainReply>,
    /// Drain requests received.
    pub drain_requests: Vec<pb::DrainRequest>,
    /// Replies sent in place of the next acknowledgements.
    pub scripted: Vec<announce_reply::Body>,
    pub directives: Option<pb::Directives>,
    /// Batches with a digest, and batches with a wrong digest.
    pub digests: (u64, u64),
    /// The next accepted batch is answered with a full resync.
    pub request_resync: bool,
    /// Batches that began with `Cleared`.
    pub cleared: u64,
}

/// A router that applies announcements to a map.
#[derive(Clone, Default)]
pub struct FakeRouter {
    pub state: Arc<Mutex<FakeRouterState>>,
}

impl FakeRouter {
    /// Serves on a free port; the task ends with the test's runtime.
    pub async fn serve(&self, identity: &Identity) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let served = Server::builder().add_service(RouterServer::new(self.clone()));
        tokio::spawn(served.serve_with_incoming(incoming(listener, identity)));
        address
    }

    pub async fn joined(&self) -> u64 {
        eventually("the node joins", async || Some(self.state.lock().epoch).filter(|epoch| *epoch > 0)).await
    }

    pub async fn wait_for(&self, what: &str, test: impl Fn(&FakeRouterState) -> bool) {
        eventually(what, async || test(&self.state.lock()).then_some(())).await;
    }

    fn not_leader(&self) -> Option<Status> {
        let leader = self.state.lock().leader_elsewhere.clone()?;
        let mut status = Status::failed_precondition("not the leader");
        status.metadata_mut().insert("kvfleet-leader", leader.parse().unwrap());
        Some(status)
    }
}

impl FakeRouterState {
    fn answer(&mut self, request: &pb::AnnounceRequest) -> Option<announce_reply::Body> {
        if request.epoch != self.epoch {
            return Some(announce_reply::Body::Fenced(pb::Fenced {}));
        }
        let Some(announce_request::Body::Batch(batch)) = &request.body else {
            self.heartbeats += 1;
            return self.directives.take().map(announce_reply::Body::Directives);
        };
        if let Some(scripted) = self.scripted.pop() {
            return Some(scripted);
        }
        if batch.seq > self.next {
            return Some(announce_reply::Body::Resync(pb::Resync { expected: self.next }));
        }
        if batch.seq == self.next {
            self.next += 1;
            let changes = convert::changes_from_pb(&batch.changes).unwrap();
            changes.into_iter().for_each(|change| self.apply(change));
            self.compare(&batch.digest);
            if std::mem::take(&mut self.request_resync) {
                return Some(announce_reply::Body::Resync(pb::Resync { expected: 0 }));
            }
        }
        Some(announce_reply::Body::Ack(pb::Ack { seq: self.next - 1 }))
    }

    fn compare(&mut self, digest: &[u8]) {
        let share = |(block, tier): (&BlockHash, &Tier)| kv_core::index::digest::copy_digest(*block, *tier);
        let ours = self.blocks.iter().map(share).fold(0, u128::wrapping_add);
        if !digest.is_empty() {
            self.digests.0 += 1;
            self.digests.1 += u64::from(digest != ours.to_le_bytes());
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Stored { blocks, tier, .. } => self.blocks.extend(blocks.into_iter().map(|b| (b, tier))),
            Change::Moved { blocks, to, .. } => self.blocks.extend(blocks.into_iter().map(|b| (b, to))),
            Change::Dropped { blocks, .. } => blocks.iter().for_each(|block| {
                self.blocks.remove(block);
            }),
            Change::Cleared => {
                self.cleared += 1;
                self.blocks.clear();
            }
        }
    }
}

#[tonic::async_trait]
impl Router for FakeRouter {
    type AnnounceStream = Pin<Box<dyn Stream<Item = Result<pb::AnnounceReply, Status>> + Send>>;
    type RouteStreamStream = ReceiverStream<Result<pb::RouteStreamReply, Status>>;

    async fn join(&self, request: Request<pb::JoinRequest>) -> Result<Response<pb::JoinReply>, Status> {
        if let Some(status) = self.not_leader() {
            return Err(status);
        }
        let mut state = self.state.lock();
        state.joins.push(request.into_inner());
        if let Some(refusal) = &state.refusal {
            return Err(Status::permission_denied(refusal));
        }
        state.epoch += 1;
        state.next = 1;
        state.blocks.clear();
        let generation = state.generation;
        let (epoch, directives, shards) = (state.epoch, None, 1);
        Ok(Response::new(pb::JoinReply { epoch, directives, shards, generation, fleet: None }))
    }

    async fn announce(
        &self,
        request: Request<Streaming<pb::AnnounceRequest>>,
    ) -> Result<Response<Self::AnnounceStream>, Status> {
        if let Some(status) = self.not_leader() {
            return Err(status);
        }
        let (send, replies) = mpsc::channel(16);
        let (state, mut stream) = (Arc::clone(&self.state), request.into_inner());
        tokio::spawn(async move {
            while let Ok(Some(message)) = stream.message().await {
                let body = state.lock().answer(&message);
                let last = matches!(body, Some(announce_reply::Body::NotLeader(_)));
                if let Some(body) = body
                    && (send.send(Ok(pb::AnnounceReply { body: Some(body) })).await.is_err() || last)
                {
                    break;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn route(&self, _: Request<pb::RouteRequest>) -> Result<Response<pb::RouteReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn route_stream(
        &self,
        _: Request<Streaming<pb::RouteRequest>>,
    ) -> Result<Response<Self::RouteStreamStream>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn lookup(&self, _: Request<pb::LookupRequest>) -> Result<Response<pb::LookupReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn report(&self, _: Request<pb::ReportRequest>) -> Result<Response<pb::ReportReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn report_residency(
        &self,
        _: Request<pb::ResidencyRequest>,
    ) -> Result<Response<pb::ResidencyReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn admit_decode(
        &self,
        _: Request<pb::AdmitDecodeRequest>,
    ) -> Result<Response<pb::AdmitDecodeReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }
    async fn why(&self, _: Request<pb::WhyRequest>) -> Result<Response<pb::WhyReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn pin(&self, _: Request<pb::PinRequest>) -> Result<Response<pb::AdminReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn unpin(&self, _: Request<pb::UnpinRequest>) -> Result<Response<pb::AdminReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn set_quota(&self, _: Request<pb::SetQuotaRequest>) -> Result<Response<pb::AdminReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn set_ttl(&self, _: Request<pb::SetTtlRequest>) -> Result<Response<pb::AdminReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn set_generation(
        &self,
        _: Request<pb::SetGenerationRequest>,
    ) -> Result<Response<pb::AdminReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn change_member(
        &self,
        _: Request<pb::ChangeMemberRequest>,
    ) -> Result<Response<pb::ChangeMemberReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn transfer_lead(
        &self,
        _: Request<pb::TransferLeadRequest>,
    ) -> Result<Response<pb::TransferLeadReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Result<Response<pb::AdminReply>, Status> {
        self.state.lock().left = Some(request.into_inner().epoch);
        Ok(Response::new(pb::AdminReply::default()))
    }

    async fn drain(&self, request: Request<pb::DrainRequest>) -> Result<Response<pb::DrainReply>, Status> {
        let request = request.into_inner();
        let mut state = self.state.lock();
        let blocks = request.run.as_ref().map_or(0, |run| run.blocks.len() / HASH_BYTES);
        let reply = match state.drain_reply {
            Some(evacuating) => evacuating(u32::try_from(blocks).unwrap()),
            None => return Err(Status::unimplemented("not part of these tests")),
        };
        state.drain_requests.push(request);
        Ok(Response::new(reply))
    }
}
