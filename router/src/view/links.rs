//! Link estimates: how fast each instance has been reading from each node, by path and tier, out of its load reports.
//!
//! An estimate is fenced twice: by the start of the instance that measured and by the epoch of the node it measured;
//! and it ages. Soft as load is: the next reports bring it back. Not here: how samples become a lane, and what is priced by
//! it (`kv_core::schedule`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_core::id::{Epoch, InstanceId, NodeId, Timestamp};
use kv_core::schedule::{LINK_AGED_AFTER, Lane, LinkEstimate, LinkKey, LinkLanes, LinkPath, LinkSample};

/// Samples in one report: one per node that an instance reads from in a fifth of a second.
pub(crate) const SAMPLES_MAX: usize = 256;

/// Estimates at once; above it new ones are left out until others have aged: 131,072 of 96 bytes, and 12 of their keys, are
/// 14 MiB.
const ESTIMATES_MAX: usize = 131_072;

/// Paths of instances to nodes known at once, for the same reason: 65,536 of 32 bytes are 2 MiB.
const PATHS_MAX: usize = 65_536;

/// Nodes of which one instance is known to have read, and keys by which: as many as a client keeps itself, and twice that for what has
/// not aged yet. A report looks at all of the first once with its samples and once for the paths, and at the second when its instance starts
/// anew or leaves: some 0.1 and 0.5 ms, while routes wait.
const NODES_OF_INSTANCE_MAX: usize = 1024;
const ESTIMATES_OF_INSTANCE_MAX: usize = 2048;

/// What an instance measured of a node since its last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) sample: LinkSample,
    pub(crate) key: LinkKey,
}

/// How fast a node was read from of late, by one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkRate {
    pub(crate) node: NodeId,
    /// By instances whose own node it is.
    pub(crate) is_own: bool,
    pub(crate) key: LinkKey,
    pub(crate) lane: Lane,
}

/// What instances measured of a node, as decisions price by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeLanes {
    /// Those elsewhere.
    pub(crate) afar: Option<Arc<LinkLanes>>,
    /// Those whose own node it is.
    pub(crate) near: Option<Arc<LinkLanes>>,
}

/// What is estimated by itself, of one node and instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Of {
    is_own: bool,
    key: LinkKey,
}

/// An estimate under an epoch of the node.
#[derive(Clone, Copy, Debug)]
struct Fenced {
    epoch: Epoch,
    estimate: LinkEstimate,
}

/// Estimates by node and instance, and the path that was taken last.
#[derive(Default)]
pub(crate) struct Links {
    estimates: BTreeMap<(NodeId, InstanceId, Of), Fenced>,
    paths: BTreeMap<(InstanceId, NodeId), (LinkPath, Timestamp)>,
    /// Keys of the estimates of each instance, so that none looks at those of others.
    keys: BTreeMap<InstanceId, BTreeSet<(NodeId, Of)>>,
}

impl Links {
    /// Takes what an instance measured, whose own node may be among those. Room is made by [`Links::forget_aged`], not here:
    /// routes wait meanwhile.
    pub(crate) fn measured(
        &mut self,
        (instance, own): (InstanceId, Option<NodeId>),
        all: &[Measured],
        now: Timestamp,
    ) {
        // Once for all samples: it looks at every one of them.
        let mut nodes = self.nodes_of(instance);
        for Measured { node, epoch, sample, key } in all {
            let is_own = own == Some(*node);
            self.add((*node, instance, Of { is_own, key: *key }), *epoch, sample, now);
            let at = (instance, *node);
            let Some(path) = key.path else { continue };
            let is_room = self.paths.len() < PATHS_MAX && nodes < NODES_OF_INSTANCE_MAX;
            if let Some(known) = self.paths.get_mut(&at) {
                *known = (path, now);
            } else if is_room {
                self.paths.insert(at, (path, now));
                nodes += 1;
            }
        }
    }

    /// Nodes that an instance is known to take a path to.
    fn nodes_of(&self, instance: InstanceId) -> usize {
        self.paths.range((instance, NodeId(0))..=(instance, NodeId(u32::MAX))).count()
    }

    fn add(&mut self, at: (NodeId, InstanceId, Of), epoch: Epoch, sample: &LinkSample, now: Timestamp) {
        let (node, instance, of) = at;
        if !self.estimates.contains_key(&at) {
            let keys = self.keys.get(&instance).map_or(0, BTreeSet::len);
            if self.estimates.len() >= ESTIMATES_MAX || keys >= ESTIMATES_OF_INSTANCE_MAX {
                return;
            }
            self.keys.entry(instance).or_default().insert((node, of));
        }
        let known = &mut self.estimates;
        let anew = Fenced { epoch, estimate: LinkEstimate::default() };
        let known = known.entry(at).or_insert(anew);
        if known.epoch < epoch {
            *known = anew;
        }
        if known.epoch == epoch {
            known.estimate.add(sample, now);
        }
    }

    /// Forgets what an instance measured: it has started anew, or left.
    pub(crate) fn forget(&mut self, instance: InstanceId) {
        for (node, of) in self.keys.remove(&instance).unwrap_or_default() {
            self.estimates.remove(&(node, instance, of));
        }
        let of_instance = self.paths.range((instance, NodeId(0))..=(instance, NodeId(u32::MAX)));
        let nodes: Vec<NodeId> = of_instance.map(|((_, node), _)| *node).collect();
        for node in nodes {
            self.paths.remove(&(instance, node));
        }
    }

    /// Forgets what is too old to count.
    pub(crate) fn forget_aged(&mut self, now: Timestamp) {
        let keys = &mut self.keys;
        self.estimates.retain(|&(node, instance, of), known| {
            let is_aged = known.estimate.is_aged(now);
            if let Some(of_instance) = keys.get_mut(&instance).filter(|_| is_aged) {
                of_instance.remove(&(node, of));
            }
            !is_aged
        });
        keys.retain(|_, of_instance| !of_instance.is_empty());
        self.paths.retain(|_, (_, taken)| now.since(*taken) < LINK_AGED_AFTER);
    }

    /// The path that an instance took to each node it read from lately, the last one it told of.
    pub(crate) fn paths(&self, instance: InstanceId, now: Timestamp) -> Vec<(NodeId, LinkPath)> {
        let of_instance = self.paths.range((instance, NodeId(0))..=(instance, NodeId(u32::MAX)));
        let fresh = of_instance.filter(|(_, (_, taken))| now.since(*taken) < LINK_AGED_AFTER);
        fresh.map(|((_, node), (path, _))| (*node, *path)).collect()
    }

    /// The lanes out of a node under this epoch, over everything that any instance measured lately.
    pub(crate) fn of_node(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> NodeLanes {
        let first = (node, InstanceId(0), Of { is_own: false, key: LinkKey::default() });
        let of_node = self.estimates.range(first..).take_while(|((of, ..), _)| *of == node);
        let counted = of_node.filter(|(_, known)| known.epoch == epoch && !known.estimate.is_aged(now));
        let (mut afar, mut near) = (Vec::new(), Vec::new());
        for ((_, _, of), known) in counted {
            let side = if of.is_own { &mut near } else { &mut afar };
            side.push((of.key, known.estimate));
        }
        let lanes = |all: Vec<_>| {
            let lanes = LinkLanes::of(all, now);
            (!lanes.is_empty()).then(|| Arc::new(lanes))
        };
        NodeLanes { afar: lanes(afar), near: lanes(near) }
    }

    /// How fast each node that is `live` was read from of late under its epoch. Whoever reports can name any node and epoch;
    /// these are not told of.
    pub(crate) fn rates(&self, live: impl Fn(NodeId) -> Option<Epoch>, now: Timestamp) -> Vec<LinkRate> {
        let mut sums: BTreeMap<(NodeId, Of), LinkEstimate> = BTreeMap::new();
        for ((node, _, of), Fenced { epoch, estimate }) in &self.estimates {
            if live(*node) == Some(*epoch) && !estimate.is_aged(now) {
                let sum = sums.entry((*node, *of)).or_default();
                *sum = sum.with(estimate);
            }
        }
        let rate = |((node, Of { is_own, key }), sum): ((NodeId, Of), LinkEstimate)| {
            Some(LinkRate { node, is_own, key, lane: sum.lane(now)? })
        };
        sums.into_iter().filter_map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::id::Tier;
    use kv_core::schedule::{HardwareProfile, Measure, Price, Reader};

    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const QUIC: Option<LinkPath> = Some(LinkPath::Quic);
    const TCP: Option<LinkPath> = Some(LinkPath::Tcp);

    fn measured(node: u32, epoch: u64, gigabytes_per_s: u64) -> Measured {
        let sample = LinkSample {
            fetches: 1,
            latency: Duration::from_micros(100),
            bytes: gigabytes_per_s * 100_000_000,
            stream: Duration::from_millis(100),
        };
        Measured { node: NodeId(node), epoch: Epoch(epoch), sample, key: LinkKey::default() }
    }

    fn by(path: Option<LinkPath>, tier: Tier, measured: Measured) -> Measured {
        Measured { key: LinkKey { path, tier: Some(tier) }, ..measured }
    }

    fn told(links: &mut Links, instance: u32, all: &[Measured]) {
        links.measured((InstanceId(instance), None), all, NOW);
    }

    /// The price of a tier by a path from elsewhere, in gigabytes a second, and what it rests on.
    fn price(lanes: &NodeLanes, path: Option<LinkPath>, tier: Tier) -> (u64, Measure) {
        let reader = Reader { is_own: false, path };
        let profile = HardwareProfile::by_name("h100-8b").unwrap_or_default();
        let lanes = lanes.afar.as_deref().copied().unwrap_or_default();
        let Price { lane, measure } = lanes.price(tier, reader, &profile);
        (lane.bytes_per_s / 1_000_000_000, measure)
    }

    fn rate(links: &Links, node: u32, epoch: u64, now: Timestamp) -> Option<u64> {
        let (rate, measure) = price(&links.of_node(NodeId(node), Epoch(epoch), now), None, Tier::Dram);
        (measure != Measure::Profile).then_some(rate)
    }

    #[test]
    fn a_node_is_as_fast_as_those_who_read_from_it_say() {
        let mut links = Links::default();
        told(&mut links, 1, &[measured(1, 1, 2), measured(2, 1, 8)]);
        told(&mut links, 2, &[measured(1, 1, 4)]);
        assert_eq!((rate(&links, 1, 1, NOW), rate(&links, 2, 1, NOW)), (Some(3), Some(8)));
        assert_eq!(rate(&links, 3, 1, NOW), None);
        links.forget(InstanceId(1));
        assert_eq!((rate(&links, 1, 1, NOW), rate(&links, 2, 1, NOW)), (Some(4), None));
    }

    #[test]
    fn a_tier_over_a_path_is_as_fast_as_fetches_that_went_that_way_say_and_all_count_for_what_is_coarser() {
        let mut links = Links::default();
        let (dram, ssd) = (by(TCP, Tier::Dram, measured(1, 1, 8)), by(QUIC, Tier::Ssd, measured(1, 1, 2)));
        // An older instance says neither.
        told(&mut links, 1, &[dram, ssd]);
        told(&mut links, 2, &[measured(1, 1, 5)]);
        let of = |links: &Links, path, tier| price(&links.of_node(NodeId(1), Epoch(1), NOW), path, tier);
        assert_eq!(of(&links, TCP, Tier::Dram), (8, Measure::TierOverPath));
        assert_eq!(of(&links, QUIC, Tier::Dram), (8, Measure::Tier), "nobody read memory over QUIC");
        assert_eq!(of(&links, QUIC, Tier::Ssd), (2, Measure::TierOverPath));
        told(&mut links, 2, &[by(QUIC, Tier::Dram, measured(1, 1, 4))]);
        assert_eq!(of(&links, QUIC, Tier::Dram), (4, Measure::TierOverPath));
        assert_eq!(
            of(&links, TCP, Tier::Dram),
            (8, Measure::TierOverPath),
            "one path says nothing of another"
        );
        assert_eq!(of(&links, None, Tier::Dram), (6, Measure::Tier), "of both");
        assert_eq!(links.of_node(NodeId(1), Epoch(2), NOW), NodeLanes::default(), "of another epoch");
    }

    #[test]
    fn the_own_node_is_kept_apart_and_paths_are_the_last_ones() {
        let mut links = Links::default();
        let (quic, tcp) = (by(QUIC, Tier::Dram, measured(1, 1, 1)), by(TCP, Tier::Dram, measured(2, 1, 2)));
        links.measured((InstanceId(1), Some(NodeId(1))), &[quic, tcp, measured(3, 1, 1)], NOW);
        assert!(links.of_node(NodeId(1), Epoch(1), NOW).near.is_some());
        assert_eq!(links.of_node(NodeId(1), Epoch(1), NOW).afar, None);
        assert_eq!(links.of_node(NodeId(2), Epoch(1), NOW).near, None);
        let later = NOW.after(LINK_AGED_AFTER / 2);
        let moved = by(TCP, Tier::Dram, measured(1, 1, 1));
        links.measured((InstanceId(1), Some(NodeId(1))), &[moved], later);
        let paths = |links: &Links, now| links.paths(InstanceId(1), now);
        assert_eq!(paths(&links, later), [(NodeId(1), LinkPath::Tcp), (NodeId(2), LinkPath::Tcp)]);
        let later = NOW.after(LINK_AGED_AFTER);
        assert_eq!(paths(&links, later), [(NodeId(1), LinkPath::Tcp)]);
        assert_eq!((links.paths(InstanceId(2), NOW), links.paths.len()), (vec![], 2));
        links.forget_aged(later);
        assert_eq!((links.paths.len(), links.estimates.len()), (1, 1));
        links.forget(InstanceId(1));
        assert!(links.paths.is_empty() && links.estimates.is_empty());
    }

    #[test]
    fn rates_are_told_of_live_nodes_by_every_key() {
        let mut links = Links::default();
        let all = [
            by(TCP, Tier::Dram, measured(1, 1, 8)),
            by(QUIC, Tier::Ssd, measured(1, 1, 2)),
            by(TCP, Tier::Dram, measured(77, 1, 1)),
        ];
        told(&mut links, 1, &all);
        told(&mut links, 2, &[by(TCP, Tier::Dram, measured(1, 1, 4)), measured(1, 1, 5)]);
        links.measured((InstanceId(3), Some(NodeId(1))), &[by(TCP, Tier::Dram, measured(1, 1, 9))], NOW);
        let shown = |links: &Links, epoch, now| {
            let live = |node| (node == NodeId(1)).then_some(Epoch(epoch));
            let rate = |rate: LinkRate| (rate.is_own, rate.key.path, rate.key.tier, rate.lane.bytes_per_s);
            links.rates(live, now).into_iter().map(rate).collect::<Vec<_>>()
        };
        let (giga, dram, ssd) = (1_000_000_000, Some(Tier::Dram), Some(Tier::Ssd));
        let expected = [
            (false, None, None, 5 * giga),
            (false, QUIC, ssd, 2 * giga),
            (false, TCP, dram, 6 * giga),
            (true, TCP, dram, 9 * giga),
        ];
        assert_eq!(shown(&links, 1, NOW), expected);
        assert_eq!(shown(&links, u64::MAX, NOW), [], "an epoch that nobody has");
        assert_eq!(shown(&links, 1, NOW.after(LINK_AGED_AFTER)), []);
    }

    #[test]
    fn estimates_are_bounded_and_so_is_what_an_absurd_sample_says() {
        let mut links = Links::default();
        let of = |node| by(QUIC, Tier::Dram, measured(node, 1, 1));
        let all: Vec<_> = (0..200_000).map(of).collect();
        for (instance, some) in (1..).zip(all.chunks(SAMPLES_MAX)) {
            told(&mut links, instance, some);
        }
        assert_eq!((links.estimates.len(), links.paths.len()), (ESTIMATES_MAX, PATHS_MAX));
        assert_eq!(rate(&links, 199_999, 1, NOW), None);
        let later = NOW.after(LINK_AGED_AFTER);
        links.forget_aged(later);
        links.measured((InstanceId(1), None), &all[199_999..], later);
        assert_eq!((links.estimates.len(), rate(&links, 199_999, 1, later)), (1, Some(1)));
        let mut links = Links::default();
        let absurd =
            LinkSample { fetches: u32::MAX, latency: Duration::MAX, bytes: u64::MAX, stream: Duration::MAX };
        let honest = by(TCP, Tier::Dram, measured(1, 1, 4));
        told(&mut links, 1, &[Measured { sample: absurd, ..honest }]);
        told(&mut links, 2, &vec![honest; 40]);
        let (rate, measure) = price(&links.of_node(NodeId(1), Epoch(1), NOW), TCP, Tier::Dram);
        assert!((1..=800).contains(&rate) && measure == Measure::TierOverPath, "{rate}");
    }

    #[test]
    fn one_instance_takes_no_more_room_or_time_than_a_client_has_use_for() {
        let mut links = Links::default();
        let of = |node| by(QUIC, Tier::Dram, measured(node, 1, 1));
        told(&mut links, 2, &[of(5)]);
        for first in (0..100_000).step_by(SAMPLES_MAX) {
            let some: Vec<_> = (first..first + SAMPLES_MAX as u32).map(of).collect();
            told(&mut links, 1, &some);
        }
        let kept = (links.estimates.len() - 1, links.paths.len() - 1);
        assert_eq!(kept, (ESTIMATES_OF_INSTANCE_MAX, NODES_OF_INSTANCE_MAX));
        assert_eq!(
            links.paths(InstanceId(1), NOW).len(),
            NODES_OF_INSTANCE_MAX,
            "all that a report looks at"
        );
        told(&mut links, 3, &[of(99_999)]);
        assert_eq!(rate(&links, 99_999, 1, NOW), Some(1), "others have their room");
        links.forget(InstanceId(1));
        assert_eq!((links.estimates.len(), links.paths.len(), links.keys.len()), (2, 2, 2));
        told(&mut links, 1, &[of(5)]);
        assert_eq!(links.paths(InstanceId(1), NOW).len(), 1, "it begins anew");
        // Counted within a report too, each node once.
        let all: Vec<_> = (0..2_000).flat_map(|node| [of(node), of(node)]).collect();
        told(&mut links, 1, &all[..2_000]);
        assert_eq!(links.paths(InstanceId(1), NOW).len(), 1_000);
        told(&mut links, 1, &all);
        assert_eq!(links.paths(InstanceId(1), NOW).len(), NODES_OF_INSTANCE_MAX);
        links.forget_aged(NOW.after(LINK_AGED_AFTER));
        assert!(links.estimates.is_empty() && links.paths.is_empty() && links.keys.is_empty());
    }

    #[test]
    fn an_estimate_ends_with_the_epoch_it_was_made_under() {
        let mut links = Links::default();
        told(&mut links, 1, &[measured(1, 2, 2)]);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (Some(2), None));
        told(&mut links, 1, &[measured(1, 3, 6)]);
        told(&mut links, 1, &[measured(1, 2, 1)]);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (None, Some(6)));
        // A restarted node, of which one of two instances did not hear yet.
        told(&mut links, 2, &[measured(1, 2, 1)]);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (Some(1), Some(6)));
    }

    #[test]
    fn what_is_old_does_not_count_and_is_forgotten() {
        let mut links = Links::default();
        told(&mut links, 1, &[measured(1, 1, 2)]);
        let later = NOW.after(LINK_AGED_AFTER);
        assert_eq!(rate(&links, 1, 1, later), None);
        links.forget_aged(later);
        assert!(links.estimates.is_empty());
    }
}
