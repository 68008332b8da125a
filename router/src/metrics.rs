//! What a router counts and times: wrappers around calls, not threads through them.
//!
//! Not here: serving the numbers (the process does) and spans (at the calls).

use std::time::Duration;

use kv_core::id::{NodeId, Tier};
use kv_core::index::command::AnnounceOutcome;
use kv_core::place::copies::CopyEnd;
use kv_core::schedule::{LinkPath, Missing};
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    exponential_buckets,
};

use crate::fits::Took;
use crate::truth::audit::Score;
use crate::view::links::LinkRate;
use crate::view::residency::Standing;

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
    seen_timeouts: IntCounter,
    applied_index: IntGaugeVec,
    term: IntGaugeVec,
    leader: IntGaugeVec,
    log_bytes: IntGauge,
    index_copies: IntGauge,
    truth: TruthMetrics,
    missing: IntCounterVec,
    /// From own nodes, and from others.
    to_fetch: [IntCounter; 2],
    ttft_error: Histogram,
    pace: PaceMetrics,
    soft: SoftMetrics,
    copies: CopyMetrics,
}

/// Copies between nodes by this router's word.
#[derive(Clone)]
struct CopyMetrics {
    ended: IntCounterVec,
    bytes: IntCounter,
    hot: HotMetrics,
}

/// Those of them that are made because requests were read from afar.
#[derive(Clone)]
struct HotMetrics {
    uses: IntCounterVec,
    proposed: IntCounter,
    ended: IntCounterVec,
    bytes: IntCounter,
    segments: IntGauge,
}

/// What became of a decision that reads from afar.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HotUse {
    Counted,
    /// As many waited as may.
    Dropped,
    /// Nothing of it would be there sooner.
    SavesNothing,
}

impl HotMetrics {
    fn register(registry: &Registry) -> prometheus::Result<HotMetrics> {
        Ok(HotMetrics {
            uses: labelled(
                registry,
                "kvfleet_hot_uses_total",
                "Decisions that read or compute what a node further away holds: counted, dropped as too many waited, or of no gain if it were nearer",
                "outcome",
            )?,
            proposed: counter(
                registry,
                "kvfleet_hot_copies_proposed_total",
                "Copies of hot prefixes that this router began",
            )?,
            ended: labelled(
                registry,
                "kvfleet_hot_copies_ended_total",
                "Copies of hot prefixes by how they ended",
                "end",
            )?,
            bytes: counter(registry, "kvfleet_hot_copies_bytes_total", "Bytes that those copies stored")?,
            segments: gauge(registry, "kvfleet_hot_segments", "Parts of prefixes whose heat is remembered")?,
        })
    }
}

impl CopyMetrics {
    fn register(registry: &Registry) -> prometheus::Result<CopyMetrics> {
        let help = "Copies between nodes that this router asked for, by how they ended";
        Ok(CopyMetrics {
            ended: labelled(registry, "kvfleet_copies_ended_total", help, "end")?,
            bytes: counter(registry, "kvfleet_copies_bytes_total", "Bytes that those copies stored")?,
            hot: HotMetrics::register(registry)?,
        })
    }
}

/// What instances say they have in GPU memory.
#[derive(Clone)]
struct SoftMetrics {
    blocks: IntGaugeVec,
    rates: IntGaugeVec,
    latencies: IntGaugeVec,
    factors: GaugeVec,
    batches: IntCounterVec,
    replays: IntCounter,
    ended: IntCounterVec,
    unlisted: IntCounter,
    windows: IntCounterVec,
    window_blocks: IntCounter,
    fits: FitsMetrics,
}

/// What nodes saw of categories, and what they are told of it.
#[derive(Clone)]
struct FitsMetrics {
    heard: IntCounterVec,
    told: IntCounter,
    nodes: IntGauge,
    categories: IntGauge,
}

impl FitsMetrics {
    fn register(registry: &Registry) -> prometheus::Result<FitsMetrics> {
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        Ok(FitsMetrics {
            heard: labelled(
                registry,
                "kvfleet_fits_heard_total",
                "Times that a node said what it saw of categories of blocks, by what became of it",
                "outcome",
            )?,
            told: counter(
                registry,
                "kvfleet_fits_told_total",
                "Times that what the fleet saw had changed enough to be told to all nodes",
            )?,
            nodes: gauge(
                "kvfleet_fits_nodes",
                "Nodes whose sums are known, those that left of late among them",
            )?,
            categories: gauge("kvfleet_fits_categories", "Categories of which the fleet saw something")?,
        })
    }
}

impl SoftMetrics {
    fn register(registry: &Registry) -> prometheus::Result<SoftMetrics> {
        let (name, help) = ("kvfleet_resident_blocks", "Blocks that an instance has in GPU memory");
        let blocks = IntGaugeVec::new(Opts::new(name, help), &["instance"])?;
        registry.register(Box::new(blocks.clone()))?;
        let labels = &["node", "reader", "path", "tier"];
        let name = "kvfleet_link_bytes_per_second";
        let help = "How fast instances read from a node of late, out of a tier over a path";
        let rates = IntGaugeVec::new(Opts::new(name, help), labels)?;
        registry.register(Box::new(rates.clone()))?;
        let name = "kvfleet_link_latency_microseconds";
        let help =
            "How long instances waited of late for the first block from a node, out of a tier over a path";
        let latencies = IntGaugeVec::new(Opts::new(name, help), labels)?;
        registry.register(Box::new(latencies.clone()))?;
        let name = "kvfleet_ttft_prediction_factor";
        let help = "By what predicted waiting, transfer, prefill (of prompts read as text) and those who come later and go before are multiplied, and before that the profile's times of a prompt's step, its tokens and their context, as first tokens taught";
        let factors = GaugeVec::new(Opts::new(name, help), &["part"])?;
        registry.register(Box::new(factors.clone()))?;
        Ok(SoftMetrics {
            blocks,
            rates,
            latencies,
            factors,
            batches: labelled(
                registry,
                "kvfleet_residency_batches_total",
                "Batches of reports of GPU memory by what became of them",
                "outcome",
            )?,
            replays: counter(
                registry,
                "kvfleet_residency_replays_asked_total",
                "Reports of GPU memory answered by asking for batches that are missing",
            )?,
            ended: labelled(
                registry,
                "kvfleet_residency_ended_total",
                "Times that what an instance said of its GPU memory became void, by reason",
                "reason",
            )?,
            windows: labelled(
                registry,
                "kvfleet_windows_told_total",
                "Times that a node was told what waiting requests need, by whether it answered",
                "outcome",
            )?,
            fits: FitsMetrics::register(registry)?,
            window_blocks: counter(
                registry,
                "kvfleet_window_blocks_told_total",
                "Blocks that nodes were told of, each time they were",
            )?,
            unlisted: counter(
                registry,
                "kvfleet_residency_unlisted_blocks_total",
                "Blocks in GPU memory that found no room in the soft plane",
            )?,
        })
    }
}

/// What the truth meter found.
#[derive(Clone)]
struct TruthMetrics {
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

impl TruthMetrics {
    fn register(registry: &Registry) -> prometheus::Result<TruthMetrics> {
        Ok(TruthMetrics {
            node_drifts: labelled(
                registry,
                "kvfleet_node_drifts_total",
                "Times that a node's digest of its announcements differed from the index's",
                "node",
            )?,
            replica_drifts: labelled(
                registry,
                "kvfleet_replica_drifts_total",
                "Comparisons in which a replica of a group differed from this leader's",
                "group",
            )?,
            replica_diverged: per_group(
                registry,
                "kvfleet_replica_diverged",
                "1 while this router's replica of a group is known to differ, and answers nothing",
            )?,
            repairs_failed: per_group(
                registry,
                "kvfleet_replica_repairs_failed",
                "Times that this router's replica of a group could not take the leader's state",
            )?,
            resyncs: counter(
                registry,
                "kvfleet_resyncs_asked_total",
                "Times that a node was asked to announce all anew because something was found to be wrong",
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
                "Blocks of audits confirmed to be wrong: claimed and not held, or held and not known",
                "kind",
            )?,
            precision: ratio(
                registry,
                "kvfleet_node_precision",
                "Share of audited blocks listed of a node that it holds",
            )?,
            recall: ratio(
                registry,
                "kvfleet_node_recall",
                "Share of audited blocks of a node that the index lists",
            )?,
        })
    }
}

/// How a route call ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Routed {
    Chosen,
    Rejected,
    Invalid,
}

/// Times between tokens.
#[derive(Clone)]
struct PaceMetrics {
    error: Histogram,
    factors: GaugeVec,
    decodes: IntCounterVec,
}

impl PaceMetrics {
    fn register(registry: &Registry) -> prometheus::Result<PaceMetrics> {
        let help = "By what predicted times between tokens are multiplied, and those of a step and of each request in it";
        let factors = GaugeVec::new(Opts::new("kvfleet_tbt_prediction_factor", help), &["part"])?;
        registry.register(Box::new(factors.clone()))?;
        Ok(PaceMetrics {
            factors,
            error: prediction_error(
                registry,
                "kvfleet_tbt_prediction_error",
                "Predicted time between tokens over the one that instances told, less 1",
            )?,
            decodes: labelled(
                registry,
                "kvfleet_decodes_asked_total",
                "Times that an instance asked whether a request may begin to decode, by whether it begins or ends",
                "answer",
            )?,
        })
    }
}

fn to_fetch(registry: &Registry) -> prometheus::Result<[IntCounter; 2]> {
    let help =
        "Blocks that requests were sent to fetch, from the own nodes of their instances and from others";
    let counters = labelled(registry, "kvfleet_fetch_blocks_total", help, "node")?;
    Ok([true, false].map(|is_own| counters.with_label_values(&[reader_name(is_own)])))
}

fn ttft_error(registry: &Registry) -> prometheus::Result<Histogram> {
    let help = "Predicted time to first token over the one that instances told, less 1";
    prediction_error(registry, "kvfleet_ttft_prediction_error", help)
}

/// How far off predictions are.
fn prediction_error(registry: &Registry, name: &str, help: &str) -> prometheus::Result<Histogram> {
    let buckets = vec![-0.8, -0.4, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2];
    let opts = HistogramOpts::new(name, help).buckets(buckets);
    let histogram = Histogram::with_opts(opts)?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}

impl Metrics {
    /// Makes and registers everything.
    ///
    /// # Errors
    /// When the registry already has metrics of a router: one registry per router.
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
            route_seconds: micros_up("kvfleet_route_seconds", "Time a route call took")?,
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
                "Announcements by what became of them",
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
            seen_timeouts: counter(
                registry,
                "kvfleet_seen_timeouts_total",
                "Reads answered before this replica had seen what they asked for",
            )?,
            applied_index: per_group(registry, "kvfleet_applied_index", "Last applied log entry of a group")?,
            term: per_group(registry, "kvfleet_term", "Raft term of a group")?,
            leader: per_group(registry, "kvfleet_is_leader", "1 while this router leads the group")?,
            log_bytes: gauge(registry, "kvfleet_log_bytes", "Bytes of log entries held in memory")?,
            index_copies: gauge(registry, "kvfleet_index_copies", "(node, block) pairs of live nodes")?,
            truth: TruthMetrics::register(registry)?,
            missing: labelled(
                registry,
                "kvfleet_missing_blocks_total",
                "Blocks of routed prompts that were not served from the cache, by reason",
                "reason",
            )?,
            to_fetch: to_fetch(registry)?,
            ttft_error: ttft_error(registry)?,
            pace: PaceMetrics::register(registry)?,
            soft: SoftMetrics::register(registry)?,
            copies: CopyMetrics::register(registry)?,
        })
    }

    pub(crate) fn routed(&self, outcome: Routed, took: Duration) {
        let label = match outcome {
            Routed::Chosen => "chosen",
            Routed::Rejected => "rejected",
            Routed::Invalid => "invalid",
        };
        self.decisions.with_label_values(&[label]).inc();
        self.route_seconds.observe(took.as_secs_f64());
    }

    /// A request was sent that fetches so many blocks from its instance's own node, and so many from others.
    pub(crate) fn to_fetch(&self, own_blocks: u32, other_blocks: u32) {
        for (counter, blocks) in self.to_fetch.iter().zip([own_blocks, other_blocks]) {
            counter.inc_by(blocks.into());
        }
    }

    pub(crate) fn missing(&self, missing: &[Missing]) {
        for one in missing {
            self.missing.with_label_values(&[one.why.name()]).inc_by(one.len_blocks.into());
        }
    }

    /// What was predicted until the first token, and what an instance told.
    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn observed(&self, predicted_us: u64, ttft_us: u64) {
        // What an instance tells is not to spoil the sum for good.
        self.ttft_error.observe((predicted_us as f64 / ttft_us.max(1) as f64 - 1.0).min(100.0));
    }

    /// What was predicted between tokens, and what an instance told.
    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn paced(&self, predicted_us: u64, tbt_us: u64) {
        self.pace.error.observe((predicted_us as f64 / tbt_us.max(1) as f64 - 1.0).min(100.0));
    }

    /// An instance asked whether a request may begin to decode.
    pub(crate) fn decode_asked(&self, may: bool) {
        self.pace.decodes.with_label_values(&[if may { "begins" } else { "ends" }]).inc();
    }

    pub(crate) fn looked_up(&self) {
        self.lookups.inc();
    }

    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn proposed(&self, announcements: usize, blocks: usize) {
        self.proposals.inc();
        self.batch_announcements.observe(announcements as f64);
        self.batch_blocks.observe(blocks as f64);
    }

    pub(crate) fn announced(&self, outcome: AnnounceOutcome) {
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

    pub(crate) fn busy(&self) {
        self.busy.inc();
    }

    pub(crate) fn seen_timeout(&self) {
        self.seen_timeouts.inc();
    }

    pub(crate) fn fenced(&self) {
        self.fences.inc();
    }

    pub(crate) fn node_drift(&self, node: NodeId) {
        self.truth.node_drifts.with_label_values(&[&node.0.to_string()]).inc();
    }

    pub(crate) fn replica_drift(&self, group: u16) {
        self.truth.replica_drifts.with_label_values(&[&group.to_string()]).inc();
    }

    pub(crate) fn resync_asked(&self) {
        self.truth.resyncs.inc();
    }

    /// Counts one audit of a node, and shows what all of them came to.
    pub(crate) fn audited(&self, node: NodeId, found: &Score, all: &Score) {
        self.truth.audited.with_label_values(&["claimed"]).inc_by(found.claimed);
        self.truth.audited.with_label_values(&["held"]).inc_by(found.held);
        self.truth.wrong.with_label_values(&["claimed"]).inc_by(found.claimed_wrong);
        self.truth.wrong.with_label_values(&["held"]).inc_by(found.held_unknown);
        let node = node.0.to_string();
        for (gauges, share) in [(&self.truth.precision, all.precision()), (&self.truth.recall, all.recall())]
        {
            if let Some(share) = share {
                gauges.with_label_values(&[&node]).set(share);
            }
        }
    }

    pub(crate) fn residency_batches(&self, outcome: &str, batches: usize) {
        self.soft.batches.with_label_values(&[outcome]).inc_by(batches as u64);
    }

    pub(crate) fn residency_unlisted(&self, blocks: u64) {
        self.soft.unlisted.inc_by(blocks);
    }

    pub(crate) fn replay_asked(&self) {
        self.soft.replays.inc();
    }

    pub(crate) fn residency_ended(&self, reason: &str, instances: u64) {
        self.soft.ended.with_label_values(&[reason]).inc_by(instances);
    }

    /// Shows what every instance has; one that was forgotten is shown no longer.
    pub(crate) fn resident(&self, all: &[Standing]) {
        self.soft.blocks.reset();
        for one in all {
            let instance = one.instance.0.to_string();
            self.soft.blocks.with_label_values(&[&instance]).set(gauge_value(one.blocks));
        }
    }

    /// A node was told a window of so many blocks, or could not be.
    pub(crate) fn window_told(&self, answered: bool, blocks: usize) {
        self.soft.windows.with_label_values(&[if answered { "taken" } else { "failed" }]).inc();
        self.soft.window_blocks.inc_by(blocks as u64);
    }

    /// A copy between nodes ended.
    pub(crate) fn copied(&self, end: CopyEnd, bytes: u64) {
        self.copies.ended.with_label_values(&[end.name()]).inc();
        self.copies.bytes.inc_by(bytes);
    }

    /// A decision reads from afar.
    pub(crate) fn hot_use(&self, outcome: HotUse) {
        let label = match outcome {
            HotUse::Counted => "counted",
            HotUse::Dropped => "dropped",
            HotUse::SavesNothing => "saves_nothing",
        };
        self.copies.hot.uses.with_label_values(&[label]).inc();
    }

    /// A copy of a hot prefix begins.
    pub(crate) fn hot_proposed(&self) {
        self.copies.hot.proposed.inc();
    }

    /// One ended.
    pub(crate) fn hot_copied(&self, end: CopyEnd, bytes: u64) {
        self.copies.hot.ended.with_label_values(&[end.name()]).inc();
        self.copies.hot.bytes.inc_by(bytes);
    }

    /// The heat of so many parts of prefixes is remembered.
    pub(crate) fn hot_segments(&self, segments: usize) {
        self.copies.hot.segments.set(gauge_value(segments as u64));
    }

    /// A node said what it saw.
    pub(crate) fn fits_heard(&self, took: Took) {
        self.soft.fits.heard.with_label_values(&[took.name()]).inc();
    }

    /// Nodes are told anew what the fleet saw.
    pub(crate) fn fits_told(&self) {
        self.soft.fits.told.inc();
    }

    /// So many nodes said what they saw, of so many categories.
    pub(crate) fn fits(&self, nodes: usize, categories: usize) {
        self.soft.fits.nodes.set(gauge_value(nodes as u64));
        self.soft.fits.categories.set(gauge_value(categories as u64));
    }

    /// By what factors times between tokens turned out to be off.
    pub(crate) fn pace_learnt(&self, factors: [f64; 3]) {
        for (part, factor) in ["all", "step", "running"].iter().zip(factors) {
            self.pace.factors.with_label_values(&[part]).set(factor);
        }
    }

    /// By what factors the parts of predictions turned out to be off.
    pub(crate) fn learnt(&self, factors: [f64; 7]) {
        let parts = ["queue", "transfer", "prefill", "passed", "step", "tokens", "context"];
        for (part, factor) in parts.iter().zip(factors) {
            self.soft.factors.with_label_values(&[part]).set(factor);
        }
    }

    /// Shows how fast nodes were read from of late, and nothing of those that were not.
    pub(crate) fn link_rates(&self, all: &[LinkRate]) {
        self.soft.rates.reset();
        self.soft.latencies.reset();
        for LinkRate { node, is_own, key, lane } in all {
            let node = node.0.to_string();
            let labels = [&*node, reader_name(*is_own), path_name(key.path), tier_name(key.tier)];
            self.soft.rates.with_label_values(&labels).set(gauge_value(lane.bytes_per_s));
            self.soft.latencies.with_label_values(&labels).set(gauge_value(lane.latency_ns / 1_000));
        }
    }

    pub(crate) fn standing(&self, group: u16, applied_index: u64, term: u64, leads: bool) {
        let group = group.to_string();
        self.applied_index.with_label_values(&[&group]).set(gauge_value(applied_index));
        self.term.with_label_values(&[&group]).set(gauge_value(term));
        self.leader.with_label_values(&[&group]).set(i64::from(leads));
    }

    /// Whether the replica of a group is wrong, and how often its repair failed.
    pub(crate) fn soundness(&self, group: u16, diverged: bool, repairs_failed: u64) {
        let group = group.to_string();
        self.truth.replica_diverged.with_label_values(&[&group]).set(i64::from(diverged));
        self.truth.repairs_failed.with_label_values(&[&group]).set(gauge_value(repairs_failed));
    }

    pub(crate) fn sizes(&self, log_bytes: u64, index_copies: u64) {
        self.log_bytes.set(gauge_value(log_bytes));
        self.index_copies.set(gauge_value(index_copies));
    }
}

fn ratio(registry: &Registry, name: &str, help: &str) -> prometheus::Result<GaugeVec> {
    let gauges = GaugeVec::new(Opts::new(name, help), &["node"])?;
    registry.register(Box::new(gauges.clone()))?;
    Ok(gauges)
}

/// Who read, as figures say it.
fn reader_name(is_own: bool) -> &'static str {
    if is_own { "own" } else { "other" }
}

/// What a link went over, as figures say it.
fn path_name(path: Option<LinkPath>) -> &'static str {
    path.map_or("unknown", LinkPath::name)
}

/// What blocks came out of, as figures say it.
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
