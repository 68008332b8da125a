//! Peers that die, hang, are cut off or stall during an operation. A relay stands between the two
//! ends.

use std::sync::atomic::{AtomicBool, Ordering};

use kvfleet_proto::data;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::hostile::connect_raw;
use super::*;
use crate::serve::{OperationTimeouts, TIMES};
use crate::stream::{Stream, encode, read_message};
use crate::suite::accept_one;
use crate::{FetchRequest, SaveRequest, wire};

/// Forwards connections to a server until told to stop.
struct TcpRelay {
    address: SocketAddr,
    passes: Arc<AtomicBool>,
    running: tokio::task::JoinHandle<()>,
}

impl TcpRelay {
    async fn to(server: SocketAddr) -> TcpRelay {
        let listener = TcpListener::bind(ANY).await.unwrap();
        let address = listener.local_addr().unwrap();
        let passes = Arc::new(AtomicBool::new(true));
        let forwards = passes.clone();
        let running = tokio::spawn(async move {
            let mut passing = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server).await.unwrap();
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                passing.spawn(forward(from_client, to_server, forwards.clone()));
                passing.spawn(forward(from_server, to_client, forwards.clone()));
            }
        });
        TcpRelay { address, passes, running }
    }

    /// Stops forwarding; connections stay open, as those of a hung process.
    fn stop_forwarding(&self) {
        self.passes.store(false, Ordering::SeqCst);
    }
}

async fn forward(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    gate: Arc<AtomicBool>,
) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(read) = from.read(&mut bytes).await {
        let passes = gate.load(Ordering::SeqCst);
        if read == 0 || (passes && to.write_all(&bytes[..read]).await.is_err()) {
            return;
        }
    }
}

/// Fetches three blocks through a relay, and calls `then` after two of them.
async fn fail_during_fetch(config: TcpConfig, then: impl FnOnce(&TcpRelay)) -> (FetchAnswer, PathError) {
    let authority = TestAuthority::new();
    let service = holding(3);
    let server = TcpServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let relay = TcpRelay::to(server.local_addr()).await;
    let dialer = TcpDialer::new(&authority.member(), config);
    let path = dialer.dial(relay.address.to_string()).await.unwrap();
    assert!(path.failure().is_none());
    service.set_gate(2);
    let seen = watch::Sender::new(0);
    let fetching = async {
        let mut sink = |_| seen.send_modify(|seen| *seen += 1);
        path.fetch(fetch_request(&hashes(3)), &mut sink).await.unwrap()
    };
    let cutting = async {
        seen.subscribe().wait_for(|seen| *seen == 2).await.unwrap();
        then(&relay);
    };
    let (answer, ()) = tokio::join!(fetching, cutting);
    let failed = async {
        loop {
            match path.failure() {
                Some(failure) => break failure,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    let failure = tokio::time::timeout(PATIENCE, failed).await.expect("the path does not report its failure");
    // Later operations fail at once.
    assert_eq!(path.ping().await.unwrap_err().to_string(), failure.to_string());
    (answer, failure)
}

#[tokio::test]
async fn a_dead_process_is_noticed_at_once() {
    let config = TcpConfig { silence_max: LONG, ..TcpConfig::default() };
    let (answer, failure) = fail_during_fetch(config, |relay| relay.running.abort()).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
    // The node may only have restarted: it is worth redialing once.
    assert!(matches!(failure, PathError::Broken { .. }), "{failure}");
}

#[tokio::test]
async fn a_silent_peer_is_lost_before_tcp_gives_up() {
    let (answer, failure) = fail_during_fetch(TcpConfig::default(), TcpRelay::stop_forwarding).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
    let PathError::Unreachable { peer, .. } = &failure else { panic!("{failure}") };
    says("a node that falls silent, over TCP", &failure, &[peer]);
}

#[tokio::test]
async fn a_node_with_slow_reads_is_not_lost() {
    let authority = TestAuthority::new();
    let service = holding(2);
    let server = TcpServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let config = TcpConfig::default();
    let longer = 2 * config.silence_max;
    let dialer = TcpDialer::new(&authority.member(), config);
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    service.set_gate(0);
    let opening = async {
        // Real time, because the test is about the arrival of keepalives.
        tokio::time::sleep(longer).await;
        service.set_gate(10);
    };
    let (answer, ()) = tokio::join!(suite::fetch(path.as_ref(), fetch_request(&hashes(2))), opening);
    assert_eq!(answer.unwrap(), FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn frames_before_a_close_stay_valid() {
    let authority = TestAuthority::new();
    let service = holding(3);
    let server = TcpServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    service.set_gate(2);
    let seen = watch::Sender::new(0);
    let fetching = async {
        let mut sink = |_| seen.send_modify(|seen| *seen += 1);
        path.fetch(fetch_request(&hashes(3)), &mut sink).await.unwrap()
    };
    let closing = async {
        seen.subscribe().wait_for(|seen| *seen == 2).await.unwrap();
        server.close().await;
    };
    let (answer, ()) = tokio::join!(fetching, closing);
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
}

/// Blocks far larger than the buffers of a peer that does not read.
const LARGE: u32 = 24 << 20;

fn large() -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..2).for_each(|number| service.hold(frame(hash(number), LARGE)));
    Arc::new(service)
}

/// Capacity for one answer at a time, so that a stuck one is noticed.
fn config(stall_timeout: Duration) -> TcpConfig {
    TcpConfig { fetch_bytes_in_flight_max: 1, stall_timeout, ..TcpConfig::default() }
}

/// Requests all blocks and reads only the head; the connection stays open as long as the stream.
async fn hold_a_fetch(server: &TcpServer, identity: &Identity, request: &FetchRequest) -> TlsStream {
    let mut stream = connect_raw(server.local_addr(), identity.tcp_client()).await.unwrap();
    stream.write(encode(&wire::fetch_to_pb(request)).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let _: data::FetchHead = read_message(&mut stream).await.unwrap();
    stream
}

/// Waits until the server has capacity again after the stuck fetch.
async fn assert_capacity_returns(server: &TcpServer, identity: &Identity) {
    let dialer = TcpDialer::new(identity, TcpConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let mut was_busy = false;
    let tries = async {
        loop {
            match suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap() {
                FetchAnswer::Busy { .. } => was_busy = true,
                answer => break answer,
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let answer = tokio::time::timeout(PATIENCE, tries).await.expect("the capacity was not returned");
    assert!(was_busy, "the fetch was never refused as busy");
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn a_stalled_reader_loses_its_reservation() {
    let identity = TestAuthority::new().member();
    let config = config(Duration::from_secs(1));
    let server = TcpServer::bind_with(ANY, &identity, &config, large()).unwrap();
    let _held = hold_a_fetch(&server, &identity, &fetch_request(&hashes(2))).await;
    assert_capacity_returns(&server, &identity).await;
}

#[tokio::test]
async fn a_fetch_ends_soon_after_its_deadline() {
    let identity = TestAuthority::new().member();
    let times = OperationTimeouts { grace: Duration::from_millis(500), ..TIMES };
    // The stall timeout alone would take an hour.
    let server = TcpServer::bind_with_timeouts(ANY, &identity, &config(LONG), times, large()).unwrap();
    let request = FetchRequest { deadline: Duration::from_millis(500), ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&server, &identity, &request).await;
    assert_capacity_returns(&server, &identity).await;
}

#[tokio::test]
async fn an_endless_fetch_ends_at_the_servers_limit() {
    let identity = TestAuthority::new().member();
    let times = OperationTimeouts { fetch_max: Duration::from_secs(1), ..TIMES };
    let server = TcpServer::bind_with_timeouts(ANY, &identity, &config(LONG), times, large()).unwrap();
    let request = FetchRequest { deadline: Duration::MAX, ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&server, &identity, &request).await;
    assert_capacity_returns(&server, &identity).await;
}

/// Begins a save and sends the start of a frame; the connection stays open as long as the stream.
async fn hold_a_save(server: &TcpServer, identity: &Identity, start: &[u8]) -> TlsStream {
    let mut stream = connect_raw(server.local_addr(), identity.tcp_client()).await.unwrap();
    let request = SaveRequest { hashes: vec![hash(7)], ..save_request(&[]) };
    stream.write(encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let _: data::SaveOffer = read_message(&mut stream).await.unwrap();
    stream.write(start.to_vec().into()).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

#[tokio::test]
async fn an_endless_save_is_aborted() {
    let identity = TestAuthority::new().member();
    let service = holding(0);
    let times = OperationTimeouts { save_max: Duration::from_millis(200), ..TIMES };
    let server =
        TcpServer::bind_with_timeouts(ANY, &identity, &config(LONG), times, service.clone()).unwrap();
    let _held = hold_a_save(&server, &identity, b"").await;
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1)).await.expect("the save was not aborted");
}

#[tokio::test]
async fn a_saver_that_stalls_inside_a_frame_is_aborted() {
    let identity = TestAuthority::new().member();
    let service = holding(0);
    let config = config(Duration::from_millis(200));
    let server = TcpServer::bind_with(ANY, &identity, &config, service.clone()).unwrap();
    let _held = hold_a_save(&server, &identity, &frame(hash(7), 1000).bytes[..500]).await;
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1)).await.expect("the save was not aborted");
}

#[tokio::test]
async fn a_node_that_stalls_inside_a_frame_times_out_at_the_deadline() {
    let authority = TestAuthority::new();
    let (identity, listener) = (authority.member(), TcpListener::bind(ANY).await.unwrap());
    let address = listener.local_addr().unwrap().to_string();
    // Sends one and a half of three blocks, and then no more bytes.
    let serving = tokio::spawn(async move {
        let mut lifeline = accept_one(&listener, &identity).await;
        let _: data::DataRequest = read_message(&mut lifeline).await.unwrap();
        let pong = encode(&data::Pong { version: wire::PROTOCOL_VERSION }).unwrap();
        lifeline.write(pong).await.unwrap();
        lifeline.flush().await.unwrap();
        let mut stream = accept_one(&listener, &identity).await;
        let _: data::DataRequest = read_message(&mut stream).await.unwrap();
        let head = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(3) }, suite::EPOCH);
        stream.write(encode(&head).unwrap()).await.unwrap();
        stream.write(frame(hash(0), 1000).bytes).await.unwrap();
        stream.write(frame(hash(1), 1000).bytes.slice(..500)).await.unwrap();
        stream.flush().await.unwrap();
        std::future::pending::<()>().await;
    });
    let path = TcpDialer::new(&authority.member(), TcpConfig::default()).dial(address).await.unwrap();
    let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(3)) };
    let fetch = suite::fetch(path.as_ref(), request);
    let answer = tokio::time::timeout(PATIENCE, fetch).await.expect("the fetch does not end").unwrap();
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::TooLate });
    serving.abort();
}

#[tokio::test]
async fn a_client_without_handshake_is_closed() {
    let config = TcpConfig { dial_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &TestAuthority::new().member(), &config, holding(0)).unwrap();
    let mut socket = TcpStream::connect(server.local_addr()).await.unwrap();
    let ended = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
    ended.expect("the server waits forever").ok();
}

#[tokio::test]
async fn the_server_closes_idle_connections() {
    let identity = TestAuthority::new().member();
    let config = TcpConfig { idle_timeout: Duration::from_millis(50), ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &identity, &config, holding(0)).unwrap();
    let mut stream = connect_raw(server.local_addr(), identity.tcp_client()).await.unwrap();
    let ended = tokio::time::timeout(PATIENCE, stream.wait_for_data())
        .await
        .expect("the server keeps the connection");
    assert_eq!(ended, Ok(false));
}
