//! How fast prompts are computed: the three coefficients of t = s + a·n + b·(c·n + n²/2) for n new tokens behind c, found online from first tokens, with a hardware profile for a prior.
//!
//! They are factors of the profile's. The one that all three have in common is learnt soonest, and how much each is another as more is seen, all by least squares over requests whose first
//! token was seen, the older counting less. A request that waits says little of computing, and whatever is wrong about waiting must not be taken for it: one counts by the share of its time
//! that is computing, to the fourth power. Of the others none counts as further off than half of them are, so that it is the usual one that is fitted and not the mean with a few that come
//! late for other reasons. Where most take less than seven tenths of the time or more than 1.4 times as long, it is what was believed that is wrong, a profile of other machines say: then,
//! and until some more were seen, every request counts as it came, and those before it hardly.
//!
//! Not here: what waiting and transfer are off by, and predictions in sum (`learnt.rs`), which instance is slower than others (`speed.rs`), and what a profile is (`profile.rs`).

/// Requests after which one counts half.
const HALF_LIFE: f64 = 256.0;

/// The same while most come as if what is believed were wrong, and of how far off they are.
const LOST_HALF_LIFE: f64 = 16.0;

/// What is believed is wrong if requests take so many octaves more or less than predicted, in the mean.
const LOST: f64 = 0.5;

/// So many requests after that was last so, what is believed is taken to be found: by then three quarters of what is known are of requests since.
const LOST_FOR: f64 = 2.0 * LOST_HALF_LIFE;

/// For that, none counts as further off than this: it takes half of what comes, and no few that tell nonsense.
const OFF_OCTAVES_MOST: f64 = 2.0 * LOST;

/// How much what is believed is worth: that of so many milliseconds that came as predicted.
const PRIOR_MS: f64 = 2_000.0;

/// Requests after which what is believed is by half what was seen of late.
const BELIEF_HALF_LIFE: f64 = 1_024.0;

/// How much it is worth that a prompt's step and its linear layers are off alike: that of so many requests, before any was seen and at least.
const ALIKE_AT_FIRST: f64 = 20.0;
const ALIKE: f64 = 4.0;

/// The same of attention, of requests in which it were all there is: short prompts have hardly any, and it is most of long ones, of which nothing is said by what little
/// of it is in those.
const ATTENTION_PRIOR: f64 = 1.0;

/// Computing is off by no more than this: from a small model on the best of machines to the largest on old ones.
const MOST: f64 = 64.0;

/// Beside what all parts are off by, one is by no more than this factor.
const SHAPE_MOST: f64 = 16.0;

/// One request counts as no further off than this factor: one that hung for an hour says nothing of the others.
const OFF_MOST: f64 = 16.0;

/// Least of what half the requests are off by, as a share of what was predicted, and by how much one that is further or less far off moves it.
const USUAL_LEAST: f64 = 0.002;
const USUAL_STEP: f64 = 1.05;

/// A prompt's step, its linear layers, attention.
const PARTS: usize = 3;
const ATTENTION: usize = PARTS - 1;

/// Factors of what the profile says of each part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computing {
    /// Sums of products of parts, in milliseconds, each over what was predicted in the measure of the profile, as if all parts together took what that says: over what is
    /// predicted itself, a request would count the more the less was predicted when it came.
    products: [[f64; PARTS]; PARTS],
    /// The same of parts with what was observed.
    observed: [f64; PARTS],
    /// Requests that these are of, by what they count.
    seen: f64,
    factors: [f64; PARTS],
    /// The one that all parts have in common.
    common: f64,
    /// What is believed of it.
    believed: f64,
    /// How much it is worth that the parts are off alike, in requests.
    alike: f64,
    /// By how many octaves requests take longer than predicted, in the mean of the last few.
    off_octaves: f64,
    /// Requests until what is believed counts as found again; 0 where it is not lost.
    lost_for: f64,
    /// What half of the requests are off by, as a share of what was predicted.
    usual: f64,
}

impl Default for Computing {
    fn default() -> Self {
        Computing {
            products: [[0.0; PARTS]; PARTS],
            observed: [0.0; PARTS],
            seen: 0.0,
            factors: [1.0; PARTS],
            common: 1.0,
            believed: 1.0,
            alike: ALIKE_AT_FIRST,
            off_octaves: 0.0,
            lost_for: 0.0,
            usual: 0.1,
        }
    }
}

/// What is left of something after so much of one more request.
fn kept(half_life: f64, counts: f64) -> f64 {
    (-counts / half_life).exp2()
}

impl Computing {
    /// A first token came after `ttft_us`, of which `others_us` are predicted to be no computing. By profile its parts take `parts_us`.
    ///
    /// How many times as long all are predicted to take from now on; nothing where that was far off what was believed, beside which nothing else can have been learnt.
    pub(super) fn observe(&mut self, parts_us: [u64; PARTS], others_us: u64, ttft_us: u64) -> Option<f64> {
        let x = parts_us.map(|us| us as f64 / 1e3);
        let by_now: [f64; PARTS] = std::array::from_fn(|part| x[part] * self.factors[part]);
        let (expected, others) = (by_now.iter().sum::<f64>(), others_us as f64 / 1e3);
        if expected <= 0.0 || ttft_us == 0 {
            return Some(1.0);
        }
        let counts = (expected / (expected + others)).powi(4);
        let took = (ttft_us as f64 / 1e3 - others).clamp(expected / OFF_MOST, expected * OFF_MOST);
        let octaves = (took / expected).log2().clamp(-OFF_OCTAVES_MOST, OFF_OCTAVES_MOST);
        self.off_octaves += (octaves - self.off_octaves) * (1.0 - kept(LOST_HALF_LIFE, counts));
        let is_off = self.off_octaves.abs() > LOST;
        self.lost_for = if is_off { LOST_FOR } else { (self.lost_for - 1.0).max(0.0) };
        let is_lost = self.lost_for > 0.0;
        let kept = kept(if is_lost { LOST_HALF_LIFE } else { HALF_LIFE }, counts);
        let took = if is_lost { took } else { self.usual(took, expected, counts) };
        // By the profile, but for how far each part is off beside the others.
        let by_profile = expected / self.common;
        for row in 0..PARTS {
            for column in 0..PARTS {
                let product = x[row] * x[column] / by_profile;
                self.products[row][column] = self.products[row][column] * kept + product * counts;
            }
            self.observed[row] = self.observed[row] * kept + x[row] * took / by_profile * counts;
        }
        self.seen = self.seen * kept + counts;
        self.alike = (self.alike * kept).max(ALIKE);
        let before = self.in_all();
        self.common = self.solve();
        let moved = if is_lost { counts } else { 1.0 - (-counts / BELIEF_HALF_LIFE).exp2() };
        self.believed *= (self.common / self.believed).powf(moved);
        (!is_lost).then(|| self.in_all() / before)
    }

    /// What is predicted of those that were seen, all together.
    fn in_all(&self) -> f64 {
        let of = |(row, factor): (&[f64; PARTS], f64)| row.iter().sum::<f64>() * factor;
        self.products.iter().zip(self.factors).map(of).sum::<f64>().max(f64::MIN_POSITIVE)
    }

    /// What counts of an observation: it is no further off than half of them are.
    fn usual(&mut self, took: f64, expected: f64, counts: f64) -> f64 {
        let (off, most) = ((took - expected) / expected, self.usual);
        let step = USUAL_STEP.powf(if off.abs() > most { counts } else { -counts });
        self.usual = (most * step).clamp(USUAL_LEAST, 1.0);
        expected * (1.0 + off.clamp(-most, most))
    }

    /// (products + priors) · factors = observed + priors · beliefs, by Gauss-Seidel from the factors before: they hardly move. The factor that all parts have in
    /// common.
    fn solve(&mut self) -> f64 {
        let Computing { products, observed, believed, alike, .. } = *self;
        let (all, left) = (products.iter().flatten().sum::<f64>(), observed.iter().sum::<f64>());
        // Of computing as it was believed to be, so many milliseconds.
        let prior = PRIOR_MS / believed;
        let common = ((left + prior * believed) / (all + prior)).clamp(1.0 / MOST, MOST);
        let seen = self.seen.max(1.0);
        for _ in 0..8 {
            for row in 0..PARTS {
                let others = (0..PARTS).filter(|column| *column != row);
                let others: f64 = others.map(|column| products[row][column] * self.factors[column]).sum();
                let worth = match row {
                    ATTENTION => ATTENTION_PRIOR * all,
                    row => alike * products[row][row],
                } / seen;
                let factor = (observed[row] - others + worth * common)
                    / (products[row][row] + worth).max(f64::MIN_POSITIVE);
                self.factors[row] = factor.clamp(common / SHAPE_MOST, common * SHAPE_MOST);
            }
        }
        common
    }

    /// How many times as long as the profile says a prompt's step takes, its linear layers, and attention.
    #[must_use]
    pub fn factors(&self) -> [f64; PARTS] {
        self.factors
    }
}
