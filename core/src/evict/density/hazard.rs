//! How likely a block of a class is used again at an age, and what it is worth to keep it.
//!
//! Per class and age band two sums: reuses `R` (blocks used again at that age) and exposure `E` (block-seconds
//! spent at that age without a use, resident or remembered). The hazard is `R / E`, drawn towards that of the wider
//! population by `κ` observations; an observation is a request, not a block (see [`Evidence::fit`]). Not here: who
//! counts exposure of what lives ([`super::alive`]).

use super::super::bands::{self, BANDS};
use super::alive::Waiting;
use super::classes::{CLASSES, Class, Classes, KINDS, Meaning, SHARED_AT, TURNS};
use crate::evict::statistics::{CLUSTER_BLOCKS, CategorySums, Statistics};

/// A sum per band.
pub(super) type Sums = [f64; BANDS];
/// Value per age band: what a head is looked up in.
pub(super) type Table = [f32; BANDS];

/// What was found out of every class.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    pub(super) values: [Table; CLASSES],
    uses: [Uses; CLASSES],
}

impl Tables {
    pub(super) fn new() -> Self {
        Tables { values: [[0.0; BANDS]; CLASSES], uses: [[0.0; BANDS + 1]; CLASSES] }
    }

    /// One class is worth what another is.
    pub(super) fn copy(&mut self, from: usize, to: usize) {
        (self.values[to], self.uses[to]) = (self.values[from], self.uses[from]);
    }

    /// Chance of a use of a block of the class from one age to another, or until it is worth less than `least`.
    pub(super) fn chance(&self, class: Class, from_us: u64, to_us: u64, least: f32) -> f64 {
        let (values, uses) = (&self.values[class.at()], &self.uses[class.at()]);
        let leaves = (bands::band(from_us)..BANDS).find(|&band| values[band] < least);
        let end_us = leaves.map_or(to_us, |band| bands::start_us(band).clamp(from_us, to_us.max(from_us)));
        (-(uses_by(uses, end_us) - uses_by(uses, from_us))).exp_m1().abs()
    }
}

/// Uses expected of a block up to the beginning of each band, were it to wait on after each; last, as many as in an hour of
/// the open last band.
type Uses = [f32; BANDS + 1];

/// What the last step of [`Uses`] stands for, in seconds.
const OPEN_S: f64 = 3600.0;

fn width_s(band: usize) -> f64 {
    if band + 1 < BANDS { (bands::start_us(band + 1) - bands::start_us(band)) as f64 / 1e6 } else { OPEN_S }
}

fn expected_uses(hazard: &Sums) -> Uses {
    let mut sum = 0.0;
    std::array::from_fn(|band| {
        let before = sum;
        sum += hazard.get(band).map_or(0.0, |hazard| hazard * width_s(band));
        before as f32
    })
}

/// Uses expected up to an age.
fn uses_by(uses: &Uses, age_us: u64) -> f64 {
    let band = bands::band(age_us);
    let inside = age_us.saturating_sub(bands::start_us(band)) as f64 / 1e6 / width_s(band);
    f64::from(uses[band]) + inside * f64::from(uses[band + 1] - uses[band])
}

/// Requests the wider population counts for as to how high a hazard is within this many bands (three octaves).
const LEVEL_REQUESTS: f64 = 3.0;
const LEVEL_REACH: usize = 12;
/// Requests the level found so counts for as to the hazard of one band, seen with its neighbours: the shape.
const SHAPE_REQUESTS: f64 = 15.0;
const SHAPE_REACH: usize = 1;
/// Hazard assumed of partly filled tails, as a share of that of other blocks.
const PARTIAL_WORTH: f64 = 0.05;
/// What was seen of fewer blocks than this is not worth telling.
const SEEN_MIN: f64 = 1.0;
/// Populations that stand for themselves: partly filled tails, blocks of one session, shared blocks.
const PARTIAL: usize = 0;
const SESSIONS: usize = 1;
const SHARED: usize = 2;

/// What was seen so far, with what is long ago counting less.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    /// By band, then class: exposure is added to all classes of a band at a time.
    reuses: Vec<[f64; CLASSES]>,
    exposure_s: Vec<[f64; CLASSES]>,
    /// Sum of the sizes of clusters, and of their squares: blocks of one class used by one request.
    clusters: [(f64, f64); CLASSES],
    /// What the fleet saw, in requests; not faded here.
    told: Vec<(Meaning, Told)>,
}

/// What others saw of a population. Counted in requests, so that how many blocks their requests have says nothing of ours.
#[derive(Clone, Copy, Debug)]
struct Told {
    is_any: bool,
    reuses: Sums,
    exposure_s: Sums,
}

/// A population: a class, or some that are estimated together.
#[derive(Clone)]
struct Population {
    wider: Option<usize>,
    reuses: Sums,
    exposure_s: Sums,
    clusters: (f64, f64),
    told: Told,
}

impl Evidence {
    pub(super) fn new() -> Self {
        Evidence {
            reuses: vec![[0.0; CLASSES]; BANDS],
            exposure_s: vec![[0.0; CLASSES]; BANDS],
            clusters: [(0.0, 0.0); CLASSES],
            told: Vec::new(),
        }
    }

    /// Takes what the fleet saw in place of what it was said to have seen before.
    pub(super) fn inform(&mut self, fleet: &Statistics) {
        let known = fleet.roles().filter_map(|(role, sums)| Some((Meaning::of(role)?, Told::of(sums))));
        self.told = known.collect();
    }

    /// What was seen here, by what it means everywhere.
    pub(super) fn statistics(&self, classes: &Classes) -> Statistics {
        let mut all = Statistics::default();
        for (class, meaning) in classes.meanings().into_iter().enumerate() {
            let Some(role) = meaning.role() else { continue };
            let of = |sums: &[[f64; CLASSES]], band: usize| sums[band][class];
            let sums = CategorySums {
                // Every wait begins at the first age.
                uses: of(&self.exposure_s, 0) / width_s(0),
                reuses: std::array::from_fn(|band| of(&self.reuses, band)),
                exposure_s: std::array::from_fn(|band| of(&self.exposure_s, band)),
                clusters: self.clusters[class],
            };
            if sums.blocks() >= SEEN_MIN {
                all.add(role, &sums);
            }
        }
        all
    }

    /// A block was used again at this age.
    pub(super) fn reused(&mut self, class: Class, age_us: u64) {
        self.reuses[bands::band(age_us)][class.at()] += 1.0;
    }

    /// One request used so many blocks of the class again.
    pub(super) fn clustered(&mut self, class: Class, blocks: u32) {
        let (sum, squares) = &mut self.clusters[class.at()];
        *sum += f64::from(blocks);
        *squares += f64::from(blocks) * f64::from(blocks);
    }

    /// A block went from one age to another.
    pub(super) fn exposed(&mut self, class: Class, from_us: u64, to_us: u64) {
        spread(from_us, to_us, |band, seconds| self.exposure_s[band][class.at()] += seconds);
    }

    /// So many blocks of each class went from one age to another.
    pub(super) fn exposed_all(&mut self, blocks: &Waiting, from_us: u64, to_us: u64) {
        // What is nothing adds nothing, and it is most of what is long ago.
        if blocks.iter().fold(0, |any, &blocks| any | blocks) == 0 {
            return;
        }
        spread(from_us, to_us, |band, seconds| {
            for (sum, &blocks) in self.exposure_s[band].iter_mut().zip(blocks) {
                *sum += f64::from(blocks) * seconds;
            }
        });
    }

    /// Exposure of a class by band.
    #[cfg(test)]
    pub(super) fn exposure_s(&self, class: Class) -> Vec<f64> {
        self.exposure_s.iter().map(|band| band[class.at()]).collect()
    }

    /// Lets everything seen so far count `kept` times as much.
    pub(super) fn fade(&mut self, kept: f64) {
        self.reuses.iter_mut().chain(&mut self.exposure_s).flatten().for_each(|sum| *sum *= kept);
        self.clusters.iter_mut().for_each(|(sum, squares)| (*sum, *squares) = (*sum * kept, *squares * kept));
    }

    /// The value tables of all classes.
    ///
    /// A class is drawn to its wider population, that to the next wider, the widest to an assumed hazard that falls
    /// with age: `h = (R/c + κ) / (E/c + κ/h_wider)`. `c` is the mean size of the cluster a reused block is in
    /// (`Σn²/Σn`): the blocks of a request move together, so a request that uses 500 again is one observation.
    pub(super) fn fit(&self, classes: &Classes, tables: &mut Tables) {
        let populations = self.populations(classes);
        let mut hazards: Vec<Sums> = vec![[0.0; BANDS]; populations.len()];
        let mut cluster_blocks = vec![CLUSTER_BLOCKS; populations.len()];
        // Wider populations come first.
        for (at, population) in populations.iter().enumerate() {
            let prior = match population.wider {
                Some(wider) => hazards[wider],
                None => assumed(if at == PARTIAL { PARTIAL_WORTH } else { 1.0 }),
            };
            cluster_blocks[at] =
                population.cluster_blocks(population.wider.map_or(CLUSTER_BLOCKS, |w| cluster_blocks[w]));
            hazards[at] = population.hazard(&prior, cluster_blocks[at]);
        }
        let first = populations.len() - CLASSES;
        for (class, hazard) in hazards[first..].iter().enumerate() {
            tables.values[class] = values(hazard);
            tables.uses[class] = expected_uses(hazard);
        }
        // A block is used whenever one behind it is: what sessions share is worth no less than what is theirs, and no
        // less likely to be used.
        let (floor, least) = (values(&hazards[SESSIONS]), expected_uses(&hazards[SESSIONS]));
        for class in SHARED_AT..CLASSES {
            let (values, uses) = (&mut tables.values[class], &mut tables.uses[class]);
            values.iter_mut().zip(floor).for_each(|(value, floor)| *value = value.max(floor));
            let own = *uses;
            for band in 1..=BANDS {
                uses[band] = uses[band - 1] + (own[band] - own[band - 1]).max(least[band] - least[band - 1]);
            }
        }
    }

    /// All populations, wider ones first, the classes last and in their order.
    fn populations(&self, classes: &Classes) -> Vec<Population> {
        // 0: partial, 1: sessions, 2: shared, then sessions by turn, then sessions by kind and turn.
        let meanings = classes.meanings();
        let (by_turn, by_kind) = (3, 3 + TURNS);
        let first = by_kind + KINDS * TURNS;
        let fresh = |wider| Population {
            wider,
            reuses: [0.0; BANDS],
            exposure_s: [0.0; BANDS],
            clusters: (0.0, 0.0),
            told: Told::NOTHING,
        };
        let mut all: Vec<Population> = vec![fresh(None); 3];
        all.extend((0..TURNS).map(|_| fresh(Some(SESSIONS))));
        all.extend((0..KINDS * TURNS).map(|at| fresh(Some(by_turn + at % TURNS))));
        for meaning in meanings {
            all.push(fresh(Some(match meaning {
                Meaning::Partial => PARTIAL,
                Meaning::Arriving => SESSIONS,
                Meaning::Shared(_) => SHARED,
                Meaning::Session(kind, turn, _) => by_kind + kind * TURNS + turn,
            })));
        }
        for (meaning, told) in &self.told {
            // What is not told apart here is of its kind and turn.
            let class = meanings.iter().position(|known| known == meaning).map(|class| first + class);
            let wider = match meaning {
                Meaning::Session(kind, turn, _) => Some(by_kind + kind * TURNS + turn),
                _ => None,
            };
            if let Some(at) = class.or(wider) {
                all[at].told.add(told);
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

impl Told {
    const NOTHING: Told = Told { is_any: false, reuses: [0.0; BANDS], exposure_s: [0.0; BANDS] };

    fn of(sums: &CategorySums) -> Told {
        let weight = sums.weight();
        let weighed = |sums: &Sums| sums.map(|sum| sum * weight);
        Told { is_any: true, reuses: weighed(&sums.reuses), exposure_s: weighed(&sums.exposure_s) }
    }

    fn add(&mut self, other: &Told) {
        if !other.is_any {
            return;
        }
        self.is_any = true;
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
        self.told.add(&other.told);
    }

    /// Mean size of the cluster a reused block is in, with one more cluster of the size usual in the wider
    /// population: who saw no reuse does not know that his blocks are independent.
    fn cluster_blocks(&self, wider: f64) -> f64 {
        ((self.clusters.1 + wider * wider) / (self.clusters.0 + wider)).max(1.0)
    }

    fn hazard(&self, prior: &Sums, cluster: f64) -> Sums {
        let level = self.drawn(prior, cluster, LEVEL_REACH, LEVEL_REQUESTS);
        self.drawn(&level, cluster, SHAPE_REACH, SHAPE_REQUESTS)
    }

    fn drawn(&self, prior: &Sums, cluster: f64, reach: usize, k: f64) -> Sums {
        let due_of =
            |exposure_s: &Sums| -> Sums { std::array::from_fn(|band| exposure_s[band] * prior[band]) };
        let (expected, told_expected) = (due_of(&self.exposure_s), due_of(&self.told.exposure_s));
        std::array::from_fn(|band| {
            let (from, to) = (band.saturating_sub(reach), (band + reach).min(BANDS - 1));
            let near = |sums: &Sums| {
                let weighed =
                    |near: usize| (1.0 - near.abs_diff(band) as f64 / (reach + 1) as f64) * sums[near];
                (from..=to).map(weighed).sum::<f64>()
            };
            // Own blocks become requests here; what was told is in requests already.
            let of = |own: &Sums, told: &Sums| {
                near(own) / cluster + if self.told.is_any { near(told) } else { 0.0 }
            };
            let (seen, due) = (of(&self.reuses, &self.told.reuses), of(&expected, &told_expected));
            prior[band] * (seen + k) / (due + k)
        })
    }
}

/// Hazard assumed before anything was seen, per second: `scale / (age + 1 s)`. Only its fall matters.
fn assumed(scale: f64) -> Sums {
    std::array::from_fn(|band| 0.3 * scale / (bands::start_us(band) as f64 / 1e6 + 1.0))
}

/// Splits a way from one age to another into bands: band and seconds in it.
fn spread(from_us: u64, to_us: u64, mut add: impl FnMut(usize, f64)) {
    let (mut at_us, mut band) = (from_us, bands::band(from_us));
    while at_us < to_us {
        let end_us = bands::start_us(band + 1).min(to_us);
        add(band, (end_us - at_us) as f64 / 1e6);
        (at_us, band) = (end_us, band + 1);
    }
}

/// Hits and block-seconds expected from the start of a band to the end of another, and the chance to get there.
#[derive(Clone, Copy)]
struct Stretch {
    hits: f64,
    seconds: f64,
    survive: f64,
}

impl Stretch {
    fn rate(&self) -> f64 {
        self.hits / self.seconds
    }
}

/// `index(a) = max over T of E[hits in (a, a+T]] / E[block-seconds spent in (a, a+T]]` at the start of every band.
///
/// From the oldest band down: a band joins the stretch behind it while that has the higher rate (and so lifts the
/// rate of the whole); what stays in `stack` are the stretches that do not.
fn values(hazard: &Sums) -> Table {
    let mut table = [0.0; BANDS];
    let mut stack: Vec<Stretch> = Vec::with_capacity(BANDS);
    for band in (0..BANDS).rev() {
        let hazard = hazard[band].max(1e-12);
        let width_s = (bands::start_us(band + 1) - bands::start_us(band)) as f64 / 1e6;
        let survive = (-hazard * width_s).exp();
        // 1 - e^-x, exact for small x.
        let hits = -(-hazard * width_s).exp_m1();
        let mut stretch = Stretch { hits, seconds: hits / hazard, survive };
        while let Some(next) = stack.last()
            && next.rate() > stretch.rate()
        {
            stretch.hits += stretch.survive * next.hits;
            stretch.seconds += stretch.survive * next.seconds;
            stretch.survive *= next.survive;
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

    /// The definition, written down first: all ends are tried.
    fn best_rate(hazard: &Sums, from: usize) -> f64 {
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
    fn a_value_is_the_best_rate_over_all_horizons() {
        let humps: Sums = std::array::from_fn(|band| {
            let (near, far) = (band as f64 - 30.0, band as f64 - 55.0);
            0.001 + 0.2 * (-near * near / 20.0).exp() + 0.02 * (-far * far / 8.0).exp()
        });
        for hazard in [humps, assumed(1.0), [0.5; BANDS]] {
            let table = values(&hazard);
            for (band, &value) in table.iter().enumerate() {
                let best = best_rate(&hazard, band);
                assert!((f64::from(value) / best - 1.0).abs() < 1e-4, "{value} for {best} at {band}");
            }
        }
    }

    #[test]
    fn chances_are_those_of_the_hazard_at_any_age_and_end_where_others_are_worth_more() {
        const HOUR: u64 = 3_600_000_000;
        let class = Class(7);
        let mut tables = Tables::new();
        Evidence::new().fit(&Classes::default(), &mut tables);
        // 0.3 a second over the age: as many from one hour to two as from two to four.
        let expected = 1.0 - 2.0_f64.powf(-0.3);
        for from in [HOUR / 8, HOUR, 2 * HOUR] {
            let chance = tables.chance(class, from, 2 * from, 0.0);
            assert!((chance - expected).abs() < 0.02, "{chance}, not {expected}, from {from}");
        }
        // The last band, of 4.8 hours and more, is one like any other: 0.00002 a second, whatever the age.
        let chances: Vec<f64> =
            [5, 6, 24, 1000].map(|age| tables.chance(class, age * HOUR, (age + 1) * HOUR, 0.0)).into();
        assert!(chances.iter().all(|chance| (chance - 0.061).abs() < 0.001), "{chances:?}");
        assert_eq!(tables.chance(class, HOUR, HOUR, 0.0), 0.0);
        let worth = tables.values[class.at()][BANDS - 1];
        assert_eq!(
            tables.chance(class, 6 * HOUR, 7 * HOUR, worth),
            chances[0],
            "it stays: nobody is worth more"
        );
        assert_eq!(tables.chance(class, 6 * HOUR, 7 * HOUR, worth * 1.01), 0.0);
        let until = tables.values[class.at()][bands::band(HOUR)] * 1.01;
        let (passing, staying) =
            (tables.chance(class, HOUR / 2, 9 * HOUR, until), tables.chance(class, HOUR / 2, 9 * HOUR, 0.0));
        assert!(passing > 0.1 && passing < staying / 2.0, "{passing} of {staying}");
    }

    #[test]
    fn what_sessions_share_is_as_likely_to_be_used_as_what_is_theirs() {
        let (shared, mut evidence, mut tables) = (Class(SHARED_AT as u8), Evidence::new(), Tables::new());
        evidence.exposed(shared, 0, 3_600_000_000_000);
        evidence.fit(&Classes::default(), &mut tables);
        for age_us in [1_000_000, 60_000_000, 3_600_000_000, 36_000_000_000] {
            let of = |class| tables.chance(class, age_us, 2 * age_us, 0.0);
            assert!(of(shared) >= of(Class::ARRIVING) * 0.99, "{} of {}", of(shared), of(Class::ARRIVING));
        }
    }

    #[test]
    fn nothing_seen_leaves_the_order_of_last_use() {
        let mut tables = Tables::new();
        Evidence::new().fit(&Classes::default(), &mut tables);
        let values = &tables.values;
        assert!(values[1].windows(2).all(|pair| pair[0] >= pair[1]));
        assert!(values[1] == values[5] && values[0][0] < values[1][0]);
    }
}
