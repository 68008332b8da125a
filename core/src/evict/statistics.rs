//! What was seen of categories of blocks, as sums that add up over nodes: what a policy tells the fleet, and is told
//! of it.
//!
//! Fits are made from sums and never averaged from fits: the sums of two nodes added are those of one node that saw
//! the traffic of both, so it does not matter who adds what first. A node counts blocks; what nodes saw is added up in
//! requests, each node's by its own sizes of clusters ([`Statistics::in_requests`]), and of one node as so many at most
//! ([`Statistics::merge_at_most`]). Whoever learns from them counts a category at most as so many requests of his own
//! ([`CategorySums::weight`]), whatever they claim. Not here: what a policy makes of them ([`super::density`],
//! [`super::workload`]), and how they travel.

use super::bands::{BANDS, start_us};
use crate::id::RequestKind;
use std::collections::BTreeMap;

/// Number of the way categories and ages are cut here. Sums of another way are of no use to this build.
pub const FORM: u32 = 1;
/// Bands of age that a reuse or an exposure is counted in.
pub const AGES: usize = BANDS;
/// A sum above this is not one that was counted: a thousand blocks a microsecond, for a year.
pub const SUM_MAX: f64 = 1e17;
/// Requests that the fleet's sums of a category count for at most. See ADR 0065 for what was tried.
pub const TOLD_REQUESTS: f64 = 30.0;
/// Requests of a category that count of one node: some hundred times what the sums count for where they are told. So a
/// node that somebody floods is one of many.
pub const NODE_REQUESTS: f64 = 10_000.0;
/// Blocks of the largest cluster that there can be: sixteen times the longest request that a node takes.
pub const CLUSTER_MAX: f64 = 1_048_576.0;
/// Size of a cluster where nothing is known of it.
pub(super) const CLUSTER_BLOCKS: f64 = 16.0;

/// Turns told apart by `density`, and finer classes of each beside the one that is not finer.
const TURNS: u16 = 4;
const FINER: u16 = 7;
const KINDS: u16 = RequestKind::ALL.len() as u16;
/// Turns told apart by the paper's policy.
const PAPER_TURNS: u16 = 8;
const SHARED_AT: u16 = 1;
const SHARED_PACES: u16 = 8;
const SESSIONS_AT: u16 = SHARED_AT + SHARED_PACES;
const PAPER_AT: u16 = SESSIONS_AT + KINDS * TURNS * FINER;
/// Categories there are, and most that anybody can speak of.
pub const CATEGORIES_MAX: usize = (PAPER_AT + KINDS * PAPER_TURNS) as usize;

/// What a category stands for, the same on every node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Partly filled tails.
    Partial,
    /// Blocks that sessions share, by how fast they are used (0 to 7).
    Shared(u8),
    /// Blocks of one session: kind of request, bucket of turns (0 to 3), and the finer class of these where there is
    /// one (0 to 5).
    Session(RequestKind, u8, Option<u8>),
    /// All blocks of a kind and turn (0 to 7), as the paper cuts them.
    Paper(RequestKind, u8),
}

impl Role {
    /// Its number, below [`CATEGORIES_MAX`]. Buckets beyond the last are taken for the last.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            Role::Partial => 0,
            Role::Shared(pace) => SHARED_AT + u16::from(pace).min(SHARED_PACES - 1),
            Role::Session(kind, turn, finer) => {
                let turn = u16::from(turn).min(TURNS - 1);
                let finer = finer.map_or(0, |finer| (u16::from(finer) + 1).min(FINER - 1));
                SESSIONS_AT + (kind as u16 * TURNS + turn) * FINER + finer
            }
            Role::Paper(kind, turn) => {
                PAPER_AT + kind as u16 * PAPER_TURNS + u16::from(turn).min(PAPER_TURNS - 1)
            }
        }
    }

    /// The role with this number, if there is one.
    #[must_use]
    pub fn of_number(number: u16) -> Option<Role> {
        let kind = |kind: u16| RequestKind::from_u8(kind as u8);
        Some(match number {
            0 => Role::Partial,
            SHARED_AT..SESSIONS_AT => Role::Shared((number - SHARED_AT) as u8),
            SESSIONS_AT..PAPER_AT => {
                let (place, finer) = ((number - SESSIONS_AT) / FINER, (number - SESSIONS_AT) % FINER);
                Role::Session(
                    kind(place / TURNS),
                    (place % TURNS) as u8,
                    finer.checked_sub(1).map(|finer| finer as u8),
                )
            }
            _ => {
                let place = number - PAPER_AT;
                let is_known = usize::from(number) < CATEGORIES_MAX;
                let role = Role::Paper(kind(place / PAPER_TURNS), (place % PAPER_TURNS) as u8);
                return is_known.then_some(role);
            }
        })
    }
}

/// What was seen of one category, what is long ago counting less. None of it is negative.
#[derive(Clone, Debug, PartialEq)]
pub struct CategorySums {
    /// Uses of blocks, each of which begins a wait for the next.
    pub uses: f64,
    /// Blocks used again, by the age at which they were.
    pub reuses: [f64; AGES],
    /// Block-seconds spent at an age without a use. Nothing where it is not counted.
    pub exposure_s: [f64; AGES],
    /// Blocks of the category that a request used again, summed over requests, and their squares.
    pub clusters: (f64, f64),
}

impl Default for CategorySums {
    fn default() -> Self {
        CategorySums { uses: 0.0, reuses: [0.0; AGES], exposure_s: [0.0; AGES], clusters: (0.0, 0.0) }
    }
}

/// Why sums were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsound {
    /// A sum is no number, is endless, is negative or is more than can have been seen.
    Sum {
        /// The category.
        category: u16,
    },
    /// Sizes of clusters that no blocks have: their squares are less than they, or more than those of the largest.
    Clusters {
        /// The category.
        category: u16,
    },
    /// A category that nobody knows.
    Category {
        /// Its number.
        number: u32,
    },
    /// A category is named twice.
    Twice {
        /// The category.
        category: u16,
    },
    /// More ages than there are.
    Ages {
        /// The category.
        category: u16,
    },
}

impl std::fmt::Display for Unsound {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unsound::Sum { category } => {
                write!(
                    out,
                    "a sum of category {category} is not one that was counted: expected 0 to {SUM_MAX:e}"
                )
            }
            Unsound::Clusters { category } => {
                write!(
                    out,
                    "the clusters of category {category} are not of blocks: expected squares of 1 to {CLUSTER_MAX} times their sum"
                )
            }
            Unsound::Category { number } => {
                write!(
                    out,
                    "there is no category {number}: expected less than {CATEGORIES_MAX}; run the same release"
                )
            }
            Unsound::Twice { category } => write!(out, "category {category} is named twice: send each once"),
            Unsound::Ages { category } => {
                write!(
                    out,
                    "category {category} has more than {AGES} ages: run the same release on both ends"
                )
            }
        }
    }
}

impl std::error::Error for Unsound {}

impl CategorySums {
    fn numbers(&self) -> impl Iterator<Item = f64> {
        let (clusters, squares) = self.clusters;
        let ages = self.reuses.iter().chain(&self.exposure_s).copied();
        [self.uses, clusters, squares].into_iter().chain(ages)
    }

    fn numbers_mut(&mut self) -> impl Iterator<Item = &mut f64> {
        let (clusters, squares) = &mut self.clusters;
        let ages = self.reuses.iter_mut().chain(&mut self.exposure_s);
        [&mut self.uses, clusters, squares].into_iter().chain(ages)
    }

    /// Whether clusters of 1 to [`CLUSTER_MAX`] blocks can add up to these. Sums that fade are weighted ones, `Σw·n` and
    /// `Σw·n²`, so squares may well be more than the square of the sum: one cluster that is nearly forgotten. What is
    /// rounded on the wire still keeps its order, and is off by a ten-millionth or by next to nothing.
    fn has_sound_clusters(&self) -> bool {
        let (sum, squares) = self.clusters;
        squares >= sum && squares <= sum * CLUSTER_MAX * (1.0 + 1e-6) + 1e-30
    }

    fn scale(&mut self, share: f64) {
        self.numbers_mut().for_each(|sum| *sum *= share);
    }

    /// Blocks used again, at any age.
    #[must_use]
    pub fn reused(&self) -> f64 {
        self.reuses.iter().sum()
    }

    /// Mean time between a use and the next, in microseconds, as if all reuses of an age were in its middle: at most
    /// an eighth off. Nothing without a reuse.
    #[must_use]
    pub fn interval_us(&self) -> Option<f64> {
        let sum: f64 = self.reuses.iter().enumerate().map(|(band, reuses)| reuses * middle_us(band)).sum();
        Some(sum / self.reused()).filter(|mean| mean.is_finite() && *mean > 0.0)
    }

    /// Blocks that all of this takes at least: no wait is at an age for longer than the age lasts, and every reuse
    /// ends one.
    #[must_use]
    pub fn blocks(&self) -> f64 {
        let waits = self.exposure_s.iter().enumerate().map(|(band, seconds)| seconds / width_s(band));
        waits.fold(self.uses.max(self.reused()), f64::max)
    }

    /// Mean size of the cluster that a reused block is in; one where none was seen.
    #[must_use]
    pub fn cluster_blocks(&self) -> f64 {
        let (sum, squares) = self.clusters;
        if sum > 0.0 { (squares / sum).max(1.0) } else { 1.0 }
    }

    /// By what these sums are multiplied to count in requests, and for [`TOLD_REQUESTS`] at most.
    #[must_use]
    pub fn weight(&self) -> f64 {
        (TOLD_REQUESTS / self.requests().max(TOLD_REQUESTS)) / self.cluster_blocks()
    }

    /// Requests that all of this takes, as far as they move together.
    #[must_use]
    pub fn requests(&self) -> f64 {
        self.blocks() / self.cluster_blocks()
    }

    /// Adds what another saw of it.
    pub fn add(&mut self, other: &CategorySums) {
        self.numbers_mut().zip(other.numbers()).for_each(|(sum, more)| *sum = (*sum + more).min(SUM_MAX));
    }

    /// How far apart two are once both count as whoever is told of them counts them: 0 for the same, 2 where they
    /// have nothing in common and one counts for all that it can. Of few requests it is less in proportion: what one
    /// more changes is nothing yet.
    fn distance(&self, other: &CategorySums) -> f64 {
        let (left, right) = (self.weight(), other.weight());
        let parts = [(&self.reuses, &other.reuses), (&self.exposure_s, &other.exposure_s)];
        let apart = |(ours, theirs): (&[f64; AGES], &[f64; AGES])| {
            let gap: f64 =
                ours.iter().zip(theirs).map(|(our, their)| (our * left - their * right).abs()).sum();
            let all: f64 = ours.iter().sum::<f64>() * left + theirs.iter().sum::<f64>() * right;
            if all > 0.0 { 2.0 * gap / all } else { 0.0 }
        };
        let requests = self.requests().max(other.requests()).min(TOLD_REQUESTS);
        parts.into_iter().map(apart).fold(0.0, f64::max) * requests / TOLD_REQUESTS
    }
}

/// How long an age lasts, in seconds; of the open last one, as long as the first hour of it.
fn width_s(band: usize) -> f64 {
    if band + 1 < BANDS { (start_us(band + 1) - start_us(band)) as f64 / 1e6 } else { 3600.0 }
}

/// The middle of an age in microseconds; of the open last one, the end of its first hour.
fn middle_us(band: usize) -> f64 {
    start_us(band) as f64 + if band + 1 < BANDS { width_s(band) / 2.0 } else { width_s(band) } * 1e6
}

/// What was seen, by category.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statistics {
    by_category: BTreeMap<u16, CategorySums>,
}

impl Statistics {
    /// Adds what was seen of one category.
    pub fn add(&mut self, role: Role, sums: &CategorySums) {
        self.by_category.entry(role.number()).or_default().add(sums);
    }

    /// Adds what somebody says was seen of one category, which must not have been added before.
    ///
    /// # Errors
    /// When it cannot have been seen, or the category is none or is there already; then nothing is added.
    pub fn add_told(&mut self, number: u32, sums: CategorySums) -> Result<(), Unsound> {
        let known = u16::try_from(number).ok().filter(|number| usize::from(*number) < CATEGORIES_MAX);
        let category = known.ok_or(Unsound::Category { number })?;
        if !sums.numbers().all(|sum| (0.0..=SUM_MAX).contains(&sum)) {
            return Err(Unsound::Sum { category });
        }
        if !sums.has_sound_clusters() {
            return Err(Unsound::Clusters { category });
        }
        if self.by_category.contains_key(&category) {
            return Err(Unsound::Twice { category });
        }
        self.by_category.insert(category, sums);
        Ok(())
    }

    /// Adds what another saw.
    pub fn merge(&mut self, other: &Statistics) {
        for (category, sums) in &other.by_category {
            self.by_category.entry(*category).or_default().add(sums);
        }
    }

    /// What one node saw, in requests instead of blocks: by its own sizes of clusters, so that what one node says of
    /// its own has no power over what others saw. Where it saw none, by the size that is usual of its other categories.
    /// What comes out has no clusters, and is not to be turned into requests again.
    #[must_use]
    pub fn in_requests(&self) -> Statistics {
        let usual = self.usual_cluster_blocks();
        let of = |(&category, sums): (&u16, &CategorySums)| {
            let blocks = match Role::of_number(category) {
                _ if sums.clusters.0 > 0.0 => sums.cluster_blocks(),
                Some(Role::Session(..) | Role::Shared(_)) => usual,
                // One of a request; or the paper's, which counts blocks as requests.
                Some(Role::Partial | Role::Paper(..)) | None => 1.0,
            };
            let mut sums = CategorySums { clusters: (0.0, 0.0), ..sums.clone() };
            sums.scale(1.0 / blocks);
            (category, sums)
        };
        Statistics { by_category: self.by_category.iter().map(of).collect() }
    }

    /// The middle one of the sizes of clusters that are known: one category of huge prompts says nothing of the others.
    fn usual_cluster_blocks(&self) -> f64 {
        let known = self.by_category.values().filter(|sums| sums.clusters.0 > 0.0);
        let mut sizes: Vec<f64> = known.map(CategorySums::cluster_blocks).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.get(sizes.len() / 2).copied().unwrap_or(CLUSTER_BLOCKS)
    }

    /// Adds what one node saw in requests, of each category so many of them at most: so that no node outweighs all
    /// others by its numbers.
    pub fn merge_at_most(&mut self, node: &Statistics, requests: f64) {
        for (category, sums) in &node.by_category {
            let mut sums = CategorySums { clusters: (0.0, 0.0), ..sums.clone() };
            sums.scale((requests / sums.blocks().max(requests)).clamp(0.0, 1.0));
            self.by_category.entry(*category).or_default().add(&sums);
        }
    }

    /// Lets everything count `kept` (0 to 1) times as much, and forgets categories of which less than half a block is
    /// left.
    pub fn fade(&mut self, kept: f64) {
        let kept = kept.clamp(0.0, 1.0);
        self.by_category.values_mut().for_each(|sums| sums.scale(kept));
        self.by_category.retain(|_, sums| sums.blocks() >= 0.5);
    }

    /// Whether nothing was seen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_category.is_empty()
    }

    /// What was seen of each category, in the order of their numbers.
    pub fn categories(&self) -> impl Iterator<Item = (u16, &CategorySums)> {
        self.by_category.iter().map(|(category, sums)| (*category, sums))
    }

    /// What was seen of this role, if anything was.
    #[must_use]
    pub fn of(&self, role: Role) -> Option<&CategorySums> {
        self.by_category.get(&role.number())
    }

    /// What was seen of each role.
    pub fn roles(&self) -> impl Iterator<Item = (Role, &CategorySums)> {
        self.categories().filter_map(|(number, sums)| Some((Role::of_number(number)?, sums)))
    }

    /// How far these are from others, as whoever is told of them counts them: the greatest distance of a category, 0
    /// to 2.
    #[must_use]
    pub fn distance(&self, other: &Statistics) -> f64 {
        let nothing = CategorySums::default();
        let all = self.by_category.keys().chain(other.by_category.keys());
        let of = |all: &Statistics, category: &u16| all.by_category.get(category).unwrap_or(&nothing).clone();
        all.map(|category| of(self, category).distance(&of(other, category))).fold(0.0, f64::max)
    }
}

#[cfg(test)]
#[path = "statistics_tests.rs"]
mod tests;
