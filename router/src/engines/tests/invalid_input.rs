//! Invalid messages from engines and others, each with blocks that would be accepted in a valid
//! message.
//!
//! Not here: inconsistent replays (`../follow/tests.rs`), and the handling of raw bytes
//! (`kvfleet_proto::zmtp`).

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const MESSAGES: &str = "kvfleet_engine_messages_total";

fn numbered(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

/// Stores these blocks after the one before the first of them.
fn storing(blocks: std::ops::Range<u64>) -> EventBytes {
    let tokens: Vec<u32> = blocks.clone().flat_map(tokens).collect();
    let parent = blocks.start.checked_sub(1);
    stored(&blocks.collect::<Vec<_>>(), parent, &tokens)
}

/// An engine without replays, with an active subscriber that has block 0.
async fn heard() -> (TestEngine, FollowingRouter) {
    let (mut engine, events, _) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, None)])).await;
    while following.resident(7) == 0 {
        engine.store(0, false).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (engine, following)
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_with_bad_frames_are_counted_and_ignored() {
    let (mut engine, following) = heard().await;
    let gaps = following.count("kvfleet_engine_gaps_total", "7");
    // The next message, with other frames.
    let (kv, next) = (Bytes::from_static(b"kv"), numbered(engine.next));
    let more = Bytes::from(batch(0, &[storing(1..4)]));
    let lies: [&[&Bytes]; 8] = [
        &[&kv],
        &[&kv, &next],
        &[&kv, &more],
        &[&kv, &Bytes::new(), &next, &more],
        &[&kv, &next, &more, &Bytes::new()],
        &[&kv, &next.slice(1..), &more],
        &[&kv, &Bytes::from([&[0], &next[..]].concat()), &more],
        &[&kv, &Bytes::new(), &more],
    ];
    for lie in lies {
        engine.send(lie.iter().copied().cloned()).await;
    }
    following.until_count_of(MESSAGES, "malformed", lies.len() as f64).await;
    assert_eq!(following.resident(7), 1);
    // None of them used the number.
    engine.store(1, false).await;
    following.until(7, 2).await;
    let others = ["unreadable", "other_rank"].map(|outcome| following.count(MESSAGES, outcome));
    assert_eq!(others, [0.0; 2]);
    assert_eq!(following.count("kvfleet_engine_gaps_total", "7"), gaps);
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_and_foreign_payloads_are_counted_and_ignored() {
    let (mut engine, following) = heard().await;
    engine.store(1, false).await;
    following.until(7, 2).await;
    engine.say(&batch(1, &[storing(2..4)]), false).await;
    following.until_count_of(MESSAGES, "other_rank", 1.0).await;
    engine.store(2, false).await;
    following.until(7, 3).await;
    let whole = batch(0, &[storing(3..6)]);
    // A text in place of the block numbers.
    let mut shape = whole.clone();
    let at = whole.windows(6).position(|bytes| bytes == b"hashes").expect("the field exists") + 6;
    shape[at..at + 5].copy_from_slice(&[0xd9, 3, b'a', b'b', b'c']);
    // One more block than there are bytes for.
    let mut length = whole.clone();
    length[at + 1..at + 5].copy_from_slice(&u32::MAX.to_be_bytes());
    let lies =
        [whole[..whole.len() - 1].to_vec(), shape, length, [&[0x92], &whole[1..20]].concat(), vec![0xc0]];
    let applied = following.count(MESSAGES, "applied");
    for (nth, lie) in lies.iter().enumerate() {
        engine.say(lie, false).await;
        following.until_count_of(MESSAGES, "unreadable", nth as f64 + 1.0).await;
        following.until(7, 0).await;
    }
    assert_eq!(following.count(MESSAGES, "applied"), applied);
    // Their removals are unknown, until the next block proves its ancestors.
    engine.store(3, false).await;
    following.until(7, 4).await;
    let counts = ["malformed", "other_rank"].map(|outcome| following.count(MESSAGES, outcome));
    assert_eq!(counts, [0.0, 1.0]);
}

/// Greeting of a publisher.
fn greeting() -> Vec<u8> {
    let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    greeting.extend(b"NULL");
    greeting.resize(64, 0);
    greeting.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    greeting
}

/// A message in wire format, with these frame lengths.
fn wire(frames: &[(&[u8], u64)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (at, (frame, length)) in frames.iter().enumerate() {
        out.push(if at + 1 < frames.len() { 3 } else { 2 });
        out.extend(length.to_be_bytes());
        out.extend(*frame);
    }
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_violates_the_protocol_is_redialed_and_ignored() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let following = FollowingRouter::new(config(vec![dialed(7, port, None)])).await;
    let [two, one] = [2, 1].map(|blocks| batch(0, &[storing(0..blocks)]));
    let (kv, zero) = ((&b"kv"[..], 2), (&[0; 8][..], 8));
    let payload = |length: i64| (&two[..], two.len().saturating_add_signed(length as isize) as u64);
    let whole = wire(&[kv, zero, payload(0)]);
    let lies: [Vec<u8>; 5] = [
        // Frames of petabytes, and one byte longer than the data.
        [wire(&[kv, zero, (&two, 1 << 50)]), whole.clone()].concat(),
        wire(&[kv, zero, payload(1)]),
        // Nine frames.
        wire(&[&[kv, zero][..], &[payload(0); 7]].concat()),
        // Invalid flags, and a truncated command.
        [&b"\x42\0"[..], &whole].concat(),
        [&b"\x04\x02\xffx"[..], &whole].concat(),
    ];
    for lie in lies {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&[greeting(), lie].concat()).await.unwrap();
        stream.shutdown().await.unwrap();
        // The client has read everything and closes.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    // It dials again, and this connection is accepted.
    let (mut stream, _) = listener.accept().await.unwrap();
    let good = wire(&[kv, zero, (&one, one.len() as u64)]);
    stream.write_all(&[greeting(), good].concat()).await.unwrap();
    following.until(7, 1).await;
    let counts = ["applied", "malformed", "unreadable"].map(|outcome| following.count(MESSAGES, outcome));
    assert_eq!(counts, [1.0, 0.0, 0.0], "earlier data was no valid message");
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_with_look_ahead_hashes_are_left_out() {
    let (mut engine, following) = heard().await;
    let looking = |block: u64, ahead| {
        batch(0, &[payloads::stored_looking_ahead(block, block.checked_sub(1), &tokens(block), ahead)])
    };
    engine.say(&looking(1, None), false).await;
    following.until(7, 2).await;
    // The same tokens as in another request, with a different continuation and so another block.
    engine.say(&looking(2, Some(99)), false).await;
    following.until_count_of("kvfleet_engine_unmapped_blocks_total", "opaque", 1.0).await;
    assert_eq!(following.resident(7), 2);
    engine.store(2, false).await;
    following.until(7, 3).await;
}
