//! The suite over cards that are fakes, and what only this path has: domains, fences, links, hostile ends.
#![allow(clippy::unwrap_used)]

mod beside;
mod fences;
mod hostile;
mod layers;
mod links;
mod rails;
mod tenants;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvfleet_errors_doc::says;
use kvfleet_proto::tls::Identity;

use super::fake::Fabric;
use super::link::{Asked, Link, Local};
use super::*;
use crate::quic::tests::Authority;
use crate::room::Room;
use crate::suite::{
    self, LendingService, MemoryService, PATIENCE, Pair, fetch_request, frame, hash, hashes, in_dram,
    save_request,
};
use crate::tcp::{TcpConfig, TcpDialer, TcpServer};
use crate::{BlockService, Dialer, FetchAnswer, FetchRequest, MissReason, PathError};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Small enough that every limit is met.
fn small() -> RdmaConfig {
    RdmaConfig { local_bytes: 4 << 20, tray_bytes: 1 << 20, ..RdmaConfig::default() }
}

/// A node and what its clients need.
struct World {
    fabric: Fabric,
    server: TcpServer,
    identity: Identity,
    authority: Authority,
    offer: Arc<RdmaOffer>,
    node: Arc<Rdma>,
    client: Arc<Rdma>,
    arena: Arc<Pool>,
}

fn bind(
    identity: &Identity,
    config: &TcpConfig,
    offer: Arc<RdmaOffer>,
    service: Arc<dyn BlockService>,
) -> TcpServer {
    TcpServer::bind_offering(&Room::usual(), ANY, identity, config, offer, service).unwrap()
}

/// A node whose callers may read its arena, or not.
fn world(service: &MemoryService, maps: bool, config: &RdmaConfig) -> World {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::over(fabric.rail(number), config).unwrap());
    let memory = Arc::new(Memory::zeroed(64 << 20).unwrap());
    let offer = RdmaOffer::new(&node, Some(&memory)).unwrap();
    let arena = Pool::new(&memory, 0..memory.len_bytes());
    let lending = LendingService { inner: service.clone(), arena: Arc::clone(&arena), maps };
    let authority = Authority::new();
    let identity = authority.member();
    let server = bind(&identity, &TcpConfig::default(), Arc::clone(&offer), Arc::new(lending));
    World { fabric, server, identity, authority, offer, node, client, arena }
}

impl World {
    fn address(&self) -> String {
        self.server.local_addr().to_string()
    }

    fn dialer(&self) -> RdmaDialer {
        RdmaDialer::new(&self.client, &self.authority.member(), TcpConfig::default()).unwrap()
    }

    async fn path(&self) -> Arc<dyn crate::Path> {
        self.dialer().dial(self.address()).await.unwrap()
    }

    /// A link by itself, for a client that says what it likes.
    async fn link(&self) -> Link {
        self.link_with(&Local::new(&self.client).unwrap()).await
    }

    async fn link_with(&self, local: &Arc<Local>) -> Link {
        let tcp = TcpDialer::new(&self.authority.member(), TcpConfig::default());
        let tcp = tcp.open(&self.address()).await.unwrap();
        match Link::attach(&tcp, (local, 0), &local.rdma.flights.peer()).await.unwrap() {
            Asked::Made(link) => *link,
            Asked::None(why) | Asked::Dead(why) => panic!("{why}"),
        }
    }

    /// Returns once it is so.
    async fn until(&self, what: &str, is_so: impl Fn(&World) -> bool) {
        let looked = async {
            while !is_so(self) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, looked).await.unwrap_or_else(|_| panic!("never {what}"));
    }

    fn has(&self, line: &str) -> Option<usize> {
        self.fabric.log().iter().position(|written| written.contains(line))
    }
}

fn holding(blocks: u32, bytes: u32) -> MemoryService {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), bytes)));
    service
}

mod in_place {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> Pair {
        let world = world(&service, true, &small());
        Pair { path: world.path().await, keep: Box::new(world) }
    }

    crate::behaviour_suite!(pair);
    crate::behaviour_suite!(pair; MemoryService::default(); layers_come_one_after_the_other);
}

mod by_copy {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> Pair {
        let world = world(&service, false, &small());
        Pair { path: world.path().await, keep: Box::new(world) }
    }

    crate::behaviour_suite!(pair);
    crate::behaviour_suite!(pair; MemoryService::default(); layers_come_one_after_the_other);
}

#[tokio::test]
async fn blocks_are_read_by_the_card_and_saves_are_written_by_it() {
    let frame_bytes = frame(hash(0), 100_000).bytes.len() as u64;
    for maps in [true, false] {
        let world = world(&holding(5, 100_000), maps, &small());
        let path = world.path().await;
        let tried = (world.client.numbers().read_bytes, world.fabric.transfers().len());
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(5) });
        let read = world.client.numbers().read_bytes - tried.0;
        assert!((5 * frame_bytes..5 * frame_bytes + 64).contains(&read), "{read}");
        let more: Vec<_> = (5..12).map(hash).collect();
        suite::save(path.as_ref(), save_request(&more), 100_000).await.unwrap();
        assert_eq!(world.client.numbers().written_bytes, 7 * frame_bytes);
        assert_eq!(world.node.numbers(), RdmaNumbers::default(), "a node begins nothing");
        let (by_card, sent) = (world.offer.carried(), world.server.carried());
        assert_eq!((by_card.sent_bytes(), by_card.received_bytes()), (5 * frame_bytes, 7 * frame_bytes));
        assert_eq!((sent.sent_bytes(), sent.received_bytes()), (0, 0), "nothing went over the connection");
        // What is read in place lies in the arena; what is copied does not.
        let arena = world.arena.take(64).unwrap();
        let (low, high) = (arena.address() & !0xFFF, arena.address() + (64 << 20));
        let in_arena = |t: &&rail::Transfer| (low..high).contains(&t.remote_address);
        let transfers = world.fabric.transfers().split_off(tried.1);
        assert_eq!(transfers.iter().filter(in_arena).count(), if maps { 5 } else { 0 });
    }
}

#[tokio::test]
async fn frames_larger_than_the_memory_come_over_the_connection() {
    let config = RdmaConfig { local_bytes: 256 << 10, tray_bytes: 64 << 10, ..small() };
    for maps in [true, false] {
        let service = holding(2, 300_000);
        let world = world(&service, maps, &config);
        let path = world.path().await;
        let tried = world.client.numbers();
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(2) });
        let more: Vec<_> = (5..9).map(hash).collect();
        suite::save(path.as_ref(), save_request(&more), 300_000).await.unwrap();
        assert!(service.holds(hash(8)));
        assert_eq!(world.client.numbers(), tried);
        let (by_card, sent) = (world.offer.carried(), world.server.carried());
        assert_eq!((by_card.sent_bytes(), by_card.received_bytes()), (0, 0));
        let frame_bytes = frame(hash(0), 300_000).bytes.len() as u64;
        assert_eq!((sent.sent_bytes(), sent.received_bytes()), (2 * frame_bytes, 4 * frame_bytes));
    }
}

#[test]
fn memory_that_cannot_be_locked_says_what_to_do() {
    let fabric = Fabric::default();
    let rdma = Rdma::over(fabric.rail(1), &small()).unwrap();
    fabric.refuse_register(libc::ENOMEM);
    let error = Local::new(&rdma).err().unwrap();
    says("memory that RDMA cannot lock", &error, &["fake1", "4718592"]);
    fabric.refuse_register(libc::EINVAL);
    let error = Local::new(&rdma).err().unwrap().to_string();
    assert!(!error.contains("IPC_LOCK"), "{error}");
}

#[test]
fn what_the_library_and_the_devices_say_is_written_down() {
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
fn settings_that_no_card_takes_are_named() {
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
async fn without_a_device_every_dial_is_refused_with_the_reason() {
    let world = world(&holding(1, 100), true, &small());
    let choice = RdmaChoice { device: Some("no such device".to_owned()), ..RdmaChoice::default() };
    let nowhere = RdmaConfig { choice, ..small() };
    let dialer = RdmaDialer::late(nowhere, &world.authority.member(), TcpConfig::default());
    for _ in 0..3 {
        let error = dialer.dial(world.address()).await.err().unwrap();
        assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("RDMA is not used: no such device"), "{error}");
    }
}
