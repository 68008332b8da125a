//! A router with an endpoint picker and two reporting engines.
//!
//! Instance 2 reports the blocks of [`RESIDENT_PROMPT`], which attracts requests with that prompt.
//! Not here: the engines (`engine.rs`).

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_gateway::{EndpointConfig, Gateway, GatewayConfig, PickerConfig};
use kvfleet_proto::envoy::ext_proc::external_processor_client::ExternalProcessorClient;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{EnginesConfig, RouterHandle};
use parking_lot::Mutex;
use prometheus::Registry;
use tonic::transport::{Channel, Endpoint};

use kvfleet_testkit::cluster::{Cluster, resident, until};

/// Prompt with blocks on instance 2.
pub const RESIDENT_PROMPT: std::ops::Range<u32> = 0..1_600;

const EPOCH: u64 = 1_000;

pub struct PickerFixture {
    pub cluster: Cluster,
    pub engines: EnginesConfig,
    pub endpoints: [String; 2],
    /// Queued tokens that both engines report.
    pub queue_tokens: Arc<AtomicU64>,
    /// Outcomes in the next report of the second engine.
    pub outcomes: Arc<Mutex<Vec<pb::Outcome>>>,
    reports: tokio::task::JoinHandle<()>,
}

/// A running picker and its metrics.
pub struct RunningPicker {
    pub gateway: Gateway,
    pub registry: Registry,
    pub address: String,
}

impl PickerFixture {
    pub async fn start(endpoints: [String; 2]) -> PickerFixture {
        let manifest = IdentityManifest { block_tokens: 16, ..IdentityManifest::default() };
        let engines = EnginesConfig {
            identity: IdentitySection::from(&manifest),
            public_hashes: true,
            ..EnginesConfig::default()
        };
        let cluster = Cluster::start(1, |_| {}).await;
        cluster.leader().await;
        let desk = cluster.routers[0].as_ref().unwrap().handle();
        until("the router to be ready", || async { desk.ready().ok() }).await;
        let (waiting, sequence) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let outcomes = Arc::<Mutex<Vec<pb::Outcome>>>::default();
        report(&desk, &sequence, &waiting, vec![]);
        let hasher = PrefixHasher::new(&manifest, &[0; 32]);
        let blocks: Vec<_> =
            hasher.blocks(&RESIDENT_PROMPT.collect::<Vec<_>>()).iter().map(|block| block.0).collect();
        let batch = pb::Batch { seq: 1, changes: vec![resident(&blocks)], digest: vec![] };
        let mut client = cluster.client(1);
        let request = pb::ResidencyRequest { instance: 2, epoch: EPOCH, batches: vec![batch], last_seq: 1 };
        client.report_residency(request).await.unwrap();
        let (reported_tokens, next_sequence) = (Arc::clone(&waiting), Arc::clone(&sequence));
        let ended = Arc::clone(&outcomes);
        let reports = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                report(&desk, &next_sequence, &reported_tokens, std::mem::take(&mut *ended.lock()));
                let alive = pb::ResidencyRequest { instance: 2, epoch: EPOCH, batches: vec![], last_seq: 1 };
                let _ = client.report_residency(alive).await; // the router may be stopping
            }
        });
        PickerFixture { cluster, engines, endpoints, queue_tokens: waiting, outcomes, reports }
    }

    /// Starts a picker; `change` adapts its configuration.
    pub async fn open(&self, change: impl FnOnce(&mut PickerConfig)) -> RunningPicker {
        let mut picker = PickerConfig { listen: "127.0.0.1:0".into(), ..PickerConfig::default() };
        change(&mut picker);
        let listed = |(at, authority): (usize, &String)| EndpointConfig {
            instance: at as u32 + 1,
            url: format!("http://{authority}"),
            reports_itself: true,
            ..EndpointConfig::default()
        };
        let endpoints = self.endpoints.iter().enumerate().map(listed).collect();
        let mut config = GatewayConfig { endpoints, picker, ..GatewayConfig::default() };
        // One health check per test.
        config.load.health_every_ms = 60_000;
        let registry = Registry::new();
        let gateway = Gateway::open(&config, &self.engines, self.router(), &registry).await.unwrap();
        let picker = gateway.addresses().into_iter().find(|(of, _)| *of == "picker").unwrap();
        let address = picker.1.to_string();
        RunningPicker { gateway, registry, address }
    }

    pub fn router(&self) -> RouterHandle {
        self.cluster.routers[0].as_ref().unwrap().handle()
    }

    pub async fn shutdown(self) {
        self.reports.abort();
        self.cluster.shutdown().await;
    }
}

/// A server that only passes health checks, for as long as the process lives. Engines without a
/// listener would get no requests, and only Envoy forwards requests to these.
pub fn healthy_engine() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4_096]); // the request does not matter
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
    });
    authority
}

impl RunningPicker {
    pub fn channel(&self) -> Channel {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap().connect_lazy()
    }

    pub fn client(&self) -> ExternalProcessorClient<Channel> {
        ExternalProcessorClient::new(self.channel())
    }

    /// Value of a metric, summed over its labels.
    pub fn metric(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let one = |metric: &prometheus::proto::Metric| {
            metric.get_counter().get_value() + metric.get_gauge().get_value()
        };
        family.map_or(0, |family| family.get_metric().iter().map(one).sum::<f64>() as u64)
    }
}

fn report(desk: &RouterHandle, sequence: &AtomicU64, waiting: &AtomicU64, outcomes: Vec<pb::Outcome>) {
    for (instance, outcomes) in [(1, vec![]), (2, outcomes)] {
        let report = pb::ReportRequest {
            instance,
            address: format!("i:{instance}"),
            sequence: sequence.fetch_add(1, Ordering::Relaxed) + 1,
            started_us: EPOCH,
            queue_tokens: waiting.load(Ordering::Relaxed),
            outcomes,
            ..pb::ReportRequest::default()
        };
        desk.report(report).unwrap();
    }
}

/// A completion request with these tokens.
pub fn completion(tokens: std::ops::Range<u32>, stream: bool) -> String {
    let ids: Vec<_> = tokens.map(|token| token.to_string()).collect();
    format!("{{\"model\": \"m\", \"prompt\": [{}], \"stream\": {stream}}}", ids.join(","))
}
