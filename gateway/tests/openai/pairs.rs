//! Disaggregated prefill and decode, with failures of either engine.

use serde_json::{Value, json};

use super::engine::{ScriptedEngine, Step, event_stream, events, json_answer};
use super::fixture::{GatewayFixture, golden};
use kvfleet_testkit::cluster::until;

/// Answer of a prefill engine.
fn prefill_answer() -> Vec<Step> {
    json_answer(
        200,
        r#"{"id": "x", "choices": [], "kv_transfer_params": {"remote_host": "p", "remote_block_ids": [1, 2]}}"#,
    )
}

fn decode_answer() -> Vec<Step> {
    event_stream(&events(3))
}

/// Engines 1 and 2 prefill, 3 and 4 decode.
async fn start_fixture(engines: &[ScriptedEngine; 4]) -> GatewayFixture {
    GatewayFixture::open(&engines.each_ref(), |config| {
        for (endpoint, role) in config.endpoints.iter_mut().zip(["prefill", "prefill", "decode", "decode"]) {
            endpoint.role = role.to_owned();
        }
        config.openai.breaker.failures = 1_000;
    })
    .await
}

async fn engines() -> [ScriptedEngine; 4] {
    let [one, two] =
        [ScriptedEngine::start(prefill_answer()).await, ScriptedEngine::start(prefill_answer()).await];
    let [three, four] =
        [ScriptedEngine::start(decode_answer()).await, ScriptedEngine::start(decode_answer()).await];
    [one, two, three, four]
}

fn json(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefills_on_one_engine_and_decodes_on_another() {
    let engines = engines().await;
    let house = start_fixture(&engines).await;
    let said = house.chat().await;
    assert_eq!(said.status, 200, "{said:?}");
    assert_eq!(said.body, events(3).concat().into_bytes(), "unchanged");
    assert_eq!(said.header("x-kvfleet-prefill-instance"), Some("1"));
    let by: usize = said.header("x-kvfleet-instance").unwrap().parse().unwrap();
    assert!([3, 4].contains(&by), "{by}");
    let (first, second) = (engines[0].received(), engines[by - 1].received());
    assert_eq!((first.len(), second.len()), (1, 1));
    let asked = json(golden(1).body.as_bytes());
    let (first_body, second_body) = (json(&first[0].body), json(&second[0].body));
    assert_eq!((&first_body["max_tokens"], &first_body["stream"]), (&json!(1), &json!(false)));
    assert_eq!(first_body["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(first_body["messages"], asked["messages"]);
    assert_eq!(second_body["kv_transfer_params"], json!({"remote_host": "p", "remote_block_ids": [1, 2]}));
    let mut as_asked = second_body.clone();
    as_asked.as_object_mut().unwrap().remove("kv_transfer_params");
    assert_eq!(as_asked, asked, "all else is unchanged");
    for header in ["x-request-id", "x-kvfleet-request"] {
        assert!(first[0].header(header).is_some() && first[0].header(header) == second[0].header(header));
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaces_a_failed_prefill_or_decode_engine() {
    let engines = engines().await;
    let house = start_fixture(&engines).await;
    let cases = [
        (1, vec![Step::Close]),
        (1, json_answer(503, "no")),
        (1, json_answer(200, "no JSON")),
        (1, json_answer(200, "[1]")),
        (3, vec![Step::Close]),
        (3, json_answer(502, "no")),
    ];
    for (at, (fails, script)) in cases.into_iter().enumerate() {
        // Retry until the request meets the engine that is to fail.
        let failing = if fails == 1 { &engines[..1] } else { &engines[2..3] };
        let before = failing[0].received().len();
        failing[0].next_answer(script.clone());
        let said = loop {
            let said = house.chat().await;
            if failing[0].received().len() > before {
                break said;
            }
        };
        let [prefill, by] =
            ["x-kvfleet-prefill-instance", "x-kvfleet-instance"].map(|name| said.header(name).unwrap());
        assert_eq!(said.status, 200, "{at}: {script:?}");
        assert_eq!(said.body, events(3).concat().into_bytes());
        match fails {
            1 => assert_eq!(prefill, "2", "{at}"),
            _ => assert_eq!(by, "4", "{at}"),
        }
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_errors_and_embeddings_are_final() {
    let engines = engines().await;
    let house = start_fixture(&engines).await;
    engines[0].next_answer(json_answer(400, "{\"error\": 1}"));
    let said = house.chat().await;
    assert_eq!((said.status, &said.body[..]), (400, &b"{\"error\": 1}"[..]));
    assert_eq!(
        (said.header("x-kvfleet-instance"), said.header("x-kvfleet-prefill-instance")),
        (Some("1"), None)
    );
    engines[0].next_answer(json_answer(200, "{\"data\": []}"));
    let said = house.request("/v1/embeddings", &[], r#"{"model": "m", "input": "a"}"#).await;
    assert_eq!((said.status, &said.body[..]), (200, &b"{\"data\": []}"[..]));
    assert_eq!(json(&engines[0].received()[1].body), json!({"model": "m", "input": "a"}));
    assert!(engines[2].received().is_empty() && engines[3].received().is_empty());
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn does_not_decode_on_an_overloaded_engine() {
    let mut steps = vec![Step::Gate];
    steps.extend(prefill_answer());
    let (first, second) = (ScriptedEngine::start(steps).await, ScriptedEngine::start(decode_answer()).await);
    let house = GatewayFixture::open(&[&first, &second], |config| {
        config.endpoints[0].role = "prefill".to_owned();
        config.endpoints[1].role = "decode".to_owned();
    })
    .await;
    let asked = golden(1);
    let ask = async || house.request(&asked.path, &[("x-llm-d-slo-tpot-ms", "60")], &asked.body).await;
    let busy = async {
        until("the prefill to start", || async { (!first.received().is_empty()).then_some(()) }).await;
        house.decodes.lock().insert(2, (2_000, 900_000));
        house.until_reported().await;
        first.open_gate();
    };
    let (said, ()) = tokio::join!(ask(), busy);
    assert_eq!(said.status, 429, "{said:?}");
    assert!(said.header("retry-after").is_some(), "{said:?}");
    let (problem, _) = said.error();
    assert!(problem.contains("apart"), "{problem}");
    assert_eq!(second.received().len(), 0, "the decode engine got no request");
    assert_eq!(first.received().len(), 1, "the prompt was computed once");
    house.close().await;
}
