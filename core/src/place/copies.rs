//! What a copy of blocks from one node to another is of, and how it can end: a closed set, so that both ends count the same.
//!
//! Not here: which blocks are copied (`leaving`) and how (`kvfleet-node`).

use crate::id::{BlockHash, Category, TenantId};

/// Consecutive blocks of one prefix, with what it takes to save them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockRun {
    /// In prefix order.
    pub hashes: Vec<BlockHash>,
    /// The block before the first.
    pub parent: Option<BlockHash>,
    /// Offset of the first, in blocks.
    pub first_offset_blocks: u32,
    /// Whose they are.
    pub tenant: TenantId,
    /// Category of the last request that used them.
    pub category: Category,
    /// Encoded size of the largest, in bytes; 0: as large as the target takes.
    pub frame_bytes: u64,
}

impl BlockRun {
    /// The blocks from this position on, up to another.
    #[must_use]
    pub fn part(&self, from: usize, to: usize) -> BlockRun {
        let to = to.min(self.hashes.len());
        let from = from.min(to);
        let parent = from.checked_sub(1).map_or(self.parent, |before| Some(self.hashes[before]));
        let offset = u32::try_from(from).unwrap_or(u32::MAX);
        BlockRun {
            hashes: self.hashes[from..to].to_vec(),
            parent,
            first_offset_blocks: self.first_offset_blocks.saturating_add(offset),
            ..*self
        }
    }
}

/// How a copy ended. Whatever it was, what came before it stays and nothing is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum CopyEnd {
    /// All that was asked for is there.
    Copied = 1,
    /// The source cannot be reached, or broke off.
    SourceLost = 2,
    /// The source serves under another epoch.
    StaleEpoch = 3,
    /// The source or the target has another model.
    IdentityDiffers = 4,
    /// The source or the target has other weights in force.
    GenerationDiffers = 5,
    /// The source does not hold a block.
    NotHeld = 6,
    /// The source had no room for it until its time was over: others read there.
    SourceBusy = 7,
    /// What the source sent is not the block.
    Corrupt = 8,
    /// The source could not read its medium.
    MediumFailed = 9,
    /// Its time was over.
    TooLate = 10,
    /// The target has no room.
    Full = 11,
    /// The target may keep no more of this tenant.
    Quota = 12,
    /// At the target something would have to leave that is worth more.
    Worth = 13,
    /// The target has as many copies under way and waiting as it takes, or none at all.
    Queue = 14,
    /// As many bytes came as it may take.
    Budget = 15,
    /// The target cannot be reached, or did not answer.
    TargetLost = 16,
}

impl CopyEnd {
    /// Every end.
    pub const ALL: [CopyEnd; 16] = [
        CopyEnd::Copied,
        CopyEnd::SourceLost,
        CopyEnd::StaleEpoch,
        CopyEnd::IdentityDiffers,
        CopyEnd::GenerationDiffers,
        CopyEnd::NotHeld,
        CopyEnd::SourceBusy,
        CopyEnd::Corrupt,
        CopyEnd::MediumFailed,
        CopyEnd::TooLate,
        CopyEnd::Full,
        CopyEnd::Quota,
        CopyEnd::Worth,
        CopyEnd::Queue,
        CopyEnd::Budget,
        CopyEnd::TargetLost,
    ];

    /// Its name in metrics and on the wire's other end.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CopyEnd::Copied => "copied",
            CopyEnd::SourceLost => "source_lost",
            CopyEnd::StaleEpoch => "stale_epoch",
            CopyEnd::IdentityDiffers => "identity_differs",
            CopyEnd::GenerationDiffers => "generation_differs",
            CopyEnd::NotHeld => "not_held",
            CopyEnd::SourceBusy => "source_busy",
            CopyEnd::Corrupt => "corrupt",
            CopyEnd::MediumFailed => "medium_failed",
            CopyEnd::TooLate => "too_late",
            CopyEnd::Full => "full",
            CopyEnd::Quota => "quota",
            CopyEnd::Worth => "worth",
            CopyEnd::Queue => "queue",
            CopyEnd::Budget => "budget",
            CopyEnd::TargetLost => "target_lost",
        }
    }

    /// The end of this number, as it is sent.
    #[must_use]
    pub fn from_number(number: u32) -> Option<CopyEnd> {
        CopyEnd::ALL.into_iter().find(|end| *end as u32 == number)
    }

    /// Whether it was the target that did not take it: another one may.
    #[must_use]
    pub fn is_of_target(self) -> bool {
        matches!(
            self,
            CopyEnd::Full
                | CopyEnd::Quota
                | CopyEnd::Worth
                | CopyEnd::Queue
                | CopyEnd::Budget
                | CopyEnd::TargetLost
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_says_what_comes_before_it() {
        let hash = |number: u8| BlockHash([number; 16]);
        let run =
            BlockRun { hashes: (1..6).map(hash).collect(), first_offset_blocks: 10, ..BlockRun::default() };
        let part = run.part(2, 4);
        assert_eq!((part.hashes.len(), part.parent, part.first_offset_blocks), (2, Some(hash(2)), 12));
        assert!(run.part(9, 2).hashes.is_empty());
        assert_eq!(run.part(0, 9), run);
    }

    #[test]
    fn every_end_has_a_number_and_a_name_of_its_own() {
        for (position, end) in CopyEnd::ALL.into_iter().enumerate() {
            assert_eq!(end as usize, position + 1);
            assert_eq!(CopyEnd::from_number(end as u32), Some(end));
            let named = CopyEnd::ALL.into_iter().filter(|other| other.name() == end.name());
            assert_eq!(named.count(), 1, "{end:?}");
        }
        assert_eq!((CopyEnd::from_number(0), CopyEnd::from_number(17)), (None, None));
    }
}
