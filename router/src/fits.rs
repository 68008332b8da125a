//! What all nodes together saw of categories of blocks, for those that know little yet (ADR 0065).
//!
//! A node says all that it saw each time, so that what is lost is made good by the next word and what comes twice
//! counts once; the sums are kept by node and added up. Only the leader of the control group hears nodes, and knows
//! nothing when its office begins: within seconds all have said it again. Not here: what a node makes of it
//! (`kv_core::evict`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kv_core::evict::density::MEMORY;
use kv_core::evict::statistics::Statistics;
use kv_core::id::{Epoch, NodeId, Timestamp};
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::groups::Group;
use crate::metrics::Metrics;

/// Time between two looks at what nodes said, which is as often as they say it.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How far apart what was told and what is known must be to be told again: less than chance moves a mean of as many
/// requests as it counts for.
const TELL_FROM: f64 = 0.1;

/// Nodes that are remembered, those that left among them: more than a cluster has.
const NODES_MAX: usize = 4096;

/// Requests of a category that count of one node: some hundred times what the sums count for where they are told. So a
/// node that somebody floods is one of many.
const NODE_REQUESTS: f64 = 10_000.0;

/// What one node saw.
#[derive(Debug, Default)]
struct Heard {
    /// First epoch of the process that said it last, and the number of what it said.
    life: u64,
    seq: u64,
    newest: Statistics,
    /// What its earlier processes said in the end. Fades here.
    earlier: Statistics,
}

/// What all nodes said.
#[derive(Debug, Default)]
pub(crate) struct Fits {
    by_node: BTreeMap<NodeId, Heard>,
    looked: Timestamp,
}

/// What became of what a node said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Took {
    Taken,
    /// Of an earlier life, or said before.
    Old,
    /// It cannot have been counted, or is of another release.
    Refused,
}

impl Took {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Took::Taken => "taken",
            Took::Old => "old",
            Took::Refused => "refused",
        }
    }
}

impl Fits {
    /// A node says under an epoch what it saw.
    pub(crate) fn heard(&mut self, node: NodeId, epoch: Epoch, seen: &pb::NodeStatistics) -> Took {
        if !(1..=epoch.0).contains(&seen.life) {
            return Took::Refused;
        }
        let is_new =
            self.by_node.get(&node).is_none_or(|known| (seen.life, seen.seq) > (known.life, known.seq));
        if !is_new {
            return Took::Old;
        }
        let statistics =
            convert::statistics_from_pb(seen.statistics.as_ref().unwrap_or(&pb::Statistics::default()));
        let statistics = match statistics {
            Ok(statistics) => statistics,
            Err(cause) => {
                tracing::debug!(%node, %cause, "what a node says it saw is not taken");
                return Took::Refused;
            }
        };
        if self.by_node.len() >= NODES_MAX && !self.by_node.contains_key(&node) {
            return Took::Refused;
        }
        let known = self.by_node.entry(node).or_default();
        let before = std::mem::replace(&mut known.newest, statistics);
        // What a process said before is in what it says now; what another one said is not.
        if known.life != seen.life {
            known.earlier.merge(&before);
        }
        (known.life, known.seq) = (seen.life, seen.seq);
        Took::Taken
    }

    /// Time goes on: what nodes said that are gone counts less and less. Those that live forget by themselves.
    fn fade(&mut self, live: &BTreeSet<NodeId>, now: Timestamp) {
        let span = if self.looked == Timestamp(0) { Duration::ZERO } else { now.since(self.looked) };
        self.looked = now;
        let kept = (-span.as_secs_f64() / MEMORY.as_secs_f64()).exp();
        self.by_node.retain(|node, heard| {
            heard.earlier.fade(kept);
            let lives = live.contains(node);
            if !lives {
                heard.newest.fade(kept);
            }
            lives || !heard.newest.is_empty() || !heard.earlier.is_empty()
        });
    }

    /// What all saw together.
    fn merged(&self) -> Statistics {
        let mut all = Statistics::default();
        for heard in self.by_node.values() {
            all.merge_at_most(&heard.newest, NODE_REQUESTS);
            all.merge_at_most(&heard.earlier, NODE_REQUESTS);
        }
        all
    }

    fn nodes(&self) -> usize {
        self.by_node.len()
    }
}

/// What nodes are told: nothing, or a message with the sums in it.
pub(crate) type Told = Option<Arc<pb::Statistics>>;

/// What nodes said, and what they are told.
pub(crate) struct FleetFits {
    pub(crate) heard: Arc<Mutex<Fits>>,
    pub(crate) told: watch::Receiver<Told>,
}

/// Starts the task that renews what nodes are told when it has changed enough to matter.
pub(crate) fn start(
    control: Arc<Group>,
    clock: Clock,
    metrics: Metrics,
    stop: CancellationToken,
) -> FleetFits {
    let heard = Arc::<Mutex<Fits>>::default();
    let fits = Arc::clone(&heard);
    let (sender, receiver) = watch::channel(None);
    tokio::spawn(async move {
        let mut tick = tokio::time::interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut told = Statistics::default();
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            if control.consensus.holds_office() {
                let (known, nodes) = look(&mut fits.lock(), &control, clock.now());
                metrics.fits(nodes, known.categories().count());
                if known.distance(&told) >= TELL_FROM {
                    metrics.fits_told();
                    sender.send_replace(Some(Arc::new(convert::statistics_to_pb(&known))));
                    told = known;
                }
            } else if sender.borrow().is_some() || fits.lock().nodes() > 0 {
                // Nodes tell whoever leads now.
                *fits.lock() = Fits::default();
                told = Statistics::default();
                metrics.fits(0, 0);
                sender.send_replace(None);
            }
        }
    });
    FleetFits { heard, told: receiver }
}

fn look(fits: &mut Fits, control: &Group, now: Timestamp) -> (Statistics, usize) {
    let live = {
        let replica = control.published.read();
        replica.index.nodes().filter(|node| node.live).map(|node| node.record.node).collect()
    };
    fits.fade(&live, now);
    (fits.merged(), fits.nodes())
}

#[cfg(test)]
mod tests {
    use kv_core::evict::statistics::{CategorySums, Role};

    use super::*;

    const ONE: NodeId = NodeId(1);
    const TWO: NodeId = NodeId(2);
    const NOW: Epoch = Epoch(9);

    fn seen(life: u64, seq: u64, uses: f64) -> pb::NodeStatistics {
        let mut all = Statistics::default();
        all.add(Role::Partial, &CategorySums { uses, ..CategorySums::default() });
        pb::NodeStatistics { life, seq, statistics: Some(convert::statistics_to_pb(&all)) }
    }

    fn uses(fits: &Fits) -> f64 {
        fits.merged().of(Role::Partial).map_or(0.0, |sums| sums.uses)
    }

    #[test]
    fn what_is_lost_or_comes_twice_counts_once() {
        let mut fits = Fits::default();
        assert_eq!(fits.heard(ONE, NOW, &seen(5, 1, 10.0)), Took::Taken);
        assert_eq!(fits.heard(ONE, NOW, &seen(5, 1, 10.0)), Took::Old);
        assert_eq!(uses(&fits), 10.0);
        // The second was lost.
        assert_eq!(fits.heard(ONE, NOW, &seen(5, 3, 30.0)), Took::Taken);
        assert_eq!(fits.heard(ONE, NOW, &seen(5, 2, 20.0)), Took::Old, "it comes late");
        assert_eq!(uses(&fits), 30.0);
        fits.heard(TWO, NOW, &seen(6, 1, 4.0));
        assert_eq!(uses(&fits), 34.0);
    }

    #[test]
    fn a_node_that_starts_anew_adds_to_what_it_was() {
        let mut fits = Fits::default();
        fits.heard(ONE, NOW, &seen(5, 7, 10.0));
        assert_eq!(fits.heard(ONE, NOW, &seen(9, 1, 2.0)), Took::Taken);
        assert_eq!(uses(&fits), 12.0);
        assert_eq!(fits.heard(ONE, NOW, &seen(5, 8, 11.0)), Took::Old, "of a process that is gone");
        fits.heard(ONE, NOW, &seen(9, 2, 3.0));
        assert_eq!(uses(&fits), 13.0);
    }

    #[test]
    fn what_a_node_said_that_is_gone_is_forgotten_and_counts_once_when_it_comes_back() {
        let mut fits = Fits::default();
        let start = Timestamp(0).after(MEMORY);
        fits.fade(&BTreeSet::new(), start);
        fits.heard(ONE, NOW, &seen(5, 1, 1000.0));
        fits.heard(TWO, NOW, &seen(6, 1, 1000.0));
        let later = start.after(MEMORY);
        fits.fade(&BTreeSet::from([TWO]), later);
        assert!((uses(&fits) - 1000.0 * (1.0 + (-1.0_f64).exp())).abs() < 1.0, "{}", uses(&fits));
        // Fenced and back with all that it knows.
        fits.heard(ONE, NOW, &seen(5, 2, 900.0));
        assert!((uses(&fits) - 1900.0).abs() < 1e-3);
        fits.fade(&BTreeSet::from([TWO]), later.after(MEMORY * 9));
        assert_eq!((uses(&fits), fits.nodes()), (1000.0, 1), "what is left of it is nothing");
    }

    #[test]
    fn lies_of_one_node_leave_what_others_said_and_nodes_are_bounded() {
        let mut fits = Fits::default();
        fits.heard(ONE, NOW, &seen(5, 1, 10.0));
        let mut lie = seen(6, 1, 1.0);
        if let Some(statistics) = &mut lie.statistics {
            statistics.categories[0].uses = f32::NAN;
        }
        assert_eq!(fits.heard(TWO, NOW, &lie), Took::Refused);
        assert_eq!(
            fits.heard(TWO, NOW, &pb::NodeStatistics { life: 6, seq: 2, statistics: None }),
            Took::Refused
        );
        assert_eq!(fits.heard(TWO, NOW, &seen(10, 1, 5.0)), Took::Refused, "a life that has not begun");
        assert_eq!((uses(&fits), fits.nodes()), (10.0, 1));
        // Somebody floods a node, or it lies.
        fits.heard(TWO, NOW, &seen(6, 1, 1e15));
        assert!((uses(&fits) - 10.0 - NODE_REQUESTS).abs() < 1e-6);
        for node in 0..10_000 {
            fits.heard(NodeId(node), NOW, &seen(6, 1, 1.0));
        }
        assert_eq!(fits.nodes(), NODES_MAX);
        assert_eq!(fits.heard(ONE, NOW, &seen(7, 1, 1.0)), Took::Taken, "who is known is heard");
    }
}
