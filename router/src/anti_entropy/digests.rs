//! Compares digests of a node and the index, and of two replicas. Pure.
//!
//! A node sends its own digest with every batch, and the index keeps one per node. They are
//! compared at the last applied batch. Not here: when comparisons run (`run.rs`).

use std::collections::VecDeque;

use kv_core::id::Epoch;

/// Digests kept per node: more than the batches that it may have in flight.
const DIGESTS_MAX: usize = 128;

/// Comparisons after which an unanswered resync request is repeated.
const REQUEST_AGAIN_AFTER: u32 = 16;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DigestCheck {
    /// No common digest to compare.
    Unknown,
    Agrees,
    /// They differ, for the first time.
    Differs,
    /// The node has not started the requested full announcement: request it again.
    Overdue,
}

/// Digests that one node sent for its announcements to one shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeDigests {
    epoch: Epoch,
    digests: VecDeque<(u64, u128)>,
    /// Comparisons since a difference was found; `None` while none is known.
    rounds_since_drift: Option<u32>,
}

impl NodeDigests {
    /// Records the node's digest after a batch; `anew` if the batch starts with `Cleared`.
    pub(crate) fn record(&mut self, epoch: Epoch, seq: u64, digest: Option<u128>, is_full: bool) {
        if epoch != self.epoch {
            *self = NodeDigests { epoch, ..NodeDigests::default() };
        }
        if is_full {
            // A full announcement starts over.
            (self.rounds_since_drift, self.digests) = (None, VecDeque::new());
        }
        self.digests.retain(|(of, _)| *of < seq);
        self.digests.extend(digest.map(|digest| (seq, digest)));
        if self.digests.len() > DIGESTS_MAX {
            self.digests.pop_front();
        }
    }

    /// Compares with the index, which has applied batch `seq` of this epoch last.
    pub(crate) fn compare(&mut self, epoch: Epoch, seq: u64, digest: u128) -> DigestCheck {
        if epoch != self.epoch {
            return DigestCheck::Unknown;
        }
        if let Some(rounds) = &mut self.rounds_since_drift {
            *rounds += 1;
            return if rounds.is_multiple_of(REQUEST_AGAIN_AFTER) {
                DigestCheck::Overdue
            } else {
                DigestCheck::Unknown
            };
        }
        match self.digests.iter().find(|(of, _)| *of == seq) {
            None => DigestCheck::Unknown,
            Some((_, theirs)) if *theirs == digest => DigestCheck::Agrees,
            Some(_) => {
                self.rounds_since_drift = Some(0);
                DigestCheck::Differs
            }
        }
    }
}

/// Digest of a replica right after it applied an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DigestMark {
    pub(crate) index: u64,
    pub(crate) digest: [u8; 16],
}

/// Our mark at the newest entry that both replicas have marked, and whether they differ there.
pub(crate) fn compare_marks(ours: &[DigestMark], theirs: &[DigestMark]) -> Option<(DigestMark, bool)> {
    let both = ours.iter().filter_map(|our| {
        let their = theirs.iter().find(|their| their.index == our.index)?;
        Some((*our, our.digest != their.digest))
    });
    both.max_by_key(|(our, _)| our.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Epoch = Epoch(1);

    #[test]
    fn digests_are_compared_at_the_last_applied_batch() {
        let mut told = NodeDigests::default();
        for seq in 1..=5 {
            told.record(ONE, seq, Some(u128::from(seq) * 10), false);
        }
        assert_eq!(told.compare(ONE, 3, 30), DigestCheck::Agrees, "two are in flight");
        assert_eq!(told.compare(ONE, 9, 30), DigestCheck::Unknown);
        assert_eq!(told.compare(Epoch(2), 3, 31), DigestCheck::Unknown);
        assert_eq!(told.compare(ONE, 5, 50), DigestCheck::Agrees);
    }

    #[test]
    fn a_difference_is_reported_once_until_a_full_announcement() {
        let mut told = NodeDigests::default();
        told.record(ONE, 1, Some(10), false);
        assert_eq!(told.compare(ONE, 1, 11), DigestCheck::Differs);
        told.record(ONE, 2, Some(20), false);
        let rest: Vec<_> = (0..2 * REQUEST_AGAIN_AFTER).map(|_| told.compare(ONE, 2, 21)).collect();
        assert_eq!(rest.iter().filter(|verdict| **verdict == DigestCheck::Overdue).count(), 2);
        assert!(!rest.contains(&DigestCheck::Differs) && !rest.contains(&DigestCheck::Agrees));
        told.record(ONE, 3, Some(30), true);
        assert_eq!(told.compare(ONE, 2, 21), DigestCheck::Unknown, "not applied yet");
        assert_eq!(told.compare(ONE, 3, 30), DigestCheck::Agrees);
        told.record(ONE, 4, Some(40), false);
        assert_eq!(told.compare(ONE, 4, 41), DigestCheck::Differs);
    }

    #[test]
    fn a_repeated_batch_replaces_the_earlier_digest() {
        let mut told = NodeDigests::default();
        (1..=3).for_each(|seq| told.record(ONE, seq, Some(seq.into()), false));
        told.record(ONE, 2, Some(77), false);
        assert_eq!(
            (told.compare(ONE, 3, 3), told.compare(ONE, 2, 77)),
            (DigestCheck::Unknown, DigestCheck::Agrees)
        );
        told.record(ONE, 2, None, false);
        assert_eq!(told.compare(ONE, 2, 77), DigestCheck::Unknown, "the node's digest is unknown");
        told.record(Epoch(2), 1, Some(5), false);
        assert_eq!(told.compare(Epoch(2), 1, 5), DigestCheck::Agrees);
    }

    #[test]
    fn replicas_are_compared_at_their_newest_common_mark() {
        let mark = |index, byte| DigestMark { index, digest: [byte; 16] };
        let ours = [mark(256, 1), mark(512, 2), mark(600, 3)];
        assert_eq!(compare_marks(&ours, &[mark(256, 9), mark(512, 2)]), Some((mark(512, 2), false)));
        assert_eq!(compare_marks(&ours, &[mark(512, 2), mark(600, 4)]), Some((mark(600, 3), true)));
        assert_eq!(compare_marks(&ours, &[mark(599, 2)]), None);
    }
}
