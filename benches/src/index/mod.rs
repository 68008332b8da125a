//! The replicated index against a naive map, and against the limit of the memory.
//!
//! Not here: the Raft log in front of it; this is the cost of one replica.

mod naive;
mod touch;
mod workload;

use std::hint::black_box;

use benches::{BenchRow, Better, measure_time, side_by_side};
use kv_core::id::BlockHash;
use kv_core::index::command::Command;
use kv_core::index::{Index, IndexLimits};

use crate::Effort;
use naive::NaiveIndex;
use touch::TouchTable;
use workload::Workload;

pub(crate) const ABOUT: &str = "one replica of the index on one thread: 64 nodes, chains of 500 blocks, \
    where 16 chains share their first 64 blocks, announced in runs of 16 blocks; against a std HashMap<hash, \
    Vec<node>> that gives the same answers, and against touching one random 16-byte slot per block in a \
    table of the same number of slots";

const NAIVE: &str = "std HashMap<hash, Vec<node>>";
const TOUCH: &str = "limit: one random 16-byte slot per block";

/// Stored (node, block) pairs: many times larger than every cache of the machine.
const COPIES: u64 = 1_000_000;
/// Lookups per run.
const LOOKUPS: u64 = 4_000;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let workload = Workload::new(effort.scaled(COPIES));
    let mut rows = store(effort, &workload);
    let filled = FilledIndexes::new(&workload)?;
    rows.extend(lookup(effort, &workload, &filled));
    Ok(rows)
}

fn store(effort: &Effort, workload: &Workload) -> Vec<BenchRow> {
    let blocks = workload.stored_blocks();
    let commands: Vec<_> = workload.commands().collect();
    let ours = || millions(measure_time(|| filled_index(&commands)).1.per_cpu_s(blocks));
    let naive = || millions(measure_time(|| NaiveIndex::filled(workload)).1.per_cpu_s(blocks));
    let touch = || millions(measure_time(|| TouchTable::filled(workload)).1.per_cpu_s(blocks));
    let row = |peer, outcome| {
        BenchRow::new("index", "store, runs of 16", "M blocks/CPU-s", peer, Better::Higher, outcome)
    };
    vec![
        row(NAIVE, side_by_side(effort.runs, ours, naive)),
        row(TOUCH, side_by_side(effort.runs, ours, touch)),
    ]
}

fn filled_index(commands: &[Command]) -> Index {
    let mut index = Index::new(IndexLimits::default());
    commands.iter().for_each(|command| drop(black_box(index.apply(command))));
    index
}

fn millions(count: f64) -> f64 {
    count / 1e6
}

/// Every side with the same blocks in it.
struct FilledIndexes {
    index: Index,
    naive: NaiveIndex,
    touch: TouchTable,
}

impl FilledIndexes {
    /// Fills all sides and checks that they agree before timing.
    fn new(workload: &Workload) -> anyhow::Result<Self> {
        let index = filled_index(&workload.commands().collect::<Vec<_>>());
        let (naive, touch) = (NaiveIndex::filled(workload), TouchTable::filled(workload));
        for chain in workload.chains().step_by(97).chain([workload.unknown_chain()]) {
            let (ours, theirs) = (index.longest_prefix(chain), naive.longest_prefix(chain));
            anyhow::ensure!(ours == theirs, "the sides disagree: {ours:?} and {theirs:?}");
        }
        Ok(Self { index, naive, touch })
    }
}

fn lookup(effort: &Effort, workload: &Workload, filled: &FilledIndexes) -> Vec<BenchRow> {
    let lookups = effort.scaled(LOOKUPS);
    let chains: Vec<_> = workload.random_chains(lookups as usize);
    let short: Vec<_> = chains.iter().map(|chain| &chain[..64]).collect();
    let strange = vec![workload.unknown_chain(); lookups as usize];
    let mut rows = Vec::new();
    for (name, queries) in [
        ("lookup of 500 blocks, all held", &chains),
        ("lookup of 64 blocks, all held", &short),
        ("lookup of a miss", &strange),
    ] {
        let ours = || cpu_us_per_query(queries, |chain| filled.index.longest_prefix(chain).runs.len());
        let naive = || cpu_us_per_query(queries, |chain| filled.naive.longest_prefix(chain).runs.len());
        let touch = || cpu_us_per_query(queries, |chain| filled.touch.sum(chain));
        let row = |peer, outcome| BenchRow::new("index", name, "µs CPU", peer, Better::Lower, outcome);
        rows.push(row(NAIVE, side_by_side(effort.runs, ours, naive)));
        if name != "lookup of a miss" {
            rows.push(row(TOUCH, side_by_side(effort.runs, ours, touch)));
        }
    }
    rows
}

/// CPU microseconds per query.
fn cpu_us_per_query<T>(queries: &[&[BlockHash]], mut query: impl FnMut(&[BlockHash]) -> T) -> f64 {
    let run = || queries.iter().for_each(|chain| drop(black_box(query(black_box(chain)))));
    measure_time(run).1.cpu_us_per(queries.len() as u64)
}
