//! Prometheus metrics of an instance, updated from its replies.

use kvfleet_client::Client;
use kvfleet_proto::pb;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Metrics of an instance.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    requests: IntCounter,
    blocks: IntCounterVec,
    bytes: IntCounterVec,
    running: IntGauge,
}

impl Metrics {
    pub(super) fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters =
            |name: &str, help: &str, label: &str| IntCounterVec::new(Opts::new(name, help), &[label]);
        let metrics = Self {
            requests: IntCounter::new("kvfleet_instance_requests_total", "Requests served.")?,
            blocks: counters("kvfleet_instance_blocks_total", "Blocks of requests, by outcome.", "outcome")?,
            bytes: counters("kvfleet_instance_bytes_total", "Block bytes, by operation.", "act")?,
            running: IntGauge::new("kvfleet_instance_running", "Requests in flight.")?,
        };
        registry.register(Box::new(metrics.requests.clone()))?;
        registry.register(Box::new(metrics.blocks.clone()))?;
        registry.register(Box::new(metrics.bytes.clone()))?;
        registry.register(Box::new(metrics.running.clone()))?;
        Ok(metrics)
    }

    pub(super) fn running(&self, requests: u32) {
        self.running.set(i64::from(requests));
    }

    pub(super) fn count_reply(&self, reply: &pb::RunReply) {
        self.requests.inc();
        let blocks =
            |outcome: &str, count: u32| self.blocks.with_label_values(&[outcome]).inc_by(count.into());
        blocks("hit_dram", reply.hit_dram_blocks);
        blocks("hit_ssd", reply.hit_ssd_blocks);
        blocks("hit_gpu", reply.hit_gpu_blocks);
        blocks("computed", reply.asked_blocks.saturating_sub(reply.hit_blocks));
        blocks("saved", reply.saved_blocks);
        blocks("refused", reply.refused_blocks);
        let bytes = |act: &str, count: u64| self.bytes.with_label_values(&[act]).inc_by(count);
        bytes("fetched", reply.fetched_bytes);
        bytes("verified", reply.verified_bytes);
        bytes("wrong", reply.wrong_bytes);
        bytes("unused", reply.unused_bytes);
        bytes("saved", reply.saved_bytes);
    }
}

/// Registers metrics of the client's transport paths.
pub(super) fn register_path_metrics(registry: &Registry, client: Client) -> Result<(), prometheus::Error> {
    let gauge = |name: &str, help: &str, labels: &[&str]| IntGaugeVec::new(Opts::new(name, help), labels);
    let help = "Encoded block bytes over each transport path since start.";
    let bytes = gauge("kvfleet_instance_path_bytes", help, &["path", "act"])?;
    let help = "Nodes that are reached over each transport path.";
    let nodes = gauge("kvfleet_instance_path_nodes", help, &["path"])?;
    registry.register(Box::new(PathCollector { client, bytes, nodes }))
}

/// Collects path metrics from the client on demand.
struct PathCollector {
    client: Client,
    bytes: IntGaugeVec,
    nodes: IntGaugeVec,
}

impl Collector for PathCollector {
    fn desc(&self) -> Vec<&Desc> {
        [self.bytes.desc(), self.nodes.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let set = |gauge: IntGauge, value: u64| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        let reports = self.client.path_reports();
        for (kind, carried) in self.client.carried() {
            let path = kind.name();
            set(self.bytes.with_label_values(&[path, "fetched"]), carried.received_bytes());
            set(self.bytes.with_label_values(&[path, "saved"]), carried.sent_bytes());
            let nodes = reports.iter().filter(|report| report.used == kind).count();
            set(self.nodes.with_label_values(&[path]), nodes as u64);
        }
        [self.bytes.collect(), self.nodes.collect()].concat()
    }
}
