//! Engines with malformed event streams: invalid UTF-8, lines without `data:`, and missing or odd
//! line ends. The gateway relays them unchanged.
//!
//! Not here: engines that break off or stall (`failures.rs`), and the scanner itself
//! (`src/usage_scanner.rs`).

use super::engine::{ScriptedEngine, Step, byte_chunk, event_stream, events, last_chunk, stream_head};
use super::fixture::{ClientAnswer, GatewayFixture};
use kvfleet_testkit::cluster::HANG;

/// Malformed streams, each with the expected number of prompt token comparisons: one if the stream
/// reports a count.
fn malformed_streams() -> Vec<(&'static str, Vec<u8>, u64)> {
    let digits = "9".repeat(1 << 20);
    vec![
        (
            "invalid UTF-8",
            b"data: {\"choices\":[{\"delta\":{\"content\":\"\xff\xfe\xc3(\"}}]}\n\n".to_vec(),
            0,
        ),
        ("a split character", b"data: {\"content\":\"\xf0\x9f\n\ndata: \x98\x80\"}\n\n".to_vec(), 0),
        ("lines without `data:`", b"{\"content\":\"a\"}\n\n: \n\n{\"content\":\"b\"}\n\n".to_vec(), 0),
        (
            "all kinds of line ends",
            b"data: {\"content\":\"a\"}\r\n\r\ndata: {\"content\":\"b\"}\n\r\n\rdata: {}\r\r".to_vec(),
            0,
        ),
        ("an end inside an event", b"data: {\"usage\":{\"completion_tokens\":7,\"prompt_tok".to_vec(), 0),
        ("an end inside a number", b"data: {\"usage\":{\"prompt_tokens\":12".to_vec(), 1),
        ("a line of a mebibyte", [&b"data: "[..], "x".repeat(1 << 20).as_bytes()].concat(), 0),
        ("a number of a mebibyte", format!("data: {{\"prompt_tokens\":{digits}}}\n\n").into_bytes(), 1),
        ("zeros", vec![0; 4_096], 0),
    ]
}

/// Answer to the golden chat request, which is streamed.
async fn chat(house: &GatewayFixture) -> ClientAnswer {
    tokio::time::timeout(HANG, house.chat()).await.expect("an answer in time")
}

/// The bytes as a stream in chunks of this length.
fn in_chunks(bytes: &[u8], length: usize) -> Vec<Step> {
    let mut steps = vec![stream_head()];
    steps.extend(bytes.chunks(length).map(byte_chunk));
    steps.push(last_chunk());
    steps
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_malformed_streams_unchanged() {
    let engine = ScriptedEngine::start(event_stream(&events(1))).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let compared = || house.metric("kvfleet_gateway_prompt_tokens_compared_total", "");
    let mut answered = 0;
    for (what, bytes, comparisons) in malformed_streams() {
        // Unsplit, and split everywhere: in characters, in keys, inside line ends.
        for length in [bytes.len(), bytes.len().div_ceil(64), 3] {
            if bytes.len() / length > 10_000 {
                continue;
            }
            let before = compared();
            engine.next_answer(in_chunks(&bytes, length));
            let answer = chat(&house).await;
            assert_eq!((answer.status, answer.is_whole), (200, true), "{what} in pieces of {length}");
            assert!(answer.body == bytes, "{what} in pieces of {length}: {} bytes came", answer.body.len());
            answered += 1;
            house.until_metric("kvfleet_gateway_requests_total", "answered", answered).await;
            assert_eq!(compared() - before, comparisons, "{what} in pieces of {length}");
        }
    }
    assert_eq!(house.metric("kvfleet_gateway_requests_running", ""), 0);
    assert_eq!(house.metric("kvfleet_gateway_breakers_open", ""), 0, "none of these is a failure");
    assert_eq!(chat(&house).await.body, events(1).concat().into_bytes(), "the next answer is unaffected");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_stream_ends_where_it_broke() {
    let engine = ScriptedEngine::start(event_stream(&events(1))).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let whole = b"data: {\"choices\":[{\"delta\":{\"content\":\"\xc3\xa9\"}}]}\r\n\r\n";
    let cuts = [1, 5, 30, whole.len() - 10, whole.len() - 1];
    for (nth, cut) in (1..).zip(cuts) {
        engine.next_answer(vec![stream_head(), byte_chunk(&whole[..cut]), Step::Close]);
        let answer = chat(&house).await;
        assert_eq!((answer.status, answer.is_whole, &answer.body[..]), (200, false, &whole[..cut]), "{cut}");
        house.until_metric("kvfleet_gateway_requests_total", "cut", nth).await;
    }
    assert_eq!(house.metric("kvfleet_gateway_requests_running", ""), 0);
    assert_eq!(engine.received().len(), cuts.len(), "each request is sent once");
    house.close().await;
}
