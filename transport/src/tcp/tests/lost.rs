//! Peers that die, hang, are cut off or stall in the middle of something: a relay stands between the two ends.

use std::sync::atomic::{AtomicBool, Ordering};

use kvfleet_proto::data;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::hostile::raw;
use super::*;
use crate::serve::{TIMES, Times};
use crate::stream::{Stream, encode, read_message};
use crate::{FetchRequest, SaveRequest, wire};

/// Passes the bytes of connections to a server, until it is told to stop.
struct Relay {
    address: SocketAddr,
    passes: Arc<AtomicBool>,
    running: tokio::task::JoinHandle<()>,
}

impl Relay {
    async fn to(server: SocketAddr) -> Relay {
        let listener = TcpListener::bind(ANY).await.unwrap();
        let address = listener.local_addr().unwrap();
        let passes = Arc::new(AtomicBool::new(true));
        let gate = passes.clone();
        let running = tokio::spawn(async move {
            let mut passing = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server).await.unwrap();
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                passing.spawn(pass(from_client, to_server, gate.clone()));
                passing.spawn(pass(from_server, to_client, gate.clone()));
            }
        });
        Relay { address, passes, running }
    }

    /// From now on nothing passes; connections stay open, as those of a process that hangs.
    fn mute(&self) {
        self.passes.store(false, Ordering::SeqCst);
    }
}

async fn pass(
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

/// A node behind a relay, two of whose three blocks have come when `then` is called.
async fn midway(config: TcpConfig, then: impl FnOnce(&Relay)) -> (FetchAnswer, PathError) {
    let authority = Authority::new();
    let service = holding(3);
    let server = TcpServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let relay = Relay::to(server.local_addr()).await;
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
    let failure = tokio::time::timeout(PATIENCE, failed).await.expect("the path knows that it failed");
    // Whoever comes now waits for nothing.
    assert_eq!(path.ping().await.unwrap_err().to_string(), failure.to_string());
    (answer, failure)
}

#[tokio::test]
async fn a_process_that_died_is_told_by_its_host() {
    let config = TcpConfig { silence_max: LONG, ..TcpConfig::default() };
    let (answer, failure) = midway(config, |relay| relay.running.abort()).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
    // Perhaps it only started anew: it is worth dialling once.
    assert!(matches!(failure, PathError::Broken { .. }), "{failure}");
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_lost_long_before_tcp_gives_up() {
    let (answer, failure) = midway(TcpConfig::default(), Relay::mute).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost });
    let PathError::Unreachable { peer, .. } = &failure else { panic!("{failure}") };
    says("a node that falls silent, over TCP", &failure, &[peer]);
}

#[tokio::test]
async fn a_node_that_only_reads_slowly_is_not_lost() {
    let authority = Authority::new();
    let service = holding(2);
    let server = TcpServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let config = TcpConfig::default();
    let longer = 2 * config.silence_max;
    let dialer = TcpDialer::new(&authority.member(), config);
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    service.set_gate(0);
    let opening = async {
        // Signs of life come by the real clock, and this is about their coming.
        tokio::time::sleep(longer).await;
        service.set_gate(10);
    };
    let (answer, ()) = tokio::join!(suite::fetch(path.as_ref(), fetch_request(&hashes(2))), opening);
    assert_eq!(answer.unwrap(), FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn a_node_that_closes_midway_leaves_what_came() {
    let authority = Authority::new();
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

/// Blocks far larger than what a peer that does not read lets through.
const LARGE: u32 = 24 << 20;

fn large() -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..2).for_each(|number| service.hold(frame(hash(number), LARGE)));
    Arc::new(service)
}

/// One answer at a time, so that a stuck one is noticed.
fn config(stall_timeout: Duration) -> TcpConfig {
    TcpConfig { fetch_bytes_in_flight_max: 1, stall_timeout, ..TcpConfig::default() }
}

/// Asks for all blocks and reads nothing but the head; the connection stays open as long as the stream.
async fn hold_a_fetch(server: &TcpServer, identity: &Identity, request: &FetchRequest) -> TlsStream {
    let mut stream = raw(server.local_addr(), identity.tcp_client()).await.unwrap();
    stream.write(encode(&wire::fetch_to_pb(request)).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let _: data::FetchHead = read_message(&mut stream).await.unwrap();
    stream
}

/// The server is busy with the stuck fetch, and some time it is not.
async fn freed(server: &TcpServer, identity: &Identity) {
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
    let answer = tokio::time::timeout(PATIENCE, tries).await.expect("the room comes back");
    assert!(was_busy, "the fetch was never held");
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn a_reader_that_reads_nothing_loses_its_place() {
    let identity = Authority::new().member();
    let config = config(Duration::from_secs(1));
    let server = TcpServer::bind_with(ANY, &identity, &config, large()).unwrap();
    let _held = hold_a_fetch(&server, &identity, &fetch_request(&hashes(2))).await;
    freed(&server, &identity).await;
}

#[tokio::test]
async fn a_fetch_ends_soon_after_its_deadline_whatever_its_reader_does() {
    let identity = Authority::new().member();
    let times = Times { grace: Duration::from_millis(500), ..TIMES };
    // The stall timeout alone would take an hour.
    let server = TcpServer::bind_timed(ANY, &identity, &config(LONG), times, large()).unwrap();
    let request = FetchRequest { deadline: Duration::from_millis(500), ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&server, &identity, &request).await;
    freed(&server, &identity).await;
}

#[tokio::test]
async fn a_fetch_without_an_end_in_sight_ends_at_the_servers_limit() {
    let identity = Authority::new().member();
    let times = Times { fetch_max: Duration::from_secs(1), ..TIMES };
    let server = TcpServer::bind_timed(ANY, &identity, &config(LONG), times, large()).unwrap();
    let request = FetchRequest { deadline: Duration::MAX, ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&server, &identity, &request).await;
    freed(&server, &identity).await;
}

/// Begins a save, and sends the start of a frame if there is one; the connection stays open as long as the stream.
async fn hold_a_save(server: &TcpServer, identity: &Identity, start: &[u8]) -> TlsStream {
    let mut stream = raw(server.local_addr(), identity.tcp_client()).await.unwrap();
    let request = SaveRequest { hashes: vec![hash(7)], ..save_request(&[]) };
    stream.write(encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let _: data::SaveOffer = read_message(&mut stream).await.unwrap();
    stream.write(start.to_vec().into()).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

#[tokio::test]
async fn a_save_that_never_ends_is_ended() {
    let identity = Authority::new().member();
    let service = holding(0);
    let times = Times { save_max: Duration::from_millis(200), ..TIMES };
    let server = TcpServer::bind_timed(ANY, &identity, &config(LONG), times, service.clone()).unwrap();
    let _held = hold_a_save(&server, &identity, b"").await;
    tokio::time::timeout(PATIENCE, service.aborts_seen(1)).await.expect("the save is given up");
}

#[tokio::test]
async fn a_peer_that_stalls_inside_a_frame_is_given_up() {
    let identity = Authority::new().member();
    let service = holding(0);
    let config = config(Duration::from_millis(200));
    let server = TcpServer::bind_with(ANY, &identity, &config, service.clone()).unwrap();
    let _held = hold_a_save(&server, &identity, &frame(hash(7), 1000).bytes[..500]).await;
    tokio::time::timeout(PATIENCE, service.aborts_seen(1)).await.expect("the save is given up");
}

#[tokio::test]
async fn a_node_that_stalls_inside_a_frame_is_waited_for_until_the_deadline() {
    let authority = Authority::new();
    let (identity, listener) = (authority.member(), TcpListener::bind(ANY).await.unwrap());
    let address = listener.local_addr().unwrap().to_string();
    // Of three blocks that it has it sends one and a half, and goes on with nothing.
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
    let answer = tokio::time::timeout(PATIENCE, fetch).await.expect("it ends").unwrap();
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::TooLate });
    serving.abort();
}

#[tokio::test]
async fn a_client_that_says_hello_and_nothing_more_is_closed() {
    let config = TcpConfig { dial_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &Authority::new().member(), &config, holding(0)).unwrap();
    let mut socket = TcpStream::connect(server.local_addr()).await.unwrap();
    let ended = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
    ended.expect("the server does not wait for ever").ok();
}

#[tokio::test]
async fn a_connection_that_nobody_uses_is_closed_by_the_server() {
    let identity = Authority::new().member();
    let config = TcpConfig { idle_timeout: Duration::from_millis(50), ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &identity, &config, holding(0)).unwrap();
    let mut stream = raw(server.local_addr(), identity.tcp_client()).await.unwrap();
    let ended = tokio::time::timeout(PATIENCE, stream.begun()).await.expect("the server closes it");
    assert_eq!(ended, Ok(false));
}
