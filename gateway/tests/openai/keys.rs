//! API keys: callers without one are refused, and a key decides tenant, models and limits.
//!
//! Not here: the form of the file (`gateway/src/keys/`).

use std::net::SocketAddr;
use std::path::PathBuf;

use kvfleet_errors_doc::says;
use kvfleet_gateway::{GatewayConfig, KeyEntry, NewKey};
use kvfleet_proto::pb;
use kvfleet_router::{EngineTenantConfig, EnginesConfig};
use kvfleet_testkit::cluster::{resident, until};
use kvfleet_testkit::write_secret;
use serde_json::{Value, json};

use super::engine::{ScriptedEngine, Step, chunk, json_answer, last_chunk, stream_head};
use super::fixture::{CHAT, ClientAnswer, GatewayFixture, STARTED_US, engines_config, golden, hashes_of};
use super::models::{poll_often, serving_engine};

/// Tenants 1 and 2 with their salts, and a file of keys.
struct KeyFixture {
    folder: tempfile::TempDir,
    identity: EnginesConfig,
}

impl KeyFixture {
    fn new() -> KeyFixture {
        let folder = tempfile::tempdir().unwrap();
        let tenant = |(tenant, salt): (u32, &str)| {
            let secret_file = folder.path().join(salt);
            write_secret(&secret_file, &format!("{tenant:02x}").repeat(32));
            EngineTenantConfig { tenant, salt: salt.into(), secret_file }
        };
        let tenants = [(1, "salt \"one\""), (2, "salt two")].map(tenant).into();
        KeyFixture { folder, identity: EnginesConfig { tenants, ..engines_config() } }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("keys.toml")
    }

    /// Writes the file with new keys of these entries, and returns the keys.
    fn write<const COUNT: usize>(&self, entries: [KeyEntry; COUNT]) -> [String; COUNT] {
        let made = entries.map(|entry| NewKey::new(entry).unwrap());
        let text: String = made.iter().map(|new| new.table.as_str()).collect();
        // Replaced at once, as editors and Kubernetes do.
        let next = self.folder.path().join("keys.next");
        write_secret(&next, &text);
        std::fs::rename(next, self.file()).unwrap();
        made.map(|new| new.key)
    }

    async fn open(
        &self,
        engines: &[&ScriptedEngine],
        change: impl FnOnce(&mut GatewayConfig),
    ) -> GatewayFixture {
        let addresses: Vec<SocketAddr> = engines.iter().map(|engine| engine.address).collect();
        GatewayFixture::open_with(&addresses, &self.identity, |config| {
            config.openai.api_keys_file = self.file();
            change(config);
        })
        .await
    }
}

fn entry(name: &str, tenant: u32) -> KeyEntry {
    KeyEntry { name: name.into(), tenant, ..KeyEntry::default() }
}

fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

async fn chat_with(house: &GatewayFixture, key: &str) -> ClientAnswer {
    house.request(CHAT, &[("authorization", &bearer(key))], &golden(1).body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_need_a_valid_key() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let fixture = KeyFixture::new();
    let [key, no_salt] = fixture.write([entry("one", 1), entry("none", 0)]);
    let house = fixture.open(&[&engine], |_| {}).await;
    let (valid, other) = (bearer(&key), bearer(&key.replace("kvfleet-", "kvfleet_")));
    let basic = format!("Basic {key}");
    let wrong: [&[(&str, &str)]; 5] = [
        &[("authorization", &other)],
        &[("authorization", &basic)],
        &[("authorization", &key)],
        &[("authorization", "Bearer ")],
        &[("authorization", &valid), ("authorization", &valid)],
    ];
    for path in [CHAT, "/v1/models"] {
        let answer = house.request(path, &[], &golden(1).body).await;
        says("a request without a key", &answer.error().0, &[]);
        for headers in wrong {
            let answer = house.request(path, headers, &golden(1).body).await;
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")));
            let (text, code) = answer.error();
            says("a request with a wrong key", &text, &[]);
            assert_eq!(code.as_deref(), Some("invalid_api_key"), "{headers:?}");
        }
    }
    assert!(engine.received().is_empty());
    house.until_metric("kvfleet_gateway_requests_total", "unauthenticated", 6).await;
    for path in ["/health", "/livez", "/readyz"] {
        assert_eq!(house.request(path, &[], "").await.status, 200, "{path}: probes have no key");
    }

    assert_eq!(chat_with(&house, &key).await.status, 200);
    let lower = valid.replace("Bearer ", "bearer  ");
    assert_eq!(house.request(CHAT, &[("authorization", &lower)], &golden(1).body).await.status, 200);
    assert_eq!(chat_with(&house, &no_salt).await.status, 200);
    let received = engine.received();
    assert!(received.iter().all(|request| request.header("authorization").is_none()));
    let mut salted: Value = serde_json::from_str(&golden(1).body).unwrap();
    salted["cache_salt"] = "salt \"one\"".into();
    let sent = serde_json::from_slice::<Value>(&received[0].body).unwrap();
    assert_eq!(sent, salted, "the salt of the tenant is added, and no more");
    assert_eq!(received[2].body, golden(1).body.as_bytes(), "tenant 0 has no salt");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_may_use_its_models_only() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let fixture = KeyFixture::new();
    let limited = KeyEntry { models: Some(vec!["m".into()]), ..entry("limited", 1) };
    let [limited, all] = fixture.write([limited, entry("all", 1)]);
    let house = fixture
        .open(&[&engine], |config| {
            let other = kvfleet_gateway::ModelConfig { name: "secret".into(), ..config.models[0].clone() };
            config.models.push(other);
        })
        .await;
    let ask = async |key: &str, model: &str| {
        let body = json!({ "model": model, "prompt": "x" }).to_string();
        house.request("/v1/completions", &[("authorization", &bearer(key))], &body).await
    };
    let (refused, absent) = (ask(&limited, "secret").await, ask(&limited, "absent").await);
    assert_eq!((refused.status, refused.error().1.as_deref()), (404, Some("model_not_found")));
    let text = |answer: &ClientAnswer, name| answer.error().0.replace(name, "…");
    assert_eq!(text(&refused, "secret"), text(&absent, "absent"), "the answer tells of no other model");
    let body = json!({ "prompt": "x" }).to_string();
    let unnamed = house.request("/v1/completions", &[("authorization", &bearer(&limited))], &body).await;
    assert_eq!(unnamed.status, 404, "engines would use any model");
    let body = json!({ "model": "m", "lora_path": "other", "prompt": "x" }).to_string();
    let adapter = house.request("/v1/completions", &[("authorization", &bearer(&limited))], &body).await;
    says("an adapter beside the model of a key", &adapter.error().0, &[]);
    assert!(engine.received().is_empty());
    for (key, model) in [(&limited, "m"), (&all, "m"), (&all, "secret")] {
        assert_eq!(ask(key, model).await.status, 200, "{model}");
    }
    let listed = async |key: &str| {
        let answer = house.request("/v1/models", &[("authorization", &bearer(key))], "").await;
        let list: Value = serde_json::from_slice(&answer.body).unwrap();
        list["data"].as_array().unwrap().iter().map(|card| card["id"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(listed(&limited).await, ["\"m\""]);
    assert_eq!(listed(&all).await, ["\"m\"", "\"secret\""]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_learns_no_names_of_other_models() {
    let engine = serving_engine(&[("secret", None, None)]).await;
    let fixture = KeyFixture::new();
    let limited = KeyEntry { models: Some(vec!["m".into()]), ..entry("limited", 1) };
    let [limited, all] = fixture.write([limited, entry("all", 1)]);
    let house = fixture.open(&[&engine], poll_often).await;
    let error = async |key: &str| {
        let answer = chat_with(&house, key).await;
        (answer.status == 404).then(|| answer.error().0)
    };
    let full = until("the model list of the engine", || error(&all)).await;
    assert_eq!(full, "The model `m` does not exist; there is `secret`.");
    assert_eq!(error(&limited).await.as_deref(), Some("The model `m` does not exist."));
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_with_keys_choose_no_salt() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let fixture = KeyFixture::new();
    let [key, no_salt] = fixture.write([entry("one", 1), entry("none", 0)]);
    let house = fixture.open(&[&engine], |_| {}).await;
    for key in [&key, &no_salt] {
        for field in [
            r#""cache_salt":"salt two""#,
            r#""cache_salt":"salt \"one\"""#,
            r#""cache_salt":null"#,
            r#""cache\u005fsalt":"salt two""#,
            r#""extra_key":"salt two""#,
        ] {
            let body = format!(r#"{{"model":"m","prompt":"x",{field}}}"#);
            let answer = house.request("/v1/completions", &[("authorization", &bearer(key))], &body).await;
            assert_eq!(answer.status, 400, "{body}");
        }
    }
    let body = r#"{"model":"m","prompt":"x","cache_salt":"salt two"}"#;
    let answer = house.request("/v1/completions", &[("authorization", &bearer(&key))], body).await;
    says("a salt in the request of a key", &answer.error().0, &[]);
    assert!(engine.received().is_empty());
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_a_key_leave_room_for_others() {
    let engine =
        ScriptedEngine::start(vec![stream_head(), chunk("data: 1\n\n"), Step::Gate, last_chunk()]).await;
    let fixture = KeyFixture::new();
    let one = KeyEntry { requests_max: Some(1), ..entry("one", 1) };
    let small = KeyEntry { bodies_bytes_max: Some(2_000), ..entry("small", 1) };
    let [one, small, free] = fixture.write([one, small, entry("free", 2)]);
    let house = fixture.open(&[&engine], |config| config.openai.body_bytes_max = 2_000).await;
    let asked = golden(1);
    let start = async |key: &str| {
        let key = bearer(key);
        house.start_request(&asked.path, &[("authorization", &key)], &asked.body).await
    };
    let (first, _connection) = start(&one).await;
    assert_eq!(first.status(), 200);
    let second = chat_with(&house, &one).await;
    assert_eq!((second.status, second.header("retry-after")), (429, Some("1")));
    let (text, code) = second.error();
    says("more requests than a key may have", &text, &[]);
    assert_eq!(code.as_deref(), Some("rate_limit_exceeded"));
    let (other, _other_connection) = start(&free).await;
    assert_eq!(other.status(), 200);
    (0..2).for_each(|_| engine.open_gate());
    for response in [first, other] {
        assert!(super::fixture::read_answer(response).await.is_whole);
    }
    house.until_metric("kvfleet_gateway_requests_running", "", 0).await;
    engine.open_gate();
    assert_eq!(chat_with(&house, &one).await.status, 200);

    // Its body stays in flight until the engine answers.
    engine.next_answer(vec![Step::Gate, stream_head(), last_chunk()]);
    let long = json!({ "model": "m", "stream": true, "prompt": "x".repeat(1_500) }).to_string();
    let key = bearer(&small);
    let headers = [("authorization", key.as_str())];
    let before = engine.received().len();
    let (waiting, refused) = tokio::join!(house.request("/v1/completions", &headers, &long), async {
        until("the first body at the engine", || async { (engine.received().len() > before).then_some(()) })
            .await;
        let refused = house.request("/v1/completions", &headers, &long).await;
        engine.open_gate();
        refused
    });
    assert_eq!((waiting.status, refused.status), (200, 429));
    says("more bytes of bodies than a key may have", &refused.error().0, &[]);
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_reloaded_when_the_file_changes() {
    let engine = ScriptedEngine::start(json_answer(200, "{}")).await;
    let fixture = KeyFixture::new();
    let [first] = fixture.write([entry("first", 1)]);
    let house = fixture.open(&[&engine], |config| config.openai.reload_ms = 20).await;
    assert_eq!(chat_with(&house, &first).await.status, 200);
    let [second] = fixture.write([entry("second", 1)]);
    until("the second key", || async { (chat_with(&house, &second).await.status == 200).then_some(()) })
        .await;
    assert_eq!(chat_with(&house, &first).await.status, 401, "a removed key is no longer valid");
    house.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unusable_file_of_keys_prevents_the_start() {
    let engine = ScriptedEngine::start(vec![]).await;
    let fixture = KeyFixture::new();
    let [_] = fixture.write([entry("one", 1)]);
    let house = fixture.open(&[&engine], |_| {}).await;
    let mut config = GatewayConfig::default();
    config.openai.listen = "127.0.0.1:0".into();
    config.openai.api_keys_file = fixture.file();
    let desk = house.cluster.routers[0].as_ref().unwrap().handle();
    let registry = prometheus::Registry::new();
    let opened = kvfleet_gateway::Gateway::open(&config, &engines_config(), desk, &registry).await;
    let folder = fixture.folder.path().display().to_string();
    says("a key of a tenant that is not configured", &opened.expect_err("must be refused"), &[&folder]);
    house.close().await;
}

/// Two tenants send the same prompt. The engine's cache and the router's knowledge of it are apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_learns_nothing_of_the_prefixes_of_another() {
    let one = ScriptedEngine::start(vec![Step::AnswerCached]).await;
    let two = ScriptedEngine::start(vec![Step::AnswerCached]).await;
    let fixture = KeyFixture::new();
    let [first, second] = fixture.write([entry("first", 1), entry("second", 2)]);
    let house = fixture.open(&[&one, &two], |_| {}).await;
    let at = |answer: &ClientAnswer| answer.header("x-kvfleet-instance").unwrap().to_owned();
    // Both engines compute the prompt for the first tenant. Then both are idle.
    assert_eq!(at(&chat_with(&house, &first).await), "1");
    house.loads.lock().iter_mut().for_each(|(_, tokens)| *tokens = 0);
    let blocks = hashes_of(&fixture.identity, Some("salt \"one\""), &golden(1).tokens);
    let blocks: Vec<_> = blocks.iter().map(|hash| hash.0).collect();
    let told = pb::ResidencyRequest {
        instance: 2,
        epoch: STARTED_US,
        batches: vec![pb::Batch { seq: 1, changes: vec![resident(&blocks)], digest: vec![] }],
        last_seq: 1,
    };
    let beat = pb::ResidencyRequest { batches: vec![], ..told.clone() };
    house.cluster.client(1).report_residency(told).await.unwrap();
    let cached = |answer: &ClientAnswer| {
        let body: Value = serde_json::from_slice(&answer.body).unwrap();
        body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let matched = async |answer: &ClientAnswer| {
        let request = answer.header("x-kvfleet-request").unwrap().parse().unwrap();
        let story = house.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        (story.tenant, story.resident_blocks)
    };
    until("the first tenant to follow its prefix", || async {
        house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
        (at(&chat_with(&house, &first).await) == "2").then_some(())
    })
    .await;
    for _ in 0..3 {
        house.until_reported().await;
        house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
        let own = chat_with(&house, &first).await;
        assert_eq!((at(&own).as_str(), cached(&own) > 0), ("2", true));
        assert_eq!(matched(&own).await, (1, blocks.len() as u32));
    }
    house.loads.lock()[1].1 = 2_000;
    house.until_reported().await;
    house.cluster.client(1).report_residency(beat.clone()).await.unwrap();
    let other = chat_with(&house, &second).await;
    assert_eq!((at(&other).as_str(), cached(&other)), ("1", 0), "placed by load alone");
    assert_eq!(matched(&other).await, (2, 0));
    assert!(cached(&chat_with(&house, &second).await) > 0, "its own prompt is cached");
    house.close().await;
}
