//! Measured link speeds of a node by path and tier, and the basis of a fetch price.
//!
//! The finest available measurement counts: of this tier over this path. With too few bytes there,
//! a coarser one counts, and the price says which. Shared memory stands apart: no other measurement
//! says how fast it is, and it says nothing about the network. Not here: how samples become a speed
//! (`link.rs`), and which instance takes which path (`fleet.rs`).

use std::cmp::Reverse;
use std::fmt;

use crate::id::{Tier, Timestamp};
use crate::schedule::predict::profile::{HardwareProfile, PathSpeed};
use crate::schedule::sources::link::LinkEstimate;

/// A kind of path between an instance and a node. The numbers are those of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum LinkPath {
    /// Shared memory of the same host.
    SharedMemory = 1,
    /// RDMA.
    Rdma = 2,
    /// QUIC.
    Quic = 3,
    /// TLS 1.3 over TCP.
    Tcp = 4,
}

impl LinkPath {
    /// Every kind, by number.
    pub const ALL: [LinkPath; 4] = [LinkPath::SharedMemory, LinkPath::Rdma, LinkPath::Quic, LinkPath::Tcp];

    /// The kind with this number; `None` if unknown.
    #[must_use]
    pub fn from_number(number: u32) -> Option<LinkPath> {
        LinkPath::ALL.into_iter().find(|path| *path as u32 == number)
    }

    /// Lower-case name as used in metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["shm", "rdma", "quic", "tcp"][self as usize - 1]
    }
}

/// Path and tier of a transfer, as far as known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkKey {
    /// The path.
    pub path: Option<LinkPath>,
    /// The tier of all its blocks; `None` for several tiers.
    pub tier: Option<Tier>,
}

/// Measured speeds of transfers from one node, if enough bytes exist: per tier and path, and for
/// coarser groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSpeeds {
    /// By path, then by tier. The last index of each stands for all together; for paths, all
    /// network paths.
    speeds: [[Option<PathSpeed>; Tier::ALL.len() + 1]; LinkPath::ALL.len() + 1],
}

/// What a price is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PriceBasis {
    /// A measurement of this tier over this path.
    TierOverPath,
    /// A measurement of this tier over any network path.
    Tier,
    /// Other measurements over this path; the tier is the profile's.
    Path,
    /// Other measurements of the node over the network; the tier is the profile's.
    Node,
    /// The profile alone.
    Profile,
}

impl fmt::Display for PriceBasis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PriceBasis::TierOverPath => "as measured of that tier over that path",
            PriceBasis::Tier => "as measured of that tier over any path",
            PriceBasis::Path => "by what else was measured over that path",
            PriceBasis::Node => "by what else was measured of that node",
            PriceBasis::Profile => "by the profile",
        })
    }
}

/// The speed that a fetch is priced with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    /// Medium and link together.
    pub speed: PathSpeed,
    /// Its basis.
    pub basis: PriceBasis,
}

/// How an instance reads from a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPath {
    /// Whether the node is on the instance's own host, with no network between.
    pub is_local: bool,
    /// The path, if known.
    pub path: Option<LinkPath>,
}

impl LinkSpeeds {
    /// The speeds of these estimates, each listed under its known path and tier.
    #[must_use]
    pub fn of(estimates: impl IntoIterator<Item = (LinkKey, LinkEstimate)>, now: Timestamp) -> LinkSpeeds {
        let mut sums: [[Option<LinkEstimate>; Tier::ALL.len() + 1]; LinkPath::ALL.len() + 1] =
            Default::default();
        for (key, estimate) in estimates {
            let (path, tier) = (path_index(key.path), tier_index(key.tier));
            // Each estimate counts once under its own key, and once in each coarser group.
            let any_path = (key.path != Some(LinkPath::SharedMemory)).then_some(path_index(None));
            let paths = [Some(path), any_path.filter(|any| *any != path)];
            let tiers = [Some(tier), Some(tier_index(None)).filter(|any| *any != tier)];
            for path in paths.into_iter().flatten() {
                for tier in tiers.into_iter().flatten() {
                    let sum = &mut sums[path][tier];
                    *sum = Some(sum.map_or(estimate, |sum| sum.merged_with(&estimate)));
                }
            }
        }
        LinkSpeeds { speeds: sums.map(|tiers| tiers.map(|sum| sum?.speed(now))) }
    }

    /// These speeds with one more.
    #[must_use]
    pub fn with_speed(mut self, key: LinkKey, lane: PathSpeed) -> LinkSpeeds {
        self.speeds[path_index(key.path)][tier_index(key.tier)] = Some(lane);
        self
    }

    /// Whether no speed was measured.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.speeds.iter().flatten().all(Option::is_none)
    }

    fn speed(&self, path: Option<LinkPath>, tier: Option<Tier>) -> Option<PathSpeed> {
        self.speeds[path_index(path)][tier_index(tier)]
    }

    /// The price of reading from this tier over this path. Without a measurement over the path, one
    /// over any network path counts. Without either, the profile's tier counts through the best
    /// measured link: that of faster tiers, else that of all together. A pool of all tiers counts
    /// only if no SSD was measured: a slow SSD says nothing about the node's memory.
    ///
    /// Measurements over other paths never make a faster path look slower than its profile.
    /// Otherwise it would be avoided because others are slow, and never tried.
    #[must_use]
    pub fn price(&self, tier: Tier, read_path: ReadPath, profile: &HardwareProfile) -> Price {
        let price = self.finest_price(tier, read_path, profile);
        let is_pooled = matches!(price.basis, PriceBasis::Tier | PriceBasis::Node);
        if !is_pooled || !self.may_be_slowed_by_other_paths(tier, read_path.path) {
            return price;
        }
        // The same price from measurements of this path alone.
        let place = path_index(read_path.path);
        let mut alone = LinkSpeeds::default();
        alone.speeds[place] = self.speeds[place];
        let alone = alone.finest_price(tier, read_path, profile);
        if alone.speed.bytes_per_s > price.speed.bytes_per_s { alone } else { price }
    }

    /// Whether a pooled measurement may be slow because of slower paths than this one: RDMA needs
    /// no CPU core on either side, the others do. Not if this tier was much slower than memory over
    /// one of these paths: then the medium is slow, over every path.
    fn may_be_slowed_by_other_paths(&self, tier: Tier, path: Option<LinkPath>) -> bool {
        let is_medium = |slower: LinkPath| {
            let rate = |tier| self.speed(Some(slower), Some(tier)).map(|lane| lane.bytes_per_s);
            rate(tier).zip(rate(Tier::Dram)).is_some_and(|(of_tier, memory)| of_tier < memory / 2)
        };
        path == Some(LinkPath::Rdma) && ![LinkPath::Quic, LinkPath::Tcp].into_iter().any(is_medium)
    }

    /// The price by the finest available measurement.
    fn finest_price(&self, tier: Tier, read_path: ReadPath, profile: &HardwareProfile) -> Price {
        let ReadPath { is_local: is_own, path } = read_path;
        let is_host = path == Some(LinkPath::SharedMemory);
        let measured = |lane, measure| Price { speed: lane, basis: measure };
        if let Some(lane) = path.and_then(|path| self.speed(Some(path), Some(tier))) {
            return measured(lane, PriceBasis::TierOverPath);
        }
        if let Some(lane) = self.speed(None, Some(tier)).filter(|_| !is_host) {
            return measured(lane, PriceBasis::Tier);
        }
        let medium = profile.tier(tier);
        let over = path.map(|path| (Some(path), PriceBasis::Path));
        let ways = [over, (!is_host).then_some((None, PriceBasis::Node))];
        let faster = |path| {
            let lanes = [Tier::Dram, Tier::Gpu].into_iter().filter_map(|tier| self.speed(path, Some(tier)));
            lanes.max_by_key(|lane| (lane.bytes_per_s, Reverse(lane.latency_ns)))
        };
        let pool = if is_host { path } else { None };
        let all = |path| self.speed(path, None).filter(|_| self.speed(pool, Some(Tier::Ssd)).is_none());
        let find = |of: &dyn Fn(Option<LinkPath>) -> Option<PathSpeed>| {
            ways.iter().flatten().find_map(|(path, measure)| Some((of(*path)?, *measure)))
        };
        match find(&faster).or_else(|| find(&all)) {
            Some((way, measure)) => measured(medium.through(way), measure),
            None if is_own || is_host => measured(medium, PriceBasis::Profile),
            None => measured(medium.through(profile.network), PriceBasis::Profile),
        }
    }
}

fn path_index(path: Option<LinkPath>) -> usize {
    path.map_or(LinkPath::ALL.len(), |path| path as usize - 1)
}

fn tier_index(tier: Option<Tier>) -> usize {
    tier.map_or(Tier::ALL.len(), |tier| tier as usize)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::schedule::sources::link::LinkSample;

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const FAST: PathSpeed = PathSpeed { latency_ns: 100_000, bytes_per_s: 8_000_000_000 };
    const SLOW: PathSpeed = PathSpeed { latency_ns: 100_000, bytes_per_s: 50_000_000 };
    const MIDDLE: PathSpeed = PathSpeed { latency_ns: 100_000, bytes_per_s: 1_000_000_000 };

    fn key(path: Option<LinkPath>, tier: Option<Tier>) -> LinkKey {
        LinkKey { path, tier }
    }

    fn estimate(lane: PathSpeed, bytes: u64) -> LinkEstimate {
        let mut estimate = LinkEstimate::default();
        let stream = Duration::from_nanos(bytes * 1_000_000_000 / lane.bytes_per_s);
        let latency = Duration::from_nanos(lane.latency_ns);
        estimate.add(&LinkSample { fetches: 1, latency, bytes, stream }, NOW);
        estimate
    }

    fn remote(path: LinkPath) -> ReadPath {
        ReadPath { is_local: false, path: Some(path) }
    }

    fn price(lanes: &LinkSpeeds, tier: Tier, reader: ReadPath) -> (u64, PriceBasis) {
        let Price { speed: lane, basis: measure } = lanes.price(tier, reader, &HardwareProfile::default());
        (lane.bytes_per_s, measure)
    }

    #[test]
    fn sample_counts_for_its_key_and_coarser_groups() {
        use LinkPath::{Quic, SharedMemory, Tcp};
        let (dram, ssd) = (Some(Tier::Dram), Some(Tier::Ssd));
        let lanes = LinkSpeeds::of(
            [
                (key(Some(Quic), dram), estimate(MIDDLE, 10_000_000)),
                (key(Some(Tcp), dram), estimate(FAST, 80_000_000)),
                (key(Some(Tcp), ssd), estimate(SLOW, 5_000_000)),
                (key(Some(SharedMemory), dram), estimate(FAST, 80_000_000)),
                (key(None, None), estimate(SLOW, 5_000_000)),
                // Less than a mebibyte is ignored.
                (key(Some(Quic), ssd), estimate(FAST, 1_000)),
            ],
            NOW,
        );
        let rate = |path, tier| lanes.speed(path, tier).map(|lane| lane.bytes_per_s / 1_000_000);
        assert_eq!((rate(Some(Quic), dram), rate(Some(Tcp), dram)), (Some(1_000), Some(8_000)));
        assert_eq!((rate(Some(Quic), ssd), rate(Some(Tcp), ssd)), (None, Some(50)));
        // 90 MB in 20 ms; 85 MB in 110 ms; 100 MB in 220 ms.
        assert_eq!((rate(None, dram), rate(Some(Tcp), None)), (Some(4_500), Some(772)));
        assert_eq!(rate(None, None), Some(454), "everything but shared memory");
        assert_eq!(rate(Some(SharedMemory), None), Some(8_000));
        assert!(LinkSpeeds::of([], NOW).is_empty() && !lanes.is_empty());
    }

    #[test]
    fn price_uses_the_finest_measurement() {
        use LinkPath::{Quic, SharedMemory, Tcp};
        let none = LinkSpeeds::default();
        assert_eq!(price(&none, Tier::Dram, remote(Tcp)), (300_000_000, PriceBasis::Profile));
        let own = ReadPath { is_local: true, path: None };
        assert_eq!(price(&none, Tier::Dram, own), (2_500_000_000, PriceBasis::Profile));
        let host = remote(SharedMemory);
        assert_eq!(
            price(&none, Tier::Dram, host),
            (2_500_000_000, PriceBasis::Profile),
            "no network between"
        );
        // Everything of the node, then of this path, then of this tier, then both.
        let lanes = none.with_speed(key(None, None), SLOW);
        assert_eq!(price(&lanes, Tier::Dram, remote(Tcp)), (50_000_000, PriceBasis::Node));
        assert_eq!(
            price(&lanes, Tier::Dram, host),
            (2_500_000_000, PriceBasis::Profile),
            "network speed does not apply"
        );
        let lanes = lanes.with_speed(key(Some(Tcp), None), MIDDLE);
        assert_eq!(price(&lanes, Tier::Dram, remote(Tcp)), (1_000_000_000, PriceBasis::Path));
        assert_eq!(price(&lanes, Tier::Dram, remote(Quic)), (50_000_000, PriceBasis::Node));
        let lanes = lanes.with_speed(key(None, Some(Tier::Dram)), SLOW);
        assert_eq!(price(&lanes, Tier::Dram, remote(Tcp)), (50_000_000, PriceBasis::Tier));
        assert_eq!(
            price(&lanes, Tier::Ssd, remote(Tcp)),
            (50_000_000, PriceBasis::Node),
            "at the speed of its memory"
        );
        let lanes = lanes.with_speed(key(Some(Tcp), Some(Tier::Dram)), FAST);
        assert_eq!(price(&lanes, Tier::Dram, remote(Tcp)), (8_000_000_000, PriceBasis::TierOverPath));
        assert_eq!(
            price(&lanes, Tier::Ssd, remote(Tcp)),
            (700_000_000, PriceBasis::Path),
            "the profile's SSD"
        );
        // A pool that includes a slow SSD is ignored.
        let pooled = none.with_speed(key(Some(Tcp), None), SLOW).with_speed(key(None, Some(Tier::Ssd)), SLOW);
        assert_eq!(price(&pooled, Tier::Dram, remote(Tcp)), (300_000_000, PriceBasis::Profile));
        let mapped = none.with_speed(key(Some(SharedMemory), Some(Tier::Dram)), FAST);
        assert_eq!(price(&mapped, Tier::Dram, host), (8_000_000_000, PriceBasis::TierOverPath));
        assert_eq!(price(&mapped, Tier::Dram, remote(Tcp)), (300_000_000, PriceBasis::Profile));
    }

    #[test]
    fn faster_path_is_not_priced_by_slower_ones() {
        use LinkPath::{Quic, Rdma, Tcp};
        let (dram, ssd) = (Some(Tier::Dram), Some(Tier::Ssd));
        let none = LinkSpeeds::default();
        // As the router builds them: a measurement over one path counts in the pool too.
        let slow = none
            .with_speed(key(Some(Tcp), dram), SLOW)
            .with_speed(key(None, dram), SLOW)
            .with_speed(key(None, None), SLOW);
        assert_eq!(price(&slow, Tier::Dram, remote(Tcp)), (50_000_000, PriceBasis::TierOverPath));
        assert_eq!(
            price(&slow, Tier::Dram, remote(Quic)),
            (50_000_000, PriceBasis::Tier),
            "same kind of path"
        );
        assert_eq!(price(&slow, Tier::Dram, remote(Rdma)), (300_000_000, PriceBasis::Profile), "never tried");
        assert_eq!(price(&slow, Tier::Ssd, remote(Rdma)), (300_000_000, PriceBasis::Profile));
        let slow = slow.with_speed(key(Some(Tcp), ssd), SLOW).with_speed(key(None, ssd), SLOW);
        assert_eq!(
            price(&slow, Tier::Ssd, remote(Rdma)).1,
            PriceBasis::Profile,
            "no slower than memory over it"
        );
        // Once memory was read over it, its SSD price uses the profile's SSD.
        let tried = slow.with_speed(key(Some(Rdma), dram), FAST).with_speed(key(None, dram), MIDDLE);
        assert_eq!(price(&tried, Tier::Ssd, remote(Rdma)), (700_000_000, PriceBasis::Path));
        assert_eq!(price(&tried, Tier::Dram, remote(Rdma)), (8_000_000_000, PriceBasis::TierOverPath));
        // A medium that is slow over a fast path counts as slow.
        let medium = none
            .with_speed(key(Some(Quic), dram), MIDDLE)
            .with_speed(key(Some(Quic), ssd), SLOW)
            .with_speed(key(None, ssd), SLOW)
            .with_speed(key(Some(Rdma), dram), FAST);
        assert_eq!(price(&medium, Tier::Ssd, remote(Rdma)), (50_000_000, PriceBasis::Tier));
        // A pooled speed above the profile's is believed.
        let fast = none.with_speed(key(Some(Tcp), dram), FAST).with_speed(key(None, dram), FAST);
        assert_eq!(price(&fast, Tier::Dram, remote(Rdma)), (8_000_000_000, PriceBasis::Tier));
    }

    #[test]
    fn path_numbers_match_reports() {
        let names = LinkPath::ALL.map(|path| (path as u32, path.name()));
        assert_eq!(names, [(1, "shm"), (2, "rdma"), (3, "quic"), (4, "tcp")]);
        assert!(LinkPath::ALL.iter().all(|path| LinkPath::from_number(*path as u32) == Some(*path)));
        assert_eq!([0, 5, u32::MAX].map(LinkPath::from_number), [None; 3]);
    }
}
