//! Reuse hazard of a class by age, and the value of keeping a block.
//!
//! Two sums per class and age band: reuses `R` (blocks used again at that age) and exposure `E`
//! (block-seconds at that age without a use, resident or ghost). The hazard is `R / E`, shrunk
//! towards the wider population by `κ` observations; an observation is a request, not a block (see
//! [`Evidence::fit`]). Not here: exposure of waits in progress ([`super::open_waits`]).

use super::super::bands::{self, BANDS};
use super::classes::{CLASSES, ClassMeaning, KINDS, ReuseClass, ReuseClasses, SHARED_AT, TURNS};
use super::open_waits::WaitCounts;
use crate::evict::reuse_stats::{CLUSTER_BLOCKS_DEFAULT, CategorySums, ReuseStats};

/// A sum per band.
pub(super) type BandSums = [f64; BANDS];
/// Value per age band, the lookup table for queue heads.
pub(super) type ValueTable = [f32; BANDS];

/// Fitted tables of every class.
#[derive(Clone, Debug)]
pub(super) struct ClassTables {
    pub(super) values: [ValueTable; CLASSES],
    expected_uses: [ExpectedUses; CLASSES],
}

impl ClassTables {
    pub(super) fn new() -> Self {
        ClassTables { values: [[0.0; BANDS]; CLASSES], expected_uses: [[0.0; BANDS + 1]; CLASSES] }
    }

    /// Copies the tables of one class to another.
    pub(super) fn copy_class(&mut self, from: usize, to: usize) {
        (self.values[to], self.expected_uses[to]) = (self.values[from], self.expected_uses[from]);
    }

    /// Probability of a use of a block of the class between two ages, or until its value falls
    /// below `least`.
    pub(super) fn chance(&self, class: ReuseClass, from_us: u64, to_us: u64, least: f32) -> f64 {
        let (values, uses) = (&self.values[class.index()], &self.expected_uses[class.index()]);
        let leaves = (bands::band(from_us)..BANDS).find(|&band| values[band] < least);
        let end_us = leaves.map_or(to_us, |band| bands::start_us(band).clamp(from_us, to_us.max(from_us)));
        (-(expected_uses_by(uses, end_us) - expected_uses_by(uses, from_us))).exp_m1().abs()
    }
}

/// Expected uses of a waiting block up to the start of each band; the last entry adds an hour of
/// the open last band.
type ExpectedUses = [f32; BANDS + 1];

/// Width of the last step of [`ExpectedUses`], in seconds.
const OPEN_S: f64 = 3600.0;

fn width_s(band: usize) -> f64 {
    if band + 1 < BANDS { (bands::start_us(band + 1) - bands::start_us(band)) as f64 / 1e6 } else { OPEN_S }
}

fn expected_uses(hazard: &BandSums) -> ExpectedUses {
    let mut sum = 0.0;
    std::array::from_fn(|band| {
        let before = sum;
        sum += hazard.get(band).map_or(0.0, |hazard| hazard * width_s(band));
        before as f32
    })
}

/// Expected uses up to an age.
fn expected_uses_by(uses: &ExpectedUses, age_us: u64) -> f64 {
    let band = bands::band(age_us);
    let inside = age_us.saturating_sub(bands::start_us(band)) as f64 / 1e6 / width_s(band);
    f64::from(uses[band]) + inside * f64::from(uses[band + 1] - uses[band])
}

/// Weight of the wider population for the level of a hazard, in requests; and the reach of the
/// level in bands (three octaves).
const LEVEL_REQUESTS: f64 = 3.0;
const LEVEL_REACH: usize = 12;
/// Weight of that level for the hazard of a single band with its neighbours (the shape), in
/// requests.
const SHAPE_REQUESTS: f64 = 15.0;
const SHAPE_REACH: usize = 1;
/// Initial hazard of partly filled tails, as a share of other blocks' hazard.
const PARTIAL_WORTH: f64 = 0.05;
/// Minimum number of observed blocks for a report.
const REPORT_BLOCKS_MIN: f64 = 1.0;
/// Top-level populations: partly filled tails, blocks of one session, shared blocks.
const PARTIAL: usize = 0;
const SESSIONS: usize = 1;
const SHARED: usize = 2;

/// All observations, decayed over time.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    /// By band, then class: exposure is added to all classes of a band at a time.
    reuses: Vec<[f64; CLASSES]>,
    exposure_s: Vec<[f64; CLASSES]>,
    /// Sum of cluster sizes and of their squares; a cluster is the blocks of one class used by one
    /// request.
    clusters: [(f64, f64); CLASSES],
    /// The fleet's observations, in requests; not decayed here.
    fleet: Vec<(ClassMeaning, FleetEvidence)>,
}

/// The fleet's observations of a population. In requests, so that the block counts of other nodes
/// do not matter.
#[derive(Clone, Copy, Debug)]
struct FleetEvidence {
    is_present: bool,
    reuses: BandSums,
    exposure_s: BandSums,
}

/// A class, or several that are estimated together.
#[derive(Clone)]
struct Population {
    wider: Option<usize>,
    reuses: BandSums,
    exposure_s: BandSums,
    clusters: (f64, f64),
    fleet: FleetEvidence,
}

impl Evidence {
    pub(super) fn new() -> Self {
        Evidence {
            reuses: vec![[0.0; CLASSES]; BANDS],
            exposure_s: vec![[0.0; CLASSES]; BANDS],
            clusters: [(0.0, 0.0); CLASSES],
            fleet: Vec::new(),
        }
    }

    /// Replaces the fleet's observations.
    pub(super) fn set_fleet_stats(&mut self, fleet: &ReuseStats) {
        let known = fleet
            .roles()
            .filter_map(|(role, sums)| Some((ClassMeaning::from_role(role)?, FleetEvidence::of(sums))));
        self.fleet = known.collect();
    }

    /// Own observations by category role.
    pub(super) fn reuse_stats(&self, classes: &ReuseClasses) -> ReuseStats {
        let mut all = ReuseStats::default();
        for (class, meaning) in classes.meanings().into_iter().enumerate() {
            let Some(role) = meaning.role() else { continue };
            let of = |sums: &[[f64; CLASSES]], band: usize| sums[band][class];
            let sums = CategorySums {
                // Every wait begins in the first band.
                uses: of(&self.exposure_s, 0) / width_s(0),
                reuses: std::array::from_fn(|band| of(&self.reuses, band)),
                exposure_s: std::array::from_fn(|band| of(&self.exposure_s, band)),
                clusters: self.clusters[class],
            };
            if sums.blocks() >= REPORT_BLOCKS_MIN {
                all.add(role, &sums);
            }
        }
        all
    }

    /// Counts a reuse at this age.
    pub(super) fn add_reuse(&mut self, class: ReuseClass, age_us: u64) {
        self.reuses[bands::band(age_us)][class.index()] += 1.0;
    }

    /// Counts one request that reused `blocks` blocks of the class.
    pub(super) fn add_cluster(&mut self, class: ReuseClass, blocks: u32) {
        let (sum, squares) = &mut self.clusters[class.index()];
        *sum += f64::from(blocks);
        *squares += f64::from(blocks) * f64::from(blocks);
    }

    /// Adds the exposure of a block from one age to another.
    pub(super) fn add_exposure(&mut self, class: ReuseClass, from_us: u64, to_us: u64) {
        split_into_bands(from_us, to_us, |band, seconds| self.exposure_s[band][class.index()] += seconds);
    }

    /// Adds the exposure of `blocks` blocks of each class from one age to another.
    pub(super) fn add_exposure_of_all(&mut self, blocks: &WaitCounts, from_us: u64, to_us: u64) {
        // Skips empty slots, which are most of the old ones.
        if blocks.iter().fold(0, |any, &blocks| any | blocks) == 0 {
            return;
        }
        split_into_bands(from_us, to_us, |band, seconds| {
            for (sum, &blocks) in self.exposure_s[band].iter_mut().zip(blocks) {
                *sum += f64::from(blocks) * seconds;
            }
        });
    }

    /// Exposure of a class by band.
    #[cfg(test)]
    pub(super) fn exposure_s(&self, class: ReuseClass) -> Vec<f64> {
        self.exposure_s.iter().map(|band| band[class.index()]).collect()
    }

    /// Multiplies all own observations by `kept`.
    pub(super) fn decay(&mut self, kept: f64) {
        self.reuses.iter_mut().chain(&mut self.exposure_s).flatten().for_each(|sum| *sum *= kept);
        self.clusters.iter_mut().for_each(|(sum, squares)| (*sum, *squares) = (*sum * kept, *squares * kept));
    }

    /// Computes the value tables of all classes.
    ///
    /// A class is shrunk towards its wider population, that towards the next wider, the widest
    /// towards an assumed hazard that falls with age: `h = (R/c + κ) / (E/c + κ/h_wider)`. `c` is
    /// the mean cluster size of a reused block (`Σn²/Σn`): blocks of a request move together, so a
    /// request that reuses 500 is one observation.
    pub(super) fn fit(&self, classes: &ReuseClasses, tables: &mut ClassTables) {
        let populations = self.populations(classes);
        let mut hazards: Vec<BandSums> = vec![[0.0; BANDS]; populations.len()];
        let mut cluster_blocks = vec![CLUSTER_BLOCKS_DEFAULT; populations.len()];
        // Wider populations come first.
        for (at, population) in populations.iter().enumerate() {
            let prior = match population.wider {
                Some(wider) => hazards[wider],
                None => assumed_hazard(if at == PARTIAL { PARTIAL_WORTH } else { 1.0 }),
            };
            cluster_blocks[at] = population
                .cluster_blocks(population.wider.map_or(CLUSTER_BLOCKS_DEFAULT, |w| cluster_blocks[w]));
            hazards[at] = population.hazard(&prior, cluster_blocks[at]);
        }
        let first = populations.len() - CLASSES;
        for (class, hazard) in hazards[first..].iter().enumerate() {
            tables.values[class] = value_table(hazard);
            tables.expected_uses[class] = expected_uses(hazard);
        }
        // A use of a block uses all blocks before it. So shared blocks are worth no less than
        // session blocks, and are no less likely to be used.
        let (floor, least) = (value_table(&hazards[SESSIONS]), expected_uses(&hazards[SESSIONS]));
        for class in SHARED_AT..CLASSES {
            let (values, uses) = (&mut tables.values[class], &mut tables.expected_uses[class]);
            values.iter_mut().zip(floor).for_each(|(value, floor)| *value = value.max(floor));
            let own = *uses;
            for band in 1..=BANDS {
                uses[band] = uses[band - 1] + (own[band] - own[band - 1]).max(least[band] - least[band - 1]);
            }
        }
    }

    /// All populations, wider ones first, the classes last and in their order.
    fn populations(&self, classes: &ReuseClasses) -> Vec<Population> {
        // 0: partial, 1: sessions, 2: shared, then sessions by turn, then sessions by kind and
        // turn.
        let meanings = classes.meanings();
        let (by_turn, by_kind) = (3, 3 + TURNS);
        let first = by_kind + KINDS * TURNS;
        let fresh = |wider| Population {
            wider,
            reuses: [0.0; BANDS],
            exposure_s: [0.0; BANDS],
            clusters: (0.0, 0.0),
            fleet: FleetEvidence::NOTHING,
        };
        let mut all: Vec<Population> = vec![fresh(None); 3];
        all.extend((0..TURNS).map(|_| fresh(Some(SESSIONS))));
        all.extend((0..KINDS * TURNS).map(|at| fresh(Some(by_turn + at % TURNS))));
        for meaning in meanings {
            all.push(fresh(Some(match meaning {
                ClassMeaning::Partial => PARTIAL,
                ClassMeaning::Arriving => SESSIONS,
                ClassMeaning::Shared(_) => SHARED,
                ClassMeaning::Session(kind, turn, _) => by_kind + kind * TURNS + turn,
            })));
        }
        for (meaning, told) in &self.fleet {
            // A finer class that is unknown here counts for its kind and turn.
            let class = meanings.iter().position(|known| known == meaning).map(|class| first + class);
            let wider = match meaning {
                ClassMeaning::Session(kind, turn, _) => Some(by_kind + kind * TURNS + turn),
                _ => None,
            };
            if let Some(at) = class.or(wider) {
                all[at].fleet.add(told);
            }
        }
        for at in (0..all.len()).rev() {
            if let Some(class) = at.checked_sub(first) {
                let population = &mut all[at];
                for band in 0..BANDS {
                    population.reuses[band] = self.reuses[band][class];
                    population.exposure_s[band] = self.exposure_s[band][class];
                }
                population.clusters = self.clusters[class];
            }
            if let Some(wider) = all[at].wider {
                let (left, right) = all.split_at_mut(at);
                left[wider].add(&right[0]);
            }
        }
        all
    }
}

impl FleetEvidence {
    const NOTHING: FleetEvidence =
        FleetEvidence { is_present: false, reuses: [0.0; BANDS], exposure_s: [0.0; BANDS] };

    fn of(sums: &CategorySums) -> FleetEvidence {
        let weight = sums.weight();
        let weighed = |sums: &BandSums| sums.map(|sum| sum * weight);
        FleetEvidence {
            is_present: true,
            reuses: weighed(&sums.reuses),
            exposure_s: weighed(&sums.exposure_s),
        }
    }

    fn add(&mut self, other: &FleetEvidence) {
        if !other.is_present {
            return;
        }
        self.is_present = true;
        self.reuses.iter_mut().zip(other.reuses).for_each(|(sum, more)| *sum += more);
        self.exposure_s.iter_mut().zip(other.exposure_s).for_each(|(sum, more)| *sum += more);
    }
}

impl Population {
    fn add(&mut self, other: &Population) {
        for band in 0..BANDS {
            self.reuses[band] += other.reuses[band];
            self.exposure_s[band] += other.exposure_s[band];
        }
        self.clusters.0 += other.clusters.0;
        self.clusters.1 += other.clusters.1;
        self.fleet.add(&other.fleet);
    }

    /// Mean cluster size of a reused block, with one extra cluster of the wider population's size:
    /// without reuses, the blocks cannot be assumed independent.
    fn cluster_blocks(&self, wider: f64) -> f64 {
        ((self.clusters.1 + wider * wider) / (self.clusters.0 + wider)).max(1.0)
    }

    fn hazard(&self, prior: &BandSums, cluster: f64) -> BandSums {
        let level = self.shrink_to_prior(prior, cluster, LEVEL_REACH, LEVEL_REQUESTS);
        self.shrink_to_prior(&level, cluster, SHAPE_REACH, SHAPE_REQUESTS)
    }

    fn shrink_to_prior(&self, prior: &BandSums, cluster: f64, reach: usize, k: f64) -> BandSums {
        let due_of = |exposure_s: &BandSums| -> BandSums {
            std::array::from_fn(|band| exposure_s[band] * prior[band])
        };
        let (expected, told_expected) = (due_of(&self.exposure_s), due_of(&self.fleet.exposure_s));
        std::array::from_fn(|band| {
            let (from, to) = (band.saturating_sub(reach), (band + reach).min(BANDS - 1));
            let near = |sums: &BandSums| {
                let weighed =
                    |near: usize| (1.0 - near.abs_diff(band) as f64 / (reach + 1) as f64) * sums[near];
                (from..=to).map(weighed).sum::<f64>()
            };
            // Own blocks are converted to requests here; the fleet's sums are in requests already.
            let of = |own: &BandSums, told: &BandSums| {
                near(own) / cluster + if self.fleet.is_present { near(told) } else { 0.0 }
            };
            let (seen, due) = (of(&self.reuses, &self.fleet.reuses), of(&expected, &told_expected));
            prior[band] * (seen + k) / (due + k)
        })
    }
}

/// Initial hazard per second: `scale / (age + 1 s)`. Only its decrease matters.
fn assumed_hazard(scale: f64) -> BandSums {
    std::array::from_fn(|band| 0.3 * scale / (bands::start_us(band) as f64 / 1e6 + 1.0))
}

/// Splits an age interval into bands: band and seconds in it.
fn split_into_bands(from_us: u64, to_us: u64, mut add: impl FnMut(usize, f64)) {
    let (mut at_us, mut band) = (from_us, bands::band(from_us));
    while at_us < to_us {
        let end_us = bands::start_us(band + 1).min(to_us);
        add(band, (end_us - at_us) as f64 / 1e6);
        (at_us, band) = (end_us, band + 1);
    }
}

/// Expected hits and block-seconds from the start of one band to the end of another, and the
/// probability to survive until then.
#[derive(Clone, Copy)]
struct BandInterval {
    hits: f64,
    seconds: f64,
    survival: f64,
}

impl BandInterval {
    fn rate(&self) -> f64 {
        self.hits / self.seconds
    }
}

/// `index(a) = max over T of E[hits in (a, a+T]] / E[block-seconds spent in (a, a+T]]` at the start
/// of every band.
///
/// From the oldest band down: a band merges with the interval behind it while that has the higher
/// rate and so raises the total rate. `stack` holds the intervals that do not merge.
fn value_table(hazard: &BandSums) -> ValueTable {
    let mut table = [0.0; BANDS];
    let mut stack: Vec<BandInterval> = Vec::with_capacity(BANDS);
    for band in (0..BANDS).rev() {
        let hazard = hazard[band].max(1e-12);
        let width_s = (bands::start_us(band + 1) - bands::start_us(band)) as f64 / 1e6;
        let survive = (-hazard * width_s).exp();
        // 1 - e^-x, exact for small x.
        let hits = -(-hazard * width_s).exp_m1();
        let mut stretch = BandInterval { hits, seconds: hits / hazard, survival: survive };
        while let Some(next) = stack.last()
            && next.rate() > stretch.rate()
        {
            stretch.hits += stretch.survival * next.hits;
            stretch.seconds += stretch.survival * next.seconds;
            stretch.survival *= next.survival;
            stack.pop();
        }
        table[band] = stretch.rate() as f32;
        stack.push(stretch);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, computed directly by trying all ends.
    fn best_rate(hazard: &BandSums, from: usize) -> f64 {
        let (mut hits, mut seconds, mut survive, mut best) = (0.0, 0.0, 1.0, 0.0_f64);
        for (band, &hazard) in hazard.iter().enumerate().skip(from) {
            let width_s = (bands::start_us(band + 1) - bands::start_us(band)) as f64 / 1e6;
            let chance = 1.0 - (-hazard * width_s).exp();
            hits += survive * chance;
            seconds += survive * chance / hazard;
            survive *= 1.0 - chance;
            best = best.max(hits / seconds);
        }
        best
    }

    #[test]
    fn value_is_the_best_rate_over_all_horizons() {
        let humps: BandSums = std::array::from_fn(|band| {
            let (near, far) = (band as f64 - 30.0, band as f64 - 55.0);
            0.001 + 0.2 * (-near * near / 20.0).exp() + 0.02 * (-far * far / 8.0).exp()
        });
        for hazard in [humps, assumed_hazard(1.0), [0.5; BANDS]] {
            let table = value_table(&hazard);
            for (band, &value) in table.iter().enumerate() {
                let best = best_rate(&hazard, band);
                assert!((f64::from(value) / best - 1.0).abs() < 1e-4, "{value} instead of {best} at {band}");
            }
        }
    }

    #[test]
    fn reuse_chance_follows_the_hazard() {
        const HOUR: u64 = 3_600_000_000;
        let class = ReuseClass(7);
        let mut tables = ClassTables::new();
        Evidence::new().fit(&ReuseClasses::default(), &mut tables);
        // 0.3 a second divided by the age: as many uses from one hour to two as from two to four.
        let expected = 1.0 - 2.0_f64.powf(-0.3);
        for from in [HOUR / 8, HOUR, 2 * HOUR] {
            let chance = tables.chance(class, from, 2 * from, 0.0);
            assert!((chance - expected).abs() < 0.02, "{chance} instead of {expected}, from {from}");
        }
        // The last band, from 4.8 hours on, has a constant hazard: 0.00002 a second at any age.
        let chances: Vec<f64> =
            [5, 6, 24, 1000].map(|age| tables.chance(class, age * HOUR, (age + 1) * HOUR, 0.0)).into();
        assert!(chances.iter().all(|chance| (chance - 0.061).abs() < 0.001), "{chances:?}");
        assert_eq!(tables.chance(class, HOUR, HOUR, 0.0), 0.0);
        let worth = tables.values[class.index()][BANDS - 1];
        assert_eq!(
            tables.chance(class, 6 * HOUR, 7 * HOUR, worth),
            chances[0],
            "it stays: no block is worth more"
        );
        assert_eq!(tables.chance(class, 6 * HOUR, 7 * HOUR, worth * 1.01), 0.0);
        let until = tables.values[class.index()][bands::band(HOUR)] * 1.01;
        let (passing, staying) =
            (tables.chance(class, HOUR / 2, 9 * HOUR, until), tables.chance(class, HOUR / 2, 9 * HOUR, 0.0));
        assert!(passing > 0.1 && passing < staying / 2.0, "{passing} of {staying}");
    }

    #[test]
    fn shared_blocks_are_as_likely_to_be_used() {
        let (shared, mut evidence, mut tables) =
            (ReuseClass(SHARED_AT as u8), Evidence::new(), ClassTables::new());
        evidence.add_exposure(shared, 0, 3_600_000_000_000);
        evidence.fit(&ReuseClasses::default(), &mut tables);
        for age_us in [1_000_000, 60_000_000, 3_600_000_000, 36_000_000_000] {
            let of = |class| tables.chance(class, age_us, 2 * age_us, 0.0);
            assert!(
                of(shared) >= of(ReuseClass::ARRIVING) * 0.99,
                "{} of {}",
                of(shared),
                of(ReuseClass::ARRIVING)
            );
        }
    }

    #[test]
    fn without_evidence_the_order_is_lru() {
        let mut tables = ClassTables::new();
        Evidence::new().fit(&ReuseClasses::default(), &mut tables);
        let values = &tables.values;
        assert!(values[1].windows(2).all(|pair| pair[0] >= pair[1]));
        assert!(values[1] == values[5] && values[0][0] < values[1][0]);
    }
}
