//! Engines with different models: requests go to engines with their model and enough context,
//! others are refused.

use serde_json::{Value, json};

use super::engine::{ScriptedEngine, Step, event_stream, events, json_answer};
use super::fixture::{CHAT, GatewayFixture, golden};
use kvfleet_errors_doc::says;
use kvfleet_gateway::GatewayConfig;
use kvfleet_proto::pb;
use kvfleet_testkit::cluster::until;

fn good() -> Vec<Step> {
    event_stream(&events(1))
}

/// An engine that lists these models, each with base model and context length, as vLLM does.
pub async fn serving_engine(models: &[(&str, Option<&str>, Option<u32>)]) -> ScriptedEngine {
    let engine = ScriptedEngine::start(good()).await;
    engine.set_models(Some(list(models)));
    engine
}

fn list(models: &[(&str, Option<&str>, Option<u32>)]) -> String {
    let card = |(id, parent, max_model_len): &(&str, Option<&str>, Option<u32>)| {
        json!({
            "id": id, "object": "model", "owned_by": "vllm", "parent": parent, "max_model_len": max_model_len
        })
    };
    json!({ "object": "list", "data": models.iter().map(card).collect::<Vec<_>>() }).to_string()
}

/// Frequent model list requests, and no configured models.
pub fn poll_often(config: &mut GatewayConfig) {
    config.models.clear();
    config.load.models_every_ms = 20;
}

/// Models that the API lists, with their context lengths.
async fn listed(house: &GatewayFixture) -> Vec<(String, Option<u64>)> {
    let answer = house.request("/v1/models", &[], "").await;
    let list: Value = serde_json::from_slice(&answer.body).unwrap();
    let card = |card: &Value| (card["id"].as_str().unwrap().to_owned(), card["max_model_len"].as_u64());
    list["data"].as_array().unwrap().iter().map(card).collect()
}

async fn until_listed(house: &GatewayFixture, names: &[&str]) {
    until("models", || async {
        let all = listed(house).await;
        (all.iter().map(|(name, _)| name.as_str()).eq(names.iter().copied())).then_some(())
    })
    .await;
}

/// Instance that answers a request for this model, or the status.
async fn answering_instance(house: &GatewayFixture, path: &str, model: &str) -> Result<u32, u16> {
    let body = match path {
        CHAT => json!({ "model": model, "messages": [{"role": "user", "content": "Hi"}] }),
        "/v1/embeddings" => json!({ "model": model, "input": "Hi" }),
        _ => json!({ "model": model, "prompt": "Hi" }),
    };
    let answer = house.request(path, &[], &body.to_string()).await;
    let by = answer.header("x-kvfleet-instance").map(|by| by.parse().unwrap());
    by.filter(|_| answer.status == 200).ok_or(answer.status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_by_model() {
    let (one, two) =
        (serving_engine(&[("a", None, Some(100))]).await, serving_engine(&[("b", None, None)]).await);
    let house = GatewayFixture::open(&[&one, &two], poll_often).await;
    until_listed(&house, &["a", "b"]).await;
    assert_eq!(listed(&house).await, [("a".to_owned(), Some(100)), ("b".to_owned(), None)]);
    for path in [CHAT, "/v1/completions", "/v1/embeddings"] {
        assert_eq!(
            (answering_instance(&house, path, "a").await, answering_instance(&house, path, "b").await),
            (Ok(1), Ok(2)),
            "{path}"
        );
        let body = json!({ "model": "c", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}] });
        let refused = house.request(path, &[], &body.to_string()).await;
        let (message, code) = refused.error();
        assert_eq!((refused.status, code.as_deref()), (404, Some("model_not_found")));
        says("a model that no engine serves", &message, &[]);
    }
    assert_eq!(house.metric("kvfleet_gateway_requests_total", "refused"), 3);
    // The decision log explains why the least loaded engine was not chosen.
    let body = json!({ "model": "b", "prompt": "x" }).to_string();
    let answer = house.request("/v1/completions", &[], &body).await;
    let request = answer.header("x-kvfleet-request").unwrap().parse().unwrap();
    let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    let said = "left out 1 instances that serve other models, and 0 with a context that is too short";
    assert!(story.reasons.iter().any(|reason| reason == said), "{story:?}");
    // The only engine with the model is down: the answer is 503, and no other engine is tried.
    two.stop().await;
    until("an answer 503", || async {
        (answering_instance(&house, CHAT, "b").await == Err(503)).then_some(())
    })
    .await;
    assert_eq!(answering_instance(&house, CHAT, "a").await, Ok(1));
    assert!(one.received().iter().all(|request| !request.head.contains("/v1/models")));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_adapters_to_engines_that_loaded_them() {
    let base = ("m", None, Some(64));
    let (one, two) = (serving_engine(&[base]).await, serving_engine(&[base, ("fr", Some("m"), None)]).await);
    let house = GatewayFixture::open(&[&one, &two], poll_often).await;
    until_listed(&house, &["fr", "m"]).await;
    assert_eq!(listed(&house).await[0], ("fr".to_owned(), Some(64)), "the context of its base model");
    assert_eq!(
        (answering_instance(&house, CHAT, "fr").await, answering_instance(&house, CHAT, "m").await),
        (Ok(2), Ok(1))
    );
    // The adapter moves to the other engine, and is then unloaded.
    one.set_models(Some(list(&[base, ("fr", Some("m"), None)])));
    two.set_models(Some(list(&[base])));
    until("the adapter on the other engine", || async {
        (answering_instance(&house, CHAT, "fr").await == Ok(1)).then_some(())
    })
    .await;
    one.set_models(Some(list(&[base])));
    until("no adapter", || async {
        (answering_instance(&house, CHAT, "fr").await == Err(404)).then_some(())
    })
    .await;
    // An invalid list keeps the previous one.
    one.set_models(Some("<html>".to_owned()));
    two.set_models(Some(list(&[("other", None, None)])));
    until_listed(&house, &["m", "other"]).await;
    assert_eq!(
        (answering_instance(&house, CHAT, "m").await, answering_instance(&house, CHAT, "other").await),
        (Ok(1), Ok(2))
    );
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_without_a_list_serve_any_model() {
    let (one, two) = (ScriptedEngine::start(good()).await, serving_engine(&[("b", None, None)]).await);
    let house = GatewayFixture::open(&[&one, &two], poll_often).await;
    until_listed(&house, &["b"]).await;
    assert_eq!(answering_instance(&house, CHAT, "b").await, Ok(1), "it may serve this model too");
    house.loads.lock()[0].1 = 1_000_000;
    house.until_reported().await;
    assert_eq!(
        (answering_instance(&house, CHAT, "a").await, answering_instance(&house, CHAT, "b").await),
        (Ok(1), Ok(2))
    );
    // Without model list requests, any model is accepted.
    house.close().await;
    let house = GatewayFixture::open(&[&two], |config| {
        poll_often(config);
        config.load.models_every_ms = 0;
    })
    .await;
    assert_eq!((answering_instance(&house, CHAT, "a").await, listed(&house).await), (Ok(1), vec![]));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_by_context_length() {
    let tokens = golden(1).tokens.len() as u32;
    let (one, two) = (
        serving_engine(&[("m", None, Some(tokens))]).await,
        serving_engine(&[("m", None, Some(tokens + 8))]).await,
    );
    let house = GatewayFixture::open(&[&one, &two], |config| {
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
        house.request(&golden(1).path, &[], &body.to_string()).await
    };
    until_context(tokens + 8).await;
    // Engines need context for one generated token, or for the requested tokens if some engine has
    // enough.
    for max_tokens in [None, Some(1), Some(8)] {
        assert_eq!(ask(max_tokens).await.header("x-kvfleet-instance"), Some("2"), "{max_tokens:?}");
    }
    assert_eq!(
        answering_instance(&house, CHAT, "m").await,
        Ok(1),
        "a short prompt goes to the less loaded engine"
    );
    assert_eq!(
        ask(Some(9)).await.header("x-kvfleet-instance"),
        Some("2"),
        "the engine with enough context for the prompt decides"
    );
    two.set_models(Some(list(&[("m", None, Some(tokens - 1))])));
    until_context(tokens).await;
    let refused = ask(None).await;
    let (message, code) = refused.error();
    assert_eq!((refused.status, code.as_deref()), (400, Some("context_length_exceeded")));
    says("a prompt longer than the context of every engine", &message, &[]);
    // The engine truncates the prompt on request.
    let mut body: Value = serde_json::from_str(&golden(1).body).unwrap();
    body["truncate_prompt_tokens"] = (-1).into();
    assert_eq!(house.request(&golden(1).path, &[], &body.to_string()).await.status, 200);
    house.close().await;
    // An estimated length never causes a refusal.
    let house = GatewayFixture::open(&[&one, &two], poll_often).await;
    until_listed(&house, &["m"]).await;
    assert_eq!(house.chat().await.status, 200);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_models_are_served_with_listed_ones() {
    let engine = serving_engine(&[("m", None, Some(4_000)), ("n", None, Some(50))]).await;
    let house = GatewayFixture::open(&[&engine], |config| {
        config.load.models_every_ms = 20;
        config.models[0].context_tokens = 3_000;
    })
    .await;
    until_listed(&house, &["m", "n"]).await;
    assert_eq!(listed(&house).await, [("m".to_owned(), Some(3_000)), ("n".to_owned(), Some(50))]);
    let of = ["m", "n", "o"];
    let mut told = vec![];
    for model in of {
        told.push(answering_instance(&house, CHAT, model).await);
    }
    assert_eq!(told, [Ok(1), Ok(1), Err(404)]);
    // SGLang accepts any configured name.
    engine.set_models(Some(r#"{"data":[{"id":"default","owned_by":"sglang"}]}"#.to_owned()));
    until_listed(&house, &["m", "default"]).await;
    assert_eq!(
        (answering_instance(&house, CHAT, "m").await, answering_instance(&house, CHAT, "o").await),
        (Ok(1), Err(404))
    );
    // vLLM with other listed names does not.
    engine.set_models(Some(list(&[("p", None, None)])));
    until_listed(&house, &["m", "p"]).await;
    assert_eq!(answering_instance(&house, CHAT, "m").await, Err(404));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_only_on_engines_with_the_model() {
    let (one, two) = (serving_engine(&[("a", None, None)]).await, serving_engine(&[("b", None, None)]).await);
    let three = serving_engine(&[("a", None, None)]).await;
    let house = GatewayFixture::open(&[&one, &two, &three], poll_often).await;
    until_listed(&house, &["a", "b"]).await;
    one.next_answer(json_answer(503, "no"));
    assert_eq!(answering_instance(&house, CHAT, "a").await, Ok(3));
    one.next_answer(json_answer(503, "no"));
    three.next_answer(json_answer(503, "no"));
    assert_eq!(answering_instance(&house, CHAT, "a").await, Err(503));
    assert_eq!(two.received().len(), 0);
    house.close().await;
}
