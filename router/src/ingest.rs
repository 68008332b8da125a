//! Batches the announcements of all nodes into proposals.
//!
//! When idle, an announcement is proposed at once. While a proposal is in flight, later
//! announcements gather. They go together when it returns, when the oldest has waited
//! [`BatchPolicy::window`], or when they hold [`BatchPolicy::blocks_max`] blocks, so batches grow
//! with the load. At most [`IN_FLIGHT_MAX`] proposals are in flight, submitted in order, so a
//! node's announcements are applied in order of arrival. The queue is bounded in announcements and
//! in blocks; above either bound the answer is `Busy`. Not here: the stream of a node
//! (`server/announce.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kv_core::id::Timestamp;
use kv_core::index::command::{AnnounceOutcome, Announcement, Applied, Change, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::raft::handle::{Consensus, LeaderAddress, ProposeError};

/// Queued announcements. A node sends about a hundred a second, so this is one second of forty
/// nodes.
const QUEUE_ANNOUNCEMENTS_MAX: usize = 4096;

/// Queued blocks: 19 MiB of hashes.
const QUEUE_BLOCKS_MAX: usize = 1_048_576;

/// Proposals in flight at once. Several overlap: one in transit to followers, one being synced, one
/// being applied, each delayed by a shared processor. A full proposal is small (256 KiB), so
/// together they fit a core's cache.
const IN_FLIGHT_MAX: usize = 8;

/// Result of one announcement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnnounceResult {
    /// It was committed, with this outcome in the index.
    Outcome(AnnounceOutcome),
    /// Another router leads.
    NotLeader(Option<LeaderAddress>),
    /// It may or may not have been committed; sending it again is harmless because of its sequence
    /// number.
    Retry,
}

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueFull;

/// When to propose; pure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchPolicy {
    /// Longest time an announcement waits for others.
    pub(crate) window: Duration,
    /// Blocks at which a proposal is full.
    pub(crate) blocks_max: usize,
}

/// What to do with the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchAction {
    /// The queue is empty, or too many proposals are in flight.
    Wait,
    /// Propose now.
    Propose,
    /// Propose at this time, unless the queue changes before.
    ProposeAt(Timestamp),
}

impl BatchPolicy {
    /// Decides for `blocks` queued blocks, the oldest queued at `oldest`.
    pub(crate) fn next(
        &self,
        oldest: Option<Timestamp>,
        blocks: usize,
        in_flight: usize,
        now: Timestamp,
    ) -> BatchAction {
        let Some(oldest) = oldest else { return BatchAction::Wait };
        if in_flight >= IN_FLIGHT_MAX {
            return BatchAction::Wait;
        }
        let due = oldest.after(self.window);
        if in_flight == 0 || blocks >= self.blocks_max || now >= due {
            BatchAction::Propose
        } else {
            BatchAction::ProposeAt(due)
        }
    }
}

struct QueuedAnnouncement {
    announcement: Announcement,
    blocks: usize,
    since: Timestamp,
    result: oneshot::Sender<AnnounceResult>,
}

/// Weight of an announcement in a proposal: its blocks, or its changes if those are more, so that
/// empty changes are bounded too. One change is free: the `Cleared` of a resync. At least 1.
pub(crate) fn announcement_weight(announcement: &Announcement) -> usize {
    let blocks = announcement.changes.iter().map(|change| match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len()
        }
        Change::Cleared => 0,
    });
    blocks.sum::<usize>().max(announcement.changes.len().saturating_sub(1)).max(1)
}

/// Sender side of the announcement queue.
#[derive(Clone)]
pub(crate) struct Ingest {
    queue: mpsc::Sender<QueuedAnnouncement>,
    queued_blocks: Arc<AtomicUsize>,
    clock: Clock,
}

impl Ingest {
    /// Starts the batching task; it ends when `stop` is cancelled.
    pub(crate) fn start(
        gather: BatchPolicy,
        consensus: Consensus,
        clock: Clock,
        metrics: Metrics,
        stop: CancellationToken,
    ) -> Ingest {
        let (queue, receiver) = mpsc::channel(QUEUE_ANNOUNCEMENTS_MAX);
        let queued_blocks = Arc::<AtomicUsize>::default();
        let proposer =
            Proposer { gather, consensus, clock, metrics, queued_blocks: Arc::clone(&queued_blocks) };
        tokio::spawn(async move {
            stop.run_until_cancelled(proposer.run(receiver)).await;
        });
        Ingest { queue, queued_blocks, clock }
    }

    /// Queues one announcement; the receiver gets its result, in order per node.
    ///
    /// # Errors
    /// [`QueueFull`]; the node must send it again later.
    pub(crate) fn offer(
        &self,
        announcement: Announcement,
    ) -> Result<oneshot::Receiver<AnnounceResult>, QueueFull> {
        let blocks = announcement_weight(&announcement);
        if self.queued_blocks.load(Ordering::Relaxed).saturating_add(blocks) > QUEUE_BLOCKS_MAX {
            return Err(QueueFull);
        }
        let (verdict, receiver) = oneshot::channel();
        let waiting = QueuedAnnouncement { announcement, blocks, since: self.clock.now(), result: verdict };
        // Counted before it is sent: the proposer may take it, and subtract, before this call
        // returns.
        self.queued_blocks.fetch_add(blocks, Ordering::Relaxed);
        self.queue.try_send(waiting).map_err(|_| {
            self.queued_blocks.fetch_sub(blocks, Ordering::Relaxed);
            QueueFull
        })?;
        Ok(receiver)
    }
}

struct Proposer {
    gather: BatchPolicy,
    consensus: Consensus,
    clock: Clock,
    metrics: Metrics,
    queued_blocks: Arc<AtomicUsize>,
}

impl Proposer {
    async fn run(self, mut receiver: mpsc::Receiver<QueuedAnnouncement>) {
        let mut waiting: VecDeque<QueuedAnnouncement> = VecDeque::new();
        let mut in_flight = JoinSet::new();
        loop {
            while let Ok(next) = receiver.try_recv() {
                waiting.push_back(next);
            }
            let blocks = waiting.iter().map(|one| one.blocks).sum();
            let oldest = waiting.front().map(|one| one.since);
            let wake = match self.gather.next(oldest, blocks, in_flight.len(), self.clock.now()) {
                BatchAction::Propose => {
                    self.propose(&mut waiting, &mut in_flight).await;
                    continue;
                }
                BatchAction::ProposeAt(due) => Some(due.since(self.clock.now())),
                BatchAction::Wait => None,
            };
            tokio::select! {
                arrived = receiver.recv(), if waiting.len() < QUEUE_ANNOUNCEMENTS_MAX => match arrived {
                    Some(next) => waiting.push_back(next),
                    None => return,
                },
                Some(_) = in_flight.join_next() => {}
                () = tokio::time::sleep(wake.unwrap_or_default()), if wake.is_some() => {}
            }
        }
    }

    /// Submits the oldest announcements, up to a full proposal.
    async fn propose(&self, waiting: &mut VecDeque<QueuedAnnouncement>, in_flight: &mut JoinSet<()>) {
        let mut blocks = 0;
        let mut announcements = Vec::new();
        let mut verdicts = Vec::new();
        while let Some(next) = waiting.front() {
            if !announcements.is_empty() && blocks + next.blocks > self.gather.blocks_max {
                break;
            }
            let Some(next) = waiting.pop_front() else { break };
            blocks += next.blocks;
            announcements.push(next.announcement);
            verdicts.push(next.result);
        }
        self.queued_blocks.fetch_sub(blocks, Ordering::Relaxed);
        self.metrics.record_proposal(announcements.len(), blocks);
        match self.consensus.submit(&Command::Announce(announcements)).await {
            Ok(pending) => {
                let metrics = self.metrics.clone();
                in_flight.spawn(async move {
                    reply_all(Consensus::await_result(pending).await, verdicts, &metrics);
                });
            }
            Err(error) => reply_all(Err(error), verdicts, &self.metrics),
        }
    }
}

/// Sends every announcer its result; one that has disconnected is ignored.
fn reply_all(
    answer: Result<Applied, ProposeError>,
    verdicts: Vec<oneshot::Sender<AnnounceResult>>,
    metrics: &Metrics,
) {
    let outcomes = match answer {
        Ok(Applied::Announced(outcomes)) if outcomes.len() == verdicts.len() => outcomes,
        other => {
            let verdict = result_without_outcome(other);
            return verdicts.into_iter().for_each(|sender| drop(sender.send(verdict.clone())));
        }
    };
    for (sender, outcome) in verdicts.into_iter().zip(outcomes) {
        metrics.record_announcement(outcome);
        drop(sender.send(AnnounceResult::Outcome(outcome)));
    }
}

fn result_without_outcome(answer: Result<Applied, ProposeError>) -> AnnounceResult {
    match answer {
        // This router leads but has not confirmed its lease: there is no other router to redirect
        // to.
        Err(ProposeError::NotLeader(None)) => AnnounceResult::Retry,
        Err(ProposeError::NotLeader(leader) | ProposeError::Unknown(leader)) => {
            AnnounceResult::NotLeader(leader)
        }
        Err(ProposeError::Stopped(why) | ProposeError::Members(why) | ProposeError::NoRoom(why)) => {
            tracing::error!(why, "announcements cannot be proposed");
            AnnounceResult::NotLeader(None)
        }
        Ok(applied) => {
            tracing::error!(?applied, "an announce batch got an answer of another kind");
            AnnounceResult::Retry
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATHER: BatchPolicy = BatchPolicy { window: Duration::from_millis(10), blocks_max: 100 };

    fn ms(millis: u64) -> Timestamp {
        Timestamp(millis * 1_000)
    }

    #[test]
    fn idle_proposes_at_once() {
        assert_eq!(GATHER.next(Some(ms(5)), 1, 0, ms(5)), BatchAction::Propose);
        assert_eq!(GATHER.next(None, 0, 0, ms(5)), BatchAction::Wait);
    }

    #[test]
    fn proposals_in_flight_delay_the_next_up_to_the_window() {
        assert_eq!(GATHER.next(Some(ms(5)), 1, 1, ms(5)), BatchAction::ProposeAt(ms(15)));
        assert_eq!(GATHER.next(Some(ms(5)), 1, 1, ms(14)), BatchAction::ProposeAt(ms(15)));
        assert_eq!(GATHER.next(Some(ms(5)), 1, 1, ms(15)), BatchAction::Propose);
    }

    #[test]
    fn a_full_batch_does_not_wait() {
        assert_eq!(GATHER.next(Some(ms(5)), 99, 1, ms(5)), BatchAction::ProposeAt(ms(15)));
        assert_eq!(GATHER.next(Some(ms(5)), 100, 1, ms(5)), BatchAction::Propose);
    }

    #[test]
    fn empty_changes_weigh_too() {
        let weight = |changes| {
            announcement_weight(&Announcement {
                node: kv_core::id::NodeId(1),
                epoch: kv_core::id::Epoch(1),
                seq: kv_core::id::Seq(1),
                changes,
            })
        };
        let stored = |blocks| Change::Stored {
            parent: None,
            blocks: vec![kv_core::id::BlockHash([1; _]); blocks],
            tier: kv_core::id::Tier::Dram,
        };
        assert_eq!(weight(vec![]), 1);
        assert_eq!(weight(vec![Change::Cleared, stored(8)]), 8, "a resync weighs its blocks");
        assert_eq!(weight(vec![Change::Cleared; 1_001]), 1_000);
        assert_eq!(weight(vec![stored(0); 1_001]), 1_000);
    }

    #[test]
    fn proposals_in_flight_are_bounded() {
        assert_eq!(GATHER.next(Some(ms(5)), 1_000, IN_FLIGHT_MAX, ms(500)), BatchAction::Wait);
    }
}
