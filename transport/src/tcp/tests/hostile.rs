//! Peers without TLS, untrusted peers, and peers that send malformed data.

use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::data;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::client::ResolvesClientCert;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::stream::{MESSAGE_BYTES_MAX, Source, Stream, encode, end_bytes, read_message};
use crate::tcp::handshake;
use crate::{LayerRequest, Path, SaveOffer, SaveRequest, wire};

async fn dial_error(address: SocketAddr, identity: &Identity) -> PathError {
    let dialer = TcpDialer::new(identity, TcpConfig::default());
    dialer.dial(address.to_string()).await.err().unwrap()
}

#[tokio::test]
async fn a_peer_of_another_authority_is_untrusted() {
    let server = TcpServer::bind(ANY, &TestAuthority::new().member(), holding(0)).unwrap();
    let error = dial_error(server.local_addr(), &TestAuthority::new().member()).await;
    assert!(matches!(error, PathError::Untrusted { .. }), "{error}");
    says("a peer of another authority, over TCP", &error, &[&server.local_addr().to_string()]);
}

/// Connects with any TLS configuration.
pub(super) async fn connect_raw(
    address: SocketAddr,
    tls: rustls::ClientConfig,
) -> Result<TlsStream, StreamError> {
    let ends =
        StreamShared { buffers: Arc::default(), received: Arc::default(), min_size: BufferSize::Large };
    let socket = TcpStream::connect(address).await.unwrap();
    handshake::connect(socket, &Arc::new(tls), ends).await.map(|(stream, _)| stream)
}

#[derive(Debug)]
struct NoClientCertificate;

impl ResolvesClientCert for NoClientCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn a_peer_without_certificate_is_refused() {
    let authority = TestAuthority::new();
    let server = TcpServer::bind(ANY, &authority.member(), holding(0)).unwrap();
    let mut tls = authority.member().tcp_client();
    tls.client_auth_cert_resolver = Arc::new(NoClientCertificate);
    let mut stream = connect_raw(server.local_addr(), tls).await.unwrap();
    let error = watch::ping(&mut stream).await.unwrap_err().at("node");
    assert!(matches!(error, PathError::Untrusted { .. }), "{error}");
    says("a peer without a certificate, over TCP", &error, &[]);
}

#[tokio::test]
async fn a_client_whose_certificate_is_of_another_authority_is_refused() {
    let (ours, theirs) = (TestAuthority::new(), TestAuthority::new());
    let server = TcpServer::bind(ANY, &ours.member(), holding(0)).unwrap();
    // The client trusts the server, but not the reverse.
    let mut tls = ours.member().tcp_client();
    tls.client_auth_cert_resolver = theirs.member().tcp_client().client_auth_cert_resolver;
    let mut stream = connect_raw(server.local_addr(), tls).await.unwrap();
    let error = watch::ping(&mut stream).await.unwrap_err().at("node");
    assert!(matches!(error, PathError::Untrusted { .. }), "{error}");
    says("a client's certificate of another authority, over TCP", &error, &[]);
}

#[tokio::test]
async fn a_peer_of_another_protocol_is_a_protocol_error() {
    let authority = TestAuthority::new();
    let server = TcpServer::bind(ANY, &authority.member(), holding(0)).unwrap();
    for alpn in [vec![b"h2".to_vec()], Vec::new()] {
        let mut tls = authority.member().tcp_client();
        tls.alpn_protocols = alpn;
        let error = match connect_raw(server.local_addr(), tls).await {
            Ok(mut stream) => watch::ping(&mut stream).await.unwrap_err().at("node"),
            Err(loss) => loss.at("node"),
        };
        assert!(matches!(error, PathError::Protocol { .. }), "{error}");
    }
}

#[tokio::test]
async fn an_older_tls_is_refused() {
    let authority = TestAuthority::new();
    let server = TcpServer::bind(ANY, &authority.member(), holding(0)).unwrap();
    let provider = kvfleet_net::tls::provider();
    let builder = rustls::ClientConfig::builder_with_provider(provider);
    let older = builder.with_protocol_versions(&[&rustls::version::TLS12]).unwrap();
    let tls = older.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
    let loss = connect_raw(server.local_addr(), tls).await.err().unwrap();
    assert!(matches!(loss, StreamError::Untrusted(_)), "{loss}");
}

#[tokio::test]
async fn a_server_without_tls_is_a_protocol_error() {
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        let _ = socket.read_to_end(&mut Vec::new()).await;
    });
    let error = dial_error(address, &TestAuthority::new().member()).await;
    assert!(matches!(error, PathError::Protocol { .. }), "{error}");
    says("a node's address at which something else than TLS answers", &error, &[&address.to_string()]);
    serving.abort();
}

#[tokio::test]
async fn a_client_without_tls_is_closed() {
    let authority = TestAuthority::new();
    let server = TcpServer::bind(ANY, &authority.member(), holding(1)).unwrap();
    for hello in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x16\x03\x01\xff\xff", b"\x16\x02\x00\x00\x01\x00", &[0; 100]]
    {
        let mut socket = TcpStream::connect(server.local_addr()).await.unwrap();
        socket.write_all(hello).await.unwrap();
        let ended = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
        ended.expect("the server waits for more bytes").ok();
    }
    assert_still_serving(&server, &authority).await;
}

/// Checks that the server still serves.
async fn assert_still_serving(server: &TcpServer, authority: &TestAuthority) {
    let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let answer = suite::fetch(path.as_ref(), fetch_request(&hashes(1))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(1) });
}

#[tokio::test]
async fn dialing_an_absent_node_fails_in_time() {
    // The kernel accepts connections, and no process answers.
    let silent = std::net::TcpListener::bind(ANY).unwrap();
    let config = TcpConfig { dial_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let dialer = TcpDialer::new(&TestAuthority::new().member(), config);
    let error = dialer.dial(silent.local_addr().unwrap().to_string()).await.err().unwrap();
    assert!(matches!(error, PathError::TimedOut { .. }), "{error}");
    let closed = silent.local_addr().unwrap();
    drop(silent);
    let error = dialer.dial(closed.to_string()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
    says("a node's port that is closed, over TCP", &error, &[&closed.to_string()]);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let held = std::net::TcpListener::bind(ANY).unwrap();
    let address = held.local_addr().unwrap();
    let error = TcpServer::bind(address, &TestAuthority::new().member(), holding(0)).unwrap_err();
    says("a port in use, of block bytes over TCP", &error, &[&address.to_string()]);
}

/// Sends bytes that are not a request: the server must close the connection without an answer.
async fn assert_refused(server: &TcpServer, authority: &TestAuthority, bytes: &[u8]) {
    let mut stream = connect_raw(server.local_addr(), authority.member().tcp_client()).await.unwrap();
    let _ = stream.write(bytes.to_vec().into()).await;
    let _ = stream.flush().await;
    let mut answer = bytes::BytesMut::new();
    let ended = tokio::time::timeout(PATIENCE, stream.fill(&mut answer, 1)).await.unwrap();
    assert!(ended.is_err(), "an answer to {bytes:?}");
}

#[tokio::test]
async fn hostile_requests_are_refused_and_the_server_lives_on() {
    let authority = TestAuthority::new();
    let config = TcpConfig { stall_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &authority.member(), &config, holding(1)).unwrap();
    let refused = async |bytes: &[u8]| assert_refused(&server, &authority, bytes).await;
    refused(b"\x01").await;
    refused(b"GET / HTTP/1.1\r\n\r\n").await;
    refused(&u32::MAX.to_le_bytes()).await;
    refused(&u32::try_from(MESSAGE_BYTES_MAX + 1).unwrap().to_le_bytes()).await;
    refused(b"\x05\x00\x00\x00abc").await;
    refused(b"\x03\x00\x00\x00\xff\xff\xff").await;
    refused(&encode(&data::DataRequest::default()).unwrap()).await;
    let mut bad = data::Fetch { hashes: vec![0; 17], identity: vec![0; 16], ..data::Fetch::default() };
    let ask = |fetch| data::DataRequest {
        op: Some(data::data_request::Op::Fetch(fetch)),
        traceparent: "garbage".into(),
    };
    refused(&encode(&ask(bad.clone())).unwrap()).await;
    bad.hashes.pop();
    bad.identity.pop();
    refused(&encode(&ask(bad)).unwrap()).await;
    assert_still_serving(&server, &authority).await;
}

#[tokio::test]
async fn modified_records_end_the_connection() {
    let authority = TestAuthority::new();
    let server = TcpServer::bind(ANY, &authority.member(), holding(1)).unwrap();
    let relay = FlippingProxy::start(server.local_addr()).await;
    let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
    let error = dialer.dial(relay.to_string()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
    assert_still_serving(&server, &authority).await;
}

/// Forwards connections, and flips a bit in each short data record from the server.
struct FlippingProxy;

impl FlippingProxy {
    async fn start(server: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind(ANY).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server).await.unwrap();
                let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
                tokio::spawn(async move {
                    let mut head = [0; 5];
                    while from_server.read_exact(&mut head).await.is_ok() {
                        let mut body = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
                        from_server.read_exact(&mut body).await.unwrap();
                        // Handshake records are encrypted too, but longer than the answer to a
                        // ping.
                        if head[0] == 23 && body.len() < 30 {
                            body[3] ^= 1;
                        }
                        if to_client.write_all(&[&head[..], &body].concat()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        address
    }
}

/// Offers a save by hand and sends `frames` in place of good ones.
async fn save_bytes(server: &TcpServer, authority: &TestAuthority, frame_bytes: u64, frames: &[u8]) {
    let mut stream = connect_raw(server.local_addr(), authority.member().tcp_client()).await.unwrap();
    let request = SaveRequest { frame_bytes, ..save_request(&hashes(1)) };
    stream.write(encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let offer: data::SaveOffer = read_message(&mut stream).await.unwrap();
    assert!(matches!(wire::offer_from_pb(&offer, 1), Ok(SaveOffer::Wanted(_))));
    let _ = stream.write(frames.to_vec().into()).await;
    let _ = stream.flush().await;
    let answer = tokio::time::timeout(PATIENCE, read_message::<data::SaveDone>(&mut stream)).await.unwrap();
    assert!(answer.is_err(), "such a save must not be answered");
}

#[tokio::test]
async fn hostile_saves_store_no_block() {
    let authority = TestAuthority::new();
    let service = holding(0);
    let config = TcpConfig { stall_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &authority.member(), &config, service.clone()).unwrap();
    let save_bytes = async |size: u64, frames: &[u8]| save_bytes(&server, &authority, size, frames).await;
    let good = frame(hash(0), 1000).bytes;
    let size = good.len() as u64;
    let end = end_bytes(None);
    save_bytes(size, b"").await;
    save_bytes(size, &end).await;
    save_bytes(size, b"no frame at all").await;
    save_bytes(size, &good[..good.len() - 1]).await;
    save_bytes(size, &good).await;
    save_bytes(size - 1, &[&good[..], &end].concat()).await;
    save_bytes(size, &[&good[..], b"xxxxxxxx"].concat()).await;
    save_bytes(size, &[&good[..], &good, &end].concat()).await;
    let mut flipped = good.to_vec();
    flipped[20] ^= 1;
    save_bytes(size, &[&flipped[..], &end].concat()).await;
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(9)).await.unwrap();
    assert!(!service.holds(hash(0)));
}

/// Offers a layer-wise save by hand and sends these bytes.
async fn layered_bytes(server: &TcpServer, authority: &TestAuthority, sent: &[u8]) -> TlsStream {
    let mut stream = connect_raw(server.local_addr(), authority.member().tcp_client()).await.unwrap();
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    let request = SaveRequest { frame_bytes, ..save_request(&hashes(1)) };
    stream.write(encode(&wire::save_layers_to_pb(&request, &[500, 500])).unwrap()).await.unwrap();
    stream.flush().await.unwrap();
    let offer: data::SaveOffer = read_message(&mut stream).await.unwrap();
    assert!(offer.is_by_layer && offer.wanted == [1]);
    let _ = stream.write(sent.to_vec().into()).await;
    let _ = stream.flush().await;
    stream
}

/// The answer to such a save, if there is one.
async fn save_answer(mut stream: TlsStream) -> Option<data::SaveDone> {
    let answered = read_message(&mut stream);
    tokio::time::timeout(PATIENCE, answered).await.expect("the save is neither answered nor aborted").ok()
}

#[tokio::test]
async fn hostile_layered_saves_store_no_block() {
    let authority = TestAuthority::new();
    let service = holding(0);
    // The default stall timeout must not end a save that is tested for another error.
    let server = TcpServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let config = TcpConfig { stall_timeout: Duration::from_secs(1), ..TcpConfig::default() };
    let quick = TcpServer::bind_with(ANY, &authority.member(), &config, service.clone()).unwrap();
    let good = frame(hash(0), 1000);
    let (head, payload, end) = (good.head().unwrap().bytes().clone(), good.payload(), end_bytes(None));
    let all = [&payload[..], &head].concat();
    // Silence at the start, within a slice, before the headers, within one, and before the end;
    // then ends in the wrong place.
    let silent = [&b""[..], &payload[..700], &payload, &all[..all.len() - 1], &all];
    let early = [&payload[..700], &payload, &[]].map(|part| [part, &end].concat());
    let long = [[&all[..], b"xxxxxxxx"].concat(), [&all[..], &good.bytes, &end].concat()];
    let wrong: Vec<_> = silent.into_iter().map(<[u8]>::to_vec).chain(early).chain(long).collect();
    let mut waiting = Vec::new();
    for bytes in &wrong {
        waiting.push(layered_bytes(&quick, &authority, bytes).await);
    }
    for (stream, bytes) in waiting.into_iter().zip(&wrong) {
        assert_eq!(save_answer(stream).await, None, "{} bytes", bytes.len());
    }
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(wrong.len())).await.unwrap();
    let sent = async |sent: &[u8]| save_answer(layered_bytes(&server, &authority, sent).await).await;
    let other = frame(hash(1), 1000).head().unwrap().bytes().clone();
    let mut lying = payload.to_vec();
    lying[999] ^= 1;
    for bytes in [[&payload[..], &other].concat(), [&lying[..], &head].concat(), vec![7; all.len()]] {
        let done = sent(&[&bytes[..], &end].concat()).await.expect("the save has no result");
        assert_eq!((done.stored_blocks, done.refused_blocks), (0, 1));
    }
    assert!(!service.holds(hash(0)) && !service.holds(hash(1)));
    let done = sent(&[&all[..], &end].concat()).await.expect("the save has no result");
    assert_eq!((done.stored_blocks, service.holds(hash(0))), (1, true), "the server does not serve any more");
}

/// A node that answers every fetch with a fixed head and then bytes of our choice, on any number of
/// connections. With `stays` it keeps them open afterwards.
async fn hostile_node(
    authority: &TestAuthority,
    head: data::FetchHead,
    frames: Vec<u8>,
    stays: bool,
) -> SocketAddr {
    let tls = Arc::new(authority.member().tcp_server());
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (tls, head, frames) = (tls.clone(), head.clone(), frames.clone());
            tokio::spawn(async move {
                let ends = StreamShared {
                    buffers: Arc::default(),
                    received: Arc::default(),
                    min_size: BufferSize::Small,
                };
                let (mut stream, _) = handshake::accept(socket, &tls, ends).await.unwrap();
                while stream.wait_for_data().await == Ok(true) {
                    let request: data::DataRequest = read_message(&mut stream).await.unwrap();
                    let is_ping = matches!(wire::operation_from_pb(request).unwrap(), wire::Operation::Ping);
                    let answer = match is_ping {
                        true => encode(&data::Pong { version: wire::PROTOCOL_VERSION }).unwrap(),
                        false => [&encode(&head).unwrap()[..], &frames].concat().into(),
                    };
                    stream.write(answer).await.unwrap();
                    stream.flush().await.unwrap();
                    if !is_ping && !stays {
                        return stream.close();
                    }
                }
            });
        }
    });
    address
}

async fn fetch_from_hostile_node(head: data::FetchHead, frames: Vec<u8>) -> Result<FetchAnswer, PathError> {
    let authority = TestAuthority::new();
    let address = hostile_node(&authority, head, frames, false).await;
    let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
    let path = dialer.dial(address.to_string()).await.unwrap();
    suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await
}

#[tokio::test]
async fn bad_frames_end_the_usable_prefix() {
    let hit = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(2) }, suite::EPOCH);
    let good = frame(hash(0), 1000).bytes;
    let only_first = |answer: Result<FetchAnswer, PathError>| match answer.unwrap() {
        FetchAnswer::Partial { tiers, reason } if tiers == in_dram(1) => reason,
        other => panic!("{other:?}"),
    };
    let noise = [&good[..], b"noise noise noise noise"].concat();
    assert_eq!(only_first(fetch_from_hostile_node(hit.clone(), noise).await), MissReason::Corrupt);
    let cut = [&good[..], &good[..100]].concat();
    assert_eq!(only_first(fetch_from_hostile_node(hit.clone(), cut).await), MissReason::NodeLost);
    let short = good.to_vec();
    assert_eq!(only_first(fetch_from_hostile_node(hit.clone(), short).await), MissReason::NodeLost);
    let ended = [&good[..], &end_bytes(None)].concat();
    assert_eq!(only_first(fetch_from_hostile_node(hit.clone(), ended).await), MissReason::MediumFailed);
    let extra = [&good[..], &frame(hash(1), 10).bytes, &good].concat();
    let whole = FetchAnswer::Hit { tiers: in_dram(2) };
    assert_eq!(fetch_from_hostile_node(hit.clone(), extra).await.unwrap(), whole);

    let liar = data::FetchHead { blocks: 9, ..hit };
    let error = fetch_from_hostile_node(liar, Vec::new()).await.unwrap_err();
    assert!(matches!(error, PathError::Protocol { .. }), "{error}");
}

#[tokio::test]
async fn a_node_without_layer_support_still_works() {
    let hit = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(2) }, suite::EPOCH);
    let [first, second] = [0, 1].map(|number| frame(hash(number), 1000).bytes);
    for (frames, expected) in [
        ([&first[..], &second].concat(), FetchAnswer::Hit { tiers: in_dram(2) }),
        (
            [&first[..], &first].concat(),
            FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::Corrupt },
        ),
        (first.to_vec(), FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::NodeLost }),
    ] {
        let authority = TestAuthority::new();
        let address = hostile_node(&authority, hit.clone(), frames, false).await;
        let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
        let path = dialer.dial(address.to_string()).await.unwrap();
        assert!(path.fetches_slices(), "layer support was not assumed");
        let mut rooms = suite::CheckedSlices::new(&hashes(2), 1..2);
        let asked = LayerRequest { layers: 1..2, arrive: ArrivalOrder::ByLayer };
        let answer = path.fetch_layers(fetch_request(&hashes(2)), asked, &mut rooms).await.unwrap();
        assert!(!path.fetches_slices(), "missing layer support was not noticed");
        rooms.check();
        assert_eq!(rooms.layers_received(), vec![1; expected.tiers().len()], "{expected:?}");
        assert_eq!(answer, expected);
    }
}

#[tokio::test]
async fn surplus_answer_bytes_reach_no_other_operation() {
    let authority = TestAuthority::new();
    let hit = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(1) }, suite::EPOCH);
    let good = frame(hash(0), 1000).bytes;
    let address = hostile_node(&authority, hit, [&good[..], &good].concat(), true).await;
    let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
    let path = dialer.open(&address.to_string()).await.unwrap();
    for _ in 0..2 {
        let answer = suite::fetch(&path, fetch_request(&hashes(1))).await.unwrap();
        assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(1) });
        assert_eq!(path.pool.idle_count(), 0, "a connection with surplus bytes was kept");
        path.ping().await.unwrap();
    }
}

#[tokio::test]
async fn an_oversized_request_is_refused_before_it_is_sent() {
    let pair = pair(holding(0)).await;
    let error = suite::fetch(pair.path.as_ref(), fetch_request(&hashes(70_000))).await.unwrap_err();
    assert!(matches!(error, PathError::TooLarge { .. }), "{error}");
}

/// Set in the process that [`connections_use_at_most_half_of_the_open_file_limit`] starts: the
/// limit is per process.
const FEW_FILES: &str = "KVFLEET_FEW_FILES";

#[tokio::test]
async fn connections_use_at_most_half_of_the_open_file_limit() {
    if std::env::var_os(FEW_FILES).is_some() {
        return fill_a_server_with_few_files().await;
    }
    let name = "tcp::tests::hostile::connections_use_at_most_half_of_the_open_file_limit";
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
    let said = child.args(["--exact", name, "--nocapture"]).env(FEW_FILES, "1").output().await.unwrap();
    let text = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
    assert!(said.status.success() && text.contains("1 passed"), "{text}");
}

async fn fill_a_server_with_few_files() {
    let usual = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..usual }).unwrap();
    let config = TcpConfig { dial_timeout: LONG, ..TcpConfig::default() };
    let server = TcpServer::bind_with(ANY, &TestAuthority::new().member(), &config, holding(0)).unwrap();
    // Restored, since both ends are in one process here.
    setrlimit(Resource::Nofile, usual).unwrap();
    let mut strangers = Vec::new();
    for _ in 0..33 {
        strangers.push(TcpStream::connect(server.local_addr()).await.unwrap());
    }
    let mut last = strangers.pop().unwrap();
    let read = tokio::time::timeout(PATIENCE, last.read(&mut [0]))
        .await
        .expect("a connection above the limit is kept");
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    let is_kept = |stranger: &TcpStream| {
        stranger.try_read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    assert!(strangers.iter().all(is_kept), "a connection below the limit was closed");
}
