//! Reports to the router about relayed answers: length, pace, and abandoned requests.

use http_body_util::BodyExt;
use kvfleet_proto::pb;

use super::engine::{ScriptedEngine, Step, chunk, json_answer, last_chunk, stream_head};
use super::fixture::{BLOCK_TOKENS, ClientAnswer, GatewayFixture, STARTED_US, golden, read_answer};
use kvfleet_testkit::cluster::until;

/// An instance without an endpoint and without free KV memory.
const FULL_INSTANCE: u32 = 9;

fn number(headers: &hyper::HeaderMap) -> u64 {
    headers["x-kvfleet-request"].to_str().unwrap().parse().unwrap()
}

/// Output tokens and time between tokens in the router's decision log, once they fulfil `is_told`.
async fn usage(house: &GatewayFixture, request: u64, is_told: impl Fn(&(u32, u64)) -> bool) -> (u32, u64) {
    until("the usage of an answer", || async {
        let told = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        Some((told.output_tokens, told.tbt_us)).filter(&is_told)
    })
    .await
}

/// Output tokens that the router expects of a request. It is derived from the predicted wait for KV
/// memory, relative to a request for one token.
async fn expected_output_tokens(house: &GatewayFixture, nth: u64) -> u64 {
    let desk = house.cluster.routers[0].as_ref().unwrap().handle();
    let input_tokens = 16;
    let room_us = async |sequence, output_tokens| {
        let report = pb::ReportRequest {
            instance: FULL_INSTANCE,
            address: "i:9".into(),
            sequence,
            started_us: STARTED_US,
            kv_tokens_max: 10_000,
            kv_tokens: 10_000,
            ..Default::default()
        };
        desk.report(report).unwrap();
        let (block_tokens, among) = (BLOCK_TOKENS, Some(pb::CandidateSet { instances: vec![FULL_INSTANCE] }));
        let request = pb::RouteRequest {
            request: sequence,
            block_tokens,
            input_tokens,
            output_tokens,
            candidates: among,
            ..Default::default()
        };
        match desk.route(request).await.unwrap().answer {
            Some(pb::route_reply::Answer::Decision(decision)) => {
                decision.predicted.unwrap().kv_wait_us as f64
            }
            other => panic!("{other:?}"),
        }
    };
    let [one, all] = [room_us(2 * nth, 1).await, room_us(2 * nth + 1, 0).await];
    ((f64::from(input_tokens) + 1.0) * all / one - f64::from(input_tokens)).round() as u64
}

/// A stream event with text.
fn text_event(text: &str) -> String {
    format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learns_the_length_of_answers() {
    let engine = ScriptedEngine::start(vec![]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    assert_eq!(expected_output_tokens(&house, 1).await, 256, "the default before any answer");
    let ask = async |script: &[Step], tokens| {
        for _ in 0..30 {
            engine.next_answer(script.to_vec());
            let answer: ClientAnswer = house.chat().await;
            assert!(answer.is_whole);
            assert_eq!(usage(&house, number(&answer.headers), |told| told.0 > 0).await.0, tokens);
        }
    };
    // Usage counted by the engine, and otherwise by events.
    let usage = |tokens: u32| format!("{{\"choices\":[],\"usage\":{{\"completion_tokens\":{tokens}}}}}");
    ask(&json_answer(200, &usage(20)), 20).await;
    let short = expected_output_tokens(&house, 2).await;
    assert!((25..40).contains(&short), "{short} tokens after thirty answers of 20");
    ask(&[stream_head(), chunk(&format!("data: {}\n\n", usage(3_000))), last_chunk()], 3_000).await;
    let long = expected_output_tokens(&house, 3).await;
    assert!((1_450..1_600).contains(&long), "{long} tokens after thirty answers of 3000");
    let pieces: Vec<_> =
        (0..5).map(|_| chunk(&text_event("a"))).chain([chunk("data: [DONE]\n\n"), last_chunk()]).collect();
    ask(&[vec![stream_head()], pieces].concat(), 5).await;
    let mixed = expected_output_tokens(&house, 4).await;
    assert!((950..1_060).contains(&mixed), "{mixed} tokens after thirty answers of 5");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_report_of_an_answer_counts() {
    // The engine waits after each event until the test has received it.
    let pieces = (0..4).flat_map(|_| [chunk(&text_event("a")), Step::Gate]);
    let engine =
        ScriptedEngine::start([stream_head()].into_iter().chain(pieces).chain([last_chunk()]).collect())
            .await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    for engine_first in [false, true] {
        let (response, _connection) = house.start_request(&asked.path, &[], &asked.body).await;
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
                assert_eq!(usage(&house, request, |told| told.1 > 0).await, (70, 5));
            }
            engine.open_gate();
        }
        assert!(body.frame().await.is_none());
        let first = usage(&house, request, |told| told.0 > 0).await;
        match engine_first {
            true => assert_eq!(first, (70, 5)),
            false => assert!(first.0 == 4 && first.1 > 0, "{first:?}"),
        }
        tell(71, 6);
        until("the report to be sent", || async { house.outcomes.lock().is_empty().then_some(()) }).await;
        house.until_reported().await;
        assert_eq!(usage(&house, request, |_| true).await, first, "the first report counts");
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_answers_report_no_length() {
    let engine = ScriptedEngine::start(vec![]).await;
    let house = GatewayFixture::open(&[&engine], |_| {}).await;
    let asked = golden(1);
    let usage_event = "data: {\"usage\":{\"completion_tokens\":9}}\n\n";
    for (last, outcome) in [(Step::Hang, "left"), (Step::Close, "cut")] {
        engine.next_answer(vec![
            stream_head(),
            chunk(&text_event("a")),
            chunk(usage_event),
            Step::Gate,
            last,
        ]);
        let (response, connection) = house.start_request(&asked.path, &[], &asked.body).await;
        let request = number(response.headers());
        let mut body = response.into_body();
        body.frame().await.unwrap().unwrap();
        if outcome == "left" {
            connection.abort();
        } else {
            engine.open_gate();
            assert!(!read_answer(hyper::Response::new(body)).await.is_whole);
        }
        house.until_metric("kvfleet_gateway_requests_total", outcome, 1).await;
        // The engine's own report does not count either, since it may take the request for
        // complete.
        let told_by_engine = pb::Outcome { request, output_tokens: 9, tbt_us: 7, ..Default::default() };
        house.outcomes.lock().push(told_by_engine);
        assert_eq!(usage(&house, request, |told| told.1 > 0).await, (0, 7), "{outcome}");
    }
    // A client that disconnects after the last event has received the whole answer.
    engine.next_answer(vec![
        stream_head(),
        chunk(&text_event("a")),
        Step::Gate,
        chunk("data: [DONE]\n\n"),
        Step::Hang,
    ]);
    let (response, connection) = house.start_request(&asked.path, &[], &asked.body).await;
    let request = number(response.headers());
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    engine.open_gate();
    body.frame().await.unwrap().unwrap();
    connection.abort();
    house.until_metric("kvfleet_gateway_requests_total", "left", 2).await;
    assert_eq!(usage(&house, request, |told| told.0 > 0).await, (1, 0));
    // Errors have no length, and other answers count as before.
    engine.next_answer(json_answer(400, "{\"usage\":{\"completion_tokens\":9}}"));
    let refused = number(&house.chat().await.headers);
    engine.next_answer(json_answer(200, "{\"usage\":{\"completion_tokens\":2}}"));
    let answered = number(&house.chat().await.headers);
    assert_eq!(usage(&house, answered, |told| told.0 > 0).await, (2, 0));
    assert_eq!(usage(&house, refused, |_| true).await, (0, 0));
    let after = expected_output_tokens(&house, 1).await;
    assert!((155..185).contains(&after), "{after} tokens after two complete answers");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retried_answers_count_for_the_engine_that_served_them() {
    let script: Vec<Step> = [
        stream_head(),
        chunk(&text_event("a")),
        chunk(&text_event("b")),
        chunk("data: [DONE]\n\n"),
        last_chunk(),
    ]
    .into();
    let (bad, well) = (ScriptedEngine::start(vec![Step::Close]).await, ScriptedEngine::start(script).await);
    let house = GatewayFixture::open(&[&bad, &well], |config| config.openai.breaker.failures = 1_000).await;
    let answer = house.chat().await;
    assert_eq!((answer.status, answer.header("x-kvfleet-instance")), (200, Some("2")), "{answer:?}");
    let request = number(&answer.headers);
    assert_eq!(
        usage(&house, request, |(tokens, _)| *tokens > 0).await.0,
        2,
        "the engine that answered counts"
    );
    let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    assert_eq!((story.instance, story.answered_by), (1, Some(2)));
    house.close().await;
}
