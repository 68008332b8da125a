//! Routers in this process over real gRPC with mutual TLS on loopback, and a fake node.
//!
//! Waits are for a state, with a limit that only a hang reaches; no test measures time.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use kv_core::id::{BlockHash, HASH_BYTES, RouterId, TenantId};
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::pb::raft_client::RaftClient;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_router::{Router, RouterConfig, StartError, TimingsConfig, TlsConfig, VoterConfig};
use prometheus::Registry;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

use crate::certificates::{Certificates, RoleChannel};
use crate::ports::unused_address;

/// Timeout that only a hang reaches, on any machine.
pub const HANG: Duration = Duration::from_secs(60);

/// Waits until `probe` returns a value.
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut probe: impl FnMut() -> F) -> T {
    let found = async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    match tokio::time::timeout(HANG, found).await {
        Ok(found) => found,
        Err(_) => panic!("waited {HANG:?} for: {what}"),
    }
}

/// Creates an authority in `directory`, and a certificate for routers of any number.
pub fn certificates(directory: &Path) -> TlsConfig {
    Certificates::open(directory).config(&Role::Router(None))
}

/// The identity of a router from a new authority.
#[allow(dead_code, reason = "unit tests use it")]
pub fn identity() -> Identity {
    let directory = TempDir::new().unwrap();
    Certificates::open(directory.path()).identity(&Role::Router(None))
}

pub async fn start(config: RouterConfig) -> Result<Router, StartError> {
    Router::start(config, &Registry::new()).await
}

/// A cluster; routers are numbered from 1.
pub struct Cluster {
    pub directory: TempDir,
    pub configs: Vec<RouterConfig>,
    pub routers: Vec<Option<Router>>,
    /// Metrics of each router since its last start.
    pub registries: Vec<Registry>,
    channels: Vec<RoleChannel>,
    certificates: Certificates,
}

impl Cluster {
    /// Starts `count` routers that tolerate long silence of nodes, unless `change` sets another
    /// limit.
    pub async fn start(count: u64, change: impl Fn(&mut RouterConfig)) -> Cluster {
        let directory = TempDir::new().unwrap();
        let certificates = Certificates::open(directory.path());
        let voters: Vec<_> = (1..=count).map(|id| VoterConfig { id, address: unused_address() }).collect();
        let configs: Vec<_> = voters
            .iter()
            .map(|own| {
                let mut config = RouterConfig {
                    id: own.id,
                    listen: own.address.clone(),
                    voters: voters.clone(),
                    data_dir: directory.path().join(format!("router-{}", own.id)),
                    tls: certificates.config(&Role::Router(Some(RouterId(own.id)))),
                    shards: 1,
                    // Leaders stay where elections put them, unless a test changes it.
                    timings: TimingsConfig { silence_ms: 30_000, balance_ms: 0, ..TimingsConfig::default() },
                    ..RouterConfig::default()
                };
                change(&mut config);
                config
            })
            .collect();
        let channels = voters.iter().map(|voter| certificates.callers(&voter.address)).collect();
        let routers = voters.iter().map(|_| None).collect();
        let registries = voters.iter().map(|_| Registry::new()).collect();
        let mut cluster = Cluster { directory, configs, routers, registries, channels, certificates };
        for id in 1..=count {
            cluster.start_router(id).await;
        }
        cluster
    }

    pub async fn start_router(&mut self, id: u64) {
        let at = usize::try_from(id - 1).unwrap();
        let registry = Registry::new();
        let router = Router::start(self.configs[at].clone(), &registry).await;
        self.routers[at] = Some(router.unwrap_or_else(|error| panic!("router {id}: {error}")));
        self.registries[at] = registry;
    }

    pub fn take(&mut self, id: u64) -> Router {
        self.routers[usize::try_from(id - 1).unwrap()].take().expect("the router runs")
    }

    pub fn running(&self) -> Vec<u64> {
        (1..).zip(&self.routers).filter(|(_, router)| router.is_some()).map(|(id, _)| id).collect()
    }

    /// A client of a router that makes each call with a role that may make it.
    pub fn client(&self, id: u64) -> RouterClient<RoleChannel> {
        RouterClient::new(self.channels[usize::try_from(id - 1).unwrap()].clone())
    }

    /// A client of a router that makes each call with this role.
    pub fn client_as(&self, id: u64, role: Role) -> RouterClient<RoleChannel> {
        RouterClient::new(self.certificates.caller(self.address(id), role))
    }

    /// A client of a router's Raft service, like [`Self::client_as`].
    pub fn raft_as(&self, id: u64, role: Role) -> RaftClient<RoleChannel> {
        RaftClient::new(self.certificates.caller(self.address(id), role))
    }

    fn address(&self, id: u64) -> &str {
        &self.configs[usize::try_from(id - 1).unwrap()].listen
    }

    /// Certificates of this cluster.
    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    pub async fn status(&self, id: u64) -> Option<pb::StatusReply> {
        self.client(id).status(pb::StatusRequest {}).await.ok().map(tonic::Response::into_inner)
    }

    /// The leader of the control group, once all running routers agree.
    pub async fn leader(&self) -> u64 {
        self.leader_of(0).await
    }

    /// The leader of a group, once all running routers agree.
    pub async fn leader_of(&self, group: u32) -> u64 {
        until("a leader", || async {
            let mut agreed = Vec::new();
            for id in self.running() {
                agreed.push(self.status(id).await?.groups[group as usize].leader);
            }
            let leader = *agreed.first()?;
            (leader > 0 && self.running().contains(&leader) && agreed.iter().all(|one| *one == leader))
                .then_some(leader)
        })
        .await
    }

    /// A running router that is not the leader.
    pub async fn follower(&self) -> u64 {
        let leader = self.leader().await;
        self.running().into_iter().find(|id| *id != leader).unwrap()
    }

    /// Waits until every running router has applied the same entry of every group, and asserts
    /// equal state.
    pub async fn assert_equal_replicas(&self) {
        let seen = until("equal applied indexes", || async {
            let mut seen = Vec::new();
            for id in self.running() {
                seen.push(self.status(id).await?.groups);
            }
            let applied = |groups: &Vec<pb::GroupStatus>| {
                groups.iter().map(|group| group.applied_index).collect::<Vec<_>>()
            };
            seen.iter().all(|groups| applied(groups) == applied(&seen[0])).then_some(seen)
        })
        .await;
        let digests = |groups: &Vec<pb::GroupStatus>| {
            groups.iter().map(|group| group.digest.clone()).collect::<Vec<_>>()
        };
        assert!(seen.iter().all(|one| digests(one) == digests(&seen[0])), "replicas differ: {seen:?}");
    }

    /// Calls the leader, wherever it is, until it answers.
    pub async fn on_leader<T, F>(&self, call: impl Fn(RouterClient<RoleChannel>) -> F) -> T
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        until("an answer of the leader", || async {
            let leader = self.leader().await;
            match call(self.client(leader)).await {
                Ok(reply) => Some(reply.into_inner()),
                Err(status)
                    if matches!(
                        status.code(),
                        Code::FailedPrecondition | Code::Unavailable | Code::Aborted
                    ) =>
                {
                    None
                }
                Err(status) => panic!("{status}"),
            }
        })
        .await
    }

    pub async fn lookup(
        &self,
        id: u64,
        hashes: &[HashBytes],
        after: Vec<pb::AnnouncePosition>,
    ) -> pb::LookupReply {
        let request = pb::LookupRequest { hashes: hashes.concat(), after, fresh: false };
        self.client(id).lookup(request).await.unwrap().into_inner()
    }

    /// Joins a node and opens its stream at the leader of shard 1.
    pub async fn node(&self, node: u32) -> FakeNode {
        let epoch = self.join(node).await;
        self.reconnect(node, epoch, 1).await
    }

    /// Joins a node.
    pub async fn join(&self, node: u32) -> u64 {
        let request = join_request(node);
        let joined = self.on_leader(|mut client| {
            let request = request.clone();
            async move { client.join(request).await }
        });
        joined.await.epoch
    }

    /// Opens streams to shard 1 and to control for a node that joined before.
    pub async fn reconnect(&self, node: u32, epoch: u64, seq: u64) -> FakeNode {
        self.open_streams(node, epoch, seq, 1).await
    }

    /// Opens streams to a shard and to control for a node that joined before.
    pub async fn open_streams(&self, node: u32, epoch: u64, seq: u64, shard: u32) -> FakeNode {
        let (control_words, control) = self.stream(node, epoch, 0).await;
        let (words, replies) = self.stream(node, epoch, shard).await;
        FakeNode { node, epoch, seq, shard, messages: words, replies, control_words, control }
    }

    async fn stream(&self, node: u32, epoch: u64, group: u32) -> AnnounceStream {
        until("a stream at the leader", || async {
            let (words, receiver) = mpsc::channel(64);
            words.send(heartbeat(node, epoch, group)).await.ok()?;
            let leader = self.leader_of(group).await;
            let opened = self.client(leader).announce(ReceiverStream::new(receiver)).await;
            opened.ok().map(|replies| (words, replies.into_inner()))
        })
        .await
    }

    pub async fn shutdown(mut self) {
        for id in self.running() {
            self.take(id).shutdown().await;
        }
    }
}

/// The role of a client of tenants 3 and 5.
pub fn tenants() -> Role {
    Role::Tenants([3, 5].map(TenantId).into())
}

pub fn channel(tls: &TlsConfig, address: &str) -> Channel {
    let files = TlsFiles { ca: tls.ca.clone(), cert: tls.cert.clone(), key: tls.key.clone() };
    let identity = files.load().unwrap();
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    endpoint.timeout(HANG).tls_config(identity.client_tls()).unwrap().connect_lazy()
}

pub fn join_request(node: u32) -> pb::JoinRequest {
    pb::JoinRequest {
        node,
        data_address: format!("127.0.0.1:{}", 9_000 + node),
        control_address: format!("127.0.0.1:{}", 9_500 + node),
        host: "here".into(),
        instance: node,
        has_instance: true,
        identity: vec![7; 16],
        block_bytes: 4_096,
        manifest: None,
    }
}

type AnnounceStream = (mpsc::Sender<pb::AnnounceRequest>, Streaming<pb::AnnounceReply>);

pub fn heartbeat(node: u32, epoch: u64, group: u32) -> pb::AnnounceRequest {
    pb::AnnounceRequest { node, epoch, group, body: Some(Word::Heartbeat(pb::Heartbeat::default())) }
}

/// The node's ends of its streams to one shard and to control.
pub struct FakeNode {
    pub node: u32,
    pub epoch: u64,
    /// Number of the next batch.
    pub seq: u64,
    pub shard: u32,
    pub messages: mpsc::Sender<pb::AnnounceRequest>,
    pub replies: Streaming<pb::AnnounceReply>,
    pub control_words: mpsc::Sender<pb::AnnounceRequest>,
    pub control: Streaming<pb::AnnounceReply>,
}

impl FakeNode {
    async fn send_message(&self, word: Word) {
        let (node, epoch, group) = (self.node, self.epoch, self.shard);
        let request = pb::AnnounceRequest { node, epoch, group, body: Some(word) };
        self.messages.send(request).await.expect("the stream is open");
    }

    /// Sends a batch under number `seq`.
    pub async fn send(&self, seq: u64, changes: Vec<pb::Change>) {
        self.send_with(seq, changes, None).await;
    }

    /// As `send`, with the node's own digest after it.
    pub async fn send_with(&self, seq: u64, changes: Vec<pb::Change>, digest: Option<u128>) {
        let digest = digest.map(|digest| digest.to_le_bytes().to_vec()).unwrap_or_default();
        self.send_message(Word::Batch(pb::Batch { seq, changes, digest })).await;
    }

    /// The next reply other than a push of directives or fleet statistics.
    pub async fn reply(&mut self) -> Reply {
        loop {
            let message = tokio::time::timeout(HANG, self.replies.message()).await.expect("a reply in time");
            match message.expect("no error on the stream").expect("the stream is open").body {
                Some(Reply::Directives(_)) => {}
                Some(reply) => return reply,
                None => panic!("an empty reply"),
            }
        }
    }

    /// Announces stored blocks and waits for the acknowledgement; resends on `Busy`.
    pub async fn store(&mut self, blocks: &[HashBytes]) -> pb::AnnouncePosition {
        let seq = self.seq;
        loop {
            self.send(seq, vec![stored(blocks)]).await;
            match self.reply().await {
                Reply::Ack(ack) if ack.seq >= seq => break,
                Reply::Busy(busy) => tokio::time::sleep(Duration::from_millis(busy.retry_after_ms)).await,
                other => panic!("batch {seq} was answered by {other:?}"),
            }
        }
        self.seq += 1;
        pb::AnnouncePosition { node: self.node, epoch: self.epoch, seq, shard: self.shard }
    }
}

/// A block hash as messages carry it.
pub type HashBytes = [u8; HASH_BYTES];

pub fn stored(blocks: &[HashBytes]) -> pb::Change {
    let stored = pb::Stored { parent: Vec::new(), blocks: blocks.concat(), tier: 1 };
    pb::Change { change: Some(pb::change::Change::Stored(stored)) }
}

/// The same, in GPU memory.
pub fn resident(blocks: &[HashBytes]) -> pb::Change {
    let stored = pb::Stored { parent: Vec::new(), blocks: blocks.concat(), tier: 2 };
    pb::Change { change: Some(pb::change::Change::Stored(stored)) }
}

pub fn cleared() -> pb::Change {
    pb::Change { change: Some(pb::change::Change::Cleared(pb::Cleared {})) }
}

/// A prefix of `len` made-up hashes that depends on `seed`.
pub fn prefix(seed: u64, len: u64) -> Vec<HashBytes> {
    (0..len).map(|offset| BlockHash::from_words(offset + 1, seed).0).collect()
}

/// As `prefix`, in the chain with this tag.
pub fn chain(tag: u8, seed: u64, len: u64) -> Vec<HashBytes> {
    let mut blocks = prefix(seed, len);
    for block in &mut blocks {
        block[HASH_BYTES - 1] = block[0];
        block[0] = tag;
    }
    blocks
}

/// Start, length, and (node, epoch) of every holder.
pub type HolderRow = (u32, u32, Vec<(u32, u64)>);

/// The holder runs of a lookup, without its freshness.
pub fn holders(reply: &pb::LookupReply) -> Vec<HolderRow> {
    let runs = reply.runs.iter();
    runs.map(|run| {
        let holders = run.holders.iter().map(|holder| (holder.node, holder.epoch)).collect();
        (run.start_blocks, run.len_blocks, holders)
    })
    .collect()
}
