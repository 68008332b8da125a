//! Silent and late fetches: when they suspend a path and when they do not.

use kv_core::id::TrafficClass;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A prefetch queues behind other operations and is dropped when compute begins.
#[tokio::test(start_paused = true)]
async fn cancelled_prefetches_do_not_count() {
    let two = TwoPaths::new(&holding(2));
    [&two.quic, &two.tcp].iter().for_each(|way| way.latency_us.store(4_000, Ordering::Relaxed));
    let path = two.dial_both().await;
    for _ in 0..20 {
        assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    }
    two.quic.set_behaviour(FetchBehaviour::Silence);
    for _ in 0..500 {
        let mut request = fetch_request(&hashes(2));
        request.context.class = Some(TrafficClass::Prefetch);
        let came = tokio::time::timeout(Duration::from_secs(2), suite::fetch(&*path, request)).await;
        assert!(came.is_err(), "the silence lasts longer");
    }
    let report = two.report();
    assert_eq!((report.used, &report.reason), (PathKind::Quic, &PickReason::Preferred), "{report}");
    assert!(!report.paths[0].is_suspended, "{report}");
}

/// Shared memory, and the network as the other path.
struct LocalAndNetwork {
    shm: FakeDialer,
    quic: FakeDialer,
    dialer: PickDialer,
}

impl LocalAndNetwork {
    fn new(service: &MemoryService) -> LocalAndNetwork {
        let (quic, shm) = (FakeDialer::new(service), FakeDialer::new(service));
        let more = vec![shm.candidate(PathKind::SharedMemory)];
        let dialer = PickDialer::new(quic.candidate(PathKind::Quic), more, PickRules::default());
        LocalAndNetwork { shm, quic, dialer }
    }

    /// Dials, and waits until both are open.
    async fn dial(&self) -> Arc<dyn Path> {
        let path = self.dialer.dial("node:1".to_owned()).await.unwrap();
        while self.quic.dials.load(Ordering::Relaxed) == 0 {
            yield_now().await;
        }
        tokio::time::sleep(Duration::from_millis(10)).await; // on the test's clock
        path
    }

    fn report(&self) -> PeerReport {
        self.dialer.reports().pop().unwrap()
    }
}

async fn fetch_within(path: &dyn Path, millis: u64) -> FetchAnswer {
    let deadline = Duration::from_millis(millis);
    suite::fetch(path, FetchRequest { deadline, ..fetch_request(&hashes(2)) }).await.unwrap()
}

fn too_late() -> FetchAnswer {
    FetchAnswer::Miss { reason: MissReason::TooLate }
}

#[tokio::test(start_paused = true)]
async fn a_silent_local_path_is_suspended_and_tried_again() {
    for (millis, most) in [(5_000, 3), (100, 3), (20, 15)] {
        let near = LocalAndNetwork::new(&holding(2));
        let path = near.dial().await;
        assert_eq!(fetch_within(&*path, millis).await, hit());
        near.shm.set_behaviour(FetchBehaviour::Silence);
        let mut lost = 0;
        while fetch_within(&*path, millis).await == too_late() {
            lost += 1;
            assert!(lost <= most, "with {millis} ms: {}", near.report());
        }
        let report = near.report();
        assert_eq!((report.used, near.quic.fetches()), (PathKind::Quic, 1), "{report}");
        assert!(report.paths[0].is_suspended, "{report}");
        // Pings succeed all the while: it is tried again, ever more rarely.
        lost = 0;
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < Duration::from_secs(600) {
            lost += u32::from(fetch_within(&*path, millis).await == too_late());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let tries = near.shm.fetches();
        assert!((10..=80).contains(&lost), "with {millis} ms: {lost} of {tries} tries in ten minutes");
        near.shm.set_behaviour(FetchBehaviour::Answered);
        tokio::time::sleep(Duration::from_secs(70)).await;
        assert_eq!(fetch_within(&*path, millis).await, hit());
        assert_eq!((near.shm.fetches(), near.report().used), (tries + 1, PathKind::SharedMemory));
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_node_that_answers_keeps_its_path() {
    let near = LocalAndNetwork::new(&holding(2));
    let path = near.dial().await;
    near.shm.set_behaviour(FetchBehaviour::AnsweredLate);
    for _ in 0..100 {
        assert_eq!(fetch_within(&*path, 5_000).await, too_late());
    }
    let report = near.report();
    assert_eq!((report.used, near.quic.fetches()), (PathKind::SharedMemory, 0), "{report}");
    assert!(!report.paths[0].is_suspended, "{report}");
}

/// One moment of silence counts once, for any number of fetches.
#[tokio::test(start_paused = true)]
async fn concurrent_silent_fetches_count_once() {
    for millis in [20, 150] {
        let near = LocalAndNetwork::new(&holding(2));
        let path = near.dial().await;
        near.shm.set_behaviour(FetchBehaviour::Silence);
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let path = Arc::clone(&path);
            all.spawn(async move { fetch_within(&*path, millis).await });
        }
        while let Some(ended) = all.join_next().await {
            assert_eq!(ended.unwrap(), too_late());
        }
        assert!(!near.report().paths[0].is_suspended, "{}", near.report());
    }
}

/// Prefetches queue behind other operations at this end too.
#[tokio::test(start_paused = true)]
async fn late_prefetches_suspend_no_path() {
    let near = LocalAndNetwork::new(&holding(2));
    let path = near.dial().await;
    near.shm.set_behaviour(FetchBehaviour::Silence);
    for _ in 0..20 {
        let mut request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(2)) };
        request.context.class = Some(TrafficClass::Prefetch);
        assert_eq!(suite::fetch(&*path, request).await.unwrap(), too_late());
    }
    assert!(!near.report().paths[0].is_suspended, "{}", near.report());
}

#[tokio::test(start_paused = true)]
async fn data_of_a_cancelled_fetch_counts_as_delivery() {
    let service = holding(2);
    let near = LocalAndNetwork::new(&service);
    let path = near.dial().await;
    for _ in 0..10 {
        near.shm.set_behaviour(FetchBehaviour::Silence);
        for _ in 0..2 {
            assert_eq!(fetch_within(&*path, 150).await, too_late());
        }
        near.shm.set_behaviour(FetchBehaviour::Answered);
        service.set_gate(1);
        let (came, mut is_there) = tokio::sync::watch::channel(false);
        let mut sink = |_| {
            came.send_replace(true);
        };
        tokio::select! {
            ended = path.fetch(fetch_request(&hashes(2)), &mut sink) => panic!("{ended:?}"),
            _ = is_there.wait_for(|is_there| *is_there) => {}
        }
        service.set_gate(100);
    }
    assert!(!near.report().paths[0].is_suspended, "{}", near.report());
}

/// Least bytes of a proxy read within a large transfer: handshakes, pings and answers without
/// blocks are shorter.
const LARGE_READ_BYTES: usize = 8 << 10;

/// Forwards all bytes. If told to, it stops at the first large read, like a network that loses
/// every large packet.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, is_black_hole: Arc<AtomicBool>) {
    let mut buffer = vec![0; 1 << 20];
    while let Ok(bytes @ 1..) = from.read(&mut buffer).await {
        if bytes >= LARGE_READ_BYTES && is_black_hole.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
    }
}

/// Address of a proxy to `node` that uses [`forward`].
async fn proxy(node: SocketAddr, is_black_hole: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(node).await.unwrap();
            let ((client_in, client_out), (server_in, server_out)) =
                (client.into_split(), server.into_split());
            tokio::spawn(forward(client_in, server_out, Arc::default()));
            tokio::spawn(forward(server_in, client_out, Arc::clone(&is_black_hole)));
        }
    });
    address
}

/// TCP that dials a fixed address in place of the peer's.
struct RedirectingDialer(TcpDialer, SocketAddr);

impl Dialer for RedirectingDialer {
    fn dial(&self, _: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        self.0.dial(self.1.to_string())
    }
}

/// The keepalive connection and pings still work.
#[tokio::test]
async fn tcp_that_loses_large_packets_is_replaced_by_quic() {
    let (authority, service) = (TestAuthority::new(), MemoryService::default());
    (0..2).for_each(|number| service.hold(frame(hash(number), 200_000)));
    let served: Arc<dyn BlockService> = Arc::new(service);
    let (quic, _tcp) = serve(&authority.member(), &served);
    let is_black_hole = Arc::new(AtomicBool::new(false));
    let by = proxy(quic.local_addr(), Arc::clone(&is_black_hole)).await;
    let tcp = Arc::new(RedirectingDialer(TcpDialer::new(&authority.member(), TcpConfig::default()), by));
    let other = Arc::new(QuicDialer::new(&authority.member(), QuicConfig::default()));
    let other = vec![PathCandidate { kind: PathKind::Quic, dialer: other }];
    let rules = PickRules {
        maintenance_interval: Duration::from_millis(5),
        ping_every_rounds: 1,
        ..PickRules::default()
    };
    let dialer = PickDialer::new(PathCandidate { kind: PathKind::Tcp, dialer: tcp }, other, rules);
    let path = dialer.dial(quic.local_addr().to_string()).await.unwrap();
    let open = async {
        while dialer.reports()[0].paths.iter().any(|path| path.latency.is_none()) {
            yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, open).await.unwrap();
    assert_eq!(fetch_both(&*path).await.unwrap(), hit());
    assert_eq!(dialer.reports()[0].used, PathKind::Tcp);
    is_black_hole.store(true, Ordering::Relaxed);
    let mut lost = 0;
    while fetch_within(&*path, 500).await != hit() {
        lost += 1;
        assert!(lost < 10, "{}", dialer.reports()[0]);
    }
    let report = &dialer.reports()[0];
    assert!(lost > 0 && report.used == PathKind::Quic, "{report}");
    assert!(report.paths[0].error.as_ref().is_some_and(|error| error.contains("did not answer")), "{report}");
}
