//! RDMA over a real device: bare transfers, the behaviour suite, and failures.
//!
//! Skipped with a message if there is no device. `scripts/rdma` runs this on a machine with one, or
//! in a virtual machine that emulates two. Not here: tests that need only fakes (`src/tests`).
#![allow(clippy::unwrap_used)]

mod layers;
mod perftest;
mod rails;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::frame::Frame;
use kvfleet_rdma::arena_service::SharedArenaService;
use kvfleet_rdma::gpu::{AddressRange, DmaBufExport};
use kvfleet_rdma::probe::{self, Probe};
use kvfleet_rdma::{
    Rdma, RdmaBufferPool, RdmaChoice, RdmaConfig, RdmaDialer, RdmaMemory, RdmaServer, RdmaTuning,
};
use kvfleet_transport::suite::{self, MemoryService, SuitePath};
use kvfleet_transport::tcp::{TcpConfig, TcpServer};
use kvfleet_transport::{Capacity, Dialer, Path, PathError, SaveRequest};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const MIB: u32 = 1 << 20;

fn is_emulated() -> bool {
    std::env::var_os("RDMA_VM").is_some()
}

/// Whether a device is expected here: then an unusable one is a failure, not a reason to skip.
fn is_device_expected() -> bool {
    let listed = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some());
    listed || std::env::var_os("KVFLEET_RDMA_DEVICE").is_some()
}

/// The address in an environment variable, which selects the port of one end.
fn address(name: &str) -> Option<IpAddr> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn config(address: Option<IpAddr>) -> RdmaConfig {
    let device = std::env::var("KVFLEET_RDMA_DEVICE").ok();
    // Emulated devices answer slowly.
    let ack_timeout = if is_emulated() { 19 } else { RdmaTuning::default().ack_timeout };
    RdmaConfig {
        choice: RdmaChoice { device, address, ..RdmaChoice::default() },
        tuning: RdmaTuning { ack_timeout, ..RdmaTuning::default() },
        local_bytes: 48 << 20,
        bounce_buffer_bytes: 4 << 20,
        ..RdmaConfig::default()
    }
}

/// Both ends: the node's device, and the client's.
struct Devices {
    node: Arc<Rdma>,
    client: Arc<Rdma>,
}

/// The devices; `None`, with a message, if there are none.
fn devices() -> Option<Devices> {
    let open = |address| match Rdma::open(&config(address)) {
        Ok(rdma) => Some(rdma),
        Err(error) if is_emulated() || is_device_expected() => panic!("{error}"),
        Err(error) => {
            println!("skipped: no RDMA device: {error}");
            None
        }
    };
    Some(Devices { node: open(address("RDMA_VM_IP0"))?, client: open(address("RDMA_VM_IP1"))? })
}

/// Data that a client needs to reach a node in another process.
struct Invitation {
    address: String,
    /// Its authority, certificate and key.
    pem: [String; 3],
}

impl Invitation {
    fn write(&self) -> String {
        [&[self.address.clone()][..], &self.pem].concat().join("\n=\n")
    }

    fn read(text: &str) -> Invitation {
        let parts: Vec<String> = text.split("\n=\n").map(str::to_owned).collect();
        let [address, ca, cert, key] = parts.try_into().unwrap();
        Invitation { address, pem: [ca, cert, key] }
    }

    async fn path(&self, client: &Arc<Rdma>) -> Arc<dyn Path> {
        let [ca, cert, key] = self.pem.each_ref().map(|pem| pem.as_bytes());
        let identity = Identity::from_pem(ca, cert, key).unwrap();
        let dialer = RdmaDialer::new(client, &identity, tcp()).unwrap();
        dialer.dial(self.address.clone()).await.unwrap()
    }
}

struct VerbsAuthority(CertifiedIssuer<'static, KeyPair>);

impl VerbsAuthority {
    fn new() -> VerbsAuthority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        VerbsAuthority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> [String; 3] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(Role::Node(None).dns_names()).unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        [self.0.pem(), cert.pem(), key.serialize_pem()]
    }

    fn member(&self) -> Identity {
        let [ca, cert, key] = self.pem();
        Identity::from_pem(ca.as_bytes(), cert.as_bytes(), key.as_bytes()).unwrap()
    }
}

/// Connection settings with the timeouts that emulation needs.
fn tcp() -> TcpConfig {
    let patience = Duration::from_secs(60);
    TcpConfig {
        silence_max: patience,
        dial_timeout: patience,
        stall_timeout: patience,
        ..TcpConfig::default()
    }
}

/// An arena of blocks, and a server that grants them.
fn serve(
    node: &Arc<Rdma>,
    at: IpAddr,
    identity: &Identity,
    service: &MemoryService,
    may_read_arena: bool,
) -> (TcpServer, Arc<RdmaBufferPool>) {
    let arena = Arc::new(RdmaMemory::zeroed(64 << 20).unwrap());
    let pool = RdmaBufferPool::new(&arena, 0..arena.len_bytes());
    let lending =
        SharedArenaService { inner: service.clone(), arena: Arc::clone(&pool), may_map: may_read_arena };
    let offer = RdmaServer::new(node, Some(&arena)).unwrap();
    let any = SocketAddr::from((at, 0));
    let room = Capacity::new(1 << 30, 512 << 20, 2 << 20);
    (TcpServer::bind_offering(&room, any, identity, &tcp(), offer, Arc::new(lending)).unwrap(), pool)
}

async fn pair(devices: &Devices, service: &MemoryService, maps: bool) -> SuitePath {
    let authority = VerbsAuthority::new();
    let (server, _) = serve(&devices.node, Ipv4Addr::LOCALHOST.into(), &authority.member(), service, maps);
    let dialer = RdmaDialer::new(&devices.client, &authority.member(), tcp()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    SuitePath { path, keep: Box::new((server, dialer)) }
}

/// Runs cases of the suite twice: with blocks read in place, and copied.
macro_rules! suite {
    ($($case:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let Some(devices) = devices() else { return };
                for maps in [true, false] {
                    let service = MemoryService::default();
                    let pair = pair(&devices, &service, maps).await;
                    suite::cases::$case(&service, pair.path.as_ref()).await;
                }
            }
        )*
    };
}

suite!(
    fetch_hit,
    fetch_partial,
    fetch_miss,
    fetch_busy,
    fetch_of_nothing,
    fetch_many_blocks,
    fetch_big_block,
    fetch_stale_epoch,
    fetch_over_the_end_of_an_epoch,
    fetch_ends_early,
    fetch_ends_with_a_reason,
    deadline_before_any_block,
    deadline_between_frames,
    save_takes_the_wanted,
    save_refused,
    save_busy,
    aborted_save_leaves_nothing,
    release_reaches_the_node,
    operations_run_side_by_side,
    ping_answers,
    layers_of_all_blocks,
    layers_of_a_range,
    layers_of_what_is_held,
    layers_that_are_late,
    layers_over_the_end_of_an_epoch,
    layers_that_are_wrong,
    layers_of_a_frame_without_a_head,
    layers_come_one_after_the_other,
);

fn pattern(bytes: u32) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[tokio::test]
async fn bare_reads_and_writes_move_the_right_bytes() {
    let Some(devices) = devices() else { return };
    let probe = Probe::new(&devices.client, &devices.node, 16 << 20).unwrap();
    let bytes = pattern(3 * MIB);
    probe.write_remote(64, &bytes);
    assert_eq!(probe.read(64, 3 * MIB).await.unwrap(), bytes);
    probe.write(4096, &bytes[1..]).await.unwrap();
    assert_eq!(probe.remote_bytes(4096, bytes.len() - 1), &bytes[1..]);
    for depth in [1, 4, 16] {
        let took = probe.read_many(MIB, depth, 16).await.unwrap();
        let rate = 16.0 * f64::from(MIB) / took.as_secs_f64() / 1e9;
        println!("bare READ 1 MiB, {depth} at once: {rate:.4} GB/s");
    }
}

/// Stores blocks of 1 MiB in the node's arena.
fn hold_in_arena(service: &MemoryService, arena: &Arc<RdmaBufferPool>, blocks: u32) {
    for number in 0..blocks {
        let frame = suite::frame(suite::hash(number), MIB);
        let mut place = arena.take(u32::try_from(frame.bytes.len()).unwrap()).unwrap();
        place.write(&frame.bytes);
        service.hold(Frame { bytes: place.freeze(), ..frame });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_a_mebibyte_are_moved_by_the_card() {
    const BLOCKS: u32 = 16;
    let Some(devices) = devices() else { return };
    let service = MemoryService::default();
    let authority = VerbsAuthority::new();
    let here = Ipv4Addr::LOCALHOST.into();
    let (server, arena) = serve(&devices.node, here, &authority.member(), &service, true);
    hold_in_arena(&service, &arena, BLOCKS);
    let dialer = RdmaDialer::new(&devices.client, &authority.member(), tcp()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let hashes = suite::hashes(BLOCKS);
    suite::fetch(path.as_ref(), suite::fetch_request(&hashes)).await.unwrap();
    // Alternating, so that both see the same load of a shared machine.
    let probe = Probe::new(&devices.client, &devices.node, 16 << 20).unwrap();
    let (mut bare, mut fetched) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let took = probe.read_many(MIB, 8, BLOCKS as usize).await.unwrap();
        bare.push(f64::from(BLOCKS * MIB) / took.as_secs_f64() / 1e9);
        let before = devices.client.stats();
        let mut frames = 0;
        let mut count = |_| frames += 1;
        let began = Instant::now();
        path.fetch(suite::fetch_request(&hashes), &mut count).await.unwrap();
        fetched.push(f64::from(BLOCKS * MIB) / began.elapsed().as_secs_f64() / 1e9);
        let read = devices.client.stats().read_bytes - before.read_bytes;
        assert!(frames == BLOCKS && read > u64::from(BLOCKS * MIB), "{read} bytes were read by the card");
    }
    for (what, rates) in [("bare READ, 8 at once", &mut bare), ("fetch", &mut fetched)] {
        rates.sort_by(f64::total_cmp);
        println!(
            "{BLOCKS} blocks of 1 MiB, {what}: {:.4} GB/s ({:.4} to {:.4})",
            rates[2], rates[0], rates[4]
        );
    }
    let saved: Vec<_> = (100..100 + BLOCKS).map(suite::hash).collect();
    let request = SaveRequest { frame_bytes: 2 << 20, ..suite::save_request(&saved) };
    let written_before = devices.client.stats().written_bytes;
    let frames: Vec<Frame> = saved.iter().map(|hash| suite::frame(*hash, MIB)).collect();
    let began = Instant::now();
    path.save(request, &|position| frames[position].clone()).await.unwrap();
    let (took, written) = (began.elapsed(), devices.client.stats().written_bytes - written_before);
    assert!(saved.iter().all(|hash| service.holds(*hash)) && written > u64::from(BLOCKS * MIB));
    println!("save of {BLOCKS} blocks of 1 MiB: {:.4} GB/s", written as f64 / took.as_secs_f64() / 1e9);
    assert_eq!(devices.client.stats().failed, 0);
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_breaks_its_queue_pair() {
    let Some(devices) = devices() else { return };
    let probe = Probe::new(&devices.client, &devices.node, 1 << 20).unwrap();
    assert_eq!(probe.read(0, 64).await.unwrap(), [0; 64]);
    let error = probe.read_with_wrong_key().await.unwrap_err();
    assert!(error.contains("remote access error"), "{error}");
    let error = probe.read(0, 64).await.unwrap_err();
    assert!(error.contains("an earlier transfer of its queue pair failed"), "{error}");
}

#[tokio::test]
async fn a_key_of_another_domain_is_refused() {
    let Some(devices) = devices() else { return };
    let probes = || Probe::new(&devices.client, &devices.node, 1 << 20).unwrap();
    let (own, other) = (probes(), probes());
    other.write_remote(0, b"another connection's");
    assert!(other.read(0, 64).await.unwrap().starts_with(b"another connection's"), "the key must be valid");
    let error = own.read_from(&other).await.unwrap_err();
    assert!(error.contains("remote access error"), "{error}");
}

#[tokio::test]
async fn bytes_behind_registered_memory_cannot_be_read() {
    let Some(devices) = devices() else { return };
    let probe = Probe::new(&devices.client, &devices.node, 1 << 20).unwrap();
    let error = probe.read((1 << 20) - 32, 64).await.unwrap_err();
    assert!(error.contains("remote access error"), "{error}");
}

/// Once a queue pair is destroyed, its memory has another owner: no byte may change there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_left_alone_once_the_queue_pair_has_ended() {
    let Some(devices) = devices() else { return };
    for _ in 0..4 {
        let probe = Probe::new(&devices.client, &devices.node, 8 << 20).unwrap();
        let bytes = vec![0xAA; 4 << 20];
        // The card retries to a dead peer for many seconds; the rest of the write is not waited
        // for.
        let write = async {
            let _ = probe.write(0, &bytes).await;
            std::future::pending::<()>().await;
        };
        let ended = async {
            // Some bytes have arrived, and most are in flight.
            while probe.remote_bytes(0, 1) == [0] {
                tokio::task::yield_now().await;
            }
            probe.kill_peer().unwrap();
            probe.write_remote(0, &vec![0x55; 8 << 20]);
            let later = Instant::now() + Duration::from_millis(300);
            while Instant::now() < later {
                assert!(
                    probe.remote_bytes(0, 8 << 20).iter().all(|byte| *byte == 0x55),
                    "a write arrived after the end"
                );
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = ended => {}
            () = write => {}
        }
    }
}

#[tokio::test]
async fn deregistered_memory_cannot_be_read() {
    let Some(devices) = devices() else { return };
    let mut probe = Probe::new(&devices.client, &devices.node, 1 << 20).unwrap();
    assert!(probe.read(0, 64).await.is_ok());
    probe.deregister_remote();
    let error = probe.read(0, 64).await.unwrap_err();
    assert!(error.contains("remote access error"), "{error}");
}

#[test]
fn a_card_that_cannot_register_gpu_memory_says_so() {
    let Some(devices) = devices() else { return };
    if !is_emulated() {
        return println!("skipped: support of this card is not known");
    }
    let file = std::fs::File::open("/dev/null").unwrap().into();
    let range = AddressRange { address: 0x10_0000, len: 4096, allocation: Arc::new(()) };
    let refused =
        probe::register_dmabuf(&devices.node, &range, &DmaBufExport { file, offset: 0 }).unwrap_err();
    println!("dma-buf: {refused}");
    // EOPNOTSUPP or EINVAL; `gpu::register` then tries the next method.
    assert!(matches!(refused.raw_os_error(), Some(95 | 22)), "{refused}");
}

#[tokio::test]
async fn a_destroyed_peer_queue_pair_is_detected() {
    let Some(_) = devices() else { return };
    let quick = |name| {
        let config = config(address(name));
        let tuning = RdmaTuning { ack_timeout: 16, retries: 2, ..config.tuning };
        Rdma::open(&RdmaConfig { tuning, ..config }).unwrap()
    };
    let probe = Probe::new(&quick("RDMA_VM_IP1"), &quick("RDMA_VM_IP0"), 1 << 20).unwrap();
    probe.kill_peer().unwrap();
    let error = probe.read(0, 64).await.unwrap_err();
    assert!(error.contains("the peer does not answer"), "{error}");
}

/// The node of [`a_node_killed_during_a_fetch_is_detected`], when that test starts this program
/// again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_process() {
    let Some(file) = std::env::var_os("KVFLEET_VERBS_INVITATION") else { return };
    let node = Rdma::open(&config(address("RDMA_VM_IP0"))).unwrap();
    let (service, authority) = (MemoryService::default(), VerbsAuthority::new());
    let here = Ipv4Addr::LOCALHOST.into();
    let (server, arena) = serve(&node, here, &authority.member(), &service, true);
    hold_in_arena(&service, &arena, 4);
    service.set_gate(2);
    let invitation = Invitation { address: server.local_addr().to_string(), pem: authority.pem() };
    let half = std::path::Path::new(&file).with_extension("half");
    std::fs::write(&half, invitation.write()).unwrap();
    std::fs::rename(&half, &file).unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_during_a_fetch_is_detected() {
    let Some(devices) = devices() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("invitation");
    let mut node = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "node_process", "--nocapture"])
        .env("KVFLEET_VERBS_INVITATION", &file)
        .spawn()
        .unwrap();
    while !file.exists() {
        assert!(node.try_wait().unwrap().is_none(), "the node ended by itself");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let invitation = Invitation::read(&std::fs::read_to_string(&file).unwrap());
    let path = invitation.path(&devices.client).await;
    let mut frames = Vec::new();
    let (first, came) = tokio::sync::oneshot::channel();
    let mut first = Some(first);
    let mut sink = |frame: Frame| {
        frames.push(frame);
        if let Some(first) = first.take() {
            first.send(()).unwrap();
        }
    };
    let hashes = suite::hashes(4);
    let fetch = path.fetch(suite::fetch_request(&hashes), &mut sink);
    let kill = async {
        came.await.unwrap();
        node.kill().unwrap();
        node.wait().unwrap();
    };
    let (answer, ()) = tokio::join!(fetch, kill);
    let answer = answer.unwrap();
    println!("{answer:?}");
    assert!((1..=2).contains(&answer.tiers().len()), "delivered blocks must count: {answer:?}");
    for (frame, hash) in frames.iter().zip(&hashes) {
        frame.verify(suite::IDENTITY, *hash).unwrap();
    }
    let error =
        path.fetch(suite::fetch_request(&hashes), &mut |_| panic!("of a dead node")).await.unwrap_err();
    assert!(matches!(error, PathError::Broken { .. } | PathError::Unreachable { .. }), "{error}");
}

/// Port at which two machines exchange certificates.
const MEETING_PORT: u16 = 7471;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_machines() {
    if std::env::var("RDMA_VM_COUNT").as_deref() != Ok("2") {
        return println!("skipped: this is for two machines (scripts/rdma --vms 2)");
    }
    let node_address = address("RDMA_VM_IP0").unwrap();
    if std::env::var("RDMA_VM_ID").as_deref() == Ok("0") {
        let node = Rdma::open(&config(Some(node_address))).unwrap();
        let (service, authority) = (MemoryService::default(), VerbsAuthority::new());
        let (server, arena) = serve(&node, node_address, &authority.member(), &service, true);
        hold_in_arena(&service, &arena, 16);
        let invitation = Invitation { address: server.local_addr().to_string(), pem: authority.pem() };
        let meeting = tokio::net::TcpListener::bind((node_address, MEETING_PORT)).await.unwrap();
        let (mut client, _) = meeting.accept().await.unwrap();
        let text = invitation.write();
        client.write_all(&u32::try_from(text.len()).unwrap().to_le_bytes()).await.unwrap();
        client.write_all(text.as_bytes()).await.unwrap();
        let mut over = Vec::new();
        client.read_to_end(&mut over).await.unwrap();
        assert_eq!(over, b"over", "the client ended well");
        return assert!((100..116).all(|number| service.holds(suite::hash(number))));
    }
    let client = Rdma::open(&config(address("RDMA_VM_IP1"))).unwrap();
    let mut meeting = loop {
        match tokio::net::TcpStream::connect((node_address, MEETING_PORT)).await {
            Ok(meeting) => break meeting,
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    };
    let mut len = [0; 4];
    meeting.read_exact(&mut len).await.unwrap();
    let mut text = vec![0; u32::from_le_bytes(len) as usize];
    meeting.read_exact(&mut text).await.unwrap();
    let path = Invitation::read(std::str::from_utf8(&text).unwrap()).path(&client).await;
    for _ in 0..3 {
        let hit = suite::fetch(path.as_ref(), suite::fetch_request(&suite::hashes(16))).await.unwrap();
        assert_eq!(hit.tiers().len(), 16);
    }
    let saved: Vec<_> = (100..116).map(suite::hash).collect();
    suite::save(path.as_ref(), suite::save_request(&saved), MIB / 2).await.unwrap();
    println!("between two machines: {:?}", client.stats());
    assert!(client.stats().read_bytes > u64::from(48 * MIB) && client.stats().failed == 0);
    meeting.write_all(b"over").await.unwrap();
}
