//! Arguments of `crosscheck`.

use std::path::PathBuf;

use clap::Args;
use kvfleet_sim::generate::TrafficKind;

use super::cluster::{ShapeArgs, block_tokens_parser};
use super::trace::{TraceFormat, parse_kind};

/// `kvfleet crosscheck`.
#[derive(Clone, Debug, Args)]
pub struct CrosscheckArgs {
    /// The trace: one JSON object per line. Without it, one is generated for each run.
    #[arg(value_name = "TRACE")]
    pub trace: Option<PathBuf>,
    /// Format of the trace.
    #[arg(long, value_enum, default_value_t = TraceFormat::Auto)]
    pub format: TraceFormat,
    /// Tokens of one block; by default those of the format.
    #[arg(long, value_name = "N", value_parser = block_tokens_parser())]
    pub block_tokens: Option<u32>,
    /// Kind of the generated traces: consumer, business or agent.
    #[arg(long, default_value = "business", value_parser = parse_kind)]
    pub kind: TrafficKind,
    /// Requests of each run.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// Runs, each on a new cluster: generated traces with different seeds, or the same trace again.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub runs: u32,
    /// Seed of the first run; later runs count up from it.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The cluster to start and to simulate in virtual time.
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Serve one request after the other, each finished and known everywhere before the next, so
    /// that timing has no effect. Without it, requests start at their times, and --time-scale sets
    /// the compute time.
    #[arg(long)]
    pub lockstep: bool,
    /// Load, as a share of the simulated fleet's throughput.
    #[arg(long, value_name = "SHARE", default_value_t = 0.7, conflicts_with = "lockstep")]
    #[arg(value_parser = super::trace::parse_load)]
    pub load: f64,
    /// Print one JSON object per line and run instead of text.
    #[arg(long)]
    pub json: bool,
}
