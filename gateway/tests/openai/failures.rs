//! Failing engines: retries before the first byte, none after it.

use std::time::Duration;

use kvfleet_errors_doc::says;

use super::engine::{ScriptedEngine, Step, chunk, event_stream, events, json_answer, stream_head};
use super::fixture::{GatewayFixture, golden};

fn good() -> Vec<Step> {
    event_stream(&events(3))
}

fn good_bytes() -> Vec<u8> {
    events(3).concat().into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_on_another_engine_before_the_first_byte() {
    let (bad, well) = (ScriptedEngine::start(good()).await, ScriptedEngine::start(good()).await);
    let house = GatewayFixture::open(&[&bad, &well], |config| {
        config.openai.first_byte_ms = 300;
        config.openai.breaker.failures = 1_000;
    })
    .await;
    let head_only = vec![stream_head(), Step::Close];
    let scripts = [
        ("broken", vec![Step::Close]),
        ("broken", head_only),
        ("broken", vec![Step::Write(b"HTTP/1.1 200 OK\r\n".to_vec()), Step::Close]),
        ("broken", vec![Step::Write(b"nonsense\r\n\r\n".to_vec()), Step::Close]),
        ("late", vec![Step::Hang]),
        ("late", vec![stream_head(), Step::Hang]),
        ("status", json_answer(500, "no")),
        ("status", json_answer(502, "no")),
        ("status", json_answer(503, "no")),
        ("status", json_answer(504, "no")),
        ("status", json_answer(429, "no")),
        ("status", json_answer(408, "no")),
    ];
    for (at, (cause, script)) in scripts.into_iter().enumerate() {
        let (before, tried) = (house.metric("kvfleet_gateway_retries_total", cause), bad.received().len());
        bad.next_answer(script.clone());
        let answer = house.chat().await;
        assert_eq!(
            (answer.status, answer.header("x-kvfleet-instance")),
            (200, Some("2")),
            "{at}: {script:?}"
        );
        assert_eq!(answer.body, good_bytes());
        assert_eq!(house.metric("kvfleet_gateway_retries_total", cause), before + 1, "{at}: {script:?}");
        assert_eq!(bad.received().len(), tried + 1);
    }
    assert_eq!(well.received().len(), 12);
    assert_eq!(house.metric("kvfleet_gateway_retries_exhausted_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn skips_an_engine_that_refuses_connections() {
    let (gone, well) = (ScriptedEngine::start(vec![]).await, ScriptedEngine::start(good()).await);
    let house = GatewayFixture::open(&[&gone, &well], |_| {}).await;
    // The engine must be up when its health is checked.
    kvfleet_testkit::cluster::until("a health check", || async { (gone.health_checks() > 0).then_some(()) })
        .await;
    gone.stop().await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("2")));
    assert_eq!(house.metric("kvfleet_gateway_retries_total", "connect"), 1);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn does_not_retry_after_the_first_byte() {
    let (bad, well) = (ScriptedEngine::start(vec![]).await, ScriptedEngine::start(good()).await);
    let house = GatewayFixture::open(&[&bad, &well], |config| config.openai.idle_ms = 300).await;
    for end in [Step::Close, Step::Hang] {
        bad.next_answer(vec![stream_head(), chunk("data: 1\n\n"), end]);
        let answer = house.chat().await;
        assert_eq!((answer.status, answer.is_whole, &answer.body[..]), (200, false, &b"data: 1\n\n"[..]));
        assert_eq!(answer.header("x-kvfleet-instance"), Some("1"));
    }
    house.until_metric("kvfleet_gateway_requests_total", "cut", 2).await;
    assert!(well.received().is_empty());
    assert_eq!(house.metric("kvfleet_gateway_retries_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_other_statuses_without_retry() {
    let (first, second) = (ScriptedEngine::start(vec![]).await, ScriptedEngine::start(vec![]).await);
    let house = GatewayFixture::open(&[&first, &second], |_| {}).await;
    for status in [400, 401, 404, 422, 501] {
        first.next_answer(json_answer(status, "{\"mine\":1}"));
        let answer = house.chat().await;
        assert_eq!((answer.status, &answer.body[..]), (status, &b"{\"mine\":1}"[..]));
    }
    assert!(second.received().is_empty());
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returns_the_last_failure_when_all_fail() {
    let engines = [
        ScriptedEngine::start(json_answer(503, "one")).await,
        ScriptedEngine::start(json_answer(503, "two")).await,
    ];
    let house = GatewayFixture::open(&[&engines[0], &engines[1]], |_| {}).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, &answer.body[..]), (503, &b"two"[..]));
    assert_eq!(house.metric("kvfleet_gateway_retries_exhausted_total", ""), 1);
    for engine in &engines {
        engine.set_default(vec![Step::Close]);
    }
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (502, Some("2")));
    let (message, code) = answer.error();
    assert_eq!(code.as_deref(), Some("engine_failed"));
    says("engines that all break off", &message, &[]);
    assert_eq!(engines.map(|engine| engine.received().len()), [2, 2], "each engine once per request");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn respects_the_limit_of_attempts() {
    let engines = [
        ScriptedEngine::start(json_answer(503, "1")).await,
        ScriptedEngine::start(json_answer(503, "2")).await,
        ScriptedEngine::start(good()).await,
    ];
    let house = GatewayFixture::open(&[&engines[0], &engines[1], &engines[2]], |config| {
        config.openai.retry.attempts = 2;
    })
    .await;
    assert_eq!(house.chat().await.body, "2");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_500_is_retried_once_and_opens_no_breaker() {
    let engines = [
        ScriptedEngine::start(json_answer(500, "1")).await,
        ScriptedEngine::start(json_answer(500, "2")).await,
        ScriptedEngine::start(json_answer(500, "3")).await,
    ];
    let house = GatewayFixture::open(&[&engines[0], &engines[1], &engines[2]], |config| {
        config.openai.breaker.failures = 1;
    })
    .await;
    for _ in 0..3 {
        let answer = house.chat().await;
        assert_eq!((answer.status, &answer.body[..]), (500, &b"2"[..]));
    }
    assert_eq!(engines.map(|engine| engine.received().len()), [3, 3, 0]);
    assert_eq!(house.metric("kvfleet_gateway_breaker_opened_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_unstreamed_answer_is_not_retried() {
    let (slow, well) = (ScriptedEngine::start(vec![Step::Hang]).await, ScriptedEngine::start(good()).await);
    let house = GatewayFixture::open(&[&slow, &well], |config| {
        (config.openai.first_byte_ms, config.openai.breaker.failures) = (300, 1);
    })
    .await;
    let answer = house.request("/v1/completions", &[], r#"{"model":"m","prompt":[1,2,3]}"#).await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (504, Some("1")));
    assert!(well.received().is_empty());
    assert_eq!(house.metric("kvfleet_gateway_breaker_opened_total", ""), 0);
    // A stream would have had its first event by then.
    kvfleet_testkit::cluster::until("a stream answered by the other engine", || async {
        let body = r#"{"model":"m","prompt":[1,2,3],"stream":true}"#;
        let answer = house.request("/v1/completions", &[], body).await;
        assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("2")));
        (house.metric("kvfleet_gateway_breaker_opened_total", "") == 1).then_some(())
    })
    .await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_answer_completes() {
    let engine = ScriptedEngine::start(json_answer(200, "")).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    assert_eq!(house.chat().await.status, 200);
    house.until_metric("kvfleet_gateway_requests_total", "answered", 1).await;
    assert_eq!(house.metric("kvfleet_gateway_requests_total", "left"), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_breaker_opens_and_recovers() {
    let (bad, well) =
        (ScriptedEngine::start(json_answer(503, "no")).await, ScriptedEngine::start(good()).await);
    let house = GatewayFixture::open(&[&bad, &well], |config| {
        let breaker = &mut config.openai.breaker;
        (breaker.failures, breaker.successes, breaker.open_ms) = (2, 1, 1_000);
    })
    .await;
    for _ in 0..4 {
        assert_eq!(house.chat().await.header("x-kvfleet-instance"), Some("2"));
    }
    assert_eq!(bad.received().len(), 2, "its breaker is open");
    assert_eq!(house.metric("kvfleet_gateway_breakers_open", ""), 1);
    assert_eq!(house.metric("kvfleet_gateway_breaker_opened_total", ""), 1);
    bad.set_default(good());
    kvfleet_testkit::cluster::until("a trial request", || async {
        (house.chat().await.header("x-kvfleet-instance") == Some("1")).then_some(())
    })
    .await;
    house.until_metric("kvfleet_gateway_breakers_open", "", 0).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_breakers_are_open_tries_the_longest_open() {
    let engines = [
        ScriptedEngine::start(json_answer(503, "one")).await,
        ScriptedEngine::start(json_answer(503, "two")).await,
    ];
    let house =
        GatewayFixture::open(&[&engines[0], &engines[1]], |config| config.openai.breaker.failures = 1).await;
    for round in 1..=2 {
        assert_eq!(house.chat().await.body, "two");
        assert_eq!(engines.each_ref().map(|engine| engine.received().len()), [round, round]);
        assert_eq!(house.metric("kvfleet_gateway_breakers_open", ""), 2);
    }
    engines[0].set_default(good());
    for _ in 0..3 {
        let answer = house.chat().await;
        assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("1")));
    }
    assert_eq!(engines[1].received().len(), 2);
    assert_eq!(house.metric("kvfleet_gateway_requests_total", "nobody"), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn does_not_retry_when_the_fleet_is_full() {
    let engine = ScriptedEngine::start(good()).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    house.loads.lock()[0].1 = u64::from(u32::MAX);
    let status = async || {
        let answer = house.chat().await;
        (answer.status == 429).then_some(answer)
    };
    let answer = kvfleet_testkit::cluster::until("a refusal", status).await;
    let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!(seconds >= 1);
    let (message, code) = answer.error();
    assert_eq!(code.as_deref(), Some("rate_limit_exceeded"));
    assert!(message.contains("full queues"), "{message}");
    assert_eq!(house.metric("kvfleet_gateway_retries_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_503_without_engines() {
    let house = GatewayFixture::open(&[], |_| {}).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    says("a request where no engine is", &answer.error().0, &[]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_idle_connection_loses_no_request() {
    let engine = ScriptedEngine::start(good()).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let mut closing = good();
    closing.push(Step::Close);
    engine.set_default(closing);
    for _ in 0..20 {
        let answer = house.chat().await;
        assert_eq!((answer.status, answer.is_whole), (200, true));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(golden(1).path, super::fixture::CHAT);
    house.close().await;
}
