//! Periodic jobs of a router: live nodes into the fleet view, expiry of silent instances' reports,
//! metric gauges, and a snapshot when the log grows large.
//!
//! Not here: liveness and ingest, which make decisions.

use std::sync::Arc;
use std::time::Duration;

use kv_core::schedule::LiveNode;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::copies::CopyDispatcher;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::view::fleet::FleetView;
use crate::view::holders;
use crate::view::links::NodeLinkStats;
use crate::view::residency::{self, Residency};

/// Interval at which block counts of nodes (the ring's load), silent instances and gauges are
/// refreshed.
const REFRESH_INTERVAL: Duration = residency::SWEEP_INTERVAL;

/// Total log bytes in memory above which a group takes a snapshot before its entry count requires
/// one. One entry can hold a megabyte, and the whole log since the last purge is in memory.
const LOG_BYTES_MAX: u64 = 256 << 20;

/// Weight of a node in the ring, equal for all nodes until nodes announce a size. A draining node
/// has weight 0.
const NODE_WEIGHT: u32 = 1;

/// State that the jobs read and update.
pub(crate) struct Background {
    pub(crate) groups: Groups,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) copies: Arc<CopyDispatcher>,
    pub(crate) residency: Arc<RwLock<Residency>>,
    pub(crate) clock: Clock,
    pub(crate) metrics: Metrics,
    /// Whether decisions use the link speeds that instances measured.
    pub(crate) price_links: bool,
}

impl Background {
    /// Runs until cancelled: refreshes at every membership change, and periodically.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut rules = self.groups.control().published.watch_rules();
        let mut tick = tokio::time::interval(REFRESH_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !stop.is_cancelled() {
            self.refresh_nodes();
            tokio::select! {
                _ = rules.changed() => {}
                _ = tick.tick() => self.refresh_periodically().await,
                () = stop.cancelled() => return,
            }
        }
    }

    /// Copies the live nodes of the index into the fleet view.
    fn refresh_nodes(&self) {
        let now = self.clock.now();
        let control = self.groups.control().published.read();
        let live = control.index.nodes().filter(|state| state.live).map(|state| {
            let (node, epoch) = (state.record.node, state.epoch);
            let priced = self.price_links.then(|| self.fleet.link_stats(node, epoch, now));
            let NodeLinkStats { remote: afar, local: near } = priced.unwrap_or_default();
            let blocks = holders::node_blocks(&self.groups, state);
            let drains = self.copies.draining.lock().is_draining(node, epoch, now);
            let weight = if drains { 0 } else { NODE_WEIGHT };
            // Without measured links, transfers use the block size of the profile's model.
            let block_bytes = if self.price_links { state.record.block_bytes } else { 0 };
            LiveNode { node, epoch, weight, blocks, block_bytes, remote_stats: afar, local_stats: near }
        });
        self.fleet.set_nodes(live.collect());
    }

    /// Expires reports of silent instances in small steps, and releases the lock between them so
    /// that readers go first.
    fn expire_ephemeral_state(&self) {
        let now = self.clock.now();
        loop {
            let ended = self.residency.write().sweep(now);
            self.metrics.record_residency_invalidations("silent", ended.silent);
            self.metrics.record_residency_invalidations("unrepaired", ended.unrepaired);
            self.metrics.record_residency_invalidations("restarted", ended.restarted);
            if !ended.more {
                break;
            }
        }
        self.fleet.forget_aged_links(now);
        self.metrics.show_link_rates(&self.fleet.link_rates(now));
        self.metrics.show_ttft_factors(self.fleet.ttft_factors());
        self.metrics.show_tbt_factors(self.fleet.tbt_factors(now));
        let statuses = self.residency.read().statuses(now);
        self.metrics.show_resident_blocks(&statuses);
    }

    async fn refresh_periodically(&self) {
        self.expire_ephemeral_state();
        let mut log_bytes = 0;
        let mut copies = 0;
        for group in self.groups.all() {
            let held = (group.log_bytes)();
            let (applied, live) = {
                let replica = group.published.read();
                let live: u64 = replica.index.nodes().map(|state| state.blocks).sum();
                (replica.applied_index(), live)
            };
            let status = group.consensus.status();
            self.metrics.show_group_status(group.number(), applied, status.term, group.consensus.is_leader());
            self.metrics.show_replica_health(group.number(), group.has_diverged(), group.repairs_failed());
            (log_bytes, copies) = (log_bytes + held, copies + live);
            if held > LOG_BYTES_MAX / self.groups.all().len() as u64 && status.snapshot_index < applied {
                group.consensus.snapshot_now().await;
            }
        }
        self.metrics.show_sizes(log_bytes, copies);
    }
}
