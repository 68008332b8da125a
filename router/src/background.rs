//! Small standing jobs of a router: nodes into the fleet view, an end to what silent instances said, numbers into
//! metrics, a snapshot when the log grows large.
//!
//! Not here: liveness and ingest, which decide something.

use std::sync::Arc;
use std::time::Duration;

use kv_core::schedule::LiveNode;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::copies::Copies;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::view::fleet::FleetView;
use crate::view::holders;
use crate::view::links::NodeLanes;
use crate::view::residency::{self, Residency};

/// How often the block counts of nodes (the ring's load), silence of instances and the gauges are taken anew.
const REFRESH_EVERY: Duration = residency::LOOK_EVERY;

/// Bytes of all groups' logs in memory that call for a snapshot before the entry count does: entries can be a
/// megabyte each, and the whole log since the last purge is in memory.
const LOG_BYTES_MAX: u64 = 256 << 20;

/// Weight of a node in the ring; all alike until nodes announce a size. One that drains has none.
const NODE_WEIGHT: u32 = 1;

/// What the jobs work on.
pub(crate) struct Background {
    pub(crate) groups: Groups,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) copies: Arc<Copies>,
    pub(crate) residency: Arc<RwLock<Residency>>,
    pub(crate) clock: Clock,
    pub(crate) metrics: Metrics,
    /// Whether decisions price by what instances measured.
    pub(crate) price_links: bool,
}

impl Background {
    /// Runs until cancelled: at every change of membership at once, otherwise regularly.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut rules = self.groups.control().published.rules_changes();
        let mut tick = tokio::time::interval(REFRESH_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !stop.is_cancelled() {
            self.refresh_nodes();
            tokio::select! {
                _ = rules.changed() => {}
                _ = tick.tick() => self.regularly().await,
                () = stop.cancelled() => return,
            }
        }
    }

    /// Brings the live nodes of the index into the fleet.
    fn refresh_nodes(&self) {
        let now = self.clock.now();
        let control = self.groups.control().published.read();
        let live = control.index.nodes().filter(|state| state.live).map(|state| {
            let (node, epoch) = (state.record.node, state.epoch);
            let priced = self.price_links.then(|| self.fleet.lanes(node, epoch, now));
            let NodeLanes { afar, near } = priced.unwrap_or_default();
            let blocks = holders::blocks_of(&self.groups, state);
            let drains = self.copies.draining.lock().has(node, epoch, now);
            let weight = if drains { 0 } else { NODE_WEIGHT };
            // What is priced by the profile alone is of the profile's model.
            let block_bytes = if self.price_links { state.record.block_bytes } else { 0 };
            LiveNode { node, epoch, weight, blocks, block_bytes, afar, near }
        });
        self.fleet.set_nodes(live.collect());
    }

    /// Ends what instances said that are silent, in small steps: readers go first between two.
    fn look_at_instances(&self) {
        let now = self.clock.now();
        loop {
            let ended = self.residency.write().look(now);
            self.metrics.residency_ended("silent", ended.silent);
            self.metrics.residency_ended("unrepaired", ended.unrepaired);
            self.metrics.residency_ended("restarted", ended.restarted);
            if !ended.more {
                break;
            }
        }
        self.fleet.forget_aged_links(now);
        self.metrics.link_rates(&self.fleet.link_rates(now));
        self.metrics.learnt(self.fleet.learnt());
        self.metrics.pace_learnt(self.fleet.pace_learnt(now));
        let standings = self.residency.read().standings(now);
        self.metrics.resident(&standings);
    }

    async fn regularly(&self) {
        self.look_at_instances();
        let mut log_bytes = 0;
        let mut copies = 0;
        for group in self.groups.all() {
            let held = (group.log_bytes)();
            let (applied, live) = {
                let replica = group.published.read();
                let live: u64 = replica.index.nodes().map(|state| state.blocks).sum();
                (replica.applied_index(), live)
            };
            let standing = group.consensus.standing();
            self.metrics.standing(group.number(), applied, standing.term, group.consensus.is_leader());
            self.metrics.soundness(group.number(), group.has_diverged(), group.repairs_failed());
            (log_bytes, copies) = (log_bytes + held, copies + live);
            if held > LOG_BYTES_MAX / self.groups.all().len() as u64 && standing.snapshot_index < applied {
                group.consensus.snapshot_now().await;
            }
        }
        self.metrics.sizes(log_bytes, copies);
    }
}
