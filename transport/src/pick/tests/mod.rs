//! The suite over chosen paths, and the choice itself: with fakes of adjustable speed and health,
//! and over both network paths.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use kv_core::id::LeaseId;
use kvfleet_net::tls::Identity;
use kvfleet_proto::frame::Frame;
use tokio::task::yield_now;

use super::*;
use crate::loopback::Loopback;
use crate::quic::tests::TestAuthority;
use crate::quic::{QuicConfig, QuicDialer, QuicServer};
use crate::suite::{
    self, ComputedBlocks, MemoryService, PATIENCE, SuitePath, fetch_request, frame, hash, hashes, in_dram,
    save_request,
};
use crate::tcp::{TcpConfig, TcpDialer, TcpServer};
use crate::{
    BlockService, BoxFuture, FetchAnswer, FetchRequest, LayerSource, LayeredSaveOutcome, MissReason, Path,
    PathError, SaveAnswer, SaveRequest, behaviour_suite,
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

fn quic_and_tcp(identity: &Identity, rules: PickRules) -> PickDialer {
    let quic = Arc::new(QuicDialer::new(identity, QuicConfig::default()));
    let tcp = Arc::new(TcpDialer::new(identity, TcpConfig::default()));
    let quic = PathCandidate { kind: PathKind::Quic, dialer: quic };
    PickDialer::new(quic, vec![PathCandidate { kind: PathKind::Tcp, dialer: tcp }], rules)
}

async fn pair(service: Arc<dyn BlockService>) -> SuitePath {
    let authority = TestAuthority::new();
    let servers = serve(&authority.member(), &service);
    let dialer = quic_and_tcp(&authority.member(), PickRules::default());
    let path = dialer.dial(servers.0.local_addr().to_string()).await.unwrap();
    SuitePath { path, keep: Box::new((servers, dialer)) }
}

behaviour_suite!(pair);
behaviour_suite!(pair; MemoryService::default(); layers_come_one_after_the_other, slices_leave_before_the_last_layer);

fn holding(blocks: u32) -> MemoryService {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), 4000)));
    service
}

/// A path over the loopback with adjustable delay and failure. Counts its operations.
#[derive(Clone)]
struct FakeDialer {
    network: Loopback,
    /// Microseconds of an operation.
    latency_us: Arc<AtomicU64>,
    /// Error that dials and operations return, if set.
    error: Arc<Mutex<Option<PathError>>>,
    /// How fetches behave.
    behaviour: Arc<Mutex<FetchBehaviour>>,
    /// Whether saves must come whole.
    is_frames_only: Arc<AtomicBool>,
    dials: Arc<AtomicUsize>,
    fetches: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum FetchBehaviour {
    Answered,
    /// The node is silent for fetches.
    Silence,
    /// The node answers in time, but no data follows.
    AnsweredLate,
}

impl FakeDialer {
    fn new(service: &MemoryService) -> FakeDialer {
        let network = Loopback::default();
        network.serve("node:1", Arc::new(service.clone()));
        FakeDialer {
            network,
            latency_us: Arc::default(),
            error: Arc::default(),
            behaviour: Arc::new(Mutex::new(FetchBehaviour::Answered)),
            is_frames_only: Arc::default(),
            dials: Arc::default(),
            fetches: Arc::default(),
        }
    }

    fn candidate(&self, kind: PathKind) -> PathCandidate {
        PathCandidate { kind, dialer: Arc::new(self.clone()) }
    }

    fn fail(&self, is_failing: bool) {
        let (peer, cause) = ("node:1".to_owned(), "injected by the test".to_owned());
        *self.error.lock().unwrap() = is_failing.then_some(PathError::Broken { peer, cause });
    }

    fn set_behaviour(&self, meets: FetchBehaviour) {
        *self.behaviour.lock().unwrap() = meets;
    }

    fn fetches(&self) -> usize {
        self.fetches.load(Ordering::Relaxed)
    }

    async fn delay_or_fail(&self) -> Result<(), PathError> {
        let takes = Duration::from_micros(self.latency_us.load(Ordering::Relaxed));
        tokio::time::sleep(takes).await; // on the test's clock
        self.error.lock().unwrap().clone().map_or(Ok(()), Err)
    }
}

struct FakePath {
    fake: FakeDialer,
    path: Arc<dyn Path>,
}

impl Dialer for FakeDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            self.dials.fetch_add(1, Ordering::Relaxed);
            self.delay_or_fail().await?;
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
            request.progress.mark_asked();
            let meets = *self.fake.behaviour.lock().unwrap();
            if meets == FetchBehaviour::AnsweredLate {
                request.progress.mark_answered();
            }
            if meets != FetchBehaviour::Answered {
                tokio::time::sleep(request.deadline).await; // on the test's clock
                return Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
            }
            self.fake.delay_or_fail().await?;
            self.path.fetch(request, sink).await
        })
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move {
            self.fake.delay_or_fail().await?;
            self.path.save(request, source).await
        })
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<LayeredSaveOutcome, PathError>> {
        Box::pin(async move {
            let streams = self.streams_saves();
            if streams {
                self.path.save_layers(request, layers).await
            } else {
                Ok(LayeredSaveOutcome::NotStreamed)
            }
        })
    }

    fn streams_saves(&self) -> bool {
        !self.fake.is_frames_only.load(Ordering::Relaxed)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async move {
            self.fake.delay_or_fail().await?;
            self.path.release(lease).await
        })
    }

    fn failure(&self) -> Option<PathError> {
        self.path.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async move {
            let begun = tokio::time::Instant::now();
            self.fake.delay_or_fail().await?;
            Ok(begun.elapsed())
        })
    }
}

/// Two fake paths to one node, and the dialer over them, which prefers QUIC.
struct TwoPaths {
    quic: FakeDialer,
    tcp: FakeDialer,
    dialer: PickDialer,
}

impl TwoPaths {
    fn new(service: &MemoryService) -> TwoPaths {
        let (quic, tcp) = (FakeDialer::new(service), FakeDialer::new(service));
        let others = vec![tcp.candidate(PathKind::Tcp)];
        let rules = PickRules { network: NetworkPreference::Quic, ..PickRules::default() };
        let dialer = PickDialer::new(quic.candidate(PathKind::Quic), others, rules);
        TwoPaths { quic, tcp, dialer }
    }

    async fn dial(&self) -> Arc<dyn Path> {
        self.dialer.dial("node:1".to_owned()).await.unwrap()
    }

    fn report(&self) -> PeerReport {
        self.dialer.reports().pop().unwrap()
    }

    /// Dials, and waits until the other path is open too.
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
async fn the_preferred_network_path_is_used_while_it_works() {
    for network in [NetworkPreference::Quic, NetworkPreference::Tcp] {
        let service = holding(2);
        let (quic, tcp) = (FakeDialer::new(&service), FakeDialer::new(&service));
        let (preferred, other) =
            if network == NetworkPreference::Quic { (&quic, &tcp) } else { (&tcp, &quic) };
        // A slower path is used too, so that the choice is predictable.
        preferred.latency_us.store(8_000, Ordering::Relaxed);
        let others = vec![tcp.candidate(PathKind::Tcp)];
        let rules = PickRules { network, ..PickRules::default() };
        let dialer = PickDialer::new(quic.candidate(PathKind::Quic), others, rules);
        let path = dialer.dial("node:1".to_owned()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await; // on the test's clock
        for _ in 0..1_000 {
            assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        }
        assert_eq!((preferred.fetches(), other.fetches()), (1_000, 0));
        let report = dialer.reports().pop().unwrap();
        assert_eq!(report.to_string(), format!("node:1 over {network}: preferred by configuration"));
        let all: u64 = dialer.traffic().iter().map(|(_, carried)| carried.received_bytes()).sum();
        assert_eq!(all, 1_000 * 2 * frame(hash(0), 4000).bytes.len() as u64);
        // The other one is used while it fails, and no longer.
        preferred.fail(true);
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        let report = dialer.reports().pop().unwrap();
        let failure = "connection to node:1 broke: injected by the test";
        let expected =
            format!("node:1 over {}: {network} cannot be reached, last failure: {failure}", report.used);
        assert_eq!((report.used == network.kind(), report.to_string()), (false, expected));
        preferred.fail(false);
        tokio::time::sleep(Duration::from_secs(70)).await; // on the test's clock
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        assert_eq!(dialer.reports().pop().unwrap().reason, PickReason::Preferred);
        assert_eq!(other.fetches(), 1);
    }
}

/// Shared memory, then RDMA, then the network, whatever the order of the candidates.
#[tokio::test(start_paused = true)]
async fn the_best_open_class_is_used_and_explained() {
    let service = holding(2);
    let [quic, tcp, rdma, shm] = [(); 4].map(|()| FakeDialer::new(&service));
    let more = vec![
        tcp.candidate(PathKind::Tcp),
        rdma.candidate(PathKind::Rdma),
        shm.candidate(PathKind::SharedMemory),
    ];
    let dialer = PickDialer::new(quic.candidate(PathKind::Quic), more, PickRules::default());
    let path = dialer.dial("node:1".to_owned()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await; // on the test's clock
    let ends =
        [(&shm, PickReason::SameHost), (&rdma, PickReason::RdmaOffered), (&tcp, PickReason::Preferred)];
    for ((used, reason), kind) in ends.into_iter().zip(PathKind::ALL) {
        let before = used.fetches();
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
        let report = dialer.reports().pop().unwrap();
        assert_eq!((used.fetches(), report.used, &report.reason), (before + 1, kind, &reason), "{report}");
        used.network.stop("node:1");
    }
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    let report = dialer.reports().pop().unwrap();
    assert!(matches!(report.reason, PickReason::Fallback { preferred: PathKind::Tcp, .. }), "{report}");
}

#[tokio::test(start_paused = true)]
async fn a_single_path_is_explained_as_such() {
    let tcp = FakeDialer::new(&holding(2));
    let dialer = PickDialer::new(tcp.candidate(PathKind::Tcp), Vec::new(), PickRules::default());
    let path = dialer.dial("node:1".to_owned()).await.unwrap();
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(dialer.reports()[0].to_string(), "node:1 over tcp: the only configured path");
}

#[test]
fn network_names_round_trip() {
    for network in [NetworkPreference::Tcp, NetworkPreference::Quic] {
        assert_eq!(network.to_string().parse(), Ok(network));
    }
    let error = "shm".parse::<NetworkPreference>().unwrap_err();
    assert_eq!(error.to_string(), "`shm` is no network path: choose tcp or quic");
}

#[tokio::test(start_paused = true)]
async fn a_path_with_cancelled_silent_fetches_is_replaced() {
    let two = TwoPaths::new(&holding(2));
    [&two.quic, &two.tcp].iter().for_each(|way| way.latency_us.store(4_000, Ordering::Relaxed));
    let path = two.dial_both().await;
    for _ in 0..2_000 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!(two.report().used, PathKind::Quic);
    // From now on callers have computed the blocks before any byte comes.
    two.quic.latency_us.store(3_600_000_000, Ordering::Relaxed);
    let mut given_up = 0;
    while two.report().used == PathKind::Quic {
        let came = tokio::time::timeout(Duration::from_millis(100), fetch_both(&*path)).await;
        given_up += u32::from(came.is_err());
        assert!(given_up < 5, "{}", two.report());
    }
    assert!(given_up > 0);
    assert_eq!(fetch_both(&*path).await.unwrap(), hit(), "the other path must deliver");
    let reason = two.report().reason;
    assert!(matches!(reason, PickReason::Fallback { preferred: PathKind::Quic, .. }), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn refused_fetches_use_another_path_and_failing_paths_are_suspended() {
    let two = TwoPaths::new(&holding(2));
    let path = two.dial_both().await;
    two.quic.fail(true);
    for _ in 0..20 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!(two.quic.fetches(), 3, "its breaker must open");
    let report = two.report();
    assert!(report.paths[0].is_suspended && !report.paths[1].is_suspended, "{report}");
    let text = "node:1 over tcp: quic cannot be reached, last failure: connection to node:1 broke";
    assert!(report.to_string().starts_with(text), "{report}");
    path.ping().await.unwrap();
    path.release(LeaseId(1)).await.unwrap();
    two.quic.fail(false);
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(two.quic.fetches(), 4, "a ping closes the breaker of the default path");
}

#[tokio::test(start_paused = true)]
async fn a_fetch_reports_its_path() {
    let two = TwoPaths::new(&holding(2));
    let path = two.dial_both().await;
    let request = fetch_request(&hashes(2));
    assert_eq!(request.progress.kind(), None);
    assert_eq!(suite::fetch(&*path, request.clone()).await.unwrap(), hit());
    assert_eq!(request.progress.kind(), Some(PathKind::Quic));
    two.quic.fail(true);
    assert_eq!(suite::fetch(&*path, request.clone()).await.unwrap(), hit());
    assert_eq!(request.progress.kind(), Some(PathKind::Tcp), "the path of the retry");
}

#[tokio::test(start_paused = true)]
async fn a_node_with_one_working_path_is_reached() {
    for is_quic_there in [true, false] {
        let two = TwoPaths::new(&holding(2));
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
        assert_eq!(error.as_deref(), Some("connection to node:1 broke: injected by the test"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_is_dialed_even_if_every_path_failed() {
    let two = TwoPaths::new(&holding(2));
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
    assert!(path.failure().is_some(), "no path is open");
    assert!(fetch_both(&*path).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_hanging_dial_costs_its_head_start() {
    let two = TwoPaths::new(&holding(2));
    two.quic.latency_us.store(3_600_000_000, Ordering::Relaxed);
    let begun = tokio::time::Instant::now();
    let path = two.dial().await;
    assert_eq!(begun.elapsed().as_millis(), PickRules::default().head_start.as_millis());
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(two.tcp.fetches(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_open_local_path_is_always_preferred() {
    let service = holding(2);
    let (quic, shm) = (FakeDialer::new(&service), FakeDialer::new(&service));
    shm.latency_us.store(10_000, Ordering::Relaxed);
    let more = vec![shm.candidate(PathKind::SharedMemory)];
    let dialer = PickDialer::new(quic.candidate(PathKind::Quic), more, PickRules::default());
    let path = dialer.dial("node:1".to_owned()).await.unwrap();
    for _ in 0..1_000 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    assert_eq!((shm.fetches(), quic.fetches()), (1_000, 0), "the local path must be used, even if slow");
    shm.network.stop("node:1");
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(quic.fetches(), 1);
}

/// RDMA does not support layered saves, which must not disable them on other paths.
#[tokio::test(start_paused = true)]
async fn saves_are_layered_if_their_path_supports_it() {
    let service = holding(0);
    let [shm, rdma, quic] = [(); 3].map(|()| FakeDialer::new(&service));
    rdma.is_frames_only.store(true, Ordering::Relaxed);
    let more = vec![shm.candidate(PathKind::SharedMemory), rdma.candidate(PathKind::Rdma)];
    let dialer = PickDialer::new(quic.candidate(PathKind::Quic), more, PickRules::default());
    let path = dialer.dial("node:1".to_owned()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await; // on the test's clock
    assert!(dialer.reports()[0].paths.iter().all(|path| path.error.is_none()), "a path did not open");
    let save = |number| SaveRequest { frame_bytes: 1 << 20, ..save_request(&[hash(number)]) };
    let mut layers = ComputedBlocks::new(&[hash(0)], &[500, 500]);
    assert!(path.streams_saves());
    let streamed = path.save_layers(save(0), &mut layers).await.unwrap();
    assert!(matches!(streamed, LayeredSaveOutcome::Answered(_)) && service.holds(hash(0)), "{streamed:?}");
    // The path changes after the query: no slice is lost, and the frames go whole.
    let mut layers = ComputedBlocks::new(&[hash(1)], &[500, 500]);
    assert!(path.streams_saves());
    shm.network.stop("node:1");
    assert_eq!(path.save_layers(save(1), &mut layers).await.unwrap(), LayeredSaveOutcome::NotStreamed);
    assert!(!path.streams_saves());
    let saved = suite::done(path.save(save(1), &|_| layers.frame(0)).await.unwrap());
    assert_eq!((saved.stored_blocks, service.holds(hash(1))), (1, true));
    rdma.network.stop("node:1");
    assert!(path.streams_saves());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_path_stops_its_maintenance() {
    let two = TwoPaths::new(&holding(2));
    two.tcp.fail(true);
    drop(two.dial_both().await);
    let dials = two.tcp.dials.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(two.tcp.dials.load(Ordering::Relaxed), dials);
}

/// Over real sockets: if either server ends, fetches continue over the other.
#[tokio::test]
async fn fetches_continue_when_one_server_of_a_node_ends() {
    for ends_quic in [true, false] {
        let (authority, service) = (TestAuthority::new(), holding(2));
        let served: Arc<dyn BlockService> = Arc::new(service);
        let (quic, tcp) = serve(&authority.member(), &served);
        let rules = PickRules {
            maintenance_interval: Duration::from_millis(5),
            ping_every_rounds: 1,
            ..PickRules::default()
        };
        let dialer = quic_and_tcp(&authority.member(), rules);
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
    let (authority, service) = (TestAuthority::new(), holding(2));
    let quic = QuicServer::bind(ANY, &authority.member(), Arc::new(service)).unwrap();
    let dialer = quic_and_tcp(&authority.member(), PickRules::default());
    let path = dialer.dial(quic.local_addr().to_string()).await.unwrap();
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    let refused = async {
        while dialer.reports()[0].paths[0].error.is_none() {
            yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.unwrap();
    let report = dialer.reports()[0].to_string();
    assert!(report.contains(" over quic: tcp cannot be reached, last failure: "), "{report}");
    assert!(report.contains("Connection refused"), "{report}");
}

#[tokio::test]
async fn an_absent_peer_reports_the_default_paths_error() {
    let authority = TestAuthority::new();
    let dialer = quic_and_tcp(&authority.member(), PickRules::default());
    let error = dialer.dial("127.0.0.1:1".to_owned()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
}
