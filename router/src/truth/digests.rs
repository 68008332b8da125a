//! Whether a node and the index agree on what the node announced, and whether two replicas agree. Pure.
//!
//! A node sends its own digest with every batch; the index keeps one of each node. Both are compared where both
//! stand: at the batch that the index applied last. Not here: who asks when (`run.rs`).

use std::collections::VecDeque;

use kv_core::id::Epoch;

/// Digests kept of one node: as many as it may have batches on their way, and some.
const TOLD_MAX: usize = 128;

/// Comparisons without an answer after which a node is asked again to announce all anew.
const ASK_AGAIN_AFTER: u32 = 16;

/// What a comparison came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// There was nothing to compare.
    Unknown,
    Agrees,
    /// They differ, and this is new.
    Drifts,
    /// The node was asked to announce all anew and has not begun to: ask again.
    Waits,
}

/// What one node told of its announcements to one shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    epoch: Epoch,
    digests: VecDeque<(u64, u128)>,
    /// Since a difference was found: comparisons until it is asked for again. None while all is well.
    drifted: Option<u32>,
}

impl Told {
    /// A node sent its digest after a batch; `anew` when the batch begins with everything cleared.
    pub(crate) fn told(&mut self, epoch: Epoch, seq: u64, digest: Option<u128>, anew: bool) {
        if epoch != self.epoch {
            *self = Told { epoch, ..Told::default() };
        }
        if anew {
            // What comes from here on stands for itself.
            (self.drifted, self.digests) = (None, VecDeque::new());
        }
        self.digests.retain(|(of, _)| *of < seq);
        self.digests.extend(digest.map(|digest| (seq, digest)));
        if self.digests.len() > TOLD_MAX {
            self.digests.pop_front();
        }
    }

    /// Compares with the index, which has applied batch `seq` of this epoch as the last.
    pub(crate) fn compare(&mut self, epoch: Epoch, seq: u64, digest: u128) -> Verdict {
        if epoch != self.epoch {
            return Verdict::Unknown;
        }
        if let Some(rounds) = &mut self.drifted {
            *rounds += 1;
            return if rounds.is_multiple_of(ASK_AGAIN_AFTER) { Verdict::Waits } else { Verdict::Unknown };
        }
        match self.digests.iter().find(|(of, _)| *of == seq) {
            None => Verdict::Unknown,
            Some((_, theirs)) if *theirs == digest => Verdict::Agrees,
            Some(_) => {
                self.drifted = Some(0);
                Verdict::Drifts
            }
        }
    }
}

/// The digest of a replica right after it applied an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) index: u64,
    pub(crate) digest: [u8; 16],
}

/// Our mark at the newest entry at which both replicas have one, and whether they differ there.
pub(crate) fn compare_marks(ours: &[Mark], theirs: &[Mark]) -> Option<(Mark, bool)> {
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
    fn digests_are_compared_at_the_batch_that_was_applied_last() {
        let mut told = Told::default();
        for seq in 1..=5 {
            told.told(ONE, seq, Some(u128::from(seq) * 10), false);
        }
        assert_eq!(told.compare(ONE, 3, 30), Verdict::Agrees, "two are on their way");
        assert_eq!(told.compare(ONE, 9, 30), Verdict::Unknown);
        assert_eq!(told.compare(Epoch(2), 3, 31), Verdict::Unknown);
        assert_eq!(told.compare(ONE, 5, 50), Verdict::Agrees);
    }

    #[test]
    fn a_difference_is_found_once_until_the_node_announces_all_anew() {
        let mut told = Told::default();
        told.told(ONE, 1, Some(10), false);
        assert_eq!(told.compare(ONE, 1, 11), Verdict::Drifts);
        told.told(ONE, 2, Some(20), false);
        let rest: Vec<_> = (0..2 * ASK_AGAIN_AFTER).map(|_| told.compare(ONE, 2, 21)).collect();
        assert_eq!(rest.iter().filter(|verdict| **verdict == Verdict::Waits).count(), 2);
        assert!(!rest.contains(&Verdict::Drifts) && !rest.contains(&Verdict::Agrees));
        told.told(ONE, 3, Some(30), true);
        assert_eq!(told.compare(ONE, 2, 21), Verdict::Unknown, "not applied yet");
        assert_eq!(told.compare(ONE, 3, 30), Verdict::Agrees);
        told.told(ONE, 4, Some(40), false);
        assert_eq!(told.compare(ONE, 4, 41), Verdict::Drifts);
    }

    #[test]
    fn a_number_that_is_sent_again_counts_as_it_was_sent_last() {
        let mut told = Told::default();
        (1..=3).for_each(|seq| told.told(ONE, seq, Some(seq.into()), false));
        told.told(ONE, 2, Some(77), false);
        assert_eq!((told.compare(ONE, 3, 3), told.compare(ONE, 2, 77)), (Verdict::Unknown, Verdict::Agrees));
        told.told(ONE, 2, None, false);
        assert_eq!(told.compare(ONE, 2, 77), Verdict::Unknown, "the node does not know any more");
        told.told(Epoch(2), 1, Some(5), false);
        assert_eq!(told.compare(Epoch(2), 1, 5), Verdict::Agrees);
    }

    #[test]
    fn replicas_are_compared_at_the_newest_entry_that_both_marked() {
        let mark = |index, byte| Mark { index, digest: [byte; 16] };
        let ours = [mark(256, 1), mark(512, 2), mark(600, 3)];
        assert_eq!(compare_marks(&ours, &[mark(256, 9), mark(512, 2)]), Some((mark(512, 2), false)));
        assert_eq!(compare_marks(&ours, &[mark(512, 2), mark(600, 4)]), Some((mark(600, 3), true)));
        assert_eq!(compare_marks(&ours, &[mark(599, 2)]), None);
    }
}
