//! A fuzz driver for any compiler: mutates bytes from a seed, runs a target on them, and shrinks
//! failures.
//!
//! It measures no coverage; good seeds and record-wise mutation compensate. Where libFuzzer runs,
//! it finds more (`fuzz/`). Not here: time limits. To run longer, call it again with the next seed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::FuzzTarget;
use crate::id::HASH_BYTES;

/// Longest case, in bytes.
const CASE_BYTES_MAX: usize = 4_096;

/// Cases kept for mutation, besides the seeds.
const CORPUS_MAX: usize = 64;

/// Maximum number of runs for shrinking.
const SHRINK_RUNS_MAX: usize = 20_000;

/// A failing case.
#[derive(Clone, Debug)]
pub struct FuzzFailure {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the execution, counted from 0.
    pub execution: u64,
    /// Bytes of the case before shrinking.
    pub original_bytes: usize,
    /// The shrunk case.
    pub case: Vec<u8>,
    /// The failure.
    pub failure: String,
    /// Description of the case.
    pub description: String,
}

impl std::fmt::Display for FuzzFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let FuzzFailure {
            seed,
            execution,
            original_bytes: found_bytes,
            case,
            failure: wrong,
            description: told,
        } = self;
        writeln!(f, "seed {seed}, execution {execution}: {wrong}")?;
        writeln!(f, "shrunk from {found_bytes} to {} bytes; the case is:\n{told}", case.len())?;
        write!(f, "case: ")?;
        case.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Pseudo-random numbers from a seed (SplitMix64).
struct SplitMix(u64);

impl SplitMix {
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

/// Runs a target `executions` times on bytes derived from this seed. Equal seeds give equal runs.
///
/// # Errors
/// The first failing case, shrunk.
pub fn drive(target: &FuzzTarget, seed: u64, executions: u64) -> Result<(), Box<FuzzFailure>> {
    let mut chance = SplitMix(seed);
    let mut corpus = (target.seeds)();
    let seeds = corpus.len();
    for execution in 0..executions {
        let case = match corpus.get(execution as usize).filter(|_| execution < seeds as u64) {
            Some(seed) => seed.clone(),
            None => mutated(target, &corpus, &mut chance),
        };
        if let Some(wrong) = failure_of(target, &case) {
            return Err(Box::new(shrink(target, case, wrong, (seed, execution))));
        }
        // Now and then a case is kept, so that mutations add up.
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

/// The failure of a case, if any.
fn failure_of(target: &FuzzTarget, case: &[u8]) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| (target.run)(case))) {
        Ok(verdict) => verdict.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Some(format!("panic: {}", text.unwrap_or("without a message")))
        }
    }
}

/// A case from the corpus with one to eight mutations.
fn mutated(target: &FuzzTarget, corpus: &[Vec<u8>], chance: &mut SplitMix) -> Vec<u8> {
    let mut case = corpus[chance.below(corpus.len())].clone();
    for _ in 0..1 + chance.below(8) {
        mutate(target, &mut case, corpus, chance);
    }
    case.truncate(CASE_BYTES_MAX);
    case
}

fn mutate(target: &FuzzTarget, case: &mut Vec<u8>, corpus: &[Vec<u8>], chance: &mut SplitMix) {
    let record = target.record_bytes;
    // Most mutations insert or remove whole records. Nineteen bytes are a hash.
    let at = chance.below(case.len() / record + 1) * record;
    let many = [1, 2, 1 + chance.below(6), HASH_BYTES, 1 + chance.below(64)][chance.below(5)];
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

/// A smaller case that still fails: removes halving chunks, then reduces single bytes. The failure
/// may change on the way.
fn shrink(target: &FuzzTarget, found: Vec<u8>, wrong: String, (seed, execution): (u64, u64)) -> FuzzFailure {
    let found_bytes = found.len();
    let (mut case, mut wrong, mut runs) = (found, wrong, 0);
    let mut is_wrong = |candidate: &[u8]| {
        runs += 1;
        if runs > SHRINK_RUNS_MAX { None } else { failure_of(target, candidate) }
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
    let told = (target.describe)(&case);
    FuzzFailure { seed, execution, original_bytes: found_bytes, case, failure: wrong, description: told }
}

#[cfg(test)]
mod tests {
    use super::super::{FuzzResult, TARGETS};
    use super::*;

    /// Fixed seed for CI; use `cargo xtask fuzz` for others.
    const SEED: u64 = 2_026;

    fn check_target(name: &str, executions: u64) {
        let target = TARGETS.iter().find(|target| target.name == name).unwrap();
        println!("target {name}, seed {SEED}, {executions} executions");
        if let Err(found) = drive(target, SEED, executions) {
            panic!("{found}");
        }
    }

    #[test]
    fn commands_match_the_naive_index() {
        check_target("commands", 4_000);
    }

    #[test]
    fn records_are_refused_or_exact() {
        check_target("codec", 60_000);
    }

    #[test]
    fn snapshots_are_refused_or_exact() {
        check_target("snapshot", 20_000);
    }

    /// Fails if two neighbouring bytes from 40 on increase by one, and panics at three.
    fn picky(case: &[u8]) -> FuzzResult {
        let grows = |pair: &[u8]| pair[0] >= 40 && pair[0].checked_add(1) == Some(pair[1]);
        assert!(!case.windows(3).any(|three| grows(&three[..2]) && grows(&three[1..])), "three in a row");
        if case.windows(2).any(grows) { Err("two in a row".to_owned()) } else { Ok(()) }
    }

    const PICKY: FuzzTarget = FuzzTarget {
        name: "picky",
        run: picky,
        seeds: || vec![vec![0; 30]],
        describe: |case| format!("{case:?}"),
        record_bytes: 1,
    };

    #[test]
    fn failure_repeats_and_shrinks() {
        let found = drive(&PICKY, 7, 100_000).unwrap_err();
        // The two bytes depend on each other, so neither can shrink alone.
        let [first, second] = found.case[..] else { panic!("{found}") };
        assert!(first >= 40 && second == first + 1 && found.failure == "two in a row", "{found}");
        assert!(found.original_bytes > 2 && found.description == format!("[{first}, {second}]"), "{found}");
        let again = drive(&PICKY, 7, found.execution + 1).unwrap_err();
        assert_eq!((again.execution, &again.case), (found.execution, &found.case));
        assert!(drive(&PICKY, 7, found.execution).is_ok());
        assert!(failure_of(&PICKY, &[40, 41, 42]).is_some_and(|wrong| wrong == "panic: three in a row"));
    }
}
