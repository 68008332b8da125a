//! Peers that are not publishers, and old, truncated and hostile ones, byte by byte.
#![allow(clippy::unwrap_used)]

use kvfleet_errors_doc::says;
use tokio::io::{DuplexStream, duplex};

use super::*;

/// The greeting of libzmq 4.3.
fn greeting() -> Vec<u8> {
    let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    greeting.extend(b"NULL");
    greeting.resize(64, 0);
    greeting
}

fn ready(socket: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(socket.len() as u8);
    body.extend(socket.as_bytes());
    body.extend(b"\x08Identity\0\0\0\0");
    [&[4, body.len() as u8], &body[..]].concat()
}

/// A subscriber's handshake with a peer that sends these bytes, `at_once` bytes at a time.
async fn handshake_with(
    bytes: &[u8],
    at_once: usize,
) -> (Result<Connection<DuplexStream>, ZmtpError>, DuplexStream) {
    let (ours, mut theirs) = duplex(1 << 20);
    let sending = async {
        for piece in bytes.chunks(at_once) {
            theirs.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    let (connection, ()) = tokio::join!(Connection::handshake(ours, Role::Subscriber), sending);
    (connection, theirs)
}

async fn connected() -> (Connection<DuplexStream>, DuplexStream) {
    let (connection, mut theirs) = handshake_with(&[greeting(), ready("PUB")].concat(), 1 << 20).await;
    let mut first = vec![0; 64 + 2 + 25];
    theirs.read_exact(&mut first).await.unwrap();
    (connection.unwrap(), theirs)
}

#[tokio::test]
async fn a_greeting_may_come_in_any_pieces() {
    for at_once in [1, 3, 64, 1_000] {
        let (connection, mut theirs) = handshake_with(&[greeting(), ready("XPUB")].concat(), at_once).await;
        let mut connection = connection.unwrap();
        connection.subscribe(b"kv@").await.unwrap();
        let mut heard = vec![0; 64 + 2 + 25 + 2 + 4];
        theirs.read_exact(&mut heard).await.unwrap();
        assert_eq!(heard[..12], [0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0]);
        assert_eq!(&heard[64..91], b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
        assert_eq!(&heard[91..], b"\0\x04\x01kv@");
    }
}

#[tokio::test]
async fn rejects_peers_that_are_not_publishers() {
    let (http, _peer) = handshake_with(b"HTTP/1.1 400 Bad Request\r\n\r\n", 1_000).await;
    says("an engine's port that speaks something else", &http.unwrap_err(), &[]);
    let mut old = greeting();
    old[10] = 1;
    let (old, _peer) = handshake_with(&old, 1_000).await;
    says("an engine with an old ZeroMQ", &old.unwrap_err(), &[]);
    let mut curve = greeting();
    curve[12..17].copy_from_slice(b"CURVE");
    let (curve, _peer) = handshake_with(&curve, 1_000).await;
    says("an engine that wants to know who asks", &curve.unwrap_err(), &[]);
    let (router, _peer) = handshake_with(&[greeting(), ready("ROUTER")].concat(), 1_000).await;
    says("an engine's port of replays given for that of events", &router.unwrap_err(), &[]);
    let (refused, _peer) =
        handshake_with(&[greeting(), b"\x04\x09\x05ERROR\x02no".to_vec()].concat(), 1_000).await;
    assert!(matches!(refused, Err(ZmtpError::Refused { reason }) if reason == "no"));
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_times_out() {
    let (silent, _peer) = handshake_with(b"", 1).await;
    assert!(matches!(silent, Err(ZmtpError::Timeout)));
    let (halfway, _peer) = handshake_with(&greeting()[..20], 1).await;
    assert!(matches!(halfway, Err(ZmtpError::Timeout)));
}

#[tokio::test]
async fn receives_short_and_long_frames_with_pings_between() {
    let (mut connection, mut theirs) = connected().await;
    let long = vec![7; 300];
    let mut said = b"\x01\x02kv\x01\x08\0\0\0\0\0\0\0\x05".to_vec();
    // A ping also between the frames of a message, which the protocol forbids: the message must not
    // be lost.
    said.extend(b"\x04\x09\x04PING\0\x0aab");
    said.extend(b"\x02\0\0\0\0\0\0\x01\x2c");
    said.extend(&long);
    for (at, piece) in said.chunks(100).enumerate() {
        let heard = tokio::time::timeout(Duration::from_millis(1), connection.receive()).await;
        assert!(heard.is_err(), "a message before piece {at}: {heard:?}");
        theirs.write_all(piece).await.unwrap();
    }
    let frames = connection.receive().await.unwrap();
    assert_eq!(frames, [&b"kv"[..], &5u64.to_be_bytes(), &long[..]]);
    drop(tokio::time::timeout(Duration::from_millis(1), connection.receive()).await);
    let mut pong = vec![0; 9];
    theirs.read_exact(&mut pong).await.unwrap();
    assert_eq!(pong, b"\x04\x07\x04PONGab");
}

/// The error of a connection after these bytes.
async fn error_after(bytes: &[u8]) -> ZmtpError {
    let (mut connection, mut theirs) = connected().await;
    theirs.write_all(bytes).await.unwrap();
    drop(theirs);
    let error = connection.receive().await.unwrap_err();
    assert!(connection.incoming.capacity() < 4 * READ_BYTES, "{} of {error}", connection.incoming.capacity());
    error
}

#[tokio::test]
async fn malformed_frames_end_the_connection_without_allocating() {
    let petabytes = b"\x02\0\x03\xff\xff\xff\xff\xff\xff";
    says("an engine's frame of petabytes", &error_after(petabytes).await, &[]);
    says("an engine's frame with unknown flags", &error_after(b"\x42\x01a").await, &[]);
    says("an engine's command of megabytes", &error_after(b"\x06\0\0\0\0\0\x10\0\0").await, &[]);
    says("an engine's command that is cut", &error_after(b"\x04\x02\x05P").await, &[]);
    let nine = [&b"\x01\0".repeat(8)[..], b"\0\0"].concat();
    says("an engine's message of nine frames", &error_after(&nine).await, &[]);
    says("an engine's connection that ends in a frame", &error_after(b"\0\x05ab").await, &[]);
}

#[tokio::test]
async fn the_message_limit_covers_all_frames() {
    let (mut connection, mut theirs) = connected().await;
    let half = vec![0; MESSAGE_BYTES_MAX / 2 + 1];
    let (heard, ()) = tokio::join!(connection.receive(), async {
        for flags in [3u8, 2] {
            theirs.write_all(&[flags]).await.unwrap();
            theirs.write_all(&(half.len() as u64).to_be_bytes()).await.unwrap();
            // The length alone makes the second half fail.
            let _ = theirs.write_all(if flags == 3 { &half } else { &half[..0] }).await;
        }
    });
    assert!(matches!(heard, Err(ZmtpError::TooLong { .. })), "{heard:?}");
}

#[test]
fn parses_dialable_endpoints_only() {
    let endpoint: Endpoint = "tcp://engine-0.engines:5557".parse().unwrap();
    assert_eq!(endpoint.offset_port(3).unwrap().to_string(), "tcp://engine-0.engines:5560");
    assert_eq!("tcp://[fe80::1]:5557".parse::<Endpoint>().unwrap().host, "fe80::1");
    assert_eq!("tcp://a:65535".parse::<Endpoint>().unwrap().offset_port(1), None);
    for wrong in ["", "tcp://*:5557", "ipc:///tmp/a", "tcp://a", "tcp://a:0", "tcp://a:70000", "tcp://:5557"]
    {
        assert!(wrong.parse::<Endpoint>().is_err(), "{wrong}");
    }
    says("an endpoint that cannot be dialed", &"tcp://*:5557".parse::<Endpoint>().unwrap_err(), &[]);
}
