//! Peers that hold on: readers that do not read, savers that do not send. Each operation ends by itself.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;

use kv_core::id::Class;
use kvfleet_proto::data;
use kvfleet_proto::tls::SERVER_NAME;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{RecvStream, SendStream, VarInt};

use super::*;
use crate::quic::tests::Authority;
use crate::quic::{QuicDialer, save_bytes_in_flight};
use crate::stream::{encode, read_message};
use crate::suite::{
    self, MemoryService, PATIENCE, fetch_request, frame, hash, hashes, in_dram, save_request,
};
use crate::{Dialer, FetchAnswer, FetchRequest, SaveOffer, SaveRequest, wire};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Blocks far larger than what a peer that does not read lets through.
const LARGE: u32 = 300_000;

fn service() -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..2).for_each(|number| service.hold(frame(hash(number), LARGE)));
    Arc::new(service)
}

/// One answer at a time, so that a stuck one is noticed.
fn config(stall_timeout: Duration) -> QuicConfig {
    QuicConfig { fetch_bytes_in_flight_max: 1, stall_timeout, ..QuicConfig::default() }
}

/// A client of our own whose streams take very little before they are read.
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

/// Asks for all blocks and reads nothing but the head; the stream stays open as long as the halves.
async fn hold_a_fetch(connection: &Connection, request: &FetchRequest) -> (SendStream, RecvStream) {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(&encode(&wire::fetch_to_pb(request)).unwrap()).await.unwrap();
    let _: data::FetchHead = read_message(&mut recv).await.unwrap();
    (send, recv)
}

/// The server is busy with the stuck fetch, and some time it is not.
async fn freed(server: &QuicServer, identity: &Identity) {
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
    let answer = tokio::time::timeout(PATIENCE, tries).await.expect("the room comes back");
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test]
async fn a_reader_that_reads_nothing_loses_its_place() {
    let identity = Authority::new().member();
    let config = config(Duration::from_millis(200));
    let server = QuicServer::bind_with(ANY, &identity, &config, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let _held = hold_a_fetch(&connection, &fetch_request(&hashes(2))).await;
    freed(&server, &identity).await;
}

#[tokio::test]
async fn fetches_that_nobody_waits_for_leave_room_for_those_that_somebody_does() {
    let identity = Authority::new().member();
    let room = Room::new(16 * 2 * u64::from(LARGE), 1, u64::from(LARGE));
    let config = QuicConfig::default();
    let server = QuicServer::bind_in(&room, ANY, &identity, &config, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let mut ahead = fetch_request(&hashes(2));
    ahead.asker.class = Some(Class::Prefetch);
    let mut held = Vec::new();
    // Readers that do not read.
    while room.numbers()[Class::Prefetch.rank()].refused == 0 {
        assert!(held.len() < 16, "they were to leave half of the room");
        held.push(hold_a_fetch(&connection, &ahead).await);
    }
    let dialer = QuicDialer::new(&identity, QuicConfig::default());
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let ahead = suite::fetch(path.as_ref(), ahead).await.unwrap();
    assert!(matches!(ahead, FetchAnswer::Busy { .. }), "{ahead:?}");
    let waited_for = suite::fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(waited_for, FetchAnswer::Hit { tiers: in_dram(2) });
    let [fetch, .., prefetch] = room.numbers();
    assert_eq!((fetch.let_in, fetch.refused, prefetch.refused), (1, 0, 2));
    assert!(prefetch.under_way_bytes > 0 && held.len() > 2);
}

#[tokio::test]
async fn a_fetch_ends_soon_after_its_deadline_whatever_its_reader_does() {
    let identity = Authority::new().member();
    let times = Times { grace: Duration::from_millis(100), ..TIMES };
    // The stall timeout alone would take an hour.
    let config = config(Duration::from_secs(3600));
    let server = QuicServer::bind_timed(ANY, &identity, &config, times, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let request = FetchRequest { deadline: Duration::from_millis(100), ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&connection, &request).await;
    freed(&server, &identity).await;
}

#[tokio::test]
async fn a_fetch_without_an_end_in_sight_ends_at_the_servers_limit() {
    let identity = Authority::new().member();
    let times = Times { fetch_max: Duration::from_millis(200), ..TIMES };
    let config = config(Duration::from_secs(3600));
    let server = QuicServer::bind_timed(ANY, &identity, &config, times, service()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let request = FetchRequest { deadline: Duration::MAX, ..fetch_request(&hashes(2)) };
    let _held = hold_a_fetch(&connection, &request).await;
    freed(&server, &identity).await;
}

#[tokio::test]
async fn a_save_that_never_ends_is_ended() {
    let identity = Authority::new().member();
    let service = service();
    let times = Times { save_max: Duration::from_millis(200), ..TIMES };
    let config = config(Duration::from_secs(3600));
    let server = QuicServer::bind_timed(ANY, &identity, &config, times, service.clone()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    let request = SaveRequest { hashes: vec![hash(7)], ..save_request(&[]) };
    send.write_all(&encode(&wire::save_to_pb(&request)).unwrap()).await.unwrap();
    let _: data::SaveOffer = read_message(&mut recv).await.unwrap();
    tokio::time::timeout(PATIENCE, service.aborts_seen(1)).await.expect("the save is given up");
}

/// Begins a save of one block of `frame_bytes` and reads the answer; the stream stays open as long as the halves.
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
async fn saves_that_would_fill_more_memory_than_they_may_are_told_to_come_again() {
    let identity = Authority::new().member();
    let service = service();
    let frame_bytes = 100_000;
    let two = 2 * save_bytes_in_flight(1, frame_bytes);
    let config = QuicConfig { save_bytes_in_flight_max: two, ..QuicConfig::default() };
    let server = QuicServer::bind_with(ANY, &identity, &config, service.clone()).unwrap();
    let (_endpoint, connection) = tight_client(&server, &identity).await;
    let (first_is_busy, first) = hold_a_save(&connection, 10, frame_bytes).await;
    let (second_is_busy, _second) = hold_a_save(&connection, 11, frame_bytes).await;
    assert!(!first_is_busy && !second_is_busy, "there is room for two");
    let (third_is_busy, _third) = hold_a_save(&connection, 12, frame_bytes).await;
    assert!(third_is_busy, "and for no third");
    // The room of one that is given up comes back.
    drop(first);
    tokio::time::timeout(PATIENCE, service.aborts_seen(1)).await.expect("the save is given up");
    let again = async { while hold_a_save(&connection, 13, frame_bytes).await.0 {} };
    tokio::time::timeout(PATIENCE, again).await.expect("the room comes back");
}
