//! Prometheus figures of a node. Wrappers only: nothing here decides anything.

use kv_core::id::{Class, Tier};
use kv_core::place::copies::CopyEnd;
use kv_core::tier::TierStats;
use kvfleet_transport::shm::ShmNumbers;
use kvfleet_transport::{Carried, Room};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::tiers::ssd::Wear;

/// All figures of one node. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    blocks: IntGaugeVec,
    bytes: IntGaugeVec,
    demoted: IntGaugeVec,
    promoted: IntGaugeVec,
    dropped: IntGaugeVec,
    turned_away: IntGaugeVec,
    expired: IntGaugeVec,
    void: IntGaugeVec,
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

/// Those of copies from other nodes.
#[derive(Clone, Debug)]
struct CopyMetrics {
    ended: IntCounterVec,
    blocks: IntCounter,
    bytes: IntCounter,
}

impl CopyMetrics {
    fn new(registry: &Registry) -> Result<CopyMetrics, prometheus::Error> {
        let help = "Copies from other nodes that a router asked for, by how they ended";
        let ended = IntCounterVec::new(Opts::new("kvfleet_node_copies_total", help), &["end"])?;
        registry.register(Box::new(ended.clone()))?;
        Ok(CopyMetrics {
            ended,
            blocks: counter(registry, "kvfleet_node_copied_blocks_total", "Blocks kept of those copies")?,
            bytes: counter(registry, "kvfleet_node_copied_bytes_total", "Bytes of those blocks")?,
        })
    }
}

/// Those of clients on the same host.
#[derive(Clone, Debug)]
struct HostMetrics {
    clients: IntGauge,
    loans: IntGauge,
    lent_bytes: IntGauge,
    oldest: IntGauge,
}

impl HostMetrics {
    fn new(registry: &Registry) -> Result<HostMetrics, prometheus::Error> {
        let gauge = |name: &str, help: &str| gauge(registry, name, help);
        Ok(HostMetrics {
            clients: gauge("kvfleet_node_host_clients", "Processes of this host that are connected")?,
            loans: gauge("kvfleet_node_loans", "Blocks that processes of this host read in place")?,
            lent_bytes: gauge("kvfleet_node_lent_bytes", "Bytes of those blocks")?,
            oldest: gauge("kvfleet_node_oldest_loan_seconds", "For how long one of them has been read")?,
        })
    }
}

/// Those of the SSDs.
#[derive(Clone, Debug)]
struct SsdMetrics {
    errors: IntCounter,
    spared: IntCounter,
    behind: IntCounter,
    slow: IntGauge,
    scrubbed: IntCounter,
    saved: IntGauge,
    rescued: IntGauge,
}

impl SsdMetrics {
    fn new(registry: &Registry) -> Result<SsdMetrics, prometheus::Error> {
        Ok(SsdMetrics {
            errors: counter(
                registry,
                "kvfleet_node_ssd_errors_total",
                "Reads and writes of the SSD that failed",
            )?,
            spared: counter(
                registry,
                "kvfleet_node_ssd_spared_blocks_total",
                "Blocks not written to SSD because the day's budget was used up",
            )?,
            behind: counter(
                registry,
                "kvfleet_node_ssd_behind_blocks_total",
                "Blocks not written to or read from a slow SSD because it had enough to do",
            )?,
            slow: gauge(registry, "kvfleet_node_slow_ssds", "SSDs that are slow now")?,
            scrubbed: counter(
                registry,
                "kvfleet_node_scrubbed_bytes_total",
                "Bytes on SSD that were read and found whole though nobody asked",
            )?,
            saved: gauge(
                registry,
                "kvfleet_node_ssd_saved_bytes",
                "Bytes of blocks written to SSD since start",
            )?,
            rescued: gauge(
                registry,
                "kvfleet_node_ssd_rescued_bytes",
                "Bytes of blocks written to SSD again since start, so that their segment could be",
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

/// Blocks given to readers, of each tier. Looked up once: a block is given away in less time than a label is found.
fn hits(registry: &Registry) -> Result<[IntCounter; Tier::ALL.len()], prometheus::Error> {
    let hits = IntCounterVec::new(
        Opts::new("kvfleet_node_hits_total", "Blocks given to readers, each once for a request"),
        &["tier"],
    )?;
    registry.register(Box::new(hits.clone()))?;
    Ok(Tier::ALL.map(|tier| hits.with_label_values(&[tier.name()])))
}

impl Metrics {
    /// Makes and registers them.
    pub(crate) fn new(registry: &Registry) -> Result<Metrics, prometheus::Error> {
        let by_tier = |name: &str, help: &str| -> Result<IntGaugeVec, prometheus::Error> {
            let gauge = IntGaugeVec::new(Opts::new(name, help), &["tier"])?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let counter = |name: &str, help: &str| counter(registry, name, help);
        let gauge = |name: &str, help: &str| gauge(registry, name, help);
        Ok(Metrics {
            blocks: by_tier("kvfleet_node_blocks", "Blocks that have their place in the tier")?,
            bytes: by_tier("kvfleet_node_bytes", "Bytes of their slots")?,
            demoted: by_tier(
                "kvfleet_node_demoted_blocks",
                "Blocks that left for a slower tier since start",
            )?,
            promoted: by_tier(
                "kvfleet_node_promoted_blocks",
                "Blocks that came from a slower tier since start",
            )?,
            dropped: by_tier("kvfleet_node_dropped_blocks", "Blocks dropped by pressure since start")?,
            turned_away: by_tier(
                "kvfleet_node_turned_away_blocks",
                "Blocks not worth what would have had to leave, or unlikely to be used on SSD, since start",
            )?,
            expired: by_tier(
                "kvfleet_node_expired_blocks",
                "Blocks dropped since start because their group's time to live was over",
            )?,
            void: by_tier(
                "kvfleet_node_void_blocks",
                "Blocks dropped since start because they were computed with earlier weights",
            )?,
            admitting: by_tier("kvfleet_node_admitting", "1 while the tier takes new blocks")?,
            hits: hits(registry)?,
            saved_bytes: counter("kvfleet_node_saved_bytes_total", "Encoded bytes committed")?,
            refused_blocks: counter("kvfleet_node_refused_blocks_total", "Frames refused after an offer")?,
            ssd: SsdMetrics::new(registry)?,
            gpu_errors: counter(
                "kvfleet_node_gpu_errors_total",
                "Copies to and from a GPU that failed, and losses of it",
            )?,
            leases: gauge("kvfleet_node_leases", "Requests under way")?,
            moves: gauge("kvfleet_node_moves", "Moves between tiers in flight")?,
            window: gauge("kvfleet_node_window_blocks", "Different blocks that waiting requests need")?,
            prefetched: gauge(
                "kvfleet_node_prefetched_blocks",
                "Blocks promoted since start because a waiting request needed them",
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

    /// Blocks of this tier that were given to readers.
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

    pub(crate) fn ssd_spared(&self) {
        self.ssd.spared.inc();
    }

    pub(crate) fn ssd_behind(&self, blocks: u64) {
        self.ssd.behind.inc_by(blocks);
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
        set(&self.ssd.rescued, wear.rescued_bytes);
    }

    pub(crate) fn tier(&self, tier: Tier, stats: &TierStats) {
        let label = &[tier.name()];
        set(&self.blocks.with_label_values(label), stats.blocks);
        set(&self.bytes.with_label_values(label), stats.used_bytes);
        set(&self.demoted.with_label_values(label), stats.demoted_blocks);
        set(&self.promoted.with_label_values(label), stats.promoted_blocks);
        set(&self.dropped.with_label_values(label), stats.dropped_blocks);
        set(&self.turned_away.with_label_values(label), stats.turned_away_blocks);
        set(&self.expired.with_label_values(label), stats.expired_blocks);
        set(&self.void.with_label_values(label), stats.void_blocks);
        set(&self.admitting.with_label_values(label), u64::from(stats.admitting));
    }

    pub(crate) fn copied(&self, end: CopyEnd, blocks: u32, bytes: u64) {
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

    pub(crate) fn host(&self, numbers: &ShmNumbers) {
        set(&self.host.clients, numbers.connections as u64);
        set(&self.host.loans, numbers.loans as u64);
        set(&self.host.lent_bytes, numbers.lent_bytes);
        set(&self.host.oldest, numbers.oldest.map_or(0, |oldest| oldest.age.as_secs()));
    }

    pub(crate) fn moves(&self, count: usize) {
        set(&self.moves, count as u64);
    }
}

/// Shows what each path carries, by its name, as its server counts it.
pub(crate) fn watch_paths(
    registry: &Registry,
    paths: Vec<(&'static str, Carried)>,
) -> Result<(), prometheus::Error> {
    let by_path = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["path"]);
    let sent = by_path("kvfleet_node_path_sent_bytes", "Bytes of blocks sent to readers since start")?;
    let help = "Bytes of blocks that came with saves since start, kept or not";
    let received = by_path("kvfleet_node_path_received_bytes", help)?;
    registry.register(Box::new(PathBytes { sent, received, paths }))
}

/// Looks at the servers' own counts when somebody asks: a frame is sent in less time than a label is found.
struct PathBytes {
    sent: IntGaugeVec,
    received: IntGaugeVec,
    paths: Vec<(&'static str, Carried)>,
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

/// Shows what became of the operations of each class, by its name.
pub(crate) fn watch_classes(registry: &Registry, room: Room) -> Result<(), prometheus::Error> {
    let by_class = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["class"]);
    let help = "Fetches and saves let in since start";
    let let_in = by_class("kvfleet_node_class_let_in_operations", help)?;
    let help = "Fetches and saves told to come again since start";
    let refused = by_class("kvfleet_node_class_refused_operations", help)?;
    let bytes = by_class("kvfleet_node_class_under_way_bytes", "Bytes kept for those that are under way")?;
    registry.register(Box::new(ClassFigures { let_in, refused, bytes, room }))
}

/// Looks at the room's own counts when somebody asks.
struct ClassFigures {
    let_in: IntGaugeVec,
    refused: IntGaugeVec,
    bytes: IntGaugeVec,
    room: Room,
}

impl Collector for ClassFigures {
    fn desc(&self) -> Vec<&Desc> {
        [self.let_in.desc(), self.refused.desc(), self.bytes.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (class, numbers) in Class::ALL.into_iter().zip(self.room.numbers()) {
            let label = &[class.name()];
            set(&self.let_in.with_label_values(label), numbers.let_in);
            set(&self.refused.with_label_values(label), numbers.refused);
            set(&self.bytes.with_label_values(label), numbers.under_way_bytes);
        }
        [self.let_in.collect(), self.refused.collect(), self.bytes.collect()].concat()
    }
}

fn set(gauge: &IntGauge, value: u64) {
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
}
