//! Which nodes have been silent too long, and the one command that says so.
//!
//! Only the leader counts silence. A new leader grants every node the full time anew, since it cannot know
//! what its predecessor heard; so does a leader whose own loop was held up, since then it was the one who
//! did not listen. The decision is pure and takes the time as an argument. Not here: what fencing does to
//! the index (`kv_core::index`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Timestamp};
use kv_core::index::command::Command;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::groups::Group;
use crate::metrics::Metrics;
use crate::raft::handle::Consensus;
use crate::view::published::Published;

/// How often silence is looked at. A sixteenth of the default silence: a node is fenced at most this
/// much later than it should be.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A look that comes this much late means that this process was held up and may have unread heartbeats.
const HELD_UP: Duration = Duration::from_millis(200);

/// Silence of every node, as heard by this router.
#[derive(Debug)]
pub(crate) struct Silence {
    limit: Duration,
    /// Since when this router counts; `None` while it does not lead.
    office: Option<Timestamp>,
    looked: Timestamp,
    heard: BTreeMap<NodeId, (Epoch, Timestamp)>,
    /// Fences already proposed, and when; proposed anew after another `limit`, should the first be lost.
    proposed: BTreeMap<NodeId, (Epoch, Timestamp)>,
}

impl Silence {
    pub(crate) fn new(limit: Duration) -> Silence {
        let (heard, proposed) = (BTreeMap::new(), BTreeMap::new());
        Silence { limit, office: None, looked: Timestamp(0), heard, proposed }
    }

    /// A node spoke under `epoch`.
    pub(crate) fn heard(&mut self, node: NodeId, epoch: Epoch, now: Timestamp) {
        let last = self.heard.entry(node).or_insert((epoch, now));
        if epoch >= last.0 {
            *last = (epoch, now);
        }
    }

    /// How long a node has been silent, counted no further back than this router listens.
    pub(crate) fn silent(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> Option<Duration> {
        let heard = self.heard.get(&node).filter(|(of, _)| *of == epoch).map(|(_, at)| *at);
        let from = heard.max(self.office)?;
        Some(now.since(from))
    }

    /// The nodes to fence now, each once. Call it regularly, leading or not.
    pub(crate) fn due(
        &mut self,
        leads: bool,
        live: impl Iterator<Item = (NodeId, Epoch)>,
        now: Timestamp,
    ) -> Vec<(NodeId, Epoch)> {
        let held_up = now.since(self.looked) > LOOK_EVERY + HELD_UP;
        self.looked = now;
        if !leads {
            self.office = None;
            self.proposed.clear();
            return Vec::new();
        }
        if self.office.is_none() || held_up {
            self.office = Some(now);
        }
        let live: BTreeMap<NodeId, Epoch> = live.collect();
        live.iter().for_each(|(node, epoch)| self.first_seen(*node, *epoch, now));
        self.heard.retain(|node, _| live.contains_key(node));
        self.proposed.retain(|node, (epoch, _)| live.get(node) == Some(epoch));
        let due: Vec<_> = live.into_iter().filter(|(node, epoch)| self.is_due(*node, *epoch, now)).collect();
        for (node, epoch) in &due {
            self.proposed.insert(*node, (*epoch, now));
        }
        due
    }

    /// A join shows in the index before anybody can note that the node spoke: an epoch that is new here
    /// counts from the first look at it, not from the office of this leader.
    fn first_seen(&mut self, node: NodeId, epoch: Epoch, now: Timestamp) {
        if self.heard.get(&node).is_none_or(|(of, _)| *of < epoch) {
            self.heard.insert(node, (epoch, now));
        }
    }

    fn is_due(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> bool {
        let silent = self.silent(node, epoch, now).is_some_and(|silent| silent >= self.limit);
        let again = self.proposed.get(&node).is_none_or(|(_, at)| now.since(*at) >= self.limit);
        silent && again
    }
}

/// Looks at silence until cancelled and proposes fences.
pub(crate) async fn run(
    silence: Arc<Mutex<Silence>>,
    control: Arc<Group>,
    clock: Clock,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut tick = tokio::time::interval(LOOK_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let live = live_nodes(&control.published);
        // A leader without its quorum could not fence, and its silence may be the network's.
        let due = silence.lock().due(control.consensus.holds_office(), live.into_iter(), clock.now());
        for (node, epoch) in due {
            tokio::spawn(fence(control.consensus.clone(), metrics.clone(), node, epoch));
        }
    }
}

fn live_nodes(published: &Published) -> Vec<(NodeId, Epoch)> {
    let replica = published.read();
    replica.index.nodes().filter(|node| node.live).map(|node| (node.record.node, node.epoch)).collect()
}

async fn fence(consensus: Consensus, metrics: Metrics, node: NodeId, epoch: Epoch) {
    tracing::warn!(%node, %epoch, "silent too long: fencing");
    match consensus.propose(&Command::Fence { node, epoch }).await {
        Ok(_) => metrics.fenced(),
        Err(error) => tracing::warn!(%node, %epoch, %error, "the fence was not proposed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(800);
    const NODE: NodeId = NodeId(1);

    fn ms(millis: u64) -> Timestamp {
        Timestamp(1_000_000 + millis * 1_000)
    }

    /// Looks every 50 ms from `from` to `to` and returns when and what was due first.
    fn first_due(silence: &mut Silence, epoch: Epoch, from: u64, to: u64) -> Option<u64> {
        (from..=to).step_by(50).find(|at| !silence.due(true, [(NODE, epoch)].into_iter(), ms(*at)).is_empty())
    }

    #[test]
    fn a_silent_node_is_fenced_once_and_not_early() {
        let mut silence = Silence::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(1), 0, 400), None);
        silence.heard(NODE, Epoch(1), ms(400));
        assert_eq!(first_due(&mut silence, Epoch(1), 450, 1_300), Some(1_200));
        assert_eq!(first_due(&mut silence, Epoch(1), 1_250, 1_950), None, "one command per silence");
        assert_eq!(first_due(&mut silence, Epoch(1), 2_000, 2_000), Some(2_000), "a lost one is repeated");
    }

    #[test]
    fn a_speaking_node_is_never_fenced() {
        let mut silence = Silence::new(LIMIT);
        for at in (0..10_000).step_by(50) {
            if at % 100 == 0 {
                silence.heard(NODE, Epoch(1), ms(at));
            }
            assert!(silence.due(true, [(NODE, Epoch(1))].into_iter(), ms(at)).is_empty(), "at {at} ms");
        }
    }

    #[test]
    fn a_new_leader_grants_the_full_time() {
        let mut silence = Silence::new(LIMIT);
        silence.heard(NODE, Epoch(1), ms(0));
        for at in (0..5_000).step_by(50) {
            assert!(silence.due(false, [(NODE, Epoch(1))].into_iter(), ms(at)).is_empty());
        }
        assert_eq!(first_due(&mut silence, Epoch(1), 5_000, 6_000), Some(5_800));
    }

    #[test]
    fn a_router_that_was_held_up_blames_nobody() {
        let mut silence = Silence::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(1), 0, 400), None);
        assert_eq!(first_due(&mut silence, Epoch(1), 3_000, 4_000), Some(3_800));
    }

    #[test]
    fn words_of_an_older_epoch_do_not_count() {
        let mut silence = Silence::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(2), 0, 50), None);
        silence.heard(NODE, Epoch(2), ms(50));
        for at in (100..850).step_by(50) {
            silence.heard(NODE, Epoch(1), ms(at));
            assert!(silence.due(true, [(NODE, Epoch(2))].into_iter(), ms(at)).is_empty());
        }
        assert_eq!(first_due(&mut silence, Epoch(2), 850, 900), Some(850));
    }

    #[test]
    fn a_join_that_nobody_noted_yet_is_not_fenced() {
        let mut silence = Silence::new(LIMIT);
        let looks = |silence: &mut Silence, live: &[(NodeId, Epoch)], at| {
            silence.due(true, live.iter().copied(), ms(at))
        };
        for at in (0..5_000).step_by(50) {
            assert!(looks(&mut silence, &[], at).is_empty());
        }
        // The look read the nodes before the join, and the join was noted before the look went on.
        silence.heard(NODE, Epoch(1), ms(5_000));
        assert!(looks(&mut silence, &[], 5_000).is_empty());
        assert_eq!(first_due(&mut silence, Epoch(1), 5_050, 6_000), Some(5_850));
        // The look sees a second join that was not noted yet.
        assert_eq!(first_due(&mut silence, Epoch(2), 6_050, 7_000), Some(6_850));
    }

    #[test]
    fn a_node_that_joined_anew_starts_anew() {
        let mut silence = Silence::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(1), 0, 1_000), Some(800));
        silence.heard(NODE, Epoch(2), ms(850));
        assert_eq!(first_due(&mut silence, Epoch(2), 850, 1_600), None);
        assert_eq!(first_due(&mut silence, Epoch(2), 1_650, 1_650), Some(1_650));
    }
}
