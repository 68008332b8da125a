//! Runs of blocks to copy between nodes, and the outcomes of such copies: a closed set, so that
//! both ends count alike.
//!
//! Not here: which blocks are copied (`drain_order`) and how (`kvfleet-node`).

use crate::id::{BlockHash, Category, TenantId};

/// Consecutive blocks of one prefix, with the data needed to save them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockRun {
    /// Block hashes in prefix order.
    pub hashes: Vec<BlockHash>,
    /// The block before the first one.
    pub parent: Option<BlockHash>,
    /// Offset of the first block, in blocks.
    pub first_offset_blocks: u32,
    /// Their tenant.
    pub tenant: TenantId,
    /// Category of the last request that used them.
    pub category: Category,
    /// Encoded size of the largest, in bytes; 0 for the target's largest size.
    pub frame_bytes: u64,
}

impl BlockRun {
    /// The blocks from position `from` up to `to`, exclusive.
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

/// How a copy ended. Blocks copied before the end stay, and none are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum CopyOutcome {
    /// All requested blocks are at the target.
    Copied = 1,
    /// The source cannot be reached, or the connection broke.
    SourceLost = 2,
    /// The source serves under another epoch.
    StaleEpoch = 3,
    /// The source or the target serves another identity.
    IdentityDiffers = 4,
    /// The source or the target serves another weight generation.
    GenerationDiffers = 5,
    /// The source does not hold a block.
    NotHeld = 6,
    /// The source had no free capacity until the deadline: other readers used it.
    SourceBusy = 7,
    /// The source sent bytes that fail the check.
    Corrupt = 8,
    /// The source could not read its medium.
    MediumFailed = 9,
    /// The deadline passed.
    TooLate = 10,
    /// The target has no space.
    Full = 11,
    /// The tenant's quota at the target is used up.
    Quota = 12,
    /// At the target, more valuable blocks would have to leave.
    Worth = 13,
    /// The target's copy queue is full, or the target takes no copies.
    Queue = 14,
    /// The target's byte budget for copies is used up.
    Budget = 15,
    /// The target cannot be reached, or did not answer.
    TargetLost = 16,
}

impl CopyOutcome {
    /// Every outcome.
    pub const ALL: [CopyOutcome; 16] = [
        CopyOutcome::Copied,
        CopyOutcome::SourceLost,
        CopyOutcome::StaleEpoch,
        CopyOutcome::IdentityDiffers,
        CopyOutcome::GenerationDiffers,
        CopyOutcome::NotHeld,
        CopyOutcome::SourceBusy,
        CopyOutcome::Corrupt,
        CopyOutcome::MediumFailed,
        CopyOutcome::TooLate,
        CopyOutcome::Full,
        CopyOutcome::Quota,
        CopyOutcome::Worth,
        CopyOutcome::Queue,
        CopyOutcome::Budget,
        CopyOutcome::TargetLost,
    ];

    /// Its name in metrics and at the peer.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CopyOutcome::Copied => "copied",
            CopyOutcome::SourceLost => "source_lost",
            CopyOutcome::StaleEpoch => "stale_epoch",
            CopyOutcome::IdentityDiffers => "identity_differs",
            CopyOutcome::GenerationDiffers => "generation_differs",
            CopyOutcome::NotHeld => "not_held",
            CopyOutcome::SourceBusy => "source_busy",
            CopyOutcome::Corrupt => "corrupt",
            CopyOutcome::MediumFailed => "medium_failed",
            CopyOutcome::TooLate => "too_late",
            CopyOutcome::Full => "full",
            CopyOutcome::Quota => "quota",
            CopyOutcome::Worth => "worth",
            CopyOutcome::Queue => "queue",
            CopyOutcome::Budget => "budget",
            CopyOutcome::TargetLost => "target_lost",
        }
    }

    /// The outcome with this number, as sent on the wire.
    #[must_use]
    pub fn from_number(number: u32) -> Option<CopyOutcome> {
        CopyOutcome::ALL.into_iter().find(|end| *end as u32 == number)
    }

    /// Whether the target refused it: another target may accept.
    #[must_use]
    pub fn is_target_refusal(self) -> bool {
        matches!(
            self,
            CopyOutcome::Full
                | CopyOutcome::Quota
                | CopyOutcome::Worth
                | CopyOutcome::Queue
                | CopyOutcome::Budget
                | CopyOutcome::TargetLost
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_names_its_predecessor() {
        let hash = |number: u8| BlockHash([number; _]);
        let run =
            BlockRun { hashes: (1..6).map(hash).collect(), first_offset_blocks: 10, ..BlockRun::default() };
        let part = run.part(2, 4);
        assert_eq!((part.hashes.len(), part.parent, part.first_offset_blocks), (2, Some(hash(2)), 12));
        assert!(run.part(9, 2).hashes.is_empty());
        assert_eq!(run.part(0, 9), run);
    }

    #[test]
    fn every_outcome_has_a_distinct_number_and_name() {
        for (position, end) in CopyOutcome::ALL.into_iter().enumerate() {
            assert_eq!(end as usize, position + 1);
            assert_eq!(CopyOutcome::from_number(end as u32), Some(end));
            let named = CopyOutcome::ALL.into_iter().filter(|other| other.name() == end.name());
            assert_eq!(named.count(), 1, "{end:?}");
        }
        assert_eq!((CopyOutcome::from_number(0), CopyOutcome::from_number(17)), (None, None));
    }
}
