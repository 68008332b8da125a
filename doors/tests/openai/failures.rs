//! Engines that fail: before the first byte another one answers, after it nobody does.

use std::time::Duration;

use kvfleet_errors_doc::says;

use super::engine::{Engine, Step, events, piece, plain, stream_head, streamed};
use super::house::{House, golden};

fn good() -> Vec<Step> {
    streamed(&events(3))
}

fn good_bytes() -> Vec<u8> {
    events(3).concat().into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_first_byte_another_engine_answers() {
    let (bad, well) = (Engine::start(good()).await, Engine::start(good()).await);
    let house = House::open(&[&bad, &well], |config| {
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
        ("status", plain(500, "no")),
        ("status", plain(502, "no")),
        ("status", plain(503, "no")),
        ("status", plain(504, "no")),
        ("status", plain(429, "no")),
        ("status", plain(408, "no")),
    ];
    for (at, (cause, script)) in scripts.into_iter().enumerate() {
        let (before, tried) = (house.figure("kvfleet_doors_retries_total", cause), bad.received().len());
        bad.once(script.clone());
        let answer = house.chat().await;
        assert_eq!(
            (answer.status, answer.header("x-kvfleet-instance")),
            (200, Some("2")),
            "{at}: {script:?}"
        );
        assert_eq!(answer.body, good_bytes());
        assert_eq!(house.figure("kvfleet_doors_retries_total", cause), before + 1, "{at}: {script:?}");
        assert_eq!(bad.received().len(), tried + 1);
    }
    assert_eq!(well.received().len(), 12);
    assert_eq!(house.figure("kvfleet_doors_retries_exhausted_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_no_connection_is_passed_over() {
    let (gone, well) = (Engine::start(vec![]).await, Engine::start(good()).await);
    let house = House::open(&[&gone, &well], |_| {}).await;
    // It was there when it was asked.
    crate::harness::until("its health to be asked", || async {
        (gone.asked_whether_well() > 0).then_some(())
    })
    .await;
    gone.gone().await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("2")));
    assert_eq!(house.figure("kvfleet_doors_retries_total", "connect"), 1);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_first_byte_the_answer_breaks_off_and_nobody_else_is_asked() {
    let (bad, well) = (Engine::start(vec![]).await, Engine::start(good()).await);
    let house = House::open(&[&bad, &well], |config| config.openai.idle_ms = 300).await;
    for end in [Step::Close, Step::Hang] {
        bad.once(vec![stream_head(), piece("data: 1\n\n"), end]);
        let answer = house.chat().await;
        assert_eq!((answer.status, answer.is_whole, &answer.body[..]), (200, false, &b"data: 1\n\n"[..]));
        assert_eq!(answer.header("x-kvfleet-instance"), Some("1"));
    }
    house.until_figure("kvfleet_doors_requests_total", "cut", 2).await;
    assert!(well.received().is_empty());
    assert_eq!(house.figure("kvfleet_doors_retries_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_answers_of_an_engine_are_the_callers() {
    let (first, second) = (Engine::start(vec![]).await, Engine::start(vec![]).await);
    let house = House::open(&[&first, &second], |_| {}).await;
    for status in [400, 401, 404, 422, 501] {
        first.once(plain(status, "{\"mine\":1}"));
        let answer = house.chat().await;
        assert_eq!((answer.status, &answer.body[..]), (status, &b"{\"mine\":1}"[..]));
    }
    assert!(second.received().is_empty());
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_fail_the_caller_hears_of_the_last_one() {
    let engines = [Engine::start(plain(503, "one")).await, Engine::start(plain(503, "two")).await];
    let house = House::open(&[&engines[0], &engines[1]], |_| {}).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, &answer.body[..]), (503, &b"two"[..]));
    assert_eq!(house.figure("kvfleet_doors_retries_exhausted_total", ""), 1);
    for engine in &engines {
        engine.usually(vec![Step::Close]);
    }
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (502, Some("2")));
    let (message, code) = answer.problem();
    assert_eq!(code.as_deref(), Some("engine_failed"));
    says("engines that all break off", &message, &[]);
    assert_eq!(engines.map(|engine| engine.received().len()), [2, 2], "each once a request");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_engines_are_tried_than_was_said() {
    let engines = [
        Engine::start(plain(503, "1")).await,
        Engine::start(plain(503, "2")).await,
        Engine::start(good()).await,
    ];
    let house =
        House::open(&[&engines[0], &engines[1], &engines[2]], |config| config.openai.retry.attempts = 2)
            .await;
    assert_eq!(house.chat().await.body, "2");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_engines_fail_at_is_tried_once_more_and_opens_no_breaker() {
    let engines = [
        Engine::start(plain(500, "1")).await,
        Engine::start(plain(500, "2")).await,
        Engine::start(plain(500, "3")).await,
    ];
    let house = House::open(&[&engines[0], &engines[1], &engines[2]], |config| {
        config.openai.breaker.failures = 1;
    })
    .await;
    for _ in 0..3 {
        let answer = house.chat().await;
        assert_eq!((answer.status, &answer.body[..]), (500, &b"2"[..]));
    }
    assert_eq!(engines.map(|engine| engine.received().len()), [3, 3, 0]);
    assert_eq!(house.figure("kvfleet_doors_breaker_opened_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_one_piece_that_takes_long_is_made_once_and_opens_no_breaker() {
    let (slow, well) = (Engine::start(vec![Step::Hang]).await, Engine::start(good()).await);
    let house = House::open(&[&slow, &well], |config| {
        (config.openai.first_byte_ms, config.openai.breaker.failures) = (300, 1);
    })
    .await;
    let answer = house.ask("/v1/completions", &[], r#"{"model":"m","prompt":[1,2,3]}"#).await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (504, Some("1")));
    assert!(well.received().is_empty());
    assert_eq!(house.figure("kvfleet_doors_breaker_opened_total", ""), 0);
    // Of a stream, the first piece would have come.
    crate::harness::until("a stream that another one had to answer", || async {
        let body = r#"{"model":"m","prompt":[1,2,3],"stream":true}"#;
        let answer = house.ask("/v1/completions", &[], body).await;
        assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("2")));
        (house.figure("kvfleet_doors_breaker_opened_total", "") == 1).then_some(())
    })
    .await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_without_a_body_has_an_end() {
    let engine = Engine::start(plain(200, "")).await;
    let house = House::open(&[&engine], |_| {}).await;
    assert_eq!(house.chat().await.status, 200);
    house.until_figure("kvfleet_doors_requests_total", "answered", 1).await;
    assert_eq!(house.figure("kvfleet_doors_requests_total", "left"), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_fails_too_often_is_left_alone_and_tried_again_later() {
    let (bad, well) = (Engine::start(plain(503, "no")).await, Engine::start(good()).await);
    let house = House::open(&[&bad, &well], |config| {
        let breaker = &mut config.openai.breaker;
        (breaker.failures, breaker.successes, breaker.open_ms) = (2, 1, 1_000);
    })
    .await;
    for _ in 0..4 {
        assert_eq!(house.chat().await.header("x-kvfleet-instance"), Some("2"));
    }
    assert_eq!(bad.received().len(), 2, "it is left alone");
    assert_eq!(house.figure("kvfleet_doors_breakers_open", ""), 1);
    assert_eq!(house.figure("kvfleet_doors_breaker_opened_total", ""), 1);
    bad.usually(good());
    crate::harness::until("it to be tried again", || async {
        (house.chat().await.header("x-kvfleet-instance") == Some("1")).then_some(())
    })
    .await;
    house.until_figure("kvfleet_doors_breakers_open", "", 0).await;
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_all_are_left_alone_the_first_of_them_is_asked() {
    let engines = [Engine::start(plain(503, "one")).await, Engine::start(plain(503, "two")).await];
    let house = House::open(&[&engines[0], &engines[1]], |config| config.openai.breaker.failures = 1).await;
    for round in 1..=2 {
        assert_eq!(house.chat().await.body, "two");
        assert_eq!(engines.each_ref().map(|engine| engine.received().len()), [round, round]);
        assert_eq!(house.figure("kvfleet_doors_breakers_open", ""), 2);
    }
    engines[0].usually(good());
    for _ in 0..3 {
        let answer = house.chat().await;
        assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("1")));
    }
    assert_eq!(engines[1].received().len(), 2);
    assert_eq!(house.figure("kvfleet_doors_requests_total", "nobody"), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_fleet_is_not_asked_again() {
    let engine = Engine::start(good()).await;
    let house = House::open(&[&engine], |_| {}).await;
    house.loads.lock()[0].1 = u64::from(u32::MAX);
    let status = async || {
        let answer = house.chat().await;
        (answer.status == 429).then_some(answer)
    };
    let answer = crate::harness::until("a refusal", status).await;
    let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!(seconds >= 1);
    let (message, code) = answer.problem();
    assert_eq!(code.as_deref(), Some("rate_limit_exceeded"));
    assert!(message.contains("full queues"), "{message}");
    assert_eq!(house.figure("kvfleet_doors_retries_total", ""), 0);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_engines_nobody_answers() {
    let house = House::open(&[], |_| {}).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    says("a request where no engine is", &answer.problem().0, &[]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_that_the_engine_closed_costs_no_request() {
    let engine = Engine::start(good()).await;
    let house = House::open(&[&engine], |_| {}).await;
    let mut closing = good();
    closing.push(Step::Close);
    engine.usually(closing);
    for _ in 0..20 {
        let answer = house.chat().await;
        assert_eq!((answer.status, answer.is_whole), (200, true));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(golden(1).path, super::house::CHAT);
    house.close().await;
}
