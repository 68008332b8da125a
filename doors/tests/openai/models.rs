//! Engines that serve different models: requests go to those that serve theirs and have the context for it, and others are told so.

use serde_json::{Value, json};

use super::engine::{Engine, Step, events, plain, streamed};
use super::house::{CHAT, House, golden};
use crate::harness::until;
use kvfleet_doors::DoorsConfig;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;

fn good() -> Vec<Step> {
    streamed(&events(1))
}

/// An engine that lists these models, each with the model that it is an adapter of and its context, as vLLM does.
async fn serving(models: &[(&str, Option<&str>, Option<u32>)]) -> Engine {
    let engine = Engine::start(good()).await;
    engine.lists(Some(list(models)));
    engine
}

fn list(models: &[(&str, Option<&str>, Option<u32>)]) -> String {
    let card = |(id, parent, max_model_len): &(&str, Option<&str>, Option<u32>)| json!({ "id": id, "object": "model", "owned_by": "vllm", "parent": parent, "max_model_len": max_model_len });
    json!({ "object": "list", "data": models.iter().map(card).collect::<Vec<_>>() }).to_string()
}

/// They are asked often, and no model is written down.
fn often(config: &mut DoorsConfig) {
    config.models.clear();
    config.load.models_every_ms = 20;
}

/// The models that the door lists, with their contexts.
async fn listed(house: &House) -> Vec<(String, Option<u64>)> {
    let answer = house.ask("/v1/models", &[], "").await;
    let list: Value = serde_json::from_slice(&answer.body).unwrap();
    let card = |card: &Value| (card["id"].as_str().unwrap().to_owned(), card["max_model_len"].as_u64());
    list["data"].as_array().unwrap().iter().map(card).collect()
}

async fn until_listed(house: &House, names: &[&str]) {
    until("models", || async {
        let all = listed(house).await;
        (all.iter().map(|(name, _)| name.as_str()).eq(names.iter().copied())).then_some(())
    })
    .await;
}

/// Who answers a request for this model, or the status.
async fn asks(house: &House, path: &str, model: &str) -> Result<u32, u16> {
    let body = match path {
        CHAT => json!({ "model": model, "messages": [{"role": "user", "content": "Hi"}] }),
        "/v1/embeddings" => json!({ "model": model, "input": "Hi" }),
        _ => json!({ "model": model, "prompt": "Hi" }),
    };
    let answer = house.ask(path, &[], &body.to_string()).await;
    let by = answer.header("x-kvfleet-instance").map(|by| by.parse().unwrap());
    by.filter(|_| answer.status == 200).ok_or(answer.status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_to_the_engines_that_serve_their_model() {
    let (one, two) = (serving(&[("a", None, Some(100))]).await, serving(&[("b", None, None)]).await);
    let house = House::open(&[&one, &two], often).await;
    until_listed(&house, &["a", "b"]).await;
    assert_eq!(listed(&house).await, [("a".to_owned(), Some(100)), ("b".to_owned(), None)]);
    for path in [CHAT, "/v1/completions", "/v1/embeddings"] {
        assert_eq!((asks(&house, path, "a").await, asks(&house, path, "b").await), (Ok(1), Ok(2)), "{path}");
        let body = json!({ "model": "c", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}] });
        let refused = house.ask(path, &[], &body.to_string()).await;
        let (message, code) = refused.problem();
        assert_eq!((refused.status, code.as_deref()), (404, Some("model_not_found")));
        says("a model that no engine serves", &message, &[]);
    }
    assert_eq!(house.figure("kvfleet_doors_requests_total", "refused"), 3);
    // Why it did not go to who had least to do is told.
    let body = json!({ "model": "b", "prompt": "x" }).to_string();
    let answer = house.ask("/v1/completions", &[], &body).await;
    let request = answer.header("x-kvfleet-request").unwrap().parse().unwrap();
    let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    let said = "left out 1 instances that serve other models, and 0 whose context is too short";
    assert!(story.reasons.iter().any(|reason| reason == said), "{story:?}");
    // The only one that serves it is away: that passes, and nobody else is asked.
    two.gone().await;
    until("a word that nobody is there", || async {
        (asks(&house, CHAT, "b").await == Err(503)).then_some(())
    })
    .await;
    assert_eq!(asks(&house, CHAT, "a").await, Ok(1));
    assert!(one.received().iter().all(|request| !request.head.contains("/v1/models")));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_is_asked_for_where_it_is_loaded() {
    let base = ("m", None, Some(64));
    let (one, two) = (serving(&[base]).await, serving(&[base, ("fr", Some("m"), None)]).await);
    let house = House::open(&[&one, &two], often).await;
    until_listed(&house, &["fr", "m"]).await;
    assert_eq!(listed(&house).await[0], ("fr".to_owned(), Some(64)), "the context of its model");
    assert_eq!((asks(&house, CHAT, "fr").await, asks(&house, CHAT, "m").await), (Ok(2), Ok(1)));
    // It moves, and is gone.
    one.lists(Some(list(&[base, ("fr", Some("m"), None)])));
    two.lists(Some(list(&[base])));
    until("the adapter elsewhere", || async { (asks(&house, CHAT, "fr").await == Ok(1)).then_some(()) })
        .await;
    one.lists(Some(list(&[base])));
    until("no adapter", || async { (asks(&house, CHAT, "fr").await == Err(404)).then_some(()) }).await;
    // What makes no sense leaves what is known.
    one.lists(Some("<html>".to_owned()));
    two.lists(Some(list(&[("other", None, None)])));
    until_listed(&house, &["m", "other"]).await;
    assert_eq!((asks(&house, CHAT, "m").await, asks(&house, CHAT, "other").await), (Ok(1), Ok(2)));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_say_what_it_serves_may_serve_all() {
    let (one, two) = (Engine::start(good()).await, serving(&[("b", None, None)]).await);
    let house = House::open(&[&one, &two], often).await;
    until_listed(&house, &["b"]).await;
    assert_eq!(asks(&house, CHAT, "b").await, Ok(1), "it may serve that as well");
    house.loads.lock()[0].1 = 1_000_000;
    house.reported().await;
    assert_eq!((asks(&house, CHAT, "a").await, asks(&house, CHAT, "b").await), (Ok(1), Ok(2)));
    // Nor is one that is not asked.
    house.close().await;
    let house = House::open(&[&two], |config| {
        often(config);
        config.load.models_every_ms = 0;
    })
    .await;
    assert_eq!((asks(&house, CHAT, "a").await, listed(&house).await), (Ok(1), vec![]));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_goes_where_there_is_context_for_it() {
    let tokens = golden(1).tokens.len() as u32;
    let (one, two) =
        (serving(&[("m", None, Some(tokens))]).await, serving(&[("m", None, Some(tokens + 8))]).await);
    let house = House::open(&[&one, &two], |config| {
        config.models[0].context_tokens = 0;
        config.load.models_every_ms = 20;
    })
    .await;
    let until_context = async |context: u32| {
        until("contexts", || async {
            (listed(&house).await == [("m".to_owned(), Some(context.into()))]).then_some(())
        })
        .await;
    };
    let ask = async |max_tokens: Option<u32>| {
        let mut body: Value = serde_json::from_str(&golden(1).body).unwrap();
        if let Some(max_tokens) = max_tokens {
            body["max_tokens"] = max_tokens.into();
        }
        house.ask(&golden(1).path, &[], &body.to_string()).await
    };
    until_context(tokens + 8).await;
    // One token is to be said, and what a request asks for where somebody has room for it.
    for max_tokens in [None, Some(1), Some(8)] {
        assert_eq!(ask(max_tokens).await.header("x-kvfleet-instance"), Some("2"), "{max_tokens:?}");
    }
    assert_eq!(asks(&house, CHAT, "m").await, Ok(1), "a short one goes to who has less to do");
    assert_eq!(
        ask(Some(9)).await.header("x-kvfleet-instance"),
        Some("2"),
        "who has room for the prompt says so"
    );
    two.lists(Some(list(&[("m", None, Some(tokens - 1))])));
    until_context(tokens).await;
    let refused = ask(None).await;
    let (message, code) = refused.problem();
    assert_eq!((refused.status, code.as_deref()), (400, Some("context_length_exceeded")));
    says("a prompt longer than the context of every engine", &message, &[]);
    // The engine cuts it itself where it is asked to.
    let mut body: Value = serde_json::from_str(&golden(1).body).unwrap();
    body["truncate_prompt_tokens"] = (-1).into();
    assert_eq!(house.ask(&golden(1).path, &[], &body.to_string()).await.status, 200);
    house.close().await;
    // A length that is a guess refuses nobody.
    let house = House::open(&[&one, &two], often).await;
    until_listed(&house, &["m"]).await;
    assert_eq!(house.chat().await.status, 200);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_are_written_down_are_served_beside_those_that_engines_list() {
    let engine = serving(&[("m", None, Some(4_000)), ("n", None, Some(50))]).await;
    let house = House::open(&[&engine], |config| {
        config.load.models_every_ms = 20;
        config.models[0].context_tokens = 3_000;
    })
    .await;
    until_listed(&house, &["m", "n"]).await;
    assert_eq!(listed(&house).await, [("m".to_owned(), Some(3_000)), ("n".to_owned(), Some(50))]);
    let of = ["m", "n", "o"];
    let mut told = vec![];
    for model in of {
        told.push(asks(&house, CHAT, model).await);
    }
    assert_eq!(told, [Ok(1), Ok(1), Err(404)]);
    // An SGLang takes whatever name is written down.
    engine.lists(Some(r#"{"data":[{"id":"default","owned_by":"sglang"}]}"#.to_owned()));
    until_listed(&house, &["m", "default"]).await;
    assert_eq!((asks(&house, CHAT, "m").await, asks(&house, CHAT, "o").await), (Ok(1), Err(404)));
    // A vLLM that lists other names does not.
    engine.lists(Some(list(&[("p", None, None)])));
    until_listed(&house, &["m", "p"]).await;
    assert_eq!(asks(&house, CHAT, "m").await, Err(404));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_not_tried_again_where_its_model_is_not() {
    let (one, two) = (serving(&[("a", None, None)]).await, serving(&[("b", None, None)]).await);
    let three = serving(&[("a", None, None)]).await;
    let house = House::open(&[&one, &two, &three], often).await;
    until_listed(&house, &["a", "b"]).await;
    one.once(plain(503, "no"));
    assert_eq!(asks(&house, CHAT, "a").await, Ok(3));
    one.once(plain(503, "no"));
    three.once(plain(503, "no"));
    assert_eq!(asks(&house, CHAT, "a").await, Err(503));
    assert_eq!(two.received().len(), 0);
    house.close().await;
}
