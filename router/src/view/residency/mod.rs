//! GPU residency: blocks in the GPU memory of each instance's engine, as the instance reports them.
//! Ephemeral state.
//!
//! Reports are numbered batches under an epoch, the start of the instance. A later epoch
//! invalidates everything before it; duplicates are ignored; missing batches are requested again.
//! Pure: the time is an argument. Not here: the messages (`crate::server::residency`), and the
//! blocks that nodes announce, which are in the log (`published.rs`). Lost on restart, and sent
//! again on request (`docs/adr/0021`).
//!
//! While batches of an instance are missing, its earlier reports still count and are marked
//! uncertain. Missing batches name few of its blocks: dropping everything would cost every prefix a
//! worse choice, while keeping it costs a recompute of the few evicted blocks. An instance that
//! stays uncertain for [`UNCERTAIN_MAX`] without progress is invalidated.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{BlockHash, IdentityDigest, InstanceId, NodeId, Timestamp};
use kv_core::index::command::{AnnounceOutcome, Announcement, Applied, Change, Command, NodeRecord};
use kv_core::index::{Index, IndexLimits, PrefixMatch};
use kv_core::schedule::REPORT_STALE_AFTER;

use super::fleet::{FORGET_AFTER, INSTANCES_MAX};

/// Blocks of one batch: readers wait while it is applied, well below a millisecond.
pub(crate) const BATCH_BLOCKS_MAX: usize = 4_096;

/// Blocks of one instance: sixteen million tokens in blocks of sixteen, more than any GPU holds. A
/// faulty reporter must not fill the routers' memory.
pub(crate) const INSTANCE_BLOCKS_MAX: u64 = 1_048_576;

/// Limit on (instance, block) pairs, about 700 MiB. Blocks above it are not listed, and the answer
/// says so.
pub(crate) const RESIDENT_BLOCKS_MAX: u64 = 33_554_432;

/// Silence after which an instance's reports are invalidated; the same silence excludes it from
/// routing.
pub(crate) const SILENCE_MAX: Duration = REPORT_STALE_AFTER;

/// Longest time that blocks count while batches are missing and none arrives. Missing batches come
/// with the next report, a fifth of a second later.
pub(crate) const UNCERTAIN_MAX: Duration = REPORT_STALE_AFTER;

/// Interval at which the caller runs [`Residency::sweep`].
pub(crate) const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// Instances that one sweep invalidates or forgets: each costs tens of microseconds while readers
/// wait.
const SWEEP_MAX: usize = 16;

/// A sweep that is late by this much means that the process stalled and may have unread reports.
const STALL_MIN: Duration = Duration::from_millis(500);

/// One numbered batch of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) seq: u64,
    pub(crate) changes: Vec<Change>,
}

/// Result of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchOutcome {
    /// Applied, except for `unlisted` blocks above the limit.
    Applied { unlisted: u64 },
    /// Already applied.
    Duplicate,
    /// Earlier batches are missing.
    Gap,
    /// A later epoch of the instance is known.
    Outdated { epoch: u64 },
}

/// Error of a batch. The first variant also invalidates the instance's earlier reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResidencyError {
    #[error(
        "{instance} reports more than {INSTANCE_BLOCKS_MAX} blocks in GPU memory, which is the limit: its reports are \
         invalidated; send Cleared and at most that many"
    )]
    TooManyBlocks { instance: InstanceId },
    #[error("{INSTANCES_MAX} instances are known, which is the limit")]
    TooManyInstances,
}

/// State of an instance's reports, for answers and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReporterStatus {
    pub(crate) instance: InstanceId,
    pub(crate) epoch: u64,
    /// Last applied batch.
    pub(crate) seq: u64,
    /// Time since the last report.
    pub(crate) age: Duration,
    /// Whether later batches exist.
    pub(crate) uncertain: bool,
    /// Leading blocks of the queried prefix, or all blocks if none was queried.
    pub(crate) blocks: u64,
}

/// Number of invalidated instances since the last sweep, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Invalidations {
    /// Instances that were silent for [`SILENCE_MAX`].
    pub(crate) silent: u64,
    /// Instances with batches missing for [`UNCERTAIN_MAX`].
    pub(crate) unrepaired: u64,
    /// Instances that restarted or left.
    pub(crate) restarted: u64,
    /// More may be due: sweep again.
    pub(crate) more: bool,
}

/// Report state of one instance.
#[derive(Clone, Copy, Debug)]
struct Reporter {
    epoch: u64,
    /// Number of the next expected batch.
    next_seq: u64,
    /// Number of the newest batch that the instance has announced.
    last_seq: u64,
    last_heard: Timestamp,
    /// When the last batch was applied, or the first one was found missing.
    last_progress: Timestamp,
}

impl Reporter {
    fn new(epoch: u64, now: Timestamp) -> Reporter {
        Reporter { epoch, next_seq: 1, last_seq: 0, last_heard: now, last_progress: now }
    }

    fn is_uncertain(&self) -> bool {
        self.next_seq <= self.last_seq
    }

    /// Records that batches up to this number exist; a late message with a lower number has no
    /// effect.
    fn observe_seq(&mut self, last: u64, now: Timestamp) {
        if !self.is_uncertain() {
            self.last_progress = now;
        }
        self.last_seq = self.last_seq.max(last);
    }
}

/// Blocks in the GPU memory of all instances' engines.
#[derive(Default)]
pub(crate) struct Residency {
    /// Instances act as its nodes, under epochs of its own.
    index: Index,
    reporters: BTreeMap<InstanceId, Reporter>,
    last_sweep: Timestamp,
    pending: Invalidations,
}

impl Residency {
    pub(crate) fn new(blocks_max: u64, now: Timestamp) -> Residency {
        let limits = IndexLimits { copies_max: blocks_max, ..IndexLimits::default() };
        Residency { index: Index::new(limits), last_sweep: now, ..Residency::default() }
    }

    /// Applies one batch of an instance if it is the next one or starts with `Cleared`.
    pub(crate) fn apply_batch(
        &mut self,
        instance: InstanceId,
        epoch: u64,
        batch: Batch,
        now: Timestamp,
    ) -> Result<BatchOutcome, ResidencyError> {
        if let Some(epoch) = self.record_contact(instance, epoch, now)? {
            return Ok(BatchOutcome::Outdated { epoch });
        }
        let Some(known) = self.reporters.get_mut(&instance) else { return Ok(BatchOutcome::Gap) };
        if batch.seq < known.next_seq {
            return Ok(BatchOutcome::Duplicate);
        }
        if batch.seq > known.last_seq {
            known.observe_seq(batch.seq, now);
        }
        let begins_anew = matches!(batch.changes.first(), Some(Change::Cleared));
        if batch.seq > known.next_seq && !begins_anew {
            return Ok(BatchOutcome::Gap);
        }
        let stored = batch.changes.iter().map(stored_blocks).sum::<u64>();
        let held = if begins_anew { 0 } else { self.blocks_of(instance) };
        if held + stored > INSTANCE_BLOCKS_MAX {
            self.invalidate(instance, now);
            return Err(ResidencyError::TooManyBlocks { instance });
        }
        if let Some(known) = self.reporters.get_mut(&instance) {
            (known.next_seq, known.last_progress) = (batch.seq.saturating_add(1), now);
        }
        Ok(BatchOutcome::Applied { unlisted: self.apply(instance, batch.changes) })
    }

    /// Ends a report: the instance has batches up to `last`. Returns its status, under the later
    /// epoch if one is known.
    pub(crate) fn finish_report(
        &mut self,
        instance: InstanceId,
        epoch: u64,
        last: u64,
        now: Timestamp,
    ) -> Result<Option<ReporterStatus>, ResidencyError> {
        if self.record_contact(instance, epoch, now)?.is_none()
            && let Some(known) = self.reporters.get_mut(&instance)
        {
            known.observe_seq(last, now);
        }
        Ok(self.status(instance, now))
    }

    /// Records a sign of life. Returns the later epoch if one is known.
    fn record_contact(
        &mut self,
        instance: InstanceId,
        epoch: u64,
        now: Timestamp,
    ) -> Result<Option<u64>, ResidencyError> {
        match self.reporters.get_mut(&instance) {
            Some(known) if known.epoch > epoch => return Ok(Some(known.epoch)),
            Some(known) if known.epoch == epoch => {
                let was_silent = now.since(known.last_heard) >= SILENCE_MAX;
                known.last_heard = now;
                if was_silent && !self.was_stalled(now) {
                    self.pending.silent += u64::from(self.invalidate(instance, now));
                }
            }
            Some(_) => self.start_epoch(instance, epoch, now),
            None => {
                if self.reporters.len() >= INSTANCES_MAX {
                    self.forget(now);
                }
                if self.reporters.len() >= INSTANCES_MAX {
                    return Err(ResidencyError::TooManyInstances);
                }
                self.start_epoch(instance, epoch, now);
            }
        }
        Ok(None)
    }

    /// Starts an epoch of an instance and invalidates its earlier reports.
    fn start_epoch(&mut self, instance: InstanceId, epoch: u64, now: Timestamp) {
        self.pending.restarted += u64::from(self.clear(instance));
        self.reporters.insert(instance, Reporter::new(epoch, now));
    }

    /// Records a start from a load report; reports of an earlier epoch are invalidated.
    pub(crate) fn observe_start(&mut self, instance: InstanceId, epoch: u64, now: Timestamp) {
        if self.reporters.get(&instance).is_some_and(|known| known.epoch < epoch) {
            self.start_epoch(instance, epoch, now);
        }
    }

    /// Invalidates an instance's reports under its epoch and returns whether it had blocks: it must
    /// send everything again.
    fn invalidate(&mut self, instance: InstanceId, now: Timestamp) -> bool {
        let counted = self.clear(instance);
        if let Some(known) = self.reporters.get_mut(&instance).filter(|_| counted) {
            (known.next_seq, known.last_progress) = (1, now);
        }
        counted
    }

    /// Whether this process stalled recently, so that the silence may be its own fault.
    fn was_stalled(&self, now: Timestamp) -> bool {
        now.since(self.last_sweep) > SWEEP_INTERVAL + STALL_MIN
    }

    fn clear(&mut self, instance: InstanceId) -> bool {
        let counted = self.blocks_of(instance) > 0;
        if counted {
            self.apply(instance, vec![Change::Cleared]);
        }
        counted
    }

    /// Invalidates silent and long-uncertain instances; forgets those that have been silent for
    /// long.
    pub(crate) fn sweep(&mut self, now: Timestamp) -> Invalidations {
        let stalled = self.was_stalled(now);
        self.last_sweep = now;
        if stalled {
            self.reporters
                .values_mut()
                .for_each(|known| (known.last_heard, known.last_progress) = (now, now));
        }
        let mut ended = std::mem::take(&mut self.pending);
        let holding = self.reporters.iter().filter(|(instance, _)| self.blocks_of(**instance) > 0);
        let mut over = Vec::new();
        for (instance, known) in holding {
            if now.since(known.last_heard) >= SILENCE_MAX {
                ended.silent += 1;
            } else if known.is_uncertain() && now.since(known.last_progress) >= UNCERTAIN_MAX {
                ended.unrepaired += 1;
            } else {
                continue;
            }
            over.push(*instance);
            if over.len() == SWEEP_MAX {
                ended.more = true;
                break;
            }
        }
        for instance in over {
            self.invalidate(instance, now);
        }
        self.forget(now);
        ended
    }

    /// Forgets instances after a long silence. Until then a late message of an earlier epoch is
    /// recognised.
    fn forget(&mut self, now: Timestamp) {
        let gone = |(_, known): &(&InstanceId, &Reporter)| now.since(known.last_heard) >= FORGET_AFTER;
        let gone: Vec<_> = self.reporters.iter().filter(gone).map(|(id, _)| *id).take(SWEEP_MAX).collect();
        for instance in gone {
            self.reporters.remove(&instance);
            if let Some(state) = self.index.node(node_of(instance)) {
                let leave = Command::Leave { node: state.record.node, epoch: state.epoch };
                self.index.apply(&leave);
            }
        }
    }

    /// Applies changes of an instance; returns the number of blocks above the limit.
    fn apply(&mut self, instance: InstanceId, changes: Vec<Change>) -> u64 {
        let node = node_of(instance);
        if self.index.node(node).is_none() {
            self.index.apply(&Command::Join(record_of(node)));
        }
        let (epoch, seq) = self.index.next_seq(node).unwrap_or_default();
        let one = Announcement { node, epoch, seq, changes };
        match self.index.apply(&Command::Announce(vec![one])) {
            Applied::Announced(outcomes) => outcomes.iter().map(unlisted).sum(),
            // Unreachable: a batch is far below the limits of an index.
            other => {
                debug_assert!(false, "{other:?}");
                0
            }
        }
    }

    fn blocks_of(&self, instance: InstanceId) -> u64 {
        self.index.node(node_of(instance)).map_or(0, |state| state.blocks)
    }

    /// Every instance with the first of these blocks and its number of leading blocks, in ascending
    /// order. Silent instances are left out.
    pub(crate) fn resident(&self, hashes: &[BlockHash], now: Timestamp) -> Vec<ReporterStatus> {
        let of = |(node, blocks): (NodeId, u32)| {
            let status = self.status(InstanceId(node.0), now)?;
            Some(ReporterStatus { blocks: blocks.into(), ..status })
        };
        let leading = leading_blocks(&self.index.longest_prefix(hashes));
        leading.into_iter().filter_map(of).filter(|status| status.age < SILENCE_MAX).collect()
    }

    /// Status of an instance's reports.
    pub(crate) fn status(&self, instance: InstanceId, now: Timestamp) -> Option<ReporterStatus> {
        let known = self.reporters.get(&instance)?;
        Some(ReporterStatus {
            instance,
            epoch: known.epoch,
            seq: known.next_seq - 1,
            age: now.since(known.last_heard),
            uncertain: known.is_uncertain(),
            blocks: self.blocks_of(instance),
        })
    }

    /// Status of every known instance, in ascending order.
    pub(crate) fn statuses(&self, now: Timestamp) -> Vec<ReporterStatus> {
        self.reporters.keys().filter_map(|instance| self.status(*instance, now)).collect()
    }
}

/// Every node that holds the first block, with its number of leading blocks, in ascending order;
/// one pass over the runs.
fn leading_blocks(matched: &PrefixMatch) -> Vec<(NodeId, u32)> {
    let mut leading: Vec<(NodeId, u32)> = matched.nodes().map(|node| (node, 0)).collect();
    // Positions in `led` of the nodes that hold every run so far.
    let mut holding: Vec<usize> = (0..leading.len()).collect();
    for run in &matched.runs {
        let mut holders = run.holders.iter().map(|holder| holder.node).peekable();
        holding.retain(|rank| {
            let (node, blocks) = &mut leading[*rank];
            while holders.next_if(|holder| holder < node).is_some() {}
            let holds = holders.peek() == Some(node);
            if holds {
                *blocks = run.end_blocks();
            }
            holds
        });
        if holding.is_empty() {
            break;
        }
    }
    leading
}

fn unlisted(outcome: &AnnounceOutcome) -> u64 {
    match outcome {
        AnnounceOutcome::Applied { unlisted, .. } => *unlisted,
        _ => 0,
    }
}

fn stored_blocks(change: &Change) -> u64 {
    match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } => blocks.len() as u64,
        Change::Dropped { .. } | Change::Cleared => 0,
    }
}

/// Instances act as the nodes of this index.
fn node_of(instance: InstanceId) -> NodeId {
    NodeId(instance.0)
}

fn record_of(node: NodeId) -> NodeRecord {
    NodeRecord {
        node,
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest::default(),
        block_bytes: 0,
    }
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
