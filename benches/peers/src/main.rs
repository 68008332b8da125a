//! `peers WHAT`: kvfleet's index beside other indexes, its replicated index beside etcd, or its SSD
//! tier beside foyer's. Run it through `cargo xtask bench --peers`, which builds it for release.
//!
//! Not here: the harness, which is that of `benches` (its `lib.rs` is this package's library), and
//! comparisons without foreign packages (`benches/src/`).

mod allocated;
mod chains;
mod consensus;
mod events;
mod fill;
mod growth;
mod index;
mod judge;
mod lookups;
mod side;
mod tier;

use std::path::PathBuf;
use std::time::Duration;

use benches::RUNS_MIN;
use clap::{Parser, ValueEnum};

use consensus::{Programs, Setup};
use judge::Printer;

/// The comparison to run.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Comparison {
    /// Memory, store, remove and lookups of one replica, against kv-index and dynamo-kv-router.
    Index,
    /// Lookups and memory of kvfleet's index at growing sizes.
    Growth,
    /// Blocks read from and written to kvfleet's and foyer's SSD tiers.
    Tier,
    /// One side of `tier`, for internal use.
    #[value(hide = true)]
    TierSide,
    /// Puts into three etcd members on loopback, and announcements and pins into three kvfleet
    /// routers.
    Consensus,
}

/// Amount of work.
#[derive(Clone, Debug)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    pub(crate) entries: Vec<u64>,
    pub(crate) growth_entries: Vec<u64>,
    pub(crate) holders: Vec<u32>,
    pub(crate) threads: Vec<usize>,
}

/// Peers side by side, in one run.
#[derive(Parser)]
#[command(name = "peers")]
struct Args {
    /// The comparison to run.
    #[arg(value_enum, default_value = "index")]
    what: Comparison,
    /// JSON lines on standard output; text goes to standard error.
    #[arg(long)]
    json: bool,
    /// Rounds of all sides, at least five.
    #[arg(long = "runs", default_value_t = RUNS_MIN)]
    rounds: usize,
    /// Pairs of node and block, in thousands.
    #[arg(long, value_delimiter = ',')]
    entries_k: Vec<u64>,
    /// Nodes per chain: up to four, so that no node holds a block twice.
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u32).range(1..=4))]
    holders: Vec<u32>,
    /// Threads that apply events and look up.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Seconds per figure of `consensus`.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Data directory for `consensus` members and tiers; on disk.
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    data: PathBuf,
    /// The side for `tier-side`.
    #[arg(long, hide = true, value_enum, default_value = "ours")]
    side: tier::TierKind,
    /// The shape's number for `tier-side`.
    #[arg(long, hide = true, default_value_t = 0)]
    shape: usize,
    /// Install a missing etcd from the distribution.
    #[arg(long)]
    install: bool,
    /// The load generator `chaos-ingest`, for `consensus`.
    #[arg(long, requires = "router")]
    ingest: Option<PathBuf>,
    /// The router program `kvfleet`.
    #[arg(long, requires = "ingest")]
    router: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if matches!(args.what, Comparison::TierSide) {
        return tier::serve(args.side, args.shape, &args.data);
    }
    let printer = Printer { json: args.json };
    let entries = |standard: &[u64]| match &args.entries_k[..] {
        [] => standard.iter().map(|millions| millions * 1_000_000).collect(),
        thousands => thousands.iter().map(|thousand| thousand * 1_000).collect(),
    };
    let effort = Effort {
        rounds: args.rounds.max(RUNS_MIN),
        entries: entries(&[1, 10]),
        growth_entries: entries(&[1, 10, 50]),
        holders: args.holders.clone(),
        threads: args.threads.iter().map(|&threads| threads.max(1)).collect(),
    };
    printer.text(&format!("seed {}, {} rounds", chains::SEED, effort.rounds));
    match args.what {
        Comparison::Index => index::run(&effort, printer),
        Comparison::Growth => growth::run(&effort, printer),
        Comparison::Tier | Comparison::TierSide => tier::run(&effort, &args.data, printer),
        Comparison::Consensus => {
            let span = Duration::from_secs(args.seconds.max(1));
            let programs = args.ingest.zip(args.router);
            let programs = programs.map(|(ingest, router)| Programs { ingest, router });
            let (rounds, install) = (effort.rounds, args.install);
            let setup = Setup { rounds, span, data: args.data, install, programs };
            consensus::run(&setup, printer)
        }
    }
}
