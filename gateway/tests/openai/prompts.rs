//! Placement by prompt: hashes match the engines' blocks, so that requests follow their prefix.

use kvfleet_gateway::PriorityOrder;
use kvfleet_proto::pb;
use serde_json::Value;

use super::engine::{ScriptedEngine, event_stream, events};
use super::fixture::{CHAT, GatewayFixture, STARTED_US, golden, hashes};
use kvfleet_testkit::cluster::{resident, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_to_the_engine_with_the_resident_prefix() {
    let (one, two) = (
        ScriptedEngine::start(event_stream(&events(1))).await,
        ScriptedEngine::start(event_stream(&events(1))).await,
    );
    let house = GatewayFixture::open(&[&one, &two], |_| {}).await;
    assert_eq!(house.chat().await.header("x-kvfleet-instance"), Some("1"));
    // Both engines are idle; the second has the blocks of the prompt.
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
    // Keep the residency alive with heartbeats, as an engine does.
    until("the request to follow its prefix", || async {
        house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
        (house.chat().await.header("x-kvfleet-instance") == Some("2")).then_some(())
    })
    .await;
    for _ in 0..5 {
        // Wait between requests, since queued ones would make the other engine equally good.
        house.until_reported().await;
        house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
        assert_eq!(house.chat().await.header("x-kvfleet-instance"), Some("2"));
    }
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sets_the_priority_for_ordering_engines() {
    let engine = ScriptedEngine::start(event_stream(&events(1))).await;
    let house = GatewayFixture::open(&[&engine], |config| {
        config.priorities = PriorityOrder::LowerFirst;
        config.openai.trusts_callers = true;
    })
    .await;
    let body: Value = serde_json::from_str(&golden(1).body).unwrap();
    let path = golden(1).path;
    let own = {
        let mut own = body.clone();
        own["priority"] = 3.into();
        own.to_string()
    };
    for asked in [&golden(1).body, &own] {
        assert_eq!(house.request(&path, &[], asked).await.status, 200);
    }
    let now_ms = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    let [told, kept] = &engine.received()[..] else { panic!("expected two requests") };
    let mut told: Value = serde_json::from_slice(&told.body).unwrap();
    let priority_deadline_ms =
        told.as_object_mut().unwrap().remove("priority").and_then(|turn| turn.as_i64()).unwrap();
    assert!(
        (now_ms - 60_000..now_ms + 60_000).contains(&priority_deadline_ms),
        "{priority_deadline_ms} is about {now_ms}"
    );
    assert_eq!(told, body, "the rest is unchanged");
    assert_eq!(kept.body, own.as_bytes(), "a trusted caller's priority is kept");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_do_not_steer_engines_unless_they_are_trusted() {
    let params = serde_json::json!({"do_remote_prefill": true, "remote_host": "192.0.2.1"});
    for trusts_callers in [false, true] {
        let engine = ScriptedEngine::start(event_stream(&events(1))).await;
        let house =
            GatewayFixture::open(&[&engine], |config| config.openai.trusts_callers = trusts_callers).await;
        let mut body: Value = serde_json::from_str(&golden(1).body).unwrap();
        let plain = body.clone();
        (body["kv_transfer_params"], body["priority"]) = (params.clone(), (-5).into());
        (body["bootstrap_host"], body["data_parallel_rank"]) = ("192.0.2.1".into(), 1.into());
        let rank = [("x-data-parallel-rank", "1")];
        assert_eq!(house.request(&golden(1).path, &rank, &body.to_string()).await.status, 200);
        let [sent] = &engine.received()[..] else { panic!("expected one request") };
        let told: Value = serde_json::from_slice(&sent.body).unwrap();
        assert_eq!(told, if trusts_callers { body } else { plain });
        assert_eq!(sent.header("x-data-parallel-rank").is_some(), trusts_callers);
        house.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_tokenizer_a_conversation_stays_on_its_engine() {
    let (one, two) = (
        ScriptedEngine::start(event_stream(&events(1))).await,
        ScriptedEngine::start(event_stream(&events(1))).await,
    );
    let house = GatewayFixture::open(&[&one, &two], |config| config.models.clear()).await;
    house.loads.lock().iter_mut().for_each(|(_, tokens)| *tokens = 0);
    let ask = async |messages: &[Value]| {
        let body = serde_json::json!({ "model": "any", "stream": true, "messages": messages }).to_string();
        let answer = house.request(CHAT, &[], &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let header = |name| answer.header(name).unwrap().to_owned();
        (header("x-kvfleet-instance"), header("x-kvfleet-request").parse::<u64>().unwrap())
    };
    let said = |who: &str, text: String| serde_json::json!({ "role": who, "content": text });
    for conversation in 0..4 {
        let mut messages = vec![said("user", format!("{conversation} asks for a story. ").repeat(200))];
        let (first, _) = ask(&messages).await;
        // Wait until the prompt counts as computed and both engines are idle.
        for _ in 0..10 {
            house.until_reported().await;
        }
        for turn in 0..4 {
            messages.push(said("assistant", format!("Answer {turn}.")));
            messages.push(said("user", format!("And then, {turn}?")));
            assert_eq!(ask(&messages).await.0, first, "conversation {conversation}, turn {turn}");
            house.until_reported().await;
        }
        let (_, request) = ask(&messages).await;
        let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        let reasons = story.reasons.join("; ");
        assert!(reasons.contains("blocks of text before"), "{story:?}");
        assert_eq!(story.missing, [], "text blocks are never reported missing");
    }
    house.close().await;
}
