//! Metrics of a router: counters and timers around calls.
//!
//! Not here: serving the metrics (the process does) and spans (at the calls).

use std::time::Duration;

use kv_core::id::{NodeId, Tier};
use kv_core::index::command::AnnounceOutcome;
use kv_core::place::copies::CopyOutcome;
use kv_core::schedule::{LinkPath, MissingRun};
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    exponential_buckets,
};

use crate::anti_entropy::audit::AuditScore;
use crate::fleet_reuse_stats::ReportReceipt;
use crate::view::links::LinkRate;
use crate::view::residency::ReporterStatus;

/// Handles on this router's metrics; clones share them.
#[derive(Clone)]
pub(crate) struct Metrics {
    route_seconds: Histogram,
    decisions: IntCounterVec,
    lookups: IntCounter,
    proposals: IntCounter,
    batch_announcements: Histogram,
    batch_blocks: Histogram,
    outcomes: IntCounterVec,
    busy: IntCounter,
    unlisted: IntCounter,
    fences: IntCounter,
    session_timeouts: IntCounter,
    applied_index: IntGaugeVec,
    term: IntGaugeVec,
    leader: IntGaugeVec,
    log_bytes: IntGauge,
    index_copies: IntGauge,
    anti_entropy: AntiEntropyMetrics,
    missing: IntCounterVec,
    /// Blocks to fetch from the instance's own node, and from other nodes.
    planned_fetches: [IntCounter; 2],
    ttft_error: Histogram,
    tbt: TbtMetrics,
    ephemeral: EphemeralMetrics,
    copies: CopyMetrics,
}

/// Copies between nodes that this router ordered.
#[derive(Clone)]
struct CopyMetrics {
    ended: IntCounterVec,
    bytes: IntCounter,
    hot: HotCopyMetrics,
}

/// Those copies that were ordered because a prefix is hot.
#[derive(Clone)]
struct HotCopyMetrics {
    uses: IntCounterVec,
    proposed: IntCounter,
    ended: IntCounterVec,
    bytes: IntCounter,
    segments: IntGauge,
}

/// How a decision that reads from a remote node was accounted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HotReadOutcome {
    Counted,
    /// The queue of accounted decisions was full.
    Dropped,
    /// A local copy would not make the request faster.
    SavesNothing,
}

impl HotCopyMetrics {
    fn register(registry: &Registry) -> prometheus::Result<HotCopyMetrics> {
        Ok(HotCopyMetrics {
            uses: labelled(
                registry,
                "kvfleet_hot_remote_reads_total",
                "Decisions that read from a remote node or recompute blocks it holds, by outcome: counted, \
                 dropped because the queue was full, or without gain from a local copy",
                "outcome",
            )?,
            proposed: counter(
                registry,
                "kvfleet_hot_copies_proposed_total",
                "Copies of hot prefixes that this router started",
            )?,
            ended: labelled(
                registry,
                "kvfleet_hot_copies_ended_total",
                "Copies of hot prefixes by how they ended",
                "end",
            )?,
            bytes: counter(
                registry,
                "kvfleet_hot_copies_bytes_total",
                "Bytes stored by copies of hot prefixes",
            )?,
            segments: gauge(registry, "kvfleet_hot_segments", "Prefix segments with tracked heat")?,
        })
    }
}

impl CopyMetrics {
    fn register(registry: &Registry) -> prometheus::Result<CopyMetrics> {
        let help = "Copies between nodes that this router ordered, by how they ended";
        Ok(CopyMetrics {
            ended: labelled(registry, "kvfleet_copies_ended_total", help, "end")?,
            bytes: counter(registry, "kvfleet_copies_bytes_total", "Bytes stored by copies between nodes")?,
            hot: HotCopyMetrics::register(registry)?,
        })
    }
}

/// Ephemeral state: reports of instances, and what nodes are told.
#[derive(Clone)]
struct EphemeralMetrics {
    blocks: IntGaugeVec,
    rates: IntGaugeVec,
    latencies: IntGaugeVec,
    ttft_factors: GaugeVec,
    batches: IntCounterVec,
    replays: IntCounter,
    ended: IntCounterVec,
    unlisted: IntCounter,
    windows: IntCounterVec,
    window_blocks: IntCounter,
    reuse_stats: ReuseStatsMetrics,
}

/// Reuse statistics of nodes, and their publication.
#[derive(Clone)]
struct ReuseStatsMetrics {
    reports: IntCounterVec,
    publications: IntCounter,
    nodes: IntGauge,
    categories: IntGauge,
}

impl ReuseStatsMetrics {
    fn register(registry: &Registry) -> prometheus::Result<ReuseStatsMetrics> {
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        Ok(ReuseStatsMetrics {
            reports: labelled(
                registry,
                "kvfleet_reuse_reports_total",
                "Reports of reuse statistics from nodes, by outcome",
                "outcome",
            )?,
            publications: counter(
                registry,
                "kvfleet_reuse_publications_total",
                "Publications of the fleet's reuse statistics to all nodes",
            )?,
            nodes: gauge(
                "kvfleet_reuse_nodes",
                "Nodes with known reuse statistics, recently departed ones included",
            )?,
            categories: gauge("kvfleet_reuse_categories", "Block categories with reuse statistics")?,
        })
    }
}

impl EphemeralMetrics {
    fn register(registry: &Registry) -> prometheus::Result<EphemeralMetrics> {
        let (name, help) = ("kvfleet_resident_blocks", "Blocks in the GPU memory of an instance");
        let blocks = IntGaugeVec::new(Opts::new(name, help), &["instance"])?;
        registry.register(Box::new(blocks.clone()))?;
        let labels = &["node", "reader", "path", "tier"];
        let name = "kvfleet_link_bytes_per_second";
        let help = "Recent rate at which instances read from a node, by tier and path, in bytes per second";
        let rates = IntGaugeVec::new(Opts::new(name, help), labels)?;
        registry.register(Box::new(rates.clone()))?;
        let name = "kvfleet_link_latency_microseconds";
        let help = "Recent time until the first block from a node arrived, by tier and path, in microseconds";
        let latencies = IntGaugeVec::new(Opts::new(name, help), labels)?;
        registry.register(Box::new(latencies.clone()))?;
        let name = "kvfleet_ttft_prediction_factor";
        let help = "Learned factors on predicted TTFT: on queueing, transfer, prefill (of prompts read as \
            text) and overtaking requests, and on the profile's times per step, token and context";
        let factors = GaugeVec::new(Opts::new(name, help), &["part"])?;
        registry.register(Box::new(factors.clone()))?;
        Ok(EphemeralMetrics {
            blocks,
            rates,
            latencies,
            ttft_factors: factors,
            batches: labelled(
                registry,
                "kvfleet_residency_batches_total",
                "Batches of GPU residency reports by outcome",
                "outcome",
            )?,
            replays: counter(
                registry,
                "kvfleet_residency_replays_requested_total",
                "Residency reports answered with a request to replay missing batches",
            )?,
            ended: labelled(
                registry,
                "kvfleet_residency_invalidations_total",
                "Invalidations of an instance's resident blocks, by reason",
                "reason",
            )?,
            windows: labelled(
                registry,
                "kvfleet_prefetch_windows_sent_total",
                "Prefetch windows sent to nodes, by whether the node answered",
                "outcome",
            )?,
            reuse_stats: ReuseStatsMetrics::register(registry)?,
            window_blocks: counter(
                registry,
                "kvfleet_prefetch_window_blocks_sent_total",
                "Blocks in prefetch windows sent to nodes, repetitions included",
            )?,
            unlisted: counter(
                registry,
                "kvfleet_residency_unlisted_blocks_total",
                "Blocks in GPU memory that exceeded the limit of the ephemeral state",
            )?,
        })
    }
}

/// Results of anti-entropy.
#[derive(Clone)]
struct AntiEntropyMetrics {
    node_drifts: IntCounterVec,
    replica_drifts: IntCounterVec,
    replica_diverged: IntGaugeVec,
    repairs_failed: IntGaugeVec,
    resyncs: IntCounter,
    audited: IntCounterVec,
    wrong: IntCounterVec,
    precision: GaugeVec,
    recall: GaugeVec,
}

impl AntiEntropyMetrics {
    fn register(registry: &Registry) -> prometheus::Result<AntiEntropyMetrics> {
        Ok(AntiEntropyMetrics {
            node_drifts: labelled(
                registry,
                "kvfleet_node_drifts_total",
                "Mismatches between a node's digest of its announcements and the index's",
                "node",
            )?,
            replica_drifts: labelled(
                registry,
                "kvfleet_replica_drifts_total",
                "Comparisons that found a replica of a group different from this leader's",
                "group",
            )?,
            replica_diverged: per_group(
                registry,
                "kvfleet_replica_diverged",
                "1 while this router's replica of a group is known to differ and does not answer",
            )?,
            repairs_failed: per_group(
                registry,
                "kvfleet_replica_repairs_failed",
                "Failed attempts of this router's replica of a group to take the leader's state",
            )?,
            resyncs: counter(
                registry,
                "kvfleet_resyncs_requested_total",
                "Full announcements requested from nodes because of a detected error",
            )?,
            audited: labelled(
                registry,
                "kvfleet_audited_blocks_total",
                "Blocks of audits: claimed by the index, or held by the node",
                "kind",
            )?,
            wrong: labelled(
                registry,
                "kvfleet_audited_wrong_blocks_total",
                "Audited blocks confirmed wrong: claimed but not held, or held but not indexed",
                "kind",
            )?,
            precision: ratio(
                registry,
                "kvfleet_node_precision",
                "Share of audited indexed blocks that the node holds",
            )?,
            recall: ratio(
                registry,
                "kvfleet_node_recall",
                "Share of audited blocks of the node that the index lists",
            )?,
        })
    }
}

/// How a route call ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RouteOutcome {
    Chosen,
    Rejected,
    Invalid,
}

/// Predictions of the time between tokens.
#[derive(Clone)]
struct TbtMetrics {
    error: Histogram,
    factors: GaugeVec,
    decode_admissions: IntCounterVec,
}

impl TbtMetrics {
    fn register(registry: &Registry) -> prometheus::Result<TbtMetrics> {
        let help = "Learned factors on the predicted time between tokens, on that of a step and of each request in it";
        let factors = GaugeVec::new(Opts::new("kvfleet_tbt_prediction_factor", help), &["part"])?;
        registry.register(Box::new(factors.clone()))?;
        Ok(TbtMetrics {
            factors,
            error: prediction_error(
                registry,
                "kvfleet_tbt_prediction_error",
                "Predicted time between tokens over the reported one, less 1",
            )?,
            decode_admissions: labelled(
                registry,
                "kvfleet_decode_admissions_total",
                "Decode admission requests by whether the request may begin or ends",
                "answer",
            )?,
        })
    }
}

fn to_fetch(registry: &Registry) -> prometheus::Result<[IntCounter; 2]> {
    let help = "Blocks that decisions plan to fetch, from the instance's own node and from other nodes";
    let counters = labelled(registry, "kvfleet_fetch_blocks_total", help, "node")?;
    Ok([true, false].map(|is_own| counters.with_label_values(&[reader_name(is_own)])))
}

fn ttft_error(registry: &Registry) -> prometheus::Result<Histogram> {
    let help = "Predicted time to first token over the reported one, less 1";
    prediction_error(registry, "kvfleet_ttft_prediction_error", help)
}

/// A histogram of relative prediction errors.
fn prediction_error(registry: &Registry, name: &str, help: &str) -> prometheus::Result<Histogram> {
    let buckets = vec![-0.8, -0.4, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2];
    let opts = HistogramOpts::new(name, help).buckets(buckets);
    let histogram = Histogram::with_opts(opts)?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}

impl Metrics {
    /// Creates and registers all metrics.
    ///
    /// # Errors
    /// If the registry already has metrics of a router: use one registry per router.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<Metrics> {
        let micros_up = |name: &str, help: &str| -> prometheus::Result<Histogram> {
            let buckets = exponential_buckets(10e-6, 2.0, 16)?;
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        let sizes = |name: &str, help: &str| -> prometheus::Result<Histogram> {
            let buckets = exponential_buckets(1.0, 4.0, 10)?;
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        Ok(Metrics {
            route_seconds: micros_up("kvfleet_route_seconds", "Duration of a route call in seconds")?,
            decisions: labelled(
                registry,
                "kvfleet_route_decisions_total",
                "Route calls by how they ended",
                "outcome",
            )?,
            lookups: counter(registry, "kvfleet_lookups_total", "Lookup calls")?,
            proposals: counter(registry, "kvfleet_announce_proposals_total", "Announce proposals submitted")?,
            batch_announcements: sizes(
                "kvfleet_announce_batch_announcements",
                "Announcements in one proposal",
            )?,
            batch_blocks: sizes("kvfleet_announce_batch_blocks", "Blocks in one announce proposal")?,
            outcomes: labelled(
                registry,
                "kvfleet_announce_outcomes_total",
                "Announcements by outcome",
                "outcome",
            )?,
            busy: counter(
                registry,
                "kvfleet_announce_busy_total",
                "Announcements refused because the queue was full",
            )?,
            unlisted: counter(
                registry,
                "kvfleet_index_unlisted_blocks_total",
                "Announced blocks that a full index did not list (raise index_copies_max)",
            )?,
            fences: counter(registry, "kvfleet_fences_total", "Silent nodes fenced by this router")?,
            session_timeouts: counter(
                registry,
                "kvfleet_session_read_timeouts_total",
                "Reads answered before this replica had applied the entry that the caller had seen",
            )?,
            applied_index: per_group(registry, "kvfleet_applied_index", "Last applied log entry of a group")?,
            term: per_group(registry, "kvfleet_term", "Raft term of a group")?,
            leader: per_group(registry, "kvfleet_is_leader", "1 while this router leads the group")?,
            log_bytes: gauge(registry, "kvfleet_log_bytes", "Bytes of log entries held in memory")?,
            index_copies: gauge(registry, "kvfleet_index_copies", "(node, block) pairs of live nodes")?,
            anti_entropy: AntiEntropyMetrics::register(registry)?,
            missing: labelled(
                registry,
                "kvfleet_missing_blocks_total",
                "Blocks of routed prompts that were not served from the cache, by reason",
                "reason",
            )?,
            planned_fetches: to_fetch(registry)?,
            ttft_error: ttft_error(registry)?,
            tbt: TbtMetrics::register(registry)?,
            ephemeral: EphemeralMetrics::register(registry)?,
            copies: CopyMetrics::register(registry)?,
        })
    }

    pub(crate) fn record_route(&self, outcome: RouteOutcome, took: Duration) {
        let label = match outcome {
            RouteOutcome::Chosen => "chosen",
            RouteOutcome::Rejected => "rejected",
            RouteOutcome::Invalid => "invalid",
        };
        self.decisions.with_label_values(&[label]).inc();
        self.route_seconds.observe(took.as_secs_f64());
    }

    /// Counts blocks that a decision plans to fetch, from the instance's own node and from other
    /// nodes.
    pub(crate) fn record_planned_fetches(&self, own_blocks: u32, other_blocks: u32) {
        for (counter, blocks) in self.planned_fetches.iter().zip([own_blocks, other_blocks]) {
            counter.inc_by(blocks.into());
        }
    }

    pub(crate) fn record_missing(&self, missing: &[MissingRun]) {
        for one in missing {
            self.missing.with_label_values(&[one.reason.name()]).inc_by(one.len_blocks.into());
        }
    }

    /// Records the predicted TTFT against the reported one.
    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn record_ttft_error(&self, predicted_us: u64, ttft_us: u64) {
        // Capped, so that one wrong report cannot distort the sum for good.
        self.ttft_error.observe((predicted_us as f64 / ttft_us.max(1) as f64 - 1.0).min(100.0));
    }

    /// Records the predicted time between tokens against the reported one.
    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn record_tbt_error(&self, predicted_us: u64, tbt_us: u64) {
        self.tbt.error.observe((predicted_us as f64 / tbt_us.max(1) as f64 - 1.0).min(100.0));
    }

    /// Counts a decode admission request by its answer.
    pub(crate) fn record_decode_admission(&self, may: bool) {
        self.tbt.decode_admissions.with_label_values(&[if may { "begins" } else { "ends" }]).inc();
    }

    pub(crate) fn record_lookup(&self) {
        self.lookups.inc();
    }

    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn record_proposal(&self, announcements: usize, blocks: usize) {
        self.proposals.inc();
        self.batch_announcements.observe(announcements as f64);
        self.batch_blocks.observe(blocks as f64);
    }

    pub(crate) fn record_announcement(&self, outcome: AnnounceOutcome) {
        let label = match outcome {
            AnnounceOutcome::Applied { .. } => "applied",
            AnnounceOutcome::Duplicate { .. } => "duplicate",
            AnnounceOutcome::Gap { .. } => "gap",
            AnnounceOutcome::Fenced => "fenced",
        };
        if let AnnounceOutcome::Applied { unlisted, .. } = outcome {
            self.unlisted.inc_by(unlisted);
        }
        self.outcomes.with_label_values(&[label]).inc();
    }

    pub(crate) fn record_busy(&self) {
        self.busy.inc();
    }

    pub(crate) fn record_session_timeout(&self) {
        self.session_timeouts.inc();
    }

    pub(crate) fn record_fence(&self) {
        self.fences.inc();
    }

    pub(crate) fn record_node_drift(&self, node: NodeId) {
        self.anti_entropy.node_drifts.with_label_values(&[&node.0.to_string()]).inc();
    }

    pub(crate) fn record_replica_drift(&self, group: u16) {
        self.anti_entropy.replica_drifts.with_label_values(&[&group.to_string()]).inc();
    }

    pub(crate) fn record_resync_request(&self) {
        self.anti_entropy.resyncs.inc();
    }

    /// Counts one audit of a node, and shows the shares over all audits.
    pub(crate) fn record_audit(&self, node: NodeId, found: &AuditScore, all: &AuditScore) {
        self.anti_entropy.audited.with_label_values(&["claimed"]).inc_by(found.claimed);
        self.anti_entropy.audited.with_label_values(&["held"]).inc_by(found.held);
        self.anti_entropy.wrong.with_label_values(&["claimed"]).inc_by(found.claimed_wrong);
        self.anti_entropy.wrong.with_label_values(&["held"]).inc_by(found.held_unknown);
        let node = node.0.to_string();
        for (gauges, share) in
            [(&self.anti_entropy.precision, all.precision()), (&self.anti_entropy.recall, all.recall())]
        {
            if let Some(share) = share {
                gauges.with_label_values(&[&node]).set(share);
            }
        }
    }

    pub(crate) fn record_residency_batches(&self, outcome: &str, batches: usize) {
        self.ephemeral.batches.with_label_values(&[outcome]).inc_by(batches as u64);
    }

    pub(crate) fn record_unlisted_residency(&self, blocks: u64) {
        self.ephemeral.unlisted.inc_by(blocks);
    }

    pub(crate) fn record_replay_request(&self) {
        self.ephemeral.replays.inc();
    }

    pub(crate) fn record_residency_invalidations(&self, reason: &str, instances: u64) {
        self.ephemeral.ended.with_label_values(&[reason]).inc_by(instances);
    }

    /// Shows the resident blocks of every instance; forgotten instances disappear.
    pub(crate) fn show_resident_blocks(&self, all: &[ReporterStatus]) {
        self.ephemeral.blocks.reset();
        for one in all {
            let instance = one.instance.0.to_string();
            self.ephemeral.blocks.with_label_values(&[&instance]).set(gauge_value(one.blocks));
        }
    }

    /// Counts a prefetch window sent to a node, and whether the node answered.
    pub(crate) fn record_window(&self, answered: bool, blocks: usize) {
        self.ephemeral.windows.with_label_values(&[if answered { "taken" } else { "failed" }]).inc();
        self.ephemeral.window_blocks.inc_by(blocks as u64);
    }

    /// Counts a finished copy between nodes.
    pub(crate) fn record_copy(&self, end: CopyOutcome, bytes: u64) {
        self.copies.ended.with_label_values(&[end.name()]).inc();
        self.copies.bytes.inc_by(bytes);
    }

    /// Counts a decision that reads from a remote node.
    pub(crate) fn record_hot_read(&self, outcome: HotReadOutcome) {
        let label = match outcome {
            HotReadOutcome::Counted => "counted",
            HotReadOutcome::Dropped => "dropped",
            HotReadOutcome::SavesNothing => "saves_nothing",
        };
        self.copies.hot.uses.with_label_values(&[label]).inc();
    }

    /// Counts a started copy of a hot prefix.
    pub(crate) fn record_hot_proposal(&self) {
        self.copies.hot.proposed.inc();
    }

    /// Counts a finished copy of a hot prefix.
    pub(crate) fn record_hot_copy(&self, end: CopyOutcome, bytes: u64) {
        self.copies.hot.ended.with_label_values(&[end.name()]).inc();
        self.copies.hot.bytes.inc_by(bytes);
    }

    /// Shows the number of prefix segments with tracked heat.
    pub(crate) fn show_hot_segments(&self, segments: usize) {
        self.copies.hot.segments.set(gauge_value(segments as u64));
    }

    /// Counts a node's report of reuse statistics.
    pub(crate) fn record_reuse_report(&self, took: ReportReceipt) {
        self.ephemeral.reuse_stats.reports.with_label_values(&[took.name()]).inc();
    }

    /// Counts a publication of reuse statistics.
    pub(crate) fn record_reuse_publication(&self) {
        self.ephemeral.reuse_stats.publications.inc();
    }

    /// Shows the number of reporting nodes and of their categories.
    pub(crate) fn show_reuse_stats(&self, nodes: usize, categories: usize) {
        self.ephemeral.reuse_stats.nodes.set(gauge_value(nodes as u64));
        self.ephemeral.reuse_stats.categories.set(gauge_value(categories as u64));
    }

    /// Shows the learned correction factors of TBT predictions.
    pub(crate) fn show_tbt_factors(&self, factors: [f64; 3]) {
        for (part, factor) in ["all", "step", "running"].iter().zip(factors) {
            self.tbt.factors.with_label_values(&[part]).set(factor);
        }
    }

    /// Shows the learned correction factors of TTFT predictions.
    pub(crate) fn show_ttft_factors(&self, factors: [f64; 7]) {
        let parts = ["queue", "transfer", "prefill", "passed", "step", "tokens", "context"];
        for (part, factor) in parts.iter().zip(factors) {
            self.ephemeral.ttft_factors.with_label_values(&[part]).set(factor);
        }
    }

    /// Shows recent read rates of nodes; nodes without recent reads disappear.
    pub(crate) fn show_link_rates(&self, all: &[LinkRate]) {
        self.ephemeral.rates.reset();
        self.ephemeral.latencies.reset();
        for LinkRate { node, is_own, key, stats: lane } in all {
            let node = node.0.to_string();
            let labels = [&*node, reader_name(*is_own), path_name(key.path), tier_name(key.tier)];
            self.ephemeral.rates.with_label_values(&labels).set(gauge_value(lane.bytes_per_s));
            self.ephemeral.latencies.with_label_values(&labels).set(gauge_value(lane.latency_ns / 1_000));
        }
    }

    pub(crate) fn show_group_status(&self, group: u16, applied_index: u64, term: u64, leads: bool) {
        let group = group.to_string();
        self.applied_index.with_label_values(&[&group]).set(gauge_value(applied_index));
        self.term.with_label_values(&[&group]).set(gauge_value(term));
        self.leader.with_label_values(&[&group]).set(i64::from(leads));
    }

    /// Shows whether the replica of a group differs, and how many repairs failed.
    pub(crate) fn show_replica_health(&self, group: u16, diverged: bool, repairs_failed: u64) {
        let group = group.to_string();
        self.anti_entropy.replica_diverged.with_label_values(&[&group]).set(i64::from(diverged));
        self.anti_entropy.repairs_failed.with_label_values(&[&group]).set(gauge_value(repairs_failed));
    }

    pub(crate) fn show_sizes(&self, log_bytes: u64, index_copies: u64) {
        self.log_bytes.set(gauge_value(log_bytes));
        self.index_copies.set(gauge_value(index_copies));
    }
}

fn ratio(registry: &Registry, name: &str, help: &str) -> prometheus::Result<GaugeVec> {
    let gauges = GaugeVec::new(Opts::new(name, help), &["node"])?;
    registry.register(Box::new(gauges.clone()))?;
    Ok(gauges)
}

/// Label of the reader.
fn reader_name(is_own: bool) -> &'static str {
    if is_own { "own" } else { "other" }
}

/// Label of the link's path.
fn path_name(path: Option<LinkPath>) -> &'static str {
    path.map_or("unknown", LinkPath::name)
}

/// Label of the source tier.
fn tier_name(tier: Option<Tier>) -> &'static str {
    tier.map_or("several", Tier::name)
}

fn gauge_value(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn counter(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntCounter> {
    let counter = IntCounter::new(name, help)?;
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn gauge(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntGauge> {
    let gauge = IntGauge::new(name, help)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

fn per_group(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntGaugeVec> {
    let gauges = IntGaugeVec::new(Opts::new(name, help), &["group"])?;
    registry.register(Box::new(gauges.clone()))?;
    Ok(gauges)
}

fn labelled(registry: &Registry, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
    let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
    registry.register(Box::new(counters.clone()))?;
    Ok(counters)
}
