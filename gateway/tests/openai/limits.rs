//! Refusals: unreadable and oversized requests, and limits on load.

use kvfleet_errors_doc::says;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::engine::{ScriptedEngine, Step, chunk, json_answer, last_chunk, stream_head};
use super::fixture::{CHAT, GatewayFixture, golden, read_answer};
use kvfleet_testkit::cluster::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_requests_get_openai_errors() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let house = GatewayFixture::open(&[&engine], |config| config.openai.body_bytes_max = 5_000).await;
    let cases = [
        (CHAT, "{", 400, None),
        (CHAT, "", 400, None),
        (CHAT, "[]", 400, None),
        (CHAT, r#"{"model":"m"}"#, 400, None),
        (CHAT, r#"{"model":"other","messages":[]}"#, 404, Some("model_not_found")),
        ("/v1/completions", r#"{"model":"m","prompt":-1}"#, 400, None),
        ("/v1/completions", r#"{"model":"m","prompt":[1,-1]}"#, 400, None),
        ("/v1/completions", r#"{"model":"m","prompt":[[1],[4294967296]]}"#, 400, None),
        ("/v1/nothing", "{}", 404, None),
    ];
    for (path, body, status, code) in cases {
        let answer = house.request(path, &[("x-request-id", "q")], body).await;
        assert_eq!((answer.status, answer.error().1.as_deref()), (status, code), "{path} {body}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(path == "/v1/nothing" || answer.header("x-request-id") == Some("q"));
    }
    let long = format!(r#"{{"model":"m","prompt":[{}1]}}"#, "1,".repeat(2_400));
    assert_eq!(house.request("/v1/completions", &[], &long).await.status, 200);
    let context = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x ".repeat(2_300));
    let answer = house.request("/v1/completions", &[], &context).await;
    assert_eq!((answer.status, answer.error().1.as_deref()), (400, Some("context_length_exceeded")));
    assert_eq!(engine.received().len(), 1);
    house.until_metric("kvfleet_gateway_requests_total", "refused", 9).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_refuses_unknown_tokens() {
    let engine = ScriptedEngine::start(json_answer(400, r#"{"object":"error"}"#)).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    // The first token id after the vocabulary, and the largest one.
    for (nth, token) in (1..).zip([346, u32::MAX]) {
        let body = format!(r#"{{"model":"m","prompt":[1,{token}]}}"#);
        let answer = house.request("/v1/completions", &[], &body).await;
        assert_eq!((answer.status, &answer.body[..]), (400, &br#"{"object":"error"}"#[..]));
        assert_eq!(answer.header("x-kvfleet-instance"), Some("1"));
        assert_eq!(engine.received().last().map(|one| &*one.body), Some(body.as_bytes()));
        house.until_metric("kvfleet_gateway_requests_total", "answered", nth).await;
    }
    assert_eq!(house.metric("kvfleet_gateway_requests_total", "refused"), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hopeless_limits_get_a_retry_hint() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#;
    // With the profile of the fixture, a single step takes twenty milliseconds.
    for (name, limit, status) in [
        ("x-llm-d-slo-tpot-ms", "0.5", 429),
        ("x-llm-d-slo-tpot-ms", "5000", 200),
        ("x-llm-d-slo-tpot-ms", "soon", 200),
        ("x-llm-d-slo-ttft-ms", "1", 429),
        ("x-llm-d-slo-ttft-ms", "600000", 200),
    ] {
        let answer = house.request(CHAT, &[(name, limit)], body).await;
        assert_eq!(answer.status, status, "{name} {limit}");
        assert_eq!(answer.header("retry-after").is_some(), status == 429, "{name} {limit}");
    }
    assert_eq!(engine.received().len(), 3);
    house.until_metric("kvfleet_gateway_requests_total", "busy", 2).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refuses_oversized_bodies() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let house = GatewayFixture::open(&[&engine], |config| config.openai.body_bytes_max = 1_000).await;
    let answer = house.request(CHAT, &[], &"x".repeat(1_001)).await;
    assert_eq!(answer.status, 413);
    says("a body that is too long", &answer.error().0, &[]);
    let mut stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: d\r\ntransfer-encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![];
    let mut buffer = [0; 1_024];
    while !answer.starts_with(b"HTTP/1.1 413") {
        let _ = stream.write_all(format!("100\r\n{}\r\n", "x".repeat(256)).as_bytes()).await;
        let _ = tokio::time::timeout(std::time::Duration::from_millis(10), async {
            let read = stream.read(&mut buffer).await.unwrap_or(0);
            answer.extend_from_slice(&buffer[..read]);
        })
        .await;
    }
    assert!(engine.received().is_empty());
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_requests_in_flight() {
    let engine =
        ScriptedEngine::start(vec![stream_head(), chunk("data: 1\n\n"), Step::Gate, last_chunk()]).await;
    let house = GatewayFixture::open(&[&engine], |config| config.openai.requests_max = 1).await;
    let asked = golden(1);
    let (response, _connection) = house.start_request(&asked.path, &[], &asked.body).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    says("more requests than are taken", &answer.error().0, &[]);
    assert_eq!(house.metric("kvfleet_gateway_requests_total", "nobody"), 1);
    engine.open_gate();
    assert!(read_answer(response).await.is_whole);
    house.until_metric("kvfleet_gateway_requests_running", "", 0).await;
    engine.open_gate();
    assert_eq!(house.chat().await.status, 200);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_bytes_of_bodies_in_flight() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let house = GatewayFixture::open(&[&engine], |config| {
        (config.openai.body_bytes_max, config.openai.bodies_bytes_max) = (2_000, 2_000);
    })
    .await;
    // A client that has sent most of its body.
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: d\r\ncontent-length: 2000\r\n\r\n{}", "x".repeat(1_900));
    let begun = async || {
        let mut stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    };
    let stream = tokio::sync::Mutex::new(begun().await);
    let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(300));
    let refusal = async || {
        let answer = house.request("/v1/completions", &[], &body).await;
        let mut stream = stream.lock().await;
        // If this request was handled first, the other one was refused.
        if answer.status != 503 && stream.try_read(&mut [0]).is_ok() {
            *stream = begun().await;
        }
        (answer.status == 503).then_some(answer)
    };
    let answer = until("a refusal", refusal).await;
    says("more bytes of bodies than are taken", &answer.error().0, &[]);
    drop(stream);
    until("room", || async {
        (house.request("/v1/completions", &[], &body).await.status == 200).then_some(())
    })
    .await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refuses_a_slow_body() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let house = GatewayFixture::open(&[&engine], |config| config.openai.body_ms = 200).await;
    let mut stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: d\r\nconnection: close\r\ncontent-length: 2000\r\n\r\n{{");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    says("a body that takes too long to come", &body["error"]["message"].as_str().unwrap(), &[]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnects_a_client_that_does_not_read() {
    let large = "x".repeat(64 << 20);
    let engine = ScriptedEngine::start(vec![stream_head(), chunk(&large), last_chunk()]).await;
    let house = GatewayFixture::open(&[&engine], |config| config.openai.idle_ms = 300).await;
    let mut stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let body = golden(1).body;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: d\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    house.until_metric("kvfleet_gateway_requests_total", "left", 1).await;
    assert_eq!(house.metric("kvfleet_gateway_requests_running", ""), 0);
    drop(stream);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_identity_prevents_the_start() {
    let engine = ScriptedEngine::start(vec![]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let mut config = kvfleet_gateway::GatewayConfig::default();
    config.openai.listen = "127.0.0.1:0".into();
    let desk = house.cluster.routers[0].as_ref().unwrap().handle();
    let mut engines = super::fixture::engines_config();
    engines.identity.block_tokens = 0;
    let registry = prometheus::Registry::new();
    let opened = kvfleet_gateway::Gateway::open(&config, &engines, desk, &registry).await;
    says("a gateway with an invalid identity", &opened.expect_err("must be refused"), &[]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_prevents_the_start() {
    let engine = ScriptedEngine::start(vec![]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let mut config = kvfleet_gateway::GatewayConfig::default();
    config.openai.listen = engine.address.to_string();
    let desk = house.cluster.routers[0].as_ref().unwrap().handle();
    let (engines, registry) = (super::fixture::engines_config(), prometheus::Registry::new());
    let opened = kvfleet_gateway::Gateway::open(&config, &engines, desk, &registry).await;
    let error = opened.expect_err("must be refused");
    says("a port of the OpenAI-compatible API in use", &error, &[&engine.address.to_string()]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serves_models_and_health() {
    let engine = ScriptedEngine::start(vec![]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    for path in ["/health", "/livez", "/readyz"] {
        let answer = house.request(path, &[], "").await;
        assert_eq!((answer.status, &answer.body[..]), (200, &b"ok\n"[..]), "{path}");
    }
    let answer = house.request("/v1/models", &[], "").await;
    let text = std::str::from_utf8(&answer.body).unwrap();
    assert!(text.starts_with(r#"{"object":"list","data":[{"id":"m","object":"model","created":1"#), "{text}");
    assert!(text.ends_with(r#""owned_by":"kvfleet","max_model_len":4000}]}"#), "{text}");
    house.close().await;
}
