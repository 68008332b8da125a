//! The behaviour suite over fake cards, and tests of this path alone: domains, fences, links,
//! hostile peers.
#![allow(clippy::unwrap_used)]

mod fences;
mod hostile;
mod layers;
mod links;
mod rails;
mod secondary_links;
mod tenants;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvfleet_errors_doc::says;
use kvfleet_net::tls::{Identity, Role};
use kvfleet_transport::quic::{FETCH_BYTES_IN_FLIGHT_MAX, SAVE_BYTES_IN_FLIGHT_MAX};
use kvfleet_transport::suite::{
    MemoryService, PATIENCE, SuitePath, fetch_request, frame, hash, hashes, in_dram, save_request,
};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{
    BlockService, Capacity, Dialer, FetchAnswer, FetchRequest, MissReason, PathError, suite,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::arena_service::SharedArenaService;
use super::fake::Fabric;
use super::link::{AttachOutcome, LocalRail, RdmaLink};
use super::*;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// An authority that signs the certificates of both ends.
struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    fn new() -> TestAuthority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        TestAuthority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn member(&self) -> Identity {
        self.holder(&Role::Node(None))
    }

    fn holder(&self, role: &Role) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(role.dns_names()).unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Identity::from_pem(self.0.pem().as_bytes(), cert.pem().as_bytes(), key.serialize_pem().as_bytes())
            .unwrap()
    }
}

/// Small enough to reach every limit.
fn small() -> RdmaConfig {
    RdmaConfig { local_bytes: 4 << 20, bounce_buffer_bytes: 1 << 20, ..RdmaConfig::default() }
}

/// A node and everything that its clients need.
struct RdmaWorld {
    fabric: Fabric,
    server: TcpServer,
    identity: Identity,
    authority: TestAuthority,
    rdma_server: Arc<RdmaServer>,
    node: Arc<Rdma>,
    client: Arc<Rdma>,
    arena: Arc<RdmaBufferPool>,
}

/// A capacity that no test uses up.
fn capacity() -> Capacity {
    Capacity::new(FETCH_BYTES_IN_FLIGHT_MAX, SAVE_BYTES_IN_FLIGHT_MAX, 64 << 10)
}

fn bind(
    identity: &Identity,
    config: &TcpConfig,
    offer: Arc<RdmaServer>,
    service: Arc<dyn BlockService>,
) -> TcpServer {
    TcpServer::bind_offering(&capacity(), ANY, identity, config, offer, service).unwrap()
}

/// A node; `may_read_arena` says whether callers may read its arena.
fn world(service: &MemoryService, may_read_arena: bool, config: &RdmaConfig) -> RdmaWorld {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), config).unwrap());
    let memory = Arc::new(RdmaMemory::zeroed(64 << 20).unwrap());
    let offer = RdmaServer::new(&node, Some(&memory)).unwrap();
    let arena = RdmaBufferPool::new(&memory, 0..memory.len_bytes());
    let lending =
        SharedArenaService { inner: service.clone(), arena: Arc::clone(&arena), may_map: may_read_arena };
    let authority = TestAuthority::new();
    let identity = authority.member();
    let server = bind(&identity, &TcpConfig::default(), Arc::clone(&offer), Arc::new(lending));
    RdmaWorld { fabric, server, identity, authority, rdma_server: offer, node, client, arena }
}

impl RdmaWorld {
    fn address(&self) -> String {
        self.server.local_addr().to_string()
    }

    fn dialer(&self) -> RdmaDialer {
        RdmaDialer::new(&self.client, &self.authority.member(), TcpConfig::default()).unwrap()
    }

    async fn path(&self) -> Arc<dyn kvfleet_transport::Path> {
        self.dialer().dial(self.address()).await.unwrap()
    }

    /// A bare link, for tests that send their own messages.
    async fn link(&self) -> RdmaLink {
        self.link_with(&LocalRail::new(&self.client).unwrap()).await
    }

    async fn link_with(&self, local: &Arc<LocalRail>) -> RdmaLink {
        let tcp = TcpDialer::new(&self.authority.member(), TcpConfig::default());
        let tcp = tcp.open(&self.address()).await.unwrap();
        match RdmaLink::attach(&tcp, local, 0, &local.rdma.transfers.peer_limit()).await.unwrap() {
            AttachOutcome::Attached(link) => *link,
            AttachOutcome::Unavailable(why) | AttachOutcome::Unreachable(why) => panic!("{why}"),
        }
    }

    /// Returns once the condition holds.
    async fn wait_until(&self, what: &str, is_so: impl Fn(&RdmaWorld) -> bool) {
        let looked = async {
            while !is_so(self) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, looked)
            .await
            .unwrap_or_else(|_| panic!("timed out waiting until {what}"));
    }

    fn log_position(&self, line: &str) -> Option<usize> {
        self.fabric.log().iter().position(|written| written.contains(line))
    }
}

fn service_with_blocks(blocks: u32, bytes: u32) -> MemoryService {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), bytes)));
    service
}

mod in_place {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> SuitePath {
        let world = world(&service, true, &small());
        SuitePath { path: world.path().await, keep: Box::new(world) }
    }

    kvfleet_transport::behaviour_suite!(pair);
    kvfleet_transport::behaviour_suite!(pair; MemoryService::default(); layers_come_one_after_the_other);
}

mod by_copy {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> SuitePath {
        let world = world(&service, false, &small());
        SuitePath { path: world.path().await, keep: Box::new(world) }
    }

    kvfleet_transport::behaviour_suite!(pair);
    kvfleet_transport::behaviour_suite!(pair; MemoryService::default(); layers_come_one_after_the_other);
}

#[tokio::test]
async fn cards_read_blocks_and_write_saves() {
    let frame_bytes = frame(hash(0), 100_000).bytes.len() as u64;
    for maps in [true, false] {
        let world = world(&service_with_blocks(5, 100_000), maps, &small());
        let path = world.path().await;
        let tried = (world.client.stats().read_bytes, world.fabric.transfers().len());
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(5) });
        let read = world.client.stats().read_bytes - tried.0;
        assert!((5 * frame_bytes..5 * frame_bytes + 64).contains(&read), "{read}");
        let more: Vec<_> = (5..12).map(hash).collect();
        suite::save(path.as_ref(), save_request(&more), 100_000).await.unwrap();
        assert_eq!(world.client.stats().written_bytes, 7 * frame_bytes);
        assert_eq!(world.node.stats(), RdmaStats::default(), "a node starts no transfers");
        let (by_card, sent) = (world.rdma_server.carried(), world.server.traffic());
        assert_eq!((by_card.sent_bytes(), by_card.received_bytes()), (5 * frame_bytes, 7 * frame_bytes));
        assert_eq!((sent.sent_bytes(), sent.received_bytes()), (0, 0), "no block used the connection");
        // Blocks read in place are in the arena; copied ones are not.
        let arena = world.arena.take(64).unwrap();
        let (low, high) = (arena.address() & !0xFFF, arena.address() + (64 << 20));
        let in_arena = |t: &&rail::Transfer| (low..high).contains(&t.remote_address);
        let transfers = world.fabric.transfers().split_off(tried.1);
        assert_eq!(transfers.iter().filter(in_arena).count(), if maps { 5 } else { 0 });
    }
}

#[tokio::test]
async fn frames_larger_than_registered_memory_use_the_connection() {
    let config = RdmaConfig { local_bytes: 256 << 10, bounce_buffer_bytes: 64 << 10, ..small() };
    for maps in [true, false] {
        let service = service_with_blocks(2, 300_000);
        let world = world(&service, maps, &config);
        let path = world.path().await;
        let tried = world.client.stats();
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(2) });
        let more: Vec<_> = (5..9).map(hash).collect();
        suite::save(path.as_ref(), save_request(&more), 300_000).await.unwrap();
        assert!(service.holds(hash(8)));
        assert_eq!(world.client.stats(), tried);
        let (by_card, sent) = (world.rdma_server.carried(), world.server.traffic());
        assert_eq!((by_card.sent_bytes(), by_card.received_bytes()), (0, 0));
        let frame_bytes = frame(hash(0), 300_000).bytes.len() as u64;
        assert_eq!((sent.sent_bytes(), sent.received_bytes()), (2 * frame_bytes, 4 * frame_bytes));
    }
}

#[test]
fn the_error_for_unlockable_memory_names_the_remedy() {
    let fabric = Fabric::default();
    let rdma = Rdma::from_rail(fabric.rail(1), &small()).unwrap();
    fabric.refuse_register(libc::ENOMEM);
    let error = LocalRail::new(&rdma).err().unwrap();
    says("memory that RDMA cannot lock", &error, &["fake1", "4718592"]);
    fabric.refuse_register(libc::EINVAL);
    let error = LocalRail::new(&rdma).err().unwrap().to_string();
    assert!(!error.contains("IPC_LOCK"), "{error}");
}

#[test]
fn library_and_device_errors_are_documented() {
    says(
        "RDMA without its library",
        &RdmaError::Library { cause: "no such file".to_owned() },
        &["no such file"],
    );
    let refused = RdmaError::Device {
        device: "mlx5_0".to_owned(),
        what: "opened",
        cause: io::Error::from_raw_os_error(libc::EACCES),
    };
    says("an RDMA device that may not be opened", &refused, &["mlx5_0", "opened"]);
}

#[test]
fn invalid_settings_are_named() {
    let wrong = |change: fn(&mut RdmaTuning)| {
        let mut config = RdmaConfig::default();
        change(&mut config.tuning);
        Rdma::open(&config).err().unwrap()
    };
    says("an RDMA setting that no card takes", &wrong(|tuning| tuning.retries = 8), &[]);
    let changes: [fn(&mut RdmaTuning); 5] = [
        |tuning| tuning.in_flight_max = 0,
        |tuning| tuning.queue_in_flight_max = 0,
        |tuning| tuning.reads_at_once = 0,
        |tuning| tuning.ack_timeout = 0,
        |tuning| tuning.ack_timeout = 32,
    ];
    for change in changes {
        assert!(matches!(wrong(change), RdmaError::Setting { .. }));
    }
}

#[tokio::test]
async fn dials_without_a_device_are_refused_with_the_reason() {
    let world = world(&service_with_blocks(1, 100), true, &small());
    let choice = RdmaChoice { device: Some("no such device".to_owned()), ..RdmaChoice::default() };
    let nowhere = RdmaConfig { choice, ..small() };
    let dialer = RdmaDialer::lazy(nowhere, &world.authority.member(), TcpConfig::default());
    for _ in 0..3 {
        let error = dialer.dial(world.address()).await.err().unwrap();
        assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("RDMA is not used: no such device"), "{error}");
    }
}
