//! Cost of an eviction decision: choose the victim, remove it, and insert the next block.
//!
//! Not here: the policies' hit rates (`cargo xtask policies`).

mod load;
mod naive;

use anyhow::Context;
use benches::{BenchRow, Better, Outcome, measure_time, outcome};
use kv_core::evict::workload::Workload;
use kv_core::evict::{BlockKey, DEFAULT, Policy};
use kvfleet_lab::evict::{BASELINES, by_name};

use crate::Effort;
use load::EvictionLoad;
use naive::Naive;

pub(crate) const ABOUT: &str = "one decision of the workload policy with 32 categories (victim, its removal, \
    insertion of the next block), one thread, block keys in random order; against the same queues with the \
    two exponentials of F(t + life) - F(t) for every category, which choose the same victims; the same \
    decision of the default policy between two of its refits, with and without admission of the new block; \
    and the resident memory of each policy's bookkeeping per block, with fingerprints of evicted blocks";

const NAIVE: &str = "two exponentials per category";
/// Decisions per run.
const DECISIONS: u64 = 1_000_000;
/// Limits of a decision and of the bookkeeping per block.
const DECISION_US: f64 = 0.2;
const BLOCK_BYTES: f64 = 64.0;
/// Resident blocks for the memory rows: enough that every vector is a separate mapping.
const WEIGHED_BLOCKS: u64 = 4_000_000;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    // All policies stay allocated until the end: reused memory would hide from the measurement.
    let mut weighed = Vec::new();
    let weights: Vec<BenchRow> = BASELINES
        .into_iter()
        .chain([DEFAULT])
        .map(|name| bookkeeping_row(effort, name, &mut weighed))
        .collect::<anyhow::Result<_>>()?;
    drop(weighed);
    let mut rows = Vec::new();
    let mut medians = Vec::new();
    for (name, blocks) in [("1 M", 1_000_000), ("10 M", 10_000_000)] {
        let pairs = decisions(effort, effort.scaled(blocks))?;
        let name = format!("decision, {name} resident blocks");
        let row = |peer: &str, outcome: Outcome| {
            BenchRow::new("evict", &name, "µs CPU", peer, Better::Lower, outcome)
        };
        let limits: Vec<_> = pairs.iter().map(|(ours, _)| (*ours, DECISION_US)).collect();
        rows.extend([row(NAIVE, outcome(&pairs)), row("limit: 0.2 µs", outcome(&limits))]);
        medians.push(pairs);
    }
    if let [small, large] = &medians[..] {
        let pairs: Vec<_> = large.iter().zip(small).map(|(large, small)| (large.0, small.0)).collect();
        let name = "decision, 10 M resident blocks";
        rows.push(BenchRow::new(
            "evict",
            name,
            "µs CPU",
            "the same with 1 M",
            Better::Lower,
            outcome(&pairs),
        ));
    }
    for (name, blocks) in [("1 M", 1_000_000), ("10 M", 10_000_000)] {
        let (taken, turned_away) = default_decisions(effort, effort.scaled(blocks))?;
        for (what, pairs) in [("decision", taken), ("rejection", turned_away)] {
            let name = format!("{what} by {DEFAULT}, {name} resident blocks");
            rows.push(BenchRow::new(
                "evict",
                &name,
                "µs CPU",
                "limit: 0.2 µs",
                Better::Lower,
                outcome(&pairs),
            ));
        }
    }
    rows.extend(weights);
    Ok(rows)
}

/// CPU time of a decision in each run, ours and the naive one, in microseconds.
fn decisions(effort: &Effort, blocks: u64) -> anyhow::Result<Vec<(f64, f64)>> {
    let count = effort.scaled(DECISIONS);
    let (mut load, mut taught) = (EvictionLoad::new(blocks as u32), Workload::new());
    load.teach(&mut taught);
    let mut naive = Naive::new(&taught);
    let keys = load.shuffled_keys();
    for &key in &keys {
        let (traits, now) = load.next();
        taught.insert(key, traits, now);
        naive.insert(key, traits, now);
    }
    drop(keys);
    let mut pairs = Vec::new();
    // One warm-up run first; the starting side alternates.
    for run in 0..=effort.runs {
        let arrivals = load.take(count);
        let ours = || {
            arrivals.iter().try_fold(0, |sum: u64, &(traits, now)| {
                let victim = taught.victim(now, &|_| false)?;
                taught.remove(victim);
                taught.insert(victim, traits, now);
                Some(sum.rotate_left(1) ^ u64::from(victim.0))
            })
        };
        let theirs = || {
            arrivals.iter().try_fold(0, |sum: u64, &(traits, now)| {
                let victim = naive.victim(now)?;
                naive.remove(victim);
                naive.insert(victim, traits, now);
                Some(sum.rotate_left(1) ^ u64::from(victim.0))
            })
        };
        let ((ours, our_time), (theirs, their_time)) = if run % 2 == 0 {
            let first = measure_time(ours);
            (first, measure_time(theirs))
        } else {
            let first = measure_time(theirs);
            (measure_time(ours), first)
        };
        anyhow::ensure!(ours.is_some() && ours == theirs, "the two implementations chose different victims");
        if run > 0 {
            pairs.push((our_time.cpu_us_per(count), their_time.cpu_us_per(count)));
        }
    }
    Ok(pairs)
}

/// Measured time and limit of each run.
type Pairs = Vec<(f64, f64)>;

/// CPU time of a decision of the default policy in each run, beside the limit, in microseconds. The
/// first list admits every new block. The second rejects every new block, independent of the
/// policy, and reports it at the end of its request, as a node does. Refits happen between the
/// runs: a node does them once a second, independent of the decisions.
fn default_decisions(effort: &Effort, blocks: u64) -> anyhow::Result<(Pairs, Pairs)> {
    let count = effort.scaled(DECISIONS);
    let mut policy = by_name(DEFAULT, 0).context("no default policy")?;
    let mut load = EvictionLoad::new(blocks as u32);
    load.teach(policy.as_mut());
    for key in load.shuffled_keys() {
        let (traits, now) = load.next();
        policy.insert(key, traits, now);
    }
    let (mut taken, mut turned_away) = (Vec::new(), Vec::new());
    for run in 0..=effort.runs {
        for (takes, pairs) in [(true, &mut taken), (false, &mut turned_away)] {
            let arrivals = load.take(count);
            policy.refit(arrivals.first().context("no arrivals")?.1);
            let mut rejected = Vec::new();
            let (end, spent) = measure_time(|| {
                arrivals.iter().try_for_each(|&(traits, now)| {
                    let victim = policy.victim(now, &|_| false)?;
                    std::hint::black_box(policy.admits(traits, victim, now));
                    if takes {
                        policy.remove(victim);
                        policy.insert(victim, traits, now);
                        return Some(());
                    }
                    rejected.push(traits);
                    // The first block of a request arrives last.
                    if traits.offset_blocks == 0 {
                        rejected.drain(..).for_each(|traits| policy.note_absent(traits, now));
                    }
                    Some(())
                })
            });
            end.context("a full tier has no victim")?;
            if run > 0 {
                pairs.push((spent.cpu_us_per(count), DECISION_US));
            }
        }
    }
    Ok((taken, turned_away))
}

/// Resident memory per block of one policy, after every block was replaced twice.
fn bookkeeping_row(
    effort: &Effort,
    name: &str,
    weighed: &mut Vec<Box<dyn Policy>>,
) -> anyhow::Result<BenchRow> {
    let blocks = effort.scaled(WEIGHED_BLOCKS);
    let mut load = EvictionLoad::new(blocks as u32);
    let before = resident_bytes()?;
    let mut policy = by_name(name, 0).context("unknown policy")?;
    for key in (0..blocks as u32).map(BlockKey) {
        let (traits, now) = load.next();
        policy.insert(key, traits, now);
    }
    for _ in 0..2 * blocks {
        let (traits, now) = load.next();
        let victim = policy.victim(now, &|_: BlockKey| false).context("a full tier has no victim")?;
        policy.remove(victim);
        policy.insert(victim, traits, now);
    }
    let bytes = resident_bytes()?.saturating_sub(before) as f64 / policy.len() as f64;
    weighed.push(policy);
    let row = format!("bookkeeping per resident block, {name}");
    Ok(BenchRow::new("evict", &row, "B", "limit: 64 B", Better::Lower, outcome(&[(bytes, BLOCK_BYTES)])))
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("/proc/self/status has no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().context("VmRSS is not a number")?;
    Ok(kib * 1024)
}
