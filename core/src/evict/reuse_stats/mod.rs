//! Reuse statistics per category as sums that add up over nodes: a policy reports its own and
//! receives those of the fleet.
//!
//! Fits are computed from sums and never averaged from fits: the added sums of two nodes equal
//! those of one node with the traffic of both. So the order of addition does not matter. A node
//! counts blocks; nodes are added in requests, each by its own cluster sizes
//! ([`ReuseStats::to_requests`]), and each node up to a limit ([`ReuseStats::merge_capped`]). A
//! receiver limits each category to a number of its own requests ([`CategorySums::weight`]),
//! whatever was reported. Not here: the use that a policy makes of them ([`super::density`],
//! [`super::workload`]), and their transport.

use super::bands::{BANDS, start_us};
use crate::id::RequestKind;
use std::collections::BTreeMap;

/// Version of the division into categories and ages. Sums of another version are unusable.
pub const STATS_FORMAT: u32 = 1;
/// Age bands for reuses and exposure.
pub const AGE_BANDS: usize = BANDS;
/// Upper limit of a valid sum: a thousand blocks a microsecond, for a year.
pub const SUM_MAX: f64 = 1e17;
/// Maximum weight of the fleet's sums of a category, in requests. See ADR 0065.
pub const FLEET_REQUESTS_MAX: f64 = 30.0;
/// Maximum requests of a category counted from one node: a few hundred times
/// [`FLEET_REQUESTS_MAX`]. So a flooded node counts as one of many.
pub const NODE_REQUESTS_MAX: f64 = 10_000.0;
/// Maximum cluster size in blocks: sixteen times the longest request that a node accepts.
pub const CLUSTER_BLOCKS_MAX: f64 = 1_048_576.0;
/// Cluster size in blocks if none was observed.
pub(super) const CLUSTER_BLOCKS_DEFAULT: f64 = 16.0;

/// Turns that `density` distinguishes, and classes per turn: the coarse one and the finer ones.
const TURN_BUCKETS: u16 = 4;
const CLASSES_PER_TURN: u16 = 7;
const KINDS: u16 = RequestKind::ALL.len() as u16;
/// Turns that the paper's policy distinguishes.
const PAPER_TURNS: u16 = 8;
const SHARED_AT: u16 = 1;
const SHARED_PACES: u16 = 8;
const SESSIONS_AT: u16 = SHARED_AT + SHARED_PACES;
const PAPER_AT: u16 = SESSIONS_AT + KINDS * TURN_BUCKETS * CLASSES_PER_TURN;
/// Number of categories.
pub const CATEGORIES_MAX: usize = (PAPER_AT + KINDS * PAPER_TURNS) as usize;

/// Meaning of a category, equal on every node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CategoryRole {
    /// Partly filled tails.
    Partial,
    /// Blocks shared by sessions, by pace of use (0 to 7).
    Shared(u8),
    /// Blocks of one session: kind of request, turn bucket (0 to 3), and finer class if any (0 to
    /// 5).
    Session(RequestKind, u8, Option<u8>),
    /// All blocks of a kind and turn (0 to 7), the categories of the paper.
    Paper(RequestKind, u8),
}

impl CategoryRole {
    /// Its number, below [`CATEGORIES_MAX`]. Buckets beyond the last map to the last.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            CategoryRole::Partial => 0,
            CategoryRole::Shared(pace) => SHARED_AT + u16::from(pace).min(SHARED_PACES - 1),
            CategoryRole::Session(kind, turn, finer) => {
                let turn = u16::from(turn).min(TURN_BUCKETS - 1);
                let finer = finer.map_or(0, |finer| (u16::from(finer) + 1).min(CLASSES_PER_TURN - 1));
                SESSIONS_AT + (kind as u16 * TURN_BUCKETS + turn) * CLASSES_PER_TURN + finer
            }
            CategoryRole::Paper(kind, turn) => {
                PAPER_AT + kind as u16 * PAPER_TURNS + u16::from(turn).min(PAPER_TURNS - 1)
            }
        }
    }

    /// The role with this number; `None` if it is too large.
    #[must_use]
    pub fn from_number(number: u16) -> Option<CategoryRole> {
        let kind = |kind: u16| RequestKind::from_u8(kind as u8);
        Some(match number {
            0 => CategoryRole::Partial,
            SHARED_AT..SESSIONS_AT => CategoryRole::Shared((number - SHARED_AT) as u8),
            SESSIONS_AT..PAPER_AT => {
                let (place, finer) =
                    ((number - SESSIONS_AT) / CLASSES_PER_TURN, (number - SESSIONS_AT) % CLASSES_PER_TURN);
                CategoryRole::Session(
                    kind(place / TURN_BUCKETS),
                    (place % TURN_BUCKETS) as u8,
                    finer.checked_sub(1).map(|finer| finer as u8),
                )
            }
            _ => {
                let place = number - PAPER_AT;
                let is_known = usize::from(number) < CATEGORIES_MAX;
                let role = CategoryRole::Paper(kind(place / PAPER_TURNS), (place % PAPER_TURNS) as u8);
                return is_known.then_some(role);
            }
        })
    }
}

/// Observations of one category, decayed over time. No sum is negative.
#[derive(Clone, Debug, PartialEq)]
pub struct CategorySums {
    /// Uses of blocks; each begins a wait for the next use.
    pub uses: f64,
    /// Blocks used again, by age at the reuse.
    pub reuses: [f64; AGE_BANDS],
    /// Block-seconds without a use, by age. Zero if not counted.
    pub exposure_s: [f64; AGE_BANDS],
    /// Blocks of the category that a request used again, summed over requests; and the sum of their
    /// squares.
    pub clusters: (f64, f64),
}

impl Default for CategorySums {
    fn default() -> Self {
        CategorySums {
            uses: 0.0,
            reuses: [0.0; AGE_BANDS],
            exposure_s: [0.0; AGE_BANDS],
            clusters: (0.0, 0.0),
        }
    }
}

/// Why reported sums were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidStats {
    /// A sum is not a number, infinite, negative or above [`SUM_MAX`].
    InvalidSum {
        /// The category.
        category: u16,
    },
    /// Impossible cluster sizes: the squares are below the sum, or above those of the largest
    /// clusters.
    InvalidClusters {
        /// The category.
        category: u16,
    },
    /// An unknown category.
    UnknownCategory {
        /// Its number.
        number: u32,
    },
    /// A category is reported twice.
    DuplicateCategory {
        /// The category.
        category: u16,
    },
    /// More age bands than [`AGE_BANDS`].
    TooManyAges {
        /// The category.
        category: u16,
    },
}

impl std::fmt::Display for InvalidStats {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            InvalidStats::InvalidSum { category } => {
                write!(out, "invalid sum of category {category}: expected 0 to {SUM_MAX:e}")
            }
            InvalidStats::InvalidClusters { category } => {
                write!(
                    out,
                    "invalid clusters of category {category}: expected squares of 1 to {CLUSTER_BLOCKS_MAX} \
                     times their sum"
                )
            }
            InvalidStats::UnknownCategory { number } => {
                write!(
                    out,
                    "unknown category {number}: expected less than {CATEGORIES_MAX}; run the same release"
                )
            }
            InvalidStats::DuplicateCategory { category } => {
                write!(out, "category {category} is named twice: send each once")
            }
            InvalidStats::TooManyAges { category } => {
                write!(
                    out,
                    "category {category} has more than {AGE_BANDS} ages: run the same release on both ends"
                )
            }
        }
    }
}

impl std::error::Error for InvalidStats {}

impl CategorySums {
    fn values(&self) -> impl Iterator<Item = f64> {
        let (clusters, squares) = self.clusters;
        let ages = self.reuses.iter().chain(&self.exposure_s).copied();
        [self.uses, clusters, squares].into_iter().chain(ages)
    }

    fn values_mut(&mut self) -> impl Iterator<Item = &mut f64> {
        let (clusters, squares) = &mut self.clusters;
        let ages = self.reuses.iter_mut().chain(&mut self.exposure_s);
        [&mut self.uses, clusters, squares].into_iter().chain(ages)
    }

    /// Whether clusters of 1 to [`CLUSTER_MAX`] blocks can add up to these sums. Decayed sums are
    /// weighted, `Σw·n` and `Σw·n²`, so the squares may exceed the squared sum. Rounding on the
    /// wire keeps the order, with a relative error below a ten-millionth or a negligible absolute
    /// one.
    fn has_valid_clusters(&self) -> bool {
        let (sum, squares) = self.clusters;
        squares >= sum && squares <= sum * CLUSTER_BLOCKS_MAX * (1.0 + 1e-6) + 1e-30
    }

    fn scale(&mut self, share: f64) {
        self.values_mut().for_each(|sum| *sum *= share);
    }

    /// Blocks used again, at any age.
    #[must_use]
    pub fn total_reuses(&self) -> f64 {
        self.reuses.iter().sum()
    }

    /// Mean time between a use and the next, in microseconds, with each reuse at the middle of its
    /// band: at most an eighth off. `None` without a reuse.
    #[must_use]
    pub fn interval_us(&self) -> Option<f64> {
        let sum: f64 = self.reuses.iter().enumerate().map(|(band, reuses)| reuses * middle_us(band)).sum();
        Some(sum / self.total_reuses()).filter(|mean| mean.is_finite() && *mean > 0.0)
    }

    /// Minimum number of blocks that explains these sums: no wait stays in a band longer than the
    /// band lasts, and every reuse ends one wait.
    #[must_use]
    pub fn blocks(&self) -> f64 {
        let waits = self.exposure_s.iter().enumerate().map(|(band, seconds)| seconds / width_s(band));
        waits.fold(self.uses.max(self.total_reuses()), f64::max)
    }

    /// Mean size of the cluster that a reused block is in; 1 if none was observed.
    #[must_use]
    pub fn cluster_blocks(&self) -> f64 {
        let (sum, squares) = self.clusters;
        if sum > 0.0 { (squares / sum).max(1.0) } else { 1.0 }
    }

    /// Factor that turns these sums into requests, at most [`FLEET_REQUESTS_MAX`].
    #[must_use]
    pub fn weight(&self) -> f64 {
        (FLEET_REQUESTS_MAX / self.requests().max(FLEET_REQUESTS_MAX)) / self.cluster_blocks()
    }

    /// Number of requests that explains these sums, given that the blocks of a cluster move
    /// together.
    #[must_use]
    pub fn requests(&self) -> f64 {
        self.blocks() / self.cluster_blocks()
    }

    /// Adds the observations of another node.
    pub fn add(&mut self, other: &CategorySums) {
        self.values_mut().zip(other.values()).for_each(|(sum, more)| *sum = (*sum + more).min(SUM_MAX));
    }

    /// Distance between two sums, both weighted as a receiver weights them. 0 if equal, 2 if
    /// disjoint and one has full weight. Proportionally less for few requests, because one more
    /// request then means little.
    fn distance(&self, other: &CategorySums) -> f64 {
        let (left, right) = (self.weight(), other.weight());
        let parts = [(&self.reuses, &other.reuses), (&self.exposure_s, &other.exposure_s)];
        let apart = |(ours, theirs): (&[f64; AGE_BANDS], &[f64; AGE_BANDS])| {
            let gap: f64 =
                ours.iter().zip(theirs).map(|(our, their)| (our * left - their * right).abs()).sum();
            let all: f64 = ours.iter().sum::<f64>() * left + theirs.iter().sum::<f64>() * right;
            if all > 0.0 { 2.0 * gap / all } else { 0.0 }
        };
        let requests = self.requests().max(other.requests()).min(FLEET_REQUESTS_MAX);
        parts.into_iter().map(apart).fold(0.0, f64::max) * requests / FLEET_REQUESTS_MAX
    }
}

/// Width of an age band in seconds; one hour for the open last band.
fn width_s(band: usize) -> f64 {
    if band + 1 < BANDS { (start_us(band + 1) - start_us(band)) as f64 / 1e6 } else { 3600.0 }
}

/// Middle of an age band in microseconds; the end of the first hour for the open last band.
fn middle_us(band: usize) -> f64 {
    start_us(band) as f64 + if band + 1 < BANDS { width_s(band) / 2.0 } else { width_s(band) } * 1e6
}

/// Observations by category.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReuseStats {
    by_category: BTreeMap<u16, CategorySums>,
}

impl ReuseStats {
    /// Adds observations of one category.
    pub fn add(&mut self, role: CategoryRole, sums: &CategorySums) {
        self.by_category.entry(role.number()).or_default().add(sums);
    }

    /// Adds the reported sums of a category, at most once per category.
    ///
    /// # Errors
    /// If the sums are invalid, or the category is unknown or present already; then no sum is
    /// added.
    pub fn add_reported(&mut self, number: u32, sums: CategorySums) -> Result<(), InvalidStats> {
        let known = u16::try_from(number).ok().filter(|number| usize::from(*number) < CATEGORIES_MAX);
        let category = known.ok_or(InvalidStats::UnknownCategory { number })?;
        if !sums.values().all(|sum| (0.0..=SUM_MAX).contains(&sum)) {
            return Err(InvalidStats::InvalidSum { category });
        }
        if !sums.has_valid_clusters() {
            return Err(InvalidStats::InvalidClusters { category });
        }
        if self.by_category.contains_key(&category) {
            return Err(InvalidStats::DuplicateCategory { category });
        }
        self.by_category.insert(category, sums);
        Ok(())
    }

    /// Adds the observations of another node.
    pub fn merge(&mut self, other: &ReuseStats) {
        for (category, sums) in &other.by_category {
            self.by_category.entry(*category).or_default().add(sums);
        }
    }

    /// Observations of one node in requests instead of blocks, by its own cluster sizes, so that
    /// one node's cluster sizes cannot distort those of others. A category without clusters uses
    /// the node's median size. The result has no clusters and must not be converted again.
    #[must_use]
    pub fn to_requests(&self) -> ReuseStats {
        let usual = self.median_cluster_blocks();
        let of = |(&category, sums): (&u16, &CategorySums)| {
            let blocks = match CategoryRole::from_number(category) {
                _ if sums.clusters.0 > 0.0 => sums.cluster_blocks(),
                Some(CategoryRole::Session(..) | CategoryRole::Shared(_)) => usual,
                // Partial tails occur once a request; the paper's policy counts blocks as requests.
                Some(CategoryRole::Partial | CategoryRole::Paper(..)) | None => 1.0,
            };
            let mut sums = CategorySums { clusters: (0.0, 0.0), ..sums.clone() };
            sums.scale(1.0 / blocks);
            (category, sums)
        };
        ReuseStats { by_category: self.by_category.iter().map(of).collect() }
    }

    /// Median of the known cluster sizes: one category of huge prompts must not affect the others.
    fn median_cluster_blocks(&self) -> f64 {
        let known = self.by_category.values().filter(|sums| sums.clusters.0 > 0.0);
        let mut sizes: Vec<f64> = known.map(CategorySums::cluster_blocks).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.get(sizes.len() / 2).copied().unwrap_or(CLUSTER_BLOCKS_DEFAULT)
    }

    /// Adds one node's observations in requests, at most `requests` per category, so that no node
    /// outweighs all others.
    pub fn merge_capped(&mut self, node: &ReuseStats, requests: f64) {
        for (category, sums) in &node.by_category {
            let mut sums = CategorySums { clusters: (0.0, 0.0), ..sums.clone() };
            sums.scale((requests / sums.blocks().max(requests)).clamp(0.0, 1.0));
            self.by_category.entry(*category).or_default().add(&sums);
        }
    }

    /// Multiplies all sums by `kept` (0 to 1) and drops categories below half a block.
    pub fn decay(&mut self, kept: f64) {
        let kept = kept.clamp(0.0, 1.0);
        self.by_category.values_mut().for_each(|sums| sums.scale(kept));
        self.by_category.retain(|_, sums| sums.blocks() >= 0.5);
    }

    /// Whether there are no observations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_category.is_empty()
    }

    /// Sums of each category, by ascending number.
    pub fn categories(&self) -> impl Iterator<Item = (u16, &CategorySums)> {
        self.by_category.iter().map(|(category, sums)| (*category, sums))
    }

    /// Sums of this role, if any.
    #[must_use]
    pub fn get(&self, role: CategoryRole) -> Option<&CategorySums> {
        self.by_category.get(&role.number())
    }

    /// Sums of each role.
    pub fn roles(&self) -> impl Iterator<Item = (CategoryRole, &CategorySums)> {
        self.categories().filter_map(|(number, sums)| Some((CategoryRole::from_number(number)?, sums)))
    }

    /// The largest distance of a category, 0 to 2, weighted as a receiver weights it.
    #[must_use]
    pub fn distance(&self, other: &ReuseStats) -> f64 {
        let nothing = CategorySums::default();
        let all = self.by_category.keys().chain(other.by_category.keys());
        let of = |all: &ReuseStats, category: &u16| all.by_category.get(category).unwrap_or(&nothing).clone();
        all.map(|category| of(self, category).distance(&of(other, category))).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests;
