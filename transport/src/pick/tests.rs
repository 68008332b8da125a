//! The suite over picked paths, and picking: over fakes whose speed and health a test sets, and over both network paths.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use kv_core::id::LeaseId;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::tls::Identity;
use tokio::task::yield_now;

use super::*;
use crate::loopback::Loopback;
use crate::quic::tests::Authority;
use crate::quic::{QuicConfig, QuicDialer, QuicServer};
use crate::suite::{
    self, Computed, MemoryService, PATIENCE, Pair, fetch_request, frame, hash, hashes, in_dram, save_request,
};
use crate::tcp::{TcpConfig, TcpDialer, TcpServer};
use crate::{
    BlockService, BoxFuture, FetchAnswer, FetchRequest, LayerSource, MissReason, Path, PathError, SaveAnswer,
    SaveRequest, Streamed, behaviour_suite,
};

mod unheard;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Both servers of a node at one port.
fn serve(identity: &Identity, service: &Arc<dyn BlockService>) -> (QuicServer, TcpServer) {
    loop {
        let quic = QuicServer::bind(ANY, identity, Arc::clone(service)).unwrap();
        if let Ok(tcp) = TcpServer::bind(quic.local_addr(), identity, Arc::clone(service)) {
            return (quic, tcp);
        }
    }
}

fn both(identity: &Identity, rules: PickRules) -> PickDialer {
    let quic = Arc::new(QuicDialer::new(identity, QuicConfig::default()));
    let tcp = Arc::new(TcpDialer::new(identity, TcpConfig::default()));
    let quic = Candidate { kind: PathKind::Quic, dialer: quic };
    PickDialer::new(quic, vec![Candidate { kind: PathKind::Tcp, dialer: tcp }], rules)
}

async fn pair(service: Arc<dyn BlockService>) -> Pair {
    let authority = Authority::new();
    let servers = serve(&authority.member(), &service);
    let dialer = both(&authority.member(), PickRules::default());
    let path = dialer.dial(servers.0.local_addr().to_string()).await.unwrap();
    Pair { path, keep: Box::new((servers, dialer)) }
}

behaviour_suite!(pair);
behaviour_suite!(pair; MemoryService::default(); layers_come_one_after_the_other, slices_leave_before_the_last_layer);

fn holding(blocks: u32) -> MemoryService {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), 4000)));
    service
}

/// A way over the loopback whose operations take a time and fail when a test says so. Counts what goes over it.
#[derive(Clone)]
struct Fake {
    network: Loopback,
    /// Microseconds of an operation.
    takes: Arc<AtomicU64>,
    /// What dials and operations say in place of doing anything.
    error: Arc<Mutex<Option<PathError>>>,
    /// What fetches meet before they are answered, or behind it.
    meets: Arc<Mutex<Meets>>,
    /// Whether saves are to come whole.
    is_whole: Arc<AtomicBool>,
    dials: Arc<AtomicUsize>,
    fetches: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Meets {
    Nothing,
    /// The node is not heard, as far as fetches go.
    Silence,
    /// The node says that they are to come, and nothing does.
    Delay,
}

impl Fake {
    fn new(service: &MemoryService) -> Fake {
        let network = Loopback::default();
        network.serve("node:1", Arc::new(service.clone()));
        Fake {
            network,
            takes: Arc::default(),
            error: Arc::default(),
            meets: Arc::new(Mutex::new(Meets::Nothing)),
            is_whole: Arc::default(),
            dials: Arc::default(),
            fetches: Arc::default(),
        }
    }

    fn candidate(&self, kind: PathKind) -> Candidate {
        Candidate { kind, dialer: Arc::new(self.clone()) }
    }

    fn fail(&self, is_failing: bool) {
        let (peer, cause) = ("node:1".to_owned(), "so the test says".to_owned());
        *self.error.lock().unwrap() = is_failing.then_some(PathError::Broken { peer, cause });
    }

    fn meet(&self, meets: Meets) {
        *self.meets.lock().unwrap() = meets;
    }

    fn fetches(&self) -> usize {
        self.fetches.load(Ordering::Relaxed)
    }

    async fn work(&self) -> Result<(), PathError> {
        let takes = Duration::from_micros(self.takes.load(Ordering::Relaxed));
        tokio::time::sleep(takes).await; // on a clock that the test holds
        self.error.lock().unwrap().clone().map_or(Ok(()), Err)
    }
}

struct FakePath {
    fake: Fake,
    path: Arc<dyn Path>,
}

impl Dialer for Fake {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            self.dials.fetch_add(1, Ordering::Relaxed);
            self.work().await?;
            let path = self.network.dial(address).await?;
            Ok(Arc::new(FakePath { fake: self.clone(), path }) as Arc<dyn Path>)
        })
    }
}

impl Path for FakePath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            self.fake.fetches.fetch_add(1, Ordering::Relaxed);
            request.progress.asked();
            let meets = *self.fake.meets.lock().unwrap();
            if meets == Meets::Delay {
                request.progress.answered();
            }
            if meets != Meets::Nothing {
                tokio::time::sleep(request.deadline).await; // on a clock that the test holds
                return Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
            }
            self.fake.work().await?;
            self.path.fetch(request, sink).await
        })
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move {
            self.fake.work().await?;
            self.path.save(request, source).await
        })
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<Streamed, PathError>> {
        Box::pin(async move {
            let streams = self.streams_saves();
            if streams { self.path.save_layers(request, layers).await } else { Ok(Streamed::Nothing) }
        })
    }

    fn streams_saves(&self) -> bool {
        !self.fake.is_whole.load(Ordering::Relaxed)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async move {
            self.fake.work().await?;
            self.path.release(lease).await
        })
    }

    fn failure(&self) -> Option<PathError> {
        self.path.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async move {
            let begun = tokio::time::Instant::now();
            self.fake.work().await?;
            Ok(begun.elapsed())
        })
    }
}

/// Two fakes to one node, picked from.
struct Two {
    quic: Fake,
    tcp: Fake,
    dialer: PickDialer,
}

impl Two {
    fn new(service: &MemoryService) -> Two {
        let (quic, tcp) = (Fake::new(service), Fake::new(service));
        let others = vec![tcp.candidate(PathKind::Tcp)];
        let dialer = PickDialer::new(quic.candidate(PathKind::Quic), others, PickRules::default());
        Two { quic, tcp, dialer }
    }

    async fn dial(&self) -> Arc<dyn Path> {
        self.dialer.dial("node:1".to_owned()).await.unwrap()
    }

    fn report(&self) -> PeerReport {
        self.dialer.reports().pop().unwrap()
    }

    /// Dials, and waits until the other way was opened behind it.
    async fn dial_both(&self) -> Arc<dyn Path> {
        let path = self.dial().await;
        while self.tcp.dials.load(Ordering::Relaxed) == 0 {
            yield_now().await;
        }
        tokio::time::sleep(Duration::from_millis(10)).await; // on the test's clock
        path
    }
}

async fn fetch_both(path: &dyn Path) -> Result<FetchAnswer, PathError> {
    suite::fetch(path, fetch_request(&hashes(2))).await
}

fn hit() -> FetchAnswer {
    FetchAnswer::Hit { tiers: in_dram(2) }
}

#[tokio::test(start_paused = true)]
async fn the_default_is_used_until_another_way_was_clearly_better() {
    let two = Two::new(&holding(2));
    // In whole milliseconds, as the runtime's clock goes.
    two.quic.takes.store(8_000, Ordering::Relaxed);
    two.tcp.takes.store(4_000, Ordering::Relaxed);
    let path = two.dial_both().await;
    for _ in 0..50 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!((two.quic.fetches(), two.tcp.fetches()), (50, 0));
    assert_eq!((two.report().used, two.report().reason), (PathKind::Quic, Reason::Default));
    for _ in 0..10_000 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    let report = two.report();
    assert_eq!(report.used, PathKind::Tcp, "{report}");
    let Reason::Compared(last) = report.reason else { panic!("{:?}", report.reason) };
    assert_eq!(last.used.0, PathKind::Tcp);
    assert!(two.tcp.fetches() > 5_000, "{} {}", two.quic.fetches(), two.tcp.fetches());
    let [quic, tcp] = &report.paths[..] else { panic!() };
    assert!(quic.latency.unwrap() > tcp.latency.unwrap() && tcp.fetches > quic.fetches, "{report:?}");
    let all: u64 = two.dialer.carried().iter().map(|(_, carried)| carried.received_bytes()).sum();
    assert_eq!(all, 10_050 * 2 * frame(hash(0), 4000).bytes.len() as u64);
}

#[tokio::test(start_paused = true)]
async fn a_way_whose_fetches_are_given_up_before_anything_came_is_left_for_another() {
    let two = Two::new(&holding(2));
    [&two.quic, &two.tcp].iter().for_each(|way| way.takes.store(4_000, Ordering::Relaxed));
    let path = two.dial_both().await;
    for _ in 0..2_000 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!(two.report().used, PathKind::Quic, "neither is better");
    // From here on its callers have computed the blocks before any byte comes.
    two.quic.takes.store(3_600_000_000, Ordering::Relaxed);
    let mut given_up = 0;
    while two.report().used == PathKind::Quic {
        let came = tokio::time::timeout(Duration::from_millis(100), fetch_both(&*path)).await;
        given_up += u32::from(came.is_err());
        assert!(given_up < 5, "{}", two.report());
    }
    assert!(given_up > 0);
    assert_eq!(fetch_both(&*path).await.unwrap(), hit(), "over the other");
    assert_eq!(two.report().reason, Reason::StandsIn { other: PathKind::Quic });
}

#[tokio::test(start_paused = true)]
async fn a_fetch_that_one_way_refuses_goes_another_way_and_a_broken_way_is_left_alone_for_a_time() {
    let two = Two::new(&holding(2));
    let path = two.dial_both().await;
    two.quic.fail(true);
    for _ in 0..20 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!(two.quic.fetches(), 3, "then its breaker opens");
    let report = two.report();
    assert!(report.paths[0].is_left_alone && !report.paths[1].is_left_alone, "{report}");
    assert!(report.to_string().contains("left alone, last failure: connection to node:1 broke"), "{report}");
    path.ping().await.unwrap();
    path.release(LeaseId(1)).await.unwrap();
    two.quic.fail(false);
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(two.quic.fetches(), 4, "a sign of life closed it, and it is the default");
}

#[tokio::test(start_paused = true)]
async fn a_fetch_says_over_what_it_went() {
    let two = Two::new(&holding(2));
    let path = two.dial_both().await;
    let request = fetch_request(&hashes(2));
    assert_eq!(request.progress.kind(), None);
    let mut over = Vec::new();
    while two.tcp.fetches() < 12 {
        let request = fetch_request(&hashes(2));
        let (progress, before) = (request.progress.clone(), two.tcp.fetches());
        assert_eq!(suite::fetch(&*path, request).await.unwrap(), hit());
        assert_eq!(progress.kind() == Some(PathKind::Tcp), two.tcp.fetches() > before, "in a turn too");
        over.push(progress.kind());
        tokio::time::sleep(Duration::from_millis(50)).await; // on the test's clock
    }
    assert!(over.contains(&Some(PathKind::Quic)) && two.report().used == PathKind::Quic);
    two.quic.fail(true);
    assert_eq!(suite::fetch(&*path, request.clone()).await.unwrap(), hit());
    assert_eq!(request.progress.kind(), Some(PathKind::Tcp), "which it went to from the other");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_serves_only_one_way_is_reached_and_the_reason_is_kept() {
    for is_quic_there in [true, false] {
        let two = Two::new(&holding(2));
        let [served, other] = if is_quic_there { [&two.quic, &two.tcp] } else { [&two.tcp, &two.quic] };
        other.fail(true);
        let path = two.dial_both().await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        assert_eq!((served.fetches(), other.fetches()), (1, 0));
        let dials = other.dials.load(Ordering::Relaxed);
        assert!((5..25).contains(&dials), "{dials} dials in ten minutes");
        let at = usize::from(is_quic_there);
        let error = two.report().paths[at].error.clone();
        assert_eq!(error.as_deref(), Some("connection to node:1 broke: so the test says"));
    }
}

#[tokio::test(start_paused = true)]
async fn where_every_way_failed_the_peer_is_dialled_all_the_same() {
    let two = Two::new(&holding(2));
    [&two.quic, &two.tcp].iter().for_each(|way| way.fail(true));
    for _ in 0..10 {
        assert!(two.dialer.dial("node:1".to_owned()).await.is_err());
    }
    [&two.quic, &two.tcp].iter().for_each(|way| way.fail(false));
    let path = two.dial().await;
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert!(path.failure().is_none());
    two.quic.network.stop("node:1");
    two.tcp.network.stop("node:1");
    assert!(path.failure().is_some(), "nothing is open");
    assert!(fetch_both(&*path).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_way_that_hangs_when_it_is_dialled_costs_its_head_start() {
    let two = Two::new(&holding(2));
    two.quic.takes.store(3_600_000_000, Ordering::Relaxed);
    let begun = tokio::time::Instant::now();
    let path = two.dial().await;
    assert_eq!(begun.elapsed().as_millis(), PickRules::default().head_start.as_millis());
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(two.tcp.fetches(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_local_way_goes_before_every_other_while_it_is_open() {
    let service = holding(2);
    let (quic, shm) = (Fake::new(&service), Fake::new(&service));
    shm.takes.store(10_000, Ordering::Relaxed);
    let more = vec![shm.candidate(PathKind::SharedMemory)];
    let dialer = PickDialer::new(quic.candidate(PathKind::Quic), more, PickRules::default());
    let path = dialer.dial("node:1".to_owned()).await.unwrap();
    for _ in 0..1_000 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!((shm.fetches(), quic.fetches()), (1_000, 0), "however slow it is");
    shm.network.stop("node:1");
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(quic.fetches(), 1);
}

/// As RDMA does not stream, which is no reason that others do not.
#[tokio::test(start_paused = true)]
async fn saves_stream_where_the_way_that_they_take_does() {
    let service = holding(0);
    let [shm, rdma, quic] = [(); 3].map(|()| Fake::new(&service));
    rdma.is_whole.store(true, Ordering::Relaxed);
    let more = vec![shm.candidate(PathKind::SharedMemory), rdma.candidate(PathKind::Rdma)];
    let dialer = PickDialer::new(quic.candidate(PathKind::Quic), more, PickRules::default());
    let path = dialer.dial("node:1".to_owned()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await; // on the test's clock
    assert!(dialer.reports()[0].paths.iter().all(|path| path.error.is_none()), "all are open");
    let save = |number| SaveRequest { frame_bytes: 1 << 20, ..save_request(&[hash(number)]) };
    let mut layers = Computed::new(&[hash(0)], &[500, 500]);
    assert!(path.streams_saves());
    let streamed = path.save_layers(save(0), &mut layers).await.unwrap();
    assert!(matches!(streamed, Streamed::Answered(_)) && service.holds(hash(0)), "{streamed:?}");
    // The way changes behind the question: nothing of the layers is gone, and the frames go whole.
    let mut layers = Computed::new(&[hash(1)], &[500, 500]);
    assert!(path.streams_saves());
    shm.network.stop("node:1");
    assert_eq!(path.save_layers(save(1), &mut layers).await.unwrap(), Streamed::Nothing);
    assert!(!path.streams_saves());
    let saved = suite::done(path.save(save(1), &|_| layers.frame(0)).await.unwrap());
    assert_eq!((saved.stored_blocks, service.holds(hash(1))), (1, true));
    rdma.network.stop("node:1");
    assert!(path.streams_saves());
}

#[tokio::test(start_paused = true)]
async fn a_path_that_is_dropped_looks_after_nothing() {
    let two = Two::new(&holding(2));
    two.tcp.fail(true);
    drop(two.dial_both().await);
    let dials = two.tcp.dials.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(two.tcp.dials.load(Ordering::Relaxed), dials);
}

/// Over real sockets: whichever server ends, the other one goes on, within the same fetch.
#[tokio::test]
async fn when_one_server_of_a_node_ends_blocks_go_on_over_the_other() {
    for ends_quic in [true, false] {
        let (authority, service) = (Authority::new(), holding(2));
        let served: Arc<dyn BlockService> = Arc::new(service);
        let (quic, tcp) = serve(&authority.member(), &served);
        let rules = PickRules { tend_every: Duration::from_millis(5), ping_every: 1, ..PickRules::default() };
        let dialer = both(&authority.member(), rules);
        let path = dialer.dial(quic.local_addr().to_string()).await.unwrap();
        let open = async {
            while dialer.reports()[0].paths.iter().any(|path| path.latency.is_none()) {
                yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, open).await.unwrap();
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        let last: Box<dyn std::any::Any> = if ends_quic {
            quic.close().await;
            Box::new(tcp)
        } else {
            tcp.close().await;
            Box::new(quic)
        };
        for _ in 0..10 {
            assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        }
        assert!(path.failure().is_none());
        let done = suite::done(suite::save(&*path, save_request(&hashes(3)), 1000).await.unwrap());
        assert_eq!((done.stored_blocks, done.present_blocks), (1, 2));
        drop(last);
    }
}

/// A node of an earlier release listens for QUIC only.
#[tokio::test]
async fn a_node_without_tcp_is_served_over_quic() {
    let (authority, service) = (Authority::new(), holding(2));
    let quic = QuicServer::bind(ANY, &authority.member(), Arc::new(service)).unwrap();
    let dialer = both(&authority.member(), PickRules::default());
    let path = dialer.dial(quic.local_addr().to_string()).await.unwrap();
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    let refused = async {
        while dialer.reports()[0].paths[1].error.is_none() {
            yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.unwrap();
    let error = dialer.reports()[0].paths[1].error.clone().unwrap();
    assert!(error.contains("Connection refused"), "{error}");
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_told_as_by_the_default_way() {
    let authority = Authority::new();
    let dialer = both(&authority.member(), PickRules::default());
    let error = dialer.dial("127.0.0.1:1".to_owned()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
}
