//! Link estimates from load reports: read rate of each instance from each node, by path and tier.
//!
//! An estimate is fenced twice, by the start of the measuring instance and by the epoch of the
//! node, and it ages. Ephemeral: the next reports rebuild it. Not here: how samples become link
//! statistics, and pricing (`kv_core::schedule`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_core::id::{Epoch, InstanceId, NodeId, Timestamp};
use kv_core::schedule::{
    LINK_AGED_AFTER, LinkEstimate, LinkKey, LinkPath, LinkSample, LinkSpeeds, PathSpeed,
};

/// Samples in one report: one per node that an instance reads from in a fifth of a second.
pub(crate) const SAMPLES_MAX: usize = 256;

/// Limit on estimates, 14 MiB with their keys; at the limit new ones are left out until others age.
const ESTIMATES_MAX: usize = 131_072;

/// Limit on known paths of instances to nodes, 2 MiB, for the same reason.
const PATHS_MAX: usize = 65_536;

/// Limits per instance on nodes and on estimate keys: as many as a client keeps, and twice that for
/// unexpired estimates. A report walks the nodes twice, and a restart or departure walks the keys;
/// routing waits meanwhile, so both must stay below a millisecond.
const NODES_OF_INSTANCE_MAX: usize = 1024;
const ESTIMATES_OF_INSTANCE_MAX: usize = 2048;

/// Measurement of one link since the instance's last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkMeasurement {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) sample: LinkSample,
    pub(crate) key: LinkKey,
}

/// Recent read rate of a node under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkRate {
    pub(crate) node: NodeId,
    /// Whether the readers are instances that use it as their own node.
    pub(crate) is_own: bool,
    pub(crate) key: LinkKey,
    pub(crate) stats: PathSpeed,
}

/// Measured link statistics of a node, as decisions use them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeLinkStats {
    /// From instances elsewhere.
    pub(crate) remote: Option<Arc<LinkSpeeds>>,
    /// From instances that use it as their own node.
    pub(crate) local: Option<Arc<LinkSpeeds>>,
}

/// Separately estimated part of one node and instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EstimateKey {
    is_own: bool,
    key: LinkKey,
}

/// An estimate under one epoch of the node.
#[derive(Clone, Copy, Debug)]
struct EpochEstimate {
    epoch: Epoch,
    estimate: LinkEstimate,
}

/// Estimates by node and instance, and the path used last.
#[derive(Default)]
pub(crate) struct LinkTable {
    estimates: BTreeMap<(NodeId, InstanceId, EstimateKey), EpochEstimate>,
    paths: BTreeMap<(InstanceId, NodeId), (LinkPath, Timestamp)>,
    /// Estimate keys of each instance, so that none walks those of others.
    keys: BTreeMap<InstanceId, BTreeSet<(NodeId, EstimateKey)>>,
}

impl LinkTable {
    /// Records an instance's measurements; `own` is its own node. Aged entries are removed by
    /// [`LinkTable::forget_aged`] and not here, since routing waits meanwhile.
    pub(crate) fn record(
        &mut self,
        instance: InstanceId,
        own: Option<NodeId>,
        all: &[LinkMeasurement],
        now: Timestamp,
    ) {
        // Counted once per report, since it walks all nodes.
        let mut nodes = self.nodes_of(instance);
        for LinkMeasurement { node, epoch, sample, key } in all {
            let is_own = own == Some(*node);
            self.add_sample(*node, instance, EstimateKey { is_own, key: *key }, *epoch, sample, now);
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

    /// Number of nodes with a known path from an instance.
    fn nodes_of(&self, instance: InstanceId) -> usize {
        self.paths.range((instance, NodeId(0))..=(instance, NodeId(u32::MAX))).count()
    }

    fn add_sample(
        &mut self,
        node: NodeId,
        instance: InstanceId,
        key: EstimateKey,
        epoch: Epoch,
        sample: &LinkSample,
        now: Timestamp,
    ) {
        let at = (node, instance, key);
        if !self.estimates.contains_key(&at) {
            let keys = self.keys.get(&instance).map_or(0, BTreeSet::len);
            if self.estimates.len() >= ESTIMATES_MAX || keys >= ESTIMATES_OF_INSTANCE_MAX {
                return;
            }
            self.keys.entry(instance).or_default().insert((node, key));
        }
        let known = &mut self.estimates;
        let is_full = EpochEstimate { epoch, estimate: LinkEstimate::default() };
        let known = known.entry(at).or_insert(is_full);
        if known.epoch < epoch {
            *known = is_full;
        }
        if known.epoch == epoch {
            known.estimate.add(sample, now);
        }
    }

    /// Forgets an instance's measurements after its restart or departure.
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

    /// Forgets aged estimates and paths.
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

    /// The instance's last path to each node that it read from recently.
    pub(crate) fn paths(&self, instance: InstanceId, now: Timestamp) -> Vec<(NodeId, LinkPath)> {
        let of_instance = self.paths.range((instance, NodeId(0))..=(instance, NodeId(u32::MAX)));
        let fresh = of_instance.filter(|(_, (_, taken))| now.since(*taken) < LINK_AGED_AFTER);
        fresh.map(|((_, node), (path, _))| (*node, *path)).collect()
    }

    /// Statistics of reads from a node under this epoch, over all recent measurements.
    pub(crate) fn node_stats(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> NodeLinkStats {
        let first = (node, InstanceId(0), EstimateKey { is_own: false, key: LinkKey::default() });
        let of_node = self.estimates.range(first..).take_while(|((of, ..), _)| *of == node);
        let counted = of_node.filter(|(_, known)| known.epoch == epoch && !known.estimate.is_aged(now));
        let (mut remote_read, mut near) = (Vec::new(), Vec::new());
        for ((_, _, of), known) in counted {
            let side = if of.is_own { &mut near } else { &mut remote_read };
            side.push((of.key, known.estimate));
        }
        let stats = |all: Vec<_>| {
            let stats = LinkSpeeds::of(all, now);
            (!stats.is_empty()).then(|| Arc::new(stats))
        };
        NodeLinkStats { remote: stats(remote_read), local: stats(near) }
    }

    /// Recent rates of each live node under its epoch. Reports may name any node and epoch; others
    /// than live ones are left out.
    pub(crate) fn rates(&self, live: impl Fn(NodeId) -> Option<Epoch>, now: Timestamp) -> Vec<LinkRate> {
        let mut sums: BTreeMap<(NodeId, EstimateKey), LinkEstimate> = BTreeMap::new();
        for ((node, _, of), EpochEstimate { epoch, estimate }) in &self.estimates {
            if live(*node) == Some(*epoch) && !estimate.is_aged(now) {
                let sum = sums.entry((*node, *of)).or_default();
                *sum = sum.merged_with(estimate);
            }
        }
        let rate = |((node, EstimateKey { is_own, key }), sum): ((NodeId, EstimateKey), LinkEstimate)| {
            Some(LinkRate { node, is_own, key, stats: sum.speed(now)? })
        };
        sums.into_iter().filter_map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::id::Tier;
    use kv_core::schedule::{HardwareProfile, Price, PriceBasis, ReadPath};

    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const QUIC: Option<LinkPath> = Some(LinkPath::Quic);
    const TCP: Option<LinkPath> = Some(LinkPath::Tcp);

    fn measurement(node: u32, epoch: u64, gigabytes_per_s: u64) -> LinkMeasurement {
        let sample = LinkSample {
            fetches: 1,
            latency: Duration::from_micros(100),
            bytes: gigabytes_per_s * 100_000_000,
            stream: Duration::from_millis(100),
        };
        LinkMeasurement { node: NodeId(node), epoch: Epoch(epoch), sample, key: LinkKey::default() }
    }

    fn over(path: Option<LinkPath>, tier: Tier, measured: LinkMeasurement) -> LinkMeasurement {
        LinkMeasurement { key: LinkKey { path, tier: Some(tier) }, ..measured }
    }

    fn record(links: &mut LinkTable, instance: u32, all: &[LinkMeasurement]) {
        links.record(InstanceId(instance), None, all, NOW);
    }

    /// Remote price of a tier over a path, in gigabytes per second, and its source.
    fn price(stats: &NodeLinkStats, path: Option<LinkPath>, tier: Tier) -> (u64, PriceBasis) {
        let reader = ReadPath { is_local: false, path };
        let profile = HardwareProfile::by_name("h100-8b").unwrap_or_default();
        let stats = stats.remote.as_deref().copied().unwrap_or_default();
        let Price { speed: lane, basis: measure } = stats.price(tier, reader, &profile);
        (lane.bytes_per_s / 1_000_000_000, measure)
    }

    fn rate(links: &LinkTable, node: u32, epoch: u64, now: Timestamp) -> Option<u64> {
        let (rate, measure) = price(&links.node_stats(NodeId(node), Epoch(epoch), now), None, Tier::Dram);
        (measure != PriceBasis::Profile).then_some(rate)
    }

    #[test]
    fn node_rates_are_averaged_over_readers() {
        let mut links = LinkTable::default();
        record(&mut links, 1, &[measurement(1, 1, 2), measurement(2, 1, 8)]);
        record(&mut links, 2, &[measurement(1, 1, 4)]);
        assert_eq!((rate(&links, 1, 1, NOW), rate(&links, 2, 1, NOW)), (Some(3), Some(8)));
        assert_eq!(rate(&links, 3, 1, NOW), None);
        links.forget(InstanceId(1));
        assert_eq!((rate(&links, 1, 1, NOW), rate(&links, 2, 1, NOW)), (Some(4), None));
    }

    #[test]
    fn exact_keys_take_precedence_over_coarser_ones() {
        let mut links = LinkTable::default();
        let (dram, ssd) =
            (over(TCP, Tier::Dram, measurement(1, 1, 8)), over(QUIC, Tier::Ssd, measurement(1, 1, 2)));
        // An older instance reports neither path nor tier.
        record(&mut links, 1, &[dram, ssd]);
        record(&mut links, 2, &[measurement(1, 1, 5)]);
        let of =
            |links: &LinkTable, path, tier| price(&links.node_stats(NodeId(1), Epoch(1), NOW), path, tier);
        assert_eq!(of(&links, TCP, Tier::Dram), (8, PriceBasis::TierOverPath));
        assert_eq!(of(&links, QUIC, Tier::Dram), (8, PriceBasis::Tier), "no read of memory over QUIC");
        assert_eq!(of(&links, QUIC, Tier::Ssd), (2, PriceBasis::TierOverPath));
        record(&mut links, 2, &[over(QUIC, Tier::Dram, measurement(1, 1, 4))]);
        assert_eq!(of(&links, QUIC, Tier::Dram), (4, PriceBasis::TierOverPath));
        assert_eq!(of(&links, TCP, Tier::Dram), (8, PriceBasis::TierOverPath), "paths are independent");
        assert_eq!(of(&links, None, Tier::Dram), (6, PriceBasis::Tier), "over both paths");
        assert_eq!(links.node_stats(NodeId(1), Epoch(2), NOW), NodeLinkStats::default(), "another epoch");
    }

    #[test]
    fn local_rates_are_separate_and_paths_are_the_latest() {
        let mut links = LinkTable::default();
        let (quic, tcp) =
            (over(QUIC, Tier::Dram, measurement(1, 1, 1)), over(TCP, Tier::Dram, measurement(2, 1, 2)));
        links.record(InstanceId(1), Some(NodeId(1)), &[quic, tcp, measurement(3, 1, 1)], NOW);
        assert!(links.node_stats(NodeId(1), Epoch(1), NOW).local.is_some());
        assert_eq!(links.node_stats(NodeId(1), Epoch(1), NOW).remote, None);
        assert_eq!(links.node_stats(NodeId(2), Epoch(1), NOW).local, None);
        let later = NOW.after(LINK_AGED_AFTER / 2);
        let moved = over(TCP, Tier::Dram, measurement(1, 1, 1));
        links.record(InstanceId(1), Some(NodeId(1)), &[moved], later);
        let paths = |links: &LinkTable, now| links.paths(InstanceId(1), now);
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
    fn rates_list_every_key_of_live_nodes() {
        let mut links = LinkTable::default();
        let all = [
            over(TCP, Tier::Dram, measurement(1, 1, 8)),
            over(QUIC, Tier::Ssd, measurement(1, 1, 2)),
            over(TCP, Tier::Dram, measurement(77, 1, 1)),
        ];
        record(&mut links, 1, &all);
        record(&mut links, 2, &[over(TCP, Tier::Dram, measurement(1, 1, 4)), measurement(1, 1, 5)]);
        links.record(InstanceId(3), Some(NodeId(1)), &[over(TCP, Tier::Dram, measurement(1, 1, 9))], NOW);
        let shown = |links: &LinkTable, epoch, now| {
            let live = |node| (node == NodeId(1)).then_some(Epoch(epoch));
            let rate = |rate: LinkRate| (rate.is_own, rate.key.path, rate.key.tier, rate.stats.bytes_per_s);
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
        assert_eq!(shown(&links, u64::MAX, NOW), [], "an unused epoch");
        assert_eq!(shown(&links, 1, NOW.after(LINK_AGED_AFTER)), []);
    }

    #[test]
    fn estimates_and_absurd_samples_are_bounded() {
        let mut links = LinkTable::default();
        let of = |node| over(QUIC, Tier::Dram, measurement(node, 1, 1));
        let all: Vec<_> = (0..200_000).map(of).collect();
        for (instance, some) in (1..).zip(all.chunks(SAMPLES_MAX)) {
            record(&mut links, instance, some);
        }
        assert_eq!((links.estimates.len(), links.paths.len()), (ESTIMATES_MAX, PATHS_MAX));
        assert_eq!(rate(&links, 199_999, 1, NOW), None);
        let later = NOW.after(LINK_AGED_AFTER);
        links.forget_aged(later);
        links.record(InstanceId(1), None, &all[199_999..], later);
        assert_eq!((links.estimates.len(), rate(&links, 199_999, 1, later)), (1, Some(1)));
        let mut links = LinkTable::default();
        let absurd =
            LinkSample { fetches: u32::MAX, latency: Duration::MAX, bytes: u64::MAX, stream: Duration::MAX };
        let honest = over(TCP, Tier::Dram, measurement(1, 1, 4));
        record(&mut links, 1, &[LinkMeasurement { sample: absurd, ..honest }]);
        record(&mut links, 2, &vec![honest; 40]);
        let (rate, measure) = price(&links.node_stats(NodeId(1), Epoch(1), NOW), TCP, Tier::Dram);
        assert!((1..=800).contains(&rate) && measure == PriceBasis::TierOverPath, "{rate}");
    }

    #[test]
    fn one_instance_has_a_limited_share_of_the_table() {
        let mut links = LinkTable::default();
        let of = |node| over(QUIC, Tier::Dram, measurement(node, 1, 1));
        record(&mut links, 2, &[of(5)]);
        for first in (0..100_000).step_by(SAMPLES_MAX) {
            let some: Vec<_> = (first..first + SAMPLES_MAX as u32).map(of).collect();
            record(&mut links, 1, &some);
        }
        let kept = (links.estimates.len() - 1, links.paths.len() - 1);
        assert_eq!(kept, (ESTIMATES_OF_INSTANCE_MAX, NODES_OF_INSTANCE_MAX));
        assert_eq!(
            links.paths(InstanceId(1), NOW).len(),
            NODES_OF_INSTANCE_MAX,
            "every node that a report walks"
        );
        record(&mut links, 3, &[of(99_999)]);
        assert_eq!(rate(&links, 99_999, 1, NOW), Some(1), "other instances keep their share");
        links.forget(InstanceId(1));
        assert_eq!((links.estimates.len(), links.paths.len(), links.keys.len()), (2, 2, 2));
        record(&mut links, 1, &[of(5)]);
        assert_eq!(links.paths(InstanceId(1), NOW).len(), 1, "the instance starts over");
        // Also within one report, with each node counted once.
        let all: Vec<_> = (0..2_000).flat_map(|node| [of(node), of(node)]).collect();
        record(&mut links, 1, &all[..2_000]);
        assert_eq!(links.paths(InstanceId(1), NOW).len(), 1_000);
        record(&mut links, 1, &all);
        assert_eq!(links.paths(InstanceId(1), NOW).len(), NODES_OF_INSTANCE_MAX);
        links.forget_aged(NOW.after(LINK_AGED_AFTER));
        assert!(links.estimates.is_empty() && links.paths.is_empty() && links.keys.is_empty());
    }

    #[test]
    fn estimates_end_with_their_epoch() {
        let mut links = LinkTable::default();
        record(&mut links, 1, &[measurement(1, 2, 2)]);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (Some(2), None));
        record(&mut links, 1, &[measurement(1, 3, 6)]);
        record(&mut links, 1, &[measurement(1, 2, 1)]);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (None, Some(6)));
        // The node restarted, and one of two instances has not noticed.
        record(&mut links, 2, &[measurement(1, 2, 1)]);
        assert_eq!((rate(&links, 1, 2, NOW), rate(&links, 1, 3, NOW)), (Some(1), Some(6)));
    }

    #[test]
    fn aged_estimates_are_forgotten() {
        let mut links = LinkTable::default();
        record(&mut links, 1, &[measurement(1, 1, 2)]);
        let later = NOW.after(LINK_AGED_AFTER);
        assert_eq!(rate(&links, 1, 1, later), None);
        links.forget_aged(later);
        assert!(links.estimates.is_empty());
    }
}
