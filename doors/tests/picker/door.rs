//! A router whose door for Envoy is open, with two engines that report.
//!
//! Instance 2 says that it has the blocks of [`DRAWN`], so that requests with that prompt go there. Not here: the engines (`engine.rs`).

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_doors::{Doors, DoorsConfig, EndpointConfig, PickerConfig};
use kvfleet_proto::envoy::ext_proc::external_processor_client::ExternalProcessorClient;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{Desk, EnginesConfig};
use parking_lot::Mutex;
use prometheus::Registry;
use tonic::transport::{Channel, Endpoint};

use crate::harness::{Cluster, resident, until};

/// A prompt that draws requests to instance 2.
pub const DRAWN: std::ops::Range<u32> = 0..1_600;

const EPOCH: u64 = 1_000;

pub struct Door {
    pub cluster: Cluster,
    pub engines: EnginesConfig,
    pub endpoints: [String; 2],
    /// Tokens that wait at each engine.
    pub waiting: Arc<AtomicU64>,
    /// What the second engine tells with its next report.
    pub outcomes: Arc<Mutex<Vec<pb::Outcome>>>,
    reports: tokio::task::JoinHandle<()>,
}

/// One door of it, and what it counts.
pub struct Opened {
    pub doors: Doors,
    pub registry: Registry,
    pub address: String,
}

impl Door {
    pub async fn start(endpoints: [String; 2]) -> Door {
        let manifest = IdentityManifest { block_tokens: 16, ..IdentityManifest::default() };
        let engines =
            EnginesConfig { identity: IdentitySection::from(&manifest), ..EnginesConfig::default() };
        let cluster = Cluster::start(1, |_| {}).await;
        cluster.leader().await;
        let desk = cluster.routers[0].as_ref().unwrap().desk();
        until("a router that is ready", || async { desk.ready().ok() }).await;
        let (waiting, sequence) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let outcomes = Arc::<Mutex<Vec<pb::Outcome>>>::default();
        report(&desk, &sequence, &waiting, vec![]);
        let hasher = PrefixHasher::new(&manifest, &[0; 32]);
        let blocks: Vec<_> = hasher.blocks(&DRAWN.collect::<Vec<_>>()).iter().map(|block| block.0).collect();
        let batch = pb::Batch { seq: 1, changes: vec![resident(&blocks)], digest: vec![] };
        let mut client = cluster.client(1);
        let request = pb::ResidencyRequest { instance: 2, epoch: EPOCH, batches: vec![batch], last_seq: 1 };
        client.report_residency(request).await.unwrap();
        let (told, counted) = (Arc::clone(&waiting), Arc::clone(&sequence));
        let ended = Arc::clone(&outcomes);
        let reports = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                report(&desk, &counted, &told, std::mem::take(&mut *ended.lock()));
                let alive = pb::ResidencyRequest { instance: 2, epoch: EPOCH, batches: vec![], last_seq: 1 };
                let _ = client.report_residency(alive).await; // the router may be stopping
            }
        });
        Door { cluster, engines, endpoints, waiting, outcomes, reports }
    }

    /// Opens a door; `change` changes its configuration.
    pub async fn open(&self, change: impl FnOnce(&mut PickerConfig)) -> Opened {
        let mut picker = PickerConfig { listen: "127.0.0.1:0".into(), ..PickerConfig::default() };
        change(&mut picker);
        let listed = |(at, authority): (usize, &String)| EndpointConfig {
            instance: at as u32 + 1,
            url: format!("http://{authority}"),
            reports_itself: true,
            ..EndpointConfig::default()
        };
        let endpoints = self.endpoints.iter().enumerate().map(listed).collect();
        let mut config = DoorsConfig { endpoints, picker, ..DoorsConfig::default() };
        // Asked once whether they are there.
        config.load.health_every_ms = 60_000;
        let registry = Registry::new();
        let doors = Doors::open(&config, &self.engines, self.desk(), &registry).await.unwrap();
        let picker = doors.addresses().into_iter().find(|(of, _)| *of == "picker").unwrap();
        let address = picker.1.to_string();
        Opened { doors, registry, address }
    }

    pub fn desk(&self) -> Desk {
        self.cluster.routers[0].as_ref().unwrap().desk()
    }

    pub async fn shutdown(self) {
        self.reports.abort();
        self.cluster.shutdown().await;
    }
}

/// Where somebody answers whether he is well, for as long as the process lives, and nothing else: to an engine that nobody is at no request is
/// sent, and these get none, since Envoy alone sends them.
pub fn engine() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4_096]); // whatever was asked
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
    });
    authority
}

impl Opened {
    pub fn channel(&self) -> Channel {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap().connect_lazy()
    }

    pub fn client(&self) -> ExternalProcessorClient<Channel> {
        ExternalProcessorClient::new(self.channel())
    }

    /// What it counts under this name, all labels taken together.
    pub fn counted(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let one = |metric: &prometheus::proto::Metric| {
            metric.get_counter().get_value() + metric.get_gauge().get_value()
        };
        family.map_or(0, |family| family.get_metric().iter().map(one).sum::<f64>() as u64)
    }
}

fn report(desk: &Desk, sequence: &AtomicU64, waiting: &AtomicU64, outcomes: Vec<pb::Outcome>) {
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

/// A request for a completion of these tokens.
pub fn completion(tokens: std::ops::Range<u32>, stream: bool) -> String {
    let ids: Vec<_> = tokens.map(|token| token.to_string()).collect();
    format!("{{\"model\": \"m\", \"prompt\": [{}], \"stream\": {stream}}}", ids.join(","))
}
