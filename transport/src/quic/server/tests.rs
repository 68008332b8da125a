//! Stalled peers: readers that do not read, savers that do not send. Each operation ends by itself.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;

use kv_core::id::TrafficClass;
use kvfleet_net::tls::SERVER_NAME;
use kvfleet_proto::data;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{RecvStream, SendStream, VarInt};

use super::*;
use crate::quic::tests::TestAuthority;
use crate::quic::{QuicDialer, save_bytes_in_flight};
use crate::stream::{encode, read_message};
use crate::suite::{
    self, MemoryService, PATIENCE, fetch_request, frame, hash, hashes, in_dram, save_request,
};
use crate::{Dialer, FetchAnswer, FetchRequest, SaveOffer, SaveRequest, wire};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Blocks far larger than the window of a peer that does not read.
const LARGE: u32 = 300_000;

fn service() -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..2).for_each(|number| service.hold(frame(hash(number), LARGE)));
    Arc::new(service)
}

/// Capacity for one answer at a time, so that a stuck one is noticed.
fn config(stall_timeout: Duration) -> QuicConfig {
    QuicConfig { fetch_bytes_in_flight_max: 1, stall_timeout, ..QuicConfig::default() }
}

/// A client with very small stream windows.
async fn tight_client(server: &QuicServer, identity: &Identity) -> (Endpoint, Connection) {
    let mut endpoint = Endpoint::client(ANY).unwrap();
    let crypto = QuicClientConfig::try_from(identity.quic_client()).unwrap();
    let mut client = quinn::ClientConfig::new(Arc::new(crypto));
    let mut transport = quinn::TransportConfig::default();
    transport.stream_receive_window(VarInt::from_u32(10_000));
    transport.keep_alive_interval(Some(Duration::from_millis(100)));
    client.transport_config(Arc::new(transport));
    endpoint.set_default_client_config(client);
    let connection = endpoint.connect(server.local_addr(), SERVER_NAME).unwrap().await.unwrap();
    (endpoint, connection)
}

/// Requests all blocks and reads only the head; the stream stays open as long as its halves.
async fn hold_a_fetch(connection: &Connection, request: &FetchRequest) -> (SendStream, RecvStream) {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(&encode(&wire::fetch_to_pb(request)).unwrap()).await.unwrap();
    let _: data::FetchHead = read_message(&mut recv).await.unwrap();
    (send, recv)
}

/// Waits until the server has capacity again after the stuck fetch.
async fn assert_capacity_returns(server: &QuicServer, identity: &Identity) {
    let dialer = QuicDialer::new(identity, QuicConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let tries = async {
        loop {
            match suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap() {
                FetchAnswer::Busy { .. } => tokio::time::sleep(Duration::from_millis(5)).await,
                answer => break answer,
            }
        }
    };
    let answer = tokio::time::timeout(PATIENCE, tries).await.expect("the capacity was not returned");
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn a_stalled_reader_loses_its_reservation() {
    let identity = TestAuthority::new().member();
    let config = config(Duration::from_millis(200));
    let server = QuicServer::bind_with(ANY, &identity, &config, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let _held = hold_a_fetch(&connection, &fetch_request(&hashes(2))).await;
    assert_capacity_returns(&server, &identity).await;
}

#[tokio::test]
async fn prefetches_leave_capacity_for_fetches() {
    let identity = TestAuthority::new().member();
    let room = Capacity::new(16 * 2 * u64::from(LARGE), 1, u64::from(LARGE));
    let config = QuicConfig::default();
    let server = QuicServer::bind_in(&room, ANY, &identity, &config, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let mut ahead = fetch_request(&hashes(2));
    ahead.context.class = Some(TrafficClass::Prefetch);
    let mut held = Vec::new();
    // Readers that do not read.
    while room.class_counts()[TrafficClass::Prefetch.rank()].refused == 0 {
        assert!(held.len() < 16, "prefetches take more than half of the capacity");
        held.push(hold_a_fetch(&connection, &ahead).await);
    }
    let dialer = QuicDialer::new(&identity, QuicConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let ahead = suite::fetch(path.as_ref(), ahead).await.unwrap();
    assert!(matches!(ahead, FetchAnswer::Busy { .. }), "{ahead:?}");
    let waited_for = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(waited_for, FetchAnswer::Hit { tiers: in_dram(2) });
    let [fetch, .., prefetch] = room.class_counts();
    assert_eq!((fetch.admitted, fetch.refused, prefetch.refused), (1, 0, 2));
    assert!(prefetch.in_flight_bytes > 0 && held.len() > 2);
}

#[tokio::test]
async fn a_fetch_ends_soon_after_its_deadline() {
    let identity = TestAuthority::new().member();
    let times = OperationTimeouts { grace: Duration::from_millis(100), ..TIMES };
    // The stall timeout alone would take an hour.
    let config = config(Duration::from_secs(3600));
    let server = QuicServer::bind_with_timeouts(ANY, &identity, &config, times, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let request = FetchRequest { deadline: Duration::from_millis(100), ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&connection, &request).await;
    assert_capacity_returns(&server, &identity).await;
}

#[tokio::test]
async fn an_endless_fetch_ends_at_the_servers_limit() {
    let identity = TestAuthority::new().member();
    let times = OperationTimeouts { fetch_max: Duration::from_millis(200), ..TIMES };
    let config = config(Duration::from_secs(3600));
    let server = QuicServer::bind_with_timeouts(ANY, &identity, &config, times, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let request = FetchRequest { deadline: Duration::MAX, ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&connection, &request).await;
    assert_capacity_returns(&server, &identity).await;
}

#[tokio::test]
async fn an_endless_save_is_aborted() {
    let identity = TestAuthority::new().member();
    let service = service();
    let times = OperationTimeouts { save_max: Duration::from_millis(200), ..TIMES };
    let config = config(Duration::from_secs(3600));
    let server = QuicServer::bind_with_timeouts(ANY, &identity, &config, times, service.clone()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let request = SaveRequest { hashes: vec![hash(7)], ..save_request(&[]) };
    send.write_all(&encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    let _: data::SaveOffer = read_message(&mut recv).await.unwrap();
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1)).await.expect("the save was not aborted");
}

/// Begins a save of one block of `frame_bytes` and reads the answer; the stream stays open as long
/// as its halves.
async fn hold_a_save(
    connection: &Connection,
    block: u32,
    frame_bytes: u64,
) -> (bool, (SendStream, RecvStream)) {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let request = SaveRequest { hashes: vec![hash(block)], frame_bytes, ..save_request(&[]) };
    send.write_all(&encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    let offer: data::SaveOffer = read_message(&mut recv).await.unwrap();
    let is_busy = matches!(wire::offer_from_pb(&offer, 1), Ok(SaveOffer::Busy { .. }));
    (is_busy, (send, recv))
}

#[tokio::test]
async fn saves_above_the_memory_limit_are_busy() {
    let identity = TestAuthority::new().member();
    let service = service();
    let frame_bytes = 100_000;
    let two = 2 * save_bytes_in_flight(1, frame_bytes);
    let config = QuicConfig { save_bytes_in_flight_max: two, ..QuicConfig::default() };
    let server = QuicServer::bind_with(ANY, &identity, &config, service.clone()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let (first_is_busy, first) = hold_a_save(&connection, 10, frame_bytes).await;
    let (second_is_busy, _second) = hold_a_save(&connection, 11, frame_bytes).await;
    assert!(!first_is_busy && !second_is_busy, "two saves must fit");
    let (third_is_busy, _third) = hold_a_save(&connection, 12, frame_bytes).await;
    assert!(third_is_busy, "a third save must not fit");
    // An aborted save returns its capacity.
    drop(first);
    tokio::time::timeout(PATIENCE, service.wait_for_aborts(1)).await.expect("the save was not aborted");
    let again = async { while hold_a_save(&connection, 13, frame_bytes).await.0 {} };
    tokio::time::timeout(PATIENCE, again).await.expect("the capacity was not returned");
}
