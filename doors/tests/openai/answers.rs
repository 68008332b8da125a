//! Answers as they go by: byte for byte, piece by piece, with their headers, and ended when the caller leaves.

use std::time::Duration;

use http_body_util::BodyExt;

use super::engine::{Engine, Step, end, events, piece, plain, stream_head, streamed};
use super::house::{CHAT, House, golden, whole};
use crate::harness::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_by_byte_for_byte_and_each_piece_at_once() {
    let events = events(59);
    // The engine waits behind each piece until the test has it.
    let mut steps = vec![stream_head()];
    steps.extend(events.iter().flat_map(|event| [piece(event), Step::Gate]));
    steps.push(end());
    let engine = Engine::start(steps).await;
    let house = House::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let (response, _connection) = house.begin(&asked.path, &[], &asked.body).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.headers()["x-engine"], "mine");
    assert_eq!(response.headers()["x-kvfleet-instance"], "1");
    assert_eq!(response.headers()["transfer-encoding"], "chunked");
    let mut body = response.into_body();
    for event in &events {
        let frame =
            tokio::time::timeout(crate::harness::HANG, body.frame()).await.expect("it is not held back");
        assert_eq!(frame.unwrap().unwrap().into_data().unwrap(), event.as_bytes());
        engine.go_on();
    }
    assert!(body.frame().await.is_none());
    house.until_figure("kvfleet_doors_requests_total", "answered", 1).await;
    assert_eq!(house.figure("kvfleet_doors_requests_running", ""), 0);
    let received = engine.received();
    assert_eq!(received.len(), 1);
    assert_eq!(received[0].body, asked.body.as_bytes(), "the body is as it came");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_go_by_in_both_directions_and_a_request_can_be_followed() {
    let engine = Engine::start(plain(200, r#"{"id":"x"}"#)).await;
    let house = House::open(&[&engine], |_| {}).await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let headers = [
        ("authorization", "Bearer secret"),
        ("x-request-id", "mine-1"),
        ("traceparent", trace),
        ("x-data-parallel-rank", "3"),
        ("connection", "x-own"),
        ("x-own", "1"),
    ];
    let asked = golden(0);
    let answer = house.ask(&format!("{CHAT}?a=b"), &headers, &asked.body).await;
    assert_eq!((answer.status, &answer.body[..]), (200, &br#"{"id":"x"}"#[..]));
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(answer.header("content-length"), Some("10"));
    let number: u64 = answer.header("x-kvfleet-request").unwrap().parse().unwrap();
    let next = house.ask(CHAT, &[], &asked.body).await;
    assert_eq!(next.header("x-kvfleet-request"), Some((number + 1).to_string().as_str()));
    assert_eq!(next.header("x-request-id").unwrap().len(), 32);
    let [first, second] = &engine.received()[..] else { panic!("two requests came") };
    assert!(first.head.starts_with("POST /v1/chat/completions?a=b HTTP/1.1"), "{}", first.head);
    let sent = |name| first.header(name);
    assert_eq!(sent("authorization").as_deref(), Some("Bearer secret"));
    assert_eq!(sent("traceparent").as_deref(), Some(trace));
    assert_eq!(sent("x-data-parallel-rank").as_deref(), Some("3"));
    assert_eq!(sent("host"), Some(engine.address.to_string()));
    assert_eq!((sent("x-own"), sent("x-request-id").as_deref()), (None, Some("mine-1")));
    assert_eq!(second.header("x-request-id").as_deref(), next.header("x-request-id"));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_go_to_the_engine_that_is_chosen_and_come_back_byte_for_byte() {
    // Spaces, an escape and the order of keys are the engine's, and bytes of numbers are no text for us.
    let said = |by: u32| format!("{{ \"data\":[{{\"embedding\":\"AACAPw=\\u003d\"}}],\"by\" : {by}}}\n");
    let engines = [Engine::start(plain(200, &said(1))).await, Engine::start(plain(200, &said(2))).await];
    let house = House::open(&engines.each_ref(), |_| {}).await;
    let bodies = [
        "{ \"model\":\"m\",  \"input\": [\"a text\", \"\u{e9}\"], \"encoding_format\":\"base64\"}",
        r#"{"input":[[1, 2],[3]],"model":"m"}"#,
    ];
    for (chosen, body) in (1..).zip(bodies) {
        // Whoever has least to do.
        house.loads.lock().iter_mut().for_each(|(instance, tokens)| {
            *tokens = if *instance == chosen { 1_000 } else { 50_000 };
        });
        house.reported().await;
        let answer = house.ask("/v1/embeddings", &[], body).await;
        assert_eq!((answer.status, &answer.body[..]), (200, said(chosen).as_bytes()));
        assert_eq!(answer.header("x-kvfleet-instance"), Some(chosen.to_string().as_str()));
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let [received] = &engines[chosen as usize - 1].received()[..] else { panic!("one request came") };
        assert!(received.head.starts_with("POST /v1/embeddings HTTP/1.1\r\n"), "{}", received.head);
        assert_eq!(received.body, body.as_bytes(), "the body is as it came");
        assert_eq!(received.header("x-kvfleet-request").as_deref(), answer.header("x-kvfleet-request"));
    }
    house.until_figure("kvfleet_doors_requests_total", "answered", 2).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_who_leaves_ends_the_request_at_the_engine() {
    let engine = Engine::start(vec![stream_head(), piece("data: 1\n\n"), Step::Hang]).await;
    let house = House::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let (response, connection) = house.begin(&asked.path, &[], &asked.body).await;
    let mut body = response.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "data: 1\n\n");
    assert_eq!(engine.left(), 0);
    connection.abort();
    until("the engine to see it", || async { (engine.left() == 1).then_some(()) }).await;
    house.until_figure("kvfleet_doors_requests_total", "left", 1).await;

    // And before any byte of an answer.
    engine.usually(vec![Step::Hang]);
    let asking = async { house.begin(&asked.path, &[], &asked.body).await };
    let came =
        async { until("the request", || async { (engine.received().len() == 2).then_some(()) }).await };
    tokio::select! {
        _ = asking => panic!("there is no answer"),
        () = came => {}
    }
    // `begin` keeps its connection in a task; only the door's own limit or the end of the runtime would end it, so a caller of its own leaves here.
    let stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: d\r\ncontent-length: {}\r\n\r\n{}",
        asked.body.len(),
        asked.body
    );
    let mut stream = stream;
    tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
    until("the request", || async { (engine.received().len() == 3).then_some(()) }).await;
    let before = engine.left();
    drop(stream);
    until("the engine to see it", || async { (engine.left() > before).then_some(()) }).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_the_engine_counts_otherwise_are_counted() {
    let engine = Engine::start(vec![]).await;
    let house = House::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let count = u32::try_from(asked.tokens.len()).unwrap();
    let compared = |label| house.figure("kvfleet_doors_prompt_tokens_compared_total", label);
    engine.once(streamed(&events(count)));
    assert!(house.chat().await.is_whole);
    house.until_figure("kvfleet_doors_requests_total", "answered", 1).await;
    assert_eq!((compared("equal"), compared("differs")), (1, 0));
    engine.once(streamed(&events(count + 1)));
    house.chat().await;
    house.until_figure("kvfleet_doors_requests_total", "answered", 2).await;
    assert_eq!((compared("equal"), compared("differs")), (1, 1));
    let whole_answer = format!("{{\"usage\": {{\"prompt_tokens\": {count}}}}}");
    engine.once(plain(200, &whole_answer));
    house.chat().await;
    house.until_figure("kvfleet_doors_requests_total", "answered", 3).await;
    assert_eq!((compared("equal"), compared("differs")), (2, 1));
    engine.once(plain(200, "{}"));
    house.chat().await;
    engine.once(plain(400, &whole_answer));
    assert_eq!(house.chat().await.status, 400);
    house.until_figure("kvfleet_doors_requests_total", "answered", 5).await;
    assert_eq!((compared("equal"), compared("differs")), (2, 1), "nothing to compare with");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_it_is_not_ready_first_and_ends_what_runs() {
    let engine = Engine::start(vec![
        stream_head(),
        piece("data: 1\n\n"),
        Step::Gate,
        piece("data: [DONE]\n\n"),
        end(),
    ])
    .await;
    let mut house = House::open(&[&engine], |config| config.openai.drain_notice_ms = 300).await;
    assert_eq!(house.ask("/readyz", &[], "").await.status, 200);
    let asked = golden(1);
    let (response, _connection) = house.begin(&asked.path, &[], &asked.body).await;
    let stopping = tokio::spawn(house.doors.take().unwrap().shutdown());
    // It says so while it still takes connections.
    until("readiness to end", || async { (house.ask("/readyz", &[], "").await.status == 503).then_some(()) })
        .await;
    assert_eq!(house.ask("/livez", &[], "").await.status, 200);
    until("no more connections", || async {
        tokio::net::TcpStream::connect(house.address).await.is_err().then_some(())
    })
    .await;
    assert!(!stopping.is_finished());
    engine.go_on();
    let answer = whole(response).await;
    assert_eq!((&answer.body[..], answer.is_whole), (&b"data: 1\n\ndata: [DONE]\n\n"[..], true));
    stopping.await.unwrap();
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_end_is_ended_when_stopping_took_too_long() {
    let engine = Engine::start(vec![stream_head(), piece("data: 1\n\n"), Step::Hang]).await;
    let mut house = House::open(&[&engine], |config| config.openai.drain_ms = 50).await;
    let asked = golden(1);
    let (response, _connection) = house.begin(&asked.path, &[], &asked.body).await;
    house.doors.take().unwrap().shutdown().await;
    let answer = whole(response).await;
    assert!(!answer.is_whole);
    until("the engine to see it", || async { (engine.left() == 1).then_some(()) }).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_drains_is_not_ready_and_still_answers() {
    let engine = Engine::start(streamed(&events(1))).await;
    let house = House::open(&[&engine], |_| {}).await;
    assert_eq!(house.ask("/readyz", &[], "").await.status, 200);
    let desk = house.cluster.routers[0].as_ref().unwrap().desk();
    assert!(desk.hand_over(Duration::from_secs(1)).await.is_empty());
    let answer = house.ask("/readyz", &[], "").await;
    assert_eq!(answer.status, 503);
    assert!(String::from_utf8_lossy(&answer.body).contains("draining"), "{answer:?}");
    assert_eq!(house.chat().await.status, 200, "whoever comes all the same is served");
    house.close().await;
}
