//! A driver for any compiler: mutates bytes from a seed, runs a target on them, and shrinks what it finds.
//!
//! It sees no coverage, and makes up for it with seeds that get far and with records that stay whole. Where
//! libFuzzer can run, it finds more (`fuzz/`). Not here: time. Who wants to run for a minute calls again with
//! the next seed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Target;

/// Longest case, in bytes.
const CASE_BYTES_MAX: usize = 4_096;

/// Cases kept to mutate, next to the seeds.
const CORPUS_MAX: usize = 64;

/// Runs that shrinking may take.
const SHRINK_RUNS_MAX: usize = 20_000;

/// A case that broke something.
#[derive(Clone, Debug)]
pub struct Found {
    /// The seed it came from.
    pub seed: u64,
    /// The execution, counted from 0.
    pub execution: u64,
    /// Bytes of the case before it was shrunk.
    pub found_bytes: usize,
    /// The case, shrunk.
    pub case: Vec<u8>,
    /// What is wrong with it.
    pub wrong: String,
    /// What its bytes say.
    pub told: String,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Found { seed, execution, found_bytes, case, wrong, told } = self;
        writeln!(f, "seed {seed}, execution {execution}: {wrong}")?;
        writeln!(f, "shrunk from {found_bytes} to {} bytes; it says:\n{told}", case.len())?;
        write!(f, "case: ")?;
        case.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Chance from a seed (SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        self.next() as u8
    }
}

/// Runs a target so many times on bytes from this seed. Equal seeds give equal runs.
///
/// # Errors
/// The first case that breaks it, shrunk.
pub fn drive(target: &Target, seed: u64, executions: u64) -> Result<(), Box<Found>> {
    let mut chance = Chance(seed);
    let mut corpus = (target.seeds)();
    let seeds = corpus.len();
    for execution in 0..executions {
        let case = match corpus.get(execution as usize).filter(|_| execution < seeds as u64) {
            Some(seed) => seed.clone(),
            None => mutated(target, &corpus, &mut chance),
        };
        if let Some(wrong) = wrong_with(target, &case) {
            return Err(Box::new(shrunk(target, case, wrong, (seed, execution))));
        }
        // Now and then a case is kept, so that changes add up to lives that no single one makes.
        match chance.below(4) {
            0 if corpus.len() < seeds + CORPUS_MAX => corpus.push(case),
            0 => {
                let place = seeds + chance.below(CORPUS_MAX);
                corpus[place] = case;
            }
            _ => {}
        }
    }
    Ok(())
}

/// What is wrong with a case, if anything is.
fn wrong_with(target: &Target, case: &[u8]) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| (target.run)(case))) {
        Ok(verdict) => verdict.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Some(format!("panic: {}", text.unwrap_or("without a text")))
        }
    }
}

/// A case out of the corpus with one to eight changes.
fn mutated(target: &Target, corpus: &[Vec<u8>], chance: &mut Chance) -> Vec<u8> {
    let mut case = corpus[chance.below(corpus.len())].clone();
    for _ in 0..1 + chance.below(8) {
        mutate(target, &mut case, corpus, chance);
    }
    case.truncate(CASE_BYTES_MAX);
    case
}

fn mutate(target: &Target, case: &mut Vec<u8>, corpus: &[Vec<u8>], chance: &mut Chance) {
    let record = target.record_bytes;
    // Of records, most changes take or give whole ones. Sixteen bytes are a hash.
    let at = chance.below(case.len() / record + 1) * record;
    let many = [1, 2, 1 + chance.below(6), 16, 1 + chance.below(64)][chance.below(5)];
    let some = (record * many).min(case.len() - at);
    match chance.below(8) {
        0 | 1 => {
            let new: Vec<u8> = (0..record * (1 + chance.below(8))).map(|_| chance.byte()).collect();
            case.splice(at..at, new);
        }
        2 => drop(case.drain(at..at + some)),
        3 => {
            let again = case[at..at + some].to_vec();
            let elsewhere = chance.below(case.len() / record + 1) * record;
            let to = if chance.below(2) == 0 { at + some } else { elsewhere };
            case.splice(to..to, again);
        }
        4 => {
            let other = &corpus[chance.below(corpus.len())];
            let from = chance.below(other.len() / record + 1) * record;
            case.truncate(at);
            case.extend_from_slice(&other[from..]);
        }
        5 if !case.is_empty() => {
            let place = chance.below(case.len());
            case[place] ^= 1 << chance.below(8);
        }
        6 if !case.is_empty() => {
            let place = chance.below(case.len());
            case[place] = [0, 1, 0x7F, 0x80, 0xFF, chance.byte()][chance.below(6)];
        }
        7 if case.len() > 1 => {
            let (one, other) = (chance.below(case.len()), chance.below(case.len()));
            case.swap(one, other);
        }
        _ => case.push(chance.byte()),
    }
}

/// The smallest case near this one that is still wrong: chunks are taken away, halving; then single bytes become 0
/// or smaller. What is wrong may change on the way.
fn shrunk(target: &Target, found: Vec<u8>, wrong: String, (seed, execution): (u64, u64)) -> Found {
    let found_bytes = found.len();
    let (mut case, mut wrong, mut runs) = (found, wrong, 0);
    let mut is_wrong = |candidate: &[u8]| {
        runs += 1;
        if runs > SHRINK_RUNS_MAX { None } else { wrong_with(target, candidate) }
    };
    loop {
        let before = case.clone();
        let mut chunk = case.len().next_power_of_two().max(target.record_bytes);
        while chunk >= target.record_bytes.min(case.len()).max(1) {
            let mut at = 0;
            while at < case.len() {
                let end = (at + chunk).min(case.len());
                let candidate = [&case[..at], &case[end..]].concat();
                match is_wrong(&candidate) {
                    Some(now) => (case, wrong) = (candidate, now),
                    None => at = end,
                }
            }
            chunk /= 2;
        }
        for at in 0..case.len() {
            for smaller in [0, case[at] / 2, case[at].saturating_sub(1)] {
                if smaller >= case[at] {
                    continue;
                }
                let mut candidate = case.clone();
                candidate[at] = smaller;
                if let Some(now) = is_wrong(&candidate) {
                    (case, wrong) = (candidate, now);
                }
            }
        }
        if case == before {
            break;
        }
    }
    let told = (target.tell)(&case);
    Found { seed, execution, found_bytes, case, wrong, told }
}

#[cfg(test)]
mod tests {
    use super::super::{TARGETS, Verdict};
    use super::*;

    /// What CI runs of each target, always the same: other seeds are for `cargo xtask fuzz`.
    const SEED: u64 = 2_026;

    fn stands(name: &str, executions: u64) {
        let target = TARGETS.iter().find(|target| target.name == name).unwrap();
        println!("target {name}, seed {SEED}, {executions} executions");
        if let Err(found) = drive(target, SEED, executions) {
            panic!("{found}");
        }
    }

    #[test]
    fn any_commands_are_answered_as_the_naive_index_does() {
        stands("commands", 4_000);
    }

    #[test]
    fn any_record_is_refused_or_exactly_what_it_says() {
        stands("codec", 60_000);
    }

    #[test]
    fn any_snapshot_is_refused_or_exactly_what_it_says() {
        stands("snapshot", 20_000);
    }

    /// Wrong as soon as two bytes in a row grow by one from 40 on, and panics at three.
    fn picky(case: &[u8]) -> Verdict {
        let grows = |pair: &[u8]| pair[0] >= 40 && pair[0].checked_add(1) == Some(pair[1]);
        assert!(!case.windows(3).any(|three| grows(&three[..2]) && grows(&three[1..])), "three in a row");
        if case.windows(2).any(grows) { Err("two in a row".to_owned()) } else { Ok(()) }
    }

    const PICKY: Target = Target {
        name: "picky",
        run: picky,
        seeds: || vec![vec![0; 30]],
        tell: |case| format!("{case:?}"),
        record_bytes: 1,
    };

    #[test]
    fn what_is_wrong_is_found_again_from_its_seed_and_shrunk_to_its_core() {
        let found = drive(&PICKY, 7, 100_000).unwrap_err();
        // Two bytes depend on each other, so neither can become smaller alone.
        let [first, second] = found.case[..] else { panic!("{found}") };
        assert!(first >= 40 && second == first + 1 && found.wrong == "two in a row", "{found}");
        assert!(found.found_bytes > 2 && found.told == format!("[{first}, {second}]"), "{found}");
        let again = drive(&PICKY, 7, found.execution + 1).unwrap_err();
        assert_eq!((again.execution, &again.case), (found.execution, &found.case));
        assert!(drive(&PICKY, 7, found.execution).is_ok());
        assert!(wrong_with(&PICKY, &[40, 41, 42]).is_some_and(|wrong| wrong == "panic: three in a row"));
    }
}
