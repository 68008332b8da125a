//! The replicated index against the map anyone would write first, and against what the memory allows.
//!
//! Not here: the Raft log in front of it; this is the cost of one replica applying and answering.

mod naive;
mod touch;
mod workload;

use std::hint::black_box;

use benches::{Better, Row, side_by_side, spend};
use kv_core::id::BlockHash;
use kv_core::index::command::Command;
use kv_core::index::{Index, IndexLimits};

use crate::Effort;
use naive::NaiveIndex;
use touch::TouchTable;
use workload::Workload;

pub(crate) const ABOUT: &str = "one replica of the index on one thread: 64 nodes, chains of 500 blocks of which 16 share their first 64, \
     announced in runs of 16 blocks; against a std HashMap<hash, Vec<node>> that gives the same answers, and \
     against touching one random 16-byte slot per block in a table of the same number of slots";

const NAIVE: &str = "std HashMap<hash, Vec<node>>";
const TOUCH: &str = "limit: one random 16-byte slot per block";

/// (node, block) pairs stored: larger than every cache of the machine many times over.
const COPIES: u64 = 1_000_000;
/// Lookups per run.
const LOOKUPS: u64 = 4_000;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let workload = Workload::new(effort.scaled(COPIES));
    let mut rows = store(effort, &workload);
    let filled = Filled::new(&workload)?;
    rows.extend(lookup(effort, &workload, &filled));
    Ok(rows)
}

fn store(effort: &Effort, workload: &Workload) -> Vec<Row> {
    let blocks = workload.stored_blocks();
    let commands: Vec<_> = workload.commands().collect();
    let ours = || millions(spend(|| filled_index(&commands)).1.per_cpu_s(blocks));
    let naive = || millions(spend(|| NaiveIndex::filled(workload)).1.per_cpu_s(blocks));
    let touch = || millions(spend(|| TouchTable::filled(workload)).1.per_cpu_s(blocks));
    let row = |peer, outcome| {
        Row::new("index", "store, runs of 16", "M blocks/CPU-s", peer, Better::Higher, outcome)
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
struct Filled {
    index: Index,
    naive: NaiveIndex,
    touch: TouchTable,
}

impl Filled {
    /// Fills all sides and makes sure that they agree before anything is timed.
    fn new(workload: &Workload) -> anyhow::Result<Self> {
        let index = filled_index(&workload.commands().collect::<Vec<_>>());
        let (naive, touch) = (NaiveIndex::filled(workload), TouchTable::filled(workload));
        for chain in workload.chains().step_by(97).chain([workload.strange()]) {
            let (ours, theirs) = (index.longest_prefix(chain), naive.longest_prefix(chain));
            anyhow::ensure!(ours == theirs, "the sides disagree: {ours:?} and {theirs:?}");
        }
        Ok(Self { index, naive, touch })
    }
}

fn lookup(effort: &Effort, workload: &Workload, filled: &Filled) -> Vec<Row> {
    let lookups = effort.scaled(LOOKUPS);
    let chains: Vec<_> = workload.shuffled(lookups as usize);
    let short: Vec<_> = chains.iter().map(|chain| &chain[..64]).collect();
    let strange = vec![workload.strange(); lookups as usize];
    let mut rows = Vec::new();
    for (name, queries) in [
        ("lookup of 500 blocks, all held", &chains),
        ("lookup of 64 blocks, all held", &short),
        ("lookup of a miss", &strange),
    ] {
        let ours = || each(queries, |chain| filled.index.longest_prefix(chain).runs.len());
        let naive = || each(queries, |chain| filled.naive.longest_prefix(chain).runs.len());
        let touch = || each(queries, |chain| filled.touch.sum(chain));
        let row = |peer, outcome| Row::new("index", name, "µs CPU", peer, Better::Lower, outcome);
        rows.push(row(NAIVE, side_by_side(effort.runs, ours, naive)));
        if name != "lookup of a miss" {
            rows.push(row(TOUCH, side_by_side(effort.runs, ours, touch)));
        }
    }
    rows
}

/// CPU microseconds of one query.
fn each<T>(queries: &[&[BlockHash]], mut query: impl FnMut(&[BlockHash]) -> T) -> f64 {
    let run = || queries.iter().for_each(|chain| drop(black_box(query(black_box(chain)))));
    spend(run).1.cpu_us_per(queries.len() as u64)
}
