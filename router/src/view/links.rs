//! Link estimates: how fast each instance has been reading from each node, out of its load reports.
//!
//! An estimate is fenced twice: by the start of the instance that measured and by the epoch of the node it measured;
//! and it ages. Soft as load is: the next reports bring it back. Not here: how samples become a lane
//! (`kv_core::schedule`).

use std::collections::BTreeMap;

use kv_core::id::{Epoch, InstanceId, NodeId, Timestamp};
use kv_core::schedule::{Lane, LinkEstimate, LinkSample};

/// Samples in one report: one per node that an instance reads from in a fifth of a second.
pub(crate) const SAMPLES_MAX: usize = 256;

/// Pairs known at once; above it new ones are left out until others have aged: 65,536 of 64 bytes are 4 MiB.
const PAIRS_MAX: usize = 65_536;

/// What an instance measured of a node since its last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) sample: LinkSample,
}

/// Estimates by node and instance.
#[derive(Default)]
pub(crate) struct Links {
    pairs: BTreeMap<(NodeId, InstanceId), (Epoch, LinkEstimate)>,
}

impl Links {
    /// Takes what an instance measured.
    pub(crate) fn measured(&mut self, instance: InstanceId, all: &[Measured], now: Timestamp) {
        for Measured { node, epoch, sample } in all {
            let pair = (*node, instance);
            // Room is made by [`Links::forget_aged`], not here: routes wait meanwhile.
            if self.pairs.len() >= PAIRS_MAX && !self.pairs.contains_key(&pair) {
                continue;
            }
            let known = self.pairs.entry(pair).or_insert((*epoch, LinkEstimate::default()));
            if known.0 < *epoch {
                *known = (*epoch, LinkEstimate::default());
            }
            if known.0 == *epoch {
                known.1.add(sample, now);
            }
        }
    }

    /// Forgets what an instance measured: it has started anew, or left.
    pub(crate) fn forget(&mut self, instance: InstanceId) {
        self.pairs.retain(|(_, by), _| *by != instance);
    }

    /// Forgets what is too old to count.
    pub(crate) fn forget_aged(&mut self, now: Timestamp) {
        self.pairs.retain(|_, (_, estimate)| !estimate.is_aged(now));
    }

    /// The lane out of a node under this epoch, over everything that any instance measured; none without enough of
    /// it lately.
    pub(crate) fn of_node(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> Option<Lane> {
        let of_node = self.pairs.range((node, InstanceId(0))..=(node, InstanceId(u32::MAX)));
        let counted = of_node.filter(|(_, (of, estimate))| *of == epoch && !estimate.is_aged(now));
        let all = counted.map(|(_, (_, estimate))| *estimate);
        all.reduce(|sum, one| sum.with(&one))?.lane(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn measured(node: u32, epoch: u64, gigabytes_per_s: u64) -> Measured {
        let sample = LinkSample {
            fetches: 1,
            latency: Duration::from_micros(100),
            bytes: gigabytes_per_s * 100_000_000,
            stream: Duration::from_millis(100),
        };
        Measured { node: NodeId(node), epoch: Epoch(epoch), sample }
    }

    fn rate(links: &Links, node: u32, epoch: u64, now: Timestamp) -> Option<u64> {
        links.of_node(NodeId(node), Epoch(epoch), now).map(|lane| lane.bytes_per_s / 1_000_000_000)
    }

    const NOW: Timestamp = Timestamp(1_000_000_000);

    #[test]
    fn a_node_is_as_fast_as_those_who_read_from_it_say() {
        let mut links = Links::default();
        links.measured(InstanceId(1), &[measured(1, 1, 2), measured(2, 1, 8)], NOW);
        links.measured(InstanceId(2), &[measured(1, 1, 4)], NOW);
        assert_eq!((rate(&links, 1, 1, NOW), rate(&links, 2, 1, NOW)), (Some(3), Some(8)));
        assert_eq!(rate(&links, 3, 1, NOW), None);
        links.forget(InstanceId(1));
        assert_eq!((rate(&links, 1, 1, NOW), rate(&links, 2, 1, NOW)), (Some(4), None));
    }

    #[test]
    fn an_estimate_ends_with_the_epoch_it_was_made_under() {
        let mut links = Links::default();
        links.measured(InstanceId(1), &[measured(1, 2, 2)], NOW);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (Some(2), None));
        links.measured(InstanceId(1), &[measured(1, 3, 6)], NOW);
        links.measured(InstanceId(1), &[measured(1, 2, 1)], NOW);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (None, Some(6)));
    }

    #[test]
    fn what_is_old_does_not_count_and_is_forgotten() {
        let mut links = Links::default();
        links.measured(InstanceId(1), &[measured(1, 1, 2)], NOW);
        let later = NOW.after(kv_core::schedule::LINK_AGED_AFTER);
        assert_eq!(rate(&links, 1, 1, later), None);
        links.forget_aged(later);
        assert!(links.pairs.is_empty());
    }

    #[test]
    fn pairs_are_bounded_and_aged_ones_make_room() {
        let mut links = Links::default();
        let all: Vec<_> = (0..70_000).map(|node| measured(node, 1, 1)).collect();
        links.measured(InstanceId(1), &all, NOW);
        assert_eq!((links.pairs.len(), rate(&links, 69_999, 1, NOW)), (PAIRS_MAX, None));
        let later = NOW.after(kv_core::schedule::LINK_AGED_AFTER);
        links.forget_aged(later);
        links.measured(InstanceId(1), &all[69_999..], later);
        assert_eq!((links.pairs.len(), rate(&links, 69_999, 1, later)), (1, Some(1)));
    }
}
