//! Relaying of answers: unchanged bytes and headers, no delay, and cancellation.

use std::time::Duration;

use http_body_util::BodyExt;

use super::engine::{
    ScriptedEngine, Step, chunk, event_stream, events, json_answer, last_chunk, stream_head,
};
use super::fixture::{CHAT, GatewayFixture, golden, read_answer};
use kvfleet_testkit::cluster::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_a_stream_unchanged_and_without_delay() {
    let events = events(59);
    // The engine waits after each event until the test has received it.
    let mut steps = vec![stream_head()];
    steps.extend(events.iter().flat_map(|event| [chunk(event), Step::Gate]));
    steps.push(last_chunk());
    let engine = ScriptedEngine::start(steps).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let (response, _connection) = house.start_request(&asked.path, &[], &asked.body).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.headers()["x-engine"], "mine");
    assert_eq!(response.headers()["x-kvfleet-instance"], "1");
    assert_eq!(response.headers()["transfer-encoding"], "chunked");
    let mut body = response.into_body();
    for event in &events {
        let frame = tokio::time::timeout(kvfleet_testkit::cluster::HANG, body.frame())
            .await
            .expect("the event is relayed at once");
        assert_eq!(frame.unwrap().unwrap().into_data().unwrap(), event.as_bytes());
        engine.open_gate();
    }
    assert!(body.frame().await.is_none());
    house.until_metric("kvfleet_gateway_requests_total", "answered", 1).await;
    assert_eq!(house.metric("kvfleet_gateway_requests_running", ""), 0);
    let received = engine.received();
    assert_eq!(received.len(), 1);
    assert_eq!(received[0].body, asked.body.as_bytes(), "the body is unchanged");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_headers_and_request_ids() {
    let engine = ScriptedEngine::start(json_answer(200, r#"{"id":"x"}"#)).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
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
    let answer = house.request(&format!("{CHAT}?a=b"), &headers, &asked.body).await;
    assert_eq!((answer.status, &answer.body[..]), (200, &br#"{"id":"x"}"#[..]));
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(answer.header("content-length"), Some("10"));
    let number: u64 = answer.header("x-kvfleet-request").unwrap().parse().unwrap();
    let next = house.request(CHAT, &[], &asked.body).await;
    assert_eq!(next.header("x-kvfleet-request"), Some((number + 1).to_string().as_str()));
    assert_eq!(next.header("x-request-id").unwrap().len(), 32);
    let [first, second] = &engine.received()[..] else { panic!("expected two requests") };
    assert!(first.head.starts_with("POST /v1/chat/completions?a=b HTTP/1.1"), "{}", first.head);
    let sent = |name| first.header(name);
    assert_eq!(sent("authorization").as_deref(), Some("Bearer secret"));
    assert_eq!(sent("traceparent").as_deref(), Some(trace));
    assert_eq!(sent("x-data-parallel-rank"), None, "a caller does not choose the rank");
    assert_eq!(sent("host"), Some(engine.address.to_string()));
    assert_eq!((sent("x-own"), sent("x-request-id").as_deref()), (None, Some("mine-1")));
    assert_eq!(second.header("x-request-id").as_deref(), next.header("x-request-id"));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_embeddings_of_the_chosen_engine() {
    // The engine's formatting is preserved, and base64 data is never decoded.
    let said = |by: u32| format!("{{ \"data\":[{{\"embedding\":\"AACAPw=\\u003d\"}}],\"by\" : {by}}}\n");
    let engines = [
        ScriptedEngine::start(json_answer(200, &said(1))).await,
        ScriptedEngine::start(json_answer(200, &said(2))).await,
    ];
    let house = GatewayFixture::open(&engines.each_ref(), |_| {}).await;
    let bodies = [
        "{ \"model\":\"m\",  \"input\": [\"a text\", \"\u{e9}\"], \"encoding_format\":\"base64\"}",
        r#"{"input":[[1, 2],[3]],"model":"m"}"#,
    ];
    for (chosen, body) in (1..).zip(bodies) {
        // The chosen engine is the least loaded one.
        house.loads.lock().iter_mut().for_each(|(instance, tokens)| {
            *tokens = if *instance == chosen { 1_000 } else { 50_000 };
        });
        house.until_reported().await;
        let answer = house.request("/v1/embeddings", &[], body).await;
        assert_eq!((answer.status, &answer.body[..]), (200, said(chosen).as_bytes()));
        assert_eq!(answer.header("x-kvfleet-instance"), Some(chosen.to_string().as_str()));
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let [received] = &engines[chosen as usize - 1].received()[..] else { panic!("expected one request") };
        assert!(received.head.starts_with("POST /v1/embeddings HTTP/1.1\r\n"), "{}", received.head);
        assert_eq!(received.body, body.as_bytes(), "the body is unchanged");
        assert_eq!(received.header("x-kvfleet-request").as_deref(), answer.header("x-kvfleet-request"));
    }
    house.until_metric("kvfleet_gateway_requests_total", "answered", 2).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_disconnect_aborts_the_engine_request() {
    let engine = ScriptedEngine::start(vec![stream_head(), chunk("data: 1\n\n"), Step::Hang]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let (response, connection) = house.start_request(&asked.path, &[], &asked.body).await;
    let mut body = response.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "data: 1\n\n");
    assert_eq!(engine.disconnects(), 0);
    connection.abort();
    until("the engine to notice the disconnect", || async { (engine.disconnects() == 1).then_some(()) })
        .await;
    house.until_metric("kvfleet_gateway_requests_total", "left", 1).await;

    // Also before the first byte of an answer.
    engine.set_default(vec![Step::Hang]);
    let asking = async { house.start_request(&asked.path, &[], &asked.body).await };
    let came =
        async { until("the request", || async { (engine.received().len() == 2).then_some(()) }).await };
    tokio::select! {
        _ = asking => panic!("the engine never answers"),
        () = came => {}
    }
    // `start_request` keeps its connection open in a task, so a plain connection is used to
    // disconnect.
    let stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: d\r\ncontent-length: {}\r\n\r\n{}",
        asked.body.len(),
        asked.body
    );
    let mut stream = stream;
    tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
    until("the request", || async { (engine.received().len() == 3).then_some(()) }).await;
    let before = engine.disconnects();
    drop(stream);
    until("the engine to notice the disconnect", || async { (engine.disconnects() > before).then_some(()) })
        .await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compares_prompt_token_counts() {
    let engine = ScriptedEngine::start(vec![]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let count = u32::try_from(asked.tokens.len()).unwrap();
    let compared = |label| house.metric("kvfleet_gateway_prompt_tokens_compared_total", label);
    engine.next_answer(event_stream(&events(count)));
    assert!(house.chat().await.is_whole);
    house.until_metric("kvfleet_gateway_requests_total", "answered", 1).await;
    assert_eq!((compared("equal"), compared("differs")), (1, 0));
    engine.next_answer(event_stream(&events(count + 1)));
    house.chat().await;
    house.until_metric("kvfleet_gateway_requests_total", "answered", 2).await;
    assert_eq!((compared("equal"), compared("differs")), (1, 1));
    let whole_answer = format!("{{\"usage\": {{\"prompt_tokens\": {count}}}}}");
    engine.next_answer(json_answer(200, &whole_answer));
    house.chat().await;
    house.until_metric("kvfleet_gateway_requests_total", "answered", 3).await;
    assert_eq!((compared("equal"), compared("differs")), (2, 1));
    engine.next_answer(json_answer(200, "{}"));
    house.chat().await;
    engine.next_answer(json_answer(400, &whole_answer));
    assert_eq!(house.chat().await.status, 400);
    house.until_metric("kvfleet_gateway_requests_total", "answered", 5).await;
    assert_eq!((compared("equal"), compared("differs")), (2, 1), "no count to compare");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_fails_readiness_and_drains() {
    let engine = ScriptedEngine::start(vec![
        stream_head(),
        chunk("data: 1\n\n"),
        Step::Gate,
        chunk("data: [DONE]\n\n"),
        last_chunk(),
    ])
    .await;
    let mut house = GatewayFixture::open(&[&engine], |config| config.openai.drain_notice_ms = 300).await;
    assert_eq!(house.request("/readyz", &[], "").await.status, 200);
    let asked = golden(1);
    let (response, _connection) = house.start_request(&asked.path, &[], &asked.body).await;
    let stopping = tokio::spawn(house.gateway.take().unwrap().shutdown());
    // Readiness fails while connections are still accepted.
    until("readiness to end", || async {
        (house.request("/readyz", &[], "").await.status == 503).then_some(())
    })
    .await;
    assert_eq!(house.request("/livez", &[], "").await.status, 200);
    until("no more connections", || async {
        tokio::net::TcpStream::connect(house.address).await.is_err().then_some(())
    })
    .await;
    assert!(!stopping.is_finished());
    engine.open_gate();
    let answer = read_answer(response).await;
    assert_eq!((&answer.body[..], answer.is_whole), (&b"data: 1\n\ndata: [DONE]\n\n"[..], true));
    stopping.await.unwrap();
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_aborts_requests_after_the_drain_time() {
    let engine = ScriptedEngine::start(vec![stream_head(), chunk("data: 1\n\n"), Step::Hang]).await;
    let mut house = GatewayFixture::open(&[&engine], |config| config.openai.drain_ms = 50).await;
    let asked = golden(1);
    let (response, _connection) = house.start_request(&asked.path, &[], &asked.body).await;
    house.gateway.take().unwrap().shutdown().await;
    let answer = read_answer(response).await;
    assert!(!answer.is_whole);
    until("the engine to notice the abort", || async { (engine.disconnects() == 1).then_some(()) }).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_router_fails_readiness_but_serves() {
    let engine = ScriptedEngine::start(event_stream(&events(1))).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    assert_eq!(house.request("/readyz", &[], "").await.status, 200);
    let desk = house.cluster.routers[0].as_ref().unwrap().handle();
    assert!(desk.hand_over_leadership(Duration::from_secs(1)).await.is_empty());
    let answer = house.request("/readyz", &[], "").await;
    assert_eq!(answer.status, 503);
    assert!(String::from_utf8_lossy(&answer.body).contains("draining"), "{answer:?}");
    assert_eq!(house.chat().await.status, 200, "requests are still served");
    house.close().await;
}
