//! Prometheus metrics of a node. Wrappers only, without decisions.

use kv_core::id::{Tier, TrafficClass};
use kv_core::place::copies::CopyOutcome;
use kv_core::tier::TierStats;
use kvfleet_transport::shm::ShmStats;
use kvfleet_transport::{Capacity, TrafficCounters};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::tiers::ssd::Wear;

/// All metrics of one node. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    blocks: IntGaugeVec,
    bytes: IntGaugeVec,
    demoted: IntGaugeVec,
    promoted: IntGaugeVec,
    dropped: IntGaugeVec,
    not_admitted: IntGaugeVec,
    expired: IntGaugeVec,
    invalidated: IntGaugeVec,
    admitting: IntGaugeVec,
    hits: [IntCounter; Tier::ALL.len()],
    saved_bytes: IntCounter,
    refused_blocks: IntCounter,
    ssd: SsdMetrics,
    gpu_errors: IntCounter,
    leases: IntGauge,
    moves: IntGauge,
    window: IntGauge,
    prefetched: IntGauge,
    host: HostMetrics,
    copies: CopyMetrics,
}

/// Metrics of copies from other nodes.
#[derive(Clone, Debug)]
struct CopyMetrics {
    ended: IntCounterVec,
    blocks: IntCounter,
    bytes: IntCounter,
}

impl CopyMetrics {
    fn new(registry: &Registry) -> Result<CopyMetrics, prometheus::Error> {
        let help = "Copies from other nodes requested by a router, by outcome";
        let ended = IntCounterVec::new(Opts::new("kvfleet_node_copies_total", help), &["end"])?;
        registry.register(Box::new(ended.clone()))?;
        Ok(CopyMetrics {
            ended,
            blocks: counter(
                registry,
                "kvfleet_node_copied_blocks_total",
                "Blocks stored by copies from other nodes",
            )?,
            bytes: counter(
                registry,
                "kvfleet_node_copied_bytes_total",
                "Bytes of blocks stored by copies from other nodes",
            )?,
        })
    }
}

/// Metrics of clients on the same host.
#[derive(Clone, Debug)]
struct HostMetrics {
    clients: IntGauge,
    in_place_reads: IntGauge,
    in_place_bytes: IntGauge,
    oldest_read: IntGauge,
}

impl HostMetrics {
    fn new(registry: &Registry) -> Result<HostMetrics, prometheus::Error> {
        let gauge = |name: &str, help: &str| gauge(registry, name, help);
        Ok(HostMetrics {
            clients: gauge("kvfleet_node_host_clients", "Connected processes of this host")?,
            in_place_reads: gauge(
                "kvfleet_node_in_place_reads",
                "Blocks that processes of this host read in place",
            )?,
            in_place_bytes: gauge(
                "kvfleet_node_in_place_read_bytes",
                "Bytes of blocks that processes of this host read in place",
            )?,
            oldest_read: gauge(
                "kvfleet_node_oldest_in_place_read_seconds",
                "Age of the oldest in-place read in seconds",
            )?,
        })
    }
}

/// Metrics of the SSDs.
#[derive(Clone, Debug)]
struct SsdMetrics {
    errors: IntCounter,
    over_budget: IntCounter,
    overloaded: IntCounter,
    slow: IntGauge,
    scrubbed: IntCounter,
    saved: IntGauge,
    rewritten: IntGauge,
}

impl SsdMetrics {
    fn new(registry: &Registry) -> Result<SsdMetrics, prometheus::Error> {
        Ok(SsdMetrics {
            errors: counter(
                registry,
                "kvfleet_node_ssd_errors_total",
                "Reads and writes of the SSD that failed",
            )?,
            over_budget: counter(
                registry,
                "kvfleet_node_ssd_over_budget_blocks_total",
                "Blocks not written to SSD because the daily write budget was used up",
            )?,
            overloaded: counter(
                registry,
                "kvfleet_node_ssd_overloaded_blocks_total",
                "Blocks not written to or read from a slow SSD because its queue was full",
            )?,
            slow: gauge(registry, "kvfleet_node_slow_ssds", "SSDs that are slow now")?,
            scrubbed: counter(
                registry,
                "kvfleet_node_scrubbed_bytes_total",
                "Bytes on SSD that the scrubber read and found intact",
            )?,
            saved: gauge(
                registry,
                "kvfleet_node_ssd_saved_bytes",
                "Bytes of blocks written to SSD since start",
            )?,
            rewritten: gauge(
                registry,
                "kvfleet_node_ssd_rewritten_bytes",
                "Bytes of blocks rewritten on SSD since start to free their segments",
            )?,
        })
    }
}

fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let counter = IntCounter::new(name, help)?;
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let gauge = IntGauge::new(name, help)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

/// Hits by tier, looked up once: finding a label takes longer than serving a block.
fn hits(registry: &Registry) -> Result<[IntCounter; Tier::ALL.len()], prometheus::Error> {
    let hits = IntCounterVec::new(
        Opts::new("kvfleet_node_hits_total", "Blocks served to readers, each once per request"),
        &["tier"],
    )?;
    registry.register(Box::new(hits.clone()))?;
    Ok(Tier::ALL.map(|tier| hits.with_label_values(&[tier.name()])))
}

impl Metrics {
    /// Creates and registers all metrics.
    pub(crate) fn new(registry: &Registry) -> Result<Metrics, prometheus::Error> {
        let by_tier = |name: &str, help: &str| -> Result<IntGaugeVec, prometheus::Error> {
            let gauge = IntGaugeVec::new(Opts::new(name, help), &["tier"])?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let counter = |name: &str, help: &str| counter(registry, name, help);
        let gauge = |name: &str, help: &str| gauge(registry, name, help);
        Ok(Metrics {
            blocks: by_tier("kvfleet_node_blocks", "Blocks assigned to the tier")?,
            bytes: by_tier("kvfleet_node_bytes", "Bytes of slots in use")?,
            demoted: by_tier("kvfleet_node_demoted_blocks", "Blocks demoted to a slower tier since start")?,
            promoted: by_tier(
                "kvfleet_node_promoted_blocks",
                "Blocks promoted from a slower tier since start",
            )?,
            dropped: by_tier("kvfleet_node_dropped_blocks", "Blocks dropped by pressure since start")?,
            not_admitted: by_tier(
                "kvfleet_node_not_admitted_blocks",
                "Blocks not admitted since start because their victims were worth more or reuse on SSD was unlikely",
            )?,
            expired: by_tier(
                "kvfleet_node_expired_blocks",
                "Blocks dropped since start because their group's time to live expired",
            )?,
            invalidated: by_tier(
                "kvfleet_node_invalidated_blocks",
                "Blocks dropped since start because they were computed with earlier weights",
            )?,
            admitting: by_tier("kvfleet_node_admitting", "1 while the tier accepts new blocks")?,
            hits: hits(registry)?,
            saved_bytes: counter("kvfleet_node_saved_bytes_total", "Encoded bytes committed")?,
            refused_blocks: counter("kvfleet_node_refused_blocks_total", "Frames refused after an offer")?,
            ssd: SsdMetrics::new(registry)?,
            gpu_errors: counter(
                "kvfleet_node_gpu_errors_total",
                "Failed copies to and from a GPU, and losses of the GPU",
            )?,
            leases: gauge("kvfleet_node_leases", "Requests in progress (leases held)")?,
            moves: gauge("kvfleet_node_moves", "Moves between tiers in flight")?,
            window: gauge("kvfleet_node_window_blocks", "Distinct blocks that queued requests need")?,
            prefetched: gauge(
                "kvfleet_node_prefetched_blocks",
                "Blocks promoted since start for queued requests",
            )?,
            copies: CopyMetrics::new(registry)?,
            host: HostMetrics::new(registry)?,
        })
    }

    pub(crate) fn hit(&self, tier: Tier) {
        if let Some(hits) = Tier::ALL.iter().position(|of| *of == tier).and_then(|at| self.hits.get(at)) {
            hits.inc();
        }
    }

    /// Blocks of this tier served to readers.
    #[cfg(test)]
    pub(crate) fn hits(&self, tier: Tier) -> u64 {
        Tier::ALL
            .iter()
            .position(|of| *of == tier)
            .and_then(|at| self.hits.get(at))
            .map_or(0, IntCounter::get)
    }

    pub(crate) fn saved(&self, bytes: usize) {
        self.saved_bytes.inc_by(bytes as u64);
    }

    pub(crate) fn refused(&self, blocks: u32) {
        self.refused_blocks.inc_by(u64::from(blocks));
    }

    pub(crate) fn ssd_error(&self) {
        self.ssd.errors.inc();
    }

    pub(crate) fn ssd_over_budget(&self) {
        self.ssd.over_budget.inc();
    }

    pub(crate) fn ssd_overloaded(&self, blocks: u64) {
        self.ssd.overloaded.inc_by(blocks);
    }

    pub(crate) fn slow_ssds(&self, count: usize) {
        set(&self.ssd.slow, count as u64);
    }

    pub(crate) fn gpu_error(&self) {
        self.gpu_errors.inc();
    }

    pub(crate) fn scrubbed(&self, bytes: u64) {
        self.ssd.scrubbed.inc_by(bytes);
    }

    pub(crate) fn ssd_wear(&self, wear: Wear) {
        set(&self.ssd.saved, wear.saved_bytes);
        set(&self.ssd.rewritten, wear.rewritten_bytes);
    }

    pub(crate) fn tier(&self, tier: Tier, stats: &TierStats) {
        let label = &[tier.name()];
        set(&self.blocks.with_label_values(label), stats.blocks);
        set(&self.bytes.with_label_values(label), stats.used_bytes);
        set(&self.demoted.with_label_values(label), stats.demoted_blocks);
        set(&self.promoted.with_label_values(label), stats.promoted_blocks);
        set(&self.dropped.with_label_values(label), stats.dropped_blocks);
        set(&self.not_admitted.with_label_values(label), stats.not_admitted_blocks);
        set(&self.expired.with_label_values(label), stats.expired_blocks);
        set(&self.invalidated.with_label_values(label), stats.invalidated_blocks);
        set(&self.admitting.with_label_values(label), u64::from(stats.admitting));
    }

    pub(crate) fn copied(&self, end: CopyOutcome, blocks: u32, bytes: u64) {
        self.copies.ended.with_label_values(&[end.name()]).inc();
        self.copies.blocks.inc_by(blocks.into());
        self.copies.bytes.inc_by(bytes);
    }

    pub(crate) fn leases(&self, count: usize) {
        set(&self.leases, count as u64);
    }

    pub(crate) fn window(&self, blocks: usize, prefetched: u64) {
        set(&self.window, blocks as u64);
        set(&self.prefetched, prefetched);
    }

    pub(crate) fn host(&self, numbers: &ShmStats) {
        set(&self.host.clients, numbers.connections as u64);
        set(&self.host.in_place_reads, numbers.grants as u64);
        set(&self.host.in_place_bytes, numbers.granted_bytes);
        set(&self.host.oldest_read, numbers.oldest.map_or(0, |oldest| oldest.age.as_secs()));
    }

    pub(crate) fn moves(&self, count: usize) {
        set(&self.moves, count as u64);
    }
}

/// Registers bytes carried by each transport, by name, as its server counts them.
pub(crate) fn register_path_metrics(
    registry: &Registry,
    paths: Vec<(&'static str, TrafficCounters)>,
) -> Result<(), prometheus::Error> {
    let by_path = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["path"]);
    let sent = by_path("kvfleet_node_path_sent_bytes", "Bytes of blocks sent to readers since start")?;
    let help = "Bytes of blocks received with saves since start, stored or not";
    let received = by_path("kvfleet_node_path_received_bytes", help)?;
    registry.register(Box::new(PathBytes { sent, received, paths }))
}

/// Reads the servers' own counters on collection: finding a label takes longer than sending a
/// frame.
struct PathBytes {
    sent: IntGaugeVec,
    received: IntGaugeVec,
    paths: Vec<(&'static str, TrafficCounters)>,
}

impl Collector for PathBytes {
    fn desc(&self) -> Vec<&Desc> {
        [self.sent.desc(), self.received.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (path, carried) in &self.paths {
            set(&self.sent.with_label_values(&[path]), carried.sent_bytes());
            set(&self.received.with_label_values(&[path]), carried.received_bytes());
        }
        [self.sent.collect(), self.received.collect()].concat()
    }
}

/// Registers operation counts by class.
pub(crate) fn register_class_metrics(registry: &Registry, room: Capacity) -> Result<(), prometheus::Error> {
    let by_class = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["class"]);
    let help = "Fetches and saves admitted since start";
    let let_in = by_class("kvfleet_node_class_admitted_operations", help)?;
    let help = "Fetches and saves refused with Busy since start";
    let refused = by_class("kvfleet_node_class_refused_operations", help)?;
    let bytes = by_class("kvfleet_node_class_in_flight_bytes", "Bytes reserved for operations in flight")?;
    registry.register(Box::new(ClassMetrics { admitted: let_in, refused, bytes, room }))
}

/// Reads the limiter's own counters on collection.
struct ClassMetrics {
    admitted: IntGaugeVec,
    refused: IntGaugeVec,
    bytes: IntGaugeVec,
    room: Capacity,
}

impl Collector for ClassMetrics {
    fn desc(&self) -> Vec<&Desc> {
        [self.admitted.desc(), self.refused.desc(), self.bytes.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (class, numbers) in TrafficClass::ALL.into_iter().zip(self.room.class_counts()) {
            let label = &[class.name()];
            set(&self.admitted.with_label_values(label), numbers.admitted);
            set(&self.refused.with_label_values(label), numbers.refused);
            set(&self.bytes.with_label_values(label), numbers.in_flight_bytes);
        }
        [self.admitted.collect(), self.refused.collect(), self.bytes.collect()].concat()
    }
}

fn set(gauge: &IntGauge, value: u64) {
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
}
