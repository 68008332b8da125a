//! A router with its OpenAI-compatible API, some engines, and clients.
//!
//! Not here: the engines' answers (`engine.rs`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use kv_core::id::BlockHash;
use kv_core::schedule::InstanceRole;
use kvfleet_gateway::{EndpointConfig, Gateway, GatewayConfig, ModelConfig};
use kvfleet_proto::pb;
use kvfleet_router::{EnginesConfig, Tenants};
use parking_lot::Mutex;
use prometheus::Registry;
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::engine::ScriptedEngine;
use kvfleet_testkit::cluster::{Cluster, until};

pub const BLOCK_TOKENS: u32 = 4;

/// Start time that instances report.
pub const STARTED_US: u64 = 1_000;

/// Path of chat requests.
pub const CHAT: &str = "/v1/chat/completions";

/// A router with the API, and engines.
pub struct GatewayFixture {
    pub cluster: Cluster,
    pub gateway: Option<Gateway>,
    pub address: SocketAddr,
    pub registry: Registry,
    pub loads: Arc<Mutex<Vec<(u32, u64)>>>,
    /// Outcomes in the next report of the first instance.
    pub outcomes: Arc<Mutex<Vec<pb::Outcome>>>,
    /// Reported decode load per instance: running requests, and time between tokens in
    /// microseconds.
    pub decodes: Arc<Mutex<BTreeMap<u32, (u32, u32)>>>,
    /// Rounds of reports so far. Each reports all loads again, which replaces the effect of earlier
    /// placements.
    rounds: Arc<AtomicU64>,
    reporting: JoinHandle<()>,
}

/// A complete answer, or the part before it broke off.
#[derive(Debug)]
pub struct ClientAnswer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub is_whole: bool,
}

impl ClientAnswer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// `error.message` and `error.code` of an OpenAI error.
    pub fn error(&self) -> (String, Option<String>) {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct ErrorBody {
            error: ErrorFields,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct ErrorFields {
            message: String,
            r#type: String,
            param: Option<String>,
            code: Option<String>,
        }
        let ErrorBody { error } = serde_json::from_slice(&self.body).unwrap();
        assert!(!error.r#type.is_empty() && error.param.is_none());
        (error.message, error.code)
    }
}

pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

/// A request with the tokens that Python produced.
#[derive(Clone, Debug, Deserialize)]
pub struct GoldenPrompt {
    pub path: String,
    pub body: String,
    pub tokens: Vec<u32>,
}

pub fn golden(number: usize) -> GoldenPrompt {
    let text = std::fs::read_to_string(testdata("prompts.jsonl")).unwrap();
    serde_json::from_str(text.lines().nth(number).unwrap()).unwrap()
}

pub fn engines_config() -> EnginesConfig {
    let mut engines = EnginesConfig::default();
    engines.identity.block_tokens = BLOCK_TOKENS;
    engines.public_hashes = true;
    engines
}

/// Hashes of the full blocks of these tokens.
pub fn hashes(tokens: &[u32]) -> Vec<BlockHash> {
    hashes_of(&engines_config(), None, tokens)
}

/// Hashes of the full blocks of these tokens, in requests with this salt.
pub fn hashes_of(identity: &EnginesConfig, salt: Option<&str>, tokens: &[u32]) -> Vec<BlockHash> {
    let hasher = Tenants::load(identity).unwrap().hasher(None, salt).unwrap();
    let mut hashes = vec![];
    hasher.extend(&mut hasher.start(), tokens, &mut hashes);
    hashes
}

impl GatewayFixture {
    /// Starts everything. Instances count from 1, and lower ones are less loaded.
    pub async fn open(
        engines: &[&ScriptedEngine],
        change: impl FnOnce(&mut GatewayConfig),
    ) -> GatewayFixture {
        let addresses: Vec<_> = engines.iter().map(|engine| engine.address).collect();
        GatewayFixture::open_at(&addresses, change).await
    }

    pub async fn open_at(engines: &[SocketAddr], change: impl FnOnce(&mut GatewayConfig)) -> GatewayFixture {
        GatewayFixture::open_with(engines, &engines_config(), change).await
    }

    /// As [`GatewayFixture::open_at`], with these tenants and secrets of hashes.
    pub async fn open_with(
        engines: &[SocketAddr],
        identity: &EnginesConfig,
        change: impl FnOnce(&mut GatewayConfig),
    ) -> GatewayFixture {
        let cluster = Cluster::start(1, |_| {}).await;
        let desk = cluster.routers[0].as_ref().unwrap().handle();
        let mut config = GatewayConfig {
            models: vec![ModelConfig {
                name: "m".into(),
                tokenizer: testdata("tokenizer.json"),
                context_tokens: 4_000,
                ..ModelConfig::default()
            }],
            ..GatewayConfig::default()
        };
        config.openai.listen = "127.0.0.1:0".into();
        (config.openai.retry.first_ms, config.openai.retry.max_ms) = (1, 5);
        let at = |(instance, address): (u32, &SocketAddr)| EndpointConfig {
            instance,
            url: format!("http://{address}"),
            reports_itself: true,
            ..EndpointConfig::default()
        };
        // One health check per test; later failures are found by requests.
        config.load.health_every_ms = 60_000;
        config.endpoints = (1..).zip(engines).map(at).collect();
        change(&mut config);
        let role =
            |endpoint: &EndpointConfig| InstanceRole::by_name(&endpoint.role).unwrap_or_default() as u32;
        let roles: BTreeMap<_, _> =
            config.endpoints.iter().map(|endpoint| (endpoint.instance, role(endpoint))).collect();
        let registry = Registry::new();
        let gateway = Gateway::open(&config, identity, desk.clone(), &registry).await.unwrap();
        let [("openai", address)] = gateway.addresses()[..] else { panic!("expected one listener") };
        let loads: Vec<_> =
            (1..).zip(engines).map(|(number, _)| (number, 2_000 * u64::from(number))).collect();
        let loads = Arc::new(Mutex::new(loads));
        let reported = loads.clone();
        let outcomes = Arc::<Mutex<Vec<pb::Outcome>>>::default();
        let pending_outcomes = outcomes.clone();
        let decodes = Arc::<Mutex<BTreeMap<u32, (u32, u32)>>>::default();
        let decoding = decodes.clone();
        let rounds = Arc::new(AtomicU64::new(0));
        let round = rounds.clone();
        let ready = desk.clone();
        until("the router to be ready", || async { ready.ready().ok() }).await;
        let reporting = tokio::spawn(async move {
            for sequence in 1.. {
                for (instance, queue_tokens) in reported.lock().clone() {
                    let address = format!("i:{instance}");
                    let (running, tbt_us) = decoding.lock().get(&instance).copied().unwrap_or_default();
                    let report = pb::ReportRequest {
                        instance,
                        address,
                        sequence,
                        queue_tokens,
                        running,
                        tbt_us,
                        started_us: STARTED_US,
                        outcomes: if instance == 1 {
                            std::mem::take(&mut *pending_outcomes.lock())
                        } else {
                            vec![]
                        },
                        role: roles.get(&instance).copied().unwrap_or_default(),
                        ..Default::default()
                    };
                    desk.report(report).unwrap();
                }
                round.store(sequence, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let gateway = Some(gateway);
        let house = GatewayFixture {
            cluster,
            gateway,
            address,
            registry,
            loads,
            outcomes,
            decodes,
            rounds,
            reporting,
        };
        let status = || async {
            house.cluster.status(1).await.filter(|status| status.instances.len() == engines.len())
        };
        until("reports of all engines", status).await;
        house
    }

    /// Waits until all loads were reported again.
    pub async fn until_reported(&self) {
        let all = self.rounds.load(Ordering::Relaxed) + 2;
        until("reports of all engines", || async {
            (self.rounds.load(Ordering::Relaxed) >= all).then_some(())
        })
        .await;
    }

    /// Sends a request, and waits for the head of its answer.
    pub async fn start_request(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (Response<Incoming>, JoinHandle<()>) {
        let method = if path == "/v1/models" || !path.starts_with("/v1") { "GET" } else { "POST" };
        let mut request = Request::builder().method(method).uri(path).header("host", "gateway");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(async move { drop(connection.await) });
        let response =
            tokio::time::timeout(kvfleet_testkit::cluster::HANG, sender.send_request(request)).await;
        (response.expect("an answer in time").unwrap(), connection)
    }

    pub async fn request(&self, path: &str, headers: &[(&str, &str)], body: &str) -> ClientAnswer {
        let (response, _connection) = self.start_request(path, headers, body).await;
        read_answer(response).await
    }

    /// Sends the golden chat request.
    pub async fn chat(&self) -> ClientAnswer {
        let GoldenPrompt { path, body, .. } = golden(1);
        self.request(&path, &[], &body).await
    }

    /// Value of a metric with this label value.
    pub fn metric(&self, name: &str, label: &str) -> u64 {
        let families = self.registry.gather();
        let metrics =
            families.iter().filter(|family| family.name() == name).flat_map(|family| family.get_metric());
        let of = |metric: &&prometheus::proto::Metric| {
            label.is_empty() || metric.get_label().iter().any(|pair| pair.value() == label)
        };
        metrics
            .filter(of)
            .map(|metric| (metric.get_counter().get_value() + metric.get_gauge().get_value()) as u64)
            .sum()
    }

    /// Waits for the value of a metric.
    pub async fn until_metric(&self, name: &str, label: &str, value: u64) {
        until(&format!("{name} {label} {value}"), || async {
            (self.metric(name, label) == value).then_some(())
        })
        .await;
    }

    pub async fn close(mut self) {
        if let Some(gateway) = self.gateway.take() {
            gateway.shutdown().await;
        }
        self.reporting.abort();
        self.cluster.shutdown().await;
    }
}

/// Reads an answer to its end, or until it breaks off.
pub async fn read_answer(response: Response<Incoming>) -> ClientAnswer {
    let (parts, mut body) = response.into_parts();
    let mut bytes = vec![];
    let mut is_whole = true;
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => bytes.extend(frame.into_data().unwrap_or_default()),
            Err(_) => {
                is_whole = false;
                break;
            }
        }
    }
    ClientAnswer { status: parts.status.as_u16(), headers: parts.headers, body: bytes.into(), is_whole }
}
