//! Pairs: one engine is asked for one token, another for the answer, and either may fail.

use serde_json::{Value, json};

use super::engine::{Engine, Step, events, plain, streamed};
use super::house::{House, golden};
use crate::harness::until;

/// What the first of a pair says.
fn computed() -> Vec<Step> {
    plain(
        200,
        r#"{"id": "x", "choices": [], "kv_transfer_params": {"remote_host": "p", "remote_block_ids": [1, 2]}}"#,
    )
}

fn answer() -> Vec<Step> {
    streamed(&events(3))
}

/// Engines 1 and 2 compute, 3 and 4 go on.
async fn house(engines: &[Engine; 4]) -> House {
    House::open(&engines.each_ref(), |config| {
        for (endpoint, role) in config.endpoints.iter_mut().zip(["prefill", "prefill", "decode", "decode"]) {
            endpoint.role = role.to_owned();
        }
        config.openai.breaker.failures = 1_000;
    })
    .await
}

async fn engines() -> [Engine; 4] {
    let [one, two] = [Engine::start(computed()).await, Engine::start(computed()).await];
    let [three, four] = [Engine::start(answer()).await, Engine::start(answer()).await];
    [one, two, three, four]
}

fn json(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_is_asked_for_a_token_and_another_for_the_answer() {
    let engines = engines().await;
    let house = house(&engines).await;
    let said = house.chat().await;
    assert_eq!(said.status, 200, "{said:?}");
    assert_eq!(said.body, events(3).concat().into_bytes(), "byte for byte");
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
    assert_eq!(as_asked, asked, "and all else as the caller wrote it");
    for header in ["x-request-id", "x-kvfleet-request"] {
        assert!(first[0].header(header).is_some() && first[0].header(header) == second[0].header(header));
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_that_fails_before_the_answer_is_replaced() {
    let engines = engines().await;
    let house = house(&engines).await;
    let cases = [
        (1, vec![Step::Close]),
        (1, plain(503, "no")),
        (1, plain(200, "no JSON")),
        (1, plain(200, "[1]")),
        (3, vec![Step::Close]),
        (3, plain(502, "no")),
    ];
    for (at, (fails, script)) in cases.into_iter().enumerate() {
        // Who goes on is told by least work; both are asked for it, so that the one that is to fail is met.
        let who = if fails == 1 { &engines[..1] } else { &engines[2..3] };
        let before = who[0].received().len();
        who[0].once(script.clone());
        let said = loop {
            let said = house.chat().await;
            if who[0].received().len() > before {
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
async fn what_the_first_refuses_is_the_answer_and_embeddings_are_its_own() {
    let engines = engines().await;
    let house = house(&engines).await;
    engines[0].once(plain(400, "{\"error\": 1}"));
    let said = house.chat().await;
    assert_eq!((said.status, &said.body[..]), (400, &b"{\"error\": 1}"[..]));
    assert_eq!(
        (said.header("x-kvfleet-instance"), said.header("x-kvfleet-prefill-instance")),
        (Some("1"), None)
    );
    engines[0].once(plain(200, "{\"data\": []}"));
    let said = house.ask("/v1/embeddings", &[], r#"{"model": "m", "input": "a"}"#).await;
    assert_eq!((said.status, &said.body[..]), (200, &b"{\"data\": []}"[..]));
    assert_eq!(json(&engines[0].received()[1].body), json!({"model": "m", "input": "a"}));
    assert!(engines[2].received().is_empty() && engines[3].received().is_empty());
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_decodes_more_by_now_than_the_request_allows_is_not_sent_it() {
    let mut steps = vec![Step::Gate];
    steps.extend(computed());
    let (first, second) = (Engine::start(steps).await, Engine::start(answer()).await);
    let house = House::open(&[&first, &second], |config| {
        config.endpoints[0].role = "prefill".to_owned();
        config.endpoints[1].role = "decode".to_owned();
    })
    .await;
    let asked = golden(1);
    let ask = async || house.ask(&asked.path, &[("x-llm-d-slo-tpot-ms", "60")], &asked.body).await;
    let busy = async {
        until("the prompt to be computed", || async { (!first.received().is_empty()).then_some(()) }).await;
        house.decodes.lock().insert(2, (2_000, 900_000));
        house.reported().await;
        first.go_on();
    };
    let (said, ()) = tokio::join!(ask(), busy);
    assert_eq!(said.status, 429, "{said:?}");
    assert!(said.header("retry-after").is_some(), "{said:?}");
    let (problem, _) = said.problem();
    assert!(problem.contains("apart"), "{problem}");
    assert_eq!(second.received().len(), 0, "it was not asked");
    assert_eq!(first.received().len(), 1, "nor was the prompt computed again");
    house.close().await;
}
