//! Prompts on their way to the router: the hashes that engines' blocks have, so that a request goes where its prefix is.

use kvfleet_doors::Priorities;
use kvfleet_proto::pb;
use serde_json::Value;

use super::engine::{Engine, events, streamed};
use super::house::{CHAT, House, STARTED_US, golden, hashes};
use crate::harness::{resident, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_goes_where_its_tokens_are_in_gpu_memory() {
    let (one, two) = (Engine::start(streamed(&events(1))).await, Engine::start(streamed(&events(1))).await);
    let house = House::open(&[&one, &two], |_| {}).await;
    assert_eq!(house.chat().await.header("x-kvfleet-instance"), Some("1"));
    // Both idle from now on; the second has the blocks, as Python cut their tokens.
    house.loads.lock().iter_mut().for_each(|(_, tokens)| *tokens = 0);
    let blocks: Vec<_> = hashes(&golden(1).tokens).iter().map(|hash| hash.0).collect();
    assert!(blocks.len() > 10);
    let told = pb::ResidencyRequest {
        instance: 2,
        epoch: STARTED_US,
        batches: vec![pb::Batch { seq: 1, changes: vec![resident(&blocks)], digest: vec![] }],
        last_seq: 1,
    };
    let beat = pb::ResidencyRequest { batches: vec![], ..told.clone() };
    house.cluster.client(1).report_residency(told).await.unwrap();
    // Its heartbeats go on, as an engine's do.
    until("the request to follow its prefix", || async {
        house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
        (house.chat().await.header("x-kvfleet-instance") == Some("2")).then_some(())
    })
    .await;
    for _ in 0..5 {
        // Several at once would queue, and the other engine be as good a place.
        house.reported().await;
        house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
        assert_eq!(house.chat().await.header("x-kvfleet-instance"), Some("2"));
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_keeps_an_order_is_told_each_requests_turn() {
    let engine = Engine::start(streamed(&events(1))).await;
    let house = House::open(&[&engine], |config| config.priorities = Priorities::LowerFirst).await;
    let body: Value = serde_json::from_str(&golden(1).body).unwrap();
    let path = golden(1).path;
    let own = {
        let mut own = body.clone();
        own["priority"] = 3.into();
        own.to_string()
    };
    for asked in [&golden(1).body, &own] {
        assert_eq!(house.ask(&path, &[], asked).await.status, 200);
    }
    let now_ms = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    let [told, kept] = &engine.received()[..] else { panic!("two requests came") };
    let mut told: Value = serde_json::from_slice(&told.body).unwrap();
    let turn_ms = told.as_object_mut().unwrap().remove("priority").and_then(|turn| turn.as_i64()).unwrap();
    assert!((now_ms - 60_000..now_ms + 60_000).contains(&turn_ms), "{turn_ms} is about {now_ms}");
    assert_eq!(told, body, "nothing else is changed");
    assert_eq!(kept.body, own.as_bytes(), "a caller's own priority stays");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_tokenizer_a_conversation_goes_where_it_was_sent_before() {
    let (one, two) = (Engine::start(streamed(&events(1))).await, Engine::start(streamed(&events(1))).await);
    let house = House::open(&[&one, &two], |config| config.models.clear()).await;
    house.loads.lock().iter_mut().for_each(|(_, tokens)| *tokens = 0);
    let ask = async |messages: &[Value]| {
        let body = serde_json::json!({ "model": "any", "stream": true, "messages": messages }).to_string();
        let answer = house.ask(CHAT, &[], &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let header = |name| answer.header(name).unwrap().to_owned();
        (header("x-kvfleet-instance"), header("x-kvfleet-request").parse::<u64>().unwrap())
    };
    let said = |who: &str, text: String| serde_json::json!({ "role": who, "content": text });
    for conversation in 0..4 {
        let mut messages = vec![said("user", format!("{conversation} asks for a story. ").repeat(200))];
        let (first, _) = ask(&messages).await;
        // What is not computed yet is waited for, where nobody else is idle.
        for _ in 0..10 {
            house.reported().await;
        }
        for turn in 0..4 {
            messages.push(said("assistant", format!("Answer {turn}.")));
            messages.push(said("user", format!("And then, {turn}?")));
            assert_eq!(ask(&messages).await.0, first, "conversation {conversation}, turn {turn}");
            house.reported().await;
        }
        let (_, request) = ask(&messages).await;
        let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        let reasons = story.reasons.join("; ");
        assert!(reasons.contains("blocks of text before"), "{story:?}");
        assert_eq!(story.missing, [], "nobody misses blocks of text");
    }
    house.close().await;
}
