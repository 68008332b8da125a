//! What all nodes together saw of categories of blocks, for those that know little yet (ADR 0065).
//!
//! A node says all that it saw each time, so that what is lost is made good by the next word and what comes twice
//! counts once; the sums are kept by node and added up. Only the leader of the control group hears nodes, and knows
//! nothing when its office begins: within seconds all have said it again, and until then it tells nobody. What takes
//! its time, reading and adding up, is done where no stream of a node waits for it. Not here: what a node makes of it
//! (`kv_core::evict`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kv_core::evict::density::MEMORY;
use kv_core::evict::statistics::{NODE_REQUESTS, Statistics};
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

/// How long a leader hears nodes before it tells any of them: before all have said what they saw, it knows a part.
const HEARS_FIRST: Duration = LOOK_EVERY.saturating_mul(2);

/// How far apart what was told and what is known must be to be told again: less than chance moves a mean of as many
/// requests as it counts for.
const TELL_FROM: f64 = 0.1;

/// Time between two tellings at least. Who joins or opens a stream is told what was told last, without waiting.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Nodes that are remembered, those that left among them: more than a cluster has.
const NODES_MAX: usize = 4096;

/// Of what faded to this share, less than half a request is left.
const KEPT_MIN: f64 = 0.5 / NODE_REQUESTS;

/// What some processes of a node saw, in requests and of each category [`NODE_REQUESTS`] at most, and what is left of it.
#[derive(Clone, Debug)]
struct Fading {
    seen: Arc<Statistics>,
    kept: f64,
}

impl Default for Fading {
    fn default() -> Self {
        Fading { seen: Arc::default(), kept: 1.0 }
    }
}

impl Fading {
    /// Forgets what is nothing any more.
    fn fade(&mut self, kept: f64) {
        self.kept *= kept;
        if self.kept <= KEPT_MIN {
            *self = Fading::default();
        }
    }

    /// Adds what is left of it.
    fn add_to(&self, all: &mut Statistics) {
        if self.kept < 1.0 {
            let mut left = Statistics::clone(&self.seen);
            left.fade(self.kept);
            all.merge(&left);
        } else {
            all.merge(&self.seen);
        }
    }
}

/// What one node saw.
#[derive(Clone, Debug, Default)]
struct Heard {
    /// First epoch of the process that said it last, and the number of what it said.
    life: u64,
    seq: u64,
    newest: Fading,
    /// What its earlier processes said in the end. Fades here.
    earlier: Fading,
}

impl Heard {
    /// What it saw in all its lives, of each category [`NODE_REQUESTS`] at most.
    fn together(&self) -> Statistics {
        let (mut lives, mut all) = (Statistics::default(), Statistics::default());
        self.newest.add_to(&mut lives);
        self.earlier.add_to(&mut lives);
        all.merge_at_most(&lives, NODE_REQUESTS);
        all
    }
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
    /// A node says what it saw, as [`read`] gives it.
    fn heard(&mut self, node: NodeId, life: u64, seq: u64, seen: Arc<Statistics>) -> Took {
        if self.by_node.get(&node).is_some_and(|known| (life, seq) <= (known.life, known.seq)) {
            return Took::Old;
        }
        if self.by_node.len() >= NODES_MAX && !self.by_node.contains_key(&node) {
            return Took::Refused;
        }
        let known = self.by_node.entry(node).or_default();
        // What a process said before is in what it says now; what another one said is not.
        if known.life != life {
            known.earlier = Fading { seen: Arc::new(known.together()), kept: 1.0 };
        }
        known.newest = Fading { seen, kept: 1.0 };
        (known.life, known.seq) = (life, seq);
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
            lives || !heard.newest.seen.is_empty() || !heard.earlier.seen.is_empty()
        });
    }

    /// What every node said, without its numbers being copied.
    fn snapshot(&self) -> Vec<Heard> {
        self.by_node.values().cloned().collect()
    }

    fn nodes(&self) -> usize {
        self.by_node.len()
    }
}

/// Reads what a node says under an epoch. Nothing when it cannot be so, or is of another release.
fn read(node: NodeId, epoch: Epoch, seen: &pb::NodeStatistics) -> Option<Arc<Statistics>> {
    if !(1..=epoch.0).contains(&seen.life) {
        return None;
    }
    let nothing = pb::Statistics::default();
    match convert::statistics_from_pb(seen.statistics.as_ref().unwrap_or(&nothing)) {
        Ok(statistics) => {
            let mut counted = Statistics::default();
            counted.merge_at_most(&statistics.in_requests(), NODE_REQUESTS);
            Some(Arc::new(counted))
        }
        Err(cause) => {
            tracing::debug!(%node, %cause, "what a node says it saw is not taken");
            None
        }
    }
}

/// What all saw together.
fn merged(nodes: &[Heard]) -> Statistics {
    let mut all = Statistics::default();
    nodes.iter().for_each(|heard| all.merge(&heard.together()));
    all
}

/// When nodes are told.
#[derive(Debug, Default)]
struct Telling {
    /// Since when this router hears them, and when it told them last.
    since: Option<Timestamp>,
    told_at: Option<Timestamp>,
    told: Statistics,
}

impl Telling {
    /// Whether nodes are told of this now; then it is what they were told.
    fn is_due(&mut self, known: &Statistics, now: Timestamp) -> bool {
        let since = *self.since.get_or_insert(now);
        let heard_all = now.since(since) >= HEARS_FIRST;
        let is_time = self.told_at.is_none_or(|told| now.since(told) >= TELL_EVERY);
        let is_due = heard_all && is_time && known.distance(&self.told) >= TELL_FROM;
        if is_due {
            (self.told_at, self.told) = (Some(now), known.clone());
        }
        is_due
    }
}

/// What nodes are told: nothing, or a message with the sums in it.
pub(crate) type Told = Option<Arc<pb::Statistics>>;

/// What nodes said, and what they are told.
pub(crate) struct FleetFits {
    heard: Arc<Mutex<Fits>>,
    pub(crate) told: watch::Receiver<Told>,
}

impl FleetFits {
    /// A node says under an epoch what it saw.
    pub(crate) fn heard(&self, node: NodeId, epoch: Epoch, seen: &pb::NodeStatistics) -> Took {
        // All that takes its time is done before the others have to wait.
        match read(node, epoch, seen) {
            Some(statistics) => self.heard.lock().heard(node, seen.life, seen.seq, statistics),
            None => Took::Refused,
        }
    }
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
        let mut telling = Telling::default();
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            if control.consensus.holds_office() {
                let look = look(&fits, &live(&control), telling, clock.now()).await;
                metrics.fits(look.nodes, look.categories);
                telling = look.telling;
                if let Some(told) = look.told {
                    metrics.fits_told();
                    sender.send_replace(Some(told));
                }
            } else if sender.borrow().is_some() || telling.since.is_some() || fits.lock().nodes() > 0 {
                // Nodes tell whoever leads now.
                drop(std::mem::take(&mut *fits.lock()));
                telling = Telling::default();
                metrics.fits(0, 0);
                sender.send_replace(None);
            }
        }
    });
    FleetFits { heard, told: receiver }
}

fn live(control: &Group) -> BTreeSet<NodeId> {
    let replica = control.published.read();
    replica.index.nodes().filter(|node| node.live).map(|node| node.record.node).collect()
}

/// What a look at what nodes said gives.
#[derive(Default)]
struct Look {
    nodes: usize,
    categories: usize,
    /// What all are told now, if they are.
    told: Told,
    telling: Telling,
}

/// Adds up what nodes said, beside the runtime's own threads and with nobody waiting for it.
async fn look(fits: &Mutex<Fits>, live: &BTreeSet<NodeId>, mut telling: Telling, now: Timestamp) -> Look {
    let nodes = {
        let mut fits = fits.lock();
        fits.fade(live, now);
        fits.snapshot()
    };
    let added_up = tokio::task::spawn_blocking(move || {
        let known = merged(&nodes);
        let told = telling.is_due(&known, now).then(|| Arc::new(convert::statistics_to_pb(&known)));
        Look { nodes: nodes.len(), categories: known.categories().count(), told, telling }
    });
    // It ends early only with the runtime.
    added_up.await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
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

    /// Hears it as a stream does.
    fn hear(fits: &mut Fits, node: NodeId, said: &pb::NodeStatistics) -> Took {
        let seen = read(node, NOW, said);
        seen.map_or(Took::Refused, |seen| fits.heard(node, said.life, said.seq, seen))
    }

    fn uses(fits: &Fits) -> f64 {
        merged(&fits.snapshot()).of(Role::Partial).map_or(0.0, |sums| sums.uses)
    }

    #[test]
    fn what_is_lost_or_comes_twice_counts_once() {
        let mut fits = Fits::default();
        assert_eq!(hear(&mut fits, ONE, &seen(5, 1, 10.0)), Took::Taken);
        assert_eq!(hear(&mut fits, ONE, &seen(5, 1, 10.0)), Took::Old);
        assert_eq!(uses(&fits), 10.0);
        // The second was lost.
        assert_eq!(hear(&mut fits, ONE, &seen(5, 3, 30.0)), Took::Taken);
        assert_eq!(hear(&mut fits, ONE, &seen(5, 2, 20.0)), Took::Old, "it comes late");
        assert_eq!(uses(&fits), 30.0);
        hear(&mut fits, TWO, &seen(6, 1, 4.0));
        assert_eq!(uses(&fits), 34.0);
    }

    #[test]
    fn a_node_that_starts_anew_adds_to_what_it_was() {
        let mut fits = Fits::default();
        hear(&mut fits, ONE, &seen(5, 7, 10.0));
        assert_eq!(hear(&mut fits, ONE, &seen(9, 1, 2.0)), Took::Taken);
        assert_eq!(uses(&fits), 12.0);
        assert_eq!(hear(&mut fits, ONE, &seen(5, 8, 11.0)), Took::Old, "of a process that is gone");
        hear(&mut fits, ONE, &seen(9, 2, 3.0));
        assert_eq!(uses(&fits), 13.0);
    }

    #[test]
    fn what_a_node_said_that_is_gone_is_forgotten_and_counts_once_when_it_comes_back() {
        let mut fits = Fits::default();
        let start = Timestamp(0).after(MEMORY);
        fits.fade(&BTreeSet::new(), start);
        hear(&mut fits, ONE, &seen(5, 1, 1000.0));
        hear(&mut fits, TWO, &seen(6, 1, 1000.0));
        let later = start.after(MEMORY);
        fits.fade(&BTreeSet::from([TWO]), later);
        assert!((uses(&fits) - 1000.0 * (1.0 + (-1.0_f64).exp())).abs() < 1.0, "{}", uses(&fits));
        // Fenced and back with all that it knows.
        hear(&mut fits, ONE, &seen(5, 2, 900.0));
        assert!((uses(&fits) - 1900.0).abs() < 1e-3);
        fits.fade(&BTreeSet::from([TWO]), later.after(MEMORY * 10));
        assert_eq!((uses(&fits), fits.nodes()), (1000.0, 1), "what is left of it is nothing");
    }

    #[test]
    fn lies_of_one_node_leave_what_others_said_and_nodes_are_bounded() {
        let mut fits = Fits::default();
        hear(&mut fits, ONE, &seen(5, 1, 10.0));
        let mut lie = seen(6, 1, 1.0);
        if let Some(statistics) = &mut lie.statistics {
            statistics.categories[0].uses = f32::NAN;
        }
        assert_eq!(hear(&mut fits, TWO, &lie), Took::Refused);
        assert_eq!(
            hear(&mut fits, TWO, &pb::NodeStatistics { life: 6, seq: 2, statistics: None }),
            Took::Refused
        );
        assert_eq!(hear(&mut fits, TWO, &seen(10, 1, 5.0)), Took::Refused, "a life that has not begun");
        assert_eq!((uses(&fits), fits.nodes()), (10.0, 1));
        // Somebody floods a node, or it lies, of its clusters too.
        hear(&mut fits, TWO, &seen(6, 1, 1e15));
        assert!((uses(&fits) - 10.0 - NODE_REQUESTS).abs() < 1e-6);
        for (seq, clusters) in (2..).zip([(1.0, 1e17), (1e12, 1.0), (0.0, 1.0)]) {
            assert_eq!(hear(&mut fits, TWO, &reuses(6, seq, 1e17, clusters)), Took::Refused, "{clusters:?}");
        }
        for (seq, clusters) in (9..).zip([(1.0, 1.0), (1.0, 1e6), (1e11, 1e17), (0.0, 0.0)]) {
            assert_eq!(hear(&mut fits, TWO, &reuses(6, seq, 1e17, clusters)), Took::Taken);
            let all = merged(&fits.snapshot());
            let sums = all.of(Role::Partial).unwrap();
            assert_eq!(sums.uses, 10.0, "what others said stays");
            assert!((sums.reused() - NODE_REQUESTS).abs() < 1e-6, "{clusters:?}: {}", sums.reused());
            assert!(sums.weight() >= 30.0 / (NODE_REQUESTS + 10.0), "{clusters:?}: {}", sums.weight());
        }
        // Nor does it count for more by being another process each time.
        for life in 7..=9 {
            assert_eq!(hear(&mut fits, TWO, &reuses(life, 1, 1e17, (0.0, 0.0))), Took::Taken);
        }
        let all = merged(&fits.snapshot());
        assert!((all.of(Role::Partial).unwrap().reused() - NODE_REQUESTS).abs() < 1e-6);
        for node in 0..10_000 {
            hear(&mut fits, NodeId(node), &seen(6, 1, 1.0));
        }
        assert_eq!(fits.nodes(), NODES_MAX);
        assert_eq!(hear(&mut fits, ONE, &seen(7, 1, 1.0)), Took::Taken, "who is known is heard");
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

    /// A node that counts for its most fades from there once it is gone, and not only when its numbers are below that.
    #[test]
    fn what_a_flooded_node_said_fades_from_what_it_counts_for() {
        let mut fits = Fits::default();
        let start = Timestamp(0).after(MEMORY);
        fits.fade(&BTreeSet::new(), start);
        hear(&mut fits, ONE, &seen(5, 1, 1e15));
        fits.fade(&BTreeSet::new(), start.after(MEMORY));
        assert!((uses(&fits) / (NODE_REQUESTS * (-1.0_f64).exp()) - 1.0).abs() < 1e-6, "{}", uses(&fits));
    }

    fn knows(uses: f64) -> Statistics {
        let mut all = Statistics::default();
        let mut sums = CategorySums { uses, ..CategorySums::default() };
        sums.reuses[7] = uses;
        all.add(Role::Partial, &sums);
        all
    }

    #[test]
    fn who_begins_to_lead_hears_all_before_it_tells_any() {
        let mut telling = Telling::default();
        let start = Timestamp(0).after(MEMORY);
        for (looks, known) in [(0, 30.0), (1, 100.0)] {
            assert!(!telling.is_due(&knows(known), start.after(LOOK_EVERY * looks)), "after {looks} looks");
        }
        assert!(telling.is_due(&knows(200.0), start.after(LOOK_EVERY * 2)));
        // The next office begins anew.
        let later = start.after(MEMORY);
        let mut telling = Telling::default();
        assert!(
            !telling.is_due(&knows(200.0), later) && telling.is_due(&knows(200.0), later.after(HEARS_FIRST))
        );
    }

    /// A category that grows by a request with every look, as one of which little is seen yet does.
    #[test]
    fn nodes_are_told_seldom_and_of_no_single_request() {
        let mut telling = Telling::default();
        let start = Timestamp(0).after(MEMORY);
        let mut told = Vec::new();
        for look in 0..120_u32 {
            if telling.is_due(&knows(f64::from(look)), start.after(LOOK_EVERY * look)) {
                told.push(look);
            }
        }
        let least = (TELL_EVERY.as_secs() / LOOK_EVERY.as_secs()) as u32;
        assert!(told.windows(2).all(|pair| pair[1] - pair[0] >= least), "{told:?}");
        assert!((2..=4).contains(&told.len()), "until it counts for all that it can: {told:?}");
        // One request more than what was told is nothing, however long ago that was.
        let mut telling = Telling::default();
        telling.is_due(&knows(5.0), start);
        assert!(telling.is_due(&knows(5.0), start.after(HEARS_FIRST)));
        assert!(!telling.is_due(&knows(6.0), start.after(MEMORY)));
        assert!(telling.is_due(&knows(12.0), start.after(MEMORY)));
    }

    #[test]
    fn what_a_node_says_is_read_before_others_wait() {
        let fits = FleetFits { heard: Arc::default(), told: watch::channel(None).1 };
        let heard = Arc::clone(&fits.heard);
        let held = heard.lock();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(fits.heard(ONE, NOW, &reuses(5, 1, 1.0, (1.0, 1e17)))));
        assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(Took::Refused), "it waits to be read");
        drop(held);
    }

    #[test]
    fn while_sums_are_added_up_nodes_are_heard_and_nothing_is_copied_before() {
        let fits = Mutex::new(Fits::default());
        hear(&mut fits.lock(), ONE, &seen(5, 1, 10.0));
        let snapshot = fits.lock().snapshot();
        assert!(Arc::ptr_eq(&snapshot[0].newest.seen, &fits.lock().by_node[&ONE].newest.seen));
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let live = BTreeSet::from([ONE]);
        let look = runtime.block_on(async {
            // As long as other work is done there, sums are not added up.
            tokio::task::spawn_blocking(move || receiver.recv());
            let mut look = std::pin::pin!(look(&fits, &live, Telling::default(), Timestamp(1)));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(
                look.as_mut().poll(&mut context).is_pending(),
                "sums were added up on the runtime's thread"
            );
            let taken = fits.try_lock().map(|mut fits| hear(&mut fits, TWO, &seen(6, 1, 4.0)));
            assert_eq!(taken, Some(Took::Taken), "a node waits for it");
            drop(sender);
            look.await
        });
        assert_eq!((look.nodes, look.categories), (1, 1));
        assert_eq!(fits.lock().nodes(), 2);
    }
}
