//! What the router learns of answers that go by: how much was said, how fast, and that nobody waits any more.

use http_body_util::BodyExt;
use kvfleet_proto::pb;

use super::engine::{Engine, Step, end, piece, plain, stream_head};
use super::house::{Answer, BLOCK_TOKENS, House, STARTED_US, golden, whole};
use crate::harness::until;

/// What is behind no door, and has no room left.
const FULL: u32 = 9;

fn number(headers: &hyper::HeaderMap) -> u64 {
    headers["x-kvfleet-request"].to_str().unwrap().parse().unwrap()
}

/// What the router was told of a request, once it is as is waited for: tokens, and the time between two.
async fn told(house: &House, request: u64, is_told: impl Fn(&(u32, u64)) -> bool) -> (u32, u64) {
    until("word of an answer", || async {
        let told = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        Some((told.output_tokens, told.tbt_us)).filter(&is_told)
    })
    .await
}

/// How many tokens the router believes that a request says: by how much longer it waits for room than one that says a single token.
async fn believed(house: &House, nth: u64) -> u64 {
    let desk = house.cluster.routers[0].as_ref().unwrap().desk();
    let input_tokens = 16;
    let room_us = async |sequence, output_tokens| {
        let report = pb::ReportRequest {
            instance: FULL,
            address: "i:9".into(),
            sequence,
            started_us: STARTED_US,
            kv_tokens_max: 10_000,
            kv_tokens: 10_000,
            ..Default::default()
        };
        desk.report(report).unwrap();
        let (block_tokens, among) = (BLOCK_TOKENS, Some(pb::Among { instances: vec![FULL] }));
        let request = pb::RouteRequest {
            request: sequence,
            block_tokens,
            input_tokens,
            output_tokens,
            among,
            ..Default::default()
        };
        match desk.route(request).await.unwrap().answer {
            Some(pb::route_reply::Answer::Decision(decision)) => decision.predicted.unwrap().room_us as f64,
            other => panic!("{other:?}"),
        }
    };
    let [one, all] = [room_us(2 * nth, 1).await, room_us(2 * nth + 1, 0).await];
    ((f64::from(input_tokens) + 1.0) * all / one - f64::from(input_tokens)).round() as u64
}

/// An event with a piece of an answer.
fn said(text: &str) -> String {
    format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_much_answers_say_is_believed_after_a_few_of_them() {
    let engine = Engine::start(vec![]).await;
    let house = House::open(&[&engine], |_| {}).await;
    assert_eq!(believed(&house, 1).await, 256, "before anything was said");
    let ask = async |script: &[Step], tokens| {
        for _ in 0..30 {
            engine.once(script.to_vec());
            let answer: Answer = house.chat().await;
            assert!(answer.is_whole);
            assert_eq!(told(&house, number(&answer.headers), |told| told.0 > 0).await.0, tokens);
        }
    };
    // As an engine counts them, and where it does not, by the pieces that come.
    let usage = |tokens: u32| format!("{{\"choices\":[],\"usage\":{{\"completion_tokens\":{tokens}}}}}");
    ask(&plain(200, &usage(20)), 20).await;
    let short = believed(&house, 2).await;
    assert!((25..40).contains(&short), "{short} tokens behind thirty answers of 20");
    ask(&[stream_head(), piece(&format!("data: {}\n\n", usage(3_000))), end()], 3_000).await;
    let long = believed(&house, 3).await;
    assert!((1_450..1_600).contains(&long), "{long} tokens behind as many of 3000");
    let pieces: Vec<_> =
        (0..5).map(|_| piece(&said("a"))).chain([piece("data: [DONE]\n\n"), end()]).collect();
    ask(&[vec![stream_head()], pieces].concat(), 5).await;
    let mixed = believed(&house, 4).await;
    assert!((950..1_060).contains(&mixed), "{mixed} tokens behind as many of 5");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_tells_how_an_answer_ended_and_its_door_are_believed_once() {
    // It waits behind each piece until the test has it.
    let pieces = (0..4).flat_map(|_| [piece(&said("a")), Step::Gate]);
    let engine = Engine::start([stream_head()].into_iter().chain(pieces).chain([end()]).collect()).await;
    let house = House::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    for engine_first in [false, true] {
        let (response, _connection) = house.begin(&asked.path, &[], &asked.body).await;
        let request = number(response.headers());
        let tell = |output_tokens, tbt_us| {
            let outcome = pb::Outcome { request, output_tokens, tbt_us, ..Default::default() };
            house.outcomes.lock().push(outcome);
        };
        let mut body = response.into_body();
        for nth in 0..4 {
            assert!(body.frame().await.unwrap().unwrap().is_data());
            if engine_first && nth == 3 {
                tell(70, 5);
                assert_eq!(told(&house, request, |told| told.1 > 0).await, (70, 5));
            }
            engine.go_on();
        }
        assert!(body.frame().await.is_none());
        let first = told(&house, request, |told| told.0 > 0).await;
        match engine_first {
            true => assert_eq!(first, (70, 5)),
            false => assert!(first.0 == 4 && first.1 > 0, "{first:?}"),
        }
        tell(71, 6);
        until("it was told", || async { house.outcomes.lock().is_empty().then_some(()) }).await;
        house.reported().await;
        assert_eq!(told(&house, request, |_| true).await, first, "the first word counts");
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_an_answer_whose_caller_leaves_or_that_breaks_off_nobody_learns_how_long_it_was() {
    let engine = Engine::start(vec![]).await;
    let house = House::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let usage = "data: {\"usage\":{\"completion_tokens\":9}}\n\n";
    for (last, outcome) in [(Step::Hang, "left"), (Step::Close, "cut")] {
        engine.once(vec![stream_head(), piece(&said("a")), piece(usage), Step::Gate, last]);
        let (response, connection) = house.begin(&asked.path, &[], &asked.body).await;
        let request = number(response.headers());
        let mut body = response.into_body();
        body.frame().await.unwrap().unwrap();
        if outcome == "left" {
            connection.abort();
        } else {
            engine.go_on();
            assert!(!whole(hyper::Response::new(body)).await.is_whole);
        }
        house.until_figure("kvfleet_doors_requests_total", outcome, 1).await;
        // Nor from its engine, which may take it for one that has ended.
        let told_by_engine = pb::Outcome { request, output_tokens: 9, tbt_us: 7, ..Default::default() };
        house.outcomes.lock().push(told_by_engine);
        assert_eq!(told(&house, request, |told| told.1 > 0).await, (0, 7), "{outcome}");
    }
    // Who leaves behind the last word has heard all of it.
    engine.once(vec![stream_head(), piece(&said("a")), Step::Gate, piece("data: [DONE]\n\n"), Step::Hang]);
    let (response, connection) = house.begin(&asked.path, &[], &asked.body).await;
    let request = number(response.headers());
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    engine.go_on();
    body.frame().await.unwrap().unwrap();
    connection.abort();
    house.until_figure("kvfleet_doors_requests_total", "left", 2).await;
    assert_eq!(told(&house, request, |told| told.0 > 0).await, (1, 0));
    // What an engine refuses has no length either, and what is answered besides counts as before.
    engine.once(plain(400, "{\"usage\":{\"completion_tokens\":9}}"));
    let refused = number(&house.chat().await.headers);
    engine.once(plain(200, "{\"usage\":{\"completion_tokens\":2}}"));
    let answered = number(&house.chat().await.headers);
    assert_eq!(told(&house, answered, |told| told.0 > 0).await, (2, 0));
    assert_eq!(told(&house, refused, |_| true).await, (0, 0));
    let after = believed(&house, 1).await;
    assert!((155..185).contains(&after), "{after} tokens when two were answered");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_engine_answers_counts_as_its_own() {
    let script: Vec<Step> =
        [stream_head(), piece(&said("a")), piece(&said("b")), piece("data: [DONE]\n\n"), end()].into();
    let (bad, well) = (Engine::start(vec![Step::Close]).await, Engine::start(script).await);
    let house = House::open(&[&bad, &well], |config| config.openai.breaker.failures = 1_000).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("2")), "{answer:?}");
    let request = number(&answer.headers);
    assert_eq!(told(&house, request, |(tokens, _)| *tokens > 0).await.0, 2, "who answers says so");
    let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    assert_eq!((story.instance, story.answered_by), (1, Some(2)));
    house.close().await;
}
