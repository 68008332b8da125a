//! The suite over QUIC, and tests of its own parts: certificates, hostile bytes, limits, lost
//! peers.
#![allow(clippy::unwrap_used)]

mod callers;
mod lost;
mod relay;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

use kv_core::id::TrafficClass;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::{Identity, Role, SERVER_NAME};
use kvfleet_proto::data;
use quinn::crypto::rustls::QuicClientConfig;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::*;
use crate::stream::{MESSAGE_BYTES_MAX, encode, read_message};
use crate::suite::{
    self, MemoryService, PATIENCE, SuitePath, fetch_request, frame, hash, hashes, in_dram, save_request,
};
use crate::{BlockService, Dialer, FetchAnswer, MissReason, SaveOffer, SaveRequest, behaviour_suite, wire};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(crate) struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    pub(crate) fn new() -> TestAuthority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        TestAuthority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn member(&self) -> Identity {
        let key = KeyPair::generate().unwrap();
        // Both ends use it.
        let params = CertificateParams::new(Role::Node(None).dns_names()).unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Identity::from_pem(self.0.pem().as_bytes(), cert.pem().as_bytes(), key.serialize_pem().as_bytes())
            .unwrap()
    }
}

async fn pair(service: Arc<dyn BlockService>) -> SuitePath {
    let authority = TestAuthority::new();
    let server = QuicServer::bind(ANY, &authority.member(), service).unwrap();
    let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    SuitePath { path, keep: Box::new((server, dialer)) }
}

behaviour_suite!(pair);
behaviour_suite!(
    pair; MemoryService::default(); layers_come_one_after_the_other, slices_leave_before_the_last_layer,
    leases_in_use_are_renewed,
);

fn holding(blocks: u32) -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), 4000)));
    Arc::new(service)
}

async fn dial_error(server: &QuicServer, identity: &Identity) -> PathError {
    let dialer = QuicDialer::new(identity, QuicConfig::default());
    dialer.dial(server.local_addr().to_string()).await.err().unwrap()
}

/// The prefetches would take all streams, and quinn grants streams in the order of requests.
#[tokio::test]
async fn a_fetch_does_not_queue_behind_prefetches() {
    let service = holding(1);
    service.set_gate(0);
    let SuitePath { path, keep: _keep } = pair(service).await;
    let (mut waiting, asked) = (tokio::task::JoinSet::new(), Arc::new(AtomicU32::new(0)));
    for _ in 0..2 * STREAMS_MAX {
        let (path, mut ahead, asked) = (Arc::clone(&path), fetch_request(&hashes(1)), Arc::clone(&asked));
        ahead.context.class = Some(TrafficClass::Prefetch);
        waiting.spawn(async move {
            asked.fetch_add(1, Ordering::Relaxed);
            suite::fetch(&*path, ahead).await
        });
    }
    while asked.load(Ordering::Relaxed) < 2 * STREAMS_MAX {
        tokio::task::yield_now().await;
    }
    let fetch = tokio::time::timeout(PATIENCE, suite::fetch(&*path, fetch_request(&[hash(9)]))).await;
    let not_held = FetchAnswer::Miss { reason: MissReason::NotHeld };
    assert_eq!(fetch.expect("the fetch queues behind prefetches").unwrap(), not_held);
    assert_eq!(waiting.try_join_next().map(|ended| ended.unwrap().unwrap()), None, "a prefetch ended early");
}

#[tokio::test]
async fn a_peer_of_another_authority_is_untrusted() {
    let server = QuicServer::bind(ANY, &TestAuthority::new().member(), holding(0)).unwrap();
    let error = dial_error(&server, &TestAuthority::new().member()).await;
    assert!(matches!(error, PathError::Untrusted { .. }), "{error}");
    says("a peer of another authority", &error, &[&server.local_addr().to_string()]);
}

/// Connects with any TLS configuration.
async fn connect_raw(server: &QuicServer, tls: rustls::ClientConfig) -> (quinn::Endpoint, quinn::Connection) {
    let mut endpoint = quinn::Endpoint::client(ANY).unwrap();
    let crypto = QuicClientConfig::try_from(tls).unwrap();
    endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(crypto)));
    let connection = endpoint.connect(server.local_addr(), SERVER_NAME).unwrap().await.unwrap();
    (endpoint, connection)
}

#[tokio::test]
async fn a_peer_without_certificate_is_refused() {
    let authority = TestAuthority::new();
    let server = QuicServer::bind(ANY, &authority.member(), holding(0)).unwrap();
    let mut tls = authority.member().quic_client();
    tls.client_auth_cert_resolver = Arc::new(NoCertificate);
    let (_endpoint, connection) = connect_raw(&server, tls).await;
    let error = path_error("node", &connection.closed().await);
    assert!(matches!(error, PathError::Untrusted { .. }), "{error}");
    says("a peer without a certificate", &error, &[]);
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn dialing_an_absent_node_fails_in_time() {
    let silent = std::net::UdpSocket::bind(ANY).unwrap();
    let config = QuicConfig { dial_timeout: Duration::from_millis(200), ..QuicConfig::default() };
    let dialer = QuicDialer::new(&TestAuthority::new().member(), config);
    let error = dialer.dial(silent.local_addr().unwrap().to_string()).await.err().unwrap();
    assert!(matches!(error, PathError::TimedOut { .. }), "{error}");
    says("a node that does not answer", &error, &[&silent.local_addr().unwrap().to_string()]);
    let error = dialer.dial("not an address".to_owned()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
    says("a node's address that is none", &error, &[]);
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let held = std::net::UdpSocket::bind(ANY).unwrap();
    let address = held.local_addr().unwrap();
    let error = QuicServer::bind(address, &TestAuthority::new().member(), holding(0)).unwrap_err();
    says("a port in use, of block bytes", &error, &[&address.to_string()]);
}

/// Sends bytes that are not a request: the server must reset the stream.
async fn assert_refused(connection: &quinn::Connection, bytes: &[u8]) {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let _ = send.write_all(bytes).await;
    let _ = send.finish();
    let ended = tokio::time::timeout(PATIENCE, recv.read_to_end(1 << 20)).await.unwrap();
    assert!(ended.is_err(), "an answer of {} bytes", ended.unwrap().len());
}

#[tokio::test]
async fn hostile_bytes_are_refused_and_the_server_lives_on() {
    let authority = TestAuthority::new();
    let server = QuicServer::bind(ANY, &authority.member(), holding(1)).unwrap();
    let (_endpoint, connection) = connect_raw(&server, authority.member().quic_client()).await;
    assert_refused(&connection, b"").await;
    assert_refused(&connection, b"\x01").await;
    assert_refused(&connection, b"GET / HTTP/1.1\r\n\r\n").await;
    assert_refused(&connection, &u32::MAX.to_le_bytes()).await;
    assert_refused(&connection, &u32::try_from(MESSAGE_BYTES_MAX + 1).unwrap().to_le_bytes()).await;
    assert_refused(&connection, b"\x05\x00\x00\x00abc").await;
    assert_refused(&connection, b"\x03\x00\x00\x00\xff\xff\xff").await;
    assert_refused(&connection, &encode(&data::DataRequest::default()).unwrap()).await;
    let mut bad = data::Fetch { hashes: vec![0; 17], identity: vec![0; 16], ..data::Fetch::default() };
    let ask = |fetch| data::DataRequest {
        op: Some(data::data_request::Op::Fetch(fetch)),
        traceparent: "garbage".into(),
    };
    assert_refused(&connection, &encode(&ask(bad.clone())).unwrap()).await;
    bad.hashes.pop();
    bad.identity.pop();
    assert_refused(&connection, &encode(&ask(bad)).unwrap()).await;
    drop(connection);

    let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let answer = suite::fetch(path.as_ref(), fetch_request(&hashes(1))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(1) });
}

/// Offers a save by hand and sends `frames` in place of good ones.
async fn save_bytes(connection: &quinn::Connection, frame_bytes: u64, frames: &[u8]) {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let request = SaveRequest { frame_bytes, ..save_request(&hashes(1)) };
    send.write_all(&encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    let offer: data::SaveOffer = read_message(&mut recv).await.unwrap();
    assert!(matches!(wire::offer_from_pb(&offer, 1), Ok(SaveOffer::Wanted(_))));
    let _ = send.write_all(frames).await;
    let _ = send.finish();
    let ended = tokio::time::timeout(PATIENCE, recv.read_to_end(1 << 20)).await.unwrap();
    assert!(ended.is_err(), "such a save must not be answered");
}

#[tokio::test]
async fn hostile_saves_store_no_block() {
    let authority = TestAuthority::new();
    let service = holding(0);
    let server = QuicServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let (_endpoint, connection) = connect_raw(&server, authority.member().quic_client()).await;
    let good = frame(hash(0), 1000).bytes;
    let size = good.len() as u64;
    save_bytes(&connection, size, b"").await;
    save_bytes(&connection, size, b"no frame at all").await;
    save_bytes(&connection, size, &good[..good.len() - 1]).await;
    save_bytes(&connection, size - 1, &good).await;
    save_bytes(&connection, size, &[&good[..], b"x"].concat()).await;
    let mut flipped = good.to_vec();
    flipped[20] ^= 1;
    save_bytes(&connection, size, &flipped).await;
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(6)).await.unwrap();
    assert!(!service.holds(hash(0)));
}

/// Offers a layer-wise save by hand and sends these bytes, then the end unless it `stays`. Returns
/// the answer, if there is one.
async fn layered_bytes(connection: &quinn::Connection, sent: &[u8], stays: bool) -> Option<data::SaveDone> {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    let request = SaveRequest { frame_bytes, ..save_request(&hashes(1)) };
    send.write_all(&encode(&wire::save_layers_to_pb(&request, &[500, 500])).unwrap()).await.unwrap();
    let offer: data::SaveOffer = read_message(&mut recv).await.unwrap();
    assert!(offer.is_by_layer && offer.wanted == [1]);
    let _ = send.write_all(sent).await;
    if !stays {
        let _ = send.finish();
    }
    let answered = read_message(&mut recv);
    tokio::time::timeout(PATIENCE, answered).await.expect("the save is neither answered nor aborted").ok()
}

#[tokio::test]
async fn hostile_layered_saves_store_no_block() {
    let authority = TestAuthority::new();
    let service = holding(0);
    let server = QuicServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let (_endpoint, connection) = connect_raw(&server, authority.member().quic_client()).await;
    let good = frame(hash(0), 1000);
    let (head, payload) = (good.head().unwrap().bytes().clone(), good.payload());
    let all = [&payload[..], &head].concat();
    let cut_or_long =
        [&b""[..], &payload[..700], &payload, &all[..all.len() - 1], &[&all[..], b"x"].concat()];
    for (aborts, sent) in (1..).zip(cut_or_long) {
        assert_eq!(layered_bytes(&connection, sent, false).await, None, "{} bytes", sent.len());
        tokio::time::timeout(PATIENCE, service.wait_for_aborts(aborts)).await.unwrap();
    }
    // The default stall timeout must not end a save that is tested for another error.
    let config = QuicConfig { stall_timeout: Duration::from_secs(1), ..QuicConfig::default() };
    let quick = QuicServer::bind_with(ANY, &authority.member(), &config, service.clone()).unwrap();
    let (_endpoint, to_quick) = connect_raw(&quick, authority.member().quic_client()).await;
    assert_eq!(layered_bytes(&to_quick, &payload[..700], true).await, None, "silence in the middle");
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(6)).await.unwrap();
    // A save of the right length is answered, and its block refused.
    let other = frame(hash(1), 1000).head().unwrap().bytes().clone();
    let mut lying = payload.to_vec();
    lying[999] ^= 1;
    for sent in [[&payload[..], &other].concat(), [&lying[..], &head].concat(), vec![7; all.len()]] {
        let done = layered_bytes(&connection, &sent, false).await.expect("the save has no result");
        assert_eq!((done.stored_blocks, done.refused_blocks), (0, 1));
    }
    assert!(!service.holds(hash(0)) && !service.holds(hash(1)));
    // Slice lengths that contradict the frame length are an invalid request.
    let wrong = wire::save_layers_to_pb(&save_request(&hashes(1)), &[500, 500]);
    assert_refused(&connection, &encode(&wrong).unwrap()).await;
    let done = layered_bytes(&connection, &all, false).await.expect("the save has no result");
    assert_eq!((done.stored_blocks, service.holds(hash(0))), (1, true), "the server does not serve any more");
}

#[tokio::test]
async fn layered_saves_leave_half_of_the_capacity() {
    let authority = TestAuthority::new();
    let service = holding(0);
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    // Capacity for four saves, and so for two layer-wise ones.
    let config = QuicConfig {
        save_bytes_in_flight_max: 4 * save_bytes_in_flight(1, frame_bytes),
        ..QuicConfig::default()
    };
    let server = QuicServer::bind_with(ANY, &authority.member(), &config, service.clone()).unwrap();
    let (_endpoint, connection) = connect_raw(&server, authority.member().quic_client()).await;
    let offered = async |block| {
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        let request = SaveRequest { frame_bytes, ..save_request(&[hash(block)]) };
        send.write_all(&encode(&wire::save_layers_to_pb(&request, &[500, 500])).unwrap()).await.unwrap();
        let offer: data::SaveOffer = read_message(&mut recv).await.unwrap();
        assert_eq!(offer.wanted, [1]);
        (offer.is_by_layer, (send, recv))
    };
    let (first, second, third) = (offered(0).await, offered(1).await, offered(2).await);
    assert_eq!((first.0, second.0, third.0), (true, true, false));
    drop(first);
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1)).await.unwrap();
    let again = async { while !offered(3).await.0 {} };
    tokio::time::timeout(PATIENCE, again).await.expect("the capacity was not returned");
}

/// A node that answers with a fixed head and then bytes of our choice.
async fn fetch_from_hostile_node(head: data::FetchHead, frames: Vec<u8>) -> Result<FetchAnswer, PathError> {
    let authority = TestAuthority::new();
    let crypto = quinn::crypto::rustls::QuicServerConfig::try_from(authority.member().quic_server()).unwrap();
    let server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    let endpoint = quinn::Endpoint::server(server, ANY).unwrap();
    let address = endpoint.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let connection = endpoint.accept().await.unwrap().await.unwrap();
        while let Ok((mut send, mut recv)) = connection.accept_bi().await {
            let request: data::DataRequest = read_message(&mut recv).await.unwrap();
            let answer = match wire::operation_from_pb(request).unwrap() {
                wire::Operation::Ping => encode(&data::Pong { version: wire::PROTOCOL_VERSION }).unwrap(),
                _ => [&encode(&head).unwrap()[..], &frames].concat().into(),
            };
            let _ = send.write_chunk(answer).await;
            let _ = send.finish();
        }
    });
    let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
    let path = dialer.dial(address.to_string()).await.unwrap();
    let answer = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await;
    serving.abort();
    answer
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
    let reason = only_first(fetch_from_hostile_node(hit.clone(), noise).await);
    assert_eq!(reason, MissReason::Corrupt);
    says("a node that answers with other bytes", &reason.name(), &[]);
    let cut = [&good[..], &good[..100]].concat();
    let reason = only_first(fetch_from_hostile_node(hit.clone(), cut).await);
    assert_eq!(reason, MissReason::NodeLost);
    says("a node that breaks off inside a block", &reason.name(), &[]);
    let short = good.to_vec();
    let reason = only_first(fetch_from_hostile_node(hit.clone(), short).await);
    assert_eq!(reason, MissReason::MediumFailed);
    says("a node that sends fewer blocks than it said", &reason.name(), &[]);
    let extra = [&good[..], &frame(hash(1), 10).bytes, &good].concat();
    let whole = FetchAnswer::Hit { tiers: in_dram(2) };
    assert_eq!(fetch_from_hostile_node(hit.clone(), extra).await.unwrap(), whole);

    let liar = data::FetchHead { blocks: 9, ..hit };
    let error = fetch_from_hostile_node(liar, Vec::new()).await.unwrap_err();
    let PathError::Protocol { peer, .. } = &error else { panic!("{error}") };
    says("a node that says more blocks than were asked", &error, &[peer]);
}

#[tokio::test]
async fn an_oversized_request_is_refused_before_it_is_sent() {
    let pair = pair(holding(0)).await;
    let request = fetch_request(&hashes(70_000));
    let error = suite::fetch(pair.path.as_ref(), request).await.unwrap_err();
    assert!(matches!(error, PathError::TooLarge { .. }), "{error}");
    says("a request above the limit of a message", &error, &[]);
}

#[tokio::test]
async fn too_many_bytes_in_flight_are_busy() {
    let authority = TestAuthority::new();
    let service = holding(2);
    let config = QuicConfig { fetch_bytes_in_flight_max: 1, ..QuicConfig::default() };
    let server = QuicServer::bind_with(ANY, &authority.member(), &config, service.clone()).unwrap();
    let dialer = QuicDialer::new(&authority.member(), config);
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    service.set_gate(1);
    let seen = tokio::sync::watch::Sender::new(0);
    let mut watch = seen.subscribe();
    let first = async {
        let mut sink = |_| seen.send_modify(|seen| *seen += 1);
        path.fetch(fetch_request(&hashes(2)), &mut sink).await.unwrap()
    };
    let second = async {
        watch.wait_for(|seen| *seen == 1).await.unwrap();
        let busy = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
        service.set_gate(10);
        busy
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(2) }, "a lone operation was refused");
    assert_eq!(second, FetchAnswer::Busy { retry_after: RETRY_AFTER });
    let again = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(again, FetchAnswer::Hit { tiers: in_dram(2) }, "the reservation was not returned");
}

#[tokio::test]
async fn frames_before_a_close_stay_valid() {
    let authority = TestAuthority::new();
    let service = holding(3);
    let server = QuicServer::bind(ANY, &authority.member(), service.clone()).unwrap();
    let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    service.set_gate(2);
    let seen = tokio::sync::watch::Sender::new(0);
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
    assert!(matches!(path.ping().await, Err(PathError::Broken { .. })));
}

#[test]
fn settings_out_of_range_are_clamped() {
    for (asked, used) in [(0, MTU_MIN), (1452, 1452), (u16::MAX, MTU_MAX)] {
        assert_eq!(QuicConfig { mtu_max: asked, ..QuicConfig::default() }.mtu(), used);
    }
}
