//! Detects silent nodes and proposes their fence.
//!
//! Only the leader counts silence. A new leader grants every node the full limit, since it cannot
//! know when its predecessor last heard from it. A leader with a stalled loop does the same, since
//! it did not listen meanwhile. The decision is pure and takes the time as an argument. Not here:
//! the effect of a fence on the index (`kv_core::index`).

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
use crate::view::published::PublishedReplica;

/// Check interval, a sixteenth of the default limit: a node is fenced at most this much late.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A check that is late by this much means that the process stalled and may have unread heartbeats.
const STALL_MIN: Duration = Duration::from_millis(200);

/// When this router last heard from every node.
#[derive(Debug)]
pub(crate) struct SilenceTracker {
    limit: Duration,
    /// Start of the silence count on this router; `None` while it does not lead.
    leader_since: Option<Timestamp>,
    last_check: Timestamp,
    last_heard: BTreeMap<NodeId, (Epoch, Timestamp)>,
    /// Fences already proposed, and when; proposed again after another `limit` in case the first
    /// was lost.
    proposed: BTreeMap<NodeId, (Epoch, Timestamp)>,
}

impl SilenceTracker {
    pub(crate) fn new(limit: Duration) -> SilenceTracker {
        let (last_heard, proposed) = (BTreeMap::new(), BTreeMap::new());
        SilenceTracker { limit, leader_since: None, last_check: Timestamp(0), last_heard, proposed }
    }

    /// Records a message of a node under `epoch`.
    pub(crate) fn record_heard(&mut self, node: NodeId, epoch: Epoch, now: Timestamp) {
        let last = self.last_heard.entry(node).or_insert((epoch, now));
        if epoch >= last.0 {
            *last = (epoch, now);
        }
    }

    /// Time since the node's last message, counted from the start of this leadership at the
    /// earliest.
    pub(crate) fn silence_of(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> Option<Duration> {
        let heard = self.last_heard.get(&node).filter(|(of, _)| *of == epoch).map(|(_, at)| *at);
        let from = heard.max(self.leader_since)?;
        Some(now.since(from))
    }

    /// Returns the nodes to fence now, each once. Call it periodically, leading or not.
    pub(crate) fn nodes_to_fence(
        &mut self,
        leads: bool,
        live: impl Iterator<Item = (NodeId, Epoch)>,
        now: Timestamp,
    ) -> Vec<(NodeId, Epoch)> {
        let stalled = now.since(self.last_check) > CHECK_INTERVAL + STALL_MIN;
        self.last_check = now;
        if !leads {
            self.leader_since = None;
            self.proposed.clear();
            return Vec::new();
        }
        if self.leader_since.is_none() || stalled {
            self.leader_since = Some(now);
        }
        let live: BTreeMap<NodeId, Epoch> = live.collect();
        live.iter().for_each(|(node, epoch)| self.note_epoch(*node, *epoch, now));
        self.last_heard.retain(|node, _| live.contains_key(node));
        self.proposed.retain(|node, (epoch, _)| live.get(node) == Some(epoch));
        let due: Vec<_> = live.into_iter().filter(|(node, epoch)| self.is_due(*node, *epoch, now)).collect();
        for (node, epoch) in &due {
            self.proposed.insert(*node, (*epoch, now));
        }
        due
    }

    /// A join appears in the index before its message is recorded here. A new epoch therefore
    /// counts from the first check that sees it.
    fn note_epoch(&mut self, node: NodeId, epoch: Epoch, now: Timestamp) {
        if self.last_heard.get(&node).is_none_or(|(of, _)| *of < epoch) {
            self.last_heard.insert(node, (epoch, now));
        }
    }

    fn is_due(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> bool {
        let silent = self.silence_of(node, epoch, now).is_some_and(|silent| silent >= self.limit);
        let again = self.proposed.get(&node).is_none_or(|(_, at)| now.since(*at) >= self.limit);
        silent && again
    }
}

/// Checks silence until cancelled and proposes fences.
pub(crate) async fn run(
    silence: Arc<Mutex<SilenceTracker>>,
    control: Arc<Group>,
    clock: Clock,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut tick = tokio::time::interval(CHECK_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let live = live_nodes(&control.published);
        // A leader without its quorum could not fence, and the silence may be a network fault.
        let due = silence.lock().nodes_to_fence(
            control.consensus.holds_leader_lease(),
            live.into_iter(),
            clock.now(),
        );
        for (node, epoch) in due {
            tokio::spawn(fence(control.consensus.clone(), metrics.clone(), node, epoch));
        }
    }
}

fn live_nodes(published: &PublishedReplica) -> Vec<(NodeId, Epoch)> {
    let replica = published.read();
    replica.index.nodes().filter(|node| node.live).map(|node| (node.record.node, node.epoch)).collect()
}

async fn fence(consensus: Consensus, metrics: Metrics, node: NodeId, epoch: Epoch) {
    tracing::warn!(%node, %epoch, "node silent for too long: fencing");
    match consensus.propose(&Command::Fence { node, epoch }).await {
        Ok(_) => metrics.record_fence(),
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

    /// Checks every 50 ms from `from` to `to`; returns the first time at which a fence is due.
    fn first_due(silence: &mut SilenceTracker, epoch: Epoch, from: u64, to: u64) -> Option<u64> {
        (from..=to)
            .step_by(50)
            .find(|at| !silence.nodes_to_fence(true, [(NODE, epoch)].into_iter(), ms(*at)).is_empty())
    }

    #[test]
    fn a_silent_node_is_fenced_once_after_the_limit() {
        let mut silence = SilenceTracker::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(1), 0, 400), None);
        silence.record_heard(NODE, Epoch(1), ms(400));
        assert_eq!(first_due(&mut silence, Epoch(1), 450, 1_300), Some(1_200));
        assert_eq!(first_due(&mut silence, Epoch(1), 1_250, 1_950), None, "one command per silence");
        assert_eq!(first_due(&mut silence, Epoch(1), 2_000, 2_000), Some(2_000), "a lost one is repeated");
    }

    #[test]
    fn a_speaking_node_is_never_fenced() {
        let mut silence = SilenceTracker::new(LIMIT);
        for at in (0..10_000).step_by(50) {
            if at % 100 == 0 {
                silence.record_heard(NODE, Epoch(1), ms(at));
            }
            assert!(
                silence.nodes_to_fence(true, [(NODE, Epoch(1))].into_iter(), ms(at)).is_empty(),
                "at {at} ms"
            );
        }
    }

    #[test]
    fn a_new_leader_grants_the_full_time() {
        let mut silence = SilenceTracker::new(LIMIT);
        silence.record_heard(NODE, Epoch(1), ms(0));
        for at in (0..5_000).step_by(50) {
            assert!(silence.nodes_to_fence(false, [(NODE, Epoch(1))].into_iter(), ms(at)).is_empty());
        }
        assert_eq!(first_due(&mut silence, Epoch(1), 5_000, 6_000), Some(5_800));
    }

    #[test]
    fn a_stalled_router_restarts_the_silence_count() {
        let mut silence = SilenceTracker::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(1), 0, 400), None);
        assert_eq!(first_due(&mut silence, Epoch(1), 3_000, 4_000), Some(3_800));
    }

    #[test]
    fn messages_of_an_older_epoch_do_not_count() {
        let mut silence = SilenceTracker::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(2), 0, 50), None);
        silence.record_heard(NODE, Epoch(2), ms(50));
        for at in (100..850).step_by(50) {
            silence.record_heard(NODE, Epoch(1), ms(at));
            assert!(silence.nodes_to_fence(true, [(NODE, Epoch(2))].into_iter(), ms(at)).is_empty());
        }
        assert_eq!(first_due(&mut silence, Epoch(2), 850, 900), Some(850));
    }

    #[test]
    fn a_join_seen_first_in_the_index_is_not_fenced() {
        let mut silence = SilenceTracker::new(LIMIT);
        let looks = |silence: &mut SilenceTracker, live: &[(NodeId, Epoch)], at| {
            silence.nodes_to_fence(true, live.iter().copied(), ms(at))
        };
        for at in (0..5_000).step_by(50) {
            assert!(looks(&mut silence, &[], at).is_empty());
        }
        // The check read the nodes before the join, and the join was recorded before the check
        // continued.
        silence.record_heard(NODE, Epoch(1), ms(5_000));
        assert!(looks(&mut silence, &[], 5_000).is_empty());
        assert_eq!(first_due(&mut silence, Epoch(1), 5_050, 6_000), Some(5_850));
        // The check sees a second join that is not recorded yet.
        assert_eq!(first_due(&mut silence, Epoch(2), 6_050, 7_000), Some(6_850));
    }

    #[test]
    fn a_rejoined_node_starts_over() {
        let mut silence = SilenceTracker::new(LIMIT);
        assert_eq!(first_due(&mut silence, Epoch(1), 0, 1_000), Some(800));
        silence.record_heard(NODE, Epoch(2), ms(850));
        assert_eq!(first_due(&mut silence, Epoch(2), 850, 1_600), None);
        assert_eq!(first_due(&mut silence, Epoch(2), 1_650, 1_650), Some(1_650));
    }
}
