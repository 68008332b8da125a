//! The suite over cards that are fakes, and what only this path has: domains, fences, links, hostile ends.
#![allow(clippy::unwrap_used)]

mod fences;
mod hostile;
mod links;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvfleet_errors_doc::says;
use kvfleet_proto::tls::Identity;

use super::fake::Fabric;
use super::link::{Link, Local};
use super::*;
use crate::quic::tests::Authority;
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

/// A node whose callers may read its arena, or not.
fn world(service: &MemoryService, maps: bool, config: &RdmaConfig) -> World {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::over(fabric.rail(number), config).unwrap());
    let memory = Arc::new(Memory::zeroed(64 << 20).unwrap());
    let offer = RdmaOffer::new(&node, Some(Arc::clone(&memory))).unwrap();
    let arena = Pool::new(&memory, 0..memory.len_bytes());
    let lending = LendingService { inner: service.clone(), arena: Arc::clone(&arena), maps };
    let authority = Authority::new();
    let identity = authority.member();
    let server = TcpServer::bind_offering(
        ANY,
        &identity,
        &TcpConfig::default(),
        Arc::clone(&offer),
        Arc::new(lending),
    );
    let server = server.unwrap();
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
        let tcp = TcpDialer::new(&self.authority.member(), TcpConfig::default());
        let tcp = tcp.open(&self.address()).await.unwrap();
        let local = Local::new(&self.client).unwrap();
        Link::attach(&tcp, &local).await.unwrap().unwrap()
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
}

mod by_copy {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> Pair {
        let world = world(&service, false, &small());
        Pair { path: world.path().await, keep: Box::new(world) }
    }

    crate::behaviour_suite!(pair);
}

#[tokio::test]
async fn blocks_are_read_by_the_card_and_saves_are_written_by_it() {
    let frame_bytes = frame(hash(0), 100_000).bytes.len() as u64;
    for maps in [true, false] {
        let world = world(&holding(5, 100_000), maps, &small());
        let path = world.path().await;
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(5) });
        let read = world.client.numbers().read_bytes;
        assert!((5 * frame_bytes..5 * frame_bytes + 64).contains(&read), "{read}");
        let more: Vec<_> = (5..12).map(hash).collect();
        suite::save(path.as_ref(), save_request(&more), 100_000).await.unwrap();
        assert_eq!(world.client.numbers().written_bytes, 7 * frame_bytes);
        assert_eq!(world.node.numbers(), RdmaNumbers::default(), "a node begins nothing");
        // What is read in place lies in the arena; what is copied does not.
        let arena = world.arena.take(64).unwrap();
        let (low, high) = (arena.address() & !0xFFF, arena.address() + (64 << 20));
        let in_arena = |t: &&rail::Transfer| (low..high).contains(&t.remote_address);
        assert_eq!(world.fabric.transfers().iter().filter(in_arena).count(), if maps { 5 } else { 0 });
    }
}

#[tokio::test]
async fn frames_larger_than_the_memory_come_over_the_connection() {
    let config = RdmaConfig { local_bytes: 256 << 10, tray_bytes: 64 << 10, ..small() };
    for maps in [true, false] {
        let service = holding(2, 300_000);
        let world = world(&service, maps, &config);
        let path = world.path().await;
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(2) });
        let more: Vec<_> = (5..9).map(hash).collect();
        suite::save(path.as_ref(), save_request(&more), 300_000).await.unwrap();
        assert!(service.holds(hash(8)));
        assert_eq!(world.client.numbers(), RdmaNumbers::default());
    }
}

#[test]
fn memory_that_cannot_be_locked_says_what_to_do() {
    let fabric = Fabric::default();
    let rdma = Rdma::over(fabric.rail(1), &small()).unwrap();
    fabric.refuse_register(libc::ENOMEM);
    let error = Local::new(&rdma).err().unwrap();
    says("memory that RDMA cannot lock", &error, &["fake1", "4194304"]);
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
fn without_rdma_the_process_goes_on_and_says_so_once() {
    let nowhere = RdmaConfig {
        choice: RdmaChoice { device: Some("no such device".to_owned()), address: None },
        ..RdmaConfig::default()
    };
    let (once, mut said) = (Once::new(), Vec::new());
    for _ in 0..3 {
        assert!(Rdma::open_or_say(&nowhere, &once, |error| said.push(error.to_string())).is_none());
    }
    let [said] = &said[..] else { panic!("{said:?}") };
    assert!(said.starts_with("RDMA is not used: no such device"), "{said}");
}
