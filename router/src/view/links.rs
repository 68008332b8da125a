//! Link estimates: how fast each instance has been reading from each node, out of its load reports.
//!
//! An estimate is fenced twice: by the start of the instance that measured and by the epoch of the node it measured;
//! and it ages. Soft as load is: the next reports bring it back. Each sample counts for the link; one whose blocks all came
//! out of one tier counts for that tier too, and one that says its path for that. Not here: how samples become a lane, and
//! what is priced by it (`kv_core::schedule`).

use std::collections::BTreeMap;

use kv_core::id::{Epoch, InstanceId, NodeId, Tier, Timestamp};
use kv_core::schedule::{Lane, LinkEstimate, LinkSample};

/// Samples in one report: one per node that an instance reads from in a fifth of a second.
pub(crate) const SAMPLES_MAX: usize = 256;

/// Pairs known at once; above it new ones are left out until others have aged: 65,536 of 64 bytes are 4 MiB.
const PAIRS_MAX: usize = 65_536;

/// Tiers and paths of pairs known at once, for the same reason: 131,072 of 80 bytes are 10 MiB.
const DETAILS_MAX: usize = 131_072;

/// A kind of path between instance and node, as reports number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LinkPath {
    SharedMemory,
    Rdma,
    Quic,
    Tcp,
}

impl LinkPath {
    const ALL: [LinkPath; 4] = [LinkPath::SharedMemory, LinkPath::Rdma, LinkPath::Quic, LinkPath::Tcp];

    /// The kind of this number, from 1; nothing for one that is not known here.
    pub(crate) fn from_number(number: u32) -> Option<LinkPath> {
        LinkPath::ALL.get(usize::try_from(number.checked_sub(1)?).ok()?).copied()
    }

    fn name(self) -> &'static str {
        ["shm", "rdma", "quic", "tcp"][self as usize]
    }
}

/// A part of what goes over a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Detail {
    Tier(Tier),
    Path(LinkPath),
}

impl Detail {
    const FIRST: Detail = Detail::Tier(Tier::Ssd);
    const LAST: Detail = Detail::Path(LinkPath::Tcp);

    fn name(self) -> &'static str {
        match self {
            Detail::Tier(tier) => tier.name(),
            Detail::Path(path) => path.name(),
        }
    }
}

/// How fast instances read from a node of late, out of one tier or over one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkRate {
    pub(crate) node: NodeId,
    /// Name of the tier or path.
    pub(crate) of: &'static str,
    pub(crate) bytes_per_s: u64,
}

/// What an instance measured of a node since its last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) sample: LinkSample,
    pub(crate) path: Option<LinkPath>,
    /// Out of which all blocks came.
    pub(crate) tier: Option<Tier>,
}

/// Estimates by node and instance.
#[derive(Default)]
pub(crate) struct Links {
    pairs: BTreeMap<(NodeId, InstanceId), Fenced>,
    details: BTreeMap<(NodeId, InstanceId, Detail), Fenced>,
}

/// An estimate under an epoch of the node.
type Fenced = (Epoch, LinkEstimate);

/// Adds a sample to the estimate of this key. Room is made by [`Links::forget_aged`], not here: routes wait meanwhile.
fn add<K: Ord>(
    known: &mut BTreeMap<K, Fenced>,
    (key, max): (K, usize),
    Measured { epoch, sample, .. }: &Measured,
    now: Timestamp,
) {
    if known.len() >= max && !known.contains_key(&key) {
        return;
    }
    let known = known.entry(key).or_insert((*epoch, LinkEstimate::default()));
    if known.0 < *epoch {
        *known = (*epoch, LinkEstimate::default());
    }
    if known.0 == *epoch {
        known.1.add(sample, now);
    }
}

impl Links {
    /// Takes what an instance measured.
    pub(crate) fn measured(&mut self, instance: InstanceId, all: &[Measured], now: Timestamp) {
        for one in all {
            add(&mut self.pairs, ((one.node, instance), PAIRS_MAX), one, now);
            let details = [one.tier.map(Detail::Tier), one.path.map(Detail::Path)];
            for detail in details.into_iter().flatten() {
                add(&mut self.details, ((one.node, instance, detail), DETAILS_MAX), one, now);
            }
        }
    }

    /// Forgets what an instance measured: it has started anew, or left.
    pub(crate) fn forget(&mut self, instance: InstanceId) {
        self.pairs.retain(|(_, by), _| *by != instance);
        self.details.retain(|(_, by, _), _| *by != instance);
    }

    /// Forgets what is too old to count.
    pub(crate) fn forget_aged(&mut self, now: Timestamp) {
        self.pairs.retain(|_, (_, estimate)| !estimate.is_aged(now));
        self.details.retain(|_, (_, estimate)| !estimate.is_aged(now));
    }

    /// The lanes out of the tiers of a node under this epoch, in the order of [`Tier::ALL`]: medium and link together.
    pub(crate) fn of_tiers(
        &self,
        node: NodeId,
        epoch: Epoch,
        now: Timestamp,
    ) -> [Option<Lane>; Tier::ALL.len()] {
        let mut sums = [None::<LinkEstimate>; Tier::ALL.len()];
        let ends = [(InstanceId(0), Detail::FIRST), (InstanceId(u32::MAX), Detail::LAST)];
        let [first, last] = ends.map(|(instance, detail)| (node, instance, detail));
        for ((_, _, detail), (of, estimate)) in self.details.range(first..=last) {
            let Detail::Tier(tier) = *detail else { continue };
            if *of == epoch && !estimate.is_aged(now) {
                let sum = &mut sums[tier as usize];
                *sum = Some(sum.map_or(*estimate, |sum| sum.with(estimate)));
            }
        }
        sums.map(|sum| sum?.lane(now))
    }

    /// How fast each node that is `live` was read from of late under its epoch, by tier and by path. Whoever reports can name
    /// any node and epoch; these are not told of.
    pub(crate) fn rates(&self, live: impl Fn(NodeId) -> Option<Epoch>, now: Timestamp) -> Vec<LinkRate> {
        let mut sums: BTreeMap<(NodeId, Detail), LinkEstimate> = BTreeMap::new();
        for ((node, _, detail), (epoch, estimate)) in &self.details {
            if live(*node) == Some(*epoch) && !estimate.is_aged(now) {
                let sum = sums.entry((*node, *detail)).or_default();
                *sum = sum.with(estimate);
            }
        }
        let rate = |((node, detail), sum): ((NodeId, Detail), LinkEstimate)| {
            Some(LinkRate { node, of: detail.name(), bytes_per_s: sum.lane(now)?.bytes_per_s })
        };
        sums.into_iter().filter_map(rate).collect()
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
        Measured { node: NodeId(node), epoch: Epoch(epoch), sample, path: None, tier: None }
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

    fn tiers(links: &Links, node: u32, epoch: u64, now: Timestamp) -> [Option<u64>; 3] {
        let lanes = links.of_tiers(NodeId(node), Epoch(epoch), now);
        lanes.map(|lane| lane.map(|lane| lane.bytes_per_s / 1_000_000_000))
    }

    fn out_of(tier: Tier, path: LinkPath, measured: Measured) -> Measured {
        Measured { tier: Some(tier), path: Some(path), ..measured }
    }

    #[test]
    fn a_tier_is_as_fast_as_fetches_out_of_it_alone_say_and_all_count_for_the_link() {
        let mut links = Links::default();
        let fast = out_of(Tier::Dram, LinkPath::Tcp, measured(1, 1, 8));
        let slow = out_of(Tier::Ssd, LinkPath::Quic, measured(1, 1, 2));
        // An older instance says neither.
        links.measured(InstanceId(1), &[fast, slow], NOW);
        links.measured(InstanceId(2), &[measured(1, 1, 5)], NOW);
        assert_eq!((rate(&links, 1, 1, NOW), tiers(&links, 1, 1, NOW)), (Some(5), [Some(2), Some(8), None]));
        assert_eq!(tiers(&links, 2, 1, NOW), [None; 3]);
        links.measured(InstanceId(2), &[out_of(Tier::Dram, LinkPath::Tcp, measured(1, 1, 4))], NOW);
        assert_eq!(tiers(&links, 1, 1, NOW), [Some(2), Some(6), None], "of both");
        let shown = |links: &Links, epoch| {
            let live = |node| (node == NodeId(1)).then_some(Epoch(epoch));
            links
                .rates(live, NOW)
                .iter()
                .map(|rate| (rate.of, rate.bytes_per_s / 1_000_000_000))
                .collect::<Vec<_>>()
        };
        links.measured(InstanceId(9), &[out_of(Tier::Dram, LinkPath::Tcp, measured(77, 1, 1))], NOW);
        let rates = shown(&links, 1);
        assert_eq!(rates, [("ssd", 2), ("dram", 6), ("quic", 2), ("tcp", 6)]);
        // A restarted node, of which two instances did not hear yet, and a restarted instance.
        links.measured(InstanceId(0), &[out_of(Tier::Dram, LinkPath::Tcp, measured(1, 1, 4))], NOW);
        links.measured(InstanceId(1), &[out_of(Tier::Dram, LinkPath::Tcp, measured(1, 2, 1))], NOW);
        assert_eq!((tiers(&links, 1, 1, NOW)[1], tiers(&links, 1, 2, NOW)[1]), (Some(4), Some(1)));
        assert_eq!(shown(&links, 2), [("dram", 1), ("tcp", 1)]);
        assert_eq!(shown(&links, u64::MAX), [], "an epoch that nobody has");
        links.forget(InstanceId(1));
        assert_eq!(tiers(&links, 1, 2, NOW), [None; 3]);
        let later = NOW.after(kv_core::schedule::LINK_AGED_AFTER);
        assert_eq!((tiers(&links, 1, 1, later), links.rates(|_| Some(Epoch(1)), later)), ([None; 3], vec![]));
        links.forget_aged(later);
        assert!(links.details.is_empty());
    }

    #[test]
    fn tiers_and_paths_are_bounded_and_so_is_what_an_absurd_sample_says() {
        let mut links = Links::default();
        let of = |node| out_of(Tier::Ssd, LinkPath::SharedMemory, measured(node, 1, 1));
        let all: Vec<_> = (0..70_000).map(of).collect();
        links.measured(InstanceId(1), &all, NOW);
        assert_eq!((links.pairs.len(), links.details.len()), (PAIRS_MAX, DETAILS_MAX));
        let mut links = Links::default();
        let absurd =
            LinkSample { fetches: u32::MAX, latency: Duration::MAX, bytes: u64::MAX, stream: Duration::MAX };
        let honest = out_of(Tier::Dram, LinkPath::Tcp, measured(1, 1, 4));
        links.measured(InstanceId(1), &[Measured { sample: absurd, ..honest }], NOW);
        links.measured(InstanceId(2), &vec![honest; 40], NOW);
        let lane = links.of_tiers(NodeId(1), Epoch(1), NOW)[1];
        let lane = lane.unwrap_or(Lane { latency_ns: 0, bytes_per_s: 0 });
        assert!((1_000_000_000..=800_000_000_000).contains(&lane.bytes_per_s), "{lane:?}");
        assert!(lane.latency_ns <= 10_000_000_000, "{lane:?}");
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
