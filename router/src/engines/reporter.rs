//! Reports the events of one engine to the residency state, in batches of acceptable size.
//!
//! Its sequence numbers are independent of the engine's: one message may make many batches, and
//! after a loss everything is reported again from local knowledge. Not here: the engine's events
//! (`aliases.rs`), and their effect (`crate::view::residency`).

use std::sync::Arc;

use kv_core::id::{BlockHash, InstanceId};
use kv_core::index::command::Change;
use parking_lot::{RwLock, RwLockWriteGuard};

use crate::clock::{Clock, UnixClock};
use crate::view::residency::{BATCH_BLOCKS_MAX, Batch, BatchOutcome, Residency, ResidencyError};

/// Result of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReportOutcome {
    /// Applied, except for `unlisted` blocks above the limit.
    Applied { unlisted: u64 },
    /// Earlier reports no longer count: everything must be reported again.
    Lost,
    /// Another source reports a later start of the instance, so earlier reports may belong to an
    /// old process.
    Outdated,
    /// More blocks than one instance may have: all its reports are invalidated.
    TooManyBlocks,
    /// The limit on instances is reached.
    TooManyInstances,
}

/// Reporter of one instance.
pub(super) struct ResidencyReporter {
    residency: Arc<RwLock<Residency>>,
    instance: InstanceId,
    /// Start of the engine, as far as known.
    epoch: u64,
    seq: u64,
    /// Whether a rejection was logged already.
    has_warned: bool,
    clock: Clock,
    unix: UnixClock,
}

impl ResidencyReporter {
    pub(super) fn new(
        residency: Arc<RwLock<Residency>>,
        instance: InstanceId,
        clock: Clock,
        unix: UnixClock,
    ) -> ResidencyReporter {
        let epoch = unix.now_ms() * 1_000;
        ResidencyReporter { residency, instance, epoch, seq: 0, has_warned: false, clock, unix }
    }

    /// Starts a new epoch after an engine restart, which invalidates earlier and late reports.
    pub(super) fn restart(&mut self) {
        (self.epoch, self.seq) = (self.epoch.max(self.unix.now_ms() * 1_000) + 1, 0);
        let _ = self.report(vec![Change::Cleared]); // the next report returns the outcome
    }

    /// Reports changes.
    pub(super) fn report(&mut self, changes: Vec<Change>) -> ReportOutcome {
        let mut all_unlisted = 0;
        for changes in batches(changes, BATCH_BLOCKS_MAX) {
            self.seq += 1;
            let batch = Batch { seq: self.seq, changes };
            let mut residency = self.residency.write();
            let taken = residency.apply_batch(self.instance, self.epoch, batch, self.clock.now());
            RwLockWriteGuard::unlock_fair(residency);
            match taken {
                Ok(BatchOutcome::Applied { unlisted }) => all_unlisted += unlisted,
                Ok(BatchOutcome::Outdated { epoch }) => return self.adopt_epoch(epoch),
                Ok(BatchOutcome::Gap | BatchOutcome::Duplicate) => return ReportOutcome::Lost,
                Err(refused) => return self.warn_rejected(refused),
            }
        }
        ReportOutcome::Applied { unlisted: all_unlisted }
    }

    /// Reports that the engine is alive without new events.
    pub(super) fn keepalive(&mut self) -> ReportOutcome {
        let now = self.clock.now();
        let concluded = self.residency.write().finish_report(self.instance, self.epoch, self.seq, now);
        match concluded {
            Ok(Some(standing)) if standing.epoch > self.epoch => self.adopt_epoch(standing.epoch),
            Ok(Some(standing)) if standing.uncertain => ReportOutcome::Lost,
            Ok(_) => ReportOutcome::Applied { unlisted: 0 },
            Err(refused) => self.warn_rejected(refused),
        }
    }

    fn adopt_epoch(&mut self, epoch: u64) -> ReportOutcome {
        self.epoch = epoch;
        ReportOutcome::Outdated
    }

    fn warn_rejected(&mut self, refused: ResidencyError) -> ReportOutcome {
        if std::mem::replace(&mut self.has_warned, true) {
            tracing::debug!(%refused, "still");
        } else {
            tracing::warn!(%refused, "blocks in the GPU memory of an engine are not listed");
        }
        match refused {
            ResidencyError::TooManyBlocks { .. } => ReportOutcome::TooManyBlocks,
            ResidencyError::TooManyInstances => ReportOutcome::TooManyInstances,
        }
    }
}

/// Splits changes into batches of at most `most` blocks and changes.
fn batches(changes: Vec<Change>, most: usize) -> Vec<Vec<Change>> {
    let mut all = vec![Vec::new()];
    let mut room = most;
    for change in changes.into_iter().flat_map(|change| split(change, most)) {
        let blocks = match &change {
            Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
                blocks.len()
            }
            Change::Cleared => 1,
        };
        if blocks > room {
            all.push(Vec::new());
            room = most;
        }
        room -= blocks;
        if let Some(last) = all.last_mut() {
            last.push(change);
        }
    }
    all.retain(|batch| !batch.is_empty());
    all
}

/// Splits a change into parts of at most `most` blocks, each the child of the one before.
fn split(change: Change, most: usize) -> Vec<Change> {
    let behind = |parent: Option<BlockHash>, blocks: &[BlockHash], at: usize| match at {
        0 => parent,
        at => blocks.get(at - 1).copied(),
    };
    let starts = |blocks: &[BlockHash]| (0..blocks.len()).step_by(most);
    let cut = |blocks: &[BlockHash], at: usize| blocks[at..blocks.len().min(at + most)].to_vec();
    match change {
        Change::Stored { parent, blocks, tier } if blocks.len() > most => starts(&blocks)
            .map(|at| Change::Stored { parent: behind(parent, &blocks, at), blocks: cut(&blocks, at), tier })
            .collect(),
        Change::Dropped { blocks, tier, cause } if blocks.len() > most => {
            starts(&blocks).map(|at| Change::Dropped { blocks: cut(&blocks, at), tier, cause }).collect()
        }
        other => vec![other],
    }
}

#[cfg(test)]
mod tests {
    use kv_core::id::Tier;

    use super::*;

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; _])
    }

    fn stored(parent: Option<u8>, blocks: impl IntoIterator<Item = u8>) -> Change {
        let (parent, blocks) = (parent.map(hash), blocks.into_iter().map(hash).collect());
        Change::Stored { parent, blocks, tier: Tier::Gpu }
    }

    #[test]
    fn long_changes_are_split_and_short_ones_share_a_batch() {
        let dropped = |blocks: std::ops::Range<u8>| Change::Dropped {
            blocks: blocks.map(hash).collect(),
            tier: Tier::Gpu,
            cause: Default::default(),
        };
        let all = vec![Change::Cleared, stored(None, 0..2), stored(Some(9), 10..19), dropped(20..25)];
        let expected = vec![
            vec![Change::Cleared, stored(None, 0..2)],
            vec![stored(Some(9), 10..14)],
            vec![stored(Some(13), 14..18)],
            vec![stored(Some(17), 18..19)],
            vec![dropped(20..24)],
            vec![dropped(24..25)],
        ];
        assert_eq!(batches(all, 4), expected);
        assert_eq!(batches(vec![], 4), Vec::<Vec<Change>>::new());
    }
}
