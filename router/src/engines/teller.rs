//! Tells the soft plane what the engine of one instance said, in batches that it takes.
//!
//! The engine's numbers are not the plane's: a message may make many batches, and after a loss everything is told again from what is
//! known here. Not here: what the engine said (`aliases.rs`), and what the plane makes of it (`crate::view::residency`).

use std::sync::Arc;

use kv_core::id::{BlockHash, InstanceId};
use kv_core::index::command::Change;
use parking_lot::{RwLock, RwLockWriteGuard};

use crate::clock::{Clock, UnixClock};
use crate::view::residency::{BATCH_BLOCKS_MAX, Batch, Residency, Taken};

/// What became of what was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It counts.
    Counts,
    /// What was told before does not count any more: everything is to be told again.
    Lost,
    /// There is more than the plane takes of one instance: nothing counts.
    TooMuch,
}

/// The voice of one instance.
pub(super) struct Teller {
    residency: Arc<RwLock<Residency>>,
    instance: InstanceId,
    /// The start of the engine, as far as is known here.
    epoch: u64,
    seq: u64,
    clock: Clock,
    unix: UnixClock,
}

impl Teller {
    pub(super) fn new(
        residency: Arc<RwLock<Residency>>,
        instance: InstanceId,
        clock: Clock,
        unix: UnixClock,
    ) -> Teller {
        let epoch = unix.now_ms() * 1_000;
        Teller { residency, instance, epoch, seq: 0, clock, unix }
    }

    /// The engine began anew: what was told before is void, and a late word of it too.
    pub(super) fn begin_anew(&mut self) {
        (self.epoch, self.seq) = (self.epoch.max(self.unix.now_ms() * 1_000) + 1, 0);
        let _ = self.tell(vec![Change::Cleared]); // a first word is never lost
    }

    /// Tells changes.
    pub(super) fn tell(&mut self, changes: Vec<Change>) -> Told {
        for changes in batches(changes, BATCH_BLOCKS_MAX) {
            self.seq += 1;
            let batch = Batch { seq: self.seq, changes };
            let mut residency = self.residency.write();
            let taken = residency.take(self.instance, self.epoch, batch, self.clock.now());
            RwLockWriteGuard::unlock_fair(residency);
            match taken {
                Ok(Taken::Applied { .. }) => {}
                Ok(Taken::Outdated { epoch }) => {
                    self.epoch = epoch;
                    return Told::Lost;
                }
                Ok(Taken::Gap | Taken::Duplicate) => return Told::Lost,
                Err(error) => {
                    tracing::warn!(%error, "what an engine has in GPU memory is not listed");
                    return Told::TooMuch;
                }
            }
        }
        Told::Counts
    }

    /// Says that the engine is there and has said nothing since.
    pub(super) fn is_there(&mut self) -> Told {
        let now = self.clock.now();
        match self.residency.write().conclude(self.instance, self.epoch, self.seq, now) {
            Ok(Some(standing)) if standing.epoch > self.epoch => {
                self.epoch = standing.epoch;
                Told::Lost
            }
            Ok(Some(standing)) if standing.uncertain => Told::Lost,
            Ok(_) => Told::Counts,
            Err(_) => Told::TooMuch,
        }
    }
}

/// Changes in batches of so many blocks at most, and so many changes.
fn batches(changes: Vec<Change>, most: usize) -> Vec<Vec<Change>> {
    let mut all = vec![Vec::new()];
    let mut room = most;
    for change in changes.into_iter().flat_map(|change| pieces(change, most)) {
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

/// A change in pieces of so many blocks at most, each behind the one before.
fn pieces(change: Change, most: usize) -> Vec<Change> {
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
        Change::Dropped { blocks, tier } if blocks.len() > most => {
            starts(&blocks).map(|at| Change::Dropped { blocks: cut(&blocks, at), tier }).collect()
        }
        other => vec![other],
    }
}

#[cfg(test)]
mod tests {
    use kv_core::id::Tier;

    use super::*;

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    fn stored(parent: Option<u8>, blocks: impl IntoIterator<Item = u8>) -> Change {
        let (parent, blocks) = (parent.map(hash), blocks.into_iter().map(hash).collect());
        Change::Stored { parent, blocks, tier: Tier::Gpu }
    }

    #[test]
    fn long_changes_are_cut_and_short_ones_share_a_batch() {
        let dropped = |blocks: std::ops::Range<u8>| Change::Dropped {
            blocks: blocks.map(hash).collect(),
            tier: Tier::Gpu,
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
