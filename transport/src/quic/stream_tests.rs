//! Streams of one connection that go before each other, and yield.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};

use kvfleet_proto::tls::SERVER_NAME;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, ServerConfig, TransportConfig, VarInt};

use super::*;
use crate::quic::tests::Authority;
use crate::suite::PATIENCE;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Two ends of a connection, of which the second lets little of each stream in before it is read.
async fn connected() -> ([Endpoint; 2], Connection, Connection) {
    connected_by(|transport| {
        transport.stream_receive_window(VarInt::from_u32(10_000));
    })
    .await
}

async fn connected_by(change: impl FnOnce(&mut TransportConfig)) -> ([Endpoint; 2], Connection, Connection) {
    let identity = Authority::new().member();
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
async fn stream(ours: &Connection, theirs: &Connection, mates: &Mates) -> (QuicStream, RecvStream) {
    let (mut send, recv) = theirs.open_bi().await.unwrap();
    send.write_all(b"x").await.unwrap();
    (QuicStream::accepted(ours.accept_bi().await.unwrap(), mates), recv)
}

async fn passed_over(mates: &Mates, wanted: bool) {
    let waits = async {
        while mates.is_any_passed_over() != wanted {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, waits).await.unwrap();
}

#[tokio::test]
async fn streams_of_lower_classes_stand_behind_until_one_moves_nothing_and_then_all_stand_with_it() {
    let (_endpoints, ours, theirs) = connected().await;
    let mates = Mates::of(&ours);
    let (mut last, mut theirs_last) = stream(&ours, &theirs, &mates).await;
    let (mut first, _theirs_first) = stream(&ours, &theirs, &mates).await;
    last.rank(Class::Prefetch);
    first.rank(Class::Fetch);
    let priorities = [last.send.priority().unwrap(), first.send.priority().unwrap()];
    assert!(priorities[0] < priorities[1], "{priorities:?}");

    // Nobody reads it: to this end that is as if others went first.
    let bytes = Bytes::from(vec![7; 1 << 20]);
    let sent = bytes.clone();
    let writing = tokio::spawn(async move { last.write(sent).await.map(|()| last) });
    passed_over(&mates, true).await;
    first.write(Bytes::from_static(b"frame")).await.unwrap();
    assert_eq!(first.send.priority().unwrap(), priorities[0], "it yields");

    let mut came = BytesMut::new();
    assert!(theirs_last.fill(&mut came, bytes.len()).await.unwrap());
    assert_eq!(came, bytes, "each byte comes once, however often its writing began anew");
    let last = writing.await.unwrap().unwrap();
    assert!(!mates.is_any_passed_over(), "it moved");
    first.write(Bytes::from_static(b"frame")).await.unwrap();
    assert_eq!(first.send.priority().unwrap(), priorities[1], "and goes first again");
    drop(last);
}

/// How many bytes of a prefetch came before a fetch that was written behind it was there.
async fn overtaken() -> usize {
    const BYTES: usize = 4 << 20;
    // Windows that stop nobody: a byte that was written waits for its turn to be sent.
    let (_endpoints, ours, theirs) = connected_by(|transport| {
        transport.stream_receive_window(VarInt::from_u32(32 << 20));
    })
    .await;
    let mates = Mates::of(&ours);
    let (mut last, mut theirs_last) = stream(&ours, &theirs, &mates).await;
    let (mut first, mut theirs_first) = stream(&ours, &theirs, &mates).await;
    last.rank(Class::Prefetch);
    first.rank(Class::Fetch);
    let bytes = Bytes::from(vec![7; BYTES]);
    let (sent, also) = (bytes.clone(), bytes);
    let writing = tokio::spawn(async move { (last.write(sent).await, last) });
    let mut came = BytesMut::new();
    assert!(theirs_last.fill(&mut came, 10_000).await.unwrap(), "it is under way");
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
async fn a_fetch_overtakes_a_prefetch_that_is_under_way() {
    // On a machine that is busy a fetch may last until others yield; without an order they share each time.
    let mut before = usize::MAX;
    for _ in 0..5 {
        before = before.min(overtaken().await);
    }
    assert!(before < 2 << 20, "{before} bytes came first");
}

#[tokio::test]
async fn one_that_is_given_up_while_it_is_passed_over_stops_nobody() {
    let (_endpoints, ours, theirs) = connected().await;
    let mates = Mates::of(&ours);
    let (mut last, _unread) = stream(&ours, &theirs, &mates).await;
    last.rank(Class::Save);
    let writing = tokio::spawn(async move { last.write(Bytes::from(vec![7; 1 << 20])).await });
    passed_over(&mates, true).await;
    writing.abort();
    passed_over(&mates, false).await;
}

#[tokio::test]
async fn who_waits_for_an_answer_to_what_it_wrote_counts_as_passed_over_and_who_is_asked_does_not() {
    let (_endpoints, ours, theirs) = connected().await;
    let mates = [Mates::of(&theirs), Mates::of(&ours)];
    let place = crate::turns::Places::new(1).take(Class::Fetch).await;
    let mut asked = QuicStream::opened(theirs.open_bi().await.unwrap(), place, &mates[0]);
    asked.rank(Class::Save);
    asked.write(Bytes::from_static(b"save")).await.unwrap();
    asked.flush().await.unwrap();
    let mut answers = QuicStream::accepted(ours.accept_bi().await.unwrap(), &mates[1]);
    answers.rank(Class::Save);
    let mut came = BytesMut::new();
    assert!(answers.fill(&mut came, 4).await.unwrap());
    let waiting = tokio::spawn(async move {
        let mut came = BytesMut::new();
        asked.fill(&mut came, 4).await.map(|_| came)
    });
    let more = tokio::spawn(async move {
        let mut came = BytesMut::new();
        let _ = timeout(2 * PASSED_OVER_MAX, answers.fill(&mut came, 1)).await;
        answers
    });
    passed_over(&mates[0], true).await;
    assert!(!mates[1].is_any_passed_over(), "nothing of it waits to be sent");
    let mut answers = more.await.unwrap();
    assert!(!mates[1].is_any_passed_over());
    answers.write(Bytes::from_static(b"done")).await.unwrap();
    answers.flush().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), &b"done"[..]);
    passed_over(&mates[0], false).await;
}
