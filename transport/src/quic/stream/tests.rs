//! Priorities of the streams of one connection, and yielding.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};

use kvfleet_net::tls::SERVER_NAME;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, ServerConfig, TransportConfig, VarInt};

use super::*;
use crate::quic::tests::TestAuthority;
use crate::suite::PATIENCE;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Two ends of a connection; the second has small stream windows.
async fn connected() -> ([Endpoint; 2], Connection, Connection) {
    connected_by(|transport| {
        transport.stream_receive_window(VarInt::from_u32(10_000));
    })
    .await
}

async fn connected_by(change: impl FnOnce(&mut TransportConfig)) -> ([Endpoint; 2], Connection, Connection) {
    let identity = TestAuthority::new().member();
    let crypto = QuicServerConfig::try_from(identity.quic_server()).unwrap();
    let server = Endpoint::server(ServerConfig::with_crypto(Arc::new(crypto)), ANY).unwrap();
    let mut client = Endpoint::client(ANY).unwrap();
    let crypto = QuicClientConfig::try_from(identity.quic_client()).unwrap();
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    let mut transport = TransportConfig::default();
    change(&mut transport);
    config.transport_config(Arc::new(transport));
    client.set_default_client_config(config);
    let connecting = client.connect(server.local_addr().unwrap(), SERVER_NAME).unwrap();
    let accepting = async { server.accept().await.unwrap().await.unwrap() };
    let (ours, theirs) = tokio::join!(accepting, connecting);
    ([server, client], ours, theirs.unwrap())
}

/// A stream at both ends.
async fn stream(
    ours: &Connection,
    theirs: &Connection,
    mates: &StreamPriorities,
) -> (QuicStream, RecvStream) {
    let (mut send, recv) = theirs.open_bi().await.unwrap();
    send.write_all(b"x").await.unwrap();
    let (answer, question) = ours.accept_bi().await.unwrap();
    (QuicStream::accepted(answer, question, mates), recv)
}

async fn wait_for_starved(mates: &StreamPriorities, wanted: bool) {
    let waits = async {
        while mates.has_starved() != wanted {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, waits).await.unwrap();
}

#[tokio::test]
async fn higher_classes_yield_to_a_starved_stream() {
    let (_endpoints, ours, theirs) = connected().await;
    let mates = StreamPriorities::new(&ours);
    let (mut last, mut theirs_last) = stream(&ours, &theirs, &mates).await;
    let (mut first, _theirs_first) = stream(&ours, &theirs, &mates).await;
    last.set_class(TrafficClass::Prefetch);
    first.set_class(TrafficClass::Fetch);
    let priorities = [last.send.priority().unwrap(), first.send.priority().unwrap()];
    assert!(priorities[0] < priorities[1], "{priorities:?}");

    // The peer does not read: at this end that looks like starvation.
    let bytes = Bytes::from(vec![7; 1 << 20]);
    let sent = bytes.clone();
    let writing = tokio::spawn(async move { last.write(sent).await.map(|()| last) });
    wait_for_starved(&mates, true).await;
    first.write(Bytes::from_static(b"frame")).await.unwrap();
    assert_eq!(first.send.priority().unwrap(), priorities[0], "the higher class does not yield");

    let mut came = BytesMut::new();
    assert!(theirs_last.fill(&mut came, bytes.len()).await.unwrap());
    assert_eq!(came, bytes, "bytes were lost or repeated");
    let last = writing.await.unwrap().unwrap();
    assert!(!mates.has_starved(), "the stream still counts as starved");
    first.write(Bytes::from_static(b"frame")).await.unwrap();
    assert_eq!(first.send.priority().unwrap(), priorities[1], "the higher class does not go first again");
    drop(last);
}

/// Number of prefetched bytes that arrived before a fetch that was written after them.
async fn prefetched_before_fetch() -> usize {
    const BYTES: usize = 4 << 20;
    // Windows that never block: written bytes wait only for their turn to be sent.
    let (_endpoints, ours, theirs) = connected_by(|transport| {
        transport.stream_receive_window(VarInt::from_u32(32 << 20));
    })
    .await;
    let mates = StreamPriorities::new(&ours);
    let (mut last, mut theirs_last) = stream(&ours, &theirs, &mates).await;
    let (mut first, mut theirs_first) = stream(&ours, &theirs, &mates).await;
    last.set_class(TrafficClass::Prefetch);
    first.set_class(TrafficClass::Fetch);
    let bytes = Bytes::from(vec![7; BYTES]);
    let (sent, also) = (bytes.clone(), bytes);
    let writing = tokio::spawn(async move { (last.write(sent).await, last) });
    let mut came = BytesMut::new();
    assert!(theirs_last.fill(&mut came, 10_000).await.unwrap(), "the prefetch has not started");
    let fetching = tokio::spawn(async move { (first.write(also).await, first) });
    let (mut fetched, mut prefetched) = (0, came.len());
    while fetched < BYTES {
        tokio::select! {
            chunk = theirs_first.read_chunk(BYTES, true) => fetched += chunk.unwrap().unwrap().bytes.len(),
            chunk = theirs_last.read_chunk(BYTES, true) => prefetched += chunk.unwrap().unwrap().bytes.len(),
        }
    }
    let before = prefetched;
    while prefetched < BYTES {
        prefetched += theirs_last.read_chunk(BYTES, true).await.unwrap().unwrap().bytes.len();
    }
    writing.await.unwrap().0.unwrap();
    fetching.await.unwrap().0.unwrap();
    before
}

#[tokio::test]
async fn a_fetch_overtakes_a_running_prefetch() {
    // On a busy machine a fetch may last until others yield; without priorities they would share in
    // every round.
    let mut before = usize::MAX;
    for _ in 0..5 {
        before = before.min(prefetched_before_fetch().await);
    }
    assert!(before < 2 << 20, "{before} bytes came first");
}

#[tokio::test]
async fn a_cancelled_starved_stream_stops_the_yielding() {
    let (_endpoints, ours, theirs) = connected().await;
    let mates = StreamPriorities::new(&ours);
    let (mut last, _unread) = stream(&ours, &theirs, &mates).await;
    last.set_class(TrafficClass::Save);
    let writing = tokio::spawn(async move { last.write(Bytes::from(vec![7; 1 << 20])).await });
    wait_for_starved(&mates, true).await;
    writing.abort();
    wait_for_starved(&mates, false).await;
}

#[tokio::test]
async fn only_the_requesting_end_starves_while_waiting() {
    let (_endpoints, ours, theirs) = connected().await;
    let mates = [StreamPriorities::new(&theirs), StreamPriorities::new(&ours)];
    let place = crate::slot_queue::SlotQueue::new(1).acquire(TrafficClass::Fetch).await;
    let (send, recv) = theirs.open_bi().await.unwrap();
    let mut asked = QuicStream::opened(send, recv, place, &mates[0]);
    asked.set_class(TrafficClass::Save);
    asked.write(Bytes::from_static(b"save")).await.unwrap();
    asked.flush().await.unwrap();
    let (send, recv) = ours.accept_bi().await.unwrap();
    let mut answers = QuicStream::accepted(send, recv, &mates[1]);
    answers.set_class(TrafficClass::Save);
    let mut came = BytesMut::new();
    assert!(answers.fill(&mut came, 4).await.unwrap());
    let waiting = tokio::spawn(async move {
        let mut came = BytesMut::new();
        asked.fill(&mut came, 4).await.map(|_| came)
    });
    let more = tokio::spawn(async move {
        let mut came = BytesMut::new();
        let _ = timeout(2 * STARVED_AFTER, answers.fill(&mut came, 1)).await;
        answers
    });
    wait_for_starved(&mates[0], true).await;
    assert!(!mates[1].has_starved(), "the answering end counts as starved");
    let mut answers = more.await.unwrap();
    assert!(!mates[1].has_starved());
    answers.write(Bytes::from_static(b"done")).await.unwrap();
    answers.flush().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), &b"done"[..]);
    wait_for_starved(&mates[0], false).await;
}
