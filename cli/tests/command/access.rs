//! Every call of every service with a certificate of every role, over real connections to real
//! services, against the access table.
//!
//! An allowed call may fail for other reasons: messages are small and mostly invalid. Not here: the
//! checks without a connection (`net/src/tls/access/tests.rs`).

use std::path::Path;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use kv_core::id::{
    BlockHash, Category, Epoch, IdentityDigest, InstanceId, LeaseId, NodeId, RequestId, RouterId, TenantId,
};
use kv_core::index::SNAPSHOT_FORMAT;
use kvfleet::cluster::{LAYERS, manifest};
use kvfleet_engine::mock::{Instance, InstanceConfig, TlsPaths};
use kvfleet_net::certificates::{Authority, CertificateFiles};
use kvfleet_net::channel::{connect_lazily, endpoint};
use kvfleet_net::tls::access::{Access, CallRule, Guard, TABLE, rule_of};
use kvfleet_net::tls::{Identity, Role, RoleKind, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{Router, RouterConfig, TlsConfig, VoterConfig};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{
    Dialer, FetchAnswer, FetchRequest, Progress, RequestContext, SaveAnswer, SaveRequest,
};
use prometheus::Registry;
use prost::Message;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Time limit of a call and of each wait, far above the expected duration.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The number and tenant that all messages name. The services have it too.
const OWN: u32 = 1;

/// Another number and tenant.
const OTHER: u32 = 7;

const BLOCK_BYTES: u64 = 64 * 1024;
const BLOCK_TOKENS: u32 = 512;

/// Sends and receives messages as bytes.
#[derive(Clone, Copy, Debug, Default)]
struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = BytesCodec;
    type Decoder = BytesCodec;

    fn encoder(&mut self) -> BytesCodec {
        BytesCodec
    }

    fn decoder(&mut self) -> BytesCodec {
        BytesCodec
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// The services of a cluster, all with number [`OWN`].
struct Services {
    authority: Authority,
    router: Router,
    router_address: String,
    node: Node,
    instance: Instance,
    place: tempfile::TempDir,
}

impl Services {
    async fn start() -> Services {
        let place = tempfile::tempdir().unwrap();
        let authority = Authority::open(&place.path().join("tls")).unwrap();
        let (router, router_address) = router(place.path(), &authority).await;
        let node = node(place.path(), &authority, &router_address).await;
        let instance = instance(&authority, &router_address).await;
        Services { authority, router, router_address, node, instance, place }
    }

    fn identity(&self, role: &Role) -> Identity {
        let CertificateFiles { ca, cert, key } = self.authority.issue(role).unwrap();
        TlsFiles { ca, cert, key }.load().unwrap()
    }

    /// A channel to the service of this call.
    fn channel(&self, path: &str, role: &Role) -> Channel {
        let (address, server) = match path.rsplit_once('/').unwrap().0 {
            "/kvfleet.v1.Router" | "/kvfleet.v1.Raft" => (self.router_address.clone(), Role::Router(None)),
            "/kvfleet.v1.NodeControl" => (self.node.control_addr().to_string(), Role::Node(None)),
            "/kvfleet.v1.Instance" => (self.instance.local_addr().to_string(), Role::Instance(None)),
            other => panic!("this test starts no service {other}"),
        };
        connect_lazily(&endpoint(&address).unwrap(), &self.identity(role), server)
    }

    /// Makes a call. Returns the code of its answer, and the answer's first message.
    async fn call(&self, path: &'static str, role: &Role, message: Bytes) -> (Code, Bytes) {
        let mut client = Grpc::new(self.channel(path, role));
        client.ready().await.unwrap();
        let request = Request::new(tokio_stream::iter([message]));
        let calling = async {
            let answers = client.streaming(request, PathAndQuery::from_static(path), BytesCodec).await?;
            answers.into_inner().message().await
        };
        match tokio::time::timeout(TIMEOUT, calling).await.unwrap_or_else(|_| panic!("{path} hangs")) {
            Ok(first) => (Code::Ok, first.unwrap_or_default()),
            Err(status) => (status.code(), Bytes::new()),
        }
    }

    /// Whether access is granted to a call.
    async fn admits(&self, path: &'static str, role: &Role) -> bool {
        let message = match path {
            // Requests that were routed by a frontend (1) and by an instance (2).
            "/kvfleet.v1.Router/Why" => {
                let request = if *role == Role::Admin { 2 } else { 1 };
                pb::WhyRequest { request }.encode_to_vec()
            }
            path => message(path),
        };
        let (code, first) = self.call(path, role, message.into()).await;
        if path == "/kvfleet.v1.Router/RouteStream" && code == Code::Ok {
            // Its refusals are messages.
            let reply = pb::RouteStreamReply::decode(first).unwrap();
            let Some(pb::route_stream_reply::Answer::Refused(refused)) = reply.answer else { return true };
            return Code::from_i32(refused.code) != Code::PermissionDenied;
        }
        code != Code::PermissionDenied
    }

    async fn stop(self) {
        self.instance.shutdown().await;
        self.node.shutdown().await;
        self.router.shutdown().await;
        drop(self.place);
    }
}

async fn router(place: &Path, authority: &Authority) -> (Router, String) {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let CertificateFiles { ca, cert, key } = authority.issue(&role(RoleKind::Router, OWN)).unwrap();
    let config = RouterConfig {
        id: OWN.into(),
        listen: address.clone(),
        voters: vec![VoterConfig { id: OWN.into(), address: address.clone() }],
        data_dir: place.join("router"),
        tls: TlsConfig { ca, cert, key },
        shards: 1,
        ..RouterConfig::default()
    };
    (Router::start(config, &Registry::new()).await.unwrap(), address)
}

async fn node(place: &Path, authority: &Authority, router: &str) -> Node {
    let CertificateFiles { ca, cert, key } = authority.issue(&role(RoleKind::Node, OWN)).unwrap();
    let config = NodeConfig {
        id: OWN,
        routers: vec![router.to_owned()],
        data_dir: place.join("node"),
        dram_blocks: Some(256),
        block_bytes: BLOCK_BYTES,
        identity: IdentitySection::from(&manifest(BLOCK_TOKENS, LAYERS)),
        tls: TlsSection { ca, cert, key },
        ..NodeConfig::default()
    };
    Node::start(config, &Registry::new()).await.unwrap()
}

async fn instance(authority: &Authority, router: &str) -> Instance {
    let CertificateFiles { ca, cert, key } = authority.issue(&role(RoleKind::Instance, OWN)).unwrap();
    let config = InstanceConfig {
        instance: OWN,
        routers: vec![router.to_owned()],
        tls: TlsPaths { ca, cert, key },
        identity: model().to_string(),
        block_bytes: BLOCK_BYTES,
        layers: LAYERS,
        ..InstanceConfig::default()
    };
    Instance::start(config, &Registry::new()).await.unwrap()
}

/// The identity of the blocks.
fn model() -> IdentityDigest {
    manifest(BLOCK_TOKENS, LAYERS).digest()
}

/// A role of this kind and number.
fn role(kind: RoleKind, number: u32) -> Role {
    match kind {
        RoleKind::Router => Role::Router(Some(RouterId(number.into()))),
        RoleKind::Node => Role::Node(Some(NodeId(number))),
        RoleKind::Instance => Role::Instance(Some(InstanceId(number))),
        RoleKind::Frontend => Role::Frontend,
        RoleKind::Admin => Role::Admin,
        RoleKind::Tenant => Role::tenant(TenantId(number)),
    }
}

/// A message that names [`OWN`] wherever it names a number or a tenant.
fn message(path: &str) -> Vec<u8> {
    let name = path.rsplit_once('.').unwrap().1;
    match name {
        "Router/Route" | "Router/RouteStream" => route_request(9, OWN).encode_to_vec(),
        "Router/Report" => pb::ReportRequest { instance: OWN, ..Default::default() }.encode_to_vec(),
        "Router/ReportResidency" => {
            pb::ResidencyRequest { instance: OWN, ..Default::default() }.encode_to_vec()
        }
        "Router/AdmitDecode" => {
            pb::AdmitDecodeRequest { instance: OWN, ..Default::default() }.encode_to_vec()
        }
        "Router/Join" => pb::JoinRequest { node: OWN, ..Default::default() }.encode_to_vec(),
        "Router/Announce" => pb::AnnounceRequest { node: OWN, ..Default::default() }.encode_to_vec(),
        "Router/Leave" => pb::LeaveRequest { node: OWN, ..Default::default() }.encode_to_vec(),
        "Router/Drain" => pb::DrainRequest { node: OWN, ..Default::default() }.encode_to_vec(),
        "NodeControl/SetWindow" => {
            pb::SetWindowRequest { router: OWN.into(), waiting: Vec::new() }.encode_to_vec()
        }
        "Instance/Run" => pb::RunRequest { tenant: OWN, ..Default::default() }.encode_to_vec(),
        // Empty windows of the vote of term 0, which no group follows any more, in MessagePack.
        "Raft/Append" | "Raft/AppendStream" => frame(&[&[0x94], VOTE, &[NIL, NIL, 0x90]].concat()),
        "Raft/Vote" | "Raft/PreVote" => frame(&[&[0x93], VOTE, &[NIL, FALSE]].concat()),
        "Raft/TransferLeader" => frame(&[&[0x93], VOTE, &[0x01, NIL]].concat()),
        "Raft/ReadIndex" | "Raft/State" => frame(&[]),
        "Raft/Compare" => {
            pb::CompareRequest { cluster: "kvfleet".into(), shards: 1, ..Default::default() }.encode_to_vec()
        }
        "Raft/Snapshot" => snapshot_part().encode_to_vec(),
        _ => Vec::new(),
    }
}

/// The uncommitted vote of router [`OWN`] in term 0, in MessagePack.
const VOTE: &[u8] = &[0x92, 0x92, 0x00, 0x01, FALSE];
const NIL: u8 = 0xc0;
const FALSE: u8 = 0xc2;

fn frame(payload: &[u8]) -> Vec<u8> {
    let payload = payload.to_vec().into();
    pb::RaftFrame { cluster: "kvfleet".into(), shards: 1, payload, ..Default::default() }.encode_to_vec()
}

/// The first part of an empty snapshot.
fn snapshot_part() -> pb::SnapshotPart {
    let meta: &[u8] = &[0x93, NIL, 0x92, NIL, 0x92, 0x90, 0x80, 0xa0];
    let format = u8::try_from(SNAPSHOT_FORMAT).unwrap();
    let head = [&[0x94], VOTE, meta, &[format, 0x00]].concat();
    pb::SnapshotPart {
        cluster: "kvfleet".into(),
        shards: 1,
        crc32c: crc32c(&head),
        head,
        ..Default::default()
    }
}

/// CRC32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |sum: u32, _| (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg());
    !bytes.iter().fold(u32::MAX, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), step))
}

fn route_request(request: u64, tenant: u32) -> pb::RouteRequest {
    pb::RouteRequest {
        request,
        tenant,
        block_tokens: BLOCK_TOKENS,
        input_tokens: BLOCK_TOKENS,
        hashes: vec![9; 19],
        ..pb::RouteRequest::default()
    }
}

/// Makes a call with each role. Returns the number of calls, and what differs from the table.
async fn walk(services: &Services, rule: &CallRule) -> (usize, Vec<String>) {
    let (mut calls, mut wrong) = (0, Vec::new());
    for kind in RoleKind::ALL {
        let access = rule.access(kind);
        let own = role(kind, OWN);
        calls += 1;
        if services.admits(rule.path, &own).await != (access != Access::Deny) {
            wrong.push(format!("{} by {own}: the table says {}", rule.path, access.name()));
        }
        let other = role(kind, OTHER);
        // A frontend has no number: its requests are checked apart.
        if access != Access::Own || other == own {
            continue;
        }
        calls += 1;
        if services.admits(rule.path, &other).await {
            wrong.push(format!("{} by {other}, which names {own}: admitted", rule.path));
        }
    }
    (calls, wrong)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_role_makes_exactly_the_calls_of_the_table() {
    let services = Services::start().await;
    wait_until_routed(&services).await;
    let (mut calls, mut wrong, mut ports) = (0, Vec::new(), 0);
    // `net/src/tls/access/tests.rs` compares the rows with the protocol files.
    for rule in TABLE.iter().filter(|rule| rule.path.starts_with('/')) {
        if rule.guard == Guard::Port {
            ports += 1;
            continue;
        }
        let (made, differs) = walk(&services, rule).await;
        calls += made;
        wrong.extend(differs);
    }
    calls += check_reduced_answers(&services).await;
    calls += check_block_path(&services).await;
    assert_eq!(wrong, Vec::<String>::new());
    println!(
        "{calls} calls over {} rows with {} roles; {ports} rows of ports",
        TABLE.len(),
        RoleKind::ALL.len()
    );
    services.stop().await;
}

/// Waits until a frontend (request 1) and an instance (request 2) have been answered.
async fn wait_until_routed(services: &Services) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    for (request, role) in [(1, Role::Frontend), (2, role(RoleKind::Instance, OWN))] {
        let message = Bytes::from(route_request(request, 0).encode_to_vec());
        while services.call("/kvfleet.v1.Router/Route", &role, message.clone()).await.0 != Code::Ok {
            assert!(tokio::time::Instant::now() < deadline, "the router does not answer");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A frontend explains requests of frontends only, and processes see only the leaders in a status.
async fn check_reduced_answers(services: &Services) -> usize {
    let why = |request| Bytes::from(pb::WhyRequest { request }.encode_to_vec());
    let path = "/kvfleet.v1.Router/Why";
    assert_eq!(services.call(path, &Role::Frontend, why(1)).await.0, Code::Ok);
    assert_eq!(services.call(path, &Role::Frontend, why(2)).await.0, Code::PermissionDenied);
    let path = "/kvfleet.v1.Router/Status";
    for kind in [RoleKind::Node, RoleKind::Instance, RoleKind::Frontend, RoleKind::Admin] {
        let (_, reply) = services.call(path, &role(kind, OWN), Bytes::new()).await;
        let reply = pb::StatusReply::decode(reply).unwrap();
        assert_eq!((reply.leader, reply.groups.len()), (OWN.into(), 2), "{kind:?}");
        let is_full = !reply.nodes.is_empty() && !reply.voters.is_empty();
        assert_eq!(is_full, kind == RoleKind::Admin, "{kind:?}: {reply:?}");
    }
    6
}

/// Saves, fetches and pings at the node with each role; a tenant also in the name of another one.
async fn check_block_path(services: &Services) -> usize {
    let (_, status) = services.call("/kvfleet.v1.NodeControl/NodeStatus", &Role::Admin, Bytes::new()).await;
    let epoch = Epoch(pb::NodeStatusReply::decode(status).unwrap().epoch);
    let mut calls = 0;
    // An instance comes first, and its block is fetched by all.
    let kinds = [RoleKind::Instance].into_iter().chain(RoleKind::ALL);
    for (number, kind) in (1..).zip(kinds) {
        let own = role(kind, OWN);
        let dialer = QuicDialer::new(&services.identity(&own), QuicConfig::default());
        let path = dialer.dial(services.node.data_addr().to_string()).await.unwrap();
        let may = |path, is_own: bool| rule_of(path).unwrap().access(kind) != Access::Deny && is_own;
        // Another tenant's block does not exist for a process that may name every tenant.
        let tenants = if kind == RoleKind::Tenant { &[OWN, OTHER][..] } else { &[OWN] };
        for &tenant in tenants {
            let is_own = tenant == OWN;
            let context = |lease: u64| context(lease + 2 * u64::from(tenant), tenant);
            let saved = sealed(BlockHash([number; _]));
            let request = save_request(context(10 * u64::from(number)), &saved);
            let answer = path.save(request, &|_| saved.clone()).await.unwrap();
            let saves = matches!(answer, SaveAnswer::Done(_));
            assert_eq!(saves, may("data/Save", is_own), "save by {own} as {tenant}: {answer:?}");
            let request = fetch_request(context(10 * u64::from(number) + 1), epoch, BlockHash([1; _]));
            let answer = path.fetch(request, &mut |_| ()).await.unwrap();
            let fetches = matches!(answer, FetchAnswer::Hit { .. });
            assert_eq!(fetches, may("data/Fetch", is_own), "fetch by {own} as {tenant}: {answer:?}");
            calls += 2;
        }
        path.ping().await.unwrap();
        calls += 1;
    }
    calls
}

fn context(lease: u64, tenant: u32) -> RequestContext {
    RequestContext {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(tenant),
        category: Category::default(),
        identity: model(),
        traceparent: String::new(),
        class: None,
    }
}

fn save_request(context: RequestContext, frame: &Frame) -> SaveRequest {
    let (hashes, frame_bytes) = (vec![frame.hash], frame.bytes.len() as u64);
    SaveRequest { context, parent: None, first_offset_blocks: 0, hashes, frame_bytes }
}

fn fetch_request(context: RequestContext, epoch: Epoch, block: BlockHash) -> FetchRequest {
    let (hashes, deadline) = (vec![block], TIMEOUT);
    FetchRequest { context, epoch, first_offset_blocks: 0, hashes, deadline, progress: Progress::default() }
}

/// A frame of zeros.
fn sealed(block: BlockHash) -> Frame {
    let payload = vec![0; usize::try_from(BLOCK_BYTES).unwrap()];
    let lens = vec![u32::try_from(BLOCK_BYTES).unwrap() / LAYERS; LAYERS as usize];
    seal(model(), block, KeyForm::default(), &lens, &payload).unwrap()
}
