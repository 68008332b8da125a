//! Reuse statistics of block categories summed over the fleet, for nodes with little history (ADR
//! 0065).
//!
//! A node reports its whole history each time: a lost report is repaired by the next one, and a
//! repeated report counts once. Sums are kept per node and then added. Only the leader of the
//! control group collects reports. A new leader starts empty, hears from all nodes within seconds,
//! and publishes only after that. Parsing and adding run outside the nodes' streams. Not here: how
//! a node uses the statistics (`kv_core::evict`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kv_core::evict::density::DECAY_TIME;
use kv_core::evict::reuse_stats::{NODE_REQUESTS_MAX, ReuseStats};
use kv_core::id::{Epoch, NodeId, Timestamp};
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::groups::Group;
use crate::metrics::Metrics;

/// Interval between two aggregations, equal to the nodes' report interval.
const AGGREGATE_INTERVAL: Duration = Duration::from_secs(5);

/// Time a new leader collects reports before it publishes: before all nodes have reported, its sums
/// are partial.
const WARMUP: Duration = AGGREGATE_INTERVAL.saturating_mul(2);

/// Smallest distance between published and current statistics that triggers a publication. It is
/// below the chance variation of a mean over the counted requests.
const PUBLISH_DISTANCE_MIN: f64 = 0.1;

/// Shortest time between two publications. A node that joins or opens a stream gets the last
/// publication at once.
const PUBLISH_INTERVAL_MIN: Duration = Duration::from_secs(60);

/// Remembered nodes, including departed ones: more than a cluster has.
const NODES_MAX: usize = 4096;

/// Decay below which less than half a request remains.
const DECAY_MIN: f64 = 0.5 / NODE_REQUESTS_MAX;

/// Statistics of some processes of a node, in requests and at most [`NODE_REQUESTS`] per category,
/// with the decay to apply to them.
#[derive(Clone, Debug)]
struct DecayingStats {
    statistics: Arc<ReuseStats>,
    decay: f64,
}

impl Default for DecayingStats {
    fn default() -> Self {
        DecayingStats { statistics: Arc::default(), decay: 1.0 }
    }
}

impl DecayingStats {
    /// Decays, and resets to empty once the remainder is negligible.
    fn fade(&mut self, kept: f64) {
        self.decay *= kept;
        if self.decay <= DECAY_MIN {
            *self = DecayingStats::default();
        }
    }

    /// Adds the decayed statistics to `all`.
    fn add_to(&self, all: &mut ReuseStats) {
        if self.decay < 1.0 {
            let mut left = ReuseStats::clone(&self.statistics);
            left.decay(self.decay);
            all.merge(&left);
        } else {
            all.merge(&self.statistics);
        }
    }
}

/// Reports of one node.
#[derive(Clone, Debug, Default)]
struct NodeReports {
    /// First epoch of the process that reported last, and the number of its report.
    life: u64,
    seq: u64,
    current: DecayingStats,
    /// Final statistics of its earlier processes, which decay here.
    earlier: DecayingStats,
}

impl NodeReports {
    /// Statistics over all its processes, at most [`NODE_REQUESTS`] per category.
    fn merged(&self) -> ReuseStats {
        let (mut lives, mut all) = (ReuseStats::default(), ReuseStats::default());
        self.current.add_to(&mut lives);
        self.earlier.add_to(&mut lives);
        all.merge_capped(&lives, NODE_REQUESTS_MAX);
        all
    }
}

/// Reports of all nodes.
#[derive(Debug, Default)]
pub(crate) struct NodeReportTable {
    by_node: BTreeMap<NodeId, NodeReports>,
    last_decay: Timestamp,
}

/// How a report was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportReceipt {
    Accepted,
    /// From an earlier process, or already received.
    Stale,
    /// The report is impossible, from another release, or above the limit on nodes.
    Refused,
}

impl ReportReceipt {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ReportReceipt::Accepted => "taken",
            ReportReceipt::Stale => "old",
            ReportReceipt::Refused => "refused",
        }
    }
}

impl NodeReportTable {
    /// Records a parsed report of a node.
    fn record(&mut self, node: NodeId, life: u64, seq: u64, seen: Arc<ReuseStats>) -> ReportReceipt {
        if self.by_node.get(&node).is_some_and(|known| (life, seq) <= (known.life, known.seq)) {
            return ReportReceipt::Stale;
        }
        if self.by_node.len() >= NODES_MAX && !self.by_node.contains_key(&node) {
            return ReportReceipt::Refused;
        }
        let known = self.by_node.entry(node).or_default();
        // A report contains the earlier ones of the same process, but not those of another process.
        if known.life != life {
            known.earlier = DecayingStats { statistics: Arc::new(known.merged()), decay: 1.0 };
        }
        known.current = DecayingStats { statistics: seen, decay: 1.0 };
        (known.life, known.seq) = (life, seq);
        ReportReceipt::Accepted
    }

    /// Decays the reports of departed nodes over the time since the last call. Live nodes decay
    /// their own statistics.
    fn fade(&mut self, live: &BTreeSet<NodeId>, now: Timestamp) {
        let span = if self.last_decay == Timestamp(0) { Duration::ZERO } else { now.since(self.last_decay) };
        self.last_decay = now;
        let kept = (-span.as_secs_f64() / DECAY_TIME.as_secs_f64()).exp();
        self.by_node.retain(|node, heard| {
            heard.earlier.fade(kept);
            let lives = live.contains(node);
            if !lives {
                heard.current.fade(kept);
            }
            lives || !heard.current.statistics.is_empty() || !heard.earlier.statistics.is_empty()
        });
    }

    /// Reports of every node; statistics are shared, not copied.
    fn snapshot(&self) -> Vec<NodeReports> {
        self.by_node.values().cloned().collect()
    }

    fn nodes(&self) -> usize {
        self.by_node.len()
    }
}

/// Parses a report sent under an epoch. `None` if it is impossible or from another release.
fn parse(node: NodeId, epoch: Epoch, seen: &pb::NodeStatistics) -> Option<Arc<ReuseStats>> {
    if !(1..=epoch.0).contains(&seen.life) {
        return None;
    }
    let nothing = pb::Statistics::default();
    match convert::statistics_from_pb(seen.statistics.as_ref().unwrap_or(&nothing)) {
        Ok(statistics) => {
            let mut counted = ReuseStats::default();
            counted.merge_capped(&statistics.to_requests(), NODE_REQUESTS_MAX);
            Some(Arc::new(counted))
        }
        Err(cause) => {
            tracing::debug!(%node, %cause, "reuse statistics of a node are rejected");
            None
        }
    }
}

/// Sum over all nodes.
fn merge_all(nodes: &[NodeReports]) -> ReuseStats {
    let mut all = ReuseStats::default();
    nodes.iter().for_each(|heard| all.merge(&heard.merged()));
    all
}

/// When to publish.
#[derive(Debug, Default)]
struct PublishSchedule {
    /// Time at which this router began to collect, and time of the last publication.
    leader_since: Option<Timestamp>,
    published_at: Option<Timestamp>,
    published: ReuseStats,
}

impl PublishSchedule {
    /// Returns whether to publish `known` now; if so, records it as published.
    fn publish_if_due(&mut self, known: &ReuseStats, now: Timestamp) -> bool {
        let since = *self.leader_since.get_or_insert(now);
        let heard_all = now.since(since) >= WARMUP;
        let is_time = self.published_at.is_none_or(|told| now.since(told) >= PUBLISH_INTERVAL_MIN);
        let is_due = heard_all && is_time && known.distance(&self.published) >= PUBLISH_DISTANCE_MIN;
        if is_due {
            (self.published_at, self.published) = (Some(now), known.clone());
        }
        is_due
    }
}

/// The published sums; `None` before the first publication.
pub(crate) type PublishedStats = Option<Arc<pb::Statistics>>;

/// Reports of nodes, and the published sums.
pub(crate) struct FleetReuseStats {
    reports: Arc<Mutex<NodeReportTable>>,
    pub(crate) published: watch::Receiver<PublishedStats>,
}

impl FleetReuseStats {
    /// Records a node's report sent under an epoch.
    pub(crate) fn record(&self, node: NodeId, epoch: Epoch, seen: &pb::NodeStatistics) -> ReportReceipt {
        // Slow work is done before taking the lock.
        match parse(node, epoch, seen) {
            Some(statistics) => self.reports.lock().record(node, seen.life, seen.seq, statistics),
            None => ReportReceipt::Refused,
        }
    }
}

/// Starts the task that publishes the sums when they have changed enough.
pub(crate) fn start(
    control: Arc<Group>,
    clock: Clock,
    metrics: Metrics,
    stop: CancellationToken,
) -> FleetReuseStats {
    let heard = Arc::<Mutex<NodeReportTable>>::default();
    let table = Arc::clone(&heard);
    let (sender, receiver) = watch::channel(None);
    tokio::spawn(async move {
        let mut tick = tokio::time::interval(AGGREGATE_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut schedule = PublishSchedule::default();
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            if control.consensus.holds_leader_lease() {
                let look = aggregate(&table, &live(&control), schedule, clock.now()).await;
                metrics.show_reuse_stats(look.nodes, look.categories);
                schedule = look.schedule;
                if let Some(told) = look.published {
                    metrics.record_reuse_publication();
                    sender.send_replace(Some(told));
                }
            } else if sender.borrow().is_some() || schedule.leader_since.is_some() || table.lock().nodes() > 0
            {
                // Another router leads now, and nodes report to it.
                drop(std::mem::take(&mut *table.lock()));
                schedule = PublishSchedule::default();
                metrics.show_reuse_stats(0, 0);
                sender.send_replace(None);
            }
        }
    });
    FleetReuseStats { reports: heard, published: receiver }
}

fn live(control: &Group) -> BTreeSet<NodeId> {
    let replica = control.published.read();
    replica.index.nodes().filter(|node| node.live).map(|node| node.record.node).collect()
}

/// Result of one aggregation.
#[derive(Default)]
struct Aggregation {
    nodes: usize,
    categories: usize,
    /// The publication, if one is due.
    published: PublishedStats,
    schedule: PublishSchedule,
}

/// Sums the reports on the blocking pool and without the lock held.
async fn aggregate(
    table: &Mutex<NodeReportTable>,
    live: &BTreeSet<NodeId>,
    mut schedule: PublishSchedule,
    now: Timestamp,
) -> Aggregation {
    let nodes = {
        let mut table = table.lock();
        table.fade(live, now);
        table.snapshot()
    };
    let added_up = tokio::task::spawn_blocking(move || {
        let known = merge_all(&nodes);
        let told = schedule.publish_if_due(&known, now).then(|| Arc::new(convert::statistics_to_pb(&known)));
        Aggregation { nodes: nodes.len(), categories: known.categories().count(), published: told, schedule }
    });
    // The task ends early only with the runtime.
    added_up.await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::evict::reuse_stats::{CategoryRole, CategorySums};

    use super::*;

    const ONE: NodeId = NodeId(1);
    const TWO: NodeId = NodeId(2);
    const NOW: Epoch = Epoch(9);

    fn seen(life: u64, seq: u64, uses: f64) -> pb::NodeStatistics {
        let mut all = ReuseStats::default();
        all.add(CategoryRole::Partial, &CategorySums { uses, ..CategorySums::default() });
        pb::NodeStatistics { life, seq, statistics: Some(convert::statistics_to_pb(&all)) }
    }

    /// Parses and records a report, as a stream does.
    fn record(table: &mut NodeReportTable, node: NodeId, said: &pb::NodeStatistics) -> ReportReceipt {
        let seen = parse(node, NOW, said);
        seen.map_or(ReportReceipt::Refused, |seen| table.record(node, said.life, said.seq, seen))
    }

    fn uses(table: &NodeReportTable) -> f64 {
        merge_all(&table.snapshot()).get(CategoryRole::Partial).map_or(0.0, |sums| sums.uses)
    }

    #[test]
    fn lost_and_repeated_reports_count_once() {
        let mut table = NodeReportTable::default();
        assert_eq!(record(&mut table, ONE, &seen(5, 1, 10.0)), ReportReceipt::Accepted);
        assert_eq!(record(&mut table, ONE, &seen(5, 1, 10.0)), ReportReceipt::Stale);
        assert_eq!(uses(&table), 10.0);
        // The second report was lost.
        assert_eq!(record(&mut table, ONE, &seen(5, 3, 30.0)), ReportReceipt::Accepted);
        assert_eq!(record(&mut table, ONE, &seen(5, 2, 20.0)), ReportReceipt::Stale, "it arrives late");
        assert_eq!(uses(&table), 30.0);
        record(&mut table, TWO, &seen(6, 1, 4.0));
        assert_eq!(uses(&table), 34.0);
    }

    #[test]
    fn a_restarted_node_adds_to_its_earlier_reports() {
        let mut table = NodeReportTable::default();
        record(&mut table, ONE, &seen(5, 7, 10.0));
        assert_eq!(record(&mut table, ONE, &seen(9, 1, 2.0)), ReportReceipt::Accepted);
        assert_eq!(uses(&table), 12.0);
        assert_eq!(
            record(&mut table, ONE, &seen(5, 8, 11.0)),
            ReportReceipt::Stale,
            "from a process that has ended"
        );
        record(&mut table, ONE, &seen(9, 2, 3.0));
        assert_eq!(uses(&table), 13.0);
    }

    #[test]
    fn reports_of_a_gone_node_decay_and_count_once_on_return() {
        let mut table = NodeReportTable::default();
        let start = Timestamp(0).after(DECAY_TIME);
        table.fade(&BTreeSet::new(), start);
        record(&mut table, ONE, &seen(5, 1, 1000.0));
        record(&mut table, TWO, &seen(6, 1, 1000.0));
        let later = start.after(DECAY_TIME);
        table.fade(&BTreeSet::from([TWO]), later);
        assert!((uses(&table) - 1000.0 * (1.0 + (-1.0_f64).exp())).abs() < 1.0, "{}", uses(&table));
        // Fenced, then back with its whole history.
        record(&mut table, ONE, &seen(5, 2, 900.0));
        assert!((uses(&table) - 1900.0).abs() < 1e-3);
        table.fade(&BTreeSet::from([TWO]), later.after(DECAY_TIME * 10));
        assert_eq!((uses(&table), table.nodes()), (1000.0, 1), "the remainder is negligible");
    }

    #[test]
    fn invalid_reports_do_not_affect_others_and_nodes_are_bounded() {
        let mut table = NodeReportTable::default();
        record(&mut table, ONE, &seen(5, 1, 10.0));
        let mut lie = seen(6, 1, 1.0);
        if let Some(statistics) = &mut lie.statistics {
            statistics.categories[0].uses = f32::NAN;
        }
        assert_eq!(record(&mut table, TWO, &lie), ReportReceipt::Refused);
        assert_eq!(
            record(&mut table, TWO, &pb::NodeStatistics { life: 6, seq: 2, statistics: None }),
            ReportReceipt::Refused
        );
        assert_eq!(
            record(&mut table, TWO, &seen(10, 1, 5.0)),
            ReportReceipt::Refused,
            "an epoch that has not begun"
        );
        assert_eq!((uses(&table), table.nodes()), (10.0, 1));
        // A flooded or faulty node, also in its cluster counts.
        record(&mut table, TWO, &seen(6, 1, 1e15));
        assert!((uses(&table) - 10.0 - NODE_REQUESTS_MAX).abs() < 1e-6);
        for (seq, clusters) in (2..).zip([(1.0, 1e17), (1e12, 1.0), (0.0, 1.0)]) {
            assert_eq!(
                record(&mut table, TWO, &reuses(6, seq, 1e17, clusters)),
                ReportReceipt::Refused,
                "{clusters:?}"
            );
        }
        for (seq, clusters) in (9..).zip([(1.0, 1.0), (1.0, 1e6), (1e11, 1e17), (0.0, 0.0)]) {
            assert_eq!(record(&mut table, TWO, &reuses(6, seq, 1e17, clusters)), ReportReceipt::Accepted);
            let all = merge_all(&table.snapshot());
            let sums = all.get(CategoryRole::Partial).unwrap();
            assert_eq!(sums.uses, 10.0, "reports of others are unaffected");
            assert!(
                (sums.total_reuses() - NODE_REQUESTS_MAX).abs() < 1e-6,
                "{clusters:?}: {}",
                sums.total_reuses()
            );
            assert!(sums.weight() >= 30.0 / (NODE_REQUESTS_MAX + 10.0), "{clusters:?}: {}", sums.weight());
        }
        // Repeated restarts do not raise its weight.
        for life in 7..=9 {
            assert_eq!(record(&mut table, TWO, &reuses(life, 1, 1e17, (0.0, 0.0))), ReportReceipt::Accepted);
        }
        let all = merge_all(&table.snapshot());
        assert!((all.get(CategoryRole::Partial).unwrap().total_reuses() - NODE_REQUESTS_MAX).abs() < 1e-6);
        for node in 0..10_000 {
            record(&mut table, NodeId(node), &seen(6, 1, 1.0));
        }
        assert_eq!(table.nodes(), NODES_MAX);
        assert_eq!(
            record(&mut table, ONE, &seen(7, 1, 1.0)),
            ReportReceipt::Accepted,
            "a known node is accepted"
        );
    }

    fn reuses(life: u64, seq: u64, reuses: f64, clusters: (f64, f64)) -> pb::NodeStatistics {
        let mut said = seen(life, seq, 0.0);
        if let Some(statistics) = &mut said.statistics {
            let sums = &mut statistics.categories[0];
            sums.reuses = vec![0.0; 11];
            sums.reuses[10] = reuses as f32;
            (sums.cluster_blocks, sums.cluster_squares) = (clusters.0 as f32, clusters.1 as f32);
        }
        said
    }

    /// A node at its cap decays from the cap, even if its own numbers are above it.
    #[test]
    fn reports_of_a_flooded_node_decay_from_its_cap() {
        let mut table = NodeReportTable::default();
        let start = Timestamp(0).after(DECAY_TIME);
        table.fade(&BTreeSet::new(), start);
        record(&mut table, ONE, &seen(5, 1, 1e15));
        table.fade(&BTreeSet::new(), start.after(DECAY_TIME));
        assert!(
            (uses(&table) / (NODE_REQUESTS_MAX * (-1.0_f64).exp()) - 1.0).abs() < 1e-6,
            "{}",
            uses(&table)
        );
    }

    fn knows(uses: f64) -> ReuseStats {
        let mut all = ReuseStats::default();
        let mut sums = CategorySums { uses, ..CategorySums::default() };
        sums.reuses[7] = uses;
        all.add(CategoryRole::Partial, &sums);
        all
    }

    #[test]
    fn a_new_leader_collects_before_it_publishes() {
        let mut schedule = PublishSchedule::default();
        let start = Timestamp(0).after(DECAY_TIME);
        for (looks, known) in [(0, 30.0), (1, 100.0)] {
            assert!(
                !schedule.publish_if_due(&knows(known), start.after(AGGREGATE_INTERVAL * looks)),
                "after {looks} checks"
            );
        }
        assert!(schedule.publish_if_due(&knows(200.0), start.after(AGGREGATE_INTERVAL * 2)));
        // The next leader starts over.
        let later = start.after(DECAY_TIME);
        let mut schedule = PublishSchedule::default();
        assert!(
            !schedule.publish_if_due(&knows(200.0), later)
                && schedule.publish_if_due(&knows(200.0), later.after(WARMUP))
        );
    }

    /// A category that grows by one request per check, as a rare category does.
    #[test]
    fn statistics_are_published_rarely_and_not_for_one_request() {
        let mut schedule = PublishSchedule::default();
        let start = Timestamp(0).after(DECAY_TIME);
        let mut told = Vec::new();
        for look in 0..120_u32 {
            if schedule.publish_if_due(&knows(f64::from(look)), start.after(AGGREGATE_INTERVAL * look)) {
                told.push(look);
            }
        }
        let least = (PUBLISH_INTERVAL_MIN.as_secs() / AGGREGATE_INTERVAL.as_secs()) as u32;
        assert!(told.windows(2).all(|pair| pair[1] - pair[0] >= least), "{told:?}");
        assert!((2..=4).contains(&told.len()), "until the category reaches its cap: {told:?}");
        // One request more than published is negligible, however old the publication.
        let mut schedule = PublishSchedule::default();
        schedule.publish_if_due(&knows(5.0), start);
        assert!(schedule.publish_if_due(&knows(5.0), start.after(WARMUP)));
        assert!(!schedule.publish_if_due(&knows(6.0), start.after(DECAY_TIME)));
        assert!(schedule.publish_if_due(&knows(12.0), start.after(DECAY_TIME)));
    }

    #[test]
    fn reports_are_parsed_before_the_lock() {
        let table = FleetReuseStats { reports: Arc::default(), published: watch::channel(None).1 };
        let heard = Arc::clone(&table.reports);
        let held = heard.lock();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(table.record(ONE, NOW, &reuses(5, 1, 1.0, (1.0, 1e17)))));
        assert_eq!(
            receiver.recv_timeout(Duration::from_secs(20)),
            Ok(ReportReceipt::Refused),
            "the parser waits for the lock"
        );
        drop(held);
    }

    #[test]
    fn aggregation_runs_off_the_runtime_and_copies_no_statistics() {
        let table = Mutex::new(NodeReportTable::default());
        record(&mut table.lock(), ONE, &seen(5, 1, 10.0));
        let snapshot = table.lock().snapshot();
        assert!(Arc::ptr_eq(&snapshot[0].current.statistics, &table.lock().by_node[&ONE].current.statistics));
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let live = BTreeSet::from([ONE]);
        let look = runtime.block_on(async {
            // The blocking pool is busy, so the aggregation cannot start.
            tokio::task::spawn_blocking(move || receiver.recv());
            let mut look = std::pin::pin!(aggregate(&table, &live, PublishSchedule::default(), Timestamp(1)));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(
                look.as_mut().poll(&mut context).is_pending(),
                "sums were added up on the runtime's thread"
            );
            let taken = table.try_lock().map(|mut fits| record(&mut fits, TWO, &seen(6, 1, 4.0)));
            assert_eq!(taken, Some(ReportReceipt::Accepted), "a node waits for the aggregation");
            drop(sender);
            look.await
        });
        assert_eq!((look.nodes, look.categories), (1, 1));
        assert_eq!(table.lock().nodes(), 2);
    }
}
