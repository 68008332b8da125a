//! Gathers the announcements of all nodes into one proposal.
//!
//! Idle, an announcement is proposed at once. While a proposal is under way, later ones gather and go
//! together when it comes back, when the oldest has waited [`Gather::window`], or when they hold
//! [`Gather::blocks_max`] blocks, whichever is first; so batches grow with the load by themselves. At most
//! [`IN_FLIGHT_MAX`] proposals are under way, submitted in order, so the announcements of a node are
//! applied in the order in which they came. The queue is bounded in announcements and in blocks; above
//! either the answer is `Busy`. Not here: the stream a node speaks on (`server/announce.rs`).

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
use crate::raft::handle::{Consensus, LeaderAt, ProposeError};

/// Announcements waiting for a proposal. A node sends about a hundred a second, so this is a second's
/// worth of forty nodes.
const QUEUE_ANNOUNCEMENTS_MAX: usize = 4096;

/// Blocks waiting for a proposal: 16 MiB of hashes.
const QUEUE_BLOCKS_MAX: usize = 1_048_576;

/// Proposals under way at once. One may be on its way to the followers, one being synced and one being applied at
/// the same time, and a processor that others use delays each; a full proposal is small (256 KiB), so that their
/// sum is bounded by what the memory close to a core holds.
const IN_FLIGHT_MAX: usize = 8;

/// What became of one announcement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It was committed, and this is what the index said.
    Outcome(AnnounceOutcome),
    /// Another router leads.
    NotLeader(Option<LeaderAt>),
    /// It may or may not have been committed; sending it again is harmless (the sequence number tells).
    Again,
}

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// When to propose: the pure part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather {
    /// Longest time an announcement waits for company.
    pub(crate) window: Duration,
    /// Blocks that make a proposal full.
    pub(crate) blocks_max: usize,
}

/// What to do with what waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing waits, or no more may be under way.
    Wait,
    /// Propose now.
    Propose,
    /// Propose at this time, unless something happens before.
    At(Timestamp),
}

impl Gather {
    /// Decides for `blocks` waiting blocks, the oldest of which came at `oldest`.
    pub(crate) fn next(
        &self,
        oldest: Option<Timestamp>,
        blocks: usize,
        in_flight: usize,
        now: Timestamp,
    ) -> Next {
        let Some(oldest) = oldest else { return Next::Wait };
        if in_flight >= IN_FLIGHT_MAX {
            return Next::Wait;
        }
        let due = oldest.after(self.window);
        if in_flight == 0 || blocks >= self.blocks_max || now >= due { Next::Propose } else { Next::At(due) }
    }
}

struct Waiting {
    announcement: Announcement,
    blocks: usize,
    since: Timestamp,
    verdict: oneshot::Sender<Verdict>,
}

/// What an announcement weighs in a proposal: the blocks it names, or its changes when those are more, so
/// that a flood of empty changes is bounded too. One change is free: the `Cleared` of a resync. At least 1.
pub(crate) fn blocks_of(announcement: &Announcement) -> usize {
    let blocks = announcement.changes.iter().map(|change| match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len()
        }
        Change::Cleared => 0,
    });
    blocks.sum::<usize>().max(announcement.changes.len().saturating_sub(1)).max(1)
}

/// Where announcements are handed in.
#[derive(Clone)]
pub(crate) struct Ingest {
    queue: mpsc::Sender<Waiting>,
    queued_blocks: Arc<AtomicUsize>,
    clock: Clock,
}

impl Ingest {
    /// Starts the gathering task; it ends when `stop` is cancelled.
    pub(crate) fn start(
        gather: Gather,
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

    /// Hands in one announcement; the verdict comes through the receiver, in order per node.
    ///
    /// # Errors
    /// [`Full`] when the queue is: the node must send it again later.
    pub(crate) fn offer(&self, announcement: Announcement) -> Result<oneshot::Receiver<Verdict>, Full> {
        let blocks = blocks_of(&announcement);
        if self.queued_blocks.load(Ordering::Relaxed).saturating_add(blocks) > QUEUE_BLOCKS_MAX {
            return Err(Full);
        }
        let (verdict, receiver) = oneshot::channel();
        let waiting = Waiting { announcement, blocks, since: self.clock.now(), verdict };
        // Counted before it is sent: the proposer subtracts when it takes, maybe before we return.
        self.queued_blocks.fetch_add(blocks, Ordering::Relaxed);
        self.queue.try_send(waiting).map_err(|_| {
            self.queued_blocks.fetch_sub(blocks, Ordering::Relaxed);
            Full
        })?;
        Ok(receiver)
    }
}

struct Proposer {
    gather: Gather,
    consensus: Consensus,
    clock: Clock,
    metrics: Metrics,
    queued_blocks: Arc<AtomicUsize>,
}

impl Proposer {
    async fn run(self, mut receiver: mpsc::Receiver<Waiting>) {
        let mut waiting: VecDeque<Waiting> = VecDeque::new();
        let mut in_flight = JoinSet::new();
        loop {
            while let Ok(next) = receiver.try_recv() {
                waiting.push_back(next);
            }
            let blocks = waiting.iter().map(|one| one.blocks).sum();
            let oldest = waiting.front().map(|one| one.since);
            let wake = match self.gather.next(oldest, blocks, in_flight.len(), self.clock.now()) {
                Next::Propose => {
                    self.propose(&mut waiting, &mut in_flight).await;
                    continue;
                }
                Next::At(due) => Some(due.since(self.clock.now())),
                Next::Wait => None,
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
    async fn propose(&self, waiting: &mut VecDeque<Waiting>, in_flight: &mut JoinSet<()>) {
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
            verdicts.push(next.verdict);
        }
        self.queued_blocks.fetch_sub(blocks, Ordering::Relaxed);
        self.metrics.proposed(announcements.len(), blocks);
        match self.consensus.submit(&Command::Announce(announcements)).await {
            Ok(pending) => {
                let metrics = self.metrics.clone();
                in_flight.spawn(async move { tell(Consensus::answer(pending).await, verdicts, &metrics) });
            }
            Err(error) => tell(Err(error), verdicts, &self.metrics),
        }
    }
}

/// Tells every announcer. One that has gone away meanwhile does not mind.
fn tell(answer: Result<Applied, ProposeError>, verdicts: Vec<oneshot::Sender<Verdict>>, metrics: &Metrics) {
    let outcomes = match answer {
        Ok(Applied::Announced(outcomes)) if outcomes.len() == verdicts.len() => outcomes,
        other => {
            let verdict = no_outcome(other);
            return verdicts.into_iter().for_each(|sender| drop(sender.send(verdict.clone())));
        }
    };
    for (sender, outcome) in verdicts.into_iter().zip(outcomes) {
        metrics.announced(outcome);
        drop(sender.send(Verdict::Outcome(outcome)));
    }
}

fn no_outcome(answer: Result<Applied, ProposeError>) -> Verdict {
    match answer {
        // The leader itself, its lease not yet confirmed: nothing to redirect to.
        Err(ProposeError::NotLeader(None)) => Verdict::Again,
        Err(ProposeError::NotLeader(leader) | ProposeError::Unknown(leader)) => Verdict::NotLeader(leader),
        Err(ProposeError::Stopped(why) | ProposeError::Members(why)) => {
            tracing::error!(why, "announcements cannot be proposed");
            Verdict::NotLeader(None)
        }
        Ok(applied) => {
            tracing::error!(?applied, "an announce batch was answered by something else");
            Verdict::Again
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATHER: Gather = Gather { window: Duration::from_millis(10), blocks_max: 100 };

    fn ms(millis: u64) -> Timestamp {
        Timestamp(millis * 1_000)
    }

    #[test]
    fn idle_proposes_at_once() {
        assert_eq!(GATHER.next(Some(ms(5)), 1, 0, ms(5)), Next::Propose);
        assert_eq!(GATHER.next(None, 0, 0, ms(5)), Next::Wait);
    }

    #[test]
    fn under_way_gathers_up_to_the_window() {
        assert_eq!(GATHER.next(Some(ms(5)), 1, 1, ms(5)), Next::At(ms(15)));
        assert_eq!(GATHER.next(Some(ms(5)), 1, 1, ms(14)), Next::At(ms(15)));
        assert_eq!(GATHER.next(Some(ms(5)), 1, 1, ms(15)), Next::Propose);
    }

    #[test]
    fn a_full_batch_does_not_wait() {
        assert_eq!(GATHER.next(Some(ms(5)), 99, 1, ms(5)), Next::At(ms(15)));
        assert_eq!(GATHER.next(Some(ms(5)), 100, 1, ms(5)), Next::Propose);
    }

    #[test]
    fn empty_changes_weigh_too() {
        let weight = |changes| {
            blocks_of(&Announcement {
                node: kv_core::id::NodeId(1),
                epoch: kv_core::id::Epoch(1),
                seq: kv_core::id::Seq(1),
                changes,
            })
        };
        let stored = |blocks| Change::Stored {
            parent: None,
            blocks: vec![kv_core::id::BlockHash([1; 16]); blocks],
            tier: kv_core::id::Tier::Dram,
        };
        assert_eq!(weight(vec![]), 1);
        assert_eq!(weight(vec![Change::Cleared, stored(8)]), 8, "a resync weighs what it holds");
        assert_eq!(weight(vec![Change::Cleared; 1_001]), 1_000);
        assert_eq!(weight(vec![stored(0); 1_001]), 1_000);
    }

    #[test]
    fn proposals_under_way_are_bounded() {
        assert_eq!(GATHER.next(Some(ms(5)), 1_000, IN_FLIGHT_MAX, ms(500)), Next::Wait);
    }
}
