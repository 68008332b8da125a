//! `benches NAME`: one bench by name, as a table or as JSON lines. Run it through `cargo xtask
//! bench`, which builds it for release.
//!
//! Not here: the harness (`lib.rs`) and the benches themselves (one file each beside this one).

mod busy_loops;
mod choose;
mod decide;
mod events;
mod evict;
mod failover;
mod frame;
mod gateway;
mod get;
#[cfg(feature = "gpu")]
mod gpu;
mod hash;
mod host;
mod index;
mod layers;
mod network;
mod node_process;
mod overlap;
mod overload;
mod prediction;
mod prefill;
mod proxy;
mod replay;
mod routing;
mod snapshot;
mod ssd;
mod start;
mod tiers;
mod transport;
mod tuning;
mod window;

use std::path::PathBuf;

use benches::{BenchRow, RUNS_MIN, table};
use clap::Parser;

/// The allocator of the `kvfleet` program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A bench.
struct Bench {
    name: &'static str,
    about: &'static str,
    run: fn(&Effort) -> anyhow::Result<Vec<BenchRow>>,
}

/// Amount of work per bench.
#[derive(Clone, Debug)]
pub(crate) struct Effort {
    /// Runs of both sides per row.
    pub(crate) runs: usize,
    /// A tenth of the size and of the repetitions: a smoke test without valid figures.
    pub(crate) quick: bool,
    /// Run only rows with this text in their names; empty for all.
    only: String,
}

impl Effort {
    /// `full`, or a tenth of it when quick.
    pub(crate) fn scaled(&self, full: u64) -> u64 {
        if self.quick { full.div_ceil(10) } else { full }
    }

    /// Whether the row of this name is selected.
    pub(crate) fn is_selected(&self, name: &str) -> bool {
        name.contains(&self.only)
    }
}

const BENCHES: &[Bench] = &[
    Bench { name: "index", about: index::ABOUT, run: index::run },
    Bench { name: "hash", about: hash::ABOUT, run: hash::run },
    Bench { name: "snapshot", about: snapshot::ABOUT, run: snapshot::run },
    Bench { name: "frame", about: frame::ABOUT, run: frame::run },
    Bench { name: "get", about: get::ABOUT, run: get::run },
    Bench { name: "choose", about: choose::ABOUT, run: choose::run },
    Bench { name: "decide", about: decide::ABOUT, run: decide::run },
    Bench { name: "events", about: events::ABOUT, run: events::run },
    Bench { name: "ssd", about: ssd::ABOUT, run: ssd::run },
    #[cfg(feature = "gpu")]
    Bench { name: "gpu", about: gpu::ABOUT, run: gpu::run },
    Bench { name: "start", about: start::ABOUT, run: start::run },
    Bench { name: "evict", about: evict::ABOUT, run: evict::run },
    Bench { name: "tiers", about: tiers::ABOUT, run: tiers::run },
    Bench { name: "window", about: window::ABOUT, run: window::run },
    Bench { name: "overlap", about: overlap::ABOUT, run: overlap::run },
    Bench { name: "prefill", about: prefill::ABOUT, run: prefill::run },
    Bench { name: "layers", about: layers::ABOUT, run: layers::run },
    Bench { name: "overload", about: overload::ABOUT, run: overload::run },
    Bench { name: "transport", about: transport::ABOUT, run: transport::run },
    Bench { name: "host", about: host::ABOUT, run: host::run },
    Bench { name: "network", about: network::ABOUT, run: network::run },
    Bench { name: "proxy", about: proxy::ABOUT, run: proxy::run },
    Bench { name: "failover", about: failover::ABOUT, run: failover::run },
    Bench { name: "prediction", about: prediction::ABOUT, run: prediction::run },
    Bench { name: "routing", about: routing::ABOUT, run: routing::run },
    Bench { name: "tuning", about: tuning::ABOUT, run: tuning::run },
];

/// Peers side by side, judged by ratio.
#[derive(Parser)]
#[command(name = "benches")]
struct Args {
    /// Name of the bench; without one, all names are listed with their comparisons.
    name: Option<String>,
    /// One JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
    /// Runs of both sides per row, at least five.
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// A tenth of the work: a smoke test without valid figures.
    #[arg(long)]
    quick: bool,
    /// Only the rows with this text in their names (`ssd`).
    #[arg(long, default_value = "")]
    only: String,
    /// Instead of a bench: the process that fills a tier with this many blocks (`start`).
    #[arg(long, hide = true, requires = "fill_dir")]
    fill_blocks: Option<u64>,
    /// Its directory.
    #[arg(long, hide = true)]
    fill_dir: Option<PathBuf>,
    /// Instead of a bench: the node that serves its host (`host`).
    #[arg(long, hide = true)]
    serve_host: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let (Some(blocks), Some(dir)) = (args.fill_blocks, &args.fill_dir) {
        return start::serve(dir, blocks);
    }
    if let Some(dir) = &args.serve_host {
        return node_process::serve(dir);
    }
    let Some(name) = &args.name else {
        BENCHES.iter().for_each(|bench| println!("{}\t{}", bench.name, bench.about));
        return Ok(());
    };
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == name) else {
        let names: Vec<_> = BENCHES.iter().map(|bench| bench.name).collect();
        anyhow::bail!("no bench is named {name:?}: use one of {}", names.join(", "));
    };
    let rows = (bench.run)(&Effort { runs: args.runs.max(RUNS_MIN), quick: args.quick, only: args.only })?;
    if args.json {
        for row in &rows {
            println!("{}", serde_json::to_string(row)?);
        }
    } else {
        println!("{}: {}\n\n{}", bench.name, bench.about, table(&rows));
    }
    Ok(())
}
