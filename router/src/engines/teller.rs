//! Tells the soft plane what the engine of one instance said, in batches that it takes.
//!
//! The engine's numbers are not the plane's: a message may make many batches, and after a loss everything is told again from what is
//! known here. Not here: what the engine said (`aliases.rs`), and what the plane makes of it (`crate::view::residency`).

use std::sync::Arc;

use kv_core::id::{BlockHash, InstanceId};
use kv_core::index::command::Change;
use parking_lot::{RwLock, RwLockWriteGuard};

use crate::clock::{Clock, UnixClock};
use crate::view::residency::{BATCH_BLOCKS_MAX, Batch, Refused, Residency, Taken};

/// What became of what was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It counts, but for so many blocks that found no room.
    Counts { unlisted: u64 },
    /// What was told before does not count any more: everything is to be told again.
    Lost,
    /// Somebody else says that the instance started since: what was told may be of the process before.
    Outdated,
    /// There is more than the plane takes of one instance: nothing counts.
    TooMuch,
    /// The plane has no place for another instance just now.
    NoPlace,
}

/// The voice of one instance.
pub(super) struct Teller {
    residency: Arc<RwLock<Residency>>,
    instance: InstanceId,
    /// The start of the engine, as far as is known here.
    epoch: u64,
    seq: u64,
    /// That the plane refuses it is said once.
    is_refused: bool,
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
        Teller { residency, instance, epoch, seq: 0, is_refused: false, clock, unix }
    }

    /// The engine began anew: what was told before is void, and a late word of it too.
    pub(super) fn begin_anew(&mut self) {
        (self.epoch, self.seq) = (self.epoch.max(self.unix.now_ms() * 1_000) + 1, 0);
        let _ = self.tell(vec![Change::Cleared]); // what becomes of it is heard with the next word
    }

    /// Tells changes.
    pub(super) fn tell(&mut self, changes: Vec<Change>) -> Told {
        let mut all_unlisted = 0;
        for changes in batches(changes, BATCH_BLOCKS_MAX) {
            self.seq += 1;
            let batch = Batch { seq: self.seq, changes };
            let mut residency = self.residency.write();
            let taken = residency.take(self.instance, self.epoch, batch, self.clock.now());
            RwLockWriteGuard::unlock_fair(residency);
            match taken {
                Ok(Taken::Applied { unlisted }) => all_unlisted += unlisted,
                Ok(Taken::Outdated { epoch }) => return self.outdated(epoch),
                Ok(Taken::Gap | Taken::Duplicate) => return Told::Lost,
                Err(refused) => return self.refused(refused),
            }
        }
        Told::Counts { unlisted: all_unlisted }
    }

    /// Says that the engine is there and has said nothing since.
    pub(super) fn is_there(&mut self) -> Told {
        let now = self.clock.now();
        let concluded = self.residency.write().conclude(self.instance, self.epoch, self.seq, now);
        match concluded {
            Ok(Some(standing)) if standing.epoch > self.epoch => self.outdated(standing.epoch),
            Ok(Some(standing)) if standing.uncertain => Told::Lost,
            Ok(_) => Told::Counts { unlisted: 0 },
            Err(refused) => self.refused(refused),
        }
    }

    fn outdated(&mut self, epoch: u64) -> Told {
        self.epoch = epoch;
        Told::Outdated
    }

    fn refused(&mut self, refused: Refused) -> Told {
        if std::mem::replace(&mut self.is_refused, true) {
            tracing::debug!(%refused, "still");
        } else {
            tracing::warn!(%refused, "what an engine has in GPU memory is not listed");
        }
        match refused {
            Refused::Blocks { .. } => Told::TooMuch,
            Refused::Instances => Told::NoPlace,
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
