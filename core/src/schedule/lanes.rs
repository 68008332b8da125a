//! What was measured of the ways out of a node, by path and tier, and on which of it a price rests.
//!
//! The finest measure there is counts: of this tier over this path. Where too little went there, a coarser one does, and
//! the price says which. Memory of the host is a way of its own: nothing else says how fast it is, and it says nothing of
//! the network. Not here: how samples become a lane (`link.rs`), and who takes which path (`fleet.rs`).

use std::cmp::Reverse;
use std::fmt;

use super::link::LinkEstimate;
use super::profile::{HardwareProfile, Lane};
use crate::id::{Tier, Timestamp};

/// A kind of path between an instance and a node. The numbers are those of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum LinkPath {
    /// Memory of the host that both are on.
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

    /// The kind of this number; nothing for one that is not known here.
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

/// What a transfer went through, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkKey {
    /// Over which path.
    pub path: Option<LinkPath>,
    /// Out of which tier all blocks came; nothing where they came out of several.
    pub tier: Option<Tier>,
}

/// The lanes that transfers from one node met, where there were enough of them: of each tier over each path, and of what is
/// coarser than that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLanes {
    /// By path, then by tier. The last place of each stands for all of them together: of the paths, those of the network.
    lanes: [[Option<Lane>; Tier::ALL.len() + 1]; LinkPath::ALL.len() + 1],
}

/// Of what a price was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measure {
    /// Of this tier over this path.
    TierOverPath,
    /// Of this tier, over whichever paths of the network were taken.
    Tier,
    /// Of what else came over this path; the tier is the profile's.
    Path,
    /// Of what else came from the node over the network; the tier is the profile's.
    Node,
    /// Of nothing: all of it is the profile's.
    Profile,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Measure::TierOverPath => "as measured of that tier over that path",
            Measure::Tier => "as measured of that tier over any path",
            Measure::Path => "by what else was measured over that path",
            Measure::Node => "by what else was measured of that node",
            Measure::Profile => "by the profile",
        })
    }
}

/// A lane that something is priced with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    /// Medium and link together.
    pub lane: Lane,
    /// Where it comes from.
    pub measure: Measure,
}

/// Where an instance is, seen from a node, and how it reads from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Whether the node is its own, with no network between.
    pub is_own: bool,
    /// The path it takes, where that is known.
    pub path: Option<LinkPath>,
}

impl LinkLanes {
    /// The lanes of these estimates, each of what is known to have gone through its key.
    #[must_use]
    pub fn of(estimates: impl IntoIterator<Item = (LinkKey, LinkEstimate)>, now: Timestamp) -> LinkLanes {
        let mut sums: [[Option<LinkEstimate>; Tier::ALL.len() + 1]; LinkPath::ALL.len() + 1] =
            Default::default();
        for (key, estimate) in estimates {
            let (path, tier) = (path_place(key.path), tier_place(key.tier));
            // Each counts once where it is known to belong, and once where everything does.
            let any_path = (key.path != Some(LinkPath::SharedMemory)).then_some(path_place(None));
            let paths = [Some(path), any_path.filter(|any| *any != path)];
            let tiers = [Some(tier), Some(tier_place(None)).filter(|any| *any != tier)];
            for path in paths.into_iter().flatten() {
                for tier in tiers.into_iter().flatten() {
                    let sum = &mut sums[path][tier];
                    *sum = Some(sum.map_or(estimate, |sum| sum.with(&estimate)));
                }
            }
        }
        LinkLanes { lanes: sums.map(|tiers| tiers.map(|sum| sum?.lane(now))) }
    }

    /// These lanes with one more.
    #[must_use]
    pub fn with(mut self, key: LinkKey, lane: Lane) -> LinkLanes {
        self.lanes[path_place(key.path)][tier_place(key.tier)] = Some(lane);
        self
    }

    /// Whether nothing was measured.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().flatten().all(Option::is_none)
    }

    fn lane(&self, path: Option<LinkPath>, tier: Option<Tier>) -> Option<Lane> {
        self.lanes[path_place(path)][tier_place(tier)]
    }

    /// What comes out of this tier to this reader. Where that was not measured over its path, what was over any; where neither
    /// was, the profile's tier through the best way that was: of the faster tiers, else of everything. What pools all tiers
    /// counts only where no SSD was measured: a slow SSD says nothing of how fast the node's memory comes.
    ///
    /// What came over other paths never makes a path that is faster than these look worse than it would without: else it
    /// would be passed over because others are slow, and never be tried.
    #[must_use]
    pub fn price(&self, tier: Tier, reader: Reader, profile: &HardwareProfile) -> Price {
        let price = self.finest(tier, reader, profile);
        let is_pooled = matches!(price.measure, Measure::Tier | Measure::Node);
        if !is_pooled || !self.may_be_held_up(tier, reader.path) {
            return price;
        }
        // The same, as far as this path is known, of nothing but this path.
        let place = path_place(reader.path);
        let mut alone = LinkLanes::default();
        alone.lanes[place] = self.lanes[place];
        let alone = alone.finest(tier, reader, profile);
        if alone.lane.bytes_per_s > price.lane.bytes_per_s { alone } else { price }
    }

    /// Whether what was measured over all paths may be slow for the sake of slower paths than this one: RDMA needs no core of
    /// either side, the others do. Not where this tier came much slower than memory did over one of these: then the medium is what
    /// is slow, and it is that over every path.
    fn may_be_held_up(&self, tier: Tier, path: Option<LinkPath>) -> bool {
        let is_medium = |slower: LinkPath| {
            let rate = |tier| self.lane(Some(slower), Some(tier)).map(|lane| lane.bytes_per_s);
            rate(tier).zip(rate(Tier::Dram)).is_some_and(|(of_tier, memory)| of_tier < memory / 2)
        };
        path == Some(LinkPath::Rdma) && ![LinkPath::Quic, LinkPath::Tcp].into_iter().any(is_medium)
    }

    /// The price by the finest measure there is.
    fn finest(&self, tier: Tier, reader: Reader, profile: &HardwareProfile) -> Price {
        let Reader { is_own, path } = reader;
        let is_host = path == Some(LinkPath::SharedMemory);
        let measured = |lane, measure| Price { lane, measure };
        if let Some(lane) = path.and_then(|path| self.lane(Some(path), Some(tier))) {
            return measured(lane, Measure::TierOverPath);
        }
        if let Some(lane) = self.lane(None, Some(tier)).filter(|_| !is_host) {
            return measured(lane, Measure::Tier);
        }
        let medium = profile.tier(tier);
        let over = path.map(|path| (Some(path), Measure::Path));
        let ways = [over, (!is_host).then_some((None, Measure::Node))];
        let faster = |path| {
            let lanes = [Tier::Dram, Tier::Gpu].into_iter().filter_map(|tier| self.lane(path, Some(tier)));
            lanes.max_by_key(|lane| (lane.bytes_per_s, Reverse(lane.latency_ns)))
        };
        let pool = if is_host { path } else { None };
        let all = |path| self.lane(path, None).filter(|_| self.lane(pool, Some(Tier::Ssd)).is_none());
        let find = |of: &dyn Fn(Option<LinkPath>) -> Option<Lane>| {
            ways.iter().flatten().find_map(|(path, measure)| Some((of(*path)?, *measure)))
        };
        match find(&faster).or_else(|| find(&all)) {
            Some((way, measure)) => measured(medium.through(way), measure),
            None if is_own || is_host => measured(medium, Measure::Profile),
            None => measured(medium.through(profile.network), Measure::Profile),
        }
    }
}

fn path_place(path: Option<LinkPath>) -> usize {
    path.map_or(LinkPath::ALL.len(), |path| path as usize - 1)
}

fn tier_place(tier: Option<Tier>) -> usize {
    tier.map_or(Tier::ALL.len(), |tier| tier as usize)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::link::LinkSample;
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const FAST: Lane = Lane { latency_ns: 100_000, bytes_per_s: 8_000_000_000 };
    const SLOW: Lane = Lane { latency_ns: 100_000, bytes_per_s: 50_000_000 };
    const MIDDLE: Lane = Lane { latency_ns: 100_000, bytes_per_s: 1_000_000_000 };

    fn key(path: Option<LinkPath>, tier: Option<Tier>) -> LinkKey {
        LinkKey { path, tier }
    }

    fn estimate(lane: Lane, bytes: u64) -> LinkEstimate {
        let mut estimate = LinkEstimate::default();
        let stream = Duration::from_nanos(bytes * 1_000_000_000 / lane.bytes_per_s);
        let latency = Duration::from_nanos(lane.latency_ns);
        estimate.add(&LinkSample { fetches: 1, latency, bytes, stream }, NOW);
        estimate
    }

    fn afar(path: LinkPath) -> Reader {
        Reader { is_own: false, path: Some(path) }
    }

    fn price(lanes: &LinkLanes, tier: Tier, reader: Reader) -> (u64, Measure) {
        let Price { lane, measure } = lanes.price(tier, reader, &HardwareProfile::default());
        (lane.bytes_per_s, measure)
    }

    #[test]
    fn each_sample_counts_for_its_key_and_for_what_is_coarser() {
        use LinkPath::{Quic, SharedMemory, Tcp};
        let (dram, ssd) = (Some(Tier::Dram), Some(Tier::Ssd));
        let lanes = LinkLanes::of(
            [
                (key(Some(Quic), dram), estimate(MIDDLE, 10_000_000)),
                (key(Some(Tcp), dram), estimate(FAST, 80_000_000)),
                (key(Some(Tcp), ssd), estimate(SLOW, 5_000_000)),
                (key(Some(SharedMemory), dram), estimate(FAST, 80_000_000)),
                (key(None, None), estimate(SLOW, 5_000_000)),
                // Less than a mebibyte says nothing.
                (key(Some(Quic), ssd), estimate(FAST, 1_000)),
            ],
            NOW,
        );
        let rate = |path, tier| lanes.lane(path, tier).map(|lane| lane.bytes_per_s / 1_000_000);
        assert_eq!((rate(Some(Quic), dram), rate(Some(Tcp), dram)), (Some(1_000), Some(8_000)));
        assert_eq!((rate(Some(Quic), ssd), rate(Some(Tcp), ssd)), (None, Some(50)));
        // 90 MB in 20 ms; 85 MB in 110 ms; 100 MB in 220 ms.
        assert_eq!((rate(None, dram), rate(Some(Tcp), None)), (Some(4_500), Some(772)));
        assert_eq!(rate(None, None), Some(454), "everything but memory of the host");
        assert_eq!(rate(Some(SharedMemory), None), Some(8_000));
        assert!(LinkLanes::of([], NOW).is_empty() && !lanes.is_empty());
    }

    #[test]
    fn a_price_rests_on_the_finest_measure_there_is() {
        use LinkPath::{Quic, SharedMemory, Tcp};
        let none = LinkLanes::default();
        assert_eq!(price(&none, Tier::Dram, afar(Tcp)), (300_000_000, Measure::Profile));
        let own = Reader { is_own: true, path: None };
        assert_eq!(price(&none, Tier::Dram, own), (2_500_000_000, Measure::Profile));
        let host = afar(SharedMemory);
        assert_eq!(price(&none, Tier::Dram, host), (2_500_000_000, Measure::Profile), "no network between");
        // Everything of the node, then of this path, then of this tier, then both.
        let lanes = none.with(key(None, None), SLOW);
        assert_eq!(price(&lanes, Tier::Dram, afar(Tcp)), (50_000_000, Measure::Node));
        assert_eq!(
            price(&lanes, Tier::Dram, host),
            (2_500_000_000, Measure::Profile),
            "nothing of the network"
        );
        let lanes = lanes.with(key(Some(Tcp), None), MIDDLE);
        assert_eq!(price(&lanes, Tier::Dram, afar(Tcp)), (1_000_000_000, Measure::Path));
        assert_eq!(price(&lanes, Tier::Dram, afar(Quic)), (50_000_000, Measure::Node));
        let lanes = lanes.with(key(None, Some(Tier::Dram)), SLOW);
        assert_eq!(price(&lanes, Tier::Dram, afar(Tcp)), (50_000_000, Measure::Tier));
        assert_eq!(price(&lanes, Tier::Ssd, afar(Tcp)), (50_000_000, Measure::Node), "as its memory comes");
        let lanes = lanes.with(key(Some(Tcp), Some(Tier::Dram)), FAST);
        assert_eq!(price(&lanes, Tier::Dram, afar(Tcp)), (8_000_000_000, Measure::TierOverPath));
        assert_eq!(price(&lanes, Tier::Ssd, afar(Tcp)), (700_000_000, Measure::Path), "the profile's SSD");
        // A pool with a slow SSD in it counts for none.
        let pooled = none.with(key(Some(Tcp), None), SLOW).with(key(None, Some(Tier::Ssd)), SLOW);
        assert_eq!(price(&pooled, Tier::Dram, afar(Tcp)), (300_000_000, Measure::Profile));
        let mapped = none.with(key(Some(SharedMemory), Some(Tier::Dram)), FAST);
        assert_eq!(price(&mapped, Tier::Dram, host), (8_000_000_000, Measure::TierOverPath));
        assert_eq!(price(&mapped, Tier::Dram, afar(Tcp)), (300_000_000, Measure::Profile));
    }

    #[test]
    fn a_faster_path_is_not_priced_by_what_slower_ones_brought() {
        use LinkPath::{Quic, Rdma, Tcp};
        let (dram, ssd) = (Some(Tier::Dram), Some(Tier::Ssd));
        let none = LinkLanes::default();
        // As the router makes them: what was measured over one path counts for all of them together too.
        let slow =
            none.with(key(Some(Tcp), dram), SLOW).with(key(None, dram), SLOW).with(key(None, None), SLOW);
        assert_eq!(price(&slow, Tier::Dram, afar(Tcp)), (50_000_000, Measure::TierOverPath));
        assert_eq!(price(&slow, Tier::Dram, afar(Quic)), (50_000_000, Measure::Tier), "of the same kind");
        assert_eq!(price(&slow, Tier::Dram, afar(Rdma)), (300_000_000, Measure::Profile), "never tried");
        assert_eq!(price(&slow, Tier::Ssd, afar(Rdma)), (300_000_000, Measure::Profile));
        let slow = slow.with(key(Some(Tcp), ssd), SLOW).with(key(None, ssd), SLOW);
        assert_eq!(price(&slow, Tier::Ssd, afar(Rdma)).1, Measure::Profile, "no slower than memory over it");
        // Tried for memory: its SSD is the profile's over it.
        let tried = slow.with(key(Some(Rdma), dram), FAST).with(key(None, dram), MIDDLE);
        assert_eq!(price(&tried, Tier::Ssd, afar(Rdma)), (700_000_000, Measure::Path));
        assert_eq!(price(&tried, Tier::Dram, afar(Rdma)), (8_000_000_000, Measure::TierOverPath));
        // A medium that is slow over a path that is not, is slow.
        let medium = none
            .with(key(Some(Quic), dram), MIDDLE)
            .with(key(Some(Quic), ssd), SLOW)
            .with(key(None, ssd), SLOW)
            .with(key(Some(Rdma), dram), FAST);
        assert_eq!(price(&medium, Tier::Ssd, afar(Rdma)), (50_000_000, Measure::Tier));
        // What others brought faster than the profile says is believed.
        let fast = none.with(key(Some(Tcp), dram), FAST).with(key(None, dram), FAST);
        assert_eq!(price(&fast, Tier::Dram, afar(Rdma)), (8_000_000_000, Measure::Tier));
    }

    #[test]
    fn numbers_of_paths_are_those_of_reports() {
        let names = LinkPath::ALL.map(|path| (path as u32, path.name()));
        assert_eq!(names, [(1, "shm"), (2, "rdma"), (3, "quic"), (4, "tcp")]);
        assert!(LinkPath::ALL.iter().all(|path| LinkPath::from_number(*path as u32) == Some(*path)));
        assert_eq!([0, 5, u32::MAX].map(LinkPath::from_number), [None; 3]);
    }
}
