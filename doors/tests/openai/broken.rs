//! Engines whose streams are no streams of events: bytes that are no text, events without their word or without an end, lines without an end. They are
//! the caller's to make sense of, and go by as all others do.
//!
//! Not here: engines that break off or stand still (`failures.rs`), and what is counted of such bytes (`src/tally.rs`).

use super::engine::{Engine, Step, end, events, piece_of_bytes, stream_head, streamed};
use super::house::{Answer, House};
use crate::harness::HANG;

/// What an engine writes, and how many times its count of the prompt's tokens is compared with the door's: once where it says one.
fn nonsense() -> Vec<(&'static str, Vec<u8>, u64)> {
    let digits = "9".repeat(1 << 20);
    vec![
        ("no text", b"data: {\"choices\":[{\"delta\":{\"content\":\"\xff\xfe\xc3(\"}}]}\n\n".to_vec(), 0),
        ("a letter cut in two", b"data: {\"content\":\"\xf0\x9f\n\ndata: \x98\x80\"}\n\n".to_vec(), 0),
        ("events without their word", b"{\"content\":\"a\"}\n\n: \n\n{\"content\":\"b\"}\n\n".to_vec(), 0),
        (
            "ends of lines of every kind",
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

/// The answer to the golden chat, which is a stream.
async fn heard(house: &House) -> Answer {
    tokio::time::timeout(HANG, house.chat()).await.expect("it does not hang")
}

/// These bytes as a stream, in pieces of so many.
fn in_pieces(bytes: &[u8], length: usize) -> Vec<Step> {
    let mut steps = vec![stream_head()];
    steps.extend(bytes.chunks(length).map(piece_of_bytes));
    steps.push(end());
    steps
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_stream_of_events_goes_by_byte_for_byte() {
    let engine = Engine::start(streamed(&events(1))).await;
    let house = House::open(&[&engine], |_| {}).await;
    let compared = || house.figure("kvfleet_doors_prompt_tokens_compared_total", "");
    let mut answered = 0;
    for (what, bytes, comparisons) in nonsense() {
        // Whole, and cut everywhere: in a letter, in a key, between the two bytes of an end of a line.
        for length in [bytes.len(), bytes.len().div_ceil(64), 3] {
            if bytes.len() / length > 10_000 {
                continue;
            }
            let before = compared();
            engine.once(in_pieces(&bytes, length));
            let answer = heard(&house).await;
            assert_eq!((answer.status, answer.is_whole), (200, true), "{what} in pieces of {length}");
            assert!(answer.body == bytes, "{what} in pieces of {length}: {} bytes came", answer.body.len());
            answered += 1;
            house.until_figure("kvfleet_doors_requests_total", "answered", answered).await;
            assert_eq!(compared() - before, comparisons, "{what} in pieces of {length}");
        }
    }
    assert_eq!(house.figure("kvfleet_doors_requests_running", ""), 0);
    assert_eq!(house.figure("kvfleet_doors_breakers_open", ""), 0, "nothing of it is a failure");
    assert_eq!(heard(&house).await.body, events(1).concat().into_bytes(), "and the next one is as any");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_cut_in_an_event_breaks_off_where_it_was_cut() {
    let engine = Engine::start(streamed(&events(1))).await;
    let house = House::open(&[&engine], |_| {}).await;
    let whole = b"data: {\"choices\":[{\"delta\":{\"content\":\"\xc3\xa9\"}}]}\r\n\r\n";
    let cuts = [1, 5, 30, whole.len() - 10, whole.len() - 1];
    for (nth, cut) in (1..).zip(cuts) {
        engine.once(vec![stream_head(), piece_of_bytes(&whole[..cut]), Step::Close]);
        let answer = heard(&house).await;
        assert_eq!((answer.status, answer.is_whole, &answer.body[..]), (200, false, &whole[..cut]), "{cut}");
        house.until_figure("kvfleet_doors_requests_total", "cut", nth).await;
    }
    assert_eq!(house.figure("kvfleet_doors_requests_running", ""), 0);
    assert_eq!(engine.received().len(), cuts.len(), "each request is sent once");
    house.close().await;
}
